"""One page a family: how to read its Hugging Face config, and its table of tensor names.

A new family is a new page and a line in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.families import llama, mistral, qwen2, qwen3
from jaxrl_llm.models.families.table import Tensor


class Family(NamedTuple):
    """What a page provides."""

    config: Callable[[Mapping[str, Any]], DecoderConfig]
    tensors: Callable[[DecoderConfig], dict[str, Tensor]]  # by parameter path, "layers.q.kernel"


FAMILIES = {
    "llama": Family(llama.config, llama.tensors),
    "mistral": Family(mistral.config, mistral.tensors),
    "qwen2": Family(qwen2.config, qwen2.tensors),
    "qwen3": Family(qwen3.config, qwen3.tensors),
}


def family_of(hf: Mapping[str, Any]) -> Family:
    """The page for a Hugging Face config; ModelError names the known ones."""
    name = hf.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type {name!r} is unknown; known families: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]
