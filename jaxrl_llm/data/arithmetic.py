"""Arithmetic problems made on the spot: a task with an exact reward that needs no download.

A spec stands wherever a data file's path can stand:

    arithmetic:op=+,min=0,max=99,count=1000,seed=0

Keys, all optional: `op` (one or more of + - *, chosen evenly), `min` and `max` (operands, both included),
`terms` (operands in a problem), `count` (rows), `seed`, `split` (all, train or test), `chat` (true asks in
words, as a message list, for models with a chat template) and `mistakes` (how many in a hundred demonstrations
have one wrong digit).

Problems are distinct and drawn without replacement. A fixed hash of the problem sends one in ten to the test
split, whatever the other keys are, so train and test never share a problem.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

from jaxrl_llm.types import UserError

PREFIX = "arithmetic:"


@dataclass(frozen=True)
class Spec:
    """The keys of a spec string, with their defaults."""

    op: str = "+"
    min: int = 0
    max: int = 99
    terms: int = 2
    count: int = 1000
    seed: int = 0
    split: str = "all"
    chat: bool = False
    mistakes: int = 0

    @property
    def space(self) -> int:
        """Number of distinct problems, both splits together."""
        return len(self.op) ** (self.terms - 1) * (self.max - self.min + 1) ** self.terms

    def problem(self, index: int) -> tuple[list[int], list[str]]:
        """Operands and operators of problem `index`, 0 <= index < space."""
        numbers, ops = [], []
        for _ in range(self.terms):
            index, digit = divmod(index, self.max - self.min + 1)
            numbers.append(self.min + digit)
        for _ in range(self.terms - 1):
            index, digit = divmod(index, len(self.op))
            ops.append(self.op[digit])
        return numbers, ops


def generate(spec: str) -> list[dict[str, Any]]:
    """Rows `{"prompt": "12+7=", "answer": "19", "response": "19", "data_source": "arithmetic"}` for a spec string.

    With `chat=true` the prompt is one user message that asks for the number in words. `response` is a demonstration,
    wrong in some rows with `mistakes`; `answer` is always right.

    Raises:
        UserError: unknown key, bad value, or more problems asked for than there are distinct ones.
    """
    wanted = parse(spec)
    rows = list(islice(_rows(wanted), wanted.count))
    if len(rows) < wanted.count:
        raise UserError(
            f"{spec}: count={wanted.count} problems were asked for, but only {len(rows)} distinct ones "
            f"exist in split={wanted.split}; lower count, or widen min, max, op or terms"
        )
    return rows


def parse(spec: str) -> Spec:
    """Read a spec string.

    Raises:
        UserError: unknown key, or a value of the wrong type or range.
    """
    kinds = {field.name: type(field.default) for field in fields(Spec)}
    values: dict[str, Any] = {}
    for item in filter(None, spec.removeprefix(PREFIX).split(",")):
        key, _, text = item.partition("=")
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{spec}: unknown key {key!r}; {hint}keys: {', '.join(kinds)}")
        values[key] = _value(spec, key, text, kinds[key])
    parsed = Spec(**values)
    for wrong, reason in (
        (not parsed.op or set(parsed.op) - set("+-*"), f"op={parsed.op} must be one or more of + - *"),
        (len(set(parsed.op)) < len(parsed.op), f"op={parsed.op} names an operation twice"),
        (parsed.min > parsed.max, f"min={parsed.min} is above max={parsed.max}"),
        (parsed.terms < 2, f"terms={parsed.terms} must be 2 or more"),
        (parsed.count < 1, f"count={parsed.count} must be 1 or more"),
        (not 0 <= parsed.mistakes <= 100, f"mistakes={parsed.mistakes} must be from 0 to 100"),
        (parsed.split not in ("all", "train", "test"), f"split={parsed.split} must be all, train or test"),
    ):
        if wrong:
            raise UserError(f"{spec}: {reason}")
    return parsed


def _value(spec: str, key: str, text: str, kind: type) -> Any:
    if kind is str:
        return text
    expected = "true or false" if kind is bool else "a whole number"
    try:
        return {"true": True, "false": False}[text] if kind is bool else int(text)
    except (KeyError, ValueError):
        raise UserError(f"{spec}: {key}={text} must be {expected}") from None


def _rows(spec: Spec) -> Iterator[dict[str, Any]]:
    slips = random.Random(f"mistakes {spec.seed}")
    for index in _shuffled(spec.space, random.Random(spec.seed)):
        numbers, ops = spec.problem(index)
        problem = _spell(numbers, ops, gap="")
        if spec.split != "all" and spec.split != _split(problem):
            continue
        prompt: str | list[dict[str, str]] = f"{problem}="
        if spec.chat:
            question = f"What is {_spell(numbers, ops, gap=' ')}? Answer with the number only."
            prompt = [{"role": "user", "content": question}]
        answer = str(_solve(numbers, ops))
        wrong = slips.randrange(100) < spec.mistakes
        response = _with_slip(answer, slips) if wrong else answer
        yield {"prompt": prompt, "answer": answer, "response": response, "data_source": "arithmetic"}


def _with_slip(answer: str, rng: random.Random) -> str:
    """The answer with one digit replaced by another."""
    place = rng.choice([i for i, character in enumerate(answer) if character.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != answer[place]])
    return f"{answer[:place]}{digit}{answer[place + 1 :]}"


def _shuffled(size: int, rng: random.Random) -> Iterator[int]:
    """Every index below `size` once, in random order: Fisher-Yates that stores only the places it moved."""
    moved: dict[int, int] = {}
    for i in range(size):
        j = rng.randrange(i, size)
        chosen = moved.get(j, j)
        moved[j] = moved.pop(i, i)
        yield chosen


def _split(problem: str) -> str:
    digest = hashlib.sha256(problem.encode()).digest()
    return "test" if int.from_bytes(digest[:8], "big") % 10 == 0 else "train"


def _spell(numbers: list[int], ops: list[str], gap: str) -> str:
    rest = (
        f"{gap}{op}{gap}{number if number >= 0 else f'({number})'}" for op, number in zip(ops, numbers[1:], strict=True)
    )
    return f"{numbers[0]}{''.join(rest)}"


def _solve(numbers: list[int], ops: list[str]) -> int:
    """The value, products before sums."""
    total, product = 0, numbers[0]
    for op, number in zip(ops, numbers[1:], strict=True):
        if op == "*":
            product *= number
        else:
            total, product = total + product, number if op == "+" else -number
    return total + product
