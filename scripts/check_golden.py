"""Check the algorithms against golden values: advantages, losses, gradients, metrics, rollout correction.

    python scripts/check_golden.py tests/golden/verl_core_algos.json
    python scripts/check_golden.py FILE.json --program eager --dtype float64 --layout packed

    --program P   jit (compiled) or eager (op by op); as all of these, both by default
    --dtype D     float64 (within 1e-9, relative and absolute) or float32 (within 2e-5)
    --layout L    padded, one sequence a row, or packed, several

The file is JSON with `batches`, by name the arrays [rows, tokens] (group_ids and baseline_rewards [rows]) of one batch
with one sequence a row, and `cases`: of what `kind` (advantage, policy_loss, kl, value_loss, rollout_correction) and
`name`, with which `params`, on which `batch`, and the values that are expected, arrays inside the mask only.

Prints how many checks passed, and what differs in each that failed. Exits with 1 if any failed; a kind, a name or a
field that does not exist is a failure. Exits with 2 if the file cannot be read.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from jaxrl_llm import formulas
from jaxrl_llm.algorithms.advantages import ADVANTAGES, Experience
from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS, correct
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from jaxrl_llm.algorithms.value_losses import clipped
from jaxrl_llm.arguments import Parser
from jaxrl_llm.cli import command
from jaxrl_llm.plugins import describe, unknown_name
from jaxrl_llm.types import UserError

PROGRAMS = ("jit", "eager")
TOLERANCES = {"float64": 1e-9, "float32": 2e-5}
OURS = {  # constants that have other names here
    "normalize_std": ["normalize_by_std"],
    "clip": ["value_clip"],
    "clip_ratio": ["clip_ratio_low", "clip_ratio_high"],  # where these are not given
}
VALUE_LOSSES = {"clipped": clipped}
Case = Mapping[str, Any]
Way = tuple[str, str, str]  # program, dtype and layout


class Fields(dict):
    """A JSON object; one that is asked for and missing is told by name."""

    def __missing__(self, key: str) -> Any:
        raise UserError(f"the field {key!r} is missing; there are {', '.join(map(repr, self))}")


class Golden(NamedTuple):
    """A golden file."""

    batches: Mapping[str, Mapping[str, np.ndarray]]
    cases: Sequence[Case]
    sequences: int  # of the largest batch: smaller ones leave some without tokens
    width: int  # tokens of the longest row


def read(path: Path) -> Golden:
    """Raises UserError if it is not a golden file."""
    try:
        file = json.loads(path.read_text(), object_pairs_hook=Fields)
        batches = Fields({k: Fields({n: np.array(x) for n, x in v.items()}) for k, v in file["batches"].items()})
        rows, widths = zip(*(batch["mask"].shape for batch in batches.values()), strict=True)
        cases = [Fields(case) for case in file["cases"]]
        assert cases, "'cases' is empty"
    except Exception as error:  # whatever a garbled file leads to
        text = str(error).splitlines()[0]
        raise UserError(f"{path} is not a golden file: {type(error).__name__}: {text}") from error
    return Golden(batches, cases, max(rows), max(widths))


class Layout(NamedTuple):
    """Where each token of a batch lies in rows of one static shape, so that few programs are compiled."""

    source: np.ndarray  # int [R, T], index into the raveled batch; -1 where nothing of the batch lies
    sequence_ids: np.ndarray  # int32 [R, T]; the number of sequences at padding
    mask: np.ndarray  # bool [R, T]

    def place(self, values: np.ndarray, fill: float = np.nan) -> np.ndarray:
        """Where the layout has no value of the batch it gets NaN: whatever leaks shows."""
        return np.where(self.source >= 0, np.ravel(values)[np.maximum(self.source, 0)], fill)


def padded(batch: Mapping[str, np.ndarray], sequences: int, width: int) -> Layout:
    """One sequence a row."""
    rows, tokens = batch["mask"].shape
    source = np.full((sequences, 2 * (width + 1)), -1)
    source[:rows, :tokens] = np.arange(rows * tokens).reshape(rows, tokens)
    return _layout(batch, source, np.where(source >= 0, np.arange(sequences)[:, None], sequences))


def packed(batch: Mapping[str, np.ndarray], sequences: int, width: int) -> Layout:
    """As many sequences a row as fit, each after a token that is no action, as a prompt is."""
    source = np.full((sequences, 2 * (width + 1)), -1)
    sequence_ids = np.full(source.shape, sequences)
    used = [0] * sequences
    counts = (batch["mask"] > 0) | (batch.get("rewards", batch["mask"]) != 0)
    tokens = counts.shape[1]
    for index, row_counts in enumerate(counts):
        length = 1 + int(np.max(np.flatnonzero(row_counts), initial=-1))
        row, start = next((row, start) for row, start in enumerate(used) if start + 1 + length <= source.shape[1])
        used[row] = start + 1 + length
        source[row, start + 1 : used[row]] = index * tokens + np.arange(length)
        sequence_ids[row, start : used[row]] = index
    return _layout(batch, source, sequence_ids)


def _layout(batch: Mapping[str, np.ndarray], source: np.ndarray, sequence_ids: np.ndarray) -> Layout:
    mask = (source >= 0) & (np.ravel(batch["mask"])[np.maximum(source, 0)] > 0)
    return Layout(source, sequence_ids.astype(np.int32), mask)


LAYOUTS = {"padded": padded, "packed": packed}


class Trial:
    """A case's batch, laid out, with a way to run functions on it."""

    def __init__(self, golden: Golden, case: Case, way: Way):
        self.program, self.dtype, layout = way
        self.sequences = golden.sequences
        self.batch = golden.batches[case["batch"]]
        self.rows, self.width = self.batch["mask"].shape
        self.layout = LAYOUTS[layout](self.batch, golden.sequences, golden.width)
        self.mask, self.sequence_ids = jnp.asarray(self.layout.mask), jnp.asarray(self.layout.sequence_ids)

    def run(self, identity: Hashable, function: Callable[..., Any], *arrays: Any) -> Any:
        """The function's result as numpy. Functions of one identity are the same, compiled once a dtype."""
        if self.program == "jit":
            function = _COMPILED.setdefault((identity, self.sequences), jax.jit(function))
        return jax.device_get(function(*arrays))

    def aggregated(
        self, identity: Hashable, loss_of: Callable[..., Any], mode: str, *arrays: jax.Array, **more: Any
    ) -> tuple[tuple[np.ndarray, dict[str, Any]], np.ndarray]:
        """Loss of the batch and metrics, and the gradient with respect to the first array."""

        def total(first: Any, others: Any, mask: Any, ids: Any, width: Any, rows: Any, more: Any) -> Any:
            weights = token_weights(mode, mask, ids, self.sequences, length_norm=width, batch_sequences=rows)
            loss = loss_of(first, *others, mask, sequence_ids=ids, num_sequences=self.sequences, **more)
            return jnp.sum(weights * loss.token_loss), loss.metrics

        batch = (self.mask, self.sequence_ids, self.width, self.rows)
        return self.run((identity, mode), jax.value_and_grad(total, has_aux=True), arrays[0], arrays[1:], *batch, more)

    def tokens(self, values: Any, fill: float = np.nan) -> jax.Array:
        """[rows, tokens] laid out."""
        if np.shape(values) != (self.rows, self.width):
            raise UserError(f"an array has the shape {list(np.shape(values))}, the mask {[self.rows, self.width]}")
        return jnp.asarray(self.layout.place(np.asarray(values, float), fill), self.dtype)

    def per_sequence(self, values: np.ndarray) -> jax.Array:
        """[rows, ...] as [S, ...]."""
        placed = np.full((self.sequences, *values.shape[1:]), np.nan)
        placed[: self.rows] = values
        return jnp.asarray(placed, self.dtype)

    def compare_tokens(self, name: str, ours: np.ndarray, golden: Any) -> Iterator[str]:
        """What differs inside the mask, and what is not 0 outside it."""
        inside = self.layout.mask
        if np.any(ours[~inside] != 0):
            yield f"{name} is not 0 outside the mask"
        expected = np.asarray(self.tokens(golden))
        yield from self.compare(name, ours[inside], expected[inside])

    def compare(self, name: str, ours: Any, golden: Any) -> Iterator[str]:
        """The largest difference that is beyond the tolerance."""
        ours, golden = np.asarray(ours), np.asarray(golden)
        if ours.dtype != self.dtype or ours.shape != golden.shape:
            yield f"{name} is {ours.dtype} {list(ours.shape)}, expected {self.dtype} {list(golden.shape)}"
            return
        tolerance = TOLERANCES[self.dtype]
        wrong = ~np.isclose(ours, golden, rtol=tolerance, atol=tolerance, equal_nan=True)
        if wrong.any():
            with np.errstate(invalid="ignore"):
                error = np.nan_to_num(np.where(wrong, np.abs(ours - golden), 0), nan=np.inf)
            at = np.unravel_index(np.argmax(error), error.shape)
            yield f"{name} differs by {error[at]:.1e}: {ours[at]:.10g} instead of {golden[at]:.10g}"

    def compare_metrics(
        self, ours: Mapping[str, Any], prefix: str, golden: Mapping[str, float], *, epsilon: float
    ) -> Iterator[str]:
        """Golden metrics that are missing here or differ; ours are sums and counts, the golden ones
        sum / (count + epsilon)."""
        for name, expected in golden.items():
            if prefix + name not in ours:
                yield f"the metric {prefix}{name} is missing"
                continue
            total, count = (np.float64(part) for part in ours[prefix + name])
            with np.errstate(invalid="ignore"):  # 0 / 0 where nothing has a value
                mean = total / (count + epsilon)
            # Some golden metrics are float32 in files that are float64 otherwise.
            rounded = np.float32(mean) if float(np.float32(expected)) == expected else mean
            yield from self.compare(f"the metric {prefix}{name}", rounded.astype(self.dtype), expected)


def advantage(case: Case, trial: Trial) -> Iterator[str]:
    """The algorithms of algorithms/advantages.py."""
    batch, params = trial.batch, dict(case["params"])
    components, weights = case.get("components"), params.pop("weights", None)
    corrected = params.pop("use_is_weights", False)
    groups = np.full(trial.sequences, trial.sequences, np.int32)
    groups[: trial.rows] = np.unique(batch["group_ids"], return_inverse=True)[1]
    optional = [name for name in ("values", "sum_pi_squared", "process_rewards") if name in batch]
    experience = Experience(
        rewards=trial.per_sequence(batch["rewards"].sum(1)),
        group_ids=jnp.asarray(groups),
        valid=jnp.arange(trial.sequences) < trial.rows,
        sequence_ids=trial.sequence_ids,
        mask=trial.mask,
        token_rewards=trial.tokens(batch["rewards"], fill=0.0),
        old_logprobs=trial.tokens(batch["old_logprobs"]),
        is_weights=trial.tokens(batch["is_weights"]) if corrected else None,
        baseline_rewards=trial.per_sequence(batch["baseline_rewards"]) if "baseline_rewards" in batch else None,
        components=components and trial.per_sequence(np.stack([*components.values()], axis=1)),
        component_weights=None if weights is None else jnp.asarray(weights, trial.dtype),
        **{name: trial.tokens(batch[name]) for name in optional},
    )
    constants = _constants(params)
    bound = _bound(formulas.advantage, case["name"], constants)
    result = trial.run(("advantage", case["name"], constants), bound.function, experience)
    yield from trial.compare_tokens("advantages", result.advantages, case["advantages"])
    yield from trial.compare_tokens("returns", result.returns, case["returns"])


def policy_loss(case: Case, trial: Trial) -> Iterator[str]:
    """The losses of algorithms/policy_losses.py, aggregated, and their gradients."""
    constants = _constants(case["params"])
    bound = _bound(formulas.loss, case["name"], constants)
    (loss, metrics), gradient = trial.aggregated(
        ("policy_loss", case["name"], constants),
        bound,
        bound.aggregation or case["aggregation"],
        trial.tokens(trial.batch["logprobs"]),
        trial.tokens(trial.batch["old_logprobs"]),
        trial.tokens(case["advantages"]),
        is_weights=trial.tokens(trial.batch["is_weights"]) if case["use_is_weights"] else None,
        key=jax.random.key(0),  # the cases leave nothing to chance
    )
    yield from trial.compare("loss", loss, case["loss"])
    yield from trial.compare_tokens("grad_logprobs", gradient, case["grad_logprobs"])
    yield from trial.compare_metrics(metrics, "actor/", case["metrics"], epsilon=1e-8)


def kl(case: Case, trial: Trial) -> Iterator[str]:
    """The estimators of algorithms/kl.py and their gradients."""
    constants = _constants(case["params"])

    def total(logprobs: Any, reference: Any, mask: Any) -> Any:
        values = kl_penalty(logprobs, reference, case["name"], mask=mask, **dict(constants))
        return values.sum(), values

    logprobs, reference = (trial.tokens(trial.batch[name]) for name in ("logprobs", "ref_logprobs"))
    differentiated = jax.value_and_grad(total, has_aux=True)
    (_, values), gradient = trial.run(("kl", case["name"], constants), differentiated, logprobs, reference, trial.mask)
    yield from trial.compare_tokens("value", values, case["value"])
    yield from trial.compare_tokens("grad_logprobs", gradient, case["grad_logprobs"])


def value_loss(case: Case, trial: Trial) -> Iterator[str]:
    """The losses of algorithms/value_losses.py, aggregated, and their gradients."""
    if case["name"] not in VALUE_LOSSES:
        raise unknown_name("value loss", case["name"], VALUE_LOSSES)
    constants = _constants(case["params"])
    (loss, metrics), gradient = trial.aggregated(
        ("value_loss", case["name"], constants),
        functools.partial(VALUE_LOSSES[case["name"]], **dict(constants)),
        case["aggregation"],
        trial.tokens(trial.batch["values"]),
        trial.tokens(case["old_values"]),
        trial.tokens(case["returns"]),
    )
    yield from trial.compare("loss", loss, case["loss"])
    yield from trial.compare_tokens("grad_values", gradient, case["grad_values"])
    yield from trial.compare_metrics(metrics, "critic/", {"vf_clipfrac": case["clip_fraction"]}, epsilon=1e-8)


def rollout_correction(case: Case, trial: Trial) -> Iterator[str]:
    """algorithms/correction.py."""
    for name in case["name"].split(","):
        if name not in (*IMPORTANCE_LEVELS, *REJECTIONS):
            raise unknown_name("rollout correction", name, (*IMPORTANCE_LEVELS, *REJECTIONS))
    constants = _constants(case["params"])

    def corrected(logprobs: Any, rollout_logprobs: Any, mask: Any, ids: Any) -> Any:
        more = {"sequence_ids": ids, "num_sequences": trial.sequences, **dict(constants)}
        return correct(logprobs, rollout_logprobs, mask, **more)

    old, rollout = (trial.tokens(trial.batch[name]) for name in ("old_logprobs", "rollout_logprobs"))
    result = trial.run(("rollout_correction", constants), corrected, old, rollout, trial.mask, trial.sequence_ids)
    if (result.weights is None) != (case["weights"] is None):
        yield f"there are {'no ' if result.weights is None else ''}weights, unlike in the golden file"
    elif result.weights is not None:
        yield from trial.compare_tokens("weights", result.weights, case["weights"])
    yield from trial.compare_tokens("mask", result.mask.astype(trial.dtype), case["mask"])
    yield from trial.compare_metrics(result.metrics, "rollout_corr/", case["metrics"], epsilon=0.0)


KINDS: dict[str, Callable[[Case, Trial], Iterator[str]]] = {
    kind.__name__: kind for kind in (advantage, policy_loss, kl, value_loss, rollout_correction)
}
_COMPILED: dict[Hashable, Callable[..., Any]] = {}


def _constants(params: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Our names for the constants, in a form that can be a key."""
    renamed = {ours: value for name, value in params.items() for ours in OURS.get(name, [])}
    return tuple({**renamed, **{name: value for name, value in params.items() if name not in OURS}}.items())


@functools.cache
def _bound(bind: Callable[..., Any], name: str, constants: tuple[tuple[str, Any], ...]) -> Any:
    """A function with those of the constants that it names; UserError if no function of its kind names one."""
    functions = [*ADVANTAGES.values(), *POLICY_LOSSES.values()]
    known = {parameter for function in functions for parameter in inspect.signature(function).parameters}
    for constant, _ in constants:
        if constant not in known:
            raise unknown_name("constant", constant, known)
    return bind(name, dict(constants))


def failures(golden: Golden, case: Case, ways: Sequence[Way]) -> dict[str, list[Way]]:
    """What is wrong with a case, and in which ways of computing it."""
    found: dict[str, list[Way]] = {}
    for way in ways:
        with jax.enable_x64("float64" in way):
            try:
                if case["kind"] not in KINDS:
                    raise unknown_name("kind", case["kind"], KINDS)
                texts = list(KINDS[case["kind"]](case, Trial(golden, case, way)))
            except Exception as error:  # a case that cannot be computed fails like any other
                texts = [str(error) if isinstance(error, UserError) else describe(error, __file__)]
        for text in texts:
            found.setdefault(text, []).append(way)
    return found


def label(case: Case) -> str:
    parts = [case[key] for key in ("kind", "name", "batch", "aggregation") if key in case]
    params = [f"{name}={value}" for name, value in (case.get("params") or {}).items()]
    return " ".join(map(str, [*parts, *params, *(["use_is_weights"] if case.get("use_is_weights") else [])]))


def _listed(ways: Sequence[Way]) -> str:
    return ", ".join(" ".join(way) for way in ways)


def main(argv: list[str]) -> int:
    """The exit code; see the module's docstring."""
    parser = Parser("check_golden")
    parser.prog = "python scripts/check_golden.py"
    parser.add_argument("file", type=Path, metavar="FILE.json")
    choices = {"program": PROGRAMS, "dtype": TOLERANCES, "layout": LAYOUTS}
    for name, values in choices.items():
        parser.add_argument(f"--{name}", choices=values)
    args = parser.read(argv)
    try:
        golden = read(args.file)
    except UserError as error:
        parser.error(str(error))
    chosen = ([getattr(args, name)] if getattr(args, name) else [*values] for name, values in choices.items())
    ways = [*itertools.product(*chosen)]
    counts: dict[tuple[str, str], Counter[bool]] = {}
    for case in track(golden.cases, "cases", console=Console(stderr=True), transient=True):
        found = failures(golden, case, ways)
        failed = {way for those in found.values() for way in those}
        kind, name = (str(case.get(key)) for key in ("kind", "name"))
        counts.setdefault((kind, name), Counter()).update(way not in failed for way in ways)
        for text, those in found.items():
            where = "in every way" if len(those) == len(ways) else _listed(those)
            print(f"FAILED {label(case)}: {text} ({where})", flush=True)
    width = max(len(name) for _, name in counts)
    for (kind, name), count in counts.items():
        print(f"{kind:<18}  {name:<{width}}  {count[True]:>5} passed  {count[False]:>5} failed")
    total = sum(counts.values(), Counter())
    shown = f"{len(golden.cases)} cases in {len(ways)} ways ({_listed(ways)})"
    print(f"{shown}: {total[True]} passed, {total[False]} failed")
    return 1 if total[False] else 0


if __name__ == "__main__":
    command(lambda argv: sys.exit(main(argv)), sys.argv[1:], __doc__ or "")
