"""From prompts to a scored batch: generate, score, and do what an algorithm asks of the samples before it learns.

    generate, score            until the batch has enough groups that tell something (dynamic sampling)
    penalise long responses    once it is known which groups stay: the penalty must not make a group look informative
    greedy answers             where the algorithm compares with them (ReMax)

Dynamic sampling is DAPO's (arXiv:2503.14476, section 3.2); a range of the mean, PRIME's (arXiv:2502.01456).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.metrics import Timer
from jaxrl_llm.plugins import nearest
from jaxrl_llm.types import Prompt, Rollout, Scored, UserError


@dataclass(frozen=True)
class GroupFilter:
    """Which groups tell something. A group without a scored sample never does."""

    by: str  # "reward", or a component's name
    mean_range: tuple[float, ...]  # (lowest, highest) mean of it that is kept; (): any
    entropy_range: tuple[float, ...]  # the same of the sampling entropy in nats a token, estimated by -mean(log-prob)
    max_batches: int  # generated at most, for one step
    fill: bool = True  # groups that tell nothing fill a batch that lacks others then; False: the run ends

    def informative(self, group: Sequence[Scored]) -> bool:
        """Whether the samples of a prompt differ, and lie in the ranges. Length penalties are not in it yet."""
        scored = [s for s in group if s.reward is not None]
        values = np.array([s.reward if self.by == "reward" else self._component(s) for s in scored], np.float64)
        if not len(values) or values.min() == values.max():
            return False
        return _inside(values.mean(), self.mean_range) and _inside(_entropy(scored), self.entropy_range)

    def _component(self, s: Scored) -> float:
        if self.by in s.components:
            return s.components[self.by]
        raise UserError(
            f'config.filter.by={self.by!r} is not "reward", nor a component that the reward functions returned'
            f"{nearest(self.by, s.components)}: {', '.join(sorted(s.components))}"
        )


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's soft punishment of long responses (arXiv:2503.14476, equation 13), as the reward component "overlong":
    0 up to limit - buffer tokens, then falling evenly to -factor at the limit, and never below."""

    limit: int  # tokens: the longest response
    buffer: int  # tokens
    factor: float
    weight: float = 1.0  # of the component in the reward
    NAME: ClassVar[str] = "overlong"

    def __call__(self, s: Scored) -> Scored:
        """The sample with the penalty in its components and its reward; one without a reward as it is."""
        if s.reward is None:
            return s
        if self.NAME in s.components:
            raise UserError(
                "the reward functions returned the component 'overlong', which is the length penalty's name: rename "
                "it, or set config.reward.overlong_buffer=0"
            )
        excess = s.rollout.response_length - (self.limit - self.buffer)
        penalty = -self.factor * min(max(excess / self.buffer, 0.0), 1.0)
        return replace(s, components={**s.components, self.NAME: penalty}, reward=s.reward + self.weight * penalty)


class Collected(NamedTuple):
    """What one step learns from."""

    scored: list[Scored]  # the batch: the samples of each prompt together
    generated: list[Scored]  # all that was generated for it, before penalties
    metrics: dict[str, float]


class Collector:
    """Makes the scored batch of a step out of the stream."""

    def __init__(
        self,
        stream: PromptStream,
        generate: Callable[[Sequence[Prompt]], list[Rollout]],
        score: Callable[[Sequence[Rollout]], list[Scored]],
        *,
        groups: int,
        group_filter: GroupFilter | None = None,
        penalty: LengthPenalty | None = None,
        greedy: Callable[[Sequence[Prompt]], list[Rollout]] | None = None,
    ):
        """`groups`: prompts in a batch. `generate` gives the rollouts of a prompt together; `greedy` one for each."""
        self.stream, self._generate, self._score = stream, generate, score
        self._groups, self._filter, self._penalty, self._greedy = groups, group_filter, penalty, greedy

    def __call__(self, timer: Timer) -> Collected:
        """The next batch."""
        kept: list[list[Scored]] = []
        others: list[list[Scored]] = []
        generated: list[Scored] = []
        batches = 0
        while len(kept) < self._groups and batches < (self._filter.max_batches if self._filter else 1):
            new = self._generated(self.stream.next(), timer)
            batches += 1
            generated += new
            for group in _by_prompt(new):
                tells = self._filter is None or self._filter.informative(group)
                (kept if tells else others).append(group)
        metrics: dict[str, float] = {}
        if self._filter:
            metrics = {
                "train/num_gen_batches": batches,
                "train/informative_groups": len(kept) / (len(kept) + len(others)),
                "train/uninformative_groups_used": max(self._groups - len(kept), 0) / self._groups,
            }
            if len(kept) < self._groups and not self._filter.fill:
                raise UserError(
                    f"{len(kept)} of the {len(kept) + len(others)} prompts generated for this step tell something, and "
                    f"a batch needs {self._groups}: raise config.filter.max_batches={self._filter.max_batches}, widen "
                    "the filter's ranges, choose data of another difficulty, or set config.filter.at_bound='fill'"
                )
        # The batch has a fixed size: where the bound was reached, groups that tell nothing fill it.
        scored = [s for group in (kept + others)[: self._groups] for s in group]
        if self._penalty:
            scored = [self._penalty(s) for s in scored]
        if self._greedy:
            scored = self._with_baselines(scored, timer)
        return Collected(scored, generated, metrics)

    def _generated(self, prompts: Sequence[Prompt], timer: Timer) -> list[Scored]:
        with timer.stage("gen"):
            rollouts = self._generate(prompts)
        with timer.stage("reward"):
            return self._score(rollouts)

    def _with_baselines(self, scored: list[Scored], timer: Timer) -> list[Scored]:
        """The samples with the reward of the greedy answer to their prompt; where that has none, they have none."""
        assert self._greedy is not None
        prompts = list({s.rollout.prompt.uid: s.rollout.prompt for s in scored}.values())
        with timer.stage("gen"):
            rollouts = self._greedy(prompts)
        with timer.stage("reward"):
            answers = self._score(rollouts)
        if self._penalty:
            answers = [self._penalty(answer) for answer in answers]
        greedy = {answer.rollout.prompt.uid: answer for answer in answers}

        def with_baseline(s: Scored) -> Scored:
            answer = greedy[s.rollout.prompt.uid]
            if answer.reward is not None:
                return replace(s, baseline=answer.reward)
            return replace(s, reward=None, error=s.error or f"no reward for the greedy answer: {answer.error}")

        return [with_baseline(s) for s in scored]


def _by_prompt(scored: Sequence[Scored]) -> list[list[Scored]]:
    groups: dict[int, list[Scored]] = {}
    for s in scored:
        groups.setdefault(s.rollout.prompt.uid, []).append(s)
    return list(groups.values())


def _inside(value: float, limits: tuple[float, ...]) -> bool:
    return not limits or limits[0] <= value <= limits[1]


def _entropy(scored: Sequence[Scored]) -> float:
    """The mean of -log p over all sampled tokens: an unbiased estimate of the entropy that each was drawn with."""
    logprobs = np.concatenate([s.rollout.logprobs[s.rollout.action_mask] for s in scored])
    return float(-logprobs.mean()) if len(logprobs) else 0.0
