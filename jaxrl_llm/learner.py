"""The SPMD side: log-probabilities, advantages, updates. The only file that jits a training step.

A step is `prepare` (old and reference log-probabilities, advantages) and `update` (epochs x mini-batches; each one
compiled call that walks over its micro-batches and then applies the optimizer). Micro-batches are walked with
a trip count that is data, so a batch that packs into fewer rows costs less and compiles nothing.

Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.sharding.rules import TRAINING, named_sharding, replicated, tree_shardings
from jaxrl_llm.types import SequenceBatch, TrainBatch, TrainState

Metrics = dict[str, tuple[jax.Array, jax.Array]]  # name -> (sum, count)


@dataclass(frozen=True)
class Objective:
    """What is minimised: sum over tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy)."""

    loss: Callable[..., Any]  # a policy loss with its constants bound
    advantage: Callable[..., jax.Array] | None  # with its constants bound; None: advantages of 1, no old policy (SFT)
    aggregation: str
    length_norm: float
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0


class _Micro(NamedTuple):
    """One micro-batch with all that the loss needs: arrays [B, T]."""

    token_ids: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    sequence_ids: jax.Array
    action_mask: jax.Array
    old_logprobs: jax.Array
    reference_logprobs: jax.Array | None
    advantages: jax.Array
    weights: jax.Array


class Learner:
    """Policy, optimizer and reference on a training mesh."""

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        params: Any,
        optimizer: optax.GradientTransformation,
        objective: Objective,
        *,
        learning_rate: optax.Schedule,
        epochs: int,
        logits_chunk: int,
    ):
        """`params`: float32, in the TRAINING layout (see `param_shardings`). They are kept as the reference if the
        objective has a KL term."""
        self._model, self._mesh, self._objective = model, mesh, objective
        self._optimizer, self._learning_rate, self._epochs = optimizer, learning_rate, epochs
        self._chunk = logits_chunk
        self.shardings = state_shardings(model, mesh, optimizer)
        self.reference = jax.tree.map(jnp.copy, params) if objective.kl_coef else None
        self.initial_checksum = int(checksum(params))
        opt_state = jax.jit(optimizer.init, out_shardings=self.shardings.opt_state)(params)
        self.state = TrainState(params, opt_state, jax.device_put(jnp.int32(0), replicated(mesh)))
        self._abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.state, self.shardings
        )
        self._prepare = jax.jit(self._prepare_step)
        self._update = jax.jit(self._update_step, donate_argnums=(0,), out_shardings=(self.shardings, None))

    def restore(self, load: Callable[[TrainState], TrainState]) -> None:
        """Replaces the state by what `load` returns for its shapes, dtypes and shardings. The old one goes first: there
        may be no room for both."""
        vars(self).pop("state", None)  # it is not there if a first `load` has failed
        self.state = load(self._abstract)

    def place(self, batch: SequenceBatch) -> SequenceBatch:
        """Puts a host batch on the mesh: rows over the data axes, per-sequence arrays everywhere."""
        everywhere = replicated(self._mesh)

        def put(name: str, x: Any) -> jax.Array:
            if x.ndim < 4:
                return jax.device_put(x, everywhere)
            dims = ("accumulation", "accumulation", "batch", "length")
            return jax.device_put(x, named_sharding(f"batch.{name}", x.shape, dims, TRAINING, self._mesh))

        return SequenceBatch(*(put(name, x) for name, x in zip(batch._fields, batch, strict=True)))

    def prepare(self, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        """Log-probabilities of the old and the reference policy, and advantages."""
        return self._prepare(self.state.params, self.reference, batch)

    def update(self, batch: TrainBatch) -> Metrics:
        """All epochs over all mini-batches; metrics are added up over them. An update whose loss or gradient is
        not finite is not made: parameters, moments and schedule stay; `actor/skipped_updates` counts it."""
        total: Metrics = {}
        for _ in range(self._epochs):
            for index in range(batch.advantages.shape[0]):
                self.state, metrics = self._update(self.state, batch, index)
                total = add(total, metrics)
        return total | {"actor/skipped_updates": single(total["actor/skipped_updates"][0])}  # their number

    def gradients(self, batch: TrainBatch, index: int = 0) -> tuple[Any, Metrics]:
        """Gradients of one mini-batch, summed over its micro-batches, as the optimizer gets them."""
        return jax.jit(self._gradients)(self.state.params, batch, index)

    # ---- compiled -----------------------------------------------------------------------------------------------

    def _logprobs(self, params: Any, micro: Any, *, entropy: bool) -> tuple[jax.Array, jax.Array | None]:
        """[B, T] log-probabilities and entropies at the sampling temperature."""
        module = self._model.bind(params)
        hidden = module.hidden(micro.token_ids, micro.positions, micro.segment_ids)
        return token_logprobs(
            hidden,
            module.head_matrix(),
            micro.token_ids,
            micro.segment_ids,
            vocab_size=self._model.config.vocab_size,
            temperature=self._objective.temperature,
            chunk=self._chunk,
            entropy=entropy,
        )

    def _prepare_step(self, params: Any, reference: Any, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        o, S = self._objective, batch.group_ids.shape[0]
        zeros = jnp.zeros(batch.token_ids.shape, jnp.float32)
        if o.advantage is None:
            return TrainBatch(batch, zeros, None, jnp.where(batch.action_mask, 1.0, 0.0)), {}
        old, entropy = self._over_micro_batches(params, batch, entropy=True)
        ref = self._over_micro_batches(reference, batch, entropy=False)[0] if reference is not None else None
        advantages_S = o.advantage(batch.rewards, batch.group_ids, batch.valid, S)
        advantages = jnp.where(batch.action_mask, segments.to_tokens(advantages_S, batch.sequence_ids), 0.0)
        return TrainBatch(batch, old, ref, advantages), _prepare_metrics(batch, old, entropy, advantages)

    def _over_micro_batches(self, params: Any, batch: SequenceBatch, *, entropy: bool) -> tuple[jax.Array, jax.Array]:
        """[A, M, B, T] log-probabilities and entropies (zeros unless asked for) of the micro-batches in use."""
        A = batch.token_ids.shape[0]
        zeros = jnp.zeros(batch.token_ids.shape, jnp.float32)

        def one(m: jax.Array, out: tuple[jax.Array, jax.Array], a: jax.Array) -> tuple[jax.Array, jax.Array]:
            micro = jax.tree.map(lambda x: x[a, m] if x.ndim == 4 else x, batch)
            logprobs, h = self._logprobs(params, micro, entropy=entropy)
            return out[0].at[a, m].set(logprobs), out[1] if h is None else out[1].at[a, m].set(h)

        def mini(a: jax.Array, out: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            return jax.lax.fori_loop(0, batch.num_micro[a], partial(one, a=a), out)

        return jax.lax.fori_loop(0, A, mini, (zeros, zeros))

    def _update_step(self, state: TrainState, batch: TrainBatch, index: jax.Array) -> tuple[TrainState, Metrics]:
        grads, metrics = self._gradients(state.params, batch, index)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        updated = TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["actor/loss"][0])
        metrics |= {
            "actor/grad_norm": single(norm),
            "actor/lr": single(self._learning_rate(state.step)),
            "actor/skipped_updates": single(~finite),
        }
        return jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state), metrics

    def _gradients(self, params: Any, batch: TrainBatch, index: jax.Array) -> tuple[Any, Metrics]:
        o, s = self._objective, batch.sequences
        S = s.group_ids.shape[0]
        mask, ids = s.action_mask[index], s.sequence_ids[index]
        weights = token_weights(o.aggregation, mask, ids, S, length_norm=o.length_norm)
        mini = _Micro(
            s.token_ids[index],
            s.segment_ids[index],
            s.positions[index],
            ids,
            mask,
            batch.old_logprobs[index],
            None if batch.reference_logprobs is None else batch.reference_logprobs[index],
            batch.advantages[index],
            weights,
        )
        loss = partial(self._micro_loss, num_sequences=S)
        first = jax.tree.map(lambda x: x[0], mini)
        shapes = jax.eval_shape(loss, params, first)[1]
        zero_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        zero_grads = jax.tree.map(
            lambda p, sharding: jax.lax.with_sharding_constraint(jnp.zeros(p.shape, jnp.float32), sharding),
            params,
            self.shardings.params,
        )

        def one(m: jax.Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            micro = jax.tree.map(lambda x: x[m], mini)
            grads, metrics = jax.grad(loss, has_aux=True)(params, micro)
            return jax.tree.map(jnp.add, carry[0], grads), jax.tree.map(jnp.add, carry[1], metrics)

        grads, metrics = jax.lax.fori_loop(0, s.num_micro[index], one, (zero_grads, zero_metrics))
        # Losses are sums of weighted tokens over the whole mini-batch: each is one observation.
        return grads, {
            name: (value, jnp.float32(1)) if count is None else (value, count)
            for name, (value, count) in metrics.items()
        }

    def _micro_loss(
        self, params: Any, micro: _Micro, *, num_sequences: int
    ) -> tuple[jax.Array, dict[str, tuple[jax.Array, jax.Array | None]]]:
        """This micro-batch's part of the mini-batch's loss."""
        o = self._objective
        logprobs, entropy = self._logprobs(params, micro, entropy=bool(o.entropy_coef))
        policy = o.loss(
            logprobs,
            micro.old_logprobs,
            micro.advantages,
            micro.action_mask,
            sequence_ids=micro.sequence_ids,
            num_sequences=num_sequences,
        )

        def weighted(token_values: jax.Array) -> jax.Array:
            return jnp.sum(micro.weights * jnp.where(micro.action_mask, token_values, 0.0))

        loss = weighted(policy.token_loss)
        metrics: dict[str, tuple[jax.Array, jax.Array | None]] = {
            **policy.metrics,
            "actor/pg_loss": (loss, None),
        }
        if micro.reference_logprobs is not None:
            kl = weighted(kl_penalty(logprobs, micro.reference_logprobs, o.kl_estimator, mask=micro.action_mask))
            metrics["actor/kl_loss"] = (kl, None)
            loss += o.kl_coef * kl
        if entropy is not None:
            bonus = weighted(entropy)
            metrics["actor/entropy_loss"] = (bonus, None)
            loss -= o.entropy_coef * bonus
        metrics["actor/loss"] = (loss, None)
        return loss, metrics


def param_shardings(model: Model, mesh: Mesh) -> Any:
    """Where each parameter lies in training."""
    return tree_shardings(model.abstract, model.dims, TRAINING, mesh)


def state_shardings(model: Model, mesh: Mesh, optimizer: optax.GradientTransformation) -> TrainState:
    """Where all of a TrainState lies: moments as their parameters, counters everywhere."""
    params = param_shardings(model, mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, model.abstract),
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    step: Any = replicated(mesh)
    return TrainState(params, opt_state, step)


def single(value: Any) -> tuple[jax.Array, jax.Array]:
    """A metric of one observation."""
    return jnp.asarray(value, jnp.float32), jnp.float32(1)


def add(a: Metrics, b: Metrics) -> Metrics:
    """Adds sums and counts of metrics."""
    return {**a, **{k: (a[k][0] + s, a[k][1] + n) if k in a else (s, n) for k, (s, n) in b.items()}}


def _prepare_metrics(batch: SequenceBatch, old: jax.Array, entropy: jax.Array, advantages: jax.Array) -> Metrics:
    mask = batch.action_mask
    count = mask.sum().astype(jnp.float32)
    # The sampler's and the learner's opinion of the same tokens under the same weights: differs by rounding only.
    difference = jnp.where(mask, old - batch.sampler_logprobs, 0.0)

    def mean(values: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.where(mask, values, 0.0).sum(), count

    return {
        "actor/entropy": mean(entropy),
        "critic/advantages/mean": mean(advantages),
        "critic/advantages/max": single(jnp.where(mask, advantages, -jnp.inf).max()),
        "critic/advantages/min": single(jnp.where(mask, advantages, jnp.inf).min()),
        "rollout_corr/kl": mean(-difference),
        "rollout_corr/k3_kl": mean(jnp.exp(difference) - 1 - difference),
        "training/rollout_logprobs_diff_mean": mean(jnp.abs(difference)),
        "training/rollout_logprobs_diff_max": single(jnp.abs(difference).max()),
    }
