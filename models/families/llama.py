"""Llama 2 and 3, SmolLM and other models with model_type "llama"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.models.families.table import Tensor, refuse, require, rope


def config(hf: Mapping[str, Any]) -> DecoderConfig:
    """Hugging Face LlamaConfig."""
    refuse(hf, hidden_act="silu")
    heads = require(hf, "num_attention_heads")
    return DecoderConfig(
        vocab_size=require(hf, "vocab_size"),
        num_layers=require(hf, "num_hidden_layers"),
        embed=require(hf, "hidden_size"),
        num_heads=heads,
        num_kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or require(hf, "hidden_size") // heads,
        mlp=require(hf, "intermediate_size"),
        norm_epsilon=hf.get("rms_norm_eps", 1e-6),
        rope=rope(hf),
        max_position=hf.get("max_position_embeddings", 2048),
        qkv_bias=hf.get("attention_bias", False),
        output_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        tie_embeddings=hf.get("tie_word_embeddings", False),
    )


def tensors(c: DecoderConfig) -> dict[str, Tensor]:
    """Parameter path to Hugging Face tensor."""
    layer = "model.layers.{i}."
    linears = {
        "q": ("self_attn.q_proj", 1, c.qkv_bias),
        "k": ("self_attn.k_proj", 1, c.qkv_bias),
        "v": ("self_attn.v_proj", 1, c.qkv_bias),
        "o": ("self_attn.o_proj", 2, c.output_bias),
        "gate": ("mlp.gate_proj", 1, c.mlp_bias),
        "up": ("mlp.up_proj", 1, c.mlp_bias),
        "down": ("mlp.down_proj", 1, c.mlp_bias),
    }
    table = {
        "embedding": Tensor("model.embed_tokens.weight", vocab=True),
        "norm": Tensor("model.norm.weight"),
        "layers.attention_norm": Tensor(layer + "input_layernorm.weight"),
        "layers.mlp_norm": Tensor(layer + "post_attention_layernorm.weight"),
    }
    for ours, (theirs, inputs, bias) in linears.items():
        table[f"layers.{ours}.kernel"] = Tensor(f"{layer}{theirs}.weight", inputs)
        if bias:
            table[f"layers.{ours}.bias"] = Tensor(f"{layer}{theirs}.bias")
    if not c.tie_embeddings:
        table["head"] = Tensor("lm_head.weight", vocab=True)
    return table
