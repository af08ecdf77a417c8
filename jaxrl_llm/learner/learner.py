"""Policy, critic, reward model and reference on one mesh: their arrays, and what a batch does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.programs import Programs
from jaxrl_llm.learner.trainable import Metrics, add, single
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.types import SequenceBatch, TrainBatch, TrainState


class Learner:
    """The models that learn, and the reference, on a training mesh."""

    def __init__(self, programs: Programs, params: Any, *, epochs: int, critic_params: Any = None):
        """`params`, of the policy, and those of the critic: float32, in the TRAINING layout. The policy's are kept as
        the reference if the objective has a KL term, and are the reward model's first ones."""
        self.programs, self._epochs = programs, epochs
        # It is only read, in the dtype that the model computes in.
        self.reference = (
            jax.tree.map(lambda x: jnp.array(x, dtype=programs.actor.model.dtype), params)
            if programs.has_reference
            else None
        )
        self.initial_checksum = int(checksum(params))
        kl, critic, reward_model = programs.objective.reward_kl, programs.critic, programs.reward_model
        self.state = TrainState(
            *programs.actor.create(params),
            critic=critic and critic.create(critic_params),
            reward_model=reward_model and reward_model.create(jax.tree.map(jnp.copy, params)),
            kl_coef=jax.device_put(jnp.float32(kl.coefficient), programs.shardings.kl_coef) if kl else None,
        )

    def restore(self, load: Callable[[TrainState], TrainState]) -> None:
        """Replaces the state by what `load` returns for its shapes, dtypes and shardings. The old one goes first: there
        may be no room for both."""
        vars(self).pop("state", None)  # it is not there if a first `load` has failed
        self.state = load(self.programs.abstract)

    def place(self, batch: SequenceBatch) -> SequenceBatch:
        """Puts a host batch on the mesh."""
        return jax.device_put(batch, self.programs.batch_shardings(batch))

    def prepare(self, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        """Log-probabilities of the old and the reference policy, values, and advantages. Moves the coefficient of the
        KL in the reward, where it is adaptive."""
        train_batch, kl_coef, metrics = self.programs.prepare(self.state, self.reference, batch)
        self.state = self.state._replace(kl_coef=kl_coef)
        return train_batch, metrics

    def update(self, batch: TrainBatch) -> Metrics:
        """All epochs over all mini-batches, of each model; metrics are added up over them. The policy waits while the
        critic warms up. An update whose loss or gradient is not finite is not made: parameters, moments and schedule
        stay; `actor/skipped_updates` (and critic/, reward_model/) counts it."""
        programs, minis = self.programs, range(batch.advantages.shape[0])
        total: Metrics = {}
        warming = False
        if programs.critic:
            o = programs.critic.objective
            assert self.state.critic is not None
            warming = int(self.state.critic.step) < o.warmup_steps * o.epochs * len(minis)
            for index in [*minis] * o.epochs:
                total = self._update_beside("critic", batch, index, total)
        if programs.reward_model:
            for index in minis:
                total = self._update_beside("reward_model", batch, index, total)
        for index in [*minis] * (0 if warming else self._epochs):
            reference = programs.read_by_loss(self.reference)
            actor, metrics = programs.update(self.state.actor, reference, batch, index)
            self.state = self.state.with_actor(actor)
            total = add(total, metrics)
        skipped = {name: single(value) for name, (value, _) in total.items() if name.endswith("/skipped_updates")}
        return {"actor/skipped_updates": single(0.0), **total, **skipped}  # their number

    def gradients(self, batch: TrainBatch, index: int = 0) -> tuple[Any, Metrics]:
        """The policy's gradients of one mini-batch, summed over its micro-batches, as the optimizer gets them."""
        return self.programs.gradients(self.state.actor, self.programs.read_by_loss(self.reference), batch, index)

    def _update_beside(self, name: str, batch: TrainBatch, index: int, total: Metrics) -> Metrics:
        state, metrics = self.programs.update_beside[name](getattr(self.state, name), batch, index)
        self.state = self.state._replace(**{name: state})
        return add(total, metrics)
