"""Experience of sequences of uneven length, with tool text between the actions, laid out in several ways.

A `Ragged` batch is a list of sequences, which a loop in numpy can go through. `experience` lays it out; `taken` reads
what came back as a list of sequences again. Where nothing may be read there is NaN.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.experience import Experience

# Actions are 1, a dot is any other token: prompts, tool text, actions that were rejected.
_MASKS = (
    "..111",
    ".11..1..",
    "..1.1",
    ".1111111.",
    "..11.11..1",
    "",
    ".111",
    "...",
    ".1",
    "..11",
    ".1.1.1",
    ".11",
)
_GROUPS = (0, 2, 0, 2, 0, 2, 1, 0, 3, 4, 2, 0)  # 1 and 3 have one sample, 4 has none that is valid
_INVALID = (9, 11)
_TOKENS = ("token_rewards", "old_logprobs", "values", "sum_pi_squared", "is_weights", "process_rewards")
_PACKED = ((3, 0, 9), (4, 1, 11), (7, 2, 10, 6), (8, 5))  # the sequences in each row; any order will do
LAYOUTS = {"padded": (12, 10), "packed": (2, 1, 2, 24), "one row": (64,)}


class Ragged(NamedTuple):
    """S sequences; lists have one array a sequence, arrays one entry."""

    masks: list[np.ndarray]
    tokens: dict[str, list[np.ndarray]]
    group_ids: np.ndarray
    valid: np.ndarray
    rewards: np.ndarray
    baseline_rewards: np.ndarray
    components: np.ndarray
    component_weights: np.ndarray

    def reordered(self, order: np.ndarray) -> Ragged:
        """The sequences in another order."""
        return Ragged(
            masks=[self.masks[i] for i in order],
            tokens={name: [arrays[i] for i in order] for name, arrays in self.tokens.items()},
            **{name: getattr(self, name)[order] for name in self._fields[2:-1]},
            component_weights=self.component_weights,
        )


def batch(seed: int = 0) -> Ragged:
    """All kinds of sequences: without tokens, without actions, alone in the group, without a reward."""
    random = np.random.default_rng(seed)
    masks = [np.array([token == "1" for token in text], bool) for text in _MASKS]
    valid = np.array([index not in _INVALID for index in range(len(masks))])
    tokens: dict[str, list[np.ndarray]] = {name: [] for name in _TOKENS}
    for mask, has_reward in zip(masks, valid, strict=True):
        probabilities = random.uniform(0.05, 0.95, mask.size)
        values = {
            "token_rewards": np.where(random.random(mask.size) < 0.6, random.normal(size=mask.size), 0),
            "old_logprobs": np.log(probabilities),
            "values": random.normal(size=mask.size),
            "sum_pi_squared": probabilities**2 + random.uniform(0, (1 - probabilities) ** 2),
            "is_weights": random.uniform(0.5, 2, mask.size),
            "process_rewards": random.normal(size=mask.size),
        }
        first = np.argmax(mask) if mask.any() else mask.size
        for name, array in values.items():
            # A reward may stand on tool text; all else exists only at actions.
            readable = np.arange(mask.size) >= first if name == "token_rewards" else mask
            tokens[name].append(np.where(readable & has_reward, array, np.nan))
    rewards = np.array([np.nansum(array) for array in tokens["token_rewards"]])
    missing = np.where(valid, 0, np.nan)
    return Ragged(
        masks=masks,
        tokens=tokens,
        group_ids=np.array(_GROUPS, np.int32),
        valid=valid,
        rewards=rewards + missing,
        baseline_rewards=random.normal(size=len(masks)) + missing,
        components=random.normal(size=(len(masks), 2)) + missing[:, None],
        component_weights=np.array([1.0, 0.5]),
    )


def experience(ragged: Ragged, layout: str) -> Experience:
    tokens, mask, ids = laid_out(ragged, layout)
    return Experience(
        rewards=jnp.asarray(ragged.rewards, jnp.float32),
        group_ids=jnp.asarray(ragged.group_ids),
        valid=jnp.asarray(ragged.valid),
        sequence_ids=jnp.asarray(ids),
        mask=jnp.asarray(mask),
        **{name: jnp.asarray(array) for name, array in tokens.items()},
        baseline_rewards=jnp.asarray(ragged.baseline_rewards, jnp.float32),
        components=jnp.asarray(ragged.components, jnp.float32),
        component_weights=jnp.asarray(ragged.component_weights, jnp.float32),
    )


def laid_out(ragged: Ragged, layout: str) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """The tokens' arrays, the mask, which is True at padding, and the sequence ids."""
    ids, columns = _places(ragged, layout)

    def place(arrays: list[np.ndarray], padding: float | bool, dtype: type) -> np.ndarray:
        placed = np.full(ids.shape, padding, dtype)
        for index, array in enumerate(arrays):
            where = ids == index
            placed[where] = array[columns[where]]
        return placed

    tokens = {name: place(arrays, np.nan, np.float32) for name, arrays in ragged.tokens.items()}
    return tokens, place(ragged.masks, True, bool), np.where(ids < 0, len(ragged.masks), ids).astype(np.int32)


def taken(result: jnp.ndarray, ragged: Ragged, layout: str) -> list[np.ndarray]:
    """The tokens of each sequence; all that lies elsewhere has to be 0."""
    ids, _ = _places(ragged, layout)
    values = np.asarray(result)
    assert values.shape == ids.shape
    np.testing.assert_array_equal(values[ids < 0], 0)
    return [values[ids == index] for index in range(len(ragged.masks))]


def whitened(ragged: Ragged, arrays: list[np.ndarray]) -> list[np.ndarray]:
    """A value for each token, shifted and scaled to mean 0 and variance 1 over the actions with a reward."""
    counted = [mask & valid for mask, valid in zip(ragged.masks, ragged.valid, strict=True)]
    population = np.concatenate([array[here] for array, here in zip(arrays, counted, strict=True)])
    scale = np.sqrt(population.var(ddof=1) + 1e-8)
    return [np.where(here, (x - population.mean()) / scale, 0) for x, here in zip(arrays, counted, strict=True)]


def _places(ragged: Ragged, layout: str) -> tuple[np.ndarray, np.ndarray]:
    """Which sequence lies where, -1 at padding, and which of its tokens."""
    shape = LAYOUTS[layout]
    number = len(ragged.masks)
    rows = {"padded": [(index,) for index in range(number)], "packed": _PACKED, "one row": [range(number)]}[layout]
    ids = np.full((int(np.prod(shape[:-1])), shape[-1]), -1)
    columns = np.zeros_like(ids)
    for row, indices in enumerate(rows):
        start = 0
        for index in indices:
            end = start + ragged.masks[index].size
            ids[row, start:end], columns[row, start:end] = index, np.arange(end - start)
            start = end
    return ids.reshape(shape), columns.reshape(shape)
