"""A model of a program's memory, work and traffic, for devices that cannot be compiled for here.

It knows what the programs keep and move, not how a compiler orders it: leave some memory free. All of one device.

    forward pass         layer by layer: the weights of one in the computing dtype (twice: the next one is on its way)
                         and its activations; the logits of one chunk
    backward pass        the same, with the gradients of all of it, on top of what `remat` keeps of every layer
    update               the gradients of all parameters, with a second copy where there are several micro-batches
    traffic              with fsdp, every layer's weights are gathered for each pass and their gradients scattered;
                         with tensor, activations are summed twice a layer and pass; with context, keys and values are
                         gathered
"""

from __future__ import annotations

from typing import NamedTuple

from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.planning import shapes
from jaxrl_llm.planning.shapes import Workload


class Parts(NamedTuple):
    """Into how many parts the training mesh cuts things."""

    data: int
    fsdp: int
    context: int
    tensor: int

    @property
    def weights(self) -> int:
        """A layer's."""
        return self.fsdp * self.context * self.tensor


class Estimate(NamedTuple):
    """What a program needs beside its arguments, and what it does."""

    extra: float  # bytes
    flops: float
    collective_bytes: dict[str, float]  # by kind


def update(c: DecoderConfig, w: Workload, parts: Parts, *, width: int, remat: str, chunk: int) -> Estimate:
    """One mini-batch. `width`: bytes of an activation. `chunk`: tokens of each row whose logits exist together."""
    tokens = _tokens(w, parts)
    products, attended = _products(c, parts), c.num_heads * c.head_dim / parts.tensor
    kept = c.embed + {"full": attended, "dots": attended + products, "none": c.embed + 2 * products}[remat]
    copies = 2 if w.micro_batches > 1 else 1
    gradients = 4 * shapes.parameters(c) / parts.weights * copies
    layer = 3 * _layer_bytes(c, parts, width) + 2 * tokens * _working(c, parts) * width
    logits = 3 * 4 * chunk * _rows(w, parts) * parts.fsdp * c.padded_vocab / (parts.fsdp * parts.context * parts.tensor)
    extra = gradients + c.num_layers * tokens * kept * width + max(layer, logits)
    again = remat == "full"  # the backward pass runs the layers' matrix products once more; the head's always
    matrices = shapes.matrix_flops(c, w.tokens // w.mini_batches, head=False)
    attention = shapes.attention_flops(c, w.sequences // w.mini_batches, w.length)
    head = 2.0 * (w.tokens // w.mini_batches) * c.padded_vocab * c.embed
    flops = ((3 + again) * matrices + 3 * attention + 4 * head) / (parts.data * parts.weights)
    micro = w.micro_batches
    sent = _traffic(c, parts, tokens, width, passes=2 + again)
    scattered = float(width) * shapes.parameters(c) / parts.tensor if parts.fsdp * parts.context > 1 else 0.0
    reduced = 4.0 * shapes.parameters(c) / parts.weights if parts.data > 1 else 0.0
    kinds = {kind: micro * size for kind, size in sent.items()} | {"reduce-scatter": micro * scattered}
    kinds["all-reduce"] = kinds.get("all-reduce", 0.0) + micro * reduced
    return Estimate(extra, flops, kinds)


def logprobs(c: DecoderConfig, w: Workload, parts: Parts, *, width: int, chunk: int, models: int) -> Estimate:
    """Of the whole batch, by so many models."""
    tokens = _tokens(w, parts)
    layer = 2 * _layer_bytes(c, parts, width) + tokens * _working(c, parts) * width
    logits = 2 * 4 * chunk * _rows(w, parts) * parts.fsdp * c.padded_vocab / (parts.fsdp * parts.context * parts.tensor)
    flops = models * shapes.forward_flops(c, w) / (parts.data * parts.weights)
    times = models * w.mini_batches * w.micro_batches
    sent = {kind: times * size for kind, size in _traffic(c, parts, tokens, width, passes=1).items()}
    return Estimate(2 * tokens * c.embed * width + max(layer, logits), flops, sent)


def decode(c: DecoderConfig, sequences: int, context: int, *, data: int, tensor: int, width: int) -> Estimate:
    """One token for each of so many sequences."""
    here = sequences / data
    flops = shapes.decode_flops(c, sequences, context) / (data * tensor)
    logits = 4 * here * c.padded_vocab
    summed = 2 * c.num_layers * here * c.embed * width if tensor > 1 else 0.0
    layer_cache = 2 * here * c.num_kv_heads / min(tensor, c.num_kv_heads) * context * c.head_dim * width
    return Estimate(
        3 * logits + 2 * layer_cache, flops, {"all-reduce": summed, "all-gather": logits if tensor > 1 else 0.0}
    )


def prefill(c: DecoderConfig, prompts: int, length: int, *, data: int, tensor: int, width: int) -> Estimate:
    """Reading so many prompts."""
    tokens = prompts * length / data
    flops = shapes.matrix_flops(c, prompts * length, head=False) + shapes.attention_flops(c, prompts, length)
    flops += 2.0 * prompts * c.padded_vocab * c.embed
    kept = 2 * c.num_layers * tokens * c.num_kv_heads / min(tensor, c.num_kv_heads) * c.head_dim * width
    working = tokens * _working(c, Parts(data, 1, 1, tensor)) * width
    summed = 2 * c.num_layers * tokens * c.embed * width if tensor > 1 else 0.0
    return Estimate(kept + working, flops / (data * tensor), {"all-reduce": summed})


def _rows(w: Workload, parts: Parts) -> float:
    return w.rows / (parts.data * parts.fsdp)


def _tokens(w: Workload, parts: Parts) -> float:
    """Of a micro-batch, on one device."""
    return _rows(w, parts) * w.row_length / parts.context


def _products(c: DecoderConfig, parts: Parts) -> float:
    """Results of a layer's matrix products, a token."""
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim
    return (heads + 2 * c.mlp) / parts.tensor + 2 * c.embed


def _working(c: DecoderConfig, parts: Parts) -> float:
    """Activations of one layer that exist at the same time, a token."""
    return _products(c, parts) + c.mlp / parts.tensor + 2 * c.embed


def _layer_bytes(c: DecoderConfig, parts: Parts, width: int) -> float:
    """A layer's weights, gathered."""
    return width * shapes.layer_weights(c) / c.num_layers / parts.tensor


def _traffic(c: DecoderConfig, parts: Parts, tokens: float, width: int, *, passes: int) -> dict[str, float]:
    """Of so many passes over a micro-batch, weights and activations only."""
    out: dict[str, float] = {}
    if parts.fsdp * parts.context > 1:
        out["all-gather"] = passes * c.num_layers * _layer_bytes(c, parts, width)
        # Hidden states come to the parts of the head, and embedded tokens to their rows.
        out["all-gather"] += passes * tokens * parts.fsdp * c.embed * width
        out["all-to-all"] = passes * tokens * c.embed * width
    if parts.context > 1:
        kv = 2 * tokens * parts.context * c.num_kv_heads / min(parts.tensor, c.num_kv_heads) * c.head_dim
        out["all-gather"] += passes * c.num_layers * kv * width
    if parts.tensor > 1:
        out["all-reduce"] = passes * 2 * c.num_layers * tokens * c.embed * width
    return out
