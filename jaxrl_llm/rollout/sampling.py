"""Choosing tokens. Shapes: S slots, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Filters(NamedTuple):
    """The numbers of a Sampling as scalars that can change without compiling again."""

    temperature: jax.Array  # float32 []; 0 is greedy
    top_k: jax.Array  # int32 []; 0 keeps all
    top_p: jax.Array  # float32 []
    min_p: jax.Array  # float32 []


def sample(
    logits_SV: jax.Array, seeds_S: jax.Array, positions_S: jax.Array, filters: Filters, *, filtered: bool
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [S], and their log-probabilities float32 [S] after temperature and before the filters.

    The noise of a token is a function of its sequence's seed (uint32) and its position only, so a sequence is the same
    whatever it is batched with. `filtered` (static) says whether top-k, top-p or min-p are in force.
    """
    greedy = filters.temperature == 0
    scaled = logits_SV.astype(jnp.float32) / jnp.where(greedy, 1.0, filters.temperature)
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    allowed = jnp.where(keep(scaled, filters), scaled, -jnp.inf) if filtered else scaled

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits_SV.shape[-1:], jnp.float32)

    gumbel = jax.vmap(noise)(seeds_S, positions_S)
    tokens = jnp.argmax(jnp.where(greedy, scaled, allowed + gumbel), axis=-1).astype(jnp.int32)
    return tokens, jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]


def keep(scaled_SV: jax.Array, filters: Filters) -> jax.Array:
    """bool [S, V]: the tokens that top-k, then top-p, then min-p leave in; the most likely one always is.

    top-p keeps the smallest set of most likely tokens that together reach it, among what top-k left.
    """
    V = scaled_SV.shape[-1]
    order = jnp.argsort(scaled_SV, axis=-1, descending=True)
    ranked = jnp.take_along_axis(scaled_SV, order, axis=-1)
    rank = jnp.arange(V)
    ranked = jnp.where(rank < jnp.where(filters.top_k == 0, V, filters.top_k), ranked, -jnp.inf)
    p = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(p, axis=-1) - p
    # In float32 the sum can reach 1 before the last token.
    reached = (before >= filters.top_p) & (filters.top_p < 1)
    kept = ~reached & (p >= filters.min_p * p[:, :1]) & (p > 0)
    kept |= rank == 0
    rows = jnp.arange(scaled_SV.shape[0])[:, None]
    return jnp.zeros(scaled_SV.shape, bool).at[rows, order].set(kept)
