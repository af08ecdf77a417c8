"""The batches of golden/verl_core_algos.json, laid out as scripts/check_golden.py lays them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from scripts import check_golden

_FILE = check_golden.read(Path(__file__).parent / "golden" / "verl_core_algos.json")
NUM_SEQUENCES = _FILE.sequences
BATCHES = _FILE.batches


class Placed:
    """Where each token of a batch lies."""

    def __init__(self, batch: dict, layout: Callable[..., check_golden.Layout]):
        self._layout, self._shape = layout(batch, NUM_SEQUENCES, _FILE.width), batch["mask"].shape
        self.mask, self.sequence_ids = self._layout.mask, self._layout.sequence_ids

    def place(self, values: np.ndarray, dtype: str) -> np.ndarray:
        return self._layout.place(values).astype(dtype)

    def take(self, placed: np.ndarray) -> np.ndarray:
        """Back to the batch's shape; all that lies elsewhere has to be 0."""
        placed, source = np.asarray(placed), self._layout.source
        assert (placed[source < 0] == 0).all()
        values = np.zeros(int(np.prod(self._shape)), placed.dtype)
        values[source[source >= 0]] = placed[source >= 0]
        return values.reshape(self._shape)


def padded(batch: dict) -> Placed:
    """One sequence a row."""
    return Placed(batch, check_golden.padded)


def packed(batch: dict) -> Placed:
    """Several."""
    return Placed(batch, check_golden.packed)


layouts = pytest.mark.parametrize("layout", [padded, packed])


def assert_close(actual, expected) -> None:
    assert np.asarray(actual).dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
