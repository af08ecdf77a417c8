"""The protocol of inference engines, and what they are asked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxrl_llm.types import Prompt, Rollout


class Request(NamedTuple):
    """One sequence to generate. Its tokens depend on the prompt, the weights and `seed`, not on the others (but
    for rounding)."""

    prompt: Prompt
    sample: int  # 0 .. n-1 within the prompt's group
    seed: int  # uint32
    max_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How to sample. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave all tokens in.

    Log-probabilities are those of the full vocabulary after temperature, before top-k, top-p and min-p: what the
    learner computes for the same tokens. (Greedy: at temperature 1.)
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()
    seed: int = 0

    def requests(self, prompts: Iterable[Prompt]) -> list[Request]:
        """n requests a prompt, each with a seed made of `seed`, the prompt's uid and the sample's index."""
        return [
            Request(p, i, int(np.random.SeedSequence((self.seed, p.uid, i)).generate_state(1)[0]), self.max_tokens)
            for p in prompts
            for i in range(self.n)
        ]


class Listener(Protocol):
    """Hears what comes out while `generate` runs: of each sequence its first token, then after every dispatch all its
    tokens so far, the last time with `ended`."""

    def __call__(self, place: int, token_ids: Sequence[int], ended: bool) -> None:
        """`place` in the list of requests; all tokens of its response so far, to be read during the call only."""
        ...


class Engine(Protocol):
    """An inference engine with weights of one version."""

    version: int  # of the weights it holds; -1 before the first load

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, listener: Listener | None = None
    ) -> list[Rollout]:
        """One finished rollout a request, in the order of the requests. Requests of one prompt that follow each other
        share the reading of the prompt. Raises RuntimeError before the first load."""
        ...

    def load(self, params: Any, version: int, checksum: int) -> None:
        """Takes new weights, already in the engine's layout; raises unless they have this checksum."""
        ...

    def sleep(self) -> None:
        """Gives the memory of the cache back until `wake` or the next `generate`."""
        ...

    def wake(self) -> None:
        """Takes the memory of the cache again."""
        ...

    def close(self) -> None:
        """Frees everything."""
        ...
