"""How much better a sample was than expected.

An advantage function is `fn(experience, **constants) -> Advantages`: it is given one whole batch, as experience.py
describes it, and answers for every token. Those of this file compare a sequence with the others of its group, which
may lie anywhere and be of any number; those of token_advantages.py look at each token.

In the equations r is a sequence's reward, mean and std (which divides by n - 1) are over the valid samples of its
group, and n is their number.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments, token_advantages
from jaxrl_llm.algorithms.experience import Advantages, Experience, required, valid_sequences, valid_tokens, whiten


def grpo(experience: Experience, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Advantages:
    """Group-relative advantage, A = (r - mean) / (std + epsilon) (GRPO, arXiv:2402.03300, section 4.1.2). Without
    `normalize_by_std`, A = r - mean (Dr. GRPO, arXiv:2503.20783).

    A group with one valid sample has no baseline: mean 0 and std 1. Equal rewards give exactly 0.
    """
    scores_S = _group_relative(
        experience.rewards, experience.group_ids, valid_sequences(experience), normalize_by_std, epsilon
    )
    return _to_tokens(scores_S, experience)


def grpo_passk(experience: Experience, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Advantages:
    """Advantage for pass@k: only the group's best sample has one, A = (r - second highest r) / (std + epsilon)
    (arXiv:2503.19595), without the division unless `normalize_by_std`.

    Two best samples have advantage 0, and so has a sample that is alone in its group: there is no second. (verl
    refuses such a group.)
    """
    group_ids, valid_S = experience.group_ids, valid_sequences(experience)
    rewards_S = segments.as_float(experience.rewards)
    baselined_S, count_S = _baselined(rewards_S, group_ids, valid_S)
    best_S = valid_S & (rewards_S == _highest_of_group(rewards_S, valid_S, group_ids))
    num_best_G = segments.sequence_lengths(best_S, group_ids, valid_S.shape[0])
    leads_S = best_S & (segments.to_tokens(num_best_G, group_ids) == 1) & (count_S > 1)
    lead_S = jnp.where(leads_S, rewards_S - _highest_of_group(rewards_S, valid_S & ~best_S, group_ids), 0)
    if normalize_by_std:
        lead_S = lead_S / (_std(baselined_S, count_S, group_ids, valid_S) + epsilon)
    return _to_tokens(lead_S, experience)


def gdpo(experience: Experience, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> Advantages:
    """Every component k of the reward is normalized by itself, so that none drowns another: A_k as `grpo` has it,
    then A = whiten(sum_k w_k A_k) over the tokens of the batch (GDPO, arXiv:2601.05242).

    Needs `components` and `component_weights`; does not read `rewards`.
    """
    components_KS = required(experience, "components").T
    weights_K = required(experience, "component_weights")
    valid_S = valid_sequences(experience)
    scores_KS = jax.vmap(
        lambda rewards_S: _group_relative(rewards_S, experience.group_ids, valid_S, normalize_by_std, epsilon)
    )(components_KS)
    scores_S = (weights_K[:, None] * scores_KS).sum(axis=0)
    return _whitened(_to_tokens(scores_S, experience), experience)


def rloo(experience: Experience) -> Advantages:
    """Leave-one-out baseline: A = r - mean of the group's other samples (RLOO, arXiv:2402.14740), computed as
    (r - mean) n / (n - 1). A group with one valid sample has baseline 0; equal rewards give exactly 0."""
    scores_S = _leave_one_out(experience.rewards, experience.group_ids, valid_sequences(experience))
    return _to_tokens(scores_S, experience)


def opo(experience: Experience) -> Advantages:
    """The baseline of least variance where the gradient's square grows with the length l of a sequence:
    A = r - sum(l r) / sum(l) over the group (OPO, arXiv:2505.23585). l counts the tokens in the mask.

    A group with one valid sample, or without any token, has baseline 0. Equal rewards give exactly 0.
    """
    group_ids, valid_S = experience.group_ids, valid_sequences(experience)
    num_sequences = valid_S.shape[0]
    baselined_S, count_S = _baselined(experience.rewards, group_ids, valid_S)
    lengths_S = segments.sequence_lengths(valid_tokens(experience), experience.sequence_ids, num_sequences)
    lengths_S = lengths_S.astype(baselined_S.dtype)
    weighted_G = segments.sequence_sum(lengths_S * baselined_S, valid_S, group_ids, num_sequences)
    total_G = segments.sequence_sum(lengths_S, valid_S, group_ids, num_sequences)
    baseline_S = segments.to_tokens(weighted_G / jnp.maximum(total_G, 1), group_ids)
    return _to_tokens(jnp.where(count_S > 1, baselined_S - baseline_S, baselined_S), experience)


def gpg(experience: Experience, *, f_norm: float = 1.0) -> Advantages:
    """A = alpha (r - mean) / f_norm with alpha = valid samples / samples whose reward is not 0, over the whole batch
    (GPG, arXiv:2504.02546). A group with one valid sample has mean 0; equal rewards give exactly 0."""
    valid_S = valid_sequences(experience)
    baselined_S, _ = _baselined(experience.rewards, experience.group_ids, valid_S)
    rewarded = (valid_S & (experience.rewards != 0)).sum()
    alpha = valid_S.sum().astype(baselined_S.dtype) / jnp.maximum(rewarded, 1)
    return _to_tokens(alpha * baselined_S / f_norm, experience)


def reinforce_plus_plus_baseline(experience: Experience) -> Advantages:
    """A = whiten(r - mean) over the tokens of the batch (REINFORCE++-baseline, arXiv:2501.03262). A group with one
    valid sample has mean 0."""
    scores_S, _ = _baselined(experience.rewards, experience.group_ids, valid_sequences(experience))
    return _whitened(_to_tokens(scores_S, experience), experience)


def prime(experience: Experience, *, process_coef: float = 5.0, outcome_coef: float = 5.0) -> Advantages:
    """Process rewards p of every token and the outcome r, both less a leave-one-out baseline (PRIME,
    arXiv:2502.01456), with b the mean over the group's other samples of their mean p:

        G_t = process_coef sum_{s >= t} (p_s - b) + outcome_coef (r - mean of the others' r),    A = whiten(G)

    The mean p and the sums are over tokens in the mask; a sample without one is not in b. A group with one valid
    sample has no baselines. Needs `process_rewards`; does not read `token_rewards`. The returns are G.
    """
    process_rewards = segments.as_float(required(experience, "process_rewards"))
    group_ids, ids = experience.group_ids, experience.sequence_ids
    valid_S, mask = valid_sequences(experience), valid_tokens(experience)
    num_sequences = valid_S.shape[0]
    has_tokens_S = segments.sequence_lengths(mask, ids, num_sequences) > 0
    mean_S = segments.sequence_mean(process_rewards, mask, ids, num_sequences)
    baseline_S = mean_S - _leave_one_out(mean_S, group_ids, has_tokens_S)
    process = jnp.where(mask, process_rewards - segments.to_tokens(baseline_S, ids), 0)
    outcome_S = _leave_one_out(experience.rewards, group_ids, valid_S)
    to_go = process_coef * segments.sum_to_go(process, mask, ids)
    returns = to_go + outcome_coef * _to_tokens(outcome_S, experience).returns
    return Advantages(whiten(returns, mask), returns)


ADVANTAGES: dict[str, Callable[..., Advantages]] = {
    "gae": token_advantages.gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "gdpo": gdpo,
    "reinforce_plus_plus": token_advantages.reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "rloo": rloo,
    "opo": opo,
    "remax": token_advantages.remax,
    "gpg": gpg,
    "optimal_token_baseline": token_advantages.optimal_token_baseline,
    "tir_optimal_token_baseline": token_advantages.tir_optimal_token_baseline,
    "prime": prime,
}


def _to_tokens(scores_S: jax.Array, experience: Experience) -> Advantages:
    """Gives every token that counts its sequence's score."""
    scores = segments.to_tokens(scores_S, experience.sequence_ids)
    advantages = jnp.where(valid_tokens(experience), scores, 0)
    return Advantages(advantages, advantages)


def _whitened(spread: Advantages, experience: Experience) -> Advantages:
    advantages = whiten(spread.advantages, valid_tokens(experience))
    return Advantages(advantages, advantages)


def _group_relative(
    rewards_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array, normalize_by_std: bool, epsilon: float
) -> jax.Array:
    baselined_S, count_S = _baselined(rewards_S, group_ids_S, valid_S)
    if not normalize_by_std:
        return baselined_S
    return baselined_S / (_std(baselined_S, count_S, group_ids_S, valid_S) + epsilon)


def _leave_one_out(rewards_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array) -> jax.Array:
    baselined_S, count_S = _baselined(rewards_S, group_ids_S, valid_S)
    return baselined_S * jnp.where(count_S > 1, count_S / jnp.maximum(count_S - 1, 1), 1)


def _baselined(rewards_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reward less its group's mean, the reward itself where it is alone in its group and 0 where not valid;
    and the number of valid samples in the group. Both [S] and floating-point.

    The group's highest reward is taken off first, so that equal rewards are exactly 0 before they are
    averaged: the mean of three float32 0.7 is off by 6e-8, which division by a std of 0 + 1e-6 makes 0.06.
    """
    num_groups = rewards_S.shape[0]
    rewards_S = segments.as_float(rewards_S)
    below_S = jnp.where(valid_S, rewards_S - _highest_of_group(rewards_S, valid_S, group_ids_S), 0)
    mean_G = segments.sequence_mean(below_S, valid_S, group_ids_S, num_groups)
    count_S = segments.to_tokens(segments.sequence_lengths(valid_S, group_ids_S, num_groups), group_ids_S)
    baselined_S = jnp.where(count_S == 1, rewards_S, below_S - segments.to_tokens(mean_G, group_ids_S))
    return jnp.where(valid_S, baselined_S, 0), count_S.astype(rewards_S.dtype)


def _std(baselined_S: jax.Array, count_S: jax.Array, group_ids_S: jax.Array, valid_S: jax.Array) -> jax.Array:
    """Standard deviation of the group, of what `_baselined` returned; 1 where the group has none or it is 0."""
    squares_S = jnp.where(count_S > 1, baselined_S**2, 0)
    squares_G = segments.sequence_sum(squares_S, valid_S, group_ids_S, valid_S.shape[0])
    std_S = jnp.sqrt(segments.to_tokens(squares_G, group_ids_S) / jnp.maximum(count_S - 1, 1))
    return jnp.where(std_S > 0, std_S, 1)


def _highest_of_group(rewards_S: jax.Array, among_S: jax.Array, group_ids_S: jax.Array) -> jax.Array:
    highest_G = jax.ops.segment_max(jnp.where(among_S, rewards_S, -jnp.inf), group_ids_S, rewards_S.shape[0])
    return segments.to_tokens(highest_G, group_ids_S)
