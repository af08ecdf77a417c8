"""The policy: its log-probabilities and its loss.

    loss = sum over tokens of weight * (policy loss + kl_coef * KL - entropy_coef * entropy)

A loss that looks at single tokens or sequences is computed micro-batch by micro-batch. One that compares all tokens of
the mini-batch (see `Objective.whole_batch`) is computed from a forward pass over all of it, together with its
derivative by each log-probability, which the micro-batches' backward passes then carry on to the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.correction import correct
from jaxrl_llm.algorithms.kl import EXACT, kl_penalty
from jaxrl_llm.algorithms.policy_losses import WITHOUT_RATIO
from jaxrl_llm.formulas import BoundAdvantage, BoundLoss
from jaxrl_llm.learner.trainable import Metrics, Parts, Trainable, over_micro_batches, single
from jaxrl_llm.models.decoder import Decoder, Model
from jaxrl_llm.models.logprobs import TokenStats, exact_kl, token_logprobs
from jaxrl_llm.sharding.rules import AnyMesh
from jaxrl_llm.types import ModelState, SequenceBatch, TrainBatch


@dataclass(frozen=True)
class RewardKL:
    """The KL to the reference in the reward: -coefficient * KL at every token. `target` 0: the coefficient is fixed."""

    coefficient: float
    estimator: str
    target: float = 0.0
    horizon: int = 10_000  # sequences


@dataclass(frozen=True)
class Objective:
    """What the policy learns."""

    loss: BoundLoss
    advantage: BoundAdvantage | None  # None: advantages of 1, no old policy (SFT)
    aggregation: str
    length_norm: float
    temperature: float
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    reward_kl: RewardKL | None = None
    correction: Mapping[str, Any] | None = None  # keywords of `correct`; None: none
    bypass: bool = False  # the sampler's log-probabilities are the old ones
    reweight: tuple[str, float] | None = None  # method and power of PF-PPO
    seed: int = 0

    @property
    def whole_batch(self) -> bool:
        """Whether the policy's loss needs all tokens of a mini-batch at once."""
        return self.loss.whole_batch or (self.bypass and self.correction is not None)


class _Micro(NamedTuple):
    """One micro-batch with all that the loss needs: arrays [B, T]."""

    token_ids: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    sequence_ids: jax.Array
    mask: jax.Array
    old_logprobs: jax.Array
    reference_logprobs: jax.Array | None
    advantages: jax.Array
    is_weights: jax.Array | None
    weights: jax.Array
    slopes: jax.Array | None = None  # derivative of the policy's loss by each log-probability, if that is known already


class Actor(Trainable):
    """The policy on the mesh."""

    def __init__(
        self,
        model: Model,
        mesh: AnyMesh,
        optimizer: optax.GradientTransformation,
        learning_rate: optax.Schedule,
        objective: Objective,
        *,
        logits_chunk: int,
    ):
        super().__init__("actor", model, mesh, optimizer, learning_rate)
        self._objective, self._chunk = objective, logits_chunk

    def stats(self, params: Any, tokens: Any, *, entropy: bool = False, sum_pi_squared: bool = False) -> TokenStats:
        """[B, T] log-probabilities at the sampling temperature, and what else is asked for, of `tokens`, which has
        token_ids, positions and segment_ids."""
        module = self.model.bind(params)
        hidden = module.hidden(tokens.token_ids, tokens.positions, tokens.segment_ids)
        return self._stats(module, hidden, tokens, entropy=entropy, sum_pi_squared=sum_pi_squared)

    def _stats(
        self, module: Decoder, hidden: jax.Array, tokens: Any, *, entropy: bool, sum_pi_squared: bool = False
    ) -> TokenStats:
        return token_logprobs(
            hidden,
            module.head_matrix(),
            tokens.token_ids,
            tokens.segment_ids,
            vocab_size=self.model.config.vocab_size,
            temperature=self._objective.temperature,
            chunk=self._chunk,
            layout=module.layout,
            entropy=entropy,
            sum_pi_squared=sum_pi_squared,
        )

    def gradients(
        self, state: ModelState, reference: Any, batch: TrainBatch, index: jax.Array, key: jax.Array
    ) -> tuple[Any, Metrics]:
        """Gradients and metrics of one mini-batch. `reference`: parameters, read for the exact KL only."""
        o, s = self._objective, batch.sequences
        S = s.group_ids.shape[0]
        mini = _Micro(
            s.token_ids[index],
            s.segment_ids[index],
            s.positions[index],
            s.sequence_ids[index],
            batch.mask[index],
            batch.old_logprobs[index],
            None if batch.reference_logprobs is None else batch.reference_logprobs[index],
            batch.advantages[index],
            None if batch.is_weights is None else batch.is_weights[index],
            self._weights(batch.mask[index], s, index, batch.sequence_weights),
        )
        loss = partial(self._micro_loss, reference=reference, num_sequences=S)
        if not o.whole_batch:
            return self.accumulate(loss, state.params, mini, s.num_micro[index])
        mini, known = self._whole_batch(state.params, mini, batch, index, key)
        grads, metrics = self.accumulate(loss, state.params, mini, s.num_micro[index])
        # What the slopes gave has the gradient of the policy's loss, not its value.
        value = metrics["actor/loss"][0] - metrics["actor/pg_loss"][0] + known["actor/pg_loss"][0]
        return grads, {**metrics, **known, "actor/loss": single(value)}

    def _weights(
        self, mask: jax.Array, s: SequenceBatch, index: jax.Array, sequence_weights: jax.Array | None
    ) -> jax.Array:
        o, S = self._objective, s.group_ids.shape[0]
        return token_weights(
            o.loss.aggregation or o.aggregation,
            mask,
            s.sequence_ids[index],
            S,
            length_norm=o.length_norm,
            batch_sequences=S // s.token_ids.shape[0],
            sequence_weights=sequence_weights,
        )

    def _whole_batch(
        self, params: Any, mini: _Micro, batch: TrainBatch, index: jax.Array, key: jax.Array
    ) -> tuple[_Micro, Metrics]:
        """The mini-batch with the slopes of the policy's loss, and with what a correction against the policy as it is
        now, in bypass mode, makes of mask and weights."""
        o, s = self._objective, batch.sequences
        S = s.group_ids.shape[0]
        logprobs = over_micro_batches(lambda micro: self.stats(params, micro).logprob, mini, s.num_micro[index])
        corrected: Metrics = {}
        if o.bypass and o.correction is not None:
            correction = correct(
                logprobs, mini.old_logprobs, mini.mask, sequence_ids=mini.sequence_ids, num_sequences=S, **o.correction
            )
            mini = mini._replace(
                mask=correction.mask,
                is_weights=correction.weights if o.loss.name in WITHOUT_RATIO else None,  # a ratio corrects by itself
                weights=self._weights(correction.mask, s, index, batch.sequence_weights),
            )
            corrected = correction.metrics

        def total(logprobs: jax.Array) -> tuple[jax.Array, Metrics]:
            policy = o.loss(
                logprobs,
                mini.old_logprobs,
                mini.advantages,
                mini.mask,
                sequence_ids=mini.sequence_ids,
                num_sequences=S,
                is_weights=mini.is_weights,
                key=key,
            )
            return _weighted(policy.token_loss, mini), policy.metrics

        (loss, metrics), slopes = jax.value_and_grad(total, has_aux=True)(logprobs)
        return mini._replace(slopes=slopes), metrics | corrected | {"actor/pg_loss": single(loss)}

    def _micro_loss(self, params: Any, micro: _Micro, *, reference: Any, num_sequences: int) -> tuple[jax.Array, Parts]:
        """This micro-batch's part of the mini-batch's loss."""
        o, module = self._objective, self.model.bind(params)
        hidden = module.hidden(micro.token_ids, micro.positions, micro.segment_ids)
        stats = self._stats(module, hidden, micro, entropy=bool(o.entropy_coef))
        metrics: Parts = {}
        if micro.slopes is not None:
            loss = jnp.sum(jnp.where(micro.mask, micro.slopes * stats.logprob, 0.0))
            metrics = {"actor/pg_loss": (loss, None)}
        else:
            policy = o.loss(
                stats.logprob,
                micro.old_logprobs,
                micro.advantages,
                micro.mask,
                sequence_ids=micro.sequence_ids,
                num_sequences=num_sequences,
                is_weights=micro.is_weights,
            )
            loss = _weighted(policy.token_loss, micro)
            metrics = {**policy.metrics, "actor/pg_loss": (loss, None)}
        if o.kl_coef:
            if o.kl_estimator == EXACT:
                token_kl = self._exact_kl(module, hidden, micro, reference)
            else:
                assert micro.reference_logprobs is not None
                token_kl = kl_penalty(stats.logprob, micro.reference_logprobs, o.kl_estimator, mask=micro.mask)
            kl = _weighted(token_kl, micro)
            metrics["actor/kl_loss"] = (kl, None)
            loss += o.kl_coef * kl
        if stats.entropy is not None:
            bonus = _weighted(stats.entropy, micro)
            metrics["actor/entropy_loss"] = (bonus, None)
            loss -= o.entropy_coef * bonus
        metrics["actor/loss"] = (loss, None)
        return loss, metrics

    def _exact_kl(self, module: Decoder, hidden: jax.Array, micro: _Micro, reference: Any) -> jax.Array:
        """[B, T]: over the whole vocabulary, where each token was drawn."""
        other = self.model.bind(reference)
        return exact_kl(
            hidden,
            module.head_matrix(),
            other.hidden(micro.token_ids, micro.positions, micro.segment_ids),
            other.head_matrix(),
            micro.segment_ids,
            vocab_size=self.model.config.vocab_size,
            temperature=self._objective.temperature,
            chunk=self._chunk,
            layout=module.layout,
        )


def _weighted(token_values: jax.Array, micro: _Micro) -> jax.Array:
    return jnp.sum(micro.weights * jnp.where(micro.mask, token_values, 0.0))
