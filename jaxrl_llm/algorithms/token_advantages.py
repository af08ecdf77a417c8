"""Advantages that differ from token to token: each token is compared with what was expected at it.

A reward that stands on a token outside the mask (tool text, or an action that was rejected) counts as given at the
sequence's action before it, so it is not lost; only a reward before the first action is, for nothing led to it.
Tokens outside the mask are no steps: they neither discount nor bring in a value.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.experience import Advantages, Experience, required, valid_tokens, whiten

# Of the denominator, as in verl: a policy that is certain has no variance to reduce.
_OTB_EPSILON = 1e-8


def gae(experience: Experience, *, gamma: float = 1.0, lam: float = 1.0) -> Advantages:
    """Generalized advantage estimation (arXiv:1506.02438, equation 16), over a sequence's tokens in the mask:

        delta_t = r_t + gamma V_{t+1} - V_t,    V = 0 after the last
        A_t = delta_t + gamma lam A_{t+1}

    The returns are A + V; the advantages A whitened over the tokens of the batch. Needs `values`.
    """
    mask, ids = valid_tokens(experience), experience.sequence_ids
    rewards = segments.as_float(experience.token_rewards)
    values = jnp.where(mask, segments.as_float(required(experience, "values")), 0)
    deltas = rewards + jnp.where(mask, gamma * segments.following(values, mask, ids) - values, 0)
    advantages = segments.sum_to_go(deltas, mask, ids, discount=gamma * lam)
    return Advantages(whiten(advantages, mask), advantages + values)


def reinforce_plus_plus(experience: Experience, *, gamma: float = 1.0) -> Advantages:
    """A = whiten(G) over the tokens of the batch, with the discounted reward to go G_t = r_t + gamma G_{t+1}, which
    are the returns (REINFORCE++, arXiv:2501.03262)."""
    mask = valid_tokens(experience)
    returns = segments.sum_to_go(experience.token_rewards, mask, experience.sequence_ids, discount=gamma)
    return Advantages(whiten(returns, mask), returns)


def remax(experience: Experience) -> Advantages:
    """A_t = G_t - r(greedy answer to the same prompt), with the reward to go G_t, which is the return (ReMax,
    arXiv:2310.10505). Needs `baseline_rewards`."""
    mask, ids = valid_tokens(experience), experience.sequence_ids
    returns = segments.sum_to_go(experience.token_rewards, mask, ids)
    baseline = segments.to_tokens(segments.as_float(required(experience, "baseline_rewards")), ids)
    return Advantages(jnp.where(mask, returns - baseline, 0), returns)


def optimal_token_baseline(experience: Experience, *, handle_zero_tail: bool = True) -> Advantages:
    """Optimal token baseline (arXiv:2602.07078): at every step its own baseline, that of least variance,

        A_t = G_t - B_t,    B_t = sum(W_t G_t) / (sum(W_t) + 1e-8)    over the group's samples at step t
        W_t = sum_{s <= t} w_s,    w_s = (1 - 2 pi_s + sum over the vocabulary of pi^2) rho_s^2

    where G_t is the reward to go, pi_s the probability of the token drawn and rho_s its importance weight
    (`is_weights`; 1 without them). w is the square of the gradient with regard to the logits. The step of a token is
    its distance from the sequence's first action, tool text included. The returns are G. Needs `sum_pi_squared`.

    Samples without a token are no members of their group; a group of one has baseline 0. With `handle_zero_tail` so
    has every token that is alone in its group at its step: W G / W is its own return, which would leave it nothing to
    learn from. That is the end of the group's longest sample, as in verl; verl finds it by the number of actions,
    which tells something else where there is tool text between them.
    """
    mask, ids = valid_tokens(experience), experience.sequence_ids
    return _baselined_by_step(experience, segments.offsets(mask, ids, experience.rewards.shape[0]), handle_zero_tail)


def tir_optimal_token_baseline(experience: Experience, *, handle_zero_tail: bool = True) -> Advantages:
    """`optimal_token_baseline` for tool-integrated reasoning: the step of a token is the number of actions before it
    in its sequence, so tool text, however long, moves nothing."""
    mask, ids = valid_tokens(experience), experience.sequence_ids
    return _baselined_by_step(experience, segments.ranks(mask, ids, experience.rewards.shape[0]), handle_zero_tail)


def _baselined_by_step(experience: Experience, steps: jax.Array, handle_zero_tail: bool) -> Advantages:
    """Reward to go less the optimal baseline of the group's samples at the same of `steps`, int32 [...]."""
    mask, ids = valid_tokens(experience), experience.sequence_ids
    returns = segments.sum_to_go(experience.token_rewards, mask, ids)
    probabilities = jnp.exp(jnp.where(mask, segments.as_float(experience.old_logprobs), 0))
    squares = jnp.where(mask, segments.as_float(required(experience, "sum_pi_squared")), 1)
    # Never negative but by rounding, which could take the denominator to 0.
    energy = jnp.maximum(1 - 2 * probabilities + squares, 0)
    if experience.is_weights is not None:
        energy = energy * jnp.where(mask, segments.as_float(experience.is_weights), 0) ** 2
    path = segments.cumulative_sum(energy, mask, ids)

    num_sequences = experience.rewards.shape[0]
    cells = jnp.where(mask, segments.to_tokens(experience.group_ids, ids), 0), steps

    def over_group(values: jax.Array) -> jax.Array:
        table_GT = jnp.zeros((num_sequences, steps.shape[-1]), values.dtype)
        return table_GT.at[cells].add(jnp.where(mask, values, 0))[cells]

    baseline = over_group(path * returns) / (over_group(path) + _OTB_EPSILON)
    if handle_zero_tail:
        alone = over_group(jnp.ones_like(returns)) == 1
    else:
        has_tokens_S = segments.sequence_lengths(mask, ids, num_sequences) > 0
        sizes_G = segments.sequence_lengths(has_tokens_S, experience.group_ids, num_sequences)
        alone = segments.to_tokens(segments.to_tokens(sizes_G, experience.group_ids), ids) == 1
    return Advantages(jnp.where(mask & ~alone, returns - baseline, returns), returns)
