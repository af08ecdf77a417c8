import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models.config import Rope
from jaxrl_llm.models.layers import (
    Linear,
    precision_of,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    ("head_dim", "factor", "unscaled", "divided", "listed"),
    [
        (
            128,
            8.0,
            28,
            35,
            {
                29: 2.166570764e-03,
                31: 8.567514129e-04,
                35: 9.556212354e-05,
                63: 3.068925989e-07,
            },
        ),
        (64, 32.0, 14, 18, {15: 1.290547928e-03, 16: 4.295567966e-04, 31: 9.418306725e-08}),
    ],
)
def test_llama3_scaling_keeps_short_wavelengths_divides_long_ones_and_ramps_between(
    head_dim, factor, unscaled, divided, listed
):
    got = np.asarray(rope_frequencies(Rope(5e5, "llama3", factor, 1.0, 4.0, 8192), head_dim), np.float64)
    plain = 5e5 ** (-np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(got[: unscaled + 1], plain[: unscaled + 1], rtol=1e-6)
    np.testing.assert_allclose(got[divided:], plain[divided:] / factor, rtol=1e-6)
    between = slice(unscaled + 1, divided)
    assert np.all((plain[between] / factor < got[between]) & (got[between] < plain[between]))
    for i, value in listed.items():
        assert got[i] == pytest.approx(value, rel=1e-6), i


def test_plain_and_linear_frequencies():
    plain = 1e4 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(rope_frequencies(Rope(1e4), 8), plain, rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(Rope(1e4, "linear", 4.0), 8), plain / 4, rtol=1e-6)


def test_rotation_turns_the_pairs_of_the_two_halves_by_position_times_frequency():
    positions = np.array([[0, 1, 7, 1000, 1999]])
    x = random(1, 5, 2, 8)
    got = rotate(x, *rope_tables(positions, Rope(1e4), 8))
    angles = positions[0][:, None] * 1e4 ** (-np.arange(4) / 4)
    turned = (x[0, ..., :4] + 1j * x[0, ..., 4:]) * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(got[0], np.concatenate([turned.real, turned.imag], -1), atol=5e-4)
    np.testing.assert_array_equal(got[0, 0], x[0, 0])


def test_rotated_products_depend_on_the_distance_alone():
    q, k = random(1, 1, 1, 8, seed=1), random(1, 1, 1, 8, seed=2)

    def product(at, distance):
        tables = [rope_tables(np.array([[p]]), Rope(1e4), 8) for p in (at + distance, at)]
        return float(jnp.sum(rotate(q, *tables[0]) * rotate(k, *tables[1])))

    assert product(0, 3) == pytest.approx(product(50, 3), abs=1e-4)
    assert abs(product(0, 3) - product(0, 4)) > 1e-2


def test_the_norm_is_computed_in_float32_whatever_comes_in():
    x, scale = random(3, 16), random(16, seed=1)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(rms_norm(x, scale, 1e-5), expected, rtol=1e-5)
    large = jnp.full((1, 16), 300.0, jnp.float16)  # its square is beyond float16
    np.testing.assert_allclose(rms_norm(large, jnp.ones(16), 1e-5), 1.0, rtol=1e-3)
    assert rms_norm(x.astype(jnp.bfloat16), scale, 1e-5).dtype == jnp.bfloat16


def test_a_linear_layer_contracts_its_leading_kernel_dimensions_and_adds_its_bias():
    layer = Linear(nnx.Rngs(0), "BTNH,NHD->BTD", 1, (2, 3, 5), ("heads", "head_dim", "embed"), inputs=2, bias=True)
    assert layer.kernel.get_metadata()["logical_dims"] == ("layers", "heads", "head_dim", "embed")
    assert layer.bias.get_metadata()["logical_dims"] == ("layers", "norm")
    assert layer.kernel[...].shape == (1, 2, 3, 5)
    assert float(jnp.abs(layer.bias[...]).max()) == 0
    kernel, bias = random(2, 3, 5), random(5, seed=1)
    graph, state = nnx.split(layer)
    nnx.replace_by_pure_dict(state, {"kernel": kernel, "bias": bias})
    layer = nnx.merge(graph, state)
    x = random(1, 4, 2, 3, seed=2)
    np.testing.assert_allclose(layer(x), x.reshape(1, 4, 6) @ kernel.reshape(6, 5) + bias, atol=1e-5)


def test_a_kernel_starts_with_the_variance_of_one_over_its_inputs():
    kernel = Linear(nnx.Rngs(0), "BTNH,NHD->BTD", 2, (8, 16, 20), ("heads", "head_dim", "embed"), inputs=2).kernel
    assert float(kernel[...].std()) == pytest.approx(128**-0.5, rel=0.05)


def test_float32_is_multiplied_in_full_precision():
    assert precision_of(jnp.dtype("float32")) == jax.lax.Precision.HIGHEST
    assert precision_of(jnp.dtype("bfloat16")) == jax.lax.Precision.DEFAULT
