"""Command lines: options whose mistakes are one message, and what the commands that load a policy have in common."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from jaxrl_llm.plugins import nearest


class Parser(argparse.ArgumentParser):
    """An argument parser without its own help; a mistake prints one line and exits with 2."""

    def __init__(self, command: str):
        super().__init__(prog=f"python -m jaxrl_llm.{command}", add_help=False, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Ends the command."""
        print(f"error: {message}. See {self.prog} --help", file=sys.stderr)
        sys.exit(2)

    def read(self, argv: list[str]) -> argparse.Namespace:
        """The arguments' values; an unknown option is told with the nearest one."""
        args, unknown = self.parse_known_args(argv)
        if unknown and unknown[0].startswith("-"):
            name = unknown[0].partition("=")[0]
            self.error(f"unknown option {name!r}{nearest(name, self._option_string_actions)}")
        if unknown:
            self.error(
                f"unexpected argument {unknown[0]!r}: put texts in quotes, and options before or after all of them"
            )
        return args


def add_policy(parser: Parser) -> None:
    """--run, --step and --model: which policy."""
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=at_least(1))
    parser.add_argument("--model")


def check_policy(parser: Parser, args: argparse.Namespace, recipe: str | None) -> None:
    """Ends the command unless the arguments name one policy."""
    if (args.run is None) == (args.model is None):
        got = "both" if args.run else "neither"
        parser.error(f"expected either --run RUN_DIR or --model FOLDER, got {got}")
    if args.model is not None and args.step is not None:
        parser.error("--step chooses a checkpoint of --run; a --model has none")
    if args.run is not None and recipe is not None:
        parser.error("--config goes with --model: a run brings its own config; change keys of it by --config.KEY=VALUE")


def at_least(least: int):
    """An argument type: an integer that is not smaller."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return read


def temperature(text: str) -> float:
    """An argument type: a number from 0 on."""
    value = _number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be 0 (greedy) or more, got {text}")
    return value


def probability(text: str) -> float:
    """An argument type: a number above 0 and at most 1."""
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
