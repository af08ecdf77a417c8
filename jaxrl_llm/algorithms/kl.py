"""Estimators of KL(policy || reference) from the tokens that the policy sampled.

With d = logprob - reference_logprob of the sampled token (J. Schulman, "Approximating KL Divergence", 2020):

    k1   d                     unbiased; its gradient along the sampled path is 0 in expectation
    abs  |d|
    k2   d^2 / 2               biased; the expectation of its gradient is the gradient of the KL divergence
    k3   exp(-d) - 1 + d       unbiased, never negative; the gradient is that of KL(reference || policy): what
                               GRPO (arXiv:2402.03300, equation 4) uses
    k1+  value of k1, gradient of k2
    k3+  value of k3, gradient of k2

k3 clamps -d to +-20 and its value to 10, so that one token far from the reference cannot overflow; where a
clamp holds, the gradient is 0. `low_var_kl` is another name for k3.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.types import UserError

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def kl_penalty(
    logprobs: jax.Array, reference_logprobs: jax.Array, estimator: str, *, mask: jax.Array | None = None
) -> jax.Array:
    """Estimate of the KL divergence at each token.

    Args:
        logprobs: float [...], of the policy.
        reference_logprobs: float [...], same shape.
        estimator: a name in KL_ESTIMATORS.
        mask: bool or number [...]; outside it the result and its gradient are 0, even at NaN or infinity.

    Returns:
        float32 [...] (float64 for float64), differentiable in `logprobs`.

    Raises:
        UserError: there is no such estimator.
    """
    difference = segments.as_float(logprobs) - segments.as_float(reference_logprobs)
    if mask is not None:
        difference = jnp.where(mask.astype(bool), difference, 0)
    if estimator not in KL_ESTIMATORS:
        raise UserError(f"unknown KL estimator {estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](difference)


def k1(difference: jax.Array) -> jax.Array:
    return difference


def absolute(difference: jax.Array) -> jax.Array:
    # The gradient of jnp.abs at 0 is 1: equal policies would be pushed apart.
    return difference * jnp.sign(difference)


def k2(difference: jax.Array) -> jax.Array:
    return difference**2 / 2


def k3(difference: jax.Array) -> jax.Array:
    log_ratio = jnp.clip(-difference, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return jnp.minimum(jnp.expm1(log_ratio) - log_ratio, _MAX_K3)


def with_gradient_of_k2(estimator: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """The estimator's value with the gradient of k2 (straight-through)."""

    def straight_through(difference: jax.Array) -> jax.Array:
        carrier = k2(difference)
        return carrier - jax.lax.stop_gradient(carrier) + jax.lax.stop_gradient(estimator(difference))

    return straight_through


# No estimator of sampled tokens: the divergence itself, over the whole vocabulary (models/logprobs.py).
EXACT = "exact"

KL_ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": k1,
    "abs": absolute,
    "k2": k2,
    "k3": k3,
    "low_var_kl": k3,
    "k1+": with_gradient_of_k2(k1),
    "k3+": with_gradient_of_k2(k3),
}


def adapted_coefficient(
    coefficient: float | jax.Array,
    kl: float | jax.Array,
    *,
    target: float,
    horizon: float,
    num_sequences: int | jax.Array,
) -> jax.Array:
    """The KL penalty's coefficient for the next step, by a proportional controller in log space (D. Ziegler et al.,
    arXiv:1909.08593, section 2.2):

        coefficient (1 + clip(kl / target - 1, -0.2, 0.2) num_sequences / horizon)

    Args:
        coefficient: of the step that was done.
        kl: finite, the divergence measured in it: the mean over sequences of the mean over tokens.
        target: > 0, what the divergence should be.
        horizon: > 0, in sequences: at most a fifth of the coefficient is added or taken off in so many.
        num_sequences: how many the step had.

    Returns:
        float32 scalar (float64 under x64).
    """
    error = jnp.clip(jnp.asarray(kl, jnp.result_type(float)) / target - 1, -0.2, 0.2)
    return coefficient * (1 + error * num_sequences / horizon)
