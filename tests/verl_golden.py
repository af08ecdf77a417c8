"""Reads golden/verl_core_algos.json, values and gradients that verl computed in float64, for the tests.

Every case speaks of one batch, arrays [rows, width] with one sequence a row. A `Layout` lays the same
sequences out in one of two ways, each of one static shape so that few programs are compiled: `padded`, still
one sequence a row, and `packed`, several sequences a row, each after a token that is no action. Where a
layout has no value of the batch it has NaN: whatever leaks shows.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.experience import Experience

_FILE = json.loads((Path(__file__).parent / "golden" / "verl_core_algos.json").read_text())
NUM_SEQUENCES = 9  # of the largest batch; smaller ones leave some without tokens
NUM_GROUPS = 4
_WIDTH = 10
_PACKED_SHAPE = (4, 16)

BATCHES = {name: {key: np.array(value) for key, value in batch.items()} for name, batch in _FILE["batches"].items()}


def cases(kind: str, *names: str) -> list:
    """The cases of one kind as parameters of a test, named after what tells them apart."""
    found = [case for case in _FILE["cases"] if case["kind"] == kind and case["name"] in names]
    assert found, f"no golden case of kind {kind} named {names}"
    return [pytest.param(case, id=_id(case)) for case in found]


def _id(case: dict) -> str:
    parts = [case["name"], case.get("aggregation"), *case["params"].values(), case["batch"]]
    return "-".join(str(part) for part in parts if part is not None) + "-is" * case.get("use_is_weights", False)


class Layout(NamedTuple):
    """Where each token of a batch lies."""

    source: np.ndarray  # int [...], index into the raveled batch; -1 where nothing of the batch lies
    sequence_ids: np.ndarray  # int32 [...]
    mask: np.ndarray  # bool [...]
    batch_shape: tuple[int, ...]

    def place(self, values: np.ndarray, dtype: str) -> np.ndarray:
        taken = np.asarray(values).ravel()[np.maximum(self.source, 0)]
        return np.where(self.source >= 0, taken, np.nan).astype(dtype)

    def take(self, placed: np.ndarray) -> np.ndarray:
        """Back to the batch's shape; all that lies elsewhere has to be 0."""
        placed = np.asarray(placed)
        assert (placed[self.source < 0] == 0).all()
        values = np.zeros(int(np.prod(self.batch_shape)), placed.dtype)
        values[self.source[self.source >= 0]] = placed[self.source >= 0]
        return values.reshape(self.batch_shape)


def padded(batch: dict) -> Layout:
    rows, width = batch["mask"].shape
    source = np.full((NUM_SEQUENCES, _WIDTH), -1)
    source[:rows, :width] = np.arange(rows * width).reshape(rows, width)
    sequence_ids = np.where(source >= 0, np.arange(NUM_SEQUENCES)[:, None], NUM_SEQUENCES).astype(np.int32)
    return _layout(batch, source, sequence_ids)


def packed(batch: dict) -> Layout:
    source = np.full(_PACKED_SHAPE, -1)
    sequence_ids = np.full(_PACKED_SHAPE, NUM_SEQUENCES, np.int32)
    used = [0] * _PACKED_SHAPE[0]
    width = batch["mask"].shape[1]
    for index, mask in enumerate(batch["mask"]):
        tokens = index * width + np.flatnonzero(mask)
        row = next(row for row, start in enumerate(used) if start + 1 + len(tokens) <= _PACKED_SHAPE[1])
        end = used[row] + 1 + len(tokens)
        source[row, used[row] + 1 : end] = tokens
        sequence_ids[row, used[row] : end] = index
        used[row] = end
    return _layout(batch, source, sequence_ids)


def _layout(batch: dict, source: np.ndarray, sequence_ids: np.ndarray) -> Layout:
    mask = (source >= 0) & (batch["mask"].ravel()[np.maximum(source, 0)] > 0)
    return Layout(source, sequence_ids, mask, batch["mask"].shape)


def experience(case: dict, layout: Layout, dtype: str) -> Experience:
    """What an advantage function sees of the case's batch; the sequences that it does not fill are padding."""
    batch = BATCHES[case["batch"]]
    num_rows = len(batch["mask"])

    def per_sequence(values: np.ndarray, dtype: str, padding: float) -> jax.Array:
        padded = np.full((NUM_SEQUENCES, *np.shape(values)[1:]), padding)
        padded[:num_rows] = values
        return jnp.asarray(padded.astype(dtype))

    def placed(key: str) -> jax.Array:
        return jnp.asarray(layout.place(batch[key], dtype))

    components = np.stack(list(case.get("components", {"none": np.zeros(num_rows)}).values()), axis=1)
    return Experience(
        rewards=per_sequence(batch["rewards"].sum(1), dtype, np.nan),
        group_ids=per_sequence(batch["group_ids"], "int32", NUM_SEQUENCES),
        valid=jnp.arange(NUM_SEQUENCES) < num_rows,
        sequence_ids=jnp.asarray(layout.sequence_ids),
        mask=jnp.asarray(layout.mask),
        token_rewards=placed("rewards"),
        old_logprobs=placed("old_logprobs"),
        values=placed("values"),
        sum_pi_squared=placed("sum_pi_squared"),
        is_weights=placed("is_weights") if case["params"].get("use_is_weights") else None,
        baseline_rewards=per_sequence(batch["baseline_rewards"], dtype, np.nan),
        components=per_sequence(components, dtype, np.nan),
        component_weights=jnp.asarray(case["params"].get("weights", [0.0]), dtype),
    )


layouts = pytest.mark.parametrize("layout", [padded, packed])
programs = pytest.mark.parametrize(
    ("compiled", "dtype"),
    [(True, "float32"), (True, "float64"), (False, "float64")],
    ids=["jit-float32", "jit-float64", "eager-float64"],
)


def precision(dtype: str) -> contextlib.AbstractContextManager:
    """float64 exists only within."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def assert_close(actual, expected, dtype: str) -> None:
    tolerance = {"float32": 2e-5, "float64": 1e-9}[dtype]
    assert np.asarray(actual).dtype == dtype
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
