"""Policy, critic and reward model on one mesh. The only file that jits a training step.

A step is `prepare` (old and reference log-probabilities, values, advantages) and `update` (epochs x mini-batches; each
one compiled call that walks over its micro-batches and then applies the optimizer).

Shapes: A mini-batches, M micro-batches, B rows, T tokens, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.algorithms.kl import EXACT
from jaxrl_llm.learner.actor import Actor, Objective
from jaxrl_llm.learner.critic import Critic
from jaxrl_llm.learner.experience import TokenViews, complete, demonstrations
from jaxrl_llm.learner.reward_model import RewardModel
from jaxrl_llm.learner.trainable import Metrics, add, over_mini_batches, single
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.sharding.rules import TRAINING, named_sharding, replicated
from jaxrl_llm.types import ModelState, SequenceBatch, TrainBatch, TrainState

# What a random key is for, within one step.
_REWEIGHTING, _LOSS = range(2)


class _Tokens(NamedTuple):
    """What a forward pass reads: int32 [A, M, B, T]."""

    token_ids: jax.Array
    positions: jax.Array
    segment_ids: jax.Array


class Learner:
    """The models that learn, and the reference, on a training mesh."""

    def __init__(
        self,
        mesh: Mesh,
        objective: Objective,
        actor: Actor,
        params: Any,
        *,
        epochs: int,
        critic: tuple[Critic, Any] | None = None,
        reward_model: RewardModel | None = None,
    ):
        """`params`, of the policy, and those that come with the critic: float32, in the TRAINING layout. The policy's
        are kept as the reference if the objective has a KL term, and are the reward model's first ones."""
        self._mesh, self._objective, self._epochs = mesh, objective, epochs
        self._actor, self._critic, self._reward_model = actor, critic and critic[0], reward_model
        has_reference = bool(objective.kl_coef or objective.reward_kl or reward_model)
        self.reference = jax.tree.map(jnp.copy, params) if has_reference else None
        self.initial_checksum = int(checksum(params))
        everywhere, kl = replicated(mesh), objective.reward_kl
        self.shardings = TrainState(
            *actor.shardings,
            critic=self._critic and self._critic.shardings,
            reward_model=reward_model and reward_model.shardings,
            kl_coef=everywhere if kl else None,  # type: ignore[arg-type]
        )
        self.state = TrainState(
            *actor.create(params),
            critic=critic and critic[0].create(critic[1]),
            reward_model=reward_model and reward_model.create(jax.tree.map(jnp.copy, params)),
            kl_coef=jax.device_put(jnp.float32(kl.coefficient), everywhere) if kl else None,
        )
        self._abstract = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), self.state, self.shardings
        )
        self._prepare = jax.jit(self._prepare_step)
        self._update = jax.jit(self._update_step, donate_argnums=(0,), out_shardings=(actor.shardings, None))
        self._updates = {  # of the models beside the policy
            model.name: jax.jit(_update_step(model), donate_argnums=(0,), out_shardings=(model.shardings, None))
            for model in (self._critic, reward_model)
            if model
        }

    def restore(self, load: Callable[[TrainState], TrainState]) -> None:
        """Replaces the state by what `load` returns for its shapes, dtypes and shardings. The old one goes first: there
        may be no room for both."""
        vars(self).pop("state", None)  # it is not there if a first `load` has failed
        self.state = load(self._abstract)

    def place(self, batch: SequenceBatch) -> SequenceBatch:
        """Puts a host batch on the mesh: rows over the data axes, per-sequence arrays everywhere."""
        everywhere = replicated(self._mesh)

        def put(name: str, x: Any) -> jax.Array | None:
            if x is None:
                return None
            if x.ndim < 4:
                return jax.device_put(x, everywhere)
            dims = ("accumulation", "accumulation", "batch", "length")
            return jax.device_put(x, named_sharding(f"batch.{name}", x.shape, dims, TRAINING, self._mesh))

        return SequenceBatch(**{name: put(name, x) for name, x in batch._asdict().items()})  # type: ignore[arg-type]

    def prepare(self, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        """Log-probabilities of the old and the reference policy, values, and advantages. Moves the coefficient of the
        KL in the reward, where it is adaptive."""
        train_batch, kl_coef, metrics = self._prepare(self.state, self.reference, batch)
        self.state = self.state._replace(kl_coef=kl_coef)
        return train_batch, metrics

    def update(self, batch: TrainBatch) -> Metrics:
        """All epochs over all mini-batches, of each model; metrics are added up over them. The policy waits while the
        critic warms up. An update whose loss or gradient is not finite is not made: parameters, moments and schedule
        stay; `actor/skipped_updates` (and critic/, reward_model/) counts it."""
        minis = range(batch.advantages.shape[0])
        total: Metrics = {}
        warming = False
        if self._critic:
            o = self._critic.objective
            assert self.state.critic is not None
            warming = int(self.state.critic.step) < o.warmup_steps * o.epochs * len(minis)
            for index in [*minis] * o.epochs:
                total = self._update_beside("critic", batch, index, total)
        if self._reward_model:
            for index in minis:
                total = self._update_beside("reward_model", batch, index, total)
        for index in [*minis] * (0 if warming else self._epochs):
            actor, metrics = self._update(self.state.actor, self._for_loss(), batch, index)
            self.state = self.state.with_actor(actor)
            total = add(total, metrics)
        skipped = {name: single(value) for name, (value, _) in total.items() if name.endswith("/skipped_updates")}
        return {"actor/skipped_updates": single(0.0), **total, **skipped}  # their number

    def gradients(self, batch: TrainBatch, index: int = 0) -> tuple[Any, Metrics]:
        """The policy's gradients of one mini-batch, summed over its micro-batches, as the optimizer gets them."""
        return jax.jit(self._actor.gradients)(
            self.state.actor, self._for_loss(), batch, index, self._key(self.state.step, _LOSS)
        )

    def _for_loss(self) -> Any:
        """The reference's parameters if the policy's loss reads them."""
        return self.reference if self._objective.kl_coef and self._objective.kl_estimator == EXACT else None

    def _update_beside(self, name: str, batch: TrainBatch, index: int, total: Metrics) -> Metrics:
        state, metrics = self._updates[name](getattr(self.state, name), batch, index)
        self.state = self.state._replace(**{name: state})
        return add(total, metrics)

    # ---- compiled -----------------------------------------------------------------------------------------------

    def _key(self, step: jax.Array, purpose: int) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(self._objective.seed), step), purpose)

    def _prepare_step(
        self, state: TrainState, reference: Any, batch: SequenceBatch
    ) -> tuple[TrainBatch, jax.Array | None, Metrics]:
        o = self._objective
        if o.advantage is None:
            return demonstrations(batch), state.kl_coef, {}
        return complete(
            o, batch, self._views(state, reference, batch), state.kl_coef, self._key(state.step, _REWEIGHTING)
        )

    def _views(self, state: TrainState, reference: Any, batch: SequenceBatch) -> TokenViews:
        """What each model says of the batch."""
        o = self._objective
        assert o.advantage is not None
        tokens = _Tokens(batch.token_ids, batch.positions, batch.segment_ids)

        def over(function: Callable[..., Any], params: Any, **asked: bool) -> Any:
            return over_mini_batches(lambda micro: function(params, micro, **asked), tokens, batch.num_micro)

        views = TokenViews(batch.sampler_logprobs)
        if not o.bypass:
            asked = "sum_pi_squared" in o.advantage.reads
            stats = over(self._actor.stats, state.params, entropy=True, sum_pi_squared=asked)
            views = TokenViews(stats.logprob, stats.entropy, stats.sum_pi_squared)
        if reference is not None:
            views = views._replace(reference_logprobs=over(self._actor.stats, reference).logprob)
        if self._critic:
            assert state.critic is not None
            views = views._replace(values=over(self._critic.values, state.critic.params))
        if self._reward_model:
            assert state.reward_model is not None
            assert views.reference_logprobs is not None
            logprobs = over(self._reward_model.logprobs, state.reward_model.params)
            rewards = self._reward_model.rewards(logprobs, views.reference_logprobs, batch.action_mask)
            views = views._replace(process_rewards=rewards)
        return views

    def _update_step(
        self, state: ModelState, reference: Any, batch: TrainBatch, index: jax.Array
    ) -> tuple[ModelState, Metrics]:
        grads, metrics = self._actor.gradients(state, reference, batch, index, self._key(state.step, _LOSS))
        return self._actor.apply(state, grads, metrics)


def _update_step(model: Critic | RewardModel) -> Callable[..., tuple[ModelState, Metrics]]:
    def step(state: ModelState, batch: TrainBatch, index: jax.Array) -> tuple[ModelState, Metrics]:
        grads, metrics = model.gradients(state, batch, index)
        return model.apply(state, grads, metrics)

    return step
