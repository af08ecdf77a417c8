"""Mistral 7B and other models with model_type "mistral": Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.families import llama

tensors = llama.tensors


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face MistralConfig, with 8 key/value heads and a window of 4096 where it says nothing."""
    c = llama.config({"num_key_value_heads": 8, **hf})
    return c.replace(windows=(hf.get("sliding_window", 4096),) * c.num_layers)
