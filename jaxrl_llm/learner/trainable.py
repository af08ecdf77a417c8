"""A model with its optimizer: where its state lies, and how a mini-batch changes it.

Micro-batches are walked with a trip count that is data, so a batch that packs into fewer rows costs less and compiles
nothing. All functions are called inside a compiled step.

Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.models.decoder import Model
from jaxrl_llm.sharding.rules import TRAINING, AnyMesh, replicated, tree_shardings
from jaxrl_llm.types import ModelState

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)
# The same within a micro-batch: count None where the sum over micro-batches is one observation.
Parts = dict[str, tuple[jax.Array, jax.Array | None]]

_STEP: Any = jax.ShapeDtypeStruct((), jnp.int32)


class Trainable:
    """A model, its optimizer and its learning rate on a training mesh. `name` begins the names of its metrics."""

    def __init__(
        self,
        name: str,
        model: Model,
        mesh: AnyMesh,
        optimizer: optax.GradientTransformation,
        learning_rate: optax.Schedule,
    ):
        self.name, self.model, self._optimizer, self._learning_rate = name, model, optimizer, learning_rate
        params = model.abstract
        self.abstract = ModelState(params, jax.eval_shape(optimizer.init, params), _STEP)
        self.shardings = state_shardings(model, mesh, optimizer)

    def create(self, params: Any) -> ModelState:
        """The state before the first update. `params`: float32, in the TRAINING layout."""
        opt_state = jax.jit(self._optimizer.init, out_shardings=self.shardings.opt_state)(params)
        return ModelState(params, opt_state, jax.device_put(jnp.int32(0), self.shardings.step))

    def accumulate(
        self, loss: Callable[[Any, Any], tuple[jax.Array, Parts]], params: Any, mini: Any, num_micro: jax.Array
    ) -> tuple[Any, Metrics]:
        """Gradients and metrics of `loss(params, micro)`, added up over the micro-batches in use of `mini`, a pytree of
        arrays [M, ...]."""
        first = jax.tree.map(lambda x: x[0], mini)
        if jax.tree.leaves(mini)[0].shape[0] == 1:  # nothing to add up: one set of gradients instead of two
            grads, metrics = jax.grad(loss, has_aux=True)(params, first)
            return self._like_params(grads), observed(metrics)
        shapes = jax.eval_shape(loss, params, first)[1]
        zero_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        zero_grads = self._like_params(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

        def one(m: jax.Array, carry: tuple[Any, Parts]) -> tuple[Any, Parts]:
            micro = jax.tree.map(lambda x: x[m], mini)
            grads, metrics = jax.grad(loss, has_aux=True)(params, micro)
            return jax.tree.map(jnp.add, carry[0], self._like_params(grads)), jax.tree.map(jnp.add, carry[1], metrics)

        grads, metrics = jax.lax.fori_loop(0, num_micro, one, (zero_grads, zero_metrics))
        return grads, observed(metrics)

    def _like_params(self, grads: Any) -> Any:
        """Gradients lie as their parameters, and so does all that the optimizer makes of them."""
        return jax.lax.with_sharding_constraint(grads, self.shardings.params)

    def apply(self, state: ModelState, grads: Any, metrics: Metrics) -> tuple[ModelState, Metrics]:
        """The state after one update. An update whose loss (`metrics["NAME/loss"]`) or gradient is not finite is not
        made: parameters, moments and schedule stay; `NAME/skipped_updates` says so."""
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        updated = ModelState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics[f"{self.name}/loss"][0])
        metrics = metrics | {
            f"{self.name}/grad_norm": single(norm),
            f"{self.name}/lr": single(self._learning_rate(state.step)),
            f"{self.name}/skipped_updates": single(~finite),
        }
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), metrics


def over_micro_batches(function: Callable[[Any], Any], mini: Any, num_micro: jax.Array) -> Any:
    """What `function` returns for each micro-batch in use of `mini`, a pytree of arrays [M, ...]; zeros for others."""
    M = jax.tree.leaves(mini)[0].shape[0]
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], mini))
    zeros = jax.tree.map(lambda x: jnp.zeros((M, *x.shape), x.dtype), shapes)

    def one(m: jax.Array, out: Any) -> Any:
        values = function(jax.tree.map(lambda x: x[m], mini))
        return jax.tree.map(lambda all_of_them, value: all_of_them.at[m].set(value), out, values)

    return jax.lax.fori_loop(0, num_micro, one, zeros)


def over_mini_batches(function: Callable[[Any], Any], batch: Any, num_micro_A: jax.Array) -> Any:
    """`over_micro_batches` for each mini-batch of a pytree of arrays [A, M, ...]."""
    return jax.lax.map(lambda mini: over_micro_batches(function, *mini), (batch, num_micro_A))


def param_shardings(model: Model, mesh: AnyMesh) -> Any:
    """Where each parameter lies in training."""
    return tree_shardings(model.abstract, model.dims, TRAINING, mesh)


def state_shardings(model: Model, mesh: AnyMesh, optimizer: optax.GradientTransformation) -> ModelState:
    """Where all of a ModelState lies: moments as their parameters, counters everywhere."""
    params = param_shardings(model, mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, model.abstract),
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    step: Any = replicated(mesh)
    return ModelState(params, opt_state, step)


def observed(parts: Parts) -> Metrics:
    """Losses are sums of weighted tokens over the whole mini-batch: each is one observation."""
    return {
        name: (value, jnp.float32(1)) if count is None else (value, count) for name, (value, count) in parts.items()
    }


def single(value: Any) -> tuple[jax.Array, jax.Array]:
    """A metric of one observation."""
    return jnp.asarray(value, jnp.float32), jnp.float32(1)


def token_mean(values: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A metric that is observed at each token in the mask."""
    return jnp.where(mask, values, 0.0).sum(), mask.sum().astype(jnp.float32)


def add(a: Mapping[str, Any], b: Mapping[str, Any]) -> Metrics:
    """Adds sums and counts of metrics."""
    return {**a, **{k: (a[k][0] + s, a[k][1] + n) if k in a else (s, n) for k, (s, n) in b.items()}}
