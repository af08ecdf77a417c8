"""How often each sequence counts: PF-PPO draws the samples of a batch again, by their rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.types import UserError

METHODS = ("pow", "max_min", "max_random")


def pf_ppo(rewards: jax.Array, valid: jax.Array, key: jax.Array, *, method: str, power: float = 2.0) -> jax.Array:
    """Policy filtration (PF-PPO, arXiv:2409.06957): rewards are trusted most at their ends, so samples from there are
    drawn more often. With N valid samples in the batch, N are drawn with replacement and probability ~ w:

        pow         w = |r|^power
        max_min     w = 1 where r is the batch's highest or lowest reward, else 0
        max_random  w = 0.4 where r is the highest, else 0.1

    The rows stay where they are and count as often as they were drawn; the loss is that of the batch drawn.

    Args:
        rewards: float [S].
        valid: bool [S]; what stands at others has no influence.
        key: a random key of its own for each batch.
        method: one of METHODS.
        power: read by "pow" only.

    Returns:
        int32 [S], their sum N; 0 where not valid. All weights 0: each sample with the same probability.

    Raises:
        UserError: unknown method.
    """
    rewards = jnp.where(valid, segments.as_float(rewards), 0)
    highest = jnp.where(valid, rewards, -jnp.inf).max()
    lowest = jnp.where(valid, rewards, jnp.inf).min()
    if method == "pow":
        weights = jnp.abs(rewards) ** power
    elif method == "max_min":
        weights = ((rewards == highest) | (rewards == lowest)).astype(rewards.dtype)
    elif method == "max_random":
        weights = jnp.where(rewards == highest, 0.4, 0.1).astype(rewards.dtype)
    else:
        raise UserError(f"unknown reweighting {method!r}; expected one of {', '.join(METHODS)}")
    # verl's floor: without it a batch of zeros could not be drawn from.
    logits = jnp.where(valid, jnp.log(weights + 1e-8), -jnp.inf)
    drawn = jax.random.categorical(key, logits, shape=rewards.shape)
    counts = jnp.arange(rewards.shape[0]) < valid.sum()
    return segments.sequence_lengths(counts, drawn, rewards.shape[0])
