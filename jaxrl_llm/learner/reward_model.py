"""The online reward model of PRIME: it begins as the policy, learns from outcomes, and rewards every token."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import implicit_reward, segments
from jaxrl_llm.learner.trainable import Metrics, Parts, Trainable
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.sharding.rules import AnyMesh
from jaxrl_llm.types import ModelState, TrainBatch


class _Micro(NamedTuple):
    token_ids: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    sequence_ids: jax.Array
    mask: jax.Array
    reference_logprobs: jax.Array


class RewardModel(Trainable):
    """The reward model on the mesh. Its reference is the initial policy."""

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        optimizer: optax.GradientTransformation,
        learning_rate: optax.Schedule,
        *,
        beta: float,
        temperature: float,
        logits_chunk: int,
    ):
        super().__init__("reward_model", model, mesh, optimizer, learning_rate)
        self._beta, self._temperature, self._chunk = beta, temperature, logits_chunk

    def logprobs(self, params: Any, tokens: Any) -> jax.Array:
        """float32 [B, T], at the sampling temperature, as those of the reference."""
        module = self.model.bind(params)
        return token_logprobs(
            module.hidden(tokens.token_ids, tokens.positions, tokens.segment_ids),
            module.head_matrix(),
            tokens.token_ids,
            tokens.segment_ids,
            vocab_size=self.model.config.vocab_size,
            temperature=self._temperature,
            chunk=self._chunk,
            layout=module.layout,
        ).logprob

    def rewards(self, logprobs: jax.Array, reference_logprobs: jax.Array, mask: jax.Array) -> jax.Array:
        """float32 [...]: the process reward of each token."""
        return implicit_reward.process_rewards(logprobs, reference_logprobs, mask, beta=self._beta)

    def gradients(self, state: ModelState, batch: TrainBatch, index: jax.Array) -> tuple[Any, Metrics]:
        """Gradients and metrics of one mini-batch: the mean cross-entropy over its sequences."""
        s = batch.sequences
        assert batch.reference_logprobs is not None
        S = s.group_ids.shape[0]
        mask = s.action_mask[index]
        count = (segments.sequence_lengths(mask, s.sequence_ids[index], S) > 0).sum()
        mini = _Micro(
            s.token_ids[index],
            s.segment_ids[index],
            s.positions[index],
            s.sequence_ids[index],
            mask,
            batch.reference_logprobs[index],
        )
        loss = partial(self._micro_loss, outcomes_S=s.rewards, count=jnp.maximum(count, 1).astype(jnp.float32))
        return self.accumulate(loss, state.params, mini, s.num_micro[index])

    def _micro_loss(
        self, params: Any, micro: _Micro, *, outcomes_S: jax.Array, count: jax.Array
    ) -> tuple[jax.Array, Parts]:
        rewards = self.rewards(self.logprobs(params, micro), micro.reference_logprobs, micro.mask)
        S = outcomes_S.shape[0]
        loss_S, right_S, present_S = implicit_reward.cross_entropy(
            rewards, outcomes_S, micro.mask, micro.sequence_ids, S
        )
        loss = loss_S.sum() / count
        right = right_S.sum().astype(jnp.float32), present_S.sum().astype(jnp.float32)
        return loss, {"reward_model/loss": (loss, None), "reward_model/accuracy": right}
