"""Measuring a policy on held-out prompts: every prompt once, n samples each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_llm.data.stream import Prompts
from jaxrl_llm.rollout.engine import Sampling
from jaxrl_llm.types import Prompt, Rollout, Scored


def evaluate(
    prompts: Prompts,
    sampling: Sampling,
    *,
    generate: Callable[[Sequence[Prompt], Sampling], list[Rollout]],
    score: Callable[[Sequence[Rollout]], list[Scored]],
) -> dict[str, float]:
    """Metrics by data source.

    `val-core/SOURCE/acc/mean@N` is the mean over prompts of the mean over their N samples of the component "acc" (of
    "reward", where reward functions give no "acc"); the other components are `val-aux/SOURCE/NAME/mean@N`. A sample
    that could not be scored counts 0 here: it is an answer that was not right. How many there were is
    `val-aux/SOURCE/failed`.
    """
    return summarize(score(generate(prompts.records, sampling)), sampling.n)


def summarize(scored: Sequence[Scored], n: int) -> dict[str, float]:
    """The metrics of `evaluate`."""
    by_source: dict[str, list[Scored]] = defaultdict(list)
    for s in scored:
        by_source[s.rollout.prompt.data_source].append(s)
    metrics: dict[str, float] = {}
    for source, rows in by_source.items():
        names = {name for s in rows for name in s.components}
        main = "acc" if "acc" in names else "reward"
        for name in sorted(names | {"reward"}):
            values = [s.reward if name == "reward" else s.components.get(name) for s in rows]
            kind = "val-core" if name == main else "val-aux"
            metrics[f"{kind}/{source}/{name}/mean@{n}"] = float(np.mean([v or 0.0 for v in values]))
        metrics[f"val-aux/{source}/response_length/mean"] = float(np.mean([s.rollout.response_length for s in rows]))
        metrics[f"val-aux/{source}/failed"] = float(sum(s.reward is None for s in rows))
    return metrics
