"""Real models' shapes, as Hugging Face configs: for plans and benchmarks with random weights.

From the config.json of each model's page; the parameter counts that they give are those that the pages name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelError


def _qwen2(hidden: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, tied: bool, epsilon: float) -> Any:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "rms_norm_eps": epsilon,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "eos_token_id": 151_645,
    }


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, tied: bool) -> Any:
    return {
        **_qwen2(hidden, layers, heads, 8, mlp, 151_936, tied, 1e-6),
        "model_type": "qwen3",
        "head_dim": 128,
        "max_position_embeddings": 40_960,
    }


def _llama(hidden: int, layers: int, heads: int, mlp: int, **changes: Any) -> Any:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": mlp,
        "vocab_size": 128_256,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "max_position_embeddings": 131_072,
        "eos_token_id": 128_009,
        **changes,
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, 151_936, True, 1e-6),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, 151_936, True, 1e-6),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18_944, 152_064, False, 1e-6),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27_648, 152_064, False, 1e-5),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288, False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600, False),
    "llama3.1-8b": _llama(4096, 32, 32, 14_336),
    "llama3.1-70b": _llama(8192, 80, 64, 28_672),
    "mistral-7b": _llama(
        4096,
        32,
        32,
        14_336,
        model_type="mistral",
        vocab_size=32_768,
        rope_theta=1_000_000.0,
        rope_scaling=None,
        sliding_window=None,
        max_position_embeddings=32_768,
        eos_token_id=2,
    ),
}


def preset(name: str) -> Mapping[str, Any]:
    """The Hugging Face config of a model in PRESETS."""
    if name not in PRESETS:
        raise ModelError(f"there is no preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
