"""From a name in the configuration to a reward function that can be called: `gsm8k`, `my_rewards.py:fn`."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from jaxrl_llm.rewards.functions import REWARDS

SAMPLE_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt_str", "response_length")


@dataclass(frozen=True)
class RewardFunction:
    """A reward function with the arguments that the configuration fixed for it."""

    name: str  # names the component, if the function returns a number
    spec: str  # what `load` takes to find it again, from any working directory
    function: Callable[..., Any]
    fields: tuple[str, ...]  # those of SAMPLE_FIELDS that it is called with
    kwargs: Mapping[str, Any]

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """`sample` has all of SAMPLE_FIELDS; the result is whatever the function returns, unchecked."""
        return self.function(**{field: sample[field] for field in self.fields}, **self.kwargs)


def load(spec: str, kwargs: Mapping[str, Any] = {}) -> RewardFunction:
    """The built-in function named `spec`, or the function of a file, if it is `path/to/file.py:function`.

    A path is relative to the working directory. A file is imported once a process. `kwargs` are arguments
    given at every call. Raises UserError if there is no such file or function, the file fails to import, the
    function requires an argument that nobody gives or does not know one of `kwargs`.
    """
    path, colon, name = spec.rpartition(":")
    if colon:
        file = Path(path).expanduser().resolve()
        function, spec = _from_file(file, name), f"{file}:{name}"
    elif spec in REWARDS:
        function, name = REWARDS[spec], spec
    else:
        refuse(
            f"reward function {spec!r} is not built in{nearest(spec, REWARDS)}. Built in are "
            f"{', '.join(sorted(REWARDS))}; for a function of yours write path/to/file.py:function."
        )
    return RewardFunction(name, spec, function, _fields(spec, function, kwargs), dict(kwargs))


def refuse(text: str) -> NoReturn:
    """Raises UserError. It is imported here because jaxrl_llm.types imports jax, which workers do without."""
    from jaxrl_llm.types import UserError

    raise UserError(text)


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the name of `valid` that is most like `name`, or nothing."""
    close = difflib.get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _from_file(file: Path, name: str) -> Callable[..., Any]:
    if not file.is_file():
        refuse(f"reward function {name!r}: there is no file {file}. A relative path starts at {Path.cwd()}.")
    module = _import(file)
    public = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    if not hasattr(module, name):
        refuse(
            f"reward file {file} has no function {name!r}{nearest(name, public)}. "
            f"Its public functions are: {', '.join(sorted(public)) or 'none'}."
        )
    function = getattr(module, name)
    if not callable(function):
        refuse(f"{name!r} in reward file {file} is a {type(function).__name__}, expected a function.")
    return function


def _import(file: Path) -> ModuleType:
    """The file as a module of a name that no other has, so that no import finds it instead of another."""
    name = f"reward_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    if module_spec is None or module_spec.loader is None:
        refuse(f"reward file {file} is not a Python file: expected a name that ends with .py.")
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        refuse(f"reward file {file} cannot be imported: {describe(error, str(file))}")
    return module


def describe(error: BaseException, file: str | None) -> str:
    """`ZeroDivisionError: division by zero (rewards.py:12)`: the innermost line in `file` that led to it, or
    the innermost of all if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and error.filename and not own:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frame = (own or frames)[-1]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def _fields(spec: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Which of SAMPLE_FIELDS to call the function with; refuses what could never be called."""
    parameters = inspect.signature(function).parameters.values()
    by_keyword = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for parameter in parameters:
        given = parameter.name in by_keyword and (parameter.name in SAMPLE_FIELDS or parameter.name in kwargs)
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not given and not is_variadic:
            refuse(
                f"reward function {spec!r} requires the parameter {parameter.name!r}, which nobody gives. By "
                f"keyword it can have {', '.join(SAMPLE_FIELDS)}; give others a default or a value in the "
                f"function's kwargs."
            )
    own = [name for name in by_keyword if name not in SAMPLE_FIELDS]
    for key in kwargs:
        if key in SAMPLE_FIELDS or (key not in own and not takes_all):
            refuse(
                f"kwargs of reward function {spec!r}: {key!r} cannot be set{nearest(key, own)}. "
                f"Its own parameters are: {', '.join(own) or 'none'}."
            )
    return tuple(field for field in SAMPLE_FIELDS if takes_all or field in by_keyword)
