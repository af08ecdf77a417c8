"""What bench_algorithms_jax.py and bench_algorithms_verl.py have in common: the request, the batch and the clock.

numpy is all that it needs, so it runs in either environment. A measurement is a process of its own: it is given a
Request as JSON, its only argument, and prints a Result as JSON, its last line.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

GROUP = 8  # sequences of one prompt
_MEMORY_UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes


class Request(NamedTuple):
    """What to measure."""

    advantage: str
    loss: str
    aggregation: str
    constants: dict[str, Any]
    correction: dict[str, Any] | None  # arguments of the rollout correction
    sequences: int
    tokens: int
    repeats: int


class Result(NamedTuple):
    """What was measured."""

    loss: float
    gradient_norm: float
    seconds: float  # median
    memory: int  # bytes at the peak beyond what was held before
    inputs: int  # bytes
    compile_seconds: float


def batch(request: Request, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Those arrays of the batch that have one of these names, each the same whatever the others.

    One sequence a row, of 1/8 to 8/8 of the tokens; float32, int32 and bool. Half of the sequences became likelier if
    they were rewarded and less likely if not, a quarter the other way round: no loss is 0 or clipped everywhere. Every
    16th is of an older policy, which a rejection finds.
    """
    S, T = request.sequences, request.tokens
    rows = np.arange(S, dtype=np.int32)

    def random(seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)

    def noise(seed: int, scale: float) -> np.ndarray:
        array = random(seed).standard_normal((S, T), np.float32)
        array *= scale
        return array

    def old_logprobs() -> np.ndarray:
        array = random(3).standard_exponential((S, T), np.float32)
        array *= -0.5
        return array

    def logprobs() -> np.ndarray:
        array = noise(4, 0.1)
        array += (0.1 * np.where(random(5).random(S) < 0.75, 1, -1) * (2 * rewards - 1)).astype(np.float32)[:, None]
        array += old_logprobs()
        return np.minimum(array, 0, out=array)

    def rollout_logprobs() -> np.ndarray:
        array = noise(6, 0.02)
        array += np.where(rows % 16 == 0, 0.05, 0).astype(np.float32)[:, None]
        array += old_logprobs()
        return array

    def sum_pi_squared() -> np.ndarray:
        """As if there were one other token."""
        pi = np.exp(old_logprobs())
        return 1 - 2 * pi * (1 - pi)

    def token_rewards() -> np.ndarray:
        array = np.zeros((S, T), np.float32)
        array[rows, lengths - 1] = rewards
        return array

    lengths = random(0).integers(max(1, T // 8), T, S, endpoint=True)
    mask = np.arange(T) < lengths[:, None]
    rewards = (random(1).random(S) < np.repeat(random(2).random(S // GROUP + 1), GROUP)[:S]).astype(np.float32)
    arrays: dict[str, Callable[[], np.ndarray]] = {
        "mask": lambda: mask,
        "sequence_ids": lambda: np.where(mask, rows[:, None], np.int32(S)),
        "group_ids": lambda: rows // GROUP,
        "valid": lambda: np.ones(S, bool),
        "rewards": lambda: rewards,
        "components": lambda: rewards[:, None],
        "component_weights": lambda: np.ones(1, np.float32),
        "baseline_rewards": lambda: np.roll(rewards, 1),
        "token_rewards": token_rewards,
        "old_logprobs": old_logprobs,
        "logprobs": logprobs,
        "rollout_logprobs": rollout_logprobs,
        "values": lambda: random(7).random((S, T), np.float32),
        "sum_pi_squared": sum_pi_squared,
        "process_rewards": lambda: noise(8, 0.1),
    }
    return {name: arrays[name]() for name in names if name in arrays}


def measure(run: Callable[[], tuple[Any, Any]], request: Request, inputs: int, compile_seconds: float) -> Result:
    """Calls `run`, which returns loss and gradient, once to warm up and then by the clock."""
    gc.collect()
    before = _peak_from_here()
    run()
    seconds = []
    for i in range(request.repeats):
        start = time.perf_counter()
        loss, gradient = run()
        seconds.append(time.perf_counter() - start)
        if i < request.repeats - 1:
            del loss, gradient
    memory = _peak() - before
    norm = sum(float(np.dot(row, row)) for row in np.asarray(gradient)) ** 0.5
    return Result(float(loss), norm, median(seconds), memory, inputs, compile_seconds)


def _peak_from_here() -> int:
    """Forgets the peak of what came before, where the system lets us; the peak then, in bytes."""
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MEMORY_UNIT


def answer(work: Callable[[Request], Result]) -> None:
    """Reads the request, prints the result."""
    result = work(Request(**json.loads(sys.argv[1])))
    print(json.dumps(result._asdict()))
