"""One measurement for bench_algorithms.py: of verl. Runs in an environment with verl and torch, not in this one."""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import Any

import torch
from bench_algorithms_shared import GROUP, Request, Result, answer, batch, measure
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

OURS = {  # arguments of verl's advantages by our names
    "token_level_rewards": "token_rewards",
    "values": "values",
    "reward_baselines": "baseline_rewards",
    "old_log_probs": "old_logprobs",
    "sum_pi_squared": "sum_pi_squared",
}


def work(request: Request) -> Result:
    """Correction and advantages, then the loss and its gradient."""
    advantage = core_algos.get_adv_estimator_fn(request.advantage)
    loss = core_algos.get_policy_loss_fn(request.loss)
    takes = inspect.signature(advantage).parameters
    actor, constants = _configs(request)
    names = {OURS[name] for name in takes if name in OURS} | {"mask", "old_logprobs", "logprobs"}
    names |= {"rollout_logprobs"} if request.correction else set()
    tensors = {name: torch.from_numpy(array).float() for name, array in batch(request, names).items()}
    inputs = sum(tensor.nbytes for tensor in tensors.values())
    given: dict[str, Any] = {name: tensors[ours] for name, ours in OURS.items() if ours in tensors}
    given |= {"index": batch(request, ["group_ids"])["group_ids"], **constants}
    logprobs = tensors["logprobs"].requires_grad_()

    def run() -> tuple[float, torch.Tensor]:
        logprobs.grad = None
        mask, is_weights = tensors["mask"], None
        if request.correction:
            with torch.no_grad():
                found, mask, _ = compute_rollout_correction_and_rejection_mask(
                    tensors["old_logprobs"], tensors["rollout_logprobs"], mask, **request.correction
                )
            is_weights = found.batch["rollout_is_weights"] if found is not None else None
        more = {**given, "response_mask": mask, "rollout_is_weights": is_weights}
        advantages, _ = advantage(**{name: value for name, value in more.items() if name in takes})
        value, _ = loss(
            old_log_prob=tensors["old_logprobs"],
            log_prob=logprobs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=request.aggregation,
            config=actor,
            rollout_is_weights=is_weights,
        )
        value.backward()
        assert logprobs.grad is not None
        return value.item(), logprobs.grad

    return measure(run, request, inputs, 0.0)


def _configs(request: Request) -> tuple[ActorConfig, dict[str, Any]]:
    """The constants, where the losses look for them, and as arguments of the advantages."""

    def known(kind: Any) -> dict[str, Any]:
        return {name: value for name, value in request.constants.items() if name in inspect.signature(kind).parameters}

    losses = PolicyLossConfig(loss_mode=request.loss, **known(PolicyLossConfig))
    fixed: dict[str, Any] = {"strategy": "fsdp", "rollout_n": GROUP, "ppo_micro_batch_size_per_gpu": 1}
    actor = ActorConfig(**fixed, policy_loss=losses, **known(ActorConfig))
    return actor, {**request.constants, "config": AlgoConfig(**known(AlgoConfig))}


if __name__ == "__main__":
    answer(work)
