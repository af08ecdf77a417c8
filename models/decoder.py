"""The decoder: one Flax module for all families, its layers stacked and scanned.

    model = build(config, dtype=dtype, remat=remat)                    shapes only, nothing is computed
    params = jax.jit(model.init, out_shardings=shardings)(key)         a plain pytree, created sharded
    model.bind(params).hidden(tokens, positions, segments)

Shapes: B rows, T tokens, D model width, K key/value heads, H head size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxrl_llm.models.attention import KEPT, attend, attend_rows, choose, repeat_kv
from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.embedding import look_up
from jaxrl_llm.models.layers import (
    Linear,
    normal,
    ones,
    parameter,
    rms_norm,
    rope_tables,
    rotate,
    zeros,
)
from jaxrl_llm.sharding.rules import ONE_DEVICE, Layout, gather

# What the scanned layer keeps for the backward pass, beside its input. What attention gave is no larger than that, and
# the one thing whose cost grows with the square of a row's length.
_ATTENTION = jax.checkpoint_policies.save_only_these_names(KEPT)
REMAT = {
    "none": None,
    "full": _ATTENTION,
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _ATTENTION
    ),
}

_NO_WINDOW = np.iinfo(np.int32).max

# Rows lie on the data axes and the model width on no axis: what FSDP cuts is weights, gathered layer by layer. Left to
# itself the compiler would rather cut the width of activations and do the whole batch everywhere.
_ACTIVATION = ("batch", "length", "norm")


class Cache(NamedTuple):
    """Keys and values of every slot; the token at position p of a sequence lies at index p of its slot."""

    k: jax.Array  # [L, slots, K, length, H]
    v: jax.Array  # [L, slots, K, length, H]


class Layers(nnx.Module):
    """The parameters of all layers, stacked along L; called with one layer's slice inside a scan."""

    def __init__(self, c: DecoderConfig, rngs: nnx.Rngs):
        L, D, N, K, H, F = c.num_layers, c.embed, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp
        self.epsilon = c.norm_epsilon
        self.attention_norm = parameter(rngs, (L, D), ("layers", "norm"), ones)
        self.q = Linear(rngs, "BTD,DNH->BTNH", L, (D, N, H), ("embed", "heads", "head_dim"), bias=c.qkv_bias)
        kv = ("embed", "kv_heads", "head_dim")
        self.k = Linear(rngs, "BTD,DKH->BTKH", L, (D, K, H), kv, bias=c.qkv_bias)
        self.v = Linear(rngs, "BTD,DKH->BTKH", L, (D, K, H), kv, bias=c.qkv_bias)
        self.o = Linear(
            rngs, "BTNH,NHD->BTD", L, (N, H, D), ("heads", "head_dim", "embed"), inputs=2, bias=c.output_bias
        )
        if c.qk_norm:
            self.q_norm = parameter(rngs, (L, H), ("layers", "head_dim"), ones)
            self.k_norm = parameter(rngs, (L, H), ("layers", "head_dim"), ones)
        self.mlp_norm = parameter(rngs, (L, D), ("layers", "norm"), ones)
        self.gate = Linear(rngs, "BTD,DF->BTF", L, (D, F), ("embed", "mlp"), bias=c.mlp_bias)
        self.up = Linear(rngs, "BTD,DF->BTF", L, (D, F), ("embed", "mlp"), bias=c.mlp_bias)
        self.down = Linear(rngs, "BTF,FD->BTD", L, (F, D), ("mlp", "embed"), bias=c.mlp_bias)

    def __call__(
        self,
        x_BTD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        attention: Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]],
    ) -> tuple[jax.Array, Any]:
        """One layer. `attention(q_BTNH, k_BKTH, v_BKTH)` returns its output [B, T, N, H] and what it keeps."""
        h = rms_norm(x_BTD, self.attention_norm[...], self.epsilon)
        q, k, v = self.q(h), self.k(h), self.v(h)
        if hasattr(self, "q_norm"):
            q = rms_norm(q, self.q_norm[...], self.epsilon)
            k = rms_norm(k, self.k_norm[...], self.epsilon)
        q, k = rotate(q, *rope), rotate(k, *rope)
        out, kept = attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2))
        x_BTD = x_BTD + self.o(out)
        h = rms_norm(x_BTD, self.mlp_norm[...], self.epsilon)
        return x_BTD + self.down(jax.nn.silu(self.gate(h)) * self.up(h)), kept


class Decoder(nnx.Module):
    """Token ids to final hidden states; the head is `models.logprobs` in training, `logits` in sampling."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        *,
        dtype: Any = jnp.float32,
        remat: str = "none",
        layout: Layout = ONE_DEVICE,
        attention: str = "auto",
        value_head: bool = False,
    ):
        """`dtype`: of activations and of the weights as they are used; parameters are kept as given.
        `remat`: a key of REMAT. `layout`: how activations lie on a mesh. `attention`: see `models.attention`.
        `value_head`: one number a token instead of logits; 0 before it has learned anything."""
        if remat not in REMAT:
            raise ModelError(f"remat {remat!r} is unknown; choose one of {', '.join(REMAT)}")
        self.config, self.dtype, self.remat, self.layout = config, jnp.dtype(dtype), remat, layout
        self.attention = choose(attention, config, dtype, layout.platform)
        self.embedding = self._table(rngs, 0.02)
        self.layers = Layers(config, rngs)
        self.norm = parameter(rngs, (config.embed,), ("norm",), ones)
        if value_head:
            self.value = parameter(rngs, (config.embed,), ("norm",), zeros)
        elif not config.tie_embeddings:
            self.head = self._table(rngs, config.embed**-0.5)

    def _table(self, rngs: nnx.Rngs, scale: float) -> nnx.Param:
        """[V, D]; what only pads the vocabulary is 0 and takes no random numbers."""
        c = self.config

        def init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
            drawn = normal(scale)(key, (c.vocab_size, c.embed), dtype)
            return jnp.pad(drawn, ((0, shape[0] - c.vocab_size), (0, 0)))

        return parameter(rngs, (c.padded_vocab, c.embed), ("vocab", "norm"), init)

    def hidden(self, token_ids_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """[B, T, D]: hidden states after the final norm. Tokens see earlier tokens of their own segment."""
        x, _ = self._full(token_ids_BT, positions_BT, segment_ids_BT, keep=False)
        return x

    def prefill(self, token_ids_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, Cache]:
        """Right-padded prompts to the hidden state of their last token [B, D] and their keys and values
        [L, B, K, T, H] (padding included, never read; K as `kept_kv_heads` says)."""
        B, T = token_ids_BT.shape
        positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
        segments = (positions < lengths_B[:, None]).astype(jnp.int32)
        x, (k, v) = self._full(token_ids_BT, positions, segments, keep=True)
        last = jnp.take_along_axis(x, (lengths_B - 1)[:, None, None], axis=1)[:, 0]
        return last, Cache(k, v)

    def decode(
        self, token_ids_B: jax.Array, positions_B: jax.Array, cache: Cache, view: int
    ) -> tuple[jax.Array, Cache]:
        """One token for every slot: hidden states [B, D] and the cache with the token's keys and values.

        `view` (static) is how many cache positions are read: more than every position in `positions_B`.
        """
        slots = jnp.arange(token_ids_B.shape[0])
        places = jnp.arange(view, dtype=jnp.int32)
        distance = positions_B[:, None] - places
        rope = rope_tables(positions_B[:, None], self.config.rope, self.config.head_dim)

        def layer(carry: Any, scanned: Any) -> tuple[Any, None]:
            x, cache = carry
            params, window, i = scanned

            def attention(q: jax.Array, k_BK1H: jax.Array, v_BK1H: jax.Array) -> tuple[jax.Array, Cache]:
                k_BK1H, v_BK1H = repeat_kv(k_BK1H, self.layout), repeat_kv(v_BK1H, self.layout)
                # The layer index keeps the whole cache in the carry, where XLA updates it in place.
                k = cache.k.at[i, slots, :, positions_B].set(k_BK1H[:, :, 0].astype(cache.k.dtype))
                v = cache.v.at[i, slots, :, positions_B].set(v_BK1H[:, :, 0].astype(cache.v.dtype))
                mask = (distance >= 0) & (distance < window)
                k_view = jax.lax.dynamic_index_in_dim(k, i, keepdims=False)[:, :, :view]
                v_view = jax.lax.dynamic_index_in_dim(v, i, keepdims=False)[:, :, :view]
                out = attend(q, k_view.astype(q.dtype), v_view.astype(q.dtype), mask[:, None])
                return out, Cache(k, v)

            x, cache = self._layer(params, i)(x, rope, attention)
            return (self.layout.constrain(x, _ACTIVATION), cache), None

        x = look_up(self.embedding[...], token_ids_B[:, None], self.dtype, self.layout)
        windows = jnp.array([w or _NO_WINDOW for w in self.config.windows], jnp.int32)
        scanned = (self._stacked(), windows, jnp.arange(self.config.num_layers))
        (x, cache), _ = jax.lax.scan(layer, (x, cache), scanned)
        return rms_norm(x, self.norm[...], self.config.norm_epsilon)[:, 0], cache

    def head_matrix(self) -> jax.Array:
        """[V, D], in `dtype`: the output embedding; the input embedding itself when they are tied."""
        return (self.embedding if self.config.tie_embeddings else self.head)[...].astype(self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V] of hidden states [..., D]; -inf for the ids that only pad the vocabulary."""
        return head_logits(hidden, self.head_matrix(), self.config.vocab_size)

    def values(self, hidden_BTD: jax.Array) -> jax.Array:
        """float32 [B, T] of final hidden states: the value head."""
        return jnp.einsum("BTD,D->BT", hidden_BTD.astype(jnp.float32), self.value[...])

    def _stacked(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))

    def _layer(self, params: Any, index: jax.Array) -> Layers:
        """One layer with its weights in the computing dtype."""
        # 1, which the compiler does not know: it would cast all layers before the loop, and keep a second copy of them.
        one = jnp.where(index < self.config.num_layers, 1.0, 0.0)
        graph, state = nnx.split(self.layers, nnx.Param)

        def ready(param: jax.Array, dims: tuple[str, ...]) -> jax.Array:
            cast = param if param.dtype == self.dtype else (param * one).astype(self.dtype)
            return gather(self.layout, dims[1:], cast)

        return nnx.merge(graph, _with_values(state, jax.tree.map(ready, params, _dims(state))))

    def _full(
        self, token_ids: jax.Array, positions: jax.Array, segments: jax.Array, *, keep: bool
    ) -> tuple[jax.Array, Any]:
        rope = rope_tables(positions, self.config.rope, self.config.head_dim)
        windows = tuple(dict.fromkeys(self.config.windows))  # each needs a program of its own

        def rows(window: int | None, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_rows(self.attention, self.layout, q, k, v, positions, segments, window)

        def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
            params, which, i = scanned

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                if len(windows) == 1:
                    out = rows(windows[0], q, k, v)
                else:
                    out = jax.lax.switch(which, [partial(rows, window) for window in windows], q, k, v)
                return out, (repeat_kv(k, self.layout), repeat_kv(v, self.layout)) if keep else None

            x, kept = self._layer(params, i)(x, rope, attention)
            return self.layout.constrain(x, _ACTIVATION), kept

        policy = REMAT[self.remat]
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False) if policy else layer
        which = jnp.array([windows.index(window) for window in self.config.windows], jnp.int32)
        x = look_up(self.embedding[...], token_ids, self.dtype, self.layout)
        x, kept = jax.lax.scan(body, x, (self._stacked(), which, jnp.arange(self.config.num_layers)))
        return rms_norm(x, self.norm[...], self.config.norm_epsilon), kept


def head_logits(hidden: jax.Array, head_VD: jax.Array, vocab_size: int) -> jax.Array:
    """float32 [..., V]; -inf beyond `vocab_size`. The product runs in the dtype of `hidden`."""
    logits = jnp.einsum(
        "...D,VD->...V",
        hidden,
        head_VD.astype(hidden.dtype),
        precision=jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    if head_VD.shape[0] == vocab_size:
        return logits
    return jnp.where(jnp.arange(head_VD.shape[0]) < vocab_size, logits, -jnp.inf)


class Model(NamedTuple):
    """A decoder taken apart: its structure, and the shapes and dimension names of its parameters."""

    config: DecoderConfig
    dtype: Any  # of computation
    attention: str  # the program of whole rows, see `models.attention`
    graph: nnx.GraphDef
    state: Any  # abstract nnx.State, the frame that `bind` fills
    abstract: Any  # pytree of ShapeDtypeStruct, float32
    dims: Any  # same structure: tuples of dimension names

    def bind(self, params: Any) -> Decoder:
        """The module with these parameters."""
        return nnx.merge(self.graph, _with_values(self.state, params))

    def init(self, key: jax.Array) -> Any:
        """Random parameters; call it under `jax.jit` with out_shardings."""
        module = Decoder(self.config, nnx.Rngs(params=key), value_head="value" in self.abstract)
        return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def build(
    config: DecoderConfig,
    *,
    dtype: Any = jnp.float32,
    remat: str = "none",
    layout: Layout = ONE_DEVICE,
    attention: str = "auto",
    value_head: bool = False,
) -> Model:
    """The decoder's structure; computes nothing. Its activations lie as `layout` says. Options: see `Decoder`."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "remat": remat,
        "layout": layout,
        "attention": attention,
        "value_head": value_head,
    }
    module = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), **options))
    graph, state = nnx.split(module, nnx.Param)
    return Model(config, jnp.dtype(dtype), module.attention, graph, state, nnx.to_pure_dict(state), _dims(state))


def _dims(state: Any) -> Any:
    """The pytree of the parameters' dimension names."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return nnx.to_pure_dict(jax.tree.map(lambda p: p.get_metadata()["logical_dims"], state, is_leaf=is_variable))


def _with_values(state: Any, values: Any) -> Any:
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, values)
    return state
