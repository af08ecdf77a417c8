import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxrl_llm.models.config import Rope
from jaxrl_llm.models.layers import (
    Linear,
    attend,
    attention_mask,
    precision_of,
    rms_norm,
    rope_frequencies,
    rope_tables,
    rotate,
)
from tests import numpy_decoder


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


@pytest.mark.parametrize("window", [1, 2, 3, 100])
def test_the_mask_allows_earlier_tokens_of_the_same_segment_within_the_window(window):
    segments = np.array([[1, 1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 0, 0], [9, 0, 1, 2, 3, 4, 5, 6]])
    got = np.asarray(attention_mask(positions, segments, jnp.int32(window)))
    for b in range(2):
        for t in range(8):
            for s in range(8):
                distance = positions[b, t] - positions[b, s]
                same = segments[b, t] == segments[b, s]
                assert got[b, t, s] == (same and 0 <= distance < window), (b, t, s)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_a_loop_over_heads_and_tokens(window):
    B, T, N, K, H = 2, 7, 6, 2, 4
    q, k, v = random(B, T, N, H), random(B, K, T, H, seed=1), random(B, K, T, H, seed=2)
    positions = np.broadcast_to(np.arange(T), (B, T))
    mask = attention_mask(positions, np.ones((B, T)), jnp.int32(window or 100))
    got = jax.jit(attend)(q, k, v, mask)
    for b in range(B):
        for n in range(N):
            expected = numpy_decoder.attend(q[b, :, n], k[b, n // 3], v[b, n // 3], window)
            np.testing.assert_allclose(got[b, :, n], expected, atol=1e-5)


def test_a_query_that_sees_nothing_gets_the_mean_and_finite_gradients():
    q, k, v = random(1, 2, 1, 4), random(1, 1, 3, 4, seed=1), random(1, 1, 3, 4, seed=2)
    mask = jnp.array([[[False] * 3, [True, False, False]]])
    out = attend(q, k, v, mask)
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0].mean(0), rtol=1e-5)
    np.testing.assert_allclose(out[0, 1, 0], v[0, 0, 0], rtol=1e-5)
    gradients = jax.jit(jax.grad(lambda *x: attend(*x, mask).sum(), (0, 1, 2)))(q, k, v)
    assert all(bool(jnp.isfinite(g).all()) for g in gradients)


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
