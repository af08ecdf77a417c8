"""The pieces of a decoder layer: parameters with named dimensions, norm, rotary embedding.

Shapes: B rows, T tokens, D model width, N query heads, K key/value heads, H head size, F ffn width.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models.config import Rope


def parameter(
    rngs: nnx.Rngs, shape: tuple[int, ...], dims: tuple[str, ...], init: Callable[..., jax.Array]
) -> nnx.Param:
    """A float32 parameter that carries the names of its dimensions."""
    return nnx.Param(init(rngs.params(), shape, jnp.float32), logical_dims=dims)


def normal(scale: float) -> Callable[..., jax.Array]:
    """Initialiser: normal with the given standard deviation."""
    return jax.nn.initializers.normal(scale)


zeros = jax.nn.initializers.zeros
ones = jax.nn.initializers.ones


class Linear(nnx.Module):
    """einsum with a stacked kernel and an optional bias on the output dimensions.

    `equation` is written for one layer, e.g. "BTD,DNH->BTNH"; the first `inputs` kernel dimensions are contracted.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        equation: str,
        layers: int,
        shape: tuple[int, ...],
        dims: tuple[str, ...],
        *,
        inputs: int = 1,
        bias: bool = False,
    ):
        self.equation = equation
        scale = 1.0 / math.sqrt(math.prod(shape[:inputs]))
        self.kernel = parameter(rngs, (layers, *shape), ("layers", *dims), normal(scale))
        if bias:
            # A bias over the model width is small and added to activations that FSDP does not cut.
            names = tuple("norm" if d == "embed" else d for d in dims[inputs:])
            self.bias = parameter(rngs, (layers, *shape[inputs:]), ("layers", *names), zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        out = jnp.einsum(self.equation, x, self.kernel[...], precision=precision_of(x.dtype))
        return out + self.bias[...] if hasattr(self, "bias") else out


def precision_of(dtype: jnp.dtype) -> jax.lax.Precision:
    """float32 computation means float32 on every backend: TPUs and GPUs otherwise multiply it in fewer bits."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Root-mean-square norm over the last dimension, in float32 (Zhang & Sennrich 2019)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + epsilon)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def rope_frequencies(rope: Rope, head_dim: int) -> jax.Array:
    """float32 [H / 2]: radians per position. The llama3 rule is that of the Llama 3.1 model card."""
    plain = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / rope.factor
    turns = rope.original_max_position * plain / (2 * math.pi)  # full turns within the original context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = jnp.clip(keep, 0.0, 1.0)
    return keep * plain + (1 - keep) * plain / rope.factor


def rope_tables(positions: jax.Array, rope: Rope, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the rotation, float32 [B, T, H / 2] for positions [B, T]."""
    angles = positions.astype(jnp.float32)[..., None] * rope_frequencies(rope, head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: jax.Array, cos_BTh: jax.Array, sin_BTh: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head (the half-split convention of Hugging Face)."""
    first, second = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_BTh[:, :, None], sin_BTh[:, :, None]
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x_BTNH.dtype)
