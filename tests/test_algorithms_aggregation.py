import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import AGGREGATIONS, token_weights
from jaxrl_llm.types import UserError

# Losses of three sequences; the third has no valid token.
LOSSES = [[1.0, 2, 3], [10.0], []]


def rows(losses, width):
    """One sequence a row: losses, mask and sequence ids, [B, T]. Padding holds NaN."""
    values = np.full((len(losses), width), np.nan, np.float32)
    ids = np.full((len(losses), width), len(losses), np.int32)
    for index, sequence in enumerate(losses):
        values[index, : len(sequence)] = sequence
        ids[index, : len(sequence)] = index
    return values, np.isfinite(values), ids


def packed_row(losses):
    """All sequences in one row, with a token of no loss before each and padding at the end."""
    values, ids = [], []
    for index, sequence in enumerate(losses):
        values += [np.nan, *sequence]
        ids += [index] * (1 + len(sequence))
    values, ids = [*values, np.nan, np.nan], [*ids, len(losses), len(losses)]
    values = np.array([values], np.float32)
    return values, np.isfinite(values), np.array([ids], np.int32)


compiled_weights = jax.jit(token_weights, static_argnames=("mode", "num_sequences"))


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_weights_agree_with_a_loop_over_sequences(mode):
    _, mask, ids = packed_row(LOSSES)
    per_sequence = {
        "token-mean": [1 / 4, 1 / 4],
        "token-sum": [1, 1],
        "seq-mean-token-sum": [1 / 2, 1 / 2],
        "seq-mean-token-mean": [1 / 6, 1 / 2],
        "seq-mean-token-sum-norm": [1 / 16, 1 / 16],
        "batch-mean-token-mean": [1 / 9, 1 / 3],
    }[mode]
    expected = np.where(mask, np.array([*per_sequence, 0, 0])[ids], 0)
    function = functools.partial(token_weights, mode, num_sequences=3, length_norm=8, batch_sequences=3)
    for weights_of in (function, jax.jit(function)):
        weights = weights_of(jnp.asarray(mask), jnp.asarray(ids))
        assert weights.dtype == jnp.float32
        np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_length_norm_is_a_constant_and_not_the_width(width, micro_batches):
    values, mask, ids = rows([[1.0, 1], [0.5] * 4], width)
    weights = compiled_weights("seq-mean-token-sum-norm", mask, ids, 2, length_norm=8)
    parts = zip(np.split(np.nan_to_num(values), micro_batches), np.split(weights, micro_batches), strict=True)
    assert sum(float((value * weight).sum()) for value, weight in parts) == 0.25


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_mini_batches_are_normalised_each_on_its_own_under_vmap(mode):
    # Sequences 0 and 1 in the first mini-batch, sequence 2 in the second. [A, M, B, T] = [2, 1, 2, 2].
    ids = jnp.array([[[[0, 0], [1, 3]]], [[[2, 2], [3, 3]]]])
    mask = ids < 3
    weights = jax.jit(
        jax.vmap(functools.partial(token_weights, mode, num_sequences=3, length_norm=8, batch_sequences=2))
    )(mask, ids)
    for index in range(2):
        alone = compiled_weights(mode, mask[index], ids[index], 3, length_norm=8, batch_sequences=2)
        np.testing.assert_array_equal(weights[index], alone)
    total = {
        "token-mean": 1,
        "token-sum": 2,
        "seq-mean-token-sum": 2,
        "seq-mean-token-mean": 1,
        "seq-mean-token-sum-norm": 0.25,
        "batch-mean-token-mean": 0.5,
    }
    assert float(weights[1].sum()) == total[mode]


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_mini_batch_without_valid_tokens_has_weights_zero(mode):
    weights = token_weights(mode, jnp.zeros((2, 3)), jnp.full((2, 3), 4), 4, length_norm=8, batch_sequences=4)
    np.testing.assert_array_equal(weights, np.zeros((2, 3)))


def test_the_mask_of_padding_is_not_believed():
    weights = token_weights("token-mean", jnp.ones(4), jnp.array([0, 0, 1, 1]), 1)
    np.testing.assert_array_equal(weights, [0.5, 0.5, 0, 0])


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm.algorithms.aggregation import token_weights

values = jnp.array([[1.0, 1, 1, 1], [6, 0, 0, 0]])
mask = jnp.array([[1, 1, 1, 1], [1, 0, 0, 0]])
ids = jnp.array([[0, 0, 0, 0], [1, 2, 2, 2]])
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
sharded = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in (values, mask, ids)]
loss = jax.jit(lambda values, mask, ids: jnp.sum(token_weights("token-mean", mask, ids, 2) * values))
print(len(jax.devices()), float(loss(values, mask, ids)), float(loss(*sharded)))
"""


def test_token_mean_over_two_devices_is_that_of_one():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "2.0", "2.0"], done.stderr


def test_an_unknown_mode_is_refused_with_all_names():
    with pytest.raises(UserError, match=r"'token_mean'; expected one of token-mean, token-sum"):
        token_weights("token_mean", jnp.ones(1), jnp.zeros(1, jnp.int32), 1)


def test_length_norm_is_asked_for():
    with pytest.raises(UserError, match=r"length_norm: expected a number of tokens, got None"):
        token_weights("seq-mean-token-sum-norm", jnp.ones(1), jnp.zeros(1, jnp.int32), 1)


def test_the_number_of_sequences_of_the_batch_is_asked_for():
    with pytest.raises(UserError, match=r"batch_sequences: expected a number of sequences, got None"):
        token_weights("batch-mean-token-mean", jnp.ones(1), jnp.zeros(1, jnp.int32), 1)
