"""The training loop. It knows the order of things, and no mathematics, device, engine or process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.collect import Collector
from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.interrupts import Interrupted, Interrupts
from jaxrl_llm.metrics import Compilations, Timer, Writer, finish, reward_metrics, rollout_metrics
from jaxrl_llm.pools import Pool
from jaxrl_llm.types import Scored, UserError


@dataclass
class Run:
    """The parts of one training run. What differs between tasks and placements differs in these, not in the loop."""

    collect: Collector  # prompts, rollouts and rewards
    sync: Callable[[int], None]  # gives the engine the weights of this version
    evaluate: Callable[[int], dict[str, float]] | None
    pool: Pool
    pack_spec: PackSpec
    checkpoints: Checkpoints
    writer: Writer
    interrupts: Interrupts
    total_steps: int
    start_step: int  # steps already done
    initial: int  # checksum of the parameters that the run began with
    skipped_steps: int  # how many of them, at the end, left out an update
    max_skipped_steps: int
    eval_before: bool
    eval_every: int  # steps; 0: never
    save_every: int  # steps; 0: at the end only
    samples_every: int  # steps; 0: never
    samples: int
    devices: int  # of the learner
    saved_config: Mapping[str, Any]


def train(run: Run) -> int:
    """Trains from `start_step` to `total_steps`, or until asked to end; returns the last step done. It is saved,
    also where sampling or scoring fails.

    Raises UserError if `max_skipped_steps` steps in a row had a loss or gradient that was not finite.
    """
    compilations = Compilations()
    done, saved, skipped = run.start_step, run.start_step, run.skipped_steps
    position, whole = run.collect.stream.get_state(), True
    scored: list[Scored] = []
    try:
        run.sync(done)
        if run.evaluate and run.eval_before and done == 0:
            evaluation = run.evaluate(0)
            run.writer.write(0, evaluation)
            run.writer.evaluation(0, evaluation)
        while done < run.total_steps:
            step, timer = done + 1, Timer()
            scored, generated, metrics = run.collect(timer)
            with run.interrupts.uncut():  # up to here nothing has changed; what follows belongs together
                whole = False
                with timer.stage("pack"):
                    batch = pack(scored, run.pack_spec)
                with timer.stage("old_log_prob"):
                    train_batch, device_metrics = run.pool.prepare(batch)
                    metrics |= finish(device_metrics)
                with timer.stage("update_actor"):
                    metrics |= finish(run.pool.update(train_batch))
                with timer.stage("update_weights"):
                    run.sync(step)
                metrics |= rollout_metrics(generated) | reward_metrics(generated, scored)
                metrics |= _of_this_process(run, step, timer, compilations, metrics)
                evaluation = _report(run, step, scored, metrics)
                done, position = step, run.collect.stream.get_state()
                skipped = skipped + 1 if _left_out(metrics) else 0
                if skipped:
                    run.writer.skipped(step, scored, train_batch)
                if skipped >= run.max_skipped_steps:
                    raise _diverged(run, step)
                run.checkpoints.check()
                if done == run.total_steps or _due(done, run.save_every):
                    _save(run, done, position, skipped, evaluation)
                    saved = done
                whole = True
    except BaseException as error:
        # Not within a step, for its state is neither the old nor the new one; nor where the last step taught nothing
        # because no sample could be scored: its prompts come again when the reward function has been mended.
        taught = isinstance(error, Interrupted) or any(s.error is None for s in scored)
        if whole and saved < done and taught:
            _save(run, done, position, skipped, {})
        if not isinstance(error, Interrupted):
            raise
    return done


def _left_out(metrics: Mapping[str, float]) -> bool:
    """Whether an update of any of the models was not made."""
    return any(value for name, value in metrics.items() if name.endswith("/skipped_updates"))


def _of_this_process(
    run: Run, step: int, timer: Timer, compilations: Compilations, metrics: Mapping[str, float]
) -> dict[str, float]:
    seconds = timer.total()
    return {
        **timer.seconds,
        "timing_s/step": seconds,
        "training/global_step": step,
        "training/epoch": run.collect.stream.epoch,
        "perf/throughput": metrics["perf/total_num_tokens"] / seconds / run.devices,
        "perf/compilations": compilations.count,
    }


def _report(run: Run, step: int, scored: Sequence[Scored], metrics: Mapping[str, float]) -> dict[str, float]:
    """Shows and writes a step; returns its evaluation, which is empty where none is due."""
    run.writer.progress(step, metrics)
    if _due(step, run.samples_every):
        run.writer.samples(step, _shown(scored, run.samples))
    evaluation: dict[str, float] = {}
    if run.evaluate and run.eval_every and (_due(step, run.eval_every) or step == run.total_steps):
        evaluation = run.evaluate(step)
        run.writer.evaluation(step, evaluation)
    run.writer.write(step, {**metrics, **evaluation})
    return evaluation


def _save(run: Run, step: int, position: Mapping[str, Any], skipped: int, evaluation: Mapping[str, float]) -> None:
    rest = {
        "step": step,
        "stream": position,
        "skipped_steps": skipped,
        "initial": run.initial,
        "config": dict(run.saved_config),
    }
    run.writer.sync()
    run.checkpoints.save(step, run.pool.state(), rest, evaluation)


def _diverged(run: Run, step: int) -> UserError:
    first = step - run.max_skipped_steps + 1
    return UserError(
        f"loss or gradient was not finite in each of the steps {first} to {step}; no update was made with them, "
        f"and their batches are in {run.writer.skipped_folder}; {run.checkpoints.last_good()}. Look at the batches, "
        "lower the learning rate (config.optimizer.learning_rate), or allow more such steps "
        "(config.learner.max_skipped_steps)"
    )


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _shown(scored: Sequence[Scored], count: int) -> list[tuple[str, str, float | None, Any]]:
    """Samples of different prompts, from the front of the batch."""
    first = {s.rollout.prompt.uid: s for s in reversed(scored)}
    chosen = list(reversed(first.values()))[:count]
    return [(s.rollout.prompt.text, s.rollout.text, s.reward, s.rollout.prompt.ground_truth) for s in chosen]
