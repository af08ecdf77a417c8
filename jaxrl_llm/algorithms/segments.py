"""Reductions over the tokens of each sequence, wherever these tokens lie.

Every token carries the index of its sequence. A reduction adds up by that index, so one sequence a row,
several sequences packed in a row and any amount of padding give the same result. The same functions reduce
the samples of each prompt: samples for tokens, `group_ids` for `sequence_ids`.
"""

from __future__ import annotations

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
