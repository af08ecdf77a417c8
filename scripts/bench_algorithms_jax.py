"""One measurement for bench_algorithms.py: of jaxrl_llm, in two compiled programs, as the learner has it."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
from bench_algorithms_shared import Request, Result, answer, batch, measure

from jaxrl_llm import formulas
from jaxrl_llm.algorithms.advantages import Experience
from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.correction import correct


def work(request: Request) -> Result:
    """Correction and advantages, then the loss and its gradient."""
    S = request.sequences
    advantage = formulas.advantage(request.advantage, request.constants)
    loss = formulas.loss(request.loss, request.constants)

    def prepare(arrays: dict[str, jax.Array]) -> Any:
        mask, is_weights, metrics = arrays["mask"], None, {}
        if request.correction:
            old, rollout, ids = (arrays[name] for name in ("old_logprobs", "rollout_logprobs", "sequence_ids"))
            correction = correct(old, rollout, mask, sequence_ids=ids, num_sequences=S, **request.correction)
            mask, is_weights, metrics = correction.mask, correction.weights, correction.metrics
        unread: dict[str, Any] = dict.fromkeys(Experience._fields)
        fields = {name: array for name, array in arrays.items() if name in unread}
        experience = Experience(**{**unread, **fields, "mask": mask, "is_weights": is_weights})
        advantages, returns = advantage(experience)
        # Returns are for a critic.
        return advantages, mask, is_weights, metrics, returns if "values" in advantage.reads else None

    def total(logprobs: Any, old: Any, ids: Any, advantages: Any, mask: Any, is_weights: Any) -> Any:
        weights = token_weights(request.aggregation, mask, ids, S, batch_sequences=S, length_norm=request.tokens)
        more = {"sequence_ids": ids, "num_sequences": S, "is_weights": is_weights, "key": jax.random.key(0)}
        result = loss(logprobs, old, advantages, mask, **more)
        return jnp.sum(weights * result.token_loss), result.metrics

    names = {*advantage.reads, *(["rollout_logprobs"] if request.correction else [])}
    arrays = {k: jnp.asarray(v) for k, v in batch(request, {*names, "mask", "sequence_ids", "old_logprobs"}).items()}
    logprobs = jnp.asarray(batch(request, ["logprobs"])["logprobs"])
    inputs = sum(x.nbytes for x in (*arrays.values(), logprobs))
    token_arrays = logprobs, arrays["old_logprobs"], arrays["sequence_ids"]
    start = time.perf_counter()
    prepared = jax.jit(prepare).lower(arrays).compile()
    shapes = jax.eval_shape(prepare, arrays)[:3]
    trained = jax.jit(jax.value_and_grad(total, has_aux=True)).lower(*token_arrays, *shapes).compile()
    compile_seconds = time.perf_counter() - start

    def run() -> tuple[jax.Array, jax.Array]:
        advantages, mask, is_weights, *_ = prepared(arrays)
        (value, _), gradient = trained(*token_arrays, advantages, mask, is_weights)
        return jax.block_until_ready((value, gradient))

    return measure(run, request, inputs, compile_seconds)


if __name__ == "__main__":
    answer(work)
