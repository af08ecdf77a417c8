"""From the name in a config to a function: one of the house, or the user's own from a file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.types import UserError


def resolve(registry: Mapping[str, Callable[..., Any]], spec: str, kind: str) -> Callable[..., Any]:
    """Finds the function that `spec` means.

    Args:
        registry: functions by name.
        spec: a name in `registry`, or `path/to/file.py:function`; a relative path starts at the working
            directory. Each file is run once in a process, however many of its functions are asked for.
        kind: what the function is, in words, for messages: "policy loss".

    Raises:
        UserError: the name, the file or the function in the file does not exist. What the file itself raises
            while it runs is passed on as it is.
    """
    path, separator, function_name = spec.rpartition(":")
    if not separator:
        if spec not in registry:
            raise unknown_name(kind, spec, registry, "or path/to/file.py:function for a function of your own")
        return registry[spec]
    module = _load(Path(path), spec, kind)
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    if function_name not in functions:
        raise unknown_name(f"function for the {kind} in {path}", function_name, functions)
    return functions[function_name]


def unknown_name(kind: str, name: str, known: Iterable[str], alternative: str = "") -> UserError:
    """The error for a `name` that is not among the `known` ones, with the nearest of them."""
    known = sorted(known)
    expected = f"expected one of {', '.join(known)}" if known else "there is none to choose from"
    message = f"unknown {kind} {name!r}: {expected}{', ' * bool(alternative)}{alternative}."
    nearest = get_close_matches(name, known, n=1)
    return UserError(f"{message} Did you mean {nearest[0]!r}?" if nearest else message)


def _load(path: Path, spec: str, kind: str) -> ModuleType:
    path = path.resolve()
    if path.suffix != ".py" or not path.is_file():
        raise UserError(
            f"{kind} {spec!r}: expected path/to/file.py:function, and there is no Python file {path}. "
            f"Relative paths start at the working directory, {Path.cwd()}."
        )
    name = str(path)  # as the module's name, so that no installed module can have the same
    if name in sys.modules:
        return sys.modules[name]
    module_spec = importlib.util.spec_from_file_location(name, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[name] = module  # before it runs: dataclasses look their module up here
    try:
        module_spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
