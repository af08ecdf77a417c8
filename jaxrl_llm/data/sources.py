"""Rows from where they lie: JSON lines, Parquet, a saved Hugging Face dataset, or generated arithmetic."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from jaxrl_llm.data import arithmetic
from jaxrl_llm.types import UserError

Row = dict[str, Any]


def read(paths: Sequence[str]) -> list[Row]:
    """The rows of all `paths`, one after the other, as plain dicts, lists and scalars (missing values None).

    A path is a `.jsonl` or `.json` file with one object a line, a `.parquet` file, a folder written by
    `Dataset.save_to_disk` of Hugging Face datasets, or an `arithmetic:...` spec (see arithmetic.py).

    Raises:
        UserError: a path that does not exist, cannot be read, or holds no rows.
    """
    return [row for _, rows in read_each(paths) for row in rows]


def read_each(paths: Sequence[str]) -> Iterator[tuple[str, list[Row]]]:
    """Pairs (path, its rows); see `read`."""
    if not paths:
        raise UserError("no data files were given: expected one path or more")
    for path in paths:
        yield path, _read_one(path)


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Pairs (line number from 1, object) of a file with one JSON object a line; blank lines are skipped.

    Raises:
        UserError: a line that is not UTF-8, not JSON or not an object, with its number and an excerpt.
    """
    with _opened(path) as lines:
        for number, raw in enumerate(lines, start=1):
            place = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise UserError(f"{place}: byte {error.start + 1} is not UTF-8 text ({error.reason})") from None
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                excerpt = line[max(0, error.pos - 30) : error.pos + 30]
                raise UserError(
                    f"{place}, column {error.pos + 1}: broken JSON ({error.msg}) near {excerpt!r}; "
                    "every line must be one whole JSON object"
                ) from None
            except (ValueError, RecursionError) as error:  # a number of 5000 digits, brackets nested 1000 deep
                raise UserError(f"{place}: this JSON cannot be read, {error}; it begins {line[:60]!r}") from None
            if not isinstance(row, dict):
                raise UserError(
                    f'{place}: expected a JSON object like {{"prompt": ...}}, got {type(row).__name__} '
                    f"{line[:60]!r}; write one object a line"
                )
            yield number, row


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error


def _read_one(path: str) -> list[Row]:
    if not path.strip():
        raise UserError("the path of a data file is empty; give the path of a file, or () for no file at all")
    if path.startswith(arithmetic.PREFIX):
        return arithmetic.generate(path)
    file = Path(path).expanduser()
    if not file.exists():
        raise UserError(f"data file {file} does not exist; {_neighbours(file)}")
    if file.is_dir():
        rows = _saved_dataset(file)
    elif file.suffix in (".jsonl", ".json"):
        rows = [row for _, row in json_lines(file)]
    elif file.suffix == ".parquet":
        rows = _parquet(file)
    else:
        raise UserError(
            f"data file {file} has the unknown extension {file.suffix!r}; expected .jsonl, .json (one "
            "object a line), .parquet, or a folder written by Dataset.save_to_disk"
        )
    if not rows:
        raise UserError(f"data file {file} holds no rows")
    return rows


def _parquet(file: Path) -> list[Row]:
    try:
        return pq.read_table(file).to_pylist()
    except Exception as error:  # a damaged file raises what the bytes in it lead to, from OSError to OverflowError
        raise UserError(f"data file {file} cannot be read as Parquet: {error}") from error


def _json_object(path: Path) -> dict[str, Any]:
    """A JSON object of a dataset's folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} of a saved dataset is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} of a saved dataset must hold a JSON object, got {type(value).__name__}")
    return value


def _saved_dataset(folder: Path) -> list[Row]:
    if (folder / "dataset_dict.json").exists():
        splits = _json_object(folder / "dataset_dict.json").get("splits") or ["SPLIT"]
        raise UserError(
            f"{folder} holds several splits ({', '.join(splits)}); give one of them, for example {folder / splits[0]}"
        )
    if not (folder / "dataset_info.json").exists() or not (folder / "state.json").exists():
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise UserError(
            f"folder {folder} was not written by Dataset.save_to_disk (dataset_info.json and state.json "
            f"expected, found {names}); to read files in it, name them one by one"
        )
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"reading the dataset folder {folder} needs Hugging Face datasets: pip install 'jaxrl-llm[datasets]'"
        ) from error
    if _json_object(folder / "state.json").get("_data_files") == []:
        return []  # written by an empty dataset; load_from_disk fails on it
    try:
        return datasets.Dataset.load_from_disk(str(folder)).to_list()
    except Exception as error:  # as with Parquet
        raise UserError(
            f"folder {folder} cannot be read as a saved dataset: {type(error).__name__}: {error}; write it again with "
            "Dataset.save_to_disk"
        ) from error


def _neighbours(file: Path) -> str:
    """What the user may have meant by a path that does not exist."""
    folder = file.parent
    if not folder.is_dir():
        return f"nor does its folder {folder}"
    names = sorted(entry.name for entry in folder.iterdir())
    near = difflib.get_close_matches(file.name, names, n=1)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"folder {folder} holds {', '.join(names[:10]) or 'nothing'}"
