"""Attention: the plain product of queries and keys, and programs for whole rows of packed sequences.

A row's program is chosen by name: "xla" runs everywhere, "splash" is the Pallas kernel for TPUs that comes with JAX,
"cudnn" that of NVIDIA GPUs; "auto" takes the fastest that backend, dtype and head size allow. All compute the same: a
token sees the earlier tokens of its own segment, within the layer's window.

On a mesh each device computes the queries of its rows, its part of the row (context axis) and its heads (tensor axis);
keys and values of the whole row are gathered along the context axis (as Llama 3 was trained, arXiv 2407.21783, section
3.3.2), so that the result is exact whatever the segments are.

Shapes: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.layers import precision_of
from jaxrl_llm.sharding.rules import Layout

KEPT = "attention"  # the name of what is computed here, for rematerialisation policies

PROGRAMS = ("auto", "xla", "splash", "cudnn")

# Scores that exist at the same time on one device, in elements: 256 MiB of float32.
_SCORES = 2**26
_MAX_QUERY_BLOCK = 512
_LANES = 128  # of a TPU: splash rows and head sizes are padded to a multiple of it
_SPLASH_BLOCKS = (512, 384, 256, 128)  # of queries and keys
_CUDNN_MAX_HEAD = 128  # on every GPU that has flash attention


def choose(program: str, config: DecoderConfig, dtype: Any, platform: str) -> str:
    """The program that "auto" means on a platform ("cpu", "gpu", "tpu"), or the given one if it can run there.

    float32 runs as "xla": the kernels multiply in fewer bits. Raises ModelError, saying what does not fit.
    """
    if program not in PROGRAMS:
        raise ModelError(f"attention {program!r} is unknown; choose one of {', '.join(PROGRAMS)}")
    half = jnp.dtype(dtype).itemsize == 2
    problems = {
        "splash": ["needs a TPU"] * (platform != "tpu") + ["needs bfloat16"] * (not half),
        "cudnn": ["needs an NVIDIA GPU"] * (platform not in ("gpu", "cuda"))
        + ["needs bfloat16"] * (not half)
        + [f"needs a head size of at most {_CUDNN_MAX_HEAD} that is a multiple of 8, not {config.head_dim}"]
        * (config.head_dim > _CUDNN_MAX_HEAD or config.head_dim % 8 != 0),
        "xla": [],
    }
    if program == "auto":
        return next(name for name in ("splash", "cudnn", "xla") if not problems[name])
    if problems[program]:
        raise ModelError(
            f"attention {program!r} {' and '.join(problems[program])} (this is {platform}, computing in "
            f"{jnp.dtype(dtype).name}); 'auto' chooses what fits"
        )
    return program


def kept_kv_heads(kv_heads: int, layout: Layout) -> int:
    """Key/value heads as activations and caches have them: repeated to the first multiple of `kv_heads` that the tensor
    axis divides, so that each device has only those that its query heads read."""
    return math.lcm(kv_heads, layout.parts("kv_heads"))


def repeat_kv(x_BKTH: jax.Array, layout: Layout) -> jax.Array:
    """[B, kept_kv_heads, T, H]: each head next to its copies."""
    heads = x_BKTH.shape[1]
    kept = kept_kv_heads(heads, layout)
    if kept == heads:
        return x_BKTH
    return layout.constrain(jnp.repeat(x_BKTH, kept // heads, axis=1), ("batch", "kv_heads", "norm", "head_dim"))


def attention_mask(
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    key_positions_BS: jax.Array,
    key_segments_BS: jax.Array,
    window: Any,
) -> jax.Array:
    """bool [B, T, S]: same segment, not in the future, at most `window` tokens back, itself included (None: any)."""
    distance = positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask = (segments_BT[:, :, None] == key_segments_BS[:, None, :]) & (distance >= 0)
    return mask if window is None else mask & (distance < window)


def attend(q_BTNH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention with grouped query heads, [B, T, N, H]; scores in float32.

    Keys and values are head-major, as the cache keeps them. A query that may see nothing (padding) returns the mean of
    all values: finite, and masked by whoever uses it.
    """
    B, T, N, H = q_BTNH.shape
    K = k_BKSH.shape[1]
    precision = precision_of(q_BTNH.dtype)
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("BTKGH,BKSH->BKGTS", q_BTKGH, k_BKSH, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores * H**-0.5, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q_BTNH.dtype)
    out = jnp.einsum("BKGTS,BKSH->BTKGH", weights, v_BKSH, precision=precision)
    return out.reshape(B, T, N, H)


def attend_rows(
    program: str,
    layout: Layout,
    q_BTNH: jax.Array,
    k_BKTH: jax.Array,
    v_BKTH: jax.Array,
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    window: int | None,
) -> jax.Array:
    """Attention of packed rows, [B, T, N, H], by `program` (as `choose` returns it); positions count within a segment,
    and a segment's tokens are neighbours in their row."""
    k_BKTH, v_BKTH = repeat_kv(k_BKTH, layout), repeat_kv(v_BKTH, layout)
    return _ROW_PROGRAMS[program](layout, q_BTNH, k_BKTH, v_BKTH, (positions_BT, segments_BT), window)


Tokens = tuple[jax.Array, jax.Array]  # positions and segments


def _on_each_device(
    layout: Layout,
    local: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    *extra: tuple[Any, Any],
) -> jax.Array:
    """`local(q, k, v, tokens of the queries, tokens of the keys, *extra)` of each device's part. `extra`: pairs of what
    it needs beside the arrays and how that lies on the mesh."""
    inputs = (q, k, v, tokens, tokens, *(value for value, _ in extra))
    if not layout.is_cut:
        return local(*inputs)
    of_queries = layout.spec("queries", q.shape, ("batch", "length", "heads", "head_dim"))
    of_keys = layout.spec("keys", k.shape, ("batch", "kv_heads", "norm", "head_dim"))
    of_tokens = layout.spec("tokens", tokens[0].shape, ("batch", "length"))
    of_rows = layout.spec("tokens", tokens[0].shape, ("batch", "norm"))
    in_specs = (of_queries, of_keys, of_keys, (of_tokens,) * 2, (of_rows,) * 2, *(spec for _, spec in extra))
    return jax.shard_map(local, mesh=layout.mesh, in_specs=in_specs, out_specs=of_queries, check_vma=False)(*inputs)


def _xla(layout: Layout, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, window: int | None) -> jax.Array:
    return checkpoint_name(_on_each_device(layout, partial(_in_blocks, window), q, k, v, tokens), KEPT)


def _in_blocks(
    window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, queries: Tokens, keys: Tokens
) -> jax.Array:
    """A block of queries at a time, computed again in the backward pass."""
    B, T, N, H = q.shape
    block = _query_block(B * N * k.shape[2])

    def one(part: tuple[jax.Array, Tokens]) -> jax.Array:
        q, queries = part
        return attend(q, k, v, attention_mask(*queries, *keys, window))

    if block >= T:
        return one((q, queries))
    blocks = -(-T // block)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0), (0, blocks * block - T), *((0, 0) for _ in x.shape[2:])))
        return x.reshape(B, blocks, block, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(jax.checkpoint(one), (cut(q), jax.tree.map(cut, queries)))
    return out.swapaxes(0, 1).reshape(B, blocks * block, N, H)[:, :T]


def _query_block(scores_a_query: int) -> int:
    """The largest power of two, 16 to 512, of queries whose scores may exist together."""
    size = _MAX_QUERY_BLOCK
    while size > 16 and size * scores_a_query > _SCORES:
        size //= 2
    return size


def _cudnn(layout: Layout, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, window: int | None) -> jax.Array:
    return _on_each_device(layout, partial(_dot_product_attention, "cudnn", window), q, k, v, tokens)


def _dot_product_attention(
    implementation: str, window: int | None, q: jax.Array, k: jax.Array, v: jax.Array, queries: Tokens, keys: Tokens
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q,
        k.swapaxes(1, 2),
        v.swapaxes(1, 2),
        mask=attention_mask(*queries, *keys, window)[:, None],
        is_causal=q.shape[1] == k.shape[2],  # says nothing that the mask does not, but lets the kernel leave blocks out
        implementation=implementation,  # type: ignore[arg-type]
    )


def _splash(
    layout: Layout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tokens: Tokens,
    window: int | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    """The kernel leaves out blocks that no token of the row may see; the others it masks by segment. Distances in a row
    are those within a segment."""
    T, N, H = q.shape[1:]
    parts = layout.parts("length")
    length = _up(T, _LANES * parts)
    block, width = splash_shape(T, parts, H)
    square = (length, length)
    mask = splash_mask.CausalMask(square) if window is None else splash_mask.LocalMask(square, (window - 1, 0), 0)
    kernel = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * (N // layout.parts("heads"))),
        block_sizes=splash_kernel.BlockSizes(*[block] * 3, *[block] * 3, use_fused_bwd_kernel=True),
        head_shards=1,
        q_seq_shards=parts,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )

    def local(q: jax.Array, k: jax.Array, v: jax.Array, queries: Tokens, keys: Tokens, kernel: Any) -> jax.Array:
        segments = splash_kernel.SegmentIds(queries[1], keys[1])
        return jax.vmap(kernel)(q.swapaxes(1, 2), k, v, segments).swapaxes(1, 2)

    def fit(x: jax.Array, length_dim: int) -> jax.Array:
        more = {length_dim: length - T, 3: width - H}
        return jnp.pad(x, [(0, more.get(dim, 0)) for dim in range(x.ndim)])

    out = _on_each_device(
        layout,
        local,
        fit((q * H**-0.5).astype(q.dtype), 1),
        fit(k, 2),
        fit(v, 2),
        (fit(tokens[0], 1), fit(tokens[1], 1)),
        (kernel, _kernel_spec(layout, kernel)),
    )
    return out[:, :T, :, :H]


def splash_shape(length: int, parts: int, head_dim: int) -> tuple[int, int]:
    """Tokens of a block of queries or keys, and the head size, of rows of `length` tokens that are cut into `parts`."""
    own = _up(length, _LANES * parts) // parts
    return next(size for size in _SPLASH_BLOCKS if own % size == 0), _up(head_dim, _LANES)


def _kernel_spec(layout: Layout, kernel: Any) -> Any:
    """How the kernel's table of blocks lies on the mesh: each device has that of its queries."""
    if not layout.is_cut:
        return None
    assert layout.mesh is not None
    rows = layout.spec("rows", (layout.parts("length"),), ("length",))
    return kernel.manual_sharding_spec(NamedSharding(layout.mesh, PartitionSpec(None, *rows)))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


_ROW_PROGRAMS: dict[str, Callable[..., jax.Array]] = {"xla": _xla, "splash": _splash, "cudnn": _cudnn}
