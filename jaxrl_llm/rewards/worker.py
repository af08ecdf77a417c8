"""What a reward worker process does: load the functions once, then score one sample after the other."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import numbers
import os
import pickle
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.plugins import describe
from jaxrl_llm.rewards.loading import RewardFunction, load

_functions: list[RewardFunction] = []


def start(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Loads the (spec, kwargs) pairs. Runs when the process starts, so the time that a file takes to import
    counts against no sample."""
    _functions[:] = [load(spec, kwargs) for spec, kwargs in functions]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def score(payload: bytes) -> tuple[dict[str, float], str | None]:
    """Components of one pickled sample, by name, or the reason why it has none."""
    components: dict[str, float] = {}
    origin: dict[str, str] = {}
    try:
        sample = pickle.loads(payload)
    except Exception as error:  # a class that only the main process knows
        return {}, f"the sample cannot be unpickled: {type(error).__name__}: {error}"
    for function in _functions:
        try:
            found = _components(function.name, function(sample))
        except BaseException as error:  # sys.exit() in a reward function must not end the worker
            return {}, f"{function.name}: {describe(error, _file(function))}"
        if isinstance(found, str):
            return {}, f"{function.name}: {found}"
        for name, value in found.items():
            if name in components:
                return {}, f"component {name!r} comes from two functions: {origin[name]}, {function.name}"
            components[name], origin[name] = value, function.name
    return (components, None) if components else ({}, "no function returned a component")


def _components(function_name: str, returned: Any) -> dict[str, float] | str:
    """The function's result as components, or what is wrong with it."""
    if not isinstance(returned, Mapping):
        problem = _problem(returned)
        return f"returned {problem}" if problem else {function_name: float(returned)}
    for name, value in returned.items():
        if not isinstance(name, str):
            return f"returned a dict with the key {name!r}, expected strings"
        if problem := _problem(value):
            return f"returned {problem} for component {name!r}"
    return {str(name): float(value) for name, value in returned.items()}


def _problem(value: Any) -> str | None:
    if value is None:
        return "None"
    if not isinstance(value, numbers.Real | np.bool_):
        return f"{type(value).__name__} {repr(value)[:80]}, expected a number"
    return None if math.isfinite(value) else str(float(value))


def _file(function: RewardFunction) -> str | None:
    code = getattr(inspect.unwrap(function.function), "__code__", None)
    return None if code is None else code.co_filename


def _end_with_parent() -> None:
    """A main process that is killed cannot end a worker in the middle of a function, so this thread does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
