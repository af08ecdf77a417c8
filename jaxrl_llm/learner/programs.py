"""The compiled programs of a training step, and how all that they read and change lies on the mesh. Holds no arrays.

A step is `prepare` (old and reference log-probabilities, values, advantages) and `update` (one mini-batch: a call walks
over its micro-batches and then applies the optimizer).

Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.kl import EXACT
from jaxrl_llm.learner.actor import Actor, Objective
from jaxrl_llm.learner.critic import Critic
from jaxrl_llm.learner.experience import TokenViews, complete, demonstrations
from jaxrl_llm.learner.reward_model import RewardModel
from jaxrl_llm.learner.trainable import Metrics, over_mini_batches
from jaxrl_llm.sharding.rules import TRAINING, AnyMesh, named_sharding, replicated
from jaxrl_llm.types import ModelState, SequenceBatch, TrainBatch, TrainState

_SCALAR: Any = jax.ShapeDtypeStruct((), jnp.float32)

# What a random key is for, within one step.
_REWEIGHTING, _LOSS = range(2)


class _Tokens(NamedTuple):
    """What a forward pass reads: int32 [A, M, B, T]."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array


class Programs:
    """What is compiled for an objective and the models that it trains."""

    def __init__(
        self,
        mesh: AnyMesh,
        objective: Objective,
        actor: Actor,
        *,
        critic: Critic | None = None,
        reward_model: RewardModel | None = None,
    ):
        self.mesh, self.objective = mesh, objective
        self.actor, self.critic, self.reward_model = actor, critic, reward_model
        self.has_reference = bool(objective.kl_coef or objective.reward_kl or reward_model)
        everywhere = replicated(mesh)
        adaptive: Any = everywhere if objective.reward_kl else None
        self.shardings = TrainState(
            *actor.shardings,
            critic=critic and critic.shardings,
            reward_model=reward_model and reward_model.shardings,
            kl_coef=adaptive,
        )
        shapes = TrainState(
            *actor.abstract,
            critic=critic and critic.abstract,
            reward_model=reward_model and reward_model.abstract,
            kl_coef=adaptive and _SCALAR,
        )
        self.abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings
        )
        self.abstract_reference = (
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, actor.model.dtype, sharding=x.sharding), self.abstract.params
            )
            if self.has_reference
            else None
        )
        self.prepare = jax.jit(self._prepare)
        self.update = jax.jit(self._update, donate_argnums=(0,), out_shardings=(actor.shardings, None))
        self.update_beside = {  # of the models beside the policy
            model.name: jax.jit(_update_beside(model), donate_argnums=(0,), out_shardings=(model.shardings, None))
            for model in (critic, reward_model)
            if model
        }
        self.gradients = jax.jit(self._gradients)

    def batch_shardings(self, batch: Any) -> Any:
        """Where the arrays of a SequenceBatch or TrainBatch lie: rows over the data axes and the context axis,
        per-sequence arrays everywhere."""
        everywhere, dims = replicated(self.mesh), ("accumulation", "accumulation", "batch", "length")
        return jax.tree.map(
            lambda x: named_sharding("batch", x.shape, dims, TRAINING, self.mesh) if x.ndim == 4 else everywhere, batch
        )

    def read_by_loss(self, reference: Any) -> Any:
        """The reference's parameters if the policy's loss reads them."""
        return reference if self.objective.kl_coef and self.objective.kl_estimator == EXACT else None

    def _key(self, step: jax.Array, purpose: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self.objective.seed), step), purpose)

    def _prepare(
        self, state: TrainState, reference: Any, batch: SequenceBatch
    ) -> tuple[TrainBatch, jax.Array | None, Metrics]:
        o = self.objective
        if o.advantage is None:
            return self._placed(demonstrations(batch)), state.kl_coef, {}
        views, key = self.views(state, reference, batch), self._key(state.step, _REWEIGHTING)
        train_batch, kl_coef, metrics = complete(o, batch, views, state.kl_coef, key)
        return self._placed(train_batch), kl_coef, metrics

    def _placed(self, batch: TrainBatch) -> TrainBatch:
        """Stated, so that the updates always get the same layout and are compiled once."""
        return jax.lax.with_sharding_constraint(batch, self.batch_shardings(batch))

    def views(self, state: TrainState, reference: Any, batch: SequenceBatch) -> TokenViews:
        """What each model says of the batch."""
        o = self.objective
        assert o.advantage is not None
        tokens = _Tokens(batch.token_ids, batch.positions, batch.segment_ids)

        def over(function: Callable[..., Any], params: Any, **asked: bool) -> Any:
            return over_mini_batches(lambda micro: function(params, micro, **asked), tokens, batch.num_micro)

        views = TokenViews(batch.sampler_logprobs)
        if not o.bypass:
            asked = "sum_pi_squared" in o.advantage.reads
            stats = over(self.actor.stats, state.params, entropy=True, sum_pi_squared=asked)
            views = TokenViews(stats.logprob, stats.entropy, stats.sum_pi_squared)
        if reference is not None:
            views = views._replace(reference_logprobs=over(self.actor.stats, reference).logprob)
        if self.critic:
            assert state.critic is not None
            views = views._replace(values=over(self.critic.values, state.critic.params))
        if self.reward_model:
            assert state.reward_model is not None
            assert views.reference_logprobs is not None
            logprobs = over(self.reward_model.logprobs, state.reward_model.params)
            rewards = self.reward_model.rewards(logprobs, views.reference_logprobs, batch.action_mask)
            views = views._replace(process_rewards=rewards)
        return views

    def _gradients(self, state: ModelState, reference: Any, batch: TrainBatch, index: jax.Array) -> tuple[Any, Metrics]:
        return self.actor.gradients(state, reference, batch, index, self._key(state.step, _LOSS))

    def _update(
        self, state: ModelState, reference: Any, batch: TrainBatch, index: jax.Array
    ) -> tuple[ModelState, Metrics]:
        return self.actor.apply(state, *self._gradients(state, reference, batch, index))


def _update_beside(model: Critic | RewardModel) -> Callable[..., tuple[ModelState, Metrics]]:
    def step(state: ModelState, batch: TrainBatch, index: jax.Array) -> tuple[ModelState, Metrics]:
        return model.apply(state, *model.gradients(state, batch, index))

    return step
