"""The compiled parts of the jax engine: reading prompts, filling slots, decoding.

Shapes: S slots, P prompts of one prefill, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.attention import kept_kv_heads
from jaxrl_llm.models.decoder import Cache, Model
from jaxrl_llm.rollout.sampling import Filters, sample
from jaxrl_llm.sharding.rules import INFERENCE, AnyMesh, Layout, named_sharding, replicated


class Slots(NamedTuple):
    """What the device knows of each slot."""

    token: jax.Array  # int32 [S]: the last token, not yet in the cache
    position: jax.Array  # int32 [S]: its position
    remaining: jax.Array  # int32 [S]: tokens that may still follow
    active: jax.Array  # bool [S]
    seed: jax.Array  # uint32 [S]


class Admission(NamedTuple):
    """Which slots get a request now, and which; the rest keep what they have."""

    fresh: jax.Array  # bool [S]
    place: jax.Array  # int32 [S]: which of the prompts read
    length: jax.Array  # int32 [S]: of the prompt
    budget: jax.Array  # int32 [S]: tokens that it may have
    seed: jax.Array  # uint32 [S]


class Programs:
    """What an engine compiles, and how all that it keeps lies on the mesh. Holds no arrays."""

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        *,
        eos_ids: Sequence[int],
        slots: int,
        prefill_batch: int,
        length: int,
        steps_per_dispatch: int,
    ):
        """`slots` and `prefill_batch` are rounded up to what the mesh's data axes divide, `length` (tokens of a slot)
        to a multiple of 8."""
        layout, eos = Layout(INFERENCE, mesh), tuple(eos_ids)
        parts = layout.parts("batch")
        self.slots, self.prefill_batch = round_up(slots, parts), round_up(min(prefill_batch, slots), parts)
        self.length, self.steps = round_up(length, 8), steps_per_dispatch
        c = model.config
        shape = (c.num_layers, self.slots, kept_kv_heads(c.num_kv_heads, layout), self.length, c.head_dim)
        dims = ("layers", "batch", "kv_heads", "length", "head_dim")
        # Stated, so that the cache keeps its layout from call to call and nothing is compiled twice.
        cache = named_sharding("cache", shape, dims, INFERENCE, mesh)
        abstract: Any = jax.ShapeDtypeStruct(shape, model.dtype, sharding=cache)
        self.abstract_cache = Cache(abstract, abstract)
        self.everywhere = replicated(mesh)
        self.prompt_rows = named_sharding("prompts", (self.prefill_batch,), ("batch",), INFERENCE, mesh)
        self.allocate = jax.jit(
            lambda: Cache(jnp.zeros(shape, model.dtype), jnp.zeros(shape, model.dtype)), out_shardings=cache
        )
        self.prefill = jax.jit(partial(prefill, model))
        self.admit = jax.jit(
            partial(admit, layout, eos),
            static_argnames="filtered",
            donate_argnums=(0, 1),
            out_shardings=(cache, self.everywhere, self.everywhere),
        )
        self.dispatch = jax.jit(
            partial(dispatch, model, eos, self.steps),
            static_argnames=("view", "filtered"),
            donate_argnums=(1, 2),
            out_shardings=(cache, *[self.everywhere] * 4),
        )


def round_up(n: int, multiple: int) -> int:
    """The next multiple."""
    return -(-n // multiple) * multiple


def prefill(model: Model, params: Any, ids: jax.Array, lengths: jax.Array) -> tuple[jax.Array, Cache]:
    """Logits of the first response token [P, V], and the prompts' keys and values."""
    module = model.bind(params)
    hidden, cache = module.prefill(ids, lengths)
    return module.logits(hidden), cache


def admit(
    layout: Layout,
    eos: tuple[int, ...],
    cache: Cache,
    slots: Slots,
    prefix: Cache,
    prefix_logits: jax.Array,
    new: Admission,
    filters: Filters,
    *,
    filtered: bool,
) -> tuple[Cache, Slots, jax.Array]:
    """Cache and slots with the new requests, and the log-probability of the first token of each slot."""
    width = min(prefix.k.shape[3], cache.k.shape[3])
    dims = ("kv_heads", "length", "head_dim")

    def fill_layer(i: jax.Array, to: Cache) -> Cache:
        # Layer by layer, and every slot from its own place: the prompts of all slots at once would be a second cache.
        def fill(to: jax.Array, source: jax.Array) -> jax.Array:
            prompts = layout.constrain(source[i].astype(to.dtype), ("norm", *dims))[:, :, :width]
            kept = jnp.where(new.fresh[:, None, None, None], prompts[new.place], to[i, :, :, :width])
            return to.at[i, :, :, :width].set(layout.constrain(kept, ("batch", *dims)))

        return Cache(fill(to.k, prefix.k), fill(to.v, prefix.v))

    cache = jax.lax.fori_loop(0, cache.k.shape[0], fill_layer, cache)
    token, logprob = sample(prefix_logits[new.place], new.seed, new.length, filters, filtered=filtered)

    def put(old: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.where(new.fresh, values, old)

    slots = Slots(
        token=put(slots.token, token),
        position=put(slots.position, new.length),
        remaining=put(slots.remaining, new.budget - 1),
        active=put(slots.active, (new.budget > 1) & ~_is_eos(token, eos)),
        seed=put(slots.seed, new.seed),
    )
    return cache, slots, logprob


def dispatch(
    model: Model,
    eos: tuple[int, ...],
    steps: int,
    params: Any,
    cache: Cache,
    slots: Slots,
    killed: jax.Array,
    filters: Filters,
    *,
    view: int,
    filtered: bool,
) -> tuple[Cache, Slots, jax.Array, jax.Array, jax.Array]:
    """Up to `steps` tokens for every active slot: cache, slots, tokens and log-probabilities [steps, S], and how many
    tokens each slot has got. Slots that are not active compute along and change nothing that is read."""
    module = model.bind(params)
    slots = slots._replace(active=slots.active & ~killed)
    S = slots.token.shape[0]
    outputs = (jnp.zeros((steps, S), jnp.int32), jnp.zeros((steps, S), jnp.float32), jnp.zeros(S, jnp.int32))

    def unfinished(carry: Any) -> jax.Array:
        i, _, slots, _ = carry
        return (i < steps) & jnp.any(slots.active)

    def step(carry: Any) -> Any:
        i, cache, s, (tokens, logprobs, counts) = carry
        hidden, cache = module.decode(s.token, s.position, cache, view)
        token, logprob = sample(module.logits(hidden), s.seed, s.position + 1, filters, filtered=filtered)
        go = s.active.astype(jnp.int32)
        outputs = (tokens.at[i].set(token), logprobs.at[i].set(logprob), counts + go)
        s = Slots(
            token=jnp.where(s.active, token, s.token),
            position=s.position + go,
            remaining=s.remaining - go,
            active=s.active & (s.remaining > 1) & ~_is_eos(token, eos),
            seed=s.seed,
        )
        return i + 1, cache, s, outputs

    _, cache, slots, outputs = jax.lax.while_loop(unfinished, step, (0, cache, slots, outputs))
    return cache, slots, *outputs


def _is_eos(token: jax.Array, eos: tuple[int, ...]) -> jax.Array:
    if not eos:
        return jnp.zeros(token.shape, bool)
    return jnp.any(token[:, None] == jnp.array(eos, jnp.int32), axis=-1)
