import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.value_losses import clipped


def one_row(values, old, returns, mask, value_clip=0.2):
    """One sequence."""
    arrays = [jnp.array(x) for x in (values, old, returns, mask)]
    ids = jnp.zeros(arrays[-1].shape, jnp.int32)
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


def test_bfloat16_inputs_give_a_float32_loss():
    half = jnp.array([1.0, 2.0], jnp.bfloat16)
    loss = one_row(half, half, half, [1, 1])
    assert {part.dtype for part in jax.tree.leaves(loss)} == {jnp.dtype("float32")}
