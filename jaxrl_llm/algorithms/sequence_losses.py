"""Policy losses with one ratio for a whole sequence. policy_losses.py says what a loss takes; a sequence has to be
complete in the arrays, wherever its tokens lie."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.token_losses import PolicyLoss, clipped_surrogate, only_valid, token_means

# exp(10) = 2e4 is far beyond any clip range for the ratio of a mean token.
_MAX_MEAN_LOG_RATIO = 10.0


def gspo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """GSPO (arXiv:2507.18071), in the form with a loss for each token (GSPO-token in the paper).

        s    = exp(mean over the sequence of logprob - old_logprob)
        s_t  = stop_gradient(s) exp(logprob_t - stop_gradient(logprob_t)),    log s_t at most 10
        loss = max(-A s_t, -A clip(s_t, 1 - clip_ratio_low, 1 + clip_ratio_high))

    Where A is one number a sequence, the mean over the sequence is the paper's loss, and so is its gradient. Clip
    ratios are small (3e-4, 4e-4): s is a geometric mean.

    Metrics are over tokens: `actor/ppo_kl` of old_logprob - logprob, not clamped; `actor/pg_clipfrac`, how often the
    clipped term is the larger; `actor/pg_clipfrac_lower`, 0.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    mean_S = segments.sequence_mean(log_ratio, valid, sequence_ids, num_sequences)
    mean = jax.lax.stop_gradient(segments.to_tokens(mean_S, sequence_ids))
    log_s = jnp.minimum(logprobs - jax.lax.stop_gradient(logprobs) + mean, _MAX_MEAN_LOG_RATIO)
    surrogate, clipped = clipped_surrogate(jnp.exp(log_s), advantages, clip_ratio_low, clip_ratio_high)
    return PolicyLoss(
        token_loss=surrogate,
        metrics=token_means(valid, ppo_kl=-log_ratio, pg_clipfrac=clipped, pg_clipfrac_lower=jnp.zeros_like(log_ratio)),
    )


def geo_mean(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    is_weights: jax.Array | None = None,
    clip_ratio_low: float,
    clip_ratio_high: float,
) -> PolicyLoss:
    """GMPO (arXiv:2507.20673): the geometric mean of the ratios of a sequence, each clipped.

        x    = logprob - old_logprob, not clamped
        c    = min(x, clip_ratio_high) where A > 0,  max(x, -clip_ratio_low) where A < 0,  0 where A = 0
        loss = -mean(A) exp(mean(c)) exp(mean(log(is_weight + 1e-10)))    at every token of the sequence

    with means over the sequence's tokens, n of them, that divide by n + 1e-8. The clip ratios bound log-ratios here
    (0.4 in the paper). A is meant to be one number a sequence.

    Metrics are over tokens: `actor/ppo_kl` of -x; how often x is outside of [-clip_ratio_low, clip_ratio_high], in
    `actor/pg_clipfrac` where A > 0 and in `actor/pg_clipfrac_lower` where A < 0.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    lengths_S = segments.sequence_lengths(valid, sequence_ids, num_sequences)

    def mean(values: jax.Array) -> jax.Array:
        return segments.sequence_sum(values, valid, sequence_ids, num_sequences) / (lengths_S + 1e-8)

    log_ratio = logprobs - old_logprobs
    positive, negative = advantages > 0, advantages < 0
    bounded = jnp.where(positive, jnp.minimum(log_ratio, clip_ratio_high), jnp.maximum(log_ratio, -clip_ratio_low))
    loss_S = -mean(advantages) * jnp.exp(mean(jnp.where(positive | negative, bounded, 0)))
    if is_weights is not None:
        loss_S = loss_S * jnp.exp(mean(jnp.log(segments.as_float(is_weights) + 1e-10)))
    outside = (log_ratio < -clip_ratio_low) | (log_ratio > clip_ratio_high)
    return PolicyLoss(
        token_loss=jnp.where(valid, segments.to_tokens(loss_S, sequence_ids), 0),
        metrics=token_means(
            valid, ppo_kl=-log_ratio, pg_clipfrac=outside & positive, pg_clipfrac_lower=outside & negative
        ),
    )
