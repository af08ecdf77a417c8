"""From scored rollouts to device batches: sequences into rows, rows into micro-batches, these into mini-batches.

A mini-batch (one optimizer update) is a contiguous part of the batch's groups, so a group is never divided. Within
it, sequences are packed first-fit by falling length into rows of one length, the smallest configured one that holds
the longest sequence of the batch. All other shapes depend on the configuration only.

Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.types import Scored, SequenceBatch, UserError


class PackSpec(NamedTuple):
    """The static shape of batches."""

    mini_batches: int  # A
    sequences: int  # S, in the whole batch; a multiple of A
    rows: int  # B, of a micro-batch, over all devices
    row_lengths: tuple[int, ...]  # rising; T is one of them
    packing: bool  # several sequences in a row
    pad_id: int = 0
    mask_truncated: bool = False  # responses that were cut off count in baselines only: they are in no row
    components: tuple[tuple[str, float], ...] = ()  # reward components, with their weights, that the learner sees apart
    baseline: bool = False  # every sample comes with the reward of the greedy answer

    @property
    def micro_batches(self) -> int:
        """M: enough for every sequence to have a row of its own."""
        return -(-self.sequences // self.mini_batches // self.rows)


def default_row_lengths(longest: int) -> tuple[int, ...]:
    """A quarter, a half and all of the longest sequence, rounded up to multiples of 8."""
    return tuple(sorted({-(-longest // part // 8) * 8 for part in (4, 2, 1)}))


def pack(scored: Sequence[Scored], spec: PackSpec) -> SequenceBatch:
    """Numpy arrays of a batch; see `SequenceBatch`. `scored` holds the S sequences, those of a group together.

    Samples without a reward are in no row; they count in `valid` only. Raises UserError if a sample lacks one of
    `spec.components`.
    """
    if len(scored) != spec.sequences:
        raise ValueError(f"a batch has {spec.sequences} sequences, got {len(scored)}")
    T = _row_length(max((len(s.rollout.token_ids) for s in scored), default=1), spec.row_lengths)
    A, M, B, S = spec.mini_batches, spec.micro_batches, spec.rows, spec.sequences
    shape = (A, M, B, T)
    token_ids = np.full(shape, spec.pad_id, np.int32)
    segment_ids = np.zeros(shape, np.int32)
    positions = np.zeros(shape, np.int32)
    sequence_ids = np.full(shape, S, np.int32)
    action_mask = np.zeros(shape, bool)
    logprobs = np.zeros(shape, np.float32)
    num_micro = np.zeros(A, np.int32)
    per_mini = S // A
    for a in range(A):
        members = [i for i in range(a * per_mini, (a + 1) * per_mini) if _learns(scored[i], spec)]
        lengths = [len(scored[i].rollout.token_ids) for i in members]
        rows = assign(lengths, T, packing=spec.packing)
        num_micro[a] = -(-len(rows) // B)
        for row, places in enumerate(rows):
            start = 0
            for segment, place in enumerate(places, start=1):
                r = scored[members[place]].rollout
                stop = start + len(r.token_ids)
                at = (a, row // B, row % B, slice(start, stop))
                token_ids[at] = r.token_ids
                segment_ids[at] = segment
                positions[at] = np.arange(stop - start)
                sequence_ids[at] = members[place]
                action_mask[at] = r.action_mask
                logprobs[at] = r.logprobs
                start = stop
    arrays: dict[str, Any] = {
        "token_ids": token_ids,
        "segment_ids": segment_ids,
        "positions": positions,
        "sequence_ids": sequence_ids,
        "action_mask": action_mask,
        "sampler_logprobs": logprobs,
        "num_micro": num_micro,
        "group_ids": _group_ids(scored),
        "rewards": np.array([s.reward if s.reward is not None else 0.0 for s in scored], np.float32),
        "valid": np.array([s.reward is not None for s in scored]),
    }
    if spec.baseline:
        arrays["baseline_rewards"] = np.array([0.0 if s.baseline is None else s.baseline for s in scored], np.float32)
    if spec.components:
        arrays["components"] = np.stack([_components(s, spec) for s in scored])
        arrays["component_weights"] = np.array([weight for _, weight in spec.components], np.float32)
    return SequenceBatch(**arrays)


def _learns(s: Scored, spec: PackSpec) -> bool:
    return s.reward is not None and not (spec.mask_truncated and s.rollout.stop_reason == "length")


def _components(s: Scored, spec: PackSpec) -> np.ndarray:
    """float32 [K]; zeros for a sample without a reward."""
    if s.reward is None:
        return np.zeros(len(spec.components), np.float32)
    for name, _ in spec.components:
        if name not in s.components:
            raise UserError(
                f"config.algorithm.components names {name!r}, which the reward functions did not return; they returned "
                f"{', '.join(sorted(s.components))}"
            )
    return np.array([s.components[name] for name, _ in spec.components], np.float32)


def _row_length(longest: int, row_lengths: tuple[int, ...]) -> int:
    for length in row_lengths:
        if length >= longest:
            return length
    raise UserError(
        f"a sequence of {longest} tokens fits no row: the longest of config.learner.row_lengths is {row_lengths[-1]}"
    )


def assign(lengths: Sequence[int], row_length: int, *, packing: bool) -> list[list[int]]:
    """Indices of the sequences of each row. With packing, first-fit by falling length; else one a row."""
    if not packing:
        return [[i] for i in range(len(lengths))]
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        row = next((row for row, left in enumerate(room) if left >= lengths[i]), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_length)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def _group_ids(scored: Sequence[Scored]) -> np.ndarray:
    """A prompt instance is a group: told apart by its uid, never by its text."""
    index: dict[int, int] = {}
    return np.array([index.setdefault(s.rollout.prompt.uid, len(index)) for s in scored], np.int32)
