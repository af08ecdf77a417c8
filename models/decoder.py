"""The decoder: one Flax module for all families, its layers stacked and scanned.

    model = build(config, dtype=dtype, remat=remat)                    shapes only, nothing is computed
    params = jax.jit(model.init, out_shardings=shardings)(key)         a plain pytree, created sharded
    model.bind(params).hidden(tokens, positions, segments)

Shapes: B rows, T tokens, D model width, K key/value heads, H head size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.layers import (
    Linear,
    attend,
    attention_mask,
    normal,
    ones,
    parameter,
    rms_norm,
    rope_tables,
    rotate,
    zeros,
)
from jaxrl_llm.sharding.rules import Constrain, Rules, constrainer

# How the scanned layer is rematerialised in the backward pass.
REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
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
        constrain: Constrain = lambda x, dims: x,
        value_head: bool = False,
    ):
        """`dtype`: of activations and of the weights as they are used; parameters are kept as given.
        `remat`: a key of REMAT. `constrain`: how activations lie on a mesh. `value_head`: one number a token instead
        of logits; 0 before it has learned anything."""
        if remat not in REMAT:
            raise ModelError(f"remat {remat!r} is unknown; choose one of {', '.join(REMAT)}")
        self.config, self.dtype, self.remat, self.constrain = config, jnp.dtype(dtype), remat, constrain
        table = (config.padded_vocab, config.embed)
        self.embedding = parameter(rngs, table, ("vocab", "embed"), normal(0.02))
        self.layers = Layers(config, rngs)
        self.norm = parameter(rngs, (config.embed,), ("norm",), ones)
        if value_head:
            self.value = parameter(rngs, (config.embed,), ("norm",), zeros)
        elif not config.tie_embeddings:
            self.head = parameter(rngs, table, ("vocab", "embed"), normal(config.embed**-0.5))

    def hidden(self, token_ids_BT: jax.Array, positions_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """[B, T, D]: hidden states after the final norm. Tokens see earlier tokens of their own segment."""
        x, _ = self._full(token_ids_BT, positions_BT, segment_ids_BT, keep=False)
        return x

    def prefill(self, token_ids_BT: jax.Array, lengths_B: jax.Array) -> tuple[jax.Array, Cache]:
        """Right-padded prompts to the hidden state of their last token [B, D] and their keys and values
        [L, B, K, T, H] (padding included, never read)."""
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
                # The layer index keeps the whole cache in the carry, where XLA updates it in place.
                k = cache.k.at[i, slots, :, positions_B].set(k_BK1H[:, :, 0].astype(cache.k.dtype))
                v = cache.v.at[i, slots, :, positions_B].set(v_BK1H[:, :, 0].astype(cache.v.dtype))
                mask = (distance >= 0) & (distance < window)
                k_view = jax.lax.dynamic_index_in_dim(k, i, keepdims=False)[:, :, :view]
                v_view = jax.lax.dynamic_index_in_dim(v, i, keepdims=False)[:, :, :view]
                out = attend(q, k_view.astype(q.dtype), v_view.astype(q.dtype), mask[:, None])
                return out, Cache(k, v)

            x, cache = self._layer(params)(x, rope, attention)
            return (self.constrain(x, _ACTIVATION), cache), None

        x = self._embed(token_ids_B[:, None])
        scanned = (self._stacked(), self._windows(), jnp.arange(self.config.num_layers))
        (x, cache), _ = jax.lax.scan(layer, (x, cache), scanned)
        return rms_norm(x, self.norm[...], self.config.norm_epsilon)[:, 0], cache

    def head_matrix(self) -> jax.Array:
        """[V, D], in `dtype`: the output embedding; the input embedding itself when they are tied. Gathered once along
        the model width, and not for every chunk of tokens that it is applied to."""
        return self._table(self.embedding if self.config.tie_embeddings else self.head)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V] of hidden states [..., D]; -inf for the ids that only pad the vocabulary."""
        return head_logits(hidden, self.head_matrix(), self.config.vocab_size)

    def values(self, hidden_BTD: jax.Array) -> jax.Array:
        """float32 [B, T] of final hidden states: the value head."""
        return jnp.einsum("BTD,D->BT", hidden_BTD.astype(jnp.float32), self.value[...])

    def _embed(self, token_ids: jax.Array) -> jax.Array:
        return self.constrain(self._table(self.embedding).at[token_ids].get(mode="clip"), _ACTIVATION)

    def _table(self, param: nnx.Param) -> jax.Array:
        return self.constrain(param[...].astype(self.dtype), ("vocab", "norm"))

    def _stacked(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self.layers, nnx.Param))

    def _windows(self) -> jax.Array:
        return jnp.array([w or _NO_WINDOW for w in self.config.windows], jnp.int32)

    def _layer(self, params: Any) -> Layers:
        graph, state = nnx.split(self.layers, nnx.Param)
        cast = jax.tree.map(lambda p: p.astype(self.dtype), params)
        return nnx.merge(graph, _with_values(state, cast))

    def _full(
        self, token_ids: jax.Array, positions: jax.Array, segments: jax.Array, *, keep: bool
    ) -> tuple[jax.Array, Any]:
        rope = rope_tables(positions, self.config.rope, self.config.head_dim)

        def layer(x: jax.Array, scanned: Any) -> tuple[jax.Array, Any]:
            params, window = scanned
            mask = attention_mask(positions, segments, window)

            def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
                return attend(q, k, v, mask), (k, v) if keep else None

            x, kept = self._layer(params)(x, rope, attention)
            return self.constrain(x, _ACTIVATION), kept

        policy = REMAT[self.remat]
        body = jax.checkpoint(layer, policy=policy, prevent_cse=False) if policy else layer
        x, kept = jax.lax.scan(body, self._embed(token_ids), (self._stacked(), self._windows()))
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
    rules: Rules | None = None,
    mesh: Mesh | None = None,
    value_head: bool = False,
) -> Model:
    """The decoder's structure; computes nothing. With `rules` and `mesh` its activations are laid out by them."""
    options: dict[str, Any] = {"dtype": dtype, "remat": remat, "value_head": value_head}
    if rules is not None and mesh is not None:
        options["constrain"] = constrainer(rules, mesh)
    module = nnx.eval_shape(lambda: Decoder(config, nnx.Rngs(0), **options))
    graph, state = nnx.split(module, nnx.Param)
    dims = jax.tree.map(
        lambda p: p.get_metadata()["logical_dims"], state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    return Model(config, jnp.dtype(dtype), graph, state, nnx.to_pure_dict(state), nnx.to_pure_dict(dims))


def _with_values(state: Any, values: Any) -> Any:
    state = jax.tree.map(lambda x: x, state)
    nnx.replace_by_pure_dict(state, values)
    return state
