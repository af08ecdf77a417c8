"""The embedded engine: continuous batching over cache slots, in jax.

A prompt is read once (prefill) and its keys and values are copied into the slot of each of its samples. All slots then
decode together, `steps_per_dispatch` tokens at a time in one compiled loop; between dispatches, slots that have ended
are given to the next requests. New weights come in between calls of `generate`.

Shapes: S slots, P prompts of one prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.decoder import Cache, Model
from jaxrl_llm.rollout.engine import Listener, Request, Sampling
from jaxrl_llm.rollout.programs import Admission, Programs, Slots, round_up
from jaxrl_llm.rollout.sampling import Filters
from jaxrl_llm.sharding import reshard
from jaxrl_llm.sharding.rules import AnyMesh
from jaxrl_llm.types import Rollout, UserError


class _Prefix(NamedTuple):
    """Prompts that have been read."""

    cache: Cache  # [L, P, K, T, H]
    logits: jax.Array  # float32 [P, V]
    index: dict[int, int]  # prompt uid -> place


@dataclass
class _Running:
    """The host's record of a sequence in a slot."""

    place: int  # in the list of requests
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class JaxEngine:
    """An `Engine` on one mesh of this process."""

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        *,
        eos_ids: Sequence[int],
        decode_text: Callable[[Sequence[int]], str],
        max_prompt_length: int,
        max_response_length: int,
        slots: int,
        prefill_batch: int,
        steps_per_dispatch: int,
    ):
        """`decode_text`: token ids to text, special tokens left out. Other options: see `Programs`."""
        self.programs = Programs(
            model,
            mesh,
            eos_ids=eos_ids,
            slots=slots,
            prefill_batch=prefill_batch,
            length=max_prompt_length + max_response_length,
            steps_per_dispatch=steps_per_dispatch,
        )
        self._eos = tuple(eos_ids)
        self._decode_text = decode_text
        self._max_prompt = max_prompt_length
        self._params: Any = None
        self._cache: Cache | None = None
        self.version = -1

    def load(self, params: Any, version: int, checksum: int) -> None:
        """Takes weights in the INFERENCE layout."""
        reshard.verify(params, checksum, f"weights of version {version}")
        self._params, self.version = params, version

    def sleep(self) -> None:
        """Frees the cache."""
        self._cache = None

    def wake(self) -> None:
        """Allocates the cache."""
        if self._cache is None:
            self._cache = self.programs.allocate()

    def close(self) -> None:
        """Frees weights and cache."""
        self._params = self._cache = None
        self.version = -1

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, listener: Listener | None = None
    ) -> list[Rollout]:
        """See `Engine`."""
        if self._params is None:
            raise RuntimeError("the engine has no weights yet: call load() first")
        for request in requests:
            self._check(request)
        self.wake()
        job = _Job(self, requests, sampling, listener)
        while job.waiting or job.running:
            job.admit()
            job.dispatch()
        return job.finished()

    def _check(self, request: Request) -> None:
        prompt, budget = len(request.prompt.token_ids), request.max_tokens
        if budget < 1:
            raise UserError(f"max_tokens must be at least 1, got {budget}")
        if not 0 < prompt <= self._max_prompt or prompt + budget > self.programs.length:
            raise UserError(
                f"prompt {request.prompt.uid} of {prompt} tokens with max_tokens={budget} does not fit the engine, "
                f"made for prompts of 1 to {self._max_prompt} tokens and {self.programs.length} tokens in all"
            )


class _Job:
    """One call of generate: which request is where, and what has come out."""

    def __init__(self, engine: JaxEngine, requests: Sequence[Request], sampling: Sampling, listener: Listener | None):
        self.engine, self.sampling, self._listener = engine, sampling, listener
        self.waiting = deque(enumerate(requests))
        self.running: dict[int, _Running] = {}
        self._done: list[Rollout | None] = [None] * len(requests)
        self._prefix = _Prefix(Cache(jnp.zeros(()), jnp.zeros(())), jnp.zeros(()), {})
        S = engine.programs.slots
        empty: Any = (jnp.zeros(S, dtype) for dtype in (jnp.int32, jnp.int32, jnp.int32, bool, jnp.uint32))
        self._slots = Slots(*(jax.device_put(column, engine.programs.everywhere) for column in empty))
        self._filters = Filters(
            jnp.float32(sampling.temperature),
            jnp.int32(sampling.top_k),
            jnp.float32(sampling.top_p),
            jnp.float32(sampling.min_p),
        )
        self._filtered = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
        self._killed = np.zeros(S, bool)

    def admit(self) -> None:
        """Gives free slots to waiting requests, reading their prompts where that has not been done."""
        engine = self.engine
        free = [s for s in range(engine.programs.slots) if s not in self.running]
        while free and self.waiting:
            if self.waiting[0][1].prompt.uid not in self._prefix.index:
                self._prefix = self._read_prompts()
            batch = []
            while free and self.waiting and self.waiting[0][1].prompt.uid in self._prefix.index:
                place, request = self.waiting.popleft()
                batch.append((free.pop(0), _Running(place, request)))
            self._start(batch)

    def _read_prompts(self) -> _Prefix:
        engine = self.engine
        prompts = {}
        for _, request in self.waiting:
            prompts.setdefault(request.prompt.uid, request.prompt)
            if len(prompts) == engine.programs.prefill_batch:
                break
        lengths = [len(p.token_ids) for p in prompts.values()]
        width = min(_bucket(max(lengths)), round_up(engine._max_prompt, 8))
        ids = np.zeros((engine.programs.prefill_batch, width), np.int32)
        for row, prompt in zip(ids, prompts.values(), strict=False):
            row[: len(prompt.token_ids)] = prompt.token_ids
        padded = np.array(lengths + [1] * (engine.programs.prefill_batch - len(lengths)), np.int32)
        ids, padded = jax.device_put((ids, padded), engine.programs.prompt_rows)
        logits, cache = engine.programs.prefill(engine._params, ids, padded)
        return _Prefix(cache, logits, {uid: i for i, uid in enumerate(prompts)})

    def _start(self, batch: list[tuple[int, _Running]]) -> None:
        """Copies prompts into slots and samples the first token of each."""
        engine = self.engine
        columns: Any = (np.zeros(engine.programs.slots, d) for d in (bool, np.int32, np.int32, np.int32, np.uint32))
        new: Any = Admission(*columns)
        for slot, run in batch:
            prompt = run.request.prompt
            values = (
                True,
                self._prefix.index[prompt.uid],
                len(prompt.token_ids),
                run.request.max_tokens,
                run.request.seed,
            )
            for column, value in zip(new, values, strict=True):
                column[slot] = value
            self.running[slot] = run
            self._killed[slot] = False
        engine._cache, self._slots, logprobs = engine.programs.admit(
            engine._cache,
            self._slots,
            self._prefix.cache,
            self._prefix.logits,
            new,
            self._filters,
            filtered=self._filtered,
        )
        tokens, logprobs, active = jax.device_get((self._slots.token, logprobs, self._slots.active))
        for slot, run in batch:
            run.tokens.append(int(tokens[slot]))
            run.logprobs.append(float(logprobs[slot]))
            self._settle(slot, bool(active[slot]))

    def dispatch(self) -> None:
        """Decodes up to `steps_per_dispatch` tokens in every running slot."""
        if not self.running:
            return
        engine = self.engine
        longest = max(len(r.request.prompt.token_ids) + len(r.tokens) for r in self.running.values())
        view = min(_bucket(longest + engine.programs.steps), engine.programs.length)
        engine._cache, self._slots, tokens, logprobs, counts = engine.programs.dispatch(
            engine._params,
            engine._cache,
            self._slots,
            self._killed,
            self._filters,
            view=view,
            filtered=self._filtered,
        )
        self._killed = np.zeros_like(self._killed)
        tokens, logprobs, counts, active = jax.device_get((tokens, logprobs, counts, self._slots.active))
        for slot in list(self.running):
            run, n = self.running[slot], counts[slot]
            run.tokens += tokens[:n, slot].tolist()
            run.logprobs += logprobs[:n, slot].tolist()
            self._settle(slot, bool(active[slot]))

    def _settle(self, slot: int, active: bool) -> None:
        """Ends the sequence of a slot if its tokens say so."""
        run = self.running[slot]
        reason = None
        if not active:
            reason = "eos" if run.tokens[-1] in self.engine._eos else "length"
        cut = self._stop_string(run.tokens) if self.sampling.stop else None
        if cut is not None:
            reason = "stop_string"
            del run.tokens[cut[0] :], run.logprobs[cut[0] :]
            self._killed[slot] = active
        if self._listener is not None:
            self._listener(run.place, run.tokens, reason is not None)
        if reason is not None:
            del self.running[slot]
            self._done[run.place] = self._rollout(run, reason, cut[1] if cut else None)

    def _stop_string(self, tokens: list[int]) -> tuple[int, str] | None:
        """How many tokens there are up to the one that completes a stop string, and the text before it."""
        decode = self.engine._decode_text
        text = decode(tokens)
        if not any(stop in text for stop in self.sampling.stop):
            return None
        low, high = (
            1,
            len(tokens),
        )  # the text grows with the tokens: find the first count that has a stop string
        while low < high:
            middle = (low + high) // 2
            if any(stop in decode(tokens[:middle]) for stop in self.sampling.stop):
                high = middle
            else:
                low = middle + 1
        text = decode(tokens[:low])
        return low, text[: min(text.find(stop) for stop in self.sampling.stop if stop in text)]

    def _rollout(self, run: _Running, reason: str, text: str | None) -> Rollout:
        prompt = run.request.prompt
        before, n = len(prompt.token_ids), len(run.tokens)
        body = run.tokens[:-1] if reason == "eos" else run.tokens
        return Rollout(
            prompt=prompt,
            sample=run.request.sample,
            token_ids=np.concatenate([prompt.token_ids, np.array(run.tokens, np.int32)]),
            action_mask=np.arange(before + n) >= before,
            logprobs=np.concatenate([np.zeros(before, np.float32), np.array(run.logprobs, np.float32)]),
            versions=np.where(np.arange(before + n) >= before, self.engine.version, -1).astype(np.int32),
            stop_reason=reason,
            text=self.engine._decode_text(body) if text is None else text,
        )

    def finished(self) -> list[Rollout]:
        """All rollouts, in the order of the requests."""
        return [r for r in self._done if r is not None]


def _bucket(n: int) -> int:
    """The next power of two, or one and a half of one: at most a third is wasted and few programs are compiled."""
    size = 16
    while size < n:
        if size * 3 // 2 >= n:
            return size * 3 // 2
        size *= 2
    return size
