"""Metrics: what a batch of rollouts says, and writing all of it to the terminal, metrics.jsonl and TensorBoard.

Names follow verl's, so that curves can be laid side by side. What a device computes is a (sum, count) pair
until it is written, so that parts of a batch add up exactly.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.markup import escape
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.summary import scalar

from jaxrl_llm.output import write_whole
from jaxrl_llm.types import Scored, TrainBatch, UserError

# Columns of the progress line: title, format, and the metric; of several the first that there is.
_RL_COLUMNS = (
    ("reward", ".3f", ("critic/rewards/mean",)),
    ("kl", ".1e", ("actor/kl_loss", "actor/ppo_kl")),
    ("entropy", ".3f", ("actor/entropy",)),
    ("length", ".1f", ("response_length/mean",)),
    ("clipped", ".3f", ("actor/pg_clipfrac",)),
)
_SFT_COLUMNS = (("loss", ".4f", ("actor/loss",)), ("grad", ".2f", ("actor/grad_norm",)))


class Compilations:
    """Counts XLA compilations of this process from its making on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, *_: Any, **__: Any) -> None:
        self.count += event == "/jax/core/compile/backend_compile_duration"


class Timer:
    """Wall time of the stages of one step, in seconds, as `timing_s/STAGE`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time of the block to a stage."""
        start = time.perf_counter()
        yield
        self.seconds[f"timing_s/{name}"] += time.perf_counter() - start

    def total(self) -> float:
        """Seconds since the timer was made."""
        return time.perf_counter() - self._start


def finish(metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """(sum, count) pairs to means, on the host; those that nothing was counted for are left out."""
    pairs = jax.device_get(dict(metrics))
    return {name: float(total) / float(count) for name, (total, count) in pairs.items() if count}


def rollout_metrics(generated: Sequence[Scored]) -> dict[str, float]:
    """Lengths and stop reasons of all that was generated for a step."""
    rollouts = [s.rollout for s in generated]
    responses = np.array([r.response_length for r in rollouts], np.float64)
    prompts = np.array([len(r.prompt.token_ids) for r in rollouts], np.float64)
    cut = np.array([r.stop_reason == "length" for r in rollouts], np.float64)
    return {
        **_spread("response_length", responses),
        **_spread("prompt_length", prompts),
        "response_length/clip_ratio": float(cut.mean()),
        "perf/total_num_tokens": float(prompts.sum() + responses.sum()),
    }


def reward_metrics(generated: Sequence[Scored], batch: Sequence[Scored]) -> dict[str, float]:
    """Of all that was generated for a step: the score, its components, how many samples could not be scored, and how
    many groups tell nothing. Of the batch that is learned from, penalties included: the reward."""
    if all(s.error is None and not s.components for s in generated):
        return {}  # demonstrations
    scores = _rewards(generated)
    out = {"reward/failed": float(len(generated) - len(scores))}
    for name, values in (("critic/score", scores), ("critic/rewards", _rewards(batch))):
        out |= _spread(name, values) if len(values) else {}
    components: dict[str, list[float]] = defaultdict(list)
    groups: dict[int, list[float]] = defaultdict(list)
    for s in generated:
        for name, value in s.components.items():
            components[name].append(value)
        if s.reward is not None:
            groups[s.rollout.prompt.uid].append(s.reward)
    by_functions = set(components)
    for s in batch:
        for name in s.components.keys() - by_functions:  # added after scoring
            components[name].append(s.components[name])
    out |= {f"reward/{name}/mean": float(np.mean(values)) for name, values in components.items()}
    if groups:
        out["reward/solved_none_or_all"] = float(np.mean([min(g) == max(g) for g in groups.values()]))
    return out


def _rewards(scored: Sequence[Scored]) -> np.ndarray:
    return np.array([s.reward for s in scored if s.reward is not None], np.float64)


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    return {f"{name}/mean": values.mean(), f"{name}/max": values.max(), f"{name}/min": values.min()}


class Writer:
    """Writes a step's metrics everywhere. Steps beyond `first_step` that an earlier, interrupted run has written
    are taken out, so that a resumed run has every step once."""

    def __init__(
        self,
        run_dir: Path,
        *,
        first_step: int,
        total_steps: int,
        tensorboard: bool,
        console: Console,
        task: str,
    ):
        """`first_step`: the last step already done (0 for a new run)."""
        self._path = run_dir / "metrics.jsonl"
        self.skipped_folder = run_dir / "skipped"
        self._console, self._total, self._first = console, total_steps, first_step
        self._columns = _SFT_COLUMNS if task == "sft" else _RL_COLUMNS
        self._start = time.perf_counter()
        for path in (self._path, self._path.with_name("samples.jsonl")):
            _keep_steps(path, first_step or -1)
        for path in self.skipped_folder.glob("step_*"):
            if int(path.stem.removeprefix("step_")) > first_step:
                path.unlink()
        self._file = self._path.open("a")
        self._samples = self._path.with_name("samples.jsonl").open("a")
        self._board = _Board(run_dir / "tensorboard", first_step) if tensorboard else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line in metrics.jsonl, one point a metric in TensorBoard."""
        values = {name: float(value) for name, value in metrics.items()}
        # JSON has no NaN: a value that is not finite is written as text, so that it is seen and every reader can parse.
        line = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        self._file.write(json.dumps({"step": step, **line}) + "\n")
        self._file.flush()
        if self._board:
            self._board.write(step, values)

    def progress(self, step: int, metrics: Mapping[str, float]) -> None:
        """The progress line of a training step."""
        done, left = step - self._first, self._total - step
        eta = (time.perf_counter() - self._start) / max(done, 1) * left
        cells = [f"[bold]step {step:>{len(str(self._total))}}/{self._total}[/]"]
        for title, spec, names in self._columns:
            cells += [f"{title} {metrics[name]:{spec}}" for name in names if name in metrics][:1]
        cells.append(f"{metrics.get('perf/throughput', 0.0):,.0f} tok/s")
        cells.append(f"{metrics['timing_s/step']:.1f} s")
        cells.append(f"left {_duration(eta)}")
        self._console.print("  ".join(cells))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of an evaluation: its main figures."""
        main = {k: v for k, v in metrics.items() if k.startswith("val-core/") and "/mean@" in k}
        text = "  ".join(f"{name} {value:.3f}" for name, value in (main or dict(metrics)).items())
        self._console.print(f"[bold green]eval {step:>{len(str(self._total))}}[/]  {escape(text)}")

    def samples(self, step: int, rows: Sequence[tuple[str, str, float | None, Any]]) -> None:
        """Some generations (prompt, response, reward, truth): shortened on the terminal, whole in samples.jsonl."""
        for row in rows:
            fields = dict(zip(("prompt", "response", "reward", "ground_truth"), row, strict=True))
            self._samples.write(json.dumps({"step": step, **fields}, default=str) + "\n")
        self._samples.flush()
        for prompt, response, reward, truth in rows:
            shown = "none" if reward is None else f"{reward:.2f}"
            text = f"  sample  {_ends(prompt)!r} -> {_ends(response)!r}  reward {shown}"
            if truth is not None:
                text += f"  ground truth {_ends(str(truth))!r}"
            self._console.print(f"[dim]{escape(text)}[/]")

    def skipped(self, step: int, scored: Sequence[Scored], batch: TrainBatch) -> None:
        """Keeps a batch whose loss or gradient was not finite: the samples as JSONL, the learner's arrays as npz."""
        self.skipped_folder.mkdir(exist_ok=True)
        path = self.skipped_folder / f"step_{step}"
        with path.with_suffix(".jsonl").open("w") as file:
            for s in scored:
                r = s.rollout
                fields = {
                    "prompt": r.prompt.text,
                    "response": r.text,
                    "reward": s.reward,
                    "components": dict(s.components),
                    "error": s.error,
                    "row": r.prompt.row,
                    "sample": r.sample,
                    "token_ids": r.token_ids.tolist(),
                    "action_mask": r.action_mask.tolist(),
                    "logprobs": [p if math.isfinite(p) else str(p) for p in r.logprobs.tolist()],
                }
                file.write(json.dumps(fields) + "\n")
        arrays = {**batch.sequences._asdict(), **batch._asdict()}
        del arrays["sequences"]
        with_values: Any = {name: np.asarray(array) for name, array in arrays.items() if array is not None}
        np.savez(path.with_suffix(".npz"), **with_values)
        self._console.print(
            f"[bold red]step {step}: the loss or the gradient was not finite; the update was left out, its batch is in "
            f"{escape(str(path))}.jsonl and .npz[/]"
        )

    def sync(self) -> None:
        """Waits until all that was written is on the disk: a checkpoint must not be there without its steps' lines."""
        for file in (self._file, self._samples):
            os.fsync(file.fileno())
        if self._board:
            self._board.flush()

    def close(self) -> None:
        """Flushes and closes the files."""
        self._file.close()
        self._samples.close()
        if self._board:
            self._board.close()


_proto: Any = event_pb2  # made at import, so that no type checker sees its names


class _Board:
    """TensorBoard's event file, written where it is called: the thread of tensorboardX's SummaryWriter dies at a full
    disk, and then its queue fills and blocks for ever."""

    def __init__(self, folder: Path, first_step: int):
        folder.mkdir(exist_ok=True)
        self._events = EventsWriter(str(folder / "events"))
        if first_step:  # points of later steps, which an interrupted run has written, are not shown
            restart = _proto.SessionLog(status=_proto.SessionLog.START)
            self._events.write_event(_proto.Event(wall_time=time.time(), step=first_step + 1, session_log=restart))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.write_event(_proto.Event(wall_time=time.time(), step=step, summary=scalar(name, value)))

    def flush(self) -> None:
        self._events.flush()

    def close(self) -> None:
        self._events.close()


def _keep_steps(path: Path, last: int) -> None:
    if not path.exists():
        return
    kept, lines = [], path.read_text().splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            if json.loads(line)["step"] <= last:
                kept.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):  # the last one may have been cut by a kill
                raise UserError(f"{path}, line {number} is damaged; mend it or move the file away") from error
    write_whole(path, "".join(line + "\n" for line in kept))


def _ends(text: str, width: int = 160) -> str:
    return text if len(text) <= width else f"{text[: width // 2]} ... {text[-width // 2 :]}"


def _duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"
