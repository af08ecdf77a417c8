"""Measuring a policy on held-out prompts: every prompt once, n samples each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from math import comb

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
    """The metrics of n samples a prompt; see `summarize`."""
    return summarize(score(generate(prompts.records, sampling)), sampling.n)


def summarize(scored: Sequence[Scored], n: int) -> dict[str, float]:
    """Metrics by data source, of samples that were asked for `n` times a prompt (N in the names).

    The main component is "acc", or "reward" where reward functions give others but no "acc"; its metrics are
    `val-core/SOURCE/NAME/...`, those of the others `val-aux/SOURCE/NAME/...`. All are means over prompts:

        mean@N  the mean over the prompt's samples
        best@N  its best sample
        maj@N   main component only, where reward functions give predictions: see `majority`
        pass@k  "acc" only, k = 1, 2, 4, ... and N: see `pass_at`, with c = samples whose acc is 1.0; over the prompts
                that have k samples

    With N = 1 there is mean@1 only. A sample that could not be scored is an answer that was not right: it counts 0, or
    the lowest value of the source's samples where that is below 0. How many there were is `val-aux/SOURCE/failed`.
    """
    by_source: dict[str, dict[int, list[Scored]]] = defaultdict(lambda: defaultdict(list))
    for s in scored:
        by_source[s.rollout.prompt.data_source][s.rollout.prompt.uid].append(s)
    metrics: dict[str, float] = {}
    for source, groups_by_prompt in by_source.items():
        groups = list(groups_by_prompt.values())
        samples = [s for group in groups for s in group]
        names = {name for s in samples for name in s.components}
        main = "acc" if "acc" in names or not names else "reward"
        for name in sorted(names | {main, "reward"}):
            kind = "val-core" if name == main else "val-aux"
            for metric, value in _of_component(groups, name, n, main=name == main):
                metrics[f"{kind}/{source}/{name}/{metric}"] = value
        metrics[f"val-aux/{source}/response_length/mean"] = float(np.mean([s.rollout.response_length for s in samples]))
        metrics[f"val-aux/{source}/failed"] = float(sum(s.reward is None for s in samples))
    return metrics


def _of_component(groups: Sequence[Sequence[Scored]], name: str, n: int, *, main: bool) -> Iterator[tuple[str, float]]:
    given = [[s.reward if name == "reward" else s.components.get(name) for s in group] for group in groups]
    failed = min((v for group in given for v in group if v is not None and v < 0), default=0.0)
    values = [[failed if v is None else v for v in group] for group in given]
    yield f"mean@{n}", float(np.mean([np.mean(v) for v in values]))
    if n == 1:
        return
    yield f"best@{n}", float(np.mean([max(v) for v in values]))
    predictions = [[s.prediction for s in group] for group in groups]
    if main and any(p is not None for group in predictions for p in group):
        yield f"maj@{n}", float(np.mean([majority(p, v) for p, v in zip(predictions, values, strict=True)]))
    if name != "acc":
        return
    for k in powers_to(n):
        passes = [pass_at(k, len(v), v.count(1.0)) for v in values if len(v) >= k]
        if passes:
            yield f"pass@{k}", float(np.mean(passes))


def pass_at(k: int, n: int, c: int) -> float:
    """The probability that at least one of k samples is right, estimated without bias from n >= k samples of which c
    are: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1). Integers until the one division, so the
    result is exact to rounding for any n."""
    ways = comb(n, k)
    return (ways - comb(n - c, k)) / ways


def majority(predictions: Sequence[str | None], values: Sequence[float]) -> float:
    """The value of the first sample with the most frequent prediction; among equals the prediction that came first
    wins. Samples without a prediction do not vote; 0 if none has one."""
    votes = Counter(p for p in predictions if p is not None)
    if not votes:
        return 0.0
    winner = max(votes, key=votes.__getitem__)  # the first of equals: a Counter keeps the order in which they came
    return values[predictions.index(winner)]


def powers_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, then n."""
    return [2**i for i in range((n - 1).bit_length())] + [n]
