"""Policy losses that hold back the tokens which cost the most entropy: those where advantage and log-prob are high
together (arXiv:2505.22617). With means over all valid tokens,

    cov = (A - mean(A)) (logprob - mean(logprob))

They compare all tokens of a mini-batch, so they need all of it at once. policy_losses.py says what a loss takes. Which
tokens are chosen does not depend on how sequences are packed or padded. Log-ratios are not clamped.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jaxrl_llm.algorithms import kl, segments
from jaxrl_llm.algorithms.token_losses import PolicyLoss, clipped_surrogate, only_valid, token_means
from jaxrl_llm.types import UserError


def clip_cov(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    key: jax.Array,
    clip_ratio_low: float,
    clip_ratio_high: float,
    clip_cov_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> PolicyLoss:
    """Clip-Cov (arXiv:2505.22617): the clipped surrogate loss of PPO, without gradient at some tokens of high cov.

        loss       = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)),    0 at the chosen
        candidates = clip_cov_lb < cov < clip_cov_ub, and the clipped term is not the larger
        chosen     = max(1, floor(clip_cov_ratio N)) of the candidates, at random; all if there are no more

    with N valid tokens. The random number of a token comes from `key`, the id of its sequence and its place among the
    sequence's valid tokens. `actor/pg_clipfrac` is how often a token is chosen; `actor/ppo_kl`, mean of
    old_logprob - logprob.

    Raises UserError if there is no key.
    """
    if key is None:
        raise UserError("clip_cov chooses tokens at random: expected key, one of jax.random, got None. Give one.")
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    surrogate, clipped = clipped_surrogate(jnp.exp(log_ratio), advantages, clip_ratio_low, clip_ratio_high)
    cov = _covariances(advantages, logprobs, valid, sequence_ids, num_sequences)
    candidates = valid & ~clipped & (cov > clip_cov_lb) & (cov < clip_cov_ub)
    numbers = _random_bits(key, valid, sequence_ids, num_sequences)
    chosen = _first(_quota(clip_cov_ratio, valid), numbers, candidates, sequence_ids, num_sequences)
    return PolicyLoss(
        token_loss=jnp.where(chosen, 0, surrogate),
        metrics=token_means(valid, ppo_kl=-log_ratio, pg_clipfrac=chosen),
    )


def kl_cov(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    kl_cov_ratio: float,
    ppo_kl_coef: float,
) -> PolicyLoss:
    """KL-Cov (arXiv:2505.22617): a penalty on moving away at the tokens of highest cov.

        loss = -A ratio,    plus ppo_kl_coef |logprob - old_logprob| at the chosen
        chosen = the max(1, floor(kl_cov_ratio N)) valid tokens with the largest cov, of N

    Among equals the token of the lower sequence id goes first, then the earlier one. `actor/ppo_kl` is the mean of
    |logprob - old_logprob|.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    distance = kl.absolute(log_ratio)
    cov = _covariances(advantages, logprobs, valid, sequence_ids, num_sequences)
    chosen = _first(_quota(kl_cov_ratio, valid), -cov, valid, sequence_ids, num_sequences)
    return PolicyLoss(
        token_loss=-advantages * jnp.exp(log_ratio) + jnp.where(chosen, ppo_kl_coef * distance, 0),
        metrics=token_means(valid, ppo_kl=distance),
    )


def _covariances(
    advantages: jax.Array, logprobs: jax.Array, valid: jax.Array, sequence_ids: jax.Array, num_sequences: int
) -> jax.Array:
    """[...], 0 where not valid; no gradient."""
    count = jnp.maximum(valid.sum(), 1)

    def deviation(values: jax.Array) -> jax.Array:
        values = jax.lax.stop_gradient(values)
        # From the largest value on, so that equal values deviate by exactly 0, and summed by sequence, so that the
        # rounding, which may decide who is chosen, is that of any other layout.
        values = jnp.where(valid, values - jnp.max(values, initial=-jnp.inf, where=valid), 0)
        mean = segments.sequence_sum(values, valid, sequence_ids, num_sequences).sum() / count
        return jnp.where(valid, values - mean, 0)

    return deviation(advantages) * deviation(logprobs)


def _quota(ratio: float, valid: jax.Array) -> jax.Array:
    """How many tokens are chosen at most: max(1, floor(ratio N))."""
    tokens = valid.sum().astype(jnp.result_type(float))
    return jnp.maximum(jnp.floor(ratio * tokens).astype(jnp.int32), 1)


def _random_bits(key: jax.Array, valid: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """uint32 [...], for each valid token from its sequence's id and its place among the sequence's valid tokens."""
    places = segments.ranks(valid, sequence_ids, num_sequences)
    seed = jax.random.bits(key, (2,), jnp.uint32)
    return threefry_2x32(seed, jnp.stack([sequence_ids, places]).astype(jnp.uint32))[0]


def _first(
    quota: jax.Array, values: jax.Array, eligible: jax.Array, sequence_ids: jax.Array, num_sequences: int
) -> jax.Array:
    """bool [...]: the `quota` eligible tokens with the lowest values, all if there are no more. Among equals the lower
    sequence id goes first, then the earlier token."""
    bits = _ordered_bits(values)
    highest_bit = bits.dtype.type(1) << (jnp.iinfo(bits.dtype).bits - 1)

    def raised(place: jax.Array, bound: jax.Array) -> jax.Array:
        higher = bound | (highest_bit >> place.astype(bits.dtype))
        return jnp.where((eligible & (bits < higher)).sum() < quota, higher, bound)

    # The highest number that fewer than `quota` are below, bit by bit: to sort all tokens takes far longer.
    bound = jax.lax.fori_loop(0, jnp.iinfo(bits.dtype).bits, raised, jnp.zeros((), bits.dtype))
    below, equal = eligible & (bits < bound), eligible & (bits == bound)
    equal_S = segments.sequence_lengths(equal, sequence_ids, num_sequences)
    before = segments.to_tokens(jnp.cumsum(equal_S) - equal_S, sequence_ids)
    before = before + segments.ranks(equal, sequence_ids, num_sequences)
    return below | (equal & (before < quota - below.sum()))


def _ordered_bits(values: jax.Array) -> jax.Array:
    """Unsigned integers in the order of the values, which are unsigned integers or floats."""
    if jnp.issubdtype(values.dtype, jnp.unsignedinteger):
        return values
    unsigned = jnp.dtype(f"uint{jnp.finfo(values.dtype).bits}")
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0, values), unsigned)  # -0.0 is 0.0
    return jnp.where(values < 0, ~bits, bits | unsigned.type(1) << (jnp.finfo(values.dtype).bits - 1))
