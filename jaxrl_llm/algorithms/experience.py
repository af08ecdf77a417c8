"""What an advantage function sees and what it returns, and what all of them need: which of it counts, and whitening."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.types import UserError


class Experience(NamedTuple):
    """One whole batch of S sequences. What no algorithm in use needs is None."""

    rewards: jax.Array  # float [S], total reward of each sequence; anything, also NaN, where not valid
    group_ids: jax.Array  # int32 [S], index of the sequence's prompt; S at padding
    valid: jax.Array  # bool [S]; False: no reward, so advantage 0, and it touches nobody's baseline
    sequence_ids: jax.Array  # int32 [...], S at padding
    mask: jax.Array  # bool [...], tokens that the policy chose and that count
    token_rewards: jax.Array  # float [...], `rewards` where they are given; may stand on a token outside the mask
    old_logprobs: jax.Array  # float [...]
    values: jax.Array | None = None  # float [...], the critic's value of the state before the token
    sum_pi_squared: jax.Array | None = None  # float [...], sum over the vocabulary of the squared probability
    is_weights: jax.Array | None = None  # float [...], importance weights from rollout correction
    process_rewards: jax.Array | None = None  # float [...], of a process reward model, dense
    baseline_rewards: jax.Array | None = None  # float [S], of the greedy answer to the same prompt
    components: jax.Array | None = None  # float [S, K], the reward's components
    component_weights: jax.Array | None = None  # float [K]


class Advantages(NamedTuple):
    """Both float32 [...] (float64 for float64 rewards) and 0 outside the mask and where a sequence has no reward."""

    advantages: jax.Array
    returns: jax.Array  # what a critic learns to predict; where there is none, the advantages again


def required(experience: Experience, field: str) -> jax.Array:
    """The field's array; UserError if it is None."""
    array = getattr(experience, field)
    if array is None:
        raise UserError(
            f"this advantage needs Experience.{field}, expected an array, got None: choose an advantage that does "
            "without, or have the batch made with it"
        )
    return array


def valid_sequences(experience: Experience) -> jax.Array:
    """bool [S]: the sequences that have a reward and are no padding."""
    return segments.valid_tokens(experience.valid, experience.group_ids, experience.rewards.shape[0])


def valid_tokens(experience: Experience) -> jax.Array:
    """bool [...]: the tokens in the mask of these sequences."""
    return experience.mask.astype(bool) & segments.to_tokens(valid_sequences(experience), experience.sequence_ids)


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
    # The highest is taken off first, so that equal values are exactly 0 before they are averaged.
    highest = jnp.max(values, where=mask, initial=-jnp.inf)
    below = jnp.where(mask, values - highest, 0)
    centred = jnp.where(mask, below - below.sum() / jnp.maximum(count, 1), 0)
    variance = (centred**2).sum() / jnp.maximum(count - ddof, 1)
    shifted = centred if shift_mean else jnp.where(mask, values, 0)
    return shifted * jax.lax.rsqrt(variance + epsilon)
