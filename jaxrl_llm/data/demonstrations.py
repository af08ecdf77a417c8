"""Supervised fine-tuning as rollouts: what the data say stands where a policy's samples would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_llm.types import Prompt, Rollout, Scored


def rollouts(prompts: Sequence[Prompt]) -> list[Rollout]:
    """One rollout a prompt, with the demonstration's tokens as actions."""
    return [_rollout(prompt) for prompt in prompts]


def ungraded(demonstrations: Sequence[Rollout]) -> list[Scored]:
    """Demonstrations have no reward to learn from; 0 keeps them in the batch."""
    return [Scored(r, {}, 0.0) for r in demonstrations]


def _rollout(prompt: Prompt) -> Rollout:
    if prompt.response_ids is None:
        raise ValueError(f"prompt {prompt.uid} has no demonstration")
    ids = np.concatenate([prompt.token_ids, prompt.response_ids]).astype(np.int32)
    actions = np.arange(len(ids)) >= len(prompt.token_ids)
    return Rollout(
        prompt=prompt,
        sample=0,
        token_ids=ids,
        action_mask=actions,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.where(actions, 0, -1).astype(np.int32),
        stop_reason="eos",
        text="",
    )
