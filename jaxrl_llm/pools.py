"""Where things run. A pool holds the learner, the engine and the reward workers and hides how they are reached."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.trainable import Metrics
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Engine, Sampling
from jaxrl_llm.sharding.reshard import Reshard
from jaxrl_llm.types import Prompt, Rollout, Scored, SequenceBatch, TrainBatch, TrainState


class Pool(Protocol):
    """What the controller asks of a placement."""

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """n rollouts a prompt, those of a prompt together."""
        ...

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """One result a rollout, in order."""
        ...

    def prepare(self, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        """Puts the batch on the learner's devices and completes it."""
        ...

    def update(self, batch: TrainBatch) -> Metrics:
        """Optimizer updates with one batch."""
        ...

    def sync_weights(self, version: int) -> None:
        """Gives the engine the policy's current weights."""
        ...

    def state(self) -> TrainState:
        """What a checkpoint holds."""
        ...

    def restore(self, load: Callable[[TrainState], TrainState]) -> None:
        """Continues from the state that `load` returns for the abstract one (shapes, dtypes, shardings)."""
        ...

    def initial_checksum(self) -> int:
        """Of the parameters that the learner was made with, which are those of the reference model."""
        ...

    def close(self) -> None:
        """Ends all processes and frees all devices."""
        ...


class LocalPool:
    """Everything in this process and on its devices, reward workers apart."""

    def __init__(self, learner: Learner, engine: Engine, reshard: Reshard, rewards: RewardPool):
        self._learner, self._engine, self._reshard, self._rewards = learner, engine, reshard, rewards

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
        """See `Pool`."""
        return self._engine.generate(sampling.requests(prompts), sampling)

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """See `Pool`."""
        return self._rewards.score(rollouts)

    def prepare(self, batch: SequenceBatch) -> tuple[TrainBatch, Metrics]:
        """See `Pool`. The engine makes room: the next batch is generated with newer weights."""
        self._engine.close()
        return self._learner.prepare(self._learner.place(batch))

    def update(self, batch: TrainBatch) -> Metrics:
        """See `Pool`."""
        return self._learner.update(batch)

    def sync_weights(self, version: int) -> None:
        """See `Pool`. The engine's old weights go first: the devices are the learner's too and need not hold both."""
        self._engine.close()
        params, checksum = self._reshard(self._learner.state.params)
        self._engine.load(params, version, checksum)

    def state(self) -> TrainState:
        """See `Pool`."""
        return self._learner.state

    def restore(self, load: Callable[[TrainState], TrainState]) -> None:
        """See `Pool`."""
        self._learner.restore(load)

    def initial_checksum(self) -> int:
        """See `Pool`."""
        return self._learner.initial_checksum

    def close(self) -> None:
        """See `Pool`."""
        self._rewards.close()
        self._engine.close()
