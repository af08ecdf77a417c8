"""From a loss per token to one number: `loss = sum(weights * token_loss)`.

The weights are computed once from the mask of the whole mini-batch. Micro-batches, devices and hosts then
only add: neither the loss nor its gradient depends on how the mini-batch is cut, packed or padded.

With n_s valid tokens in sequence s, and N tokens and S sequences in all, where a sequence without valid
tokens does not count:

    token-mean               1 / N                every token counts the same (DAPO, arXiv:2503.14476)
    token-sum                1
    seq-mean-token-sum       1 / S                log-probability of the whole sequence, as in REINFORCE
    seq-mean-token-mean      1 / (S n_s)          every sequence counts the same (GRPO, arXiv:2402.03300)
    seq-mean-token-sum-norm  1 / (S length_norm)  no bias by length (Dr. GRPO, arXiv:2503.20783)
    batch-mean-token-mean    1 / (R n_s)          as seq-mean-token-mean, but all R sequences of the mini-batch count,
                                                  also those without tokens (GMPO, arXiv:2507.20673)

seq-mean-token-mean divides by n_s + 1e-8, as verl does: nothing in float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments
from jaxrl_llm.types import UserError

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "batch-mean-token-mean",
)


def token_weights(
    mode: str,
    mask: jax.Array,
    sequence_ids: jax.Array,
    num_sequences: int,
    *,
    length_norm: float | None = None,
    batch_sequences: int | jax.Array | None = None,
    sequence_weights: jax.Array | None = None,
) -> jax.Array:
    """Weight of every token in the loss of one mini-batch.

    Args:
        mode: one of AGGREGATIONS.
        mask: bool or number [...], the tokens that have a loss, over the whole mini-batch. Several
            mini-batches at once, [A, M, B, T], go through `jax.vmap` over A.
        sequence_ids: int32 [...]; num_sequences at padding. A sequence that is not in this mini-batch does
            not count.
        num_sequences: static, how many sequences the ids speak of; more than are present is no matter.
        length_norm: in tokens, read by seq-mean-token-sum-norm only: a constant, such as the longest response
            that sampling allows.
        batch_sequences: R, read by batch-mean-token-mean only: how many sequences the mini-batch was made of.
        sequence_weights: number [S], how often each sequence counts, as if the mini-batch held it so many times.

    Returns:
        float32 [...] (float64 under x64), 0 outside the mask; all 0 if no token is valid.

    Raises:
        UserError: unknown mode, seq-mean-token-sum-norm without length_norm, or batch-mean-token-mean without
            batch_sequences.
    """
    if mode not in AGGREGATIONS:
        raise UserError(f"unknown loss aggregation {mode!r}; expected one of {', '.join(AGGREGATIONS)}")
    dtype = jnp.result_type(float)
    lengths_S = segments.sequence_lengths(mask, sequence_ids, num_sequences)
    times_S = jnp.ones((num_sequences,), jnp.int32) if sequence_weights is None else sequence_weights
    num_tokens = jnp.maximum((times_S * lengths_S).sum(), 1).astype(dtype)
    tokens_S = jnp.maximum(lengths_S, 1).astype(dtype)
    num_present = jnp.maximum((times_S * (lengths_S > 0)).sum(), 1).astype(dtype)
    match mode:
        case "token-mean":
            weight = 1 / num_tokens
        case "token-sum":
            weight = jnp.ones((), dtype)
        case "seq-mean-token-sum":
            weight = 1 / num_present
        case "seq-mean-token-mean":
            weight = 1 / (num_present * (tokens_S + 1e-8))
        case "batch-mean-token-mean":
            if batch_sequences is None:
                raise UserError(
                    "loss aggregation batch-mean-token-mean divides by batch_sequences: expected a number of "
                    "sequences, got None. Give how many the mini-batch has, those without tokens included."
                )
            weight = 1 / (batch_sequences * tokens_S)
        case _:
            if length_norm is None:
                raise UserError(
                    "loss aggregation seq-mean-token-sum-norm divides by length_norm: expected a number of "
                    "tokens, got None. Give it, for example the longest response that sampling allows."
                )
            weight = 1 / (num_present * length_norm)
    weight_S = weight * times_S.astype(dtype)
    return jnp.where(mask.astype(bool), segments.to_tokens(weight_S, sequence_ids), 0)
