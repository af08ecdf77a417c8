"""Qwen3 (dense): Llama with a norm on every query and key head, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.families import llama, qwen2
from jaxrl_llm.models.families.table import Tensor


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face Qwen3Config, whose head_dim is 128 where it says nothing."""
    return llama.config({"head_dim": 128, **hf}).replace(qk_norm=True, windows=qwen2.windows(hf))


def tensors(c: DecoderConfig) -> dict[str, Tensor]:
    """Parameter path to Hugging Face tensor."""
    return {
        **llama.tensors(c),
        "layers.q_norm": Tensor("model.layers.{i}.self_attn.q_norm.weight"),
        "layers.k_norm": Tensor("model.layers.{i}.self_attn.k_norm.weight"),
    }
