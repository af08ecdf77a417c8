"""What flows through one iteration of training, in the order in which it is made.

    Prompt -> Rollout -> Scored -> SequenceBatch -> TrainBatch -> TrainState

Prompt, Rollout and Scored live on the host: ragged numpy and text, one object a sequence. SequenceBatch,
TrainBatch and TrainState are pytrees of device arrays with static shapes. Nothing is ever added to one of
them later by name: a stage that knows more makes the next type.

Shape legend of the whole project: B rows, T tokens, S sequences, P prompts (groups), G samples a prompt,
D model width, N query heads, K key/value heads, H head size, F ffn width, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # reward workers read this file and start faster without jax
    import jax


class UserError(ValueError):
    """A mistake in what the user gave: config, data, model folder, reward function. Commands print its
    text without a traceback; the text says what is wrong, where, what was expected and what to do."""


@dataclass(frozen=True)
class Prompt:
    """One row of a dataset, rendered and tokenized."""

    uid: int  # position in the stream: unique to this instance, also when two rows have the same text
    row: int  # index in the dataset
    token_ids: np.ndarray  # int32 [T], the rendered chat template
    text: str  # what token_ids spell, special tokens included
    data_source: str  # name of the dataset: chooses metrics' names, given to reward functions
    ground_truth: Any = None  # what the reward function compares with
    extra_info: Mapping[str, Any] = field(default_factory=dict)  # all other columns of the row
    response_ids: np.ndarray | None = None  # int32 [T], demonstrations (SFT) only; ends with an EOS id


@dataclass(frozen=True)
class Rollout:
    """One finished sequence: the prompt, the policy's tokens and, between them, any text from tools.

    All arrays have the length of the whole sequence and speak of the token at their own position:
    `logprobs[t]` is the log-probability of `token_ids[t]` given all before it.
    """

    prompt: Prompt
    sample: int  # 0 .. G-1 within the prompt's group
    token_ids: np.ndarray  # int32 [T]
    action_mask: np.ndarray  # bool [T]: True where the policy chose the token, EOS included
    logprobs: np.ndarray  # float32 [T]: the sampler's, after temperature; 0 where not an action
    versions: np.ndarray  # int32 [T]: version of the weights that chose the token; -1 where not an action
    stop_reason: str  # "eos", "stop_string" or "length"
    text: str  # the response, decoded, without EOS or stop string

    @property
    def response_length(self) -> int:
        """Number of tokens that the policy chose."""
        return int(self.action_mask.sum())


@dataclass(frozen=True)
class Scored:
    """A rollout with its reward. `reward` is the weighted sum of `components`, or None if scoring failed:
    the sample then counts for nothing (not in its group's baseline, not in the loss), and `error` says why."""

    rollout: Rollout
    components: Mapping[str, float]
    reward: float | None
    error: str | None = None
    prediction: str | None = None  # the answer that a reward function extracted, for majority votes
    baseline: float | None = None  # reward of the greedy answer to the same prompt, where the algorithm asks for it


class SequenceBatch(NamedTuple):
    """Sequences packed into rows, cut into mini-batches (A) and micro-batches (M) of B rows of T tokens.

    A row holds one or several sequences one after the other. Per-token arrays are aligned with the token
    itself, as in Rollout. Unused micro-batches at the end of a mini-batch are all padding and never computed.
    """

    token_ids: jax.Array  # int32 [A, M, B, T]
    segment_ids: jax.Array  # int32 [A, M, B, T]: 1, 2, ... within a row; 0 is padding
    positions: jax.Array  # int32 [A, M, B, T]: position within its sequence
    sequence_ids: jax.Array  # int32 [A, M, B, T]: index into the [S] arrays; S at padding
    action_mask: jax.Array  # bool [A, M, B, T]
    sampler_logprobs: jax.Array  # float32 [A, M, B, T]
    num_micro: jax.Array  # int32 [A]: micro-batches in use
    group_ids: jax.Array  # int32 [S]: index of the sequence's prompt
    rewards: jax.Array  # float32 [S]
    valid: jax.Array  # bool [S]: False for sequences without a reward; they are in no row
    baseline_rewards: jax.Array | None = None  # float32 [S]: reward of the greedy answer to the same prompt (ReMax)
    components: jax.Array | None = None  # float32 [S, K]: rewards by component (GDPO)
    component_weights: jax.Array | None = None  # float32 [K]


class TrainBatch(NamedTuple):
    """A SequenceBatch with all that the loss needs, complete when it is made."""

    sequences: SequenceBatch
    old_logprobs: jax.Array  # float32 [A, M, B, T], of the policy before this update, after temperature
    reference_logprobs: jax.Array | None  # float32 [A, M, B, T]; None without a reference
    advantages: jax.Array  # float32 [A, M, B, T]; 0 outside the mask
    mask: jax.Array  # bool [A, M, B, T]: actions that count in the loss: all but those that a correction rejects
    is_weights: jax.Array | None = None  # float32 [A, M, B, T]: importance weights of the rollout correction
    values: jax.Array | None = None  # float32 [A, M, B, T], of the critic before this update
    returns: jax.Array | None = None  # float32 [A, M, B, T]: what the critic should have said
    sequence_weights: jax.Array | None = None  # int32 [S]: how often each sequence counts (PF-PPO)


class ModelState(NamedTuple):
    """What an optimizer changes. Parameters are float32 masters; the model computes in its own dtype."""

    params: Any  # pytree of arrays
    opt_state: Any
    step: jax.Array  # int32 []: optimizer updates made


class TrainState(NamedTuple):
    """All that training changes: the policy, and what an algorithm has beside it."""

    params: Any  # of the policy; these three are its ModelState
    opt_state: Any
    step: jax.Array
    critic: ModelState | None = None  # PPO
    reward_model: ModelState | None = None  # PRIME
    kl_coef: jax.Array | None = None  # float32 []: weight of the KL in the reward

    @property
    def actor(self) -> ModelState:
        """The policy's state."""
        return ModelState(self.params, self.opt_state, self.step)

    def with_actor(self, actor: ModelState) -> TrainState:
        """The state with another policy."""
        return self._replace(**actor._asdict())
