"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.families import llama
from jaxrl_llm.models.families.table import require

tensors = llama.tensors


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face Qwen2Config."""
    return llama.config(hf).replace(qkv_bias=True, output_bias=False, windows=windows(hf))


def windows(hf: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Per layer: the sliding window (4096 where it says nothing), where `layer_types` says so, or from layer
    `max_window_layers` on; none at all without `use_sliding_window`."""
    layers, window = require(hf, "num_hidden_layers"), hf.get("sliding_window", 4096)
    if not hf.get("use_sliding_window", False) or window is None:
        return (None,) * layers
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i >= hf.get("max_window_layers", 28) else "full_attention" for i in range(layers)
    ]
    if len(kinds) != layers:
        raise ModelError(f"config.json: layer_types names {len(kinds)} layers, num_hidden_layers is {layers}")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
