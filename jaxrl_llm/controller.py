"""The training loop. It knows the order of things, and no mathematics, device, engine or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.metrics import Compilations, Timer, Writer, finish, reward_metrics, rollout_metrics
from jaxrl_llm.pools import Pool
from jaxrl_llm.types import Prompt, Rollout, Scored


@dataclass
class Run:
    """The parts of one training run. What differs between tasks and placements differs in these, not in the loop."""

    stream: PromptStream
    rollouts: Callable[[Sequence[Prompt]], list[Rollout]]  # the engine's, or the data's own (SFT)
    score: Callable[[Sequence[Rollout]], list[Scored]]
    sync: Callable[[int], None]  # gives the engine the weights of this version
    evaluate: Callable[[int], dict[str, float]] | None
    pool: Pool
    pack_spec: PackSpec
    checkpoints: Checkpoints
    writer: Writer
    total_steps: int
    start_step: int  # steps already done
    eval_before: bool
    eval_every: int  # steps; 0: never
    save_every: int  # steps; 0: at the end only
    samples_every: int  # steps; 0: never
    samples: int
    devices: int  # of the learner
    saved_config: Mapping[str, Any]


def train(run: Run) -> dict[str, float]:
    """Trains from `start_step` to `total_steps`; returns the last evaluation."""
    compilations = Compilations()
    evaluation: dict[str, float] = {}
    run.sync(run.start_step)
    if run.evaluate and run.eval_before and run.start_step == 0:
        evaluation = run.evaluate(0)
        run.writer.write(0, evaluation)
        run.writer.evaluation(0, evaluation)
    for step in range(run.start_step + 1, run.total_steps + 1):
        timer = Timer()
        prompts = run.stream.next()
        with timer.stage("gen"):
            rollouts = run.rollouts(prompts)
        with timer.stage("reward"):
            scored = run.score(rollouts)
        with timer.stage("pack"):
            batch = pack(scored, run.pack_spec)
        with timer.stage("old_log_prob"):
            train_batch, device_metrics = run.pool.prepare(batch)
            metrics = finish(device_metrics)
        with timer.stage("update_actor"):
            metrics |= finish(run.pool.update(train_batch))
        with timer.stage("update_weights"):
            run.sync(step)
        metrics |= rollout_metrics(rollouts) | reward_metrics(scored)
        timer.seconds["timing_s/step"] = timer.total()
        metrics |= timer.seconds
        metrics |= {
            "training/global_step": step,
            "training/epoch": run.stream.epoch,
            "perf/throughput": metrics["perf/total_num_tokens"] / metrics["timing_s/step"] / run.devices,
            "perf/compilations": compilations.count,
        }
        run.writer.progress(step, metrics)
        if _due(step, run.samples_every):
            run.writer.samples(step, _shown(scored, run.samples))
        last = step == run.total_steps
        evaluation = {}
        if run.evaluate and (_due(step, run.eval_every) or (last and run.eval_every)):
            evaluation = run.evaluate(step)
            run.writer.evaluation(step, evaluation)
        run.writer.write(step, metrics | evaluation)
        if last or _due(step, run.save_every):
            rest = {"step": step, "stream": run.stream.get_state(), "config": dict(run.saved_config)}
            run.checkpoints.save(step, run.pool.state(), rest, evaluation)
    return evaluation


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _shown(scored: Sequence[Scored], count: int) -> list[tuple[str, str, float | None, Any]]:
    """Samples of different prompts, from the front of the batch."""
    first = {s.rollout.prompt.uid: s for s in reversed(scored)}
    chosen = list(reversed(first.values()))[:count]
    return [(s.rollout.prompt.text, s.rollout.text, s.reward, s.rollout.prompt.ground_truth) for s in chosen]
