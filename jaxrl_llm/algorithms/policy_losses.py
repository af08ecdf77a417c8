"""The policy's loss, per token and before aggregation.

A loss is `fn(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences, **constants)`:

    logprobs       float [...], of the policy that is trained, each token's given all before it
    old_logprobs   float [...], of the policy before this update
    advantages     float [...]
    mask           bool or number [...], the tokens that the policy chose
    sequence_ids   int32 [...], for losses that look at whole sequences; num_sequences at padding
    num_sequences  S, static

All token arrays have one shape. What stands outside the mask has no influence, not even NaN or infinity.
The result goes to `sum(weights * token_loss)` with the weights of `aggregation.token_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments

# Far beyond any clip range, and exp(20) = 5e8 is still a number to calculate with in float32.
_MAX_LOG_RATIO = 20.0


class PolicyLoss(NamedTuple):
    """What a loss returns."""

    token_loss: jax.Array  # float32 [...], 0 outside the mask
    metrics: dict[str, tuple[jax.Array, jax.Array]]  # sum over valid tokens and their number: both add up


def vanilla(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_ratio_c: float,
) -> PolicyLoss:
    """Clipped surrogate loss of PPO (arXiv:1707.06347, equation 7) with dual clip (arXiv:1912.09729).

    With ratio = exp(logprob - old_logprob), the log-ratio clamped to +-20:

        loss = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high))
        loss = min(loss, -A clip_ratio_c)    where A < 0; clip_ratio_c > 1

    Metrics: `actor/ppo_kl`, mean of old_logprob - logprob; `actor/pg_clipfrac`, how often the clipped term is
    the larger; `actor/pg_clipfrac_lower`, how often the dual clip holds.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    log_ratio = jnp.where(valid, segments.as_float(logprobs) - segments.as_float(old_logprobs), 0)
    log_ratio = jnp.clip(log_ratio, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    advantages = jnp.where(valid, segments.as_float(advantages), 0)
    ratio = jnp.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    surrogate = jnp.maximum(unclipped, clipped)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    return PolicyLoss(
        token_loss=jnp.where(negative, jnp.minimum(surrogate, bound), surrogate),
        metrics={
            "actor/ppo_kl": _mean_parts(-log_ratio, valid, ratio.dtype),
            "actor/pg_clipfrac": _mean_parts(clipped > unclipped, valid, ratio.dtype),
            "actor/pg_clipfrac_lower": _mean_parts(negative & (surrogate > bound), valid, ratio.dtype),
        },
    )


def sft(
    logprobs: jax.Array,
    old_logprobs: jax.Array | None,
    advantages: jax.Array | None,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
) -> PolicyLoss:
    """Negative log-likelihood of demonstrations, loss = -logprob. `old_logprobs` and `advantages` are not
    read and may be None."""
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    return PolicyLoss(token_loss=jnp.where(valid, -segments.as_float(logprobs), 0), metrics={})


POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {"vanilla": vanilla, "sft": sft}


def _mean_parts(values: jax.Array, valid: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    return jnp.where(valid, values, 0).sum(dtype=dtype), valid.sum().astype(dtype)
