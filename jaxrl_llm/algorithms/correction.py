"""Correction for sequences that another policy than the learner's sampled: importance weights, and rejection.

Engine and learner compute the same policy with other kernels and numbers, or the engine with older weights. With
rho_t = pi_learner(token t) / pi_rollout(token t):

    weights      `rollout_is`: "token" w_t = rho_t, or "sequence" w_t = the product of rho over its sequence. One
                 threshold C truncates, min(w, C) (truncated importance sampling: Ionides 2008; for policy gradients
                 IMPALA, arXiv:1802.01561); two, "lo_hi", make what is outside them 0 (IcePop, arXiv:2510.18855).
    rejection    `rollout_rs`: a divergence of each token, or its sum, mean or maximum over each sequence, beyond its
                 threshold takes the token, or the whole sequence, out of the mask. With l = log rho (estimators of
                 KL(rollout || learner), J. Schulman, "Approximating KL Divergence", 2020):
                     k1 = -l        between two log-thresholds: "lo_hi" bound exp(k1); "hi" alone means 1/hi to hi
                     k2 = l^2 / 2   at most the threshold
                     k3 = exp(l) - 1 - l    at most the threshold
                 Several criteria, "token_k1,seq_mean_k3", must all hold; thresholds are one for all or as many.

Sums over a sequence are over the tokens in the mask. log rho, and its sum over a sequence, are clamped to +-20 before
they become weights or divergences. Nothing here has a gradient: weights change the measure, not the objective.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import correction_metrics, segments
from jaxrl_llm.algorithms.correction_metrics import MAX_LOG_RATIO, Metrics, Tokens
from jaxrl_llm.types import UserError

IMPORTANCE_LEVELS = ("token", "sequence")
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)

_SMALLEST_MEAN = 1e-8  # weights whose mean is no larger are not divided by it


class Correction(NamedTuple):
    """What to train on."""

    weights: jax.Array | None  # float32 [...], 0 outside the mask given; None without importance sampling
    mask: jax.Array  # bool [...], the tokens that are left
    metrics: Metrics  # rollout_corr/*


def correct(
    logprobs: jax.Array,
    rollout_logprobs: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    rollout_is: str | None = None,
    rollout_is_threshold: str | float | None = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: str | float | None = None,
) -> Correction:
    """Importance weights and the tokens that are left; the weights are over the mask as it was given.

    Args:
        logprobs: float [...], of the learner's policy before the update.
        rollout_logprobs: float [...], of the policy that sampled.
        mask: bool or number [...], the tokens that the policy chose; of the whole batch, for the metrics and the
            normalisation are over it. What stands outside has no influence, not even NaN or infinity.
        sequence_ids: int32 [...]; num_sequences at padding.
        num_sequences: S, static.
        rollout_is: level of the weights, "token" or "sequence"; empty or None for none.
        rollout_is_threshold: positive, a number or "lo_hi".
        rollout_is_batch_normalize: divides the weights by their mean: over tokens, or over the sequences that have
            tokens, as their level is.
        rollout_rs: criteria, of REJECTIONS, with commas between; empty or None for none.
        rollout_rs_threshold: positive, with commas between.

    Returns:
        Weights and metrics are float32 (float64 for float64). Metrics are described in correction_metrics.py.

    Raises:
        UserError: as `check`.
    """
    tokens = Tokens.of(mask, sequence_ids, num_sequences)
    logprobs, rollout_logprobs = jax.lax.stop_gradient((logprobs, rollout_logprobs))
    logprobs = jnp.where(tokens.valid, segments.as_float(logprobs), 0)
    rollout_logprobs = jnp.where(tokens.valid, segments.as_float(rollout_logprobs), 0)
    log_ratio = logprobs - rollout_logprobs

    weights, metrics = None, correction_metrics.off_policy(logprobs, rollout_logprobs, tokens)
    if rollout_is:
        bounds = _importance_bounds(rollout_is, rollout_is_threshold)
        weights, found = _importance(log_ratio, tokens, rollout_is, bounds, rollout_is_batch_normalize)
        metrics |= found
    kept = tokens.valid
    if rollout_rs:
        kept, found = _reject(log_ratio, tokens, _criteria(rollout_rs, rollout_rs_threshold))
        metrics |= found
    return Correction(weights, kept, {f"rollout_corr/{name}": pair for name, pair in metrics.items()})


def check(
    rollout_is: str | None,
    rollout_is_threshold: str | float | None,
    rollout_rs: str | None,
    rollout_rs_threshold: str | float | None,
) -> None:
    """Raises UserError for a level, a criterion or a threshold that `correct` does not understand. A threshold
    without its level or criterion is not read."""
    if rollout_is:
        _importance_bounds(rollout_is, rollout_is_threshold)
    if rollout_rs:
        _criteria(rollout_rs, rollout_rs_threshold)


class _Criterion(NamedTuple):
    """What a divergence, as it stands, has to lie between."""

    name: str
    lower: float
    upper: float


def _importance(
    log_ratio: jax.Array, tokens: Tokens, level: str, bounds: tuple[float | None, float], normalize: bool
) -> tuple[jax.Array, Metrics]:
    lower, upper = bounds
    log_weights_S = tokens.sequence_sum(log_ratio)
    log_weights = tokens.spread(log_weights_S) if level == "sequence" else log_ratio
    clamped = jnp.clip(log_weights, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    raw = jnp.where(tokens.valid, jnp.exp(clamped), 0)
    if lower is None:
        weights = jnp.minimum(raw, upper)
    else:
        weights = jnp.where((raw >= lower) & (raw <= upper), raw, 0)
    metrics = correction_metrics.importance(weights, raw, tokens, lower, upper)
    if level == "sequence":
        metrics |= correction_metrics.sequence_importance(log_weights_S, tokens, lower, upper)
    if normalize:
        if level == "sequence":
            mean = tokens.sequence_mean(weights).sum() / jnp.maximum(tokens.nonempty_S.sum(), 1)
        else:
            mean = tokens.mean(weights)
        factor = jnp.where(mean > _SMALLEST_MEAN, mean, 1)
        weights = weights / factor
        metrics["rollout_is_batch_norm_factor"] = correction_metrics.single(factor, tokens.valid)
    return weights, metrics


def _reject(log_ratio: jax.Array, tokens: Tokens, criteria: list[_Criterion]) -> tuple[jax.Array, Metrics]:
    kept, metrics = tokens.valid, {}
    log_ratio = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    for criterion in criteria:
        scope, estimator = criterion.name.rsplit("_", 1)
        token_values = _divergence(log_ratio, estimator)
        values_S = None
        match scope:
            case "seq_sum":
                values_S = tokens.sequence_sum(token_values)
            case "seq_mean":
                values_S = tokens.sequence_mean(token_values)
            case "seq_max":
                values_S = tokens.sequence_max(token_values)
        if values_S is not None:
            token_values = tokens.spread(values_S)
        passed = tokens.valid & (token_values >= criterion.lower) & (token_values <= criterion.upper)
        kept &= passed
        metrics |= correction_metrics.rejection(*criterion, token_values, values_S, passed, tokens)
    return kept, metrics | correction_metrics.rejected(kept, tokens)


def _divergence(log_ratio: jax.Array, estimator: str) -> jax.Array:
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return log_ratio**2 / 2
        case _:
            return jnp.maximum(jnp.expm1(log_ratio) - log_ratio, 0)  # rounding can make it -1e-12


def _importance_bounds(rollout_is: str, threshold: str | float | None) -> tuple[float | None, float]:
    """Lower bound, None where weights are truncated, and upper bound."""
    if rollout_is not in IMPORTANCE_LEVELS:
        raise UserError(
            f"rollout_is {rollout_is!r} is unknown; expected one of {', '.join(IMPORTANCE_LEVELS)}, or none"
        )
    numbers = _numbers("rollout_is_threshold", threshold, str(threshold))
    return (None, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _criteria(rollout_rs: str, threshold: str | float | None) -> list[_Criterion]:
    names = list(dict.fromkeys(name.strip() for name in rollout_rs.split(",")))
    for name in names:
        if name not in REJECTIONS:
            raise UserError(f"rollout_rs has {name!r}; expected one of {', '.join(REJECTIONS)}, or several with commas")
    texts = str(threshold).split(",")
    if len(texts) not in (1, len(names)):
        raise UserError(
            f"rollout_rs_threshold {threshold!r} has {len(texts)} thresholds for {len(names)} criteria, "
            f"{', '.join(names)}; expected one for all, or one each, in this order, with commas between"
        )
    return [_criterion(name, threshold, text) for name, text in zip(names, texts * len(names), strict=False)]


def _criterion(name: str, threshold: str | float | None, text: str) -> _Criterion:
    numbers = _numbers("rollout_rs_threshold", threshold, text)
    if not name.endswith("k1"):
        if len(numbers) > 1:
            raise UserError(
                f"rollout_rs_threshold {threshold!r} has {text.strip()!r} for {name}, which is never negative; "
                "expected its upper bound alone"
            )
        return _Criterion(name, 0.0, numbers[0])
    if numbers[-1] < 1 and len(numbers) == 1:
        raise UserError(
            f"rollout_rs_threshold {threshold!r} has {text.strip()!r} for {name}, which stands for all from its "
            "inverse to itself; expected a number of 1 or more, or both bounds, such as '0.5_2.0'"
        )
    upper = math.log(numbers[-1])
    return _Criterion(name, -upper if len(numbers) == 1 else math.log(numbers[0]), upper)


def _numbers(key: str, threshold: str | float | None, text: str) -> list[float]:
    """The upper, or lower and upper, bound that `text`, one of the thresholds of `key`, gives."""
    expected = "expected a positive number, such as 2.0, or two with the smaller first, such as '0.5_2.0'"
    try:
        numbers = [float(part) for part in text.split("_")]
    except ValueError as error:
        raise UserError(f"{key} {threshold!r}: {text.strip()!r} is no threshold; {expected}") from error
    if len(numbers) > 2 or not all(number > 0 for number in numbers) or numbers != sorted(numbers):
        raise UserError(f"{key} {threshold!r}: {text.strip()!r} is no threshold; {expected}")
    return numbers
