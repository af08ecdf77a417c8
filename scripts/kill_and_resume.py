"""Kills a training command again and again, starts it again each time, and compares with a run that was left alone.

    python scripts/kill_and_resume.py --kills 20
    python scripts/kill_and_resume.py --kills 5 --config sft_arithmetic -- --config.total_steps=100

The command is `python -m jaxrl_llm.train`; what follows `--` goes to it. Every kill is a SIGKILL at a random moment of
a stage (rollout, reward, update, saving, evaluation), all stages in turn. In the end metrics.jsonl must equal the other
run's, value for value and line for line (what measures time or one process apart), and so must samples.jsonl; the same
checkpoints must have been kept, with the same state. Exits with 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

STAGES = ("gen", "reward", "update_actor", "save", "evaluate")
# What measures time, or counts in one process.
_OF_A_PROCESS = ("timing_s/", "perf/throughput", "perf/compilations")


def observed(pipe: int, argv: list[str]) -> None:
    """The training command, in this process; tells through the pipe when a stage begins and ends."""
    from jaxrl_llm import assemble, controller, train
    from jaxrl_llm.checkpoint import Checkpoints

    def tell(stage: str, event: str) -> None:
        os.write(pipe, f"{stage} {event} {time.monotonic()}\n".encode())

    evaluate, stage, save = assemble.evaluate, controller.Timer.stage, Checkpoints.save

    def told_evaluate(*args: Any, **kwargs: Any) -> dict[str, float]:
        tell("evaluate", "begins")
        metrics = evaluate(*args, **kwargs)
        tell("evaluate", "ends")
        return metrics

    @contextmanager
    def told_stage(self: Any, name: str) -> Iterator[None]:
        tell(name, "begins")
        with stage(self, name):
            yield
        tell(name, "ends")

    def told_save(self: Any, step: int, *args: Any) -> None:
        tell("save", "begins")
        save(self, step, *args)
        threading.Thread(target=wait_for, args=(self.folder / str(step),), daemon=True).start()

    def wait_for(checkpoint: Path) -> None:
        while not checkpoint.exists():  # it appears when it is whole
            time.sleep(0.002)
        tell("save", "ends")

    controller.Timer.stage = told_stage  # type: ignore[method-assign]
    Checkpoints.save = told_save  # type: ignore[method-assign]
    assemble.evaluate = told_evaluate
    sys.argv = ["jaxrl_llm.train", *argv]
    train.main()


class Command:
    """One start of the observed command."""

    def __init__(self, argv: list[str], log: Path):
        self._read, write = os.pipe()
        self._log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--observed", str(write), *argv],
                stdout=output,
                stderr=output,
                pass_fds=(write,),
            )
        os.close(write)

    def events(self) -> Iterator[tuple[str, str, float]]:
        """(stage, "begins" or "ends", time in s), until the command ends."""
        with os.fdopen(self._read) as lines:
            for line in lines:
                stage, event, moment = line.split()
                yield stage, event, float(moment)

    def finish(self) -> dict[str, float]:
        """Waits for its end, which must be a good one; returns the mean seconds of each stage."""
        began: dict[str, float] = {}
        spent: dict[str, list[float]] = defaultdict(list)
        for stage, event, moment in self.events():
            if event == "begins":
                began[stage] = moment
            else:
                spent[stage].append(moment - began[stage])
        if self.process.wait() != 0:
            sys.exit(f"the command ended with {self.process.returncode}:\n{self._log.read_text()[-2000:]}")
        return {stage: sum(values) / len(values) for stage, values in spent.items()}

    def kill_in(self, stage: str, occurrence: int, delay: float) -> bool:
        """Kills it `delay` seconds after a stage has begun for that many times; False if it ends before."""
        seen = 0
        for name, event, _ in self.events():
            seen += (name, event) == (stage, "begins")
            if seen == occurrence:
                time.sleep(delay)
                self.process.kill()
                self.process.wait()
                return True
        return self.process.wait() != 0 and sys.exit(f"the command failed:\n{self._log.read_text()[-2000:]}")


def main(argv: list[str]) -> int:
    """The exit code."""
    if argv[:1] == ["--observed"]:
        observed(int(argv[1]), argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints and between evaluations")
    parser.add_argument("--folder", type=Path, help="for both runs; a new temporary one by default")
    ours, theirs = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser.parse_args(ours)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    folder.mkdir(parents=True, exist_ok=True)

    def command(name: str) -> list[str]:
        every = f"--config.checkpoint.every={args.every}", f"--config.eval.every={args.every}"
        return ["--config", args.config, *every, *theirs, f"--config.run_dir={folder / name}"]

    start = time.monotonic()
    seconds = Command(command("straight"), folder / "straight.log").finish()
    print(f"left alone: {time.monotonic() - start:.0f} s; stages " + _shown(seconds), flush=True)
    start = time.monotonic()
    hits = kill_again_and_again(command("killed"), folder, seconds, args.kills, random.Random(args.seed))
    Command(command("killed"), folder / "killed.log").finish()
    print(f"killed {sum(hits.values())} times ({_counts(hits)}) and finished: {time.monotonic() - start:.0f} s")
    problems = list(differences(folder / "straight", folder / "killed"))
    if sum(hits.values()) < args.kills:
        problems.append(f"it ended after {sum(hits.values())} of {args.kills} kills: give it more steps")
    print(
        "\n".join(problems)
        or f"equal: {len(_lines(folder / 'killed' / 'metrics.jsonl'))} lines of metrics, samples, state"
    )
    return 1 if problems else 0


def kill_again_and_again(
    argv: list[str], folder: Path, seconds: dict[str, float], kills: int, rng: random.Random
) -> dict[str, int]:
    """Starts and kills the command; returns how often each stage was hit."""
    hits: dict[str, int] = defaultdict(int)
    stages: list[str] = []
    steps = len(_lines(folder / "straight" / "metrics.jsonl"))
    for number in range(1, kills + 1):
        if not stages:
            stages = [stage for stage in STAGES if stage in seconds]
            rng.shuffle(stages)
        stage = stages.pop()
        often = 1 if stage in ("save", "evaluate") else rng.randint(1, max(1, 2 * steps // kills))
        delay = rng.uniform(0, seconds[stage])
        if not Command(argv, folder / "killed.log").kill_in(stage, often, delay):
            break
        hits[stage] += 1
        done = len(_lines(folder / "killed" / "metrics.jsonl"))
        print(f"kill {number}: {delay:.3f} s into {stage}, {done} lines of metrics", flush=True)
    return hits


def differences(straight: Path, killed: Path) -> Iterator[str]:
    """What is not the same in two finished runs."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        expected, found = (_lines(folder / name) for folder in (straight, killed))
        steps = [line["step"] for line in found]
        if steps != [line["step"] for line in expected]:
            yield f"{name}: the steps are {steps}"
        for one, other in zip(expected, found, strict=False):
            keys = sorted(key for key in {**one, **other} if not key.startswith(_OF_A_PROCESS))
            yield from (
                f"{name}, step {one['step']}: {key} is {other.get(key)}, expected {one.get(key)}"
                for key in keys
                if one.get(key) != other.get(key)
            )
    from jaxrl_llm import checkpoint

    steps = [checkpoint.saved_steps(folder / "checkpoints") for folder in (straight, killed)]
    if steps[0] != steps[1]:
        yield f"the checkpoints are those of the steps {steps[1]}, expected {steps[0]}"
    for step in sorted({*steps[0]} & {*steps[1]}):
        one, other = (folder / "checkpoints" / str(step) for folder in (straight, killed))
        if _state(one) != _state(other):
            yield f"the states of step {step} differ"
        rests = [checkpoint.read_rest(path) for path in (one, other)]
        yield from (
            f"{key} of checkpoint {step} differs"
            for key in rests[0]
            if key != "config" and rests[0][key] != rests[1][key]
        )


def _state(path: Path) -> list[tuple[str, bytes]]:
    """All arrays of a checkpoint, as they lie on the disk."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    leaves = jax.tree_util.tree_flatten_with_path(ocp.PyTreeCheckpointer().restore(path / "state"))[0]
    return [(jax.tree_util.keystr(name), np.asarray(leaf).tobytes()) for name, leaf in leaves]


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:  # the line that a kill has cut
            break
    return whole


def _shown(seconds: dict[str, float]) -> str:
    return ", ".join(f"{stage} {seconds[stage]:.3f} s" for stage in STAGES if stage in seconds)


def _counts(hits: dict[str, int]) -> str:
    return ", ".join(f"{stage} {hits[stage]}" for stage in STAGES if hits[stage])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
