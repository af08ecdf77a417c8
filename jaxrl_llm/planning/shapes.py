"""What a run holds and computes, from its shapes: bytes a device and floating-point operations. Needs no compiler.

Shapes: D model width, F ffn width, H head size, L layers, N query heads, K key/value heads, T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import DecoderConfig


class Workload(NamedTuple):
    """One training step, every sequence as long as it may be."""

    prompts: int
    samples: int  # of each prompt
    prompt_length: int
    response_length: int
    row_length: int
    rows: int  # of a micro-batch, over all devices
    mini_batches: int
    micro_batches: int  # of a mini-batch, in use
    epochs: int

    @property
    def sequences(self) -> int:
        """In the whole batch."""
        return self.prompts * self.samples

    @property
    def length(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_length + self.response_length

    @property
    def tokens(self) -> int:
        """In the whole batch."""
        return self.sequences * self.length


def bytes_a_device(tree: Any) -> int:
    """Of a pytree of arrays or ShapeDtypeStructs with shardings, on one device of their mesh."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * jnp.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def parameters(config: DecoderConfig) -> int:
    """Of the model; what pads the vocabulary counts for nothing."""
    tables = (1 if config.tie_embeddings else 2) * config.vocab_size * config.embed
    c, L = config, config.num_layers
    norms = (2 * L + 1) * c.embed + (2 * L * c.head_dim if c.qk_norm else 0)
    biases = (
        L * (c.num_heads + 2 * c.num_kv_heads) * c.head_dim * c.qkv_bias
        + L * c.embed * c.output_bias
        + L * (2 * c.mlp + c.embed) * c.mlp_bias
    )
    return layer_weights(c) + tables + norms + biases


def layer_weights(c: DecoderConfig) -> int:
    """Of all layers: the weights that are multiplied with every token."""
    return c.num_layers * c.embed * (2 * (c.num_heads + c.num_kv_heads) * c.head_dim + 3 * c.mlp)


def matrix_flops(c: DecoderConfig, tokens: int, *, head: bool = True) -> float:
    """Of one forward pass over so many tokens, attention apart."""
    return 2.0 * tokens * (layer_weights(c) + head * c.vocab_size * c.embed)


def attention_flops(c: DecoderConfig, sequences: int, length: int) -> float:
    """Of one forward pass: what a causal mask and the layers' windows leave."""
    return sum(2 * 2.0 * sequences * pairs(length, window) * c.num_heads * c.head_dim for window in c.windows)


def pairs(length: int, window: int | None) -> float:
    """How many pairs there are of a query and a key that it sees."""
    seen = min(window or length, length)
    return seen * (seen + 1) / 2 + (length - seen) * seen


def training_flops(c: DecoderConfig, w: Workload) -> float:
    """Model FLOPs of one pass of updates over the batch: a forward pass and a backward pass of twice its work."""
    return 3 * (matrix_flops(c, w.tokens) + attention_flops(c, w.sequences, w.length))


def forward_flops(c: DecoderConfig, w: Workload) -> float:
    """Model FLOPs of log-probabilities of the batch by one model."""
    return matrix_flops(c, w.tokens) + attention_flops(c, w.sequences, w.length)


def prefill_flops(c: DecoderConfig, prompts: int, length: int) -> float:
    """Model FLOPs of reading prompts and of the logits of what follows them."""
    layers = matrix_flops(c, prompts * length, head=False) + attention_flops(c, prompts, length)
    return layers + 2.0 * prompts * c.vocab_size * c.embed


def decode_flops(c: DecoderConfig, sequences: int, context: int) -> float:
    """Model FLOPs of one token for each sequence, `context` tokens after its start."""
    seen = sum(min(window or context, context) for window in c.windows)
    return matrix_flops(c, sequences) + 4.0 * sequences * seen * c.num_heads * c.head_dim
