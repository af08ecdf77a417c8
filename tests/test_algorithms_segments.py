import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import segments

# Two sequences, of two and three valid tokens; 2 is the id of padding.
MASK = jnp.array([0, 1, 1, 1, 1, 0, 1, 0])
IDS = jnp.array([0, 0, 0, 1, 1, 1, 1, 2])
VALUES = jnp.array([9.0, 1, 2, 3, 4, 9, 5, 9])


@pytest.mark.parametrize("shape", [(8,), (2, 4), (1, 2, 2, 2)])
@pytest.mark.parametrize("compiled", [False, True])
def test_reductions_are_per_sequence_in_any_shape(shape, compiled):
    def reduce(*arrays):
        return segments.sequence_sum(*arrays, 2), segments.sequence_mean(*arrays, 2)

    arrays = [x.reshape(shape) for x in (VALUES, MASK, IDS)]
    total, mean = (jax.jit(reduce) if compiled else reduce)(*arrays)
    np.testing.assert_array_equal(total, [3, 12])
    np.testing.assert_array_equal(mean, [1.5, 4])
    np.testing.assert_array_equal(segments.sequence_lengths(*arrays[1:], 2), [2, 3])
    spread = segments.to_tokens(jnp.array([10.0, 20.0]), arrays[2])
    assert spread.shape == shape
    np.testing.assert_array_equal(spread.ravel(), [10, 10, 10, 20, 20, 20, 20, 0])


@pytest.mark.parametrize("poison", [jnp.nan, jnp.inf, -jnp.inf])
@pytest.mark.parametrize(
    ("reduce", "weight"), [(segments.sequence_sum, 1), (segments.sequence_mean, IDS * -1 / 6 + 1 / 2)]
)
def test_masked_values_leak_neither_into_results_nor_into_gradients(reduce, weight, poison):
    def loss(values):
        return reduce(values, MASK, IDS, 2).sum()

    value, gradient = jax.value_and_grad(loss)(jnp.where(MASK == 1, VALUES, poison))
    assert value == loss(VALUES)
    np.testing.assert_allclose(gradient, MASK * weight, rtol=1e-6)


@pytest.mark.parametrize("padding", [1.0, 10.0, np.nan])
def test_the_mean_over_a_sequence_does_not_see_its_padding(padding):
    def mean_advantage(advantages):
        return segments.sequence_mean(advantages, jnp.array([1, 1, 0, 0]), jnp.zeros(4, jnp.int32), 1)[0]

    value, gradient = jax.value_and_grad(mean_advantage)(jnp.array([1.0, 1.0, padding, padding]))
    assert value == 1.0
    np.testing.assert_array_equal(gradient, [0.5, 0.5, 0, 0])


@pytest.mark.parametrize("width", [4, 5, 9])
def test_the_ratio_of_a_sequence_does_not_change_with_the_width_of_the_padding(width):
    log_ratio = jnp.full(width, 5.0).at[:3].set(jnp.array([0.3, -0.1, 0.4]))
    mask = jnp.arange(width) < 3
    ratio = jnp.exp(segments.sequence_mean(log_ratio, mask, jnp.zeros(width, jnp.int32), 1))
    np.testing.assert_allclose(ratio, [1.221402758], rtol=1e-6)


def test_padding_never_counts_even_where_the_mask_says_so():
    # Lengths 2 (cut off, no EOS), 2 (EOS, id 2, included) and 4. A mask built from the first EOS would have
    # ones all along the first row.
    token_ids = jnp.array([[5, 6, 0, 0], [5, 2, 0, 0], [5, 6, 7, 8]])
    ids = jnp.array([[0, 0, 3, 3], [1, 1, 3, 3], [2, 2, 2, 2]])
    mask = jnp.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 1]])
    valid = segments.valid_tokens(mask, ids, 3)
    np.testing.assert_array_equal(valid, [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(segments.sequence_lengths(mask, ids, 3), [2, 2, 4])
    np.testing.assert_array_equal(segments.sequence_sum(token_ids, mask, ids, 3), [11, 7, 26])


@pytest.mark.parametrize("length", [2, 3])
def test_lengths_are_right_where_the_ids_are_constant_zeros(length):
    def lengths(mask):
        return segments.sequence_lengths(mask, jnp.zeros(length, jnp.int32), 1)

    counted = jax.jit(jax.vmap(lengths))(jnp.ones((length, length)))
    np.testing.assert_array_equal(counted, np.full((length, 1), length))


def test_a_sequence_without_tokens_has_sum_and_mean_zero():
    np.testing.assert_array_equal(segments.sequence_sum(VALUES, MASK, IDS, 4), [3, 12, 0, 0])
    np.testing.assert_array_equal(segments.sequence_mean(VALUES, MASK, IDS, 4), [1.5, 4, 0, 0])


def test_sums_of_bfloat16_are_float32():
    ones = jnp.ones(1000, jnp.bfloat16)  # a bfloat16 sum stops at 256
    total = segments.sequence_sum(ones, ones, jnp.zeros(1000, jnp.int32), 1)
    assert total.dtype == jnp.float32
    assert total[0] == 1000


def test_the_gradient_of_spreading_is_the_sum_over_the_tokens():
    gradient = jax.grad(lambda s: (segments.to_tokens(s, IDS) * VALUES).sum())(jnp.array([1.0, 1.0]))
    np.testing.assert_array_equal(gradient, [12, 21])


# Three sequences and padding; the last lies in a row of its own. Tokens outside the mask have 100.
ROW_IDS = jnp.array([[0, 0, 0, 0, 1, 1, 3, 3], [2, 2, 2, 2, 2, 2, 2, 2]])
ROW_MASK = jnp.array([[0, 1, 0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 1, 1, 0, 0]], bool)
ROW_VALUES = jnp.array([[100.0, 1, 100, 2, 3, 4, 100, 100], [100, 100, 5, 100, 6, 7, 100, 100]])
RUNNING = {
    "sum_to_go": (segments.sum_to_go, [[0, 103, 0, 2, 7, 4, 0, 0], [0, 0, 318, 0, 213, 207, 0, 0]]),
    "half": (
        lambda *arrays: segments.sum_to_go(*arrays, discount=0.5),
        [[0, 102, 0, 2, 5, 4, 0, 0], [0, 0, 159.75, 0, 109.5, 207, 0, 0]],
    ),
    "following": (segments.following, [[1, 2, 2, 0, 4, 0, 0, 0], [5, 5, 6, 6, 7, 0, 0, 0]]),
    "cumulative_sum": (segments.cumulative_sum, [[0, 1, 1, 3, 3, 7, 0, 0], [0, 0, 5, 5, 11, 18, 18, 18]]),
}
running = pytest.mark.parametrize("name", RUNNING)


@running
@pytest.mark.parametrize("compiled", [False, True])
def test_running_sums_start_anew_in_every_sequence(name, compiled):
    function, expected = RUNNING[name]
    result = (jax.jit(function) if compiled else function)(ROW_VALUES, ROW_MASK, ROW_IDS)
    np.testing.assert_array_equal(result, expected)
    flat = function(ROW_VALUES.ravel(), ROW_MASK.ravel(), ROW_IDS.ravel())
    np.testing.assert_array_equal(flat, np.ravel(expected))
    shape = (2, 1, 1, 8)
    folded = function(ROW_VALUES.reshape(shape), ROW_MASK.reshape(shape), ROW_IDS.reshape(shape))
    np.testing.assert_array_equal(folded, np.reshape(expected, shape))


@running
def test_running_sums_keep_a_poisoned_sequence_to_itself(name):
    function, expected = RUNNING[name]
    poisoned = ROW_IDS == 1
    result = function(jnp.where(poisoned | (ROW_IDS == 3), jnp.nan, ROW_VALUES), ROW_MASK & ~poisoned, ROW_IDS)
    np.testing.assert_array_equal(result, np.where(poisoned, 0, expected))


@pytest.mark.parametrize("function", [segments.following, segments.cumulative_sum])
def test_following_and_cumulative_sum_never_read_outside_the_mask(function):
    values = jnp.where(ROW_MASK, ROW_VALUES, jnp.nan)
    expected = function(ROW_VALUES, ROW_MASK, ROW_IDS)
    np.testing.assert_array_equal(function(values, ROW_MASK, ROW_IDS), expected)


def test_running_sums_of_bfloat16_are_float32():
    ones = jnp.ones(1000, jnp.bfloat16)
    for function, place in ((segments.sum_to_go, 0), (segments.cumulative_sum, -1)):
        total = function(ones, ones > 0, jnp.zeros(1000, jnp.int32))
        assert total.dtype == jnp.float32
        assert total[place] == 1000


@pytest.mark.parametrize("compiled", [False, True])
def test_offsets_count_all_tokens_and_ranks_those_in_the_mask(compiled):
    def both(mask, ids):
        return segments.offsets(mask, ids, 3), segments.ranks(mask, ids, 3)

    for shape in ((2, 8), (16,), (2, 1, 1, 8)):
        results = (jax.jit(both) if compiled else both)(ROW_MASK.reshape(shape), ROW_IDS.reshape(shape))
        for result, expected in zip(
            results,
            (
                [[0, 0, 0, 2, 0, 1, 0, 0], [0, 0, 0, 0, 2, 3, 0, 0]],
                [[0, 0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 2, 0, 0]],
            ),
            strict=True,
        ):
            assert result.dtype == jnp.int32
            np.testing.assert_array_equal(result, np.reshape(expected, shape))


def test_offsets_and_ranks_are_right_where_the_ids_are_constant_zeros():
    for function in (segments.offsets, segments.ranks):
        counted = jax.jit(jax.vmap(lambda mask, f=function: f(mask, jnp.zeros(3, jnp.int32), 1)))(
            jnp.ones((2, 3), bool)
        )
        np.testing.assert_array_equal(counted, [[0, 1, 2], [0, 1, 2]])
