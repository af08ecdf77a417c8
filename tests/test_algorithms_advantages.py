import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verl_golden import (
    BATCHES,
    NUM_GROUPS,
    NUM_SEQUENCES,
    assert_close,
    cases,
    layouts,
    precision,
    programs,
)

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.advantages import ADVANTAGES, grpo, rloo, whiten


def per_token(rewards, mask, sequence_ids, group_ids, present, *, name, constants):
    rewards_S = segments.sequence_sum(rewards, mask, sequence_ids, NUM_SEQUENCES)
    advantages_S = ADVANTAGES[name](rewards_S, group_ids, present, NUM_GROUPS, **dict(constants))
    return jnp.where(mask, segments.to_tokens(advantages_S, sequence_ids), 0)


compiled_per_token = jax.jit(per_token, static_argnames=("name", "constants"))


@programs
@layouts
@pytest.mark.parametrize("case", cases("advantage", "grpo", "rloo"))
def test_advantages_agree_with_verl(case, layout, compiled, dtype):
    batch = BATCHES[case["batch"]]
    tokens = layout(batch)
    num_rows = len(batch["mask"])
    groups = np.zeros(NUM_SEQUENCES, np.int32)
    groups[:num_rows] = batch["group_ids"]
    constants = tuple(("normalize_by_std", value) for value in case["params"].values())
    with precision(dtype):
        function = compiled_per_token if compiled else per_token
        result = function(
            jnp.asarray(tokens.place(batch["rewards"], dtype)),
            jnp.asarray(tokens.mask),
            jnp.asarray(tokens.sequence_ids),
            jnp.asarray(groups),
            jnp.arange(NUM_SEQUENCES) < num_rows,
            name=case["name"],
            constants=constants,
        )
    assert_close(tokens.take(result), case["advantages"], dtype)


def of(function, rewards, groups, valid=None, **constants):
    rewards = np.array(rewards, np.float32)
    valid = np.ones(rewards.shape, bool) if valid is None else np.array(valid)
    groups = np.array(groups, np.int32)
    return np.asarray(compiled(function)(rewards, groups, valid, int(groups.max()) + 1, **constants))


@functools.cache
def compiled(function):
    return jax.jit(function, static_argnums=3)


centred = functools.partial(grpo, normalize_by_std=False)


def test_each_prompt_instance_is_its_own_group():
    np.testing.assert_array_equal(of(centred, [1, 0, 1, 1], [0, 0, 1, 1]), [0.5, -0.5, 0, 0])


def test_two_rows_with_the_same_text_do_not_share_a_baseline():
    rewards = [0] * 16 + [1] * 16
    np.testing.assert_array_equal(of(rloo, rewards, [0] * 16 + [1] * 16), np.zeros(32))
    merged = of(rloo, rewards, [0] * 32)
    np.testing.assert_allclose(merged, [-16 / 31] * 16 + [16 / 31] * 16, rtol=1e-6)


def test_every_group_gets_advantages():
    advantages = of(centred, [1, 0, 1, 1, 0, 0, 0, 1], [0, 0, 1, 1, 2, 2, 3, 3])
    np.testing.assert_array_equal(advantages, [0.5, -0.5, 0, 0, 0, 0, -0.5, 0.5])


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize(("reward", "size"), [(0.7, 3), (0.1, 3), (1 / 3, 3), (1e6 / 3, 64)])
def test_equal_rewards_give_exactly_zero(name, reward, size):
    np.testing.assert_array_equal(of(ADVANTAGES[name], [reward] * size, [0] * size), np.zeros(size))


def test_equal_rewards_give_zero_without_epsilon_too():
    np.testing.assert_array_equal(of(grpo, [0.7, 0.7, 0.7], [0, 0, 0], epsilon=0.0), [0, 0, 0])


@pytest.mark.parametrize("missing", [0.0, 1e30, np.nan, np.inf])
def test_a_sample_without_reward_counts_for_nothing(missing):
    rewards, valid = [1, 0, missing, 1], [True, True, False, True]
    np.testing.assert_allclose(of(centred, rewards, [0] * 4, valid), [1 / 3, -2 / 3, 0, 1 / 3], rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        of(grpo, rewards, [0] * 4, valid, epsilon=0.0),
        [0.577350269, -1.154700538, 0, 0.577350269],
        rtol=1e-6,
    )
    np.testing.assert_allclose(of(rloo, rewards, [0] * 4, valid), [0.5, -1, 0, 0.5], rtol=1e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_group_without_any_reward_gets_zeros_and_leaves_the_others_alone(name):
    rewards, groups = [np.nan, np.nan, 1, 0], [0, 0, 1, 1]
    advantages = of(ADVANTAGES[name], rewards, groups, [False, False, True, True])
    np.testing.assert_array_equal(advantages[:2], 0)
    np.testing.assert_array_equal(advantages[2:], of(ADVANTAGES[name], [1, 0], [0, 0]))


def test_padding_of_the_samples_gets_zero_even_if_it_is_called_valid():
    groups = jnp.array([0, 0, 1, 1], jnp.int32)
    for function in ADVANTAGES.values():
        advantages = function(jnp.array([1.0, 0, 5, 7]), groups, jnp.ones(4, bool), 1)
        np.testing.assert_array_equal(advantages[2:], 0)
        np.testing.assert_array_equal(advantages[:2], of(function, [1, 0], [0, 0]))


def test_a_group_of_one_has_mean_zero_and_std_one():
    rewards, groups, valid = [0.5, -2.0, 3.0], [0, 1, 1], [True, True, False]
    np.testing.assert_allclose(of(grpo, rewards, groups, valid), [0.5, -2, 0], rtol=2e-6)
    np.testing.assert_array_equal(of(centred, rewards, groups, valid), [0.5, -2, 0])
    np.testing.assert_array_equal(of(rloo, rewards, groups, valid), [0.5, -2, 0])


def test_a_small_difference_on_a_large_offset_survives_float32():
    # 2^23 + 1 is the last odd step that float32 can tell from its neighbours.
    advantages = of(centred, [2.0**23, 2.0**23 + 1, 2.0**23, 2.0**23 + 1], [0] * 4)
    np.testing.assert_array_equal(advantages, [-0.5, 0.5, -0.5, 0.5])


SAMPLES = 12
samples = st.lists(
    st.tuples(st.integers(-8, 8), st.integers(0, NUM_GROUPS - 1), st.booleans()),
    min_size=SAMPLES,
    max_size=SAMPLES,
)
compiled_grpo = jax.jit(functools.partial(grpo, num_groups=NUM_GROUPS))
compiled_rloo = jax.jit(functools.partial(rloo, num_groups=NUM_GROUPS))
few_examples = settings(max_examples=40, deadline=None)


def columns(rows):
    rewards, groups, valid = (np.array(column) for column in zip(*rows, strict=True))
    return rewards.astype(np.float32), groups.astype(np.int32), valid


@few_examples
@given(rows=samples, order=st.permutations(range(SAMPLES)))
def test_advantages_move_with_their_samples(rows, order):
    rewards, groups, valid = columns(rows)
    order = np.array(order)
    for function in (compiled_grpo, compiled_rloo):
        moved = function(rewards[order], groups[order], valid[order])
        np.testing.assert_allclose(moved, np.asarray(function(rewards, groups, valid))[order], rtol=1e-5, atol=1e-6)


@few_examples
@given(rows=samples, shift=st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_of_a_group_changes_nothing(rows, shift):
    rewards, groups, valid = columns(rows)
    in_a_group = (np.bincount(groups[valid], minlength=NUM_GROUPS) > 1)[groups]
    for function in (compiled_grpo, compiled_rloo):
        before, after = function(rewards, groups, valid), function(rewards + shift, groups, valid)
        np.testing.assert_array_equal(np.asarray(after)[in_a_group], np.asarray(before)[in_a_group])


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
    np.testing.assert_allclose(compiled_grpo(rewards, groups, valid), expected["grpo"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(compiled_rloo(rewards, groups, valid), expected["rloo"], rtol=1e-5, atol=1e-6)


compiled_whiten = jax.jit(whiten, static_argnames="shift_mean")


def test_whitening_by_row_uses_the_row_own_statistics():
    rows = jnp.array([[1.0, 3], [10, 20]])
    whitened = jax.jit(jax.vmap(functools.partial(whiten, ddof=0)))(rows, jnp.ones((2, 2)))
    np.testing.assert_allclose(whitened, [[-1, 1], [-1, 1]], rtol=1e-6)


@pytest.mark.parametrize(
    ("ddof", "expected"),
    [
        (1, [-0.948683298, -0.632455532, 0.316227766, 1.264911063]),
        (0, [-1.095445114, -0.730296743, 0.365148371, 1.460593486]),
    ],
)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_whitening_uses_the_statistics_of_the_whole_batch(shape, ddof, expected):
    values = jnp.array([1.0, 2, 5, 8]).reshape(shape)
    np.testing.assert_allclose(compiled_whiten(values, jnp.ones(shape), ddof=ddof).ravel(), expected, rtol=1e-6)


@pytest.mark.parametrize("masked", [100.0, np.nan, np.inf])
def test_whitening_leaves_masked_places_out_and_at_zero(masked):
    values, mask = jnp.array([1, 3, masked]), jnp.array([1, 1, 0])
    np.testing.assert_allclose(compiled_whiten(values, mask), [-0.707106779, 0.707106779, 0], rtol=1e-6)
    np.testing.assert_allclose(
        compiled_whiten(values, mask, shift_mean=False), [0.707106779, 2.121320338, 0], rtol=1e-6
    )


@pytest.mark.parametrize(("values", "mask"), [([5.0, 7.0], [1, 0]), ([0.7, 0.7, 0.7], [1, 1, 1]), ([1.0], [0])])
def test_whitening_without_spread_gives_zeros(values, mask):
    np.testing.assert_array_equal(compiled_whiten(jnp.array(values), jnp.array(mask)), np.zeros(len(values)))
