"""What commands show and write: a response as it comes, a line of progress, files that are whole or not there."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxrl_llm.rollout.engine import Listener
from jaxrl_llm.types import UserError


class TextStream:
    """A listener that gives one response to `write` piece by piece, as its tokens come."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], write: Callable[[str], object], stop: Sequence[str] = ()
    ):
        self._decode, self._write, self._stop = decode, write, stop
        self._shown = 0

    def __call__(self, place: int, token_ids: Sequence[int], ended: bool) -> None:
        """Writes what can no longer change. Kept back are replacement characters at the end, which stand for a
        character whose last bytes are still to come, and what may be the beginning of a stop text."""
        if ended:  # the tokens may now hold an end or a stop text: `finish` knows what of them is the response
            return
        text = self._decode(token_ids).rstrip("\N{REPLACEMENT CHARACTER}")
        self._show(text[: len(text) - self._held_back(text)])

    def finish(self, text: str) -> None:
        """Writes what is left of the whole response."""
        self._show(text)

    def _show(self, text: str) -> None:
        if len(text) > self._shown:
            self._write(text[self._shown :])
            self._shown = len(text)

    def _held_back(self, text: str) -> int:
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in self._stop)), 0
        )


@contextmanager
def progress(console: Console, total: int) -> Iterator[Listener]:
    """A listener that shows how many of `total` sequences have ended; nothing unless the console is a terminal."""
    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s, left"),
        TimeRemainingColumn(),
    )
    lengths: dict[int, int] = {}
    tokens, start = 0, time.perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total, rate=0.0)

        def listen(place: int, token_ids: Sequence[int], ended: bool) -> None:
            nonlocal tokens
            tokens += len(token_ids) - lengths.get(place, 0)
            lengths[place] = len(token_ids)
            bar.update(task, advance=int(ended), rate=tokens / (time.perf_counter() - start))

        yield listen


def prepare_folder(folder: Path, option: str) -> None:
    """Makes a folder where it is not there. Raises UserError, naming the option, where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{option}: the folder {folder} cannot be made: {error}") from error


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """One JSON object; like `write_json_lines`."""
    write_whole(path, json.dumps(value, indent=2, default=str) + "\n")


def write_json_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line. The file appears when it is whole; what JSON cannot hold is written as text."""
    write_whole(path, "".join(json.dumps(row, default=str) + "\n" for row in rows))


def write_whole(path: Path, text: str) -> None:
    """A text file; see `whole`."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path to write to, with the same ending; it becomes `path` when the block ends well, so that others see a whole
    file or none. Raises UserError if it cannot be written."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield unfinished
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from error
