"""Policy losses that look at each token alone, and the parts that all policy losses share.

policy_losses.py says what a loss takes. Below, A is the advantage, and with the log-probs of the sampled token

    log_ratio = clip(logprob - old_logprob, -20, 20)
    ratio     = exp(log_ratio)

Metrics are means over the valid tokens: `actor/ppo_kl` of -log_ratio unless a loss says otherwise, `actor/pg_clipfrac`
of where the loss is clipped, and `actor/pg_clipfrac_lower`, which is 0 where a loss has no second bound.
"""

from __future__ import annotations

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

        loss = max(-A ratio, -A clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high))
        loss = min(loss, -A clip_ratio_c)    where A < 0; clip_ratio_c > 1

    `actor/pg_clipfrac` is how often the clipped term is the larger, `actor/pg_clipfrac_lower` how often the dual clip
    holds.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    surrogate, clipped = clipped_surrogate(jnp.exp(log_ratio), advantages, clip_ratio_low, clip_ratio_high)
    bound = -advantages * clip_ratio_c
    negative = advantages < 0
    return PolicyLoss(
        token_loss=jnp.where(negative, jnp.minimum(surrogate, bound), surrogate),
        metrics=token_means(
            valid, ppo_kl=-log_ratio, pg_clipfrac=clipped, pg_clipfrac_lower=negative & (surrogate > bound)
        ),
    )


def cispo(
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
    """CISPO (MiniMax-M1, arXiv:2506.13585): the ratio is a clipped weight, and every token keeps a gradient.

        loss = -stop_gradient(clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)) A logprob

    `actor/pg_clipfrac` is how often the ratio is outside the range, whatever the sign of A.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    ratio = jnp.exp(log_ratio)
    weight = jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    return PolicyLoss(
        token_loss=-jax.lax.stop_gradient(weight) * advantages * logprobs,
        metrics=token_means(
            valid, ppo_kl=-log_ratio, pg_clipfrac=weight != ratio, pg_clipfrac_lower=jnp.zeros_like(ratio)
        ),
    )


def sapo(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    tau_pos: float,
    tau_neg: float,
) -> PolicyLoss:
    """SAPO (arXiv:2511.20347): a smooth gate in place of the clip. With tau = tau_pos where A > 0, else tau_neg,

        loss = -A (4 / tau) sigmoid(tau (ratio - 1))

    Its gradient is that of -A ratio at ratio 1 and fades on both sides, the sooner the larger tau. Nothing is
    clipped: both clip fractions are 0.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    tau = jnp.where(advantages > 0, tau_pos, tau_neg).astype(log_ratio.dtype)
    gate = jax.nn.sigmoid(tau * (jnp.exp(log_ratio) - 1)) * 4 / tau
    zero = jnp.zeros_like(log_ratio)
    return PolicyLoss(
        token_loss=-gate * advantages,
        metrics=token_means(valid, ppo_kl=-log_ratio, pg_clipfrac=zero, pg_clipfrac_lower=zero),
    )


def dppo_tv(
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
    """DPPO with the binary total variation (arXiv:2602.04879): the trust region is one of probabilities, not of ratios.

        loss = -A stop_gradient(min(ratio, clip_ratio_c)) logprob    where the token is in the trust region, else 0
        in the trust region:  p - p_old <= clip_ratio_high     where A > 0
                              p - p_old >= -clip_ratio_low     elsewhere

    with p = exp(logprob) and p_old = exp(old_logprob). The clip ratios are bounds of a divergence here, and
    clip_ratio_c, by which the importance weight is cut, has to be large (20) or the cut is a bias.

    `actor/pg_clipfrac` is how often a token is outside, `actor/pg_clipfrac_lower` how often a weight is cut inside.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    rise = jnp.exp(logprobs) - jnp.exp(old_logprobs)
    inside = jnp.where(advantages > 0, rise <= clip_ratio_high, rise >= -clip_ratio_low)
    return _in_trust_region(inside, logprobs, old_logprobs, advantages, valid, clip_ratio_c)


def dppo_kl(
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
    """DPPO with the binary KL divergence (arXiv:2602.04879), otherwise as `dppo_tv`.

        kl = p_old (old_logprob - logprob) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))
        in the trust region:  kl <= clip_ratio_high  or  p <= p_old     where A > 0
                              kl <= clip_ratio_low   or  p >= p_old     elsewhere

    A log-prob above 0, which only rounding makes, counts as 0 in it.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    new, old = jnp.minimum(logprobs, 0), jnp.minimum(old_logprobs, 0)
    # expm1 keeps the digits of 1 - p that are lost where p is near 1.
    others, old_others = -jnp.expm1(new), -jnp.expm1(old)
    kl = jnp.exp(old) * (old - new) + old_others * jnp.log((old_others + 1e-8) / (others + 1e-8))
    inside = jnp.where(advantages > 0, (kl <= clip_ratio_high) | (new <= old), (kl <= clip_ratio_low) | (new >= old))
    return _in_trust_region(inside, logprobs, old_logprobs, advantages, valid, clip_ratio_c)


def _in_trust_region(
    inside: jax.Array,
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    valid: jax.Array,
    clip_ratio_c: float,
) -> PolicyLoss:
    log_ratio = clamped_log_ratio(logprobs, old_logprobs)
    ratio = jnp.exp(log_ratio)
    weight = jnp.where(inside, jnp.minimum(ratio, clip_ratio_c), 0)
    return PolicyLoss(
        token_loss=-advantages * jax.lax.stop_gradient(weight) * logprobs,
        metrics=token_means(
            valid, ppo_kl=-log_ratio, pg_clipfrac=~inside, pg_clipfrac_lower=inside & (ratio > clip_ratio_c)
        ),
    )


def gpg(
    logprobs: jax.Array,
    old_logprobs: jax.Array | None,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
) -> PolicyLoss:
    """Policy gradient without surrogate, loss = -A logprob (GPG, arXiv:2504.02546). `old_logprobs` are not read and
    may be None. No metrics."""
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, advantages = only_valid(valid, logprobs, advantages)
    return PolicyLoss(token_loss=-advantages * logprobs, metrics={})


def reinforce(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
) -> PolicyLoss:
    """REINFORCE, loss = -A logprob (R. J. Williams, 1992): the formula of `gpg`, for any advantage. What the policy
    is away from the one that sampled, importance weights correct. `actor/ppo_kl` is of the log-ratio unclamped."""
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    loss = gpg(logprobs, None, advantages, mask, sequence_ids=sequence_ids, num_sequences=num_sequences)
    new, old = only_valid(valid, logprobs, old_logprobs)
    return loss._replace(metrics=token_means(valid, ppo_kl=old - new))


def dro(
    logprobs: jax.Array,
    old_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    *,
    sequence_ids: jax.Array,
    num_sequences: int,
    dro_beta: float,
) -> PolicyLoss:
    """Direct reward optimisation (arXiv:2405.19107), with dro_beta > 0:

        loss = -(A logprob - dro_beta / 2 (logprob - old_logprob)^2)

    Its gradient is that of (A - dro_beta log_ratio)^2 / (2 dro_beta), the paper's regression of log-ratio on reward
    minus value; there for whole answers and against the reference policy, here for tokens and against the old policy.
    The log-ratio is not clamped, also in `actor/ppo_kl`.
    """
    valid = segments.valid_tokens(mask, sequence_ids, num_sequences)
    logprobs, old_logprobs, advantages = only_valid(valid, logprobs, old_logprobs, advantages)
    log_ratio = logprobs - old_logprobs
    return PolicyLoss(
        token_loss=dro_beta / 2 * log_ratio**2 - advantages * logprobs,
        metrics=token_means(valid, ppo_kl=-log_ratio),
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


def only_valid(valid: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays in float32 (float64 stays), 0 where not valid, so that nothing of what stands there goes on, neither
    forward nor backward."""
    return tuple(jnp.where(valid, segments.as_float(array), 0) for array in arrays)


def clamped_log_ratio(logprobs: jax.Array, old_logprobs: jax.Array) -> jax.Array:
    return jnp.clip(logprobs - old_logprobs, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def clipped_surrogate(
    ratio: jax.Array, advantages: jax.Array, clip_ratio_low: float, clip_ratio_high: float
) -> tuple[jax.Array, jax.Array]:
    """PPO's max(-A ratio, -A clip(ratio, 1 - low, 1 + high)), and bool, where the clipped term is the larger."""
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high)
    return jnp.maximum(unclipped, clipped), clipped > unclipped


def token_means(valid: jax.Array, **values: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Metrics `actor/NAME`: the sum over valid tokens of each array, numbers or bool, and the number of these tokens;
    no gradient. One of the arrays has to be float."""
    dtype = jnp.result_type(*values.values())
    count = valid.sum().astype(dtype)
    kept = {name: jax.lax.stop_gradient(jnp.where(valid, array, 0)) for name, array in values.items()}
    return {f"actor/{name}": (array.sum(dtype=dtype), count) for name, array in kept.items()}
