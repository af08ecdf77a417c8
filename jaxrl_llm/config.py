"""Reading, overriding, checking and saving configs. Below the commands, nothing sees a ConfigDict.

Every key, with its default and meaning, stands in configs/base.py; a recipe is a Python file whose `get_config()`
starts from it and changes a few. A key that base.py does not have, or a value of another type than its default, is an
error that names the full key, whether it comes from a recipe, a saved JSON or the command line.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxrl_llm.plugins import describe
from jaxrl_llm.types import UserError

# Sections whose keys the user chooses; everything else is fixed by base.py.
OPEN_SECTIONS = (
    "reward.weights",
    "reward.kwargs",
    "algorithm.constants",
    "model.hf_config",
    "data.template_kwargs",
)


# What lists hold, where it is not texts.
_ITEMS = {"learner.row_lengths": int, "filter.mean_range": float, "filter.entropy_range": float}
_PLURAL = {int: "integers", float: "numbers", str: "texts"}


class Config(ConfigDict):
    """A ConfigDict that knows its own full name, takes numpy scalars and checks types without surprises."""

    def __init__(self, values: dict[str, Any] | None = None):
        object.__setattr__(self, "_section", "")
        super().__init__()
        for key, value in (values or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        full = f"{self._section}.{key}".lstrip(".")
        if not isinstance(key, str):
            raise UserError(f"config.{full}: keys must be texts, got {key!r} ({type(key).__name__})")
        if isinstance(value, dict):
            value = Config(value)
        if isinstance(value, Config):
            _rename(value, full)
        if is_open(full):
            if full in OPEN_SECTIONS and not isinstance(value, Config):
                raise UserError(f"config.{full} must be a section, such as config.{full}.NAME=VALUE; got {value!r}")
            with self.unlocked(), self.ignore_type():
                super().__setitem__(key, _plain(full, value))
        elif key not in self and self.is_locked:
            raise UserError(_unknown(full, self._section, list(self)))
        elif key in self and isinstance(self[key], Config) and isinstance(value, Config):
            for name, inner in value.items():  # a fixed section is changed, not replaced
                self[key][name] = inner
        else:
            super().__setitem__(key, _typed(full, self[key], value) if key in self else value)

    def __setattr__(self, key: str, value: Any) -> None:
        self[key] = value

    def __getattr__(self, key: str) -> Any:
        if key in self or key.startswith("_"):
            return super().__getattr__(key)
        raise AttributeError(_unknown(f"{self._section}.{key}".lstrip("."), self._section, list(self)))

    if TYPE_CHECKING:  # what ConfigDict declares is an optional, untyped value

        def __getitem__(self, key: str) -> Any: ...


def _rename(config: Config, section: str) -> None:
    object.__setattr__(config, "_section", section)
    for key, value in config.items():
        if isinstance(value, Config):
            _rename(value, f"{section}.{key}")


def is_open(full: str) -> bool:
    """Whether a full key lies in a section whose keys the user chooses."""
    return any(full == name or full.startswith(name + ".") for name in OPEN_SECTIONS)


def _plain(full: str, value: Any) -> Any:
    """A value of an open section as a saved config can hold it."""
    if isinstance(value, Config):
        for key in list(value):
            value[key] = value[key]  # under its full name now
        return value
    if isinstance(value, np.generic):
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(
            f"config.{full} must be a text, a number, true, false, None, or a list or dict of them (it is saved with "
            f"the run); got {value!r:.80} ({type(value).__name__}): {error}"
        ) from error
    return value


def _typed(full: str, default: Any, value: Any) -> Any:
    """The value in the type of the default, or a UserError."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(default, float) and type(value) is int:
        if abs(value) > sys.float_info.max:  # float() would raise; that it must be finite is checked with all else
            return math.inf if value > 0 else -math.inf
        return float(value)
    if isinstance(default, tuple) and isinstance(value, (tuple, list)):
        kind = _ITEMS.get(full, str)
        items = tuple(item.item() if isinstance(item, np.generic) else item for item in value)
        if kind is float:
            items = tuple(float(item) if type(item) is int else item for item in items)
        for item in items:
            if type(item) is not kind:
                raise UserError(f"config.{full} must be a list of {_PLURAL[kind]}, got {item!r} in it")
        return items
    if type(value) is type(default):
        return value
    raise UserError(
        f"config.{full} must be {_article(default)}, got {value!r:.80} ({type(value).__name__}); "
        f"it is {_show(default)} now"
    )


def _article(default: Any) -> str:
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text", tuple: "a list"}
    return names.get(type(default), "a section with keys of its own")


def _show(value: Any) -> str:
    return f"a section with {', '.join(value)}" if isinstance(value, Config) else repr(value)


def _unknown(full: str, section: str, siblings: Sequence[str]) -> str:
    known = [name for name, _ in flatten(_base())]
    text = f"config.{full} does not exist"
    leaf = full.rsplit(".", 1)[-1]
    near = (
        _of_that_name(full, known)
        or [f"{section}.{s}".lstrip(".") for s in difflib.get_close_matches(leaf, siblings, n=1)]
        or difflib.get_close_matches(full, known, n=1, cutoff=0.85)
    )
    if near:
        text += f"; did you mean {' or '.join(f'config.{name}' for name in near)}?"
    where = f"config.{section}" if section else "config"
    return f"{text.rstrip('?')}{'?' if near else '.'} Keys of {where}: {', '.join(siblings)}"


def _of_that_name(full: str, known: Sequence[str]) -> list[str]:
    """The keys of other sections with the same last name: the nearest if `full` has a section, else all."""
    leaf = full.rsplit(".", 1)[-1]
    same = [name for name in known if name.rsplit(".", 1)[-1] == leaf]
    return difflib.get_close_matches(full, same, n=1, cutoff=0) if "." in full else same


def _base() -> Config:
    from jaxrl_llm.configs import base

    return base.get_config()


def flatten(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(full key, value) pairs of a config; open sections, and what is in them, included."""
    for key, value in config.items():
        full = f"{prefix}{key}"
        if isinstance(value, Config) and (len(value) or not is_open(full)):
            yield from flatten(value, f"{full}.")
        else:
            yield full, value


# ---- from the command line --------------------------------------------------------------------------------------


class Given(NamedTuple):
    """The command line, taken apart."""

    recipe: str | None  # what --config names
    overrides: list[tuple[str, str]]  # (full key, text) of each --config.KEY=VALUE
    rest: list[str]  # all other arguments


def split(argv: Sequence[str]) -> Given:
    """Takes `--config NAME` and `--config.a.b=value` out of the arguments; loads nothing."""
    source, overrides, rest = None, [], []
    args = list(argv)
    while args:
        arg = args.pop(0)
        name, eq, value = arg.partition("=")
        if name == "--config" or name.startswith("--config."):
            if not eq:
                if not args:
                    raise UserError(f"{name} needs a value: {name}=VALUE")
                value = args.pop(0)
            if name == "--config":
                source = value
            else:
                overrides.append((name.removeprefix("--config."), value))
        else:
            rest.append(arg)
    return Given(source, overrides, rest)


def parse(argv: Sequence[str]) -> tuple[Config, list[str]]:
    """`--config NAME` and `--config.a.b=value` arguments to a config; returns what is left of the arguments."""
    source, overrides, rest = split(argv)
    if source is None:
        raise UserError(
            "--config is missing: give a recipe file, the name of a built-in one or a saved config.json; built in: "
            + ", ".join(built_in())
        )
    config = load(source)
    for key, text in overrides:
        override(config, key, text)
    return config, rest


def built_in() -> list[str]:
    """Names of the recipes that come with the package."""
    return sorted(p.stem for p in _built_in_folder().glob("*.py") if p.stem not in ("__init__", "base"))


def _built_in_folder() -> Path:
    import jaxrl_llm.configs

    return Path(jaxrl_llm.configs.__file__).parent


def load(source: str) -> Config:
    """A recipe file (`path.py` or `path.py:argument`), a built-in recipe by name, or a saved config.json."""
    name, _, argument = source.partition(":")
    path = Path(name)
    if not path.is_file():
        path = _built_in_folder() / f"{Path(name).stem if name.startswith('configs/') else name}.py"
    if not path.is_file() or path.stem in ("__init__", "base"):
        near = difflib.get_close_matches(Path(name).stem, built_in(), n=1, cutoff=0.3)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"config {source!r} is neither a file nor a built-in recipe ({', '.join(built_in())}){hint}")
    if path.suffix == ".json":
        return _from_json(path)
    spec = importlib.util.spec_from_file_location(f"jaxrl_llm_recipe_{path.stem}", path.resolve())
    if spec is None or spec.loader is None:
        raise UserError(f"config {source!r} is not a Python or JSON file")
    module = importlib.util.module_from_spec(spec)
    arguments = [argument] if argument else []
    try:
        spec.loader.exec_module(module)
        get_config = getattr(module, "get_config", None)
        if not callable(get_config):
            raise UserError(f"{path} has no function get_config()")
        _check_callable(get_config, arguments, path)
        config = get_config(*arguments)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"recipe {path}: {describe(error, str(path.resolve()))}") from error
    if not isinstance(config, Config):
        raise UserError(
            f"get_config() of {path} must return the config of jaxrl_llm.configs.base, got {type(config).__name__}"
        )
    return config


def _check_callable(get_config: Callable[..., Any], arguments: Sequence[str], path: Path) -> None:
    try:
        inspect.signature(get_config).bind(*arguments)
    except TypeError as error:
        how = (
            "with the text after the colon"
            if arguments
            else "without arguments; --config FILE.py:TEXT would give it one"
        )
        raise UserError(f"get_config() of {path} is called {how}: {error}") from error


def _from_json(path: Path) -> Config:
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8, or a number of 5000 digits
        raise UserError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(saved, dict):
        raise UserError(f"{path} is not a saved config: expected a JSON object, got {type(saved).__name__}")
    config = _base()
    for key, value in saved.items():
        config[key] = value
    return config


def override(config: Config, full: str, text: str) -> None:
    """Sets one key from a text, read by the type of its default."""
    section, parts = config, full.split(".")
    for i, part in enumerate(parts[:-1]):
        here = ".".join(parts[: i + 1])
        if part not in section and is_open(here):
            section[part] = Config()
        if part not in section or not isinstance(section[part], Config):
            raise UserError(_unknown(full, ".".join(parts[:i]), list(section)))
        section = section[part]
    leaf = parts[-1]
    if is_open(full):
        section[leaf] = _literal(text)
    elif leaf not in section:
        raise UserError(_unknown(full, ".".join(parts[:-1]), list(section)))
    else:
        section[leaf] = _read(full, section[leaf], text)


def _read(full: str, default: Any, text: str) -> Any:
    if isinstance(default, str):
        return text
    if isinstance(default, bool):
        if text.lower() not in ("true", "false"):
            raise UserError(f"config.{full} must be true or false, got {text!r}; it is {default} now")
        return text.lower() == "true"
    if isinstance(default, tuple):
        value = _literal(text)
        return tuple(value) if isinstance(value, (tuple, list)) else (value,)
    value = _literal(text)
    return _typed(full, default, value)


def _literal(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # whatever is no literal is a text
        return text


def to_json(config: Config) -> str:
    """The whole config; `load` of a file with it gives the config back."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def unknown_argument(argument: str) -> UserError:
    """The error for a command-line argument that is neither --config nor a key of it."""
    hint = ""
    name = argument.lstrip("-").partition("=")[0]
    known = [full for full, _ in flatten(_base())]
    near = _of_that_name(name, known) or difflib.get_close_matches(name, known, n=1)
    if near:
        hint = f"; did you mean {' or '.join(f'--config.{full}=...' for full in near)}?"
    known_ones = "; expected --config NAME, --config.KEY=VALUE" if not hint else ""
    return UserError(f"argument {argument!r} is unknown{hint or known_ones}")
