"""Reductions and running sums over the tokens of each sequence, wherever these tokens lie.

Every token carries the index of its sequence. A reduction adds up by that index, and a running sum starts anew
where the index changes, so one sequence a row, several sequences packed in a row and any amount of padding give
the same result. The reductions also reduce the samples of each prompt: samples for tokens, `group_ids` for
`sequence_ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def as_float(values: jax.Array) -> jax.Array:
    """`values` in float32, or in float64 if they are float64."""
    return values.astype(jnp.promote_types(values.dtype, jnp.float32))


def valid_tokens(mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """bool, shape of `mask`: the tokens that count, those in the mask and in a sequence. A padding token
    never counts, whatever the mask says of it."""
    return mask.astype(bool) & (sequence_ids < num_sequences)


def sequence_lengths(mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """int32 [S]: number of tokens of each sequence that are in `mask`. Integers count exactly beyond the 2^24
    where float32 stops."""
    # uint32, for XLA on CPU (jax 0.10.2) makes one buffer of int32 zeros to add to and int32 ids that are
    # constant zeros, under vmap and jit: it then adds to the ids and counts 1.
    ones = mask.astype(bool).astype(jnp.uint32)
    return jax.ops.segment_sum(ones.ravel(), sequence_ids.ravel(), num_sequences).astype(jnp.int32)


def sequence_sum(values: jax.Array, mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """Sum of each sequence's values at the tokens in `mask`.

    Args:
        values: [...], any shape. What stands outside the mask has no influence on the result or on gradients,
            not even NaN or infinity.
        mask: bool or number, shape of `values`.
        sequence_ids: int32, shape of `values`, in 0 .. num_sequences - 1; num_sequences at padding.
        num_sequences: S, static.

    Returns:
        float32 [S] (float64 for float64); 0 for a sequence without tokens.
    """
    kept = jnp.where(mask.astype(bool), as_float(values), 0)
    return jax.ops.segment_sum(kept.ravel(), sequence_ids.ravel(), num_sequences)


def sequence_mean(values: jax.Array, mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """Mean over the tokens in `mask`; otherwise as `sequence_sum`. 0 for a sequence without tokens."""
    total_S = sequence_sum(values, mask, sequence_ids, num_sequences)
    lengths_S = sequence_lengths(mask, sequence_ids, num_sequences)
    return total_S / jnp.maximum(lengths_S, 1).astype(total_S.dtype)


def to_tokens(per_sequence_S: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """Gives every token its sequence's value: [S] and [...] to [...]; 0 at padding."""
    return per_sequence_S.at[sequence_ids].get(mode="fill", fill_value=0)


def sum_to_go(values: jax.Array, mask: jax.Array, sequence_ids: jax.Array, *, discount: float = 1.0) -> jax.Array:
    """Discounted sum from each token to the end of its sequence: y = x + discount y' with y' at the next token
    in `mask`.

    Tokens outside the mask are skipped, they discount nothing. What stands there is added to the x of the
    sequence's last token in the mask before it, undiscounted; before the first token in the mask it is dropped.

    Args:
        values: float [..., T].
        mask: bool [..., T], no padding. In a sequence without tokens in it the values may be anything, also NaN.
        sequence_ids: int32 [..., T]; the tokens of a sequence are neighbours in one row.

    Returns:
        float32 [..., T] (float64 for float64), 0 outside the mask.
    """

    def step(carry: tuple[jax.Array, jax.Array], value: jax.Array, chosen: jax.Array) -> tuple[Any, jax.Array]:
        to_go, skipped = carry
        here = value + skipped + discount * to_go
        return (jnp.where(chosen, here, to_go), jnp.where(chosen, 0, skipped + value)), jnp.where(chosen, here, 0)

    return _scan(step, 2, (as_float(values), mask.astype(bool)), sequence_ids, reverse=True)


def following(values: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """The value of the next token that is in `mask` and in the same sequence, 0 after the last. Shapes and types
    as in `sum_to_go`; what stands outside the mask is never read."""

    def step(carry: tuple[jax.Array], value: jax.Array, chosen: jax.Array) -> tuple[Any, jax.Array]:
        (after,) = carry
        return (jnp.where(chosen, value, after),), after

    return _scan(step, 1, (as_float(values), mask.astype(bool)), sequence_ids, reverse=True)


def cumulative_sum(values: jax.Array, mask: jax.Array, sequence_ids: jax.Array) -> jax.Array:
    """Sum over the sequence's tokens in `mask` up to and with each token; a token outside the mask has the sum up to
    it. Shapes and types as in `sum_to_go`; what stands outside the mask is never read."""

    def step(carry: tuple[jax.Array], value: jax.Array, chosen: jax.Array) -> tuple[Any, jax.Array]:
        total = carry[0] + jnp.where(chosen, value, 0)
        return (total,), total

    return _scan(step, 1, (as_float(values), mask.astype(bool)), sequence_ids, reverse=False)


def offsets(mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """int32 [..., T]: distance of each token in `mask` from its sequence's first token in the mask, counting all
    tokens between them; 0 outside the mask, which has no padding."""
    columns = jnp.broadcast_to(jnp.arange(mask.shape[-1], dtype=jnp.int32), mask.shape)
    return _from_first(columns, mask, sequence_ids, num_sequences)


def ranks(mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """int32 [..., T]: how many of its sequence's tokens in `mask` stand before each token in the mask; otherwise
    as `offsets`."""
    seen = jnp.cumsum(mask.astype(bool), axis=-1, dtype=jnp.int32)
    return _from_first(seen, mask, sequence_ids, num_sequences)


def _from_first(rising: jax.Array, mask: jax.Array, sequence_ids: jax.Array, num_sequences: int) -> jax.Array:
    """What `rising`, which grows along rows, has gained since the sequence's first token in the mask."""
    mask = mask.astype(bool)
    counted = jnp.where(mask, rising, jnp.iinfo(rising.dtype).max)
    first_S = jax.ops.segment_min(counted.ravel(), sequence_ids.ravel(), num_sequences)
    return jnp.where(mask, rising - to_tokens(first_S, sequence_ids), 0)


def _scan(
    step: Callable[..., tuple[Any, jax.Array]],
    num_carried: int,
    arrays: Sequence[jax.Array],
    sequence_ids: jax.Array,
    *,
    reverse: bool,
) -> jax.Array:
    """`jax.lax.scan` of `step(carry, *tokens) -> carry, result` along the last axis, where every sequence starts
    with a carry of `num_carried` zeros in the type of the first array."""
    ids, *tokens = (jnp.moveaxis(x, -1, 0) for x in (sequence_ids, *arrays))
    # Where the roll wraps around, at the scan's first step, the carry is zeros whatever the comparison says.
    starts = ids != jnp.roll(ids, -1 if reverse else 1, axis=0)

    def within_sequence(carry: tuple[jax.Array, ...], token: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        start, *here = token
        return step(tuple(jnp.where(start, 0, x) for x in carry), *here)

    zeros = (jnp.zeros(ids.shape[1:], arrays[0].dtype),) * num_carried
    _, results = jax.lax.scan(within_sequence, zeros, (starts, *tokens), reverse=reverse)
    return jnp.moveaxis(results, 0, -1)
