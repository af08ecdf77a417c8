"""Every program of attention against a numpy loop over rows, heads and tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import attention
from jaxrl_llm.models.attention import attend, attend_rows, attention_mask, choose, kept_kv_heads, repeat_kv
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import INFERENCE, ONE_DEVICE, TRAINING, Layout
from tests import numpy_decoder
from tests.builders import TINY


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def on(**axes):
    return Layout(TRAINING, make_mesh(axes, jax.devices()[: int(np.prod(list(axes.values())))]))


@pytest.mark.parametrize("window", [1, 2, 3, None])
def test_the_mask_allows_earlier_tokens_of_the_same_segment_within_the_window(window):
    segments = np.array([[1, 1, 1, 1, 2, 2, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 0, 0], [9, 0, 1, 2, 3, 4, 5, 6]])
    got = np.asarray(attention_mask(positions, segments, positions, segments, window))
    for b in range(2):
        for t in range(8):
            for s in range(8):
                distance = positions[b, t] - positions[b, s]
                same = segments[b, t] == segments[b, s]
                assert got[b, t, s] == (same and 0 <= distance < (window or 100)), (b, t, s)


@pytest.mark.parametrize("window", [None, 3])
def test_attention_equals_a_loop_over_heads_and_tokens(window):
    B, T, N, K, H = 2, 7, 6, 2, 4
    q, k, v = random(B, T, N, H), random(B, K, T, H, seed=1), random(B, K, T, H, seed=2)
    positions = np.broadcast_to(np.arange(T), (B, T))
    tokens = (positions, np.ones((B, T)))
    mask = attention_mask(*tokens, *tokens, window)
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


# Rows of packed sequences, ends of rows that are padding (segment 0), and a whole row of it.
SEGMENTS = [[5, 11, 3, 5], [24], [1, 9, 14], [0]]
T, N, K, H = 24, 4, 2, 8


def packed_rows():
    """Positions and segments [4, T] of rows with segments of these lengths."""
    positions, segments = np.zeros((2, len(SEGMENTS), T), np.int32)
    for row, lengths in enumerate(SEGMENTS):
        start = 0
        for i, n in enumerate(lengths):
            positions[row, start : start + n] = np.arange(n)
            segments[row, start : start + n] = i + 1
            start += n
    return positions, segments


def looped(q, k, v, segments, window):
    """[B, T, N, H]: each sequence by itself; 0 at padding."""
    out = np.zeros(q.shape)
    for b, row in enumerate(segments):
        for segment in set(row[row > 0].tolist()):
            at = np.flatnonzero(row == segment)
            for n in range(q.shape[2]):
                kv = n * k.shape[1] // q.shape[2]
                out[b, at, n] = numpy_decoder.attend(q[b, at, n], k[b, kv, at], v[b, kv, at], window)
    return out


def assert_equals_loop(program, layout, window):
    q, k, v, slope = (
        random(4, T, N, H),
        random(4, K, T, H, seed=1),
        random(4, K, T, H, seed=2),
        random(4, T, N, H, seed=3),
    )
    positions, segments = packed_rows()
    real = segments > 0

    @jax.jit
    def run(q, k, v):
        out = attend_rows(program, layout, q, k, v, positions, segments, window)
        return jnp.where(real[..., None, None], out, 0)

    expected = looped(q, k, v, segments, window)
    np.testing.assert_allclose(run(q, k, v), expected, atol=2e-5)

    def plain(q, k, v):
        out = attend(q, k, v, attention_mask(positions, segments, positions, segments, window))
        return jnp.sum(jnp.where(real[..., None, None], out, 0) * slope)

    got = jax.grad(lambda *x: jnp.sum(run(*x) * slope), (0, 1, 2))(q, k, v)
    for g, e in zip(got, jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(g, e, atol=5e-5)


MESHES = [
    {"data": 2},
    {"fsdp": 2, "tensor": 2},
    {"tensor": 4},  # more than there are key/value heads
    {"context": 4},
    {"data": 2, "context": 2, "tensor": 2},
]


@pytest.mark.parametrize(("axes", "window"), [({}, None), *((axes, 6) for axes in [{}, *MESHES])], ids=str)
def test_packed_rows_equal_a_loop_on_every_mesh(axes, window):
    assert_equals_loop("xla", on(**axes) if axes else ONE_DEVICE, window)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("axes", [{}, {"context": 2, "tensor": 2}], ids=str)
def test_blocks_of_queries_give_what_all_queries_give(axes, window, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", 16 * T * N)  # less than one block of 16 queries of four rows
    assert attention._query_block(4 * N * T) == 16
    assert_equals_loop("xla", on(**axes) if axes else ONE_DEVICE, window)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("axes", [{}, {"context": 2, "tensor": 2}], ids=str)
def test_the_tpu_kernel_interpreted_equals_the_loop(axes, window, monkeypatch):
    """Rows and heads are padded to what the kernel takes."""
    monkeypatch.setitem(attention._ROW_PROGRAMS, "splash", partial(attention._splash, interpret=True))
    assert_equals_loop("splash", on(**axes) if axes else ONE_DEVICE, window)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("axes", [{}, {"context": 2, "tensor": 2}], ids=str)
def test_the_gpu_kernel_s_call_equals_the_loop(axes, window, monkeypatch):
    """JAX's own implementation of the same function, for cuDNN's runs on GPUs only."""
    monkeypatch.setitem(
        attention._ROW_PROGRAMS,
        "cudnn",
        lambda layout, q, k, v, tokens, window: attention._on_each_device(
            layout, partial(attention._dot_product_attention, "xla", window), q, k, v, tokens
        ),
    )
    assert_equals_loop("cudnn", on(**axes) if axes else ONE_DEVICE, window)


@pytest.mark.parametrize(
    ("platform", "dtype", "chosen"),
    [
        ("cpu", "float32", "xla"),
        ("cpu", "bfloat16", "xla"),
        ("tpu", "bfloat16", "splash"),
        ("tpu", "float32", "xla"),
        ("gpu", "bfloat16", "cudnn"),
        ("gpu", "float32", "xla"),
    ],
)
def test_auto_takes_the_kernel_of_the_backend_in_bfloat16(platform, dtype, chosen):
    assert choose("auto", TINY, dtype, platform) == chosen
    assert choose(chosen, TINY, dtype, platform) == chosen
    assert choose("xla", TINY, dtype, platform) == "xla"


def test_a_head_too_large_for_cudnn_runs_without_it():
    large = TINY.replace(head_dim=192)
    assert choose("auto", large, "bfloat16", "gpu") == "xla"
    with pytest.raises(ModelError, match="needs a head size of at most 128 that is a multiple of 8, not 192"):
        choose("cudnn", large, "bfloat16", "gpu")


@pytest.mark.parametrize(
    ("program", "dtype", "platform", "message"),
    [
        ("splash", "bfloat16", "cpu", r"attention 'splash' needs a TPU \(this is cpu"),
        ("splash", "float32", "tpu", r"'splash' needs bfloat16 \(this is tpu, computing in float32\); 'auto'"),
        ("cudnn", "float32", "tpu", r"'cudnn' needs an NVIDIA GPU and needs bfloat16"),
        ("flash", "float32", "cpu", r"'flash' is unknown; choose one of auto, xla, splash, cudnn"),
    ],
)
def test_a_kernel_that_cannot_run_is_an_error_that_says_why(program, dtype, platform, message):
    with pytest.raises(ModelError, match=message):
        choose(program, TINY, dtype, platform)


def test_key_value_heads_are_repeated_to_what_the_tensor_axis_divides():
    eight = make_mesh({"tensor": 8})
    assert [kept_kv_heads(n, Layout(INFERENCE, eight)) for n in (1, 2, 4, 8, 6)] == [8, 8, 8, 8, 24]
    assert kept_kv_heads(2, ONE_DEVICE) == 2
    x = random(1, 2, 3, 4)
    repeated = jax.jit(lambda x: repeat_kv(x, Layout(INFERENCE, eight)))(x)
    np.testing.assert_array_equal(repeated, x.repeat(4, axis=1))
    assert {shard.data.shape for shard in repeated.addressable_shards} == {(1, 1, 3, 4)}
