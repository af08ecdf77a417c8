"""Turn GSM8K's JSON lines into the Parquet files that training reads.

    python scripts/prepare_gsm8k.py train.jsonl test.jsonl --out data/gsm8k

Each input line is `{"question": ..., "answer": "... #### 72"}` (https://github.com/openai/grade-school-math).
Each row of the output has `prompt` (a message list, or text with --style plain), `answer` (the final number,
as text), `data_source` ("openai/gsm8k"), `extra_info` (index, split and the full reference answer) and, with
--sft, `response` (the reference solution without its calculator marks).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from jaxrl_llm.data.sources import json_lines
from jaxrl_llm.types import UserError

INSTRUCTION = 'Think step by step, then give the final answer as a number after "####".'
FINAL_NUMBER = re.compile(r"####\s*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\s*$")
CALCULATOR_MARK = re.compile(r"<<[^<>]*>>")


def convert(path: Path, *, style: str, instruction: str, sft: bool) -> list[dict[str, Any]]:
    """Rows for one file of GSM8K.

    Raises:
        UserError: a line without question or answer, or whose answer does not end in `#### NUMBER`.
    """
    rows = []
    for number, line in json_lines(path):
        for name in ("question", "answer"):
            if not isinstance(line.get(name), str):
                raise UserError(f"{path}, line {number}: expected a string {name!r}; columns: {', '.join(line)}")
        final = FINAL_NUMBER.search(line["answer"])
        if final is None:
            raise UserError(
                f"{path}, line {number}: the answer must end in '#### NUMBER', got {line['answer'][-60:]!r}"
            )
        row: dict[str, Any] = {
            "prompt": _prompt(line["question"], style, instruction),
            "answer": final.group(1).replace(",", ""),
            "data_source": "openai/gsm8k",
            "extra_info": {"index": len(rows), "split": _split(path), "answer": line["answer"]},
        }
        if sft:
            row["response"] = CALCULATOR_MARK.sub("", line["answer"])
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no rows")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", type=Path, metavar="IN.jsonl")
    parser.add_argument("--out", required=True, type=Path, help="folder for SPLIT.parquet")
    parser.add_argument("--style", choices=("chat", "plain"), default="chat", help="plain: text for base models")
    parser.add_argument("--instruction", default=INSTRUCTION, help="put after the question")
    parser.add_argument("--sft", action="store_true", help="add the reference solution as a response column")
    args = parser.parse_args(arguments)
    targets: dict[Path, Path] = {}
    for path in args.inputs:
        target = args.out / f"{_split(path)}.parquet"
        if target in targets:
            raise UserError(f"{targets[target]} and {path} would both be written to {target}; rename one")
        if not path.is_file():
            raise UserError(f"{path} is a folder, expected a file" if path.exists() else f"{path} does not exist")
        targets[target] = path
    converted = {
        target: convert(path, style=args.style, instruction=args.instruction, sft=args.sft)
        for target, path in targets.items()
    }
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        for target, rows in converted.items():
            pq.write_table(pa.Table.from_pylist(rows), target)
            print(f"{target}: {len(rows)} rows")
    except OSError as error:
        raise UserError(f"--out {args.out} cannot be written: {error}") from error


def _split(path: Path) -> str:
    """The split that a file's name tells, else the name itself."""
    return next((split for split in ("train", "test") if split in path.stem), path.stem)


def _prompt(question: str, style: str, instruction: str) -> str | list[dict[str, str]]:
    if style == "plain":
        return f"Question: {question}\n{instruction}\nAnswer:"
    return [{"role": "user", "content": f"{question}\n{instruction}"}]


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
