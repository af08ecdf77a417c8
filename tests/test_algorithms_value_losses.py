import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.value_losses import clipped


def one_row(values, old, returns, mask, value_clip=0.2):
    """One sequence, where the mask is 2 padding with a mask that is not to be believed."""
    ids = jnp.where(jnp.array(mask) == 2, 1, 0)
    arrays = (jnp.array(x) for x in (values, old, returns, mask))
    return clipped(*arrays, sequence_ids=ids, num_sequences=1, value_clip=value_clip)


def test_the_worse_of_the_value_and_the_clipped_value_counts():
    loss = one_row([1.5, 1.1], [1.0, 1.0], [3.0, 3.0], [1, 1])
    np.testing.assert_allclose(loss.token_loss, [1.62, 0.5 * 1.9**2], rtol=1e-6)
    assert loss.metrics["critic/vf_clipfrac"] == (1, 2)


def test_a_value_that_has_moved_away_from_the_return_is_not_spared():
    # Beyond the clip range on the far side of the return the free error is the larger.
    loss = one_row([1.5], [1.0], [0.0], [1])
    np.testing.assert_allclose(loss.token_loss, [0.5 * 1.5**2], rtol=1e-6)
    assert loss.metrics["critic/vf_clipfrac"] == (0, 1)


@jax.grad
def gradient(values):
    return one_row(values, [1.0, 1, 1], [3.0, 3, 0], [1, 1, 1]).token_loss.sum()


def test_there_is_no_gradient_where_the_clip_holds():
    np.testing.assert_allclose(gradient(jnp.array([1.5, 1.1, 1.5])), [0, 1.1 - 3, 1.5], rtol=1e-6)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_masked_and_padding_tokens_cannot_poison_loss_or_gradient(poison):
    def total(values, others):
        loss = one_row(values, others, others, [1, 0, 1, 2])
        return loss.token_loss.sum(), loss

    bad, clean = jnp.array([1.0, poison, 2, poison]), jnp.array([1.0, 0, 2, 0])
    others, clean_others = bad * 0.5, clean * 0.5
    (_, loss), gradient = jax.value_and_grad(total, has_aux=True)(bad, others)
    (_, expected), expected_gradient = jax.value_and_grad(total, has_aux=True)(clean, clean_others)
    np.testing.assert_array_equal(gradient, expected_gradient)
    np.testing.assert_allclose(loss.token_loss, [0.125, 0, 0.5, 0], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, loss, expected)


def test_micro_batches_add_up_to_the_whole():
    values, old, returns = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    cuts = (slice(0, 8), slice(0, 3), slice(3, 8))
    whole, *parts = (one_row(values[c], old[c], returns[c], np.ones(8)[c]) for c in cuts)
    np.testing.assert_array_equal(np.concatenate([part.token_loss for part in parts]), whole.token_loss)
    summed = jax.tree.map(lambda *x: sum(x), *(part.metrics for part in parts))
    assert summed == whole.metrics
    assert 0 < whole.metrics["critic/vf_clipfrac"][0] < 8


def test_bfloat16_inputs_give_a_float32_loss():
    half = jnp.array([1.0, 2.0], jnp.bfloat16)
    loss = one_row(half, half, half, [1, 1])
    assert {part.dtype for part in jax.tree.leaves(loss)} == {jnp.dtype("float32")}
