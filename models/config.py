"""What a decoder is, independent of any file format."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


class ModelError(ValueError):
    """A model that cannot be read, built or written, with the file, key or tensors that are at fault."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding. `kind` is "default", "linear" (positions divided by `factor`) or "llama3" (long
    wavelengths divided by `factor`, short ones kept, a ramp between them)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: float = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """All sizes and switches of the decoder. Made by a family page from a Hugging Face config."""

    vocab_size: int
    num_layers: int
    embed: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp: int
    norm_epsilon: float
    rope: Rope
    max_position: int  # longest sequence that the model was made for, prompt and response together
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    windows: tuple[int | None, ...] = ()  # per layer: how many tokens back it attends, itself included
    vocab_pad_multiple: int = 1  # rows of the embedding are padded to a multiple of it

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ModelError(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads evenly")

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding: vocab_size rounded up. The extra ids are never sampled and never exported."""
        return -(-self.vocab_size // self.vocab_pad_multiple) * self.vocab_pad_multiple

    def replace(self, **changes: object) -> DecoderConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
