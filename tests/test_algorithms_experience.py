import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged

from jaxrl_llm.algorithms.experience import valid_sequences, valid_tokens, whiten

compiled_whiten = jax.jit(whiten, static_argnames="shift_mean")


@pytest.mark.parametrize("layout", ragged.LAYOUTS)
def test_only_actions_of_sequences_with_a_reward_count(layout):
    batch = ragged.batch()
    counted = valid_tokens(ragged.experience(batch, layout))
    for found, mask, valid in zip(ragged.taken(counted, batch, layout), batch.masks, batch.valid, strict=True):
        np.testing.assert_array_equal(found, mask & valid)


def test_padding_of_the_samples_does_not_count_even_if_it_is_called_valid():
    batch = ragged.batch()
    given = ragged.experience(batch, "padded")
    padding = np.arange(12) >= 8
    given = given._replace(group_ids=jnp.where(padding, 12, given.group_ids), valid=jnp.ones(12, bool))
    np.testing.assert_array_equal(valid_sequences(given), ~padding)
    np.testing.assert_array_equal(valid_tokens(given), given.mask & (given.sequence_ids < 8))


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
