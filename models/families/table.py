"""What family pages are written with: the entries of a tensor table, and readers of common config keys."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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


# What published configs hold, by key; None counts as absent.
_KINDS = {
    "a whole number above 0": (
        "vocab_size num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size "
        "max_position_embeddings sliding_window"
    ),
    "a whole number": "max_window_layers",
    "a number above 0": "rms_norm_eps rope_theta",
    "true or false": "attention_bias mlp_bias tie_word_embeddings use_sliding_window",
    "an object": "rope_scaling rope_parameters",
    "a list": "layer_types",
}
_ROPE_NUMBERS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "a whole number above 0": lambda value: type(value) is int and value > 0,
    "a whole number": lambda value: type(value) is int,
    "a number above 0": lambda value: type(value) in (int, float) and 0 < value < math.inf,
    "true or false": lambda value: isinstance(value, bool),
    "an object": lambda value: isinstance(value, Mapping),
    "a list": lambda value: isinstance(value, (list, tuple)),
}


def check_kinds(hf: Mapping[str, Any]) -> None:
    """Raises ModelError for a key that family pages read and that holds something else than it can."""
    for kind, keys in _KINDS.items():
        for key in keys.split():
            if hf.get(key) is not None and not _FITS[kind](hf[key]):
                raise ModelError(f"config.json: {key} must be {kind}, got {hf[key]!r:.80}")


def rope(hf: Mapping[str, Any], default_theta: float = 10_000.0) -> Rope:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    old = hf.get("rope_scaling") or {}
    values = {"rope_theta": hf.get("rope_theta"), **old, **(hf.get("rope_parameters") or {})}
    kind = values.get("rope_type") or values.get("type") or "default"
    theta = values.get("rope_theta") or default_theta
    for key, value in {**values, "rope_theta": theta}.items():
        if key in _ROPE_NUMBERS and value is not None and not _FITS["a number above 0"](value):
            raise ModelError(f"config.json: {key} of the rope must be a number above 0, got {value!r:.80}")
    if kind == "default":
        return Rope(float(theta))
    keys = {
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in keys:
        raise ModelError(f"config.json: rope type {kind!r} is not supported; default, linear and llama3 are")
    lacking = [key for key in keys[kind] if values.get(key) is None]
    if lacking:
        raise ModelError(f"config.json: rope of type {kind!r} lacks {', '.join(lacking)}")
    return Rope(float(theta), kind, *(float(values[key]) for key in keys[kind]))
