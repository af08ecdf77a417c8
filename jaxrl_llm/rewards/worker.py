"""What a reward worker process does: load the functions once, then score one sample after the other."""

from __future__ import annotations

import inspect
import math
import multiprocessing
import numbers
import os
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.plugins import describe
from jaxrl_llm.rewards.loading import RewardFunction, load

PREDICTION = "pred"  # the key of a function's result that is a text and no component

_functions: list[RewardFunction] = []


class Result(NamedTuple):
    """What the functions say of one sample; without components, `error` is the reason."""

    components: dict[str, float]
    prediction: str | None = None
    error: str | None = None


def start(functions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Loads the (spec, kwargs) pairs. Runs when the process starts, so the time that a file takes to import
    counts against no sample."""
    # A signal to the whole process group is for the main process: it may still need what is being scored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _functions[:] = [load(spec, kwargs) for spec, kwargs in functions]
    threading.Thread(target=_end_with_parent, daemon=True).start()


def score(payload: bytes) -> Result:
    """Components of one pickled sample, by name, with the first prediction that a function gives, or the reason why it
    has none."""
    components: dict[str, float] = {}
    origin: dict[str, str] = {}
    prediction: str | None = None
    try:
        sample = pickle.loads(payload)
    except Exception as error:  # a class that only the main process knows
        return Result({}, error=f"the sample cannot be unpickled: {type(error).__name__}: {error}")
    for function in _functions:
        try:
            found = _result(function.name, function(sample))
        except BaseException as error:  # sys.exit() in a reward function must not end the worker
            return Result({}, error=f"{function.name}: {describe(error, _file(function))}")
        if found.error is not None:
            return Result({}, error=f"{function.name}: {found.error}")
        for name, value in found.components.items():
            if name in components:
                text = f"component {name!r} comes from two functions: {origin[name]}, {function.name}"
                return Result({}, error=text)
            components[name], origin[name] = value, function.name
        prediction = found.prediction if prediction is None else prediction
    return Result(components, prediction) if components else Result({}, error="no function returned a component")


def _result(function_name: str, returned: Any) -> Result:
    """What one function returned, or what is wrong with it."""
    if not isinstance(returned, Mapping):
        problem = _problem(returned)
        return Result({}, error=f"returned {problem}") if problem else Result({function_name: float(returned)})
    components: dict[str, float] = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            return Result({}, error=f"returned a dict with the key {name!r}, expected strings")
        if name == PREDICTION:
            continue
        if problem := _problem(value):
            return Result({}, error=f"returned {problem} for component {name!r}")
        components[str(name)] = float(value)
    prediction = returned.get(PREDICTION)
    if prediction is not None and not isinstance(prediction, str):
        text = f"returned {_show(prediction)} for {PREDICTION!r}, expected the extracted answer as a text, or None"
        return Result({}, error=text)
    return Result(components, prediction)


def _problem(value: Any) -> str | None:
    if value is None:
        return "None"
    if not isinstance(value, numbers.Real | np.bool_):
        return f"{_show(value)}, expected a number"
    return None if math.isfinite(value) else str(float(value))


def _show(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"


def _file(function: RewardFunction) -> str | None:
    code = getattr(inspect.unwrap(function.function), "__code__", None)
    return None if code is None else code.co_filename


def _end_with_parent() -> None:
    """A main process that is killed cannot end a worker in the middle of a function, so this thread does."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
