"""What to say of a rollout correction: how far learner and rollout policy are apart, and what was done about it.

Metrics are (sum, count) pairs. Where a maximum, a standard deviation or the like is no mean, it is (value, 1), and
(0, 0) where nothing has a value. With rho and l = log rho as in correction.py, n_s the tokens of sequence s:

    kl k3_kl chi2_token               means over tokens of -l, exp(l) - 1 - l, and rho^2 - 1
    training_ppl rollout_ppl          means over sequences of exp(-mean log-probability); *_log_ppl without exp
    log_ppl_diff, _abs_diff, _diff_max, _diff_min, ppl_ratio
                                      mean, mean of |.|, maximum, minimum, mean of exp, of -mean l over sequences
    chi2_seq                          mean over sequences of (product of rho)^2 - 1
    rollout_is_*                      of the weights as they are applied, before the normalisation; `ratio_fraction_*`,
                                      `oob_ratio` and `seq_fraction_*` ask of weights that are not yet truncated how
                                      often they exceed the thresholds (C and 1/C where one is given)
    rollout_is_eff_sample_size        (mean w)^2 / mean w^2, 1 when all weights are equal
    rollout_rs_CRITERION_*            of the divergence that is compared, a token's or a sequence's
    rollout_rs_*masked_fraction       tokens, or sequences with a token, that are rejected

Names and definitions are verl's. So sequences without tokens in the mask, which still are in the batch, count as
sequences with a mean of 0 in the perplexities, in rollout_is_seq_* and in rollout_rs_seq_masked_fraction; in
rollout_rs_CRITERION_* they do not count. A sequence without any token in the batch counts nowhere. Two things differ:
l is clamped at 20 in k3_kl, as elsewhere, and standard deviations and differences are computed without cancellation.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments

Metrics = dict[str, tuple[jax.Array, jax.Array]]

MAX_LOG_RATIO = 20.0  # exp(20) = 5e8, and its square is still a number in float32

# What verl adds to a number of tokens before it divides by it: far below what float32 resolves.
_EPSILON = 1e-8


class Tokens(NamedTuple):
    """The tokens of a batch that count, and reductions over them, all of them or sequence by sequence."""

    valid: jax.Array  # bool [...]
    sequence_ids: jax.Array  # int32 [...]
    lengths_S: jax.Array  # int32 [S], tokens that count
    present_S: jax.Array  # bool [S], has tokens in the batch, whether they count or not

    @classmethod
    def of(cls, mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> Tokens:
        valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
        lengths_S = segments.sequence_lengths(valid, sequence_ids, num_sequences)
        sizes_S = segments.sequence_lengths(jnp.ones_like(valid), sequence_ids, num_sequences)
        return cls(valid, sequence_ids, lengths_S, sizes_S > 0)

    @property
    def nonempty_S(self) -> jax.Array:
        """bool [S]: has tokens that count."""
        return self.lengths_S > 0

    def mean(self, values: jax.Array) -> jax.Array:
        """Of [...] to []; 0 without tokens."""
        return jnp.where(self.valid, values, 0).sum() / (self.valid.sum() + _EPSILON)

    def sequence_sum(self, values: jax.Array) -> jax.Array:
        """Of [...] to [S]; 0 without tokens, here and below."""
        return segments.sequence_sum(values, self.valid, self.sequence_ids, len(self.lengths_S))

    def sequence_mean(self, values: jax.Array) -> jax.Array:
        """Of [...] to [S]."""
        return self.sequence_sum(values) / (self.lengths_S + _EPSILON)

    def sequence_max(self, values: jax.Array) -> jax.Array:
        """Of [...] to [S]."""
        kept = jnp.where(self.valid, values, -jnp.inf)
        highest_S = jax.ops.segment_max(kept.ravel(), self.sequence_ids.ravel(), len(self.lengths_S))
        return jnp.where(self.nonempty_S, highest_S, 0)

    def spread(self, values_S: jax.Array) -> jax.Array:
        """Of [S] to [...]: to each token the value of its sequence."""
        return segments.to_tokens(values_S, self.sequence_ids)


def off_policy(logprobs: jax.Array, rollout_logprobs: jax.Array, tokens: Tokens) -> Metrics:
    """How far apart the two policies are."""
    present_S = tokens.present_S
    log_ratio = logprobs - rollout_logprobs
    capped = jnp.minimum(log_ratio, MAX_LOG_RATIO)
    log_ppl_S, rollout_log_ppl_S = -tokens.sequence_mean(logprobs), -tokens.sequence_mean(rollout_logprobs)
    difference_S = -tokens.sequence_mean(log_ratio)
    return {
        "kl": _mean(-log_ratio, tokens.valid),
        "k3_kl": _mean(jnp.expm1(capped) - log_ratio, tokens.valid),
        "chi2_token": _mean(_squared_ratio_less_1(log_ratio), tokens.valid),
        "chi2_seq": _mean(_squared_ratio_less_1(tokens.sequence_sum(log_ratio)), present_S),
        "training_ppl": _mean(jnp.exp(log_ppl_S), present_S),
        "training_log_ppl": _mean(log_ppl_S, present_S),
        "rollout_ppl": _mean(jnp.exp(rollout_log_ppl_S), present_S),
        "rollout_log_ppl": _mean(rollout_log_ppl_S, present_S),
        "log_ppl_diff": _mean(difference_S, present_S),
        "log_ppl_abs_diff": _mean(jnp.abs(difference_S), present_S),
        "log_ppl_diff_max": _largest(difference_S, present_S),
        "log_ppl_diff_min": _smallest(difference_S, present_S),
        "ppl_ratio": _mean(jnp.exp(difference_S), present_S),
    }


def importance(weights: jax.Array, raw: jax.Array, tokens: Tokens, lower: float | None, upper: float) -> Metrics:
    """Of the weights as applied, and of `raw`, before they are truncated; both [...]."""
    low = 1 / upper if lower is None else lower
    valid, present_S = tokens.valid, tokens.present_S
    weights_S, raw_S = tokens.sequence_mean(weights), tokens.sequence_mean(raw)
    squares = tokens.mean(weights**2)
    metrics = {
        "rollout_is_mean": _mean(weights, valid),
        "rollout_is_max": _largest(weights, valid),
        "rollout_is_min": _smallest(weights, valid),
        "rollout_is_std": single(_token_std(weights, tokens), valid),
        "rollout_is_ratio_fraction_high": _mean(raw > upper, valid),
        "rollout_is_ratio_fraction_low": _mean(raw < low, valid),
        "rollout_is_eff_sample_size": single(
            (tokens.mean(weights) + _EPSILON) ** 2 / jnp.where(squares > 0, squares, 1), valid
        ),
        **_spread("rollout_is_seq", weights_S, present_S, ideal=1.0),
        "rollout_is_seq_fraction_high": _mean(raw_S > upper, present_S),
        "rollout_is_seq_fraction_low": _mean(raw_S < low, present_S),
    }
    if lower is not None:
        metrics["rollout_is_oob_ratio"] = _mean((raw < lower) | (raw > upper), valid)
    return metrics


def sequence_importance(log_weights_S: jax.Array, tokens: Tokens, lower: float | None, upper: float) -> Metrics:
    """What is said of weights a sequence in place of weights a token, from their logarithms [S] before any clamp."""
    present_S = tokens.present_S
    high = math.log(upper)
    low = -high if lower is None else math.log(lower)
    weights_S = jnp.exp(jnp.minimum(log_weights_S, MAX_LOG_RATIO))
    return {
        "rollout_is_max": _largest(weights_S, present_S),
        "rollout_is_min": _smallest(weights_S, present_S),
        "rollout_is_ratio_fraction_high": _mean(log_weights_S > high, present_S),
        "rollout_is_ratio_fraction_low": _mean(log_weights_S < low, present_S),
    }


def rejection(
    criterion: str,
    lower: float,
    upper: float,
    values: jax.Array,
    values_S: jax.Array | None,
    passed: jax.Array,
    tokens: Tokens,
) -> Metrics:
    """Of one criterion's divergence, by token [...] and, if it is a sequence's, also by sequence [S]."""
    name = f"rollout_rs_{criterion}"
    valid, nonempty_S = tokens.valid, tokens.nonempty_S
    compared, where = (values, valid) if values_S is None else (values_S, nonempty_S)
    if values_S is None:
        values_S = tokens.sequence_mean(values)
    metrics = {
        f"{name}_mean": _mean(values, valid),
        f"{name}_max": _largest(compared, where),
        f"{name}_min": _smallest(compared, where),
        f"{name}_fraction_high": _mean(compared > upper, where),
        f"{name}_fraction_low": _mean(compared < lower, where),
        f"{name}_std": single(_token_std(jnp.clip(values, lower, upper), tokens), valid),
        **_spread(f"{name}_seq", values_S, nonempty_S, ideal=0.0),
        f"{name}_seq_fraction_high": _mean(values_S > upper, nonempty_S),
        f"{name}_masked_fraction": _mean(~passed, valid),
        f"{name}_seq_masked_fraction": _mean(_lost_tokens(passed, tokens), nonempty_S),
    }
    if criterion.endswith("k1"):
        metrics[f"{name}_seq_fraction_low"] = _mean(values_S < lower, nonempty_S)
    return metrics


def rejected(kept: jax.Array, tokens: Tokens) -> Metrics:
    """Of all criteria together."""
    return {
        "rollout_rs_masked_fraction": _mean(~kept, tokens.valid),
        "rollout_rs_seq_masked_fraction": _mean(_lost_tokens(kept, tokens), tokens.present_S),
    }


def _mean(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of the values and their number, where `where` is True."""
    total = jnp.where(where, segments.as_float(values), 0).sum()
    return total, where.sum().astype(total.dtype)


def single(value: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A value that is no mean and that there is if `where` is True anywhere."""
    exists = where.any()
    return jnp.where(exists, value, 0), exists.astype(value.dtype)


def _largest(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Maximum of the values where `where` is True."""
    return single(jnp.max(values, where=where, initial=-jnp.inf), where)


def _smallest(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Minimum of the values where `where` is True."""
    return single(jnp.min(values, where=where, initial=jnp.inf), where)


def _spread(name: str, values_S: jax.Array, where_S: jax.Array, *, ideal: float) -> Metrics:
    """Mean, standard deviation over n - 1, extremes, and the largest distance from the ideal."""
    total, count = _mean(values_S, where_S)
    centred_S = jnp.where(where_S, values_S - total / jnp.maximum(count, 1), 0)
    variance = (centred_S**2).sum() / jnp.maximum(count - 1, 1)
    return {
        f"{name}_mean": (total, count),
        f"{name}_std": single(jnp.sqrt(variance), where_S),
        f"{name}_max": _largest(values_S, where_S),
        f"{name}_min": _smallest(values_S, where_S),
        f"{name}_max_deviation": _largest(jnp.abs(values_S - ideal), where_S),
    }


def _token_std(values: jax.Array, tokens: Tokens) -> jax.Array:
    """sqrt(mean of squares - square of the mean), without its cancellation: the second term is what remains of it
    where means divide by n + epsilon."""
    count, mean = tokens.valid.sum(), tokens.mean(values)
    variance = tokens.mean((values - mean) ** 2) + mean**2 * _EPSILON / (count + _EPSILON)
    return jnp.where(count > 1, jnp.sqrt(variance), 0)


def _squared_ratio_less_1(log_ratio: jax.Array) -> jax.Array:
    return jnp.expm1(2 * jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _lost_tokens(kept: jax.Array, tokens: Tokens) -> jax.Array:
    """bool [S]: sequences of which a token that counts is not kept."""
    return tokens.sequence_sum(~kept) > 0
