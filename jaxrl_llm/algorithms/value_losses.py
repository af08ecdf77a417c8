"""The critic's loss, per token and before aggregation."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments


class ValueLoss(NamedTuple):
    """What a value loss returns."""

    token_loss: jax.Array  # float32 [...], 0 outside the mask
    metrics: dict[str, tuple[jax.Array, jax.Array]]  # sum over valid tokens and their number: both add up


def clipped(
    values: jax.Array,
    old_values: jax.Array,
    returns: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    value_clip: float,
) -> ValueLoss:
    """Squared error of the value, pessimistic about moves away from the old value (as in OpenAI's implementation of
    PPO, arXiv:1707.06347).

        loss = 1/2 max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    Args:
        values: float [...], V, of the critic that is trained: each token's is of the state before it.
        old_values: float [...], V_old, of the critic before this update.
        returns: float [...], R.
        mask: bool or number [...], the tokens that have a loss. What stands outside has no influence, not even NaN.
        sequence_ids: int32 [...]; num_sequences at padding.
        num_sequences: S, static.
        value_clip: in units of the value.

    Returns:
        ValueLoss, float32 (float64 for float64); the metric `critic/vf_clipfrac` is how often the clipped term is the
        larger.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    new, old, target = (jnp.where(valid, segments.as_float(array), 0) for array in (values, old_values, returns))
    free_error = (new - target) ** 2
    clipped_error = (jnp.clip(new, old - value_clip, old + value_clip) - target) ** 2
    held = valid & (clipped_error > free_error)
    dtype = free_error.dtype
    return ValueLoss(
        token_loss=jnp.maximum(free_error, clipped_error) / 2,
        metrics={"critic/vf_clipfrac": (held.sum(dtype=dtype), valid.sum().astype(dtype))},
    )
