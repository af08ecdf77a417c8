"""The two sides of a run, the learner's devices and the engine's, and one training step that both work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jaxrl_llm import assemble
from jaxrl_llm.config import Config
from jaxrl_llm.learner.actor import Objective
from jaxrl_llm.learner.programs import Programs
from jaxrl_llm.planning.report import Program
from jaxrl_llm.planning.shapes import Workload, bytes_a_device

WORKING = "activations and temporaries"

Say = Callable[[str], None]  # is told what takes long


class Side(NamedTuple):
    """What one side's devices hold and run; bytes on one device."""

    held: dict[str, float]  # always, by kind
    phases: dict[str, dict[str, float]]  # beside that, by kind
    programs: dict[str, Program]
    attention: str  # the program of its rows


def workload(c: Config) -> Workload:
    """One step of a config, every sequence as long as it may be."""
    n = 1 if c.task == "sft" else c.rollout.n
    longest = c.data.max_prompt_length + c.data.max_response_length
    spec = assemble.pack_spec(c, 0, frozenset())
    row = next(length for length in spec.row_lengths if length >= longest)
    rows = -(-c.learner.mini_batch_size * n // (row // longest if c.learner.packing else 1))
    return Workload(
        prompts=c.data.train_batch_size,
        samples=n,
        prompt_length=c.data.max_prompt_length,
        response_length=c.data.max_response_length,
        row_length=row,
        rows=c.learner.micro_batch_rows,
        mini_batches=spec.mini_batches,
        micro_batches=-(-rows // c.learner.micro_batch_rows),
        epochs=c.learner.epochs,
    )


def held_by_learner(made: Programs) -> dict[str, float]:
    """Bytes on one device, by kind."""
    state = made.abstract
    kinds = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "reference": made.abstract_reference,
        "critic": state.critic,
        "reward model": state.reward_model,
    }
    return {kind: float(bytes_a_device(tree)) for kind, tree in kinds.items() if tree is not None}


def forward_models(o: Objective) -> int:
    """How many models of the policy's shape say log-probabilities of a batch before it is learned from."""
    if o.advantage is None:
        return 0
    process_rewards = "process_rewards" in o.advantage.reads
    return (not o.bypass) + bool(o.kl_coef or o.reward_kl or process_rewards) + process_rewards


def prefills(w: Workload, prefill_batch: int) -> float:
    """Calls of the prefill in a step."""
    return -(-w.prompts // prefill_batch)


def decoded_tokens(w: Workload, slots: int) -> float:
    """Tokens that each slot decodes in a step, one after the other."""
    return -(-w.sequences // slots) * w.response_length


def mean_context(w: Workload) -> float:
    """Tokens that a decoded one sees, as a fraction of all that a sequence may have."""
    return (w.prompt_length + w.response_length / 2) / w.length
