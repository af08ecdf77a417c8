"""How much better a sample was than expected: one number a sequence.

An advantage function is `fn(rewards_S, group_ids_S, valid_S, num_groups, **constants) -> advantages_S`:

    rewards_S    float [S], one reward a sequence; anything, also NaN, where not valid
    group_ids_S  int32 [S], index of the sequence's prompt, in 0 .. num_groups - 1; num_groups at padding
    valid_S      bool [S], False for a sequence without a reward: it gets advantage 0 and does not touch the
                 baseline of the others
    num_groups   static

The caller spreads the result with `segments.to_tokens(advantages_S, sequence_ids)` and masks it.
Samples of one group may lie anywhere, and groups may differ in size.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments


def grpo(
    rewards_S: jax.Array,
    group_ids_S: jax.Array,
    valid_S: jax.Array,
    num_groups: int,
    *,
    normalize_by_std: bool = True,
    epsilon: float = 1e-6,
) -> jax.Array:
    """Group-relative advantage, A = (r - mean) / (std + epsilon) with the std over n - 1 (GRPO,
    arXiv:2402.03300, section 4.1.2). Without `normalize_by_std`, A = r - mean (Dr. GRPO, arXiv:2503.20783).

    A group with one valid sample has no baseline: mean 0 and std 1. Equal rewards give exactly 0.
    """
    advantages_S, count_S = _baselined(rewards_S, group_ids_S, valid_S, num_groups)
    if not normalize_by_std:
        return advantages_S
    squares_S = jnp.where(count_S > 1, advantages_S**2, 0)
    squares_S = segments.to_tokens(segments.sequence_sum(squares_S, valid_S, group_ids_S, num_groups), group_ids_S)
    std_S = jnp.sqrt(squares_S / jnp.maximum(count_S - 1, 1))
    return advantages_S / (jnp.where(std_S > 0, std_S, 1) + epsilon)


def rloo(rewards_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array, num_groups: int) -> jax.Array:
    """Leave-one-out baseline: the reward less the mean of the group's other samples (RLOO, arXiv:2402.14740),
    computed as (r - mean) n / (n - 1). A group with one valid sample has baseline 0; equal rewards give
    exactly 0."""
    advantages_S, count_S = _baselined(rewards_S, group_ids_S, valid_S, num_groups)
    return advantages_S * jnp.where(count_S > 1, count_S / jnp.maximum(count_S - 1, 1), 1)


ADVANTAGES: dict[str, Callable[..., jax.Array]] = {"grpo": grpo, "rloo": rloo}


def whiten(
    values: jax.Array, mask: jax.Array, *, shift_mean: bool = True, ddof: int = 1, epsilon: float = 1e-8
) -> jax.Array:
    """Scales the values in `mask` to variance 1 and, unless `shift_mean` is False, shifts them to mean 0:
    (x - mean) / sqrt(var + epsilon). With `shift_mean=False`, x / sqrt(var + epsilon).

    Args:
        values: float [...]; the statistics are over all of it, so over the whole batch, not a shard or a row.
        mask: bool or number, shape of `values`.
        ddof: the variance divides by n - ddof.

    Returns:
        float32 [...] (float64 for float64), 0 outside the mask. Equal values, or one alone, become exactly 0.
    """
    mask = mask.astype(bool)
    values = segments.as_float(values)
    count = mask.sum()
    highest = jnp.max(values, where=mask, initial=-jnp.inf)  # as in _baselined
    below = jnp.where(mask, values - highest, 0)
    centred = jnp.where(mask, below - below.sum() / jnp.maximum(count, 1), 0)
    variance = (centred**2).sum() / jnp.maximum(count - ddof, 1)
    shifted = centred if shift_mean else jnp.where(mask, values, 0)
    return shifted * jax.lax.rsqrt(variance + epsilon)


def _baselined(
    rewards_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Reward less its group's mean, the reward itself where it is alone in its group and 0 where not valid;
    and the number of valid samples in the group. Both [S] and floating-point.

    The group's highest reward is taken off first, so that equal rewards are exactly 0 before they are
    averaged: the mean of three float32 0.7 is off by 6e-8, which division by a std of 0 + 1e-6 makes 0.06.
    """
    valid_S = segments.valid_tokens(valid_S, group_ids_S, num_groups)
    rewards_S = segments.as_float(rewards_S)
    highest_G = jax.ops.segment_max(jnp.where(valid_S, rewards_S, -jnp.inf), group_ids_S, num_groups)
    below_S = jnp.where(valid_S, rewards_S - segments.to_tokens(highest_G, group_ids_S), 0)
    mean_G = segments.sequence_mean(below_S, valid_S, group_ids_S, num_groups)
    count_S = segments.to_tokens(segments.sequence_lengths(valid_S, group_ids_S, num_groups), group_ids_S)
    baselined_S = jnp.where(count_S == 1, rewards_S, below_S - segments.to_tokens(mean_G, group_ids_S))
    return jnp.where(valid_S, baselined_S, 0), count_S.astype(rewards_S.dtype)
