"""From a packed batch and what the models say of its tokens to a complete one: corrections, rewards, advantages.

Pure functions, called inside the compiled step. Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.advantages import Experience
from jaxrl_llm.algorithms.correction import correct
from jaxrl_llm.algorithms.kl import adapted_coefficient, kl_penalty
from jaxrl_llm.algorithms.reweighting import pf_ppo
from jaxrl_llm.learner.actor import Objective, RewardKL
from jaxrl_llm.learner.trainable import Metrics, single, token_mean
from jaxrl_llm.types import SequenceBatch, TrainBatch


class TokenViews(NamedTuple):
    """What the models say of each token, float32 [A, M, B, T]; None where nobody was asked."""

    old_logprobs: jax.Array
    entropy: jax.Array | None = None
    sum_pi_squared: jax.Array | None = None
    reference_logprobs: jax.Array | None = None
    values: jax.Array | None = None
    process_rewards: jax.Array | None = None


def demonstrations(batch: SequenceBatch) -> TrainBatch:
    """A batch without old policy and rewards (SFT): every action's advantage is 1."""
    zeros = jnp.zeros(batch.token_ids.shape, jnp.float32)
    return TrainBatch(batch, zeros, None, jnp.where(batch.action_mask, 1.0, 0.0), batch.action_mask)


def complete(
    objective: Objective, batch: SequenceBatch, views: TokenViews, kl_coef: jax.Array | None, key: jax.Array
) -> tuple[TrainBatch, jax.Array | None, Metrics]:
    """The batch with corrections and advantages; the coefficient of the KL in the reward for the next step; metrics."""
    assert objective.advantage is not None
    S = batch.group_ids.shape[0]
    mask, is_weights, metrics = batch.action_mask, None, {}
    if not objective.bypass:
        correction = correct(
            views.old_logprobs,
            batch.sampler_logprobs,
            mask,
            sequence_ids=batch.sequence_ids,
            num_sequences=S,
            **(objective.correction or {}),
        )
        mask, is_weights, metrics = correction.mask, correction.weights, correction.metrics
    rewards, token_rewards = batch.rewards, at_last_token(batch.rewards, mask, batch.sequence_ids)
    if objective.reward_kl is not None:
        assert kl_coef is not None
        assert views.reference_logprobs is not None
        kl = kl_penalty(views.old_logprobs, views.reference_logprobs, objective.reward_kl.estimator, mask=mask)
        token_rewards = token_rewards - kl_coef * kl
        rewards = rewards - kl_coef * segments.sequence_sum(kl, mask, batch.sequence_ids, S)
        kl_coef, kl_metrics = _controlled(objective.reward_kl, kl_coef, kl, mask, batch)
        metrics = metrics | kl_metrics
    experience = Experience(
        rewards=rewards,
        group_ids=batch.group_ids,
        valid=batch.valid,
        sequence_ids=batch.sequence_ids,
        mask=mask,
        token_rewards=token_rewards,
        old_logprobs=views.old_logprobs,
        values=views.values,
        sum_pi_squared=views.sum_pi_squared,
        is_weights=is_weights,
        process_rewards=views.process_rewards,
        baseline_rewards=batch.baseline_rewards,
        components=batch.components,
        component_weights=batch.component_weights,
    )
    advantages, returns = objective.advantage(experience)
    train_batch = TrainBatch(
        batch,
        views.old_logprobs,
        views.reference_logprobs,
        advantages,
        mask,
        is_weights,
        views.values,
        returns if views.values is not None else None,
        _sequence_weights(objective, batch, key),
    )
    return train_batch, kl_coef, metrics | _metrics(train_batch, views, objective.bypass)


def at_last_token(rewards_S: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """[...]: each sequence's reward at its last token in `mask`, 0 elsewhere."""
    S = rewards_S.shape[0]
    places = jnp.arange(mask.size, dtype=jnp.int32).reshape(mask.shape)
    last_S = jax.ops.segment_max(jnp.where(mask, places, -1).ravel(), sequence_ids.ravel(), S)
    is_last = mask & (places == segments.to_tokens(last_S, sequence_ids))
    return jnp.where(is_last, segments.to_tokens(rewards_S, sequence_ids), 0.0)


def _controlled(
    reward_kl: RewardKL, kl_coef: jax.Array, kl: jax.Array, mask: jax.Array, batch: SequenceBatch
) -> tuple[jax.Array, Metrics]:
    """The next coefficient, from the mean over sequences of the mean KL of their tokens."""
    S = batch.group_ids.shape[0]
    kl_S = segments.sequence_mean(kl, mask, batch.sequence_ids, S)
    present_S = segments.sequence_lengths(mask, batch.sequence_ids, S) > 0
    mean = kl_S.sum() / jnp.maximum(present_S.sum(), 1)
    metrics = {"actor/reward_kl_penalty": single(mean), "actor/reward_kl_penalty_coeff": single(kl_coef)}
    if not reward_kl.target:
        return kl_coef, metrics
    return (
        adapted_coefficient(kl_coef, mean, target=reward_kl.target, horizon=reward_kl.horizon, num_sequences=S),
        metrics,
    )


def _sequence_weights(objective: Objective, batch: SequenceBatch, key: jax.Array) -> jax.Array | None:
    if objective.reweight is None:
        return None
    method, power = objective.reweight
    return pf_ppo(batch.rewards, batch.valid, key, method=method, power=power)


def _metrics(batch: TrainBatch, views: TokenViews, bypass: bool) -> Metrics:
    mask, sampler = batch.mask, batch.sequences.sampler_logprobs
    out: Metrics = {
        "critic/advantages/mean": token_mean(batch.advantages, mask),
        "critic/advantages/max": single(jnp.where(mask, batch.advantages, -jnp.inf).max()),
        "critic/advantages/min": single(jnp.where(mask, batch.advantages, jnp.inf).min()),
    }
    if not bypass:
        # The sampler's and the learner's opinion of the same tokens under the same weights: differs by rounding only.
        difference = jnp.where(batch.sequences.action_mask, views.old_logprobs - sampler, 0.0)
        out["training/rollout_logprobs_diff_mean"] = token_mean(jnp.abs(difference), batch.sequences.action_mask)
        out["training/rollout_logprobs_diff_max"] = single(jnp.abs(difference).max())
    if views.entropy is not None:
        out["actor/entropy"] = token_mean(views.entropy, batch.sequences.action_mask)
    if views.process_rewards is not None:
        out["critic/process_rewards/mean"] = token_mean(views.process_rewards, mask)
    if batch.values is not None and batch.returns is not None:
        out["critic/values/mean"] = token_mean(batch.values, mask)
        out["critic/returns/mean"] = token_mean(batch.returns, mask)
        out["critic/vf_explained_var"] = single(_explained(batch.values, batch.returns, mask))
    return out


def _explained(values: jax.Array, returns: jax.Array, mask: jax.Array) -> jax.Array:
    """Part of the returns' variance that the values explain; 0 where there is none to explain."""

    def variance(x: jax.Array) -> jax.Array:
        mean = jnp.where(mask, x, 0.0).sum() / jnp.maximum(mask.sum(), 1)
        return jnp.where(mask, (x - mean) ** 2, 0.0).sum()

    of_returns = variance(returns)
    return jnp.where(of_returns > 0, 1 - variance(returns - values) / jnp.where(of_returns > 0, of_returns, 1), 0)
