"""The critic of PPO: a decoder with a value head that learns what reward is still to come."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import value_losses
from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.learner.trainable import Metrics, Parts, Trainable
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.models.logprobs import shift_to_tokens
from jaxrl_llm.sharding.rules import AnyMesh
from jaxrl_llm.types import ModelState, TrainBatch


@dataclass(frozen=True)
class ValueObjective:
    """What the critic learns: sum over tokens of weight * clipped value loss."""

    aggregation: str
    length_norm: float
    value_clip: float
    warmup_steps: int  # training steps in which the critic learns and the policy does not
    epochs: int


class _Micro(NamedTuple):
    token_ids: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    sequence_ids: jax.Array
    mask: jax.Array
    values: jax.Array
    returns: jax.Array
    weights: jax.Array


class Critic(Trainable):
    """The value model on the mesh; `model` is built with a value head."""

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        optimizer: optax.GradientTransformation,
        learning_rate: optax.Schedule,
        objective: ValueObjective,
    ):
        super().__init__("critic", model, mesh, optimizer, learning_rate)
        self.objective = objective

    def values(self, params: Any, tokens: Any) -> jax.Array:
        """float32 [B, T]: of the state in which each token was chosen; 0 for the first token of a segment. The sampling
        temperature has no part in it."""
        module = self.model.bind(params)
        hidden = module.hidden(tokens.token_ids, tokens.positions, tokens.segment_ids)
        return shift_to_tokens(module.values(hidden), tokens.segment_ids)

    def gradients(self, state: ModelState, batch: TrainBatch, index: jax.Array) -> tuple[Any, Metrics]:
        """Gradients and metrics of one mini-batch."""
        o, s = self.objective, batch.sequences
        assert batch.values is not None
        assert batch.returns is not None
        S = s.group_ids.shape[0]
        weights = token_weights(
            o.aggregation,
            batch.mask[index],
            s.sequence_ids[index],
            S,
            length_norm=o.length_norm,
            batch_sequences=S // s.token_ids.shape[0],
            sequence_weights=batch.sequence_weights,
        )
        mini = _Micro(
            s.token_ids[index],
            s.segment_ids[index],
            s.positions[index],
            s.sequence_ids[index],
            batch.mask[index],
            batch.values[index],
            batch.returns[index],
            weights,
        )
        loss = partial(self._micro_loss, num_sequences=S)
        return self.accumulate(loss, state.params, mini, s.num_micro[index])

    def _micro_loss(self, params: Any, micro: _Micro, *, num_sequences: int) -> tuple[jax.Array, Parts]:
        values = self.values(params, micro)
        clipped = value_losses.clipped(
            values,
            micro.values,
            micro.returns,
            micro.mask,
            sequence_ids=micro.sequence_ids,
            num_sequences=num_sequences,
            value_clip=self.objective.value_clip,
        )
        loss = jnp.sum(micro.weights * clipped.token_loss)
        return loss, {**clipped.metrics, "critic/vf_loss": (loss, None), "critic/loss": (loss, None)}
