"""What family pages are written with: the entries of a tensor table, and readers of common config keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.models.config import ModelError, Rope


class Tensor(NamedTuple):
    """A Hugging Face tensor. `{i}` in the name is the layer. `inputs`: how many leading dimensions of our kernel are
    its inputs, for Hugging Face stores [outputs, inputs]; 0 for norms and biases, stored flat. `vocab` marks the
    tables of token ids, stored as they are but without our padding rows."""

    name: str
    inputs: int = 0
    vocab: bool = False


def require(hf: Mapping[str, Any], key: str) -> Any:
    """The value of a key that a config must have."""
    if hf.get(key) is None:
        raise ModelError(f"config.json of a {hf.get('model_type')} model lacks {key!r}")
    return hf[key]


def refuse(hf: Mapping[str, Any], **only: Any) -> None:
    """Raises ModelError where the config asks for something that the decoder does not compute."""
    for key, value in only.items():
        if hf.get(key, value) != value:
            raise ModelError(f"config.json: {key}={hf[key]!r} is not supported, only {value!r}")


def rope(hf: Mapping[str, Any], default_theta: float = 10_000.0) -> Rope:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    old = hf.get("rope_scaling") or {}
    values = {"rope_theta": hf.get("rope_theta"), **old, **(hf.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = float(values.get("rope_theta") or default_theta)
    if kind == "default":
        return Rope(theta)
    keys = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if kind not in keys:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are")
    lacking = [key for key in keys[kind] if values.get(key) is None]
    if lacking:
        raise ModelError(f"config.json: rope of type {kind!r} lacks {', '.join(lacking)}")
    return Rope(theta, kind, *(float(values[key]) for key in keys[kind]))
