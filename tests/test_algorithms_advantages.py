import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.advantages import ADVANTAGES, gdpo, gpg, grpo, grpo_passk, opo, prime, rloo
from jaxrl_llm.algorithms.experience import Experience

# Those whose baseline is made of the rewards of the group.
OF_GROUPS = ("grpo", "grpo_passk", "gdpo", "reinforce_plus_plus_baseline", "rloo", "opo", "gpg")
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
each_advantage = pytest.mark.parametrize("name", ADVANTAGES)


@functools.cache
def program(function, constants=()):
    return jax.jit(functools.partial(function, **dict(constants)))


def one_token_each(rewards, groups, valid=None):
    rewards = jnp.asarray(rewards, jnp.float32)
    size = len(rewards)
    return Experience(
        rewards=rewards,
        group_ids=jnp.asarray(groups, jnp.int32),
        valid=jnp.ones(size, bool) if valid is None else jnp.asarray(valid, bool),
        sequence_ids=jnp.arange(size, dtype=jnp.int32),
        mask=jnp.ones(size, bool),
        token_rewards=rewards,
        old_logprobs=jnp.full(size, -0.5),
        values=jnp.zeros(size),
        sum_pi_squared=jnp.full(size, 0.5),
        process_rewards=rewards,
        baseline_rewards=rewards,
        components=rewards[:, None],
        component_weights=jnp.ones(1),
    )


def of(function, rewards, groups, valid=None, **constants):
    result = program(function, tuple(constants.items()))(one_token_each(rewards, groups, valid))
    np.testing.assert_array_equal(result.advantages, result.returns)
    return np.asarray(result.advantages)


def centred(rewards, groups, valid=None):
    return of(grpo, rewards, groups, valid, normalize_by_std=False)


def test_each_prompt_instance_is_its_own_group():
    np.testing.assert_array_equal(centred([1, 0, 1, 1], [0, 0, 1, 1]), [0.5, -0.5, 0, 0])


def test_two_rows_with_the_same_text_do_not_share_a_baseline():
    rewards = [0] * 16 + [1] * 16
    np.testing.assert_array_equal(of(rloo, rewards, [0] * 16 + [1] * 16), np.zeros(32))
    merged = of(rloo, rewards, [0] * 32)
    np.testing.assert_allclose(merged, [-16 / 31] * 16 + [16 / 31] * 16, rtol=1e-6)


def test_every_group_gets_advantages():
    advantages = centred([1, 0, 1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(advantages, [0.5, -0.5, 0, 0, 0, 0, -0.5, 0.5])


@pytest.mark.parametrize("name", OF_GROUPS)
@pytest.mark.parametrize(("reward", "size"), [(0.7, 3), (0.1, 3), (1 / 3, 3), (1e6 / 3, 64)])
def test_equal_rewards_give_exactly_zero(name, reward, size):
    np.testing.assert_array_equal(of(ADVANTAGES[name], [reward] * size, [0] * size), np.zeros(size))


@pytest.mark.parametrize("name", ["grpo", "grpo_passk", "gdpo"])
def test_equal_rewards_give_zero_without_epsilon_too(name):
    np.testing.assert_array_equal(of(ADVANTAGES[name], [0.7, 0.7, 0.7], [0, 0, 0], epsilon=0.0), [0, 0, 0])


@pytest.mark.parametrize("missing", [0.0, 1e30, np.nan, np.inf])
def test_a_sample_without_reward_counts_for_nothing(missing):
    rewards, valid = [1, 0, missing, 1], [True, True, False, True]
    np.testing.assert_allclose(centred(rewards, [0] * 4, valid), [1 / 3, -2 / 3, 0, 1 / 3], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        of(grpo, rewards, [0] * 4, valid, epsilon=0.0),
        [0.577350269, -1.154700538, 0, 0.577350269],
        rtol=1e-6,
    )
    np.testing.assert_allclose(of(rloo, rewards, [0] * 4, valid), [0.5, -1, 0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(of(opo, rewards, [0] * 4, valid), [1 / 3, -2 / 3, 0, 1 / 3], rtol=1e-6, atol=1e-7)
    # Three valid samples, two of them with a reward that is not 0.
    np.testing.assert_allclose(of(gpg, rewards, [0] * 4, valid), [0.5, -1, 0, 0.5], rtol=1e-6, atol=1e-7)


@each_advantage
def test_a_group_without_any_reward_gets_zeros_and_leaves_the_others_alone(name):
    sees = one_token_each([np.nan, np.nan, 1, 0], [0, 0, 1, 1], [False, False, True, True])
    results = program(ADVANTAGES[name])(sees)
    alone = program(ADVANTAGES[name])(one_token_each([1, 0], [0, 0]))
    for found, expected in zip(results, alone, strict=True):
        np.testing.assert_array_equal(found, [0, 0, *expected])


@each_advantage
def test_padding_of_the_samples_gets_zero_even_if_it_is_called_valid(name):
    results = program(ADVANTAGES[name])(one_token_each([1.0, 0, 5, 7], [0, 0, 4, 4]))
    alone = program(ADVANTAGES[name])(one_token_each([1, 0], [0, 0]))
    for found, expected in zip(results, alone, strict=True):
        np.testing.assert_array_equal(found, [*expected, 0, 0])


def test_a_group_of_one_has_mean_zero_and_std_one():
    rewards, groups, valid = [0.5, -2.0, 3.0], [0, 1, 1], [True, True, False]
    np.testing.assert_allclose(of(grpo, rewards, groups, valid), [0.5, -2, 0], rtol=2e-6)
    for function in (rloo, opo, gpg):
        np.testing.assert_array_equal(of(function, rewards, groups, valid), [0.5, -2, 0])
    np.testing.assert_array_equal(centred(rewards, groups, valid), [0.5, -2, 0])


def test_a_group_of_one_has_no_second_for_pass_at_k():
    np.testing.assert_array_equal(of(grpo_passk, [5.0, 2, np.nan], [0, 1, 1], [True, True, False]), np.zeros(3))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 4, 2.5], [0, 1.5, 0]), ([4, 1, 4], [0, 0, 0]), ([0, 0, 1], [0, 0, 1]), ([-3, -1, -2], [0, 1, 0])],
)
def test_pass_at_k_rewards_the_lead_of_the_best_over_the_second(rewards, expected):
    np.testing.assert_array_equal(of(grpo_passk, rewards, [0] * 3, normalize_by_std=False), expected)


def test_a_small_lead_on_a_large_offset_survives_float32():
    rewards = [2.0**23, 2.0**23 + 1, 0.0]
    np.testing.assert_array_equal(of(grpo_passk, rewards, [0] * 3, normalize_by_std=False), [0, 1, 0])


def test_a_small_difference_on_a_large_offset_survives_float32():
    # 2^23 + 1 is the last odd step that float32 can tell from its neighbours.
    advantages = centred([2.0**23, 2.0**23 + 1, 2.0**23, 2.0**23 + 1], [0] * 4)
    np.testing.assert_array_equal(advantages, [-0.5, 0.5, -0.5, 0.5])


def test_no_component_drowns_another():
    sees = one_token_each([0.0] * 4, [0] * 4)
    components = jnp.array([[1000.0, 0], [0, 0], [1000, 1], [0, 1]])
    weigh = program(gdpo)
    both = weigh(sees._replace(components=components, component_weights=jnp.ones(2))).advantages
    np.testing.assert_allclose(both, [0, -1.2247449, 1.2247449, 0], atol=1e-5)
    first = weigh(sees._replace(components=components, component_weights=jnp.array([1.0, 0]))).advantages
    np.testing.assert_allclose(first, [0.8660254, -0.8660254, 0.8660254, -0.8660254], rtol=1e-5)


def test_prime_takes_from_each_reward_what_the_others_got():
    # Two samples of one group, of one and of two tokens.
    sees = one_token_each([0.0, 0, 0], [0, 0, 3])._replace(
        rewards=jnp.array([1.0, 0, np.nan]),
        sequence_ids=jnp.array([0, 1, 1]),
        process_rewards=jnp.array([0.5, 0.1, 0.3]),
    )
    # First: 0.5 - 0.2 and 1 - 0. Second: 0.1 - 0.5 and 0.3 - 0.5, summed up to the end, and 0 - 1.
    returns = np.array([2 * 0.3 + 3, 2 * -0.6 - 3, 2 * -0.2 - 3])
    result = program(prime, (("process_coef", 2.0), ("outcome_coef", 3.0)))(sees)
    np.testing.assert_allclose(result.returns, returns, rtol=1e-6)
    np.testing.assert_allclose(result.advantages, (returns - returns.mean()) / returns.std(ddof=1), rtol=1e-5)


def test_prime_has_no_baseline_in_a_group_of_one():
    result = program(prime)(one_token_each([0.5, 2.0], [0, 1]))
    np.testing.assert_allclose(result.returns, [5, 20], rtol=1e-6)


@each_advantage
def test_a_batch_without_any_reward_gets_zeros(name):
    batch = ragged.batch()
    sees = ragged.experience(batch, "packed")
    sees = sees._replace(
        valid=jnp.zeros_like(sees.valid),
        rewards=jnp.full_like(sees.rewards, jnp.nan),
        token_rewards=jnp.full_like(sees.token_rewards, jnp.nan),
    )
    for result in program(ADVANTAGES[name])(sees):
        np.testing.assert_array_equal(result, np.zeros(sees.mask.shape))


def loop_over_groups(name, batch):
    """The score of each sequence of a ragged batch."""
    scores = np.zeros(len(batch.masks))
    alpha = batch.valid.sum() / (batch.valid & (batch.rewards != 0)).sum()
    for group in np.unique(batch.group_ids):
        members = np.flatnonzero(batch.valid & (batch.group_ids == group))
        rewards = batch.rewards[members]
        lengths = [batch.masks[member].sum() for member in members]
        for member, reward in zip(members, rewards, strict=True):
            alone = len(members) == 1
            others = (rewards.sum() - reward) / (len(members) - 1) if not alone else 0
            std = rewards.std(ddof=1) if not alone else 1
            mean = rewards.mean() if not alone else 0
            second = np.sort(rewards)[-2] if not alone else reward
            by_length = np.average(rewards, weights=lengths) if not alone and sum(lengths) else 0
            scores[member] = {
                "grpo": (reward - mean) / (std + 1e-6),
                "grpo_passk": max(reward - second, 0) / (std + 1e-6),
                "rloo": reward - others,
                "opo": reward - by_length,
                "gpg": alpha * (reward - mean),
                "reinforce_plus_plus_baseline": reward - mean,
            }[name]
    return scores


def loop_over_components(batch):
    return sum(
        weight * loop_over_groups("grpo", batch._replace(rewards=rewards))
        for weight, rewards in zip(batch.component_weights, batch.components.T, strict=True)
    )


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_agree_with_a_loop(name, seed):
    batch = ragged.batch(seed)
    scores = loop_over_components(batch) if name == "gdpo" else loop_over_groups(name, batch)
    expected = [np.where(mask, score, 0) for mask, score in zip(batch.masks, scores, strict=True)]
    if name in ("gdpo", "reinforce_plus_plus_baseline"):
        expected = ragged.whitened(batch, expected)
    for result in program(ADVANTAGES[name])(ragged.experience(batch, "packed")):
        for found, wanted in zip(ragged.taken(result, batch, "packed"), expected, strict=True):
            np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize("seed", [0, 1])
def test_prime_agrees_with_a_loop(seed):
    batch = ragged.batch(seed)
    process = [values[mask] for values, mask in zip(batch.tokens["process_rewards"], batch.masks, strict=True)]
    outcome = loop_over_groups("rloo", batch)
    returns = []
    for i, mask in enumerate(batch.masks):
        returns.append(np.zeros(mask.size))
        if not batch.valid[i]:
            continue
        others = np.flatnonzero(batch.valid & (batch.group_ids == batch.group_ids[i]))
        means = [process[j].mean() for j in others if j != i and process[j].size]
        gains = process[i] - (np.mean(means) if means else 0)
        returns[i][mask] = [5 * gains[t:].sum() + 5 * outcome[i] for t in range(gains.size)]
    result = program(prime)(ragged.experience(batch, "packed"))
    for found, wanted in zip(ragged.taken(result.returns, batch, "packed"), returns, strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)


SAMPLES, NUM_GROUPS = 12, 4
samples = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, NUM_GROUPS - 1), st.booleans()),
    min_size=SAMPLES,
    max_size=SAMPLES,
)
few_examples = settings(max_examples=40, deadline=None)


def columns(rows):
    rewards, groups, valid = (np.array(column) for column in zip(*rows, strict=True))
    return rewards.astype(np.float32), groups.astype(np.int32), valid


@few_examples
@given(rows=samples)
def test_advantages_agree_with_a_loop_over_groups(rows):
    rewards, groups, valid = columns(rows)
    expected = {"grpo": np.zeros(SAMPLES), "rloo": np.zeros(SAMPLES)}
    for group in range(NUM_GROUPS):
        members = np.flatnonzero(valid & (groups == group))
        scores = rewards[members].astype(np.float64)
        for member, score in zip(members, scores, strict=True):
            if len(members) == 1:
                expected["grpo"][member] = score / (1 + 1e-6)
                expected["rloo"][member] = score
            else:
                expected["grpo"][member] = (score - scores.mean()) / (scores.std(ddof=1) + 1e-6)
                expected["rloo"][member] = score - (scores.sum() - score) / (len(members) - 1)
    np.testing.assert_allclose(of(grpo, rewards, groups, valid), expected["grpo"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(of(rloo, rewards, groups, valid), expected["rloo"], rtol=1e-5, atol=1e-6)
