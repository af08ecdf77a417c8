import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged

from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.experience import Experience
from jaxrl_llm.algorithms.token_advantages import gae, optimal_token_baseline, reinforce_plus_plus, remax
from jaxrl_llm.algorithms.token_advantages import tir_optimal_token_baseline as tir
from jaxrl_llm.types import UserError

CLOSE = {"rtol": 2e-5, "atol": 2e-6}


@functools.cache
def compiled(function, **constants):
    return jax.jit(functools.partial(function, **constants))


def one_sequence(mask, rewards, **tokens):
    mask = jnp.array(mask, bool)
    arrays = {name: jnp.array(values, jnp.float32) for name, values in tokens.items()}
    rewards = jnp.array(rewards, jnp.float32)
    return Experience(
        rewards=rewards.sum(keepdims=True),
        group_ids=jnp.zeros(1, jnp.int32),
        valid=jnp.ones(1, bool),
        sequence_ids=jnp.zeros(mask.shape, jnp.int32),
        mask=mask,
        token_rewards=rewards,
        old_logprobs=jnp.full(mask.shape, -0.5),
        **arrays,
    )


@pytest.mark.parametrize("observed", [9.0, 1000.0, np.nan])
@pytest.mark.parametrize(
    ("tail", "rewards"), [(0, [0, 0, 0, 0, 1]), (2, [0, 0, 0, 0, 1, 0, 0]), (2, [0, 0, 0, 0, 0, 0, 1])]
)
@pytest.mark.parametrize(
    ("gamma", "expected"), [(1.0, [0.757, 0.73, 0, 0, 0.7]), (0.99, [0.7401437, 0.7207, 0, 0, 0.7])]
)
def test_tool_text_is_no_step_of_gae_and_a_reward_on_it_is_not_lost(observed, tail, rewards, gamma, expected):
    values = [0.1, 0.2, observed, observed, 0.3] + [observed] * tail
    experience = one_sequence([1, 1, 0, 0, 1] + [0] * tail, rewards, values=values)
    advantages, returns = (np.asarray(x) for x in compiled(gae, gamma=gamma, lam=0.9)(experience))
    critic = np.array([0.1, 0.2, 0, 0, 0.3] + [0] * tail)
    unwhitened = returns - critic
    np.testing.assert_allclose(unwhitened, expected + [0] * tail, atol=1e-6)
    if gamma == 1:
        np.testing.assert_allclose(returns, [0.857, 0.93, 0, 0, 1] + [0] * tail, atol=1e-6)
    actions = unwhitened[[0, 1, 4]]
    np.testing.assert_allclose(advantages[[0, 1, 4]], (actions - actions.mean()) / actions.std(ddof=1), rtol=1e-3)


@pytest.mark.parametrize("place", [2, 3, 5, 6])
def test_a_reward_on_tool_text_counts_at_the_action_before_it_undiscounted(place):
    mask = [0, 1, 1, 0, 1, 0, 0]
    rewards = np.zeros(7)
    rewards[place] = 1.0
    action = 2 if place < 4 else 4
    expected = [0, 0.5 if action == 2 else 0.25, 1 if action == 2 else 0.5, 0, 0 if action == 2 else 1, 0, 0]
    result = compiled(reinforce_plus_plus, gamma=0.5)(one_sequence(mask, rewards))
    np.testing.assert_allclose(result.returns, expected, atol=1e-7)


def test_a_reward_before_the_first_action_is_nobody_s():
    returns = compiled(reinforce_plus_plus)(one_sequence([0, 0, 1, 1], [7, 0, 0, 1])).returns
    np.testing.assert_array_equal(returns, [0, 0, 1, 1])


def test_gae_with_lam_one_is_the_discounted_return_less_the_value():
    experience = one_sequence([1, 1, 1], [1, 2, 4], values=[0.5, -1, 3])
    np.testing.assert_allclose(compiled(gae, gamma=0.5)(experience).returns, [3, 4, 4], rtol=1e-6)


def test_gae_with_lam_zero_looks_one_step_ahead():
    experience = one_sequence([1, 1, 1], [1, 2, 4], values=[0.5, -1, 3])
    np.testing.assert_allclose(compiled(gae, gamma=0.5, lam=0.0)(experience).returns, [0.5, 3.5, 4], rtol=1e-6)


def test_a_certain_policy_has_no_baseline_and_no_division_by_zero():
    pair = one_sequence([1, 1], [1, 2], sum_pi_squared=[1, 1])._replace(
        rewards=jnp.array([1.0, 2]),
        group_ids=jnp.zeros(2, jnp.int32),
        valid=jnp.ones(2, bool),
        sequence_ids=jnp.array([0, 1]),
        old_logprobs=jnp.zeros(2),
    )
    np.testing.assert_array_equal(compiled(optimal_token_baseline)(pair).advantages, [1, 2])


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gae", "values"),
        ("remax", "baseline_rewards"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("tir_optimal_token_baseline", "sum_pi_squared"),
        ("gdpo", "components"),
        ("gdpo", "component_weights"),
        ("prime", "process_rewards"),
    ],
)
def test_what_is_missing_is_named(name, field):
    given = ragged.experience(ragged.batch(), "padded")._replace(**{field: None})
    with pytest.raises(UserError, match=f"Experience.{field}, expected an array, got None"):
        jax.eval_shape(ADVANTAGES[name], given)


# From here on: loops over ragged sequences, one action after the other.


def credited(batch, index):
    """Rewards of the sequence's actions, each with what was given after it and before the next."""
    rewards = batch.tokens["token_rewards"][index]
    borders = [*np.flatnonzero(batch.masks[index]), len(rewards)]
    return [sum(rewards[start:end]) for start, end in itertools.pairwise(borders)]


def returns_of(batch, index, gamma=1.0):
    rewards = credited(batch, index)
    return [sum(gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))) for t in range(len(rewards))]


def at_actions(batch, index, values):
    spread = np.zeros(batch.masks[index].size)
    spread[batch.masks[index]] = values
    return spread


def per_action(batch, function):
    """A value for each action of each valid sequence, 0 at all other tokens."""
    return [
        at_actions(batch, i, function(i)) if batch.valid[i] else np.zeros(batch.masks[i].size)
        for i in range(len(batch.masks))
    ]


def loop_gae(batch, *, gamma, lam):
    def values_of(index):
        return batch.tokens["values"][index][batch.masks[index]]

    def advantages_of(index):
        values, rewards = values_of(index), credited(batch, index)
        after = [*values, 0][1:]
        deltas = [r + gamma * later - now for r, later, now in zip(rewards, after, values, strict=True)]
        return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]

    plain = per_action(batch, advantages_of)
    critic = per_action(batch, values_of)
    return ragged.whitened(batch, plain), [a + v for a, v in zip(plain, critic, strict=True)]


def loop_reinforce_plus_plus(batch, *, gamma):
    returns = per_action(batch, lambda index: returns_of(batch, index, gamma))
    return ragged.whitened(batch, returns), returns


def loop_remax(batch):
    returns = per_action(batch, lambda index: returns_of(batch, index))
    baselined = per_action(batch, lambda index: np.array(returns_of(batch, index)) - batch.baseline_rewards[index])
    return baselined, returns


def loop_optimal_baseline(batch, *, by_action, handle_zero_tail, weighted):
    """What each of a group's samples has at a step is gathered in a dict by group and step."""
    gathered, steps, members = {}, {}, {}
    for i, mask in enumerate(batch.masks):
        if not (batch.valid[i] and mask.any()):
            continue
        members[batch.group_ids[i]] = members.get(batch.group_ids[i], 0) + 1
        actions = np.flatnonzero(mask)
        steps[i] = list(range(len(actions))) if by_action else list(actions - actions[0])
        path = 0.0
        for step, token, to_go in zip(steps[i], actions, returns_of(batch, i), strict=True):
            probability = np.exp(batch.tokens["old_logprobs"][i][token])
            energy = 1 - 2 * probability + batch.tokens["sum_pi_squared"][i][token]
            path += energy * (batch.tokens["is_weights"][i][token] ** 2 if weighted else 1)
            gathered.setdefault((batch.group_ids[i], step), []).append((path, to_go))

    def baselined(index):
        group = batch.group_ids[index]
        results = []
        for step, to_go in zip(steps.get(index, []), returns_of(batch, index), strict=True):
            samples = gathered[group, step]
            alone = len(samples) == 1 if handle_zero_tail else members[group] == 1
            baseline = sum(w * g for w, g in samples) / (sum(w for w, _ in samples) + 1e-8)
            results.append(to_go if alone else to_go - baseline)
        return results

    return per_action(batch, baselined), per_action(batch, lambda index: returns_of(batch, index))


def assert_agrees(function, loop, constants, *, seed=0, **loop_constants):
    batch = ragged.batch(seed)
    given = ragged.experience(batch, "packed")
    if not loop_constants.get("weighted", True):
        given = given._replace(is_weights=None)
    result = compiled(function, **constants)(given)
    expected_advantages, expected_returns = loop(batch, **constants, **loop_constants)
    for actual, expected in ((result.advantages, expected_advantages), (result.returns, expected_returns)):
        assert actual.dtype == jnp.float32
        assert any(np.abs(array).max(initial=0) > 0 for array in expected)
        for got, wanted in zip(ragged.taken(actual, batch, "packed"), expected, strict=True):
            np.testing.assert_allclose(got, wanted, **CLOSE)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (0.9, 0.0)])
def test_gae_agrees_with_a_loop(gamma, lam):
    assert_agrees(gae, loop_gae, {"gamma": gamma, "lam": lam})


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_agrees_with_a_loop(gamma):
    assert_agrees(reinforce_plus_plus, loop_reinforce_plus_plus, {"gamma": gamma})


@pytest.mark.parametrize("seed", [0, 1])
def test_remax_agrees_with_a_loop(seed):
    assert_agrees(remax, loop_remax, {}, seed=seed)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("handle_zero_tail", [False, True])
@pytest.mark.parametrize(("function", "by_action"), [(optimal_token_baseline, False), (tir, True)])
def test_optimal_baselines_agree_with_a_loop(function, by_action, handle_zero_tail, weighted):
    constants = {"handle_zero_tail": handle_zero_tail}
    assert_agrees(function, loop_optimal_baseline, constants, by_action=by_action, weighted=weighted)
