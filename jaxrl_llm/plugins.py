"""From a name in a config to a function: one of the house, or the user's own from `path/to/file.py:function`.

Reward workers import this file: nothing here may import jax.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.types import UserError


def resolve(registry: Mapping[str, Callable[..., Any]], spec: str, kind: str) -> Callable[..., Any]:
    """The function that `spec` means: a name in `registry`, or `path/to/file.py:function`.

    A relative path starts at the working directory; a file is run once a process, however many of its functions
    are asked for. `kind` says in messages what the function is for: "reward function". Raises UserError if the name,
    the file or the function does not exist, or the file cannot be imported.
    """
    path, colon, name = spec.rpartition(":")
    if not colon:
        if spec.endswith(".py"):
            raise UserError(f"{kind} {spec!r}: name the function in it, {spec}:FUNCTION")
        if spec not in registry:
            raise unknown_name(kind, spec, registry, "path/to/file.py:function for one of your own")
        return registry[spec]
    file = Path(path).expanduser().resolve()
    if file.suffix != ".py" or not file.is_file():
        raise UserError(f"{kind} {spec!r}: there is no Python file {file}. A relative path starts at {Path.cwd()}.")
    module = _import(file, kind)
    public = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    function = getattr(module, name, None)
    if function is None:
        raise unknown_name(f"{kind} in {file}", name, public)
    if inspect.isclass(function) or not callable(function):
        found = "class" if inspect.isclass(function) else type(function).__name__
        raise UserError(f"{kind} {spec!r}: {name} is a {found}, expected a function.")
    return function


def signature(function: Callable[..., Any], what: str) -> inspect.Signature:
    """The function's parameters; UserError for one, written in C, that does not tell them."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{what}: its parameters cannot be read ({error}); wrap it in a function of your own"
        ) from error


def absolute(spec: str) -> str:
    """The same spec for another working directory."""
    path, colon, name = spec.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{name}" if colon else spec


def nearest(name: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the valid name that is most like `name`, or nothing."""
    close = get_close_matches(name, list(valid), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def unknown_name(kind: str, name: str, known: Iterable[str], alternative: str = "") -> UserError:
    """The error for a name that is not among the known ones."""
    known = sorted(known)
    expected = ", ".join([*known, *([alternative] if alternative else [])]) or "nothing: there is none"
    return UserError(f"unknown {kind} {name!r}{nearest(name, known)}; expected {expected}")


def describe(error: BaseException, file: str | None) -> str:
    """`ZeroDivisionError: division by zero (rewards.py:12)`: the innermost line in `file` that led to it, or the
    innermost of all if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    if isinstance(error, SyntaxError) and not own:
        place = f" ({Path(error.filename).name}:{error.lineno})" if error.filename else ""
        return f"{type(error).__name__}: {error.msg}{place}"
    frame = (own or frames)[-1]
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def _import(file: Path, kind: str) -> ModuleType:
    """The file as a module of a name that no other has, so that no import finds it instead of another."""
    name = f"user_file_{hashlib.sha256(str(file).encode()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise UserError(f"{kind}: {file} cannot be imported: {describe(error, str(file))}") from error
    return module
