"""What a compiled program does, read from its text (HLO): work of matrix products, bytes of collectives, kernels.

Loop bodies count as often as the loop runs. XLA's own cost analysis counts them once, and the TPU compiler turns many
sharded matrix products into loops.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
_WIDTHS = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s32": 4,
    "u32": 4,
    "f32": 4,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}
_ARRAY = re.compile(r"\b(" + "|".join(_WIDTHS) + r")\[([0-9,]*)\]")
_OP = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_INDEX = re.compile(r"/\*index=\d+\*/")


class Cost(NamedTuple):
    """Of one device. Bytes of a collective are those of its result."""

    flops: float  # of matrix products, kernels apart
    collective_bytes: dict[str, float]  # by kind
    kernels: dict[str, int]  # Pallas kernels by name: calls
    arrays: dict[str, int]  # the largest arrays that occur, such as "f32[2048,18944]": bytes
    uncounted: int  # matrix products whose shapes could not be read


class _Op(NamedTuple):
    type: str
    code: str
    rest: str  # operands and attributes
    is_root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.rest.split(")")[0])

    def attribute(self, *names: str) -> str | None:
        """The computation or number that follows NAME=."""
        found = re.search(rf"(?:{'|'.join(names)})=%?([\w.\-]+)", self.rest)
        return found and found.group(1)


_Computation = dict[str, _Op]


def read(text: str, *, unknown_trips: int = 1, arrays: int = 6) -> Cost:
    """The cost of a program. Loops whose trip count is data run `unknown_trips` times."""
    computations, entry = _parse(text)
    flops, uncounted, kernels = 0.0, 0, Counter()
    sent: dict[tuple[str, object], tuple[int, float]] = {}
    for times, name, key, op in _executed(computations, entry, 1, unknown_trips):
        if op.code in ("convolution", "dot"):
            work = (_convolution if op.code == "convolution" else _dot)(computations[name], op)
            uncounted += work is None
            flops += times * (work or 0)
        elif op.code == "custom-call" and 'custom_call_target="tpu_custom_call"' in op.rest:
            kernels[re.sub(r"[.\d]+$", "", key)] += times
        kind = op.code.removesuffix("-start")
        if kind in COLLECTIVES:
            # One collective that is spread over several fusions keeps its channel; the result is the largest there.
            channel = op.attribute("channel_id") or (name, key)
            if kind == "all-reduce" and "all-reduce-scatter" in name:
                kind = "reduce-scatter"
            sizes = _sizes(op.type)
            size = float(max(sizes) if op.code.endswith("-start") else sum(sizes))
            seen = sent.get((kind, channel))
            sent[kind, channel] = (min(seen[0], times), max(seen[1], size)) if seen else (times, size)
    collective_bytes: dict[str, float] = defaultdict(float)
    for (kind, _), (times, size) in sent.items():
        collective_bytes[kind] += times * size
    return Cost(flops, dict(sorted(collective_bytes.items())), dict(kernels), _largest(computations, arrays), uncounted)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    """All computations by name, and the entry's name."""
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    entry = ""
    for line in text.splitlines():
        if line and not line[0].isspace():
            if line.rstrip().endswith("{"):
                words = line.split()
                name = (words[1] if words[0] == "ENTRY" else words[0]).lstrip("%")
                current = computations.setdefault(name, {})
                entry = name if words[0] == "ENTRY" else entry
        elif found := _OP.match(_INDEX.sub("", line)):
            root, name, kind, code, rest = found.groups()
            current[name] = _Op(kind, code, rest, bool(root))
    return computations, entry


def _executed(
    computations: dict[str, _Computation], name: str, times: int, unknown: int
) -> Iterator[tuple[int, str, str, _Op]]:
    """Every operation that runs, how often, and where: (times, computation, name, operation)."""
    for key, op in computations.get(name, {}).items():
        yield times, name, key, op
        if op.code == "while":
            body, condition = op.attribute("body"), op.attribute("condition")
            assert body is not None
            assert condition is not None
            known = re.search(r"known_trip_count\D*(\d+)", op.rest)
            trips = int(known.group(1)) if known else _trips(computations, condition, body)
            yield from _executed(computations, body, times * (unknown if trips is None else trips), unknown)
        elif op.code == "conditional":
            for branches in re.findall(r"branch_computations=\{([^}]*)\}", op.rest):
                for branch in re.findall(r"%([\w.\-]+)", branches)[:1]:  # they differ in masks, not in work
                    yield from _executed(computations, branch, times, unknown)
        elif op.code in ("fusion", "call", "async-start"):
            called = op.attribute("calls", "to_apply", "called_computation")
            if called:
                yield from _executed(computations, called, times, unknown)


def _trips(computations: dict[str, _Computation], condition: str, body: str) -> int | None:
    """Of a loop that counts from 0 up to a constant; None for others."""
    test = next((op for op in computations.get(condition, {}).values() if op.is_root), None)
    if test is None or test.code != "compare" or "direction=LT" not in test.rest:
        return None
    limit = index = None
    for operand in test.operands:
        op = computations[condition].get(operand)
        if op and op.code == "constant":
            limit = _number(op)
        elif op and op.code == "get-tuple-element":
            index = op.attribute("index")
    if limit is None or index is None:
        return None
    step = _step(computations.get(body, {}), int(index))
    return limit if step is None else -(-limit // step)


def _step(body: _Computation, index: int) -> int | None:
    """By how much a loop's counter grows; None where that hides in a fusion (scans count by one)."""
    result = next((op for op in body.values() if op.is_root and op.code == "tuple"), None)
    name = result.operands[index] if result else None
    step = 0
    while name is not None and (op := body.get(name)) is not None and op.code == "add":
        numbers = {operand: _number(body[operand]) for operand in op.operands if operand in body}
        step += sum(number or 0 for number in numbers.values())
        name = next((operand for operand, number in numbers.items() if number is None), None)
    counts = name is not None and body.get(name, _Op("", "", "", False)).code == "get-tuple-element"
    return step if counts and step else None


def _number(op: _Op) -> int | None:
    found = re.match(r"(\d+)\)", op.rest) if op.code == "constant" else None
    return int(found.group(1)) if found else None


def _dims(array: str) -> list[int]:
    found = _ARRAY.search(array)
    if found is None:
        raise ValueError(array)
    return [int(size) for size in found.group(2).split(",") if size]


def _sizes(type_: str) -> list[int]:
    """Bytes of each array of a type."""
    return [
        _WIDTHS[width] * math.prod(int(size) for size in dims.split(",") if size)
        for width, dims in _ARRAY.findall(type_)
    ] or [0]


def _shapes(computation: _Computation, op: _Op) -> list[list[int]] | None:
    """Of the first two operands and of the result."""
    try:
        return [_dims(computation[operand].type) for operand in op.operands[:2]] + [_dims(op.type)]
    except (KeyError, ValueError):
        return None


def _dot(computation: _Computation, op: _Op) -> float | None:
    shapes = _shapes(computation, op)
    if shapes is None:
        return None
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.rest)
    inner = [shapes[0][int(dim)] for dim in contracted.group(1).split(",") if dim] if contracted else []
    return 2.0 * math.prod(shapes[-1]) * math.prod(inner)


def _convolution(computation: _Computation, op: _Op) -> float | None:
    """A matrix product as the TPU compiler writes it; further dimensions of it may be a window's."""
    shapes, labels = _shapes(computation, op), re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.rest)
    if shapes is None or labels is None:
        return None
    (left, right, out), (of_left, of_right, of_out) = shapes, labels.groups()
    found = re.search(r"window=\{([^}]*)\}", op.rest)
    window = dict(part.split("=") for part in found.group(1).split()) if found else {}
    work = 2.0 * out[of_out.index("b")] * out[of_out.index("f")] * right[of_right.index("i")]
    for i, label in enumerate(sorted(label for label in of_out if label.isdigit())):

        def option(name: str, default: str, i: int = i) -> str:
            return window[name].split("x")[i] if name in window else default

        work *= _window_pairs(
            left[of_left.index(label)],
            right[of_right.index(label)],
            out[of_out.index(label)],
            stride=int(option("stride", "1")),
            lhs_dilate=int(option("lhs_dilate", "1")),
            rhs_dilate=int(option("rhs_dilate", "1")),
            low=int(option("pad", "0_0").split("_")[0]),
        )
    return work


def _window_pairs(size: int, kernel: int, out: int, *, stride: int, lhs_dilate: int, rhs_dilate: int, low: int) -> int:
    """How many pairs of an input and a kernel element are multiplied along one dimension of a window."""
    pairs = 0
    for k in range(kernel):
        for o in range(out):
            place = o * stride + k * rhs_dilate - low
            pairs += place >= 0 and place % lhs_dilate == 0 and place // lhs_dilate < size
    return pairs


def _largest(computations: dict[str, _Computation], count: int) -> dict[str, int]:
    sizes = {
        op.type.split("{")[0]: _sizes(op.type)[0]
        for computation in computations.values()
        for op in computation.values()
        if not op.type.startswith("(")
    }
    return dict(sorted(sizes.items(), key=lambda item: -item[1])[:count])
