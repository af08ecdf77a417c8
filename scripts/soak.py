"""Train for an hour and look for what grows: memory, open files, threads, compilations.

    python scripts/soak.py --minutes 60 --warmup 5 --config quickstart --csv soak.csv -- --config.rollout.n=4

Starts one training command in a new folder (a temporary one, removed at the end, unless --run_dir names one) and looks
at it every 10 s; what follows `--` goes to the command. After the given minutes it is asked to stop with SIGTERM, on
which it saves and ends with 0. Prints a line a minute and a verdict; exits with 1 if anything grew or went wrong.

The verdict is about the samples after the warm-up, in which caches fill and programs are compiled, and compares their
first tenth with their last. One sample is noise: it may fall into an update, an evaluation or a checkpoint, which hold
hundreds of MiB and open files for a moment. So resident memory, of the process and of its child processes together, is
the median of each tenth and may grow by less than 2 %; open files and threads have grown if the fewest in the last
tenth are more than the most in the first. Compilations must be as many at the end as after the warm-up: one more is a
shape that changed.
"""

from __future__ import annotations

import argparse
import csv
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from jaxrl_llm.types import UserError

INTERVAL = 10.0  # seconds between samples
MAX_GROWTH = 0.02
STOP_SECONDS = 600.0  # to finish a step and write a checkpoint after SIGTERM
TAIL = 1 << 16  # bytes at the end of metrics.jsonl that hold its last line
LOG = "soak.log"
MIB = 2**20


class Sample(NamedTuple):
    """The training command at one moment."""

    seconds: float  # since its start
    memory: int  # resident bytes of the process
    child_memory: int  # resident bytes of its child processes together
    files: int  # open file descriptors of the process
    threads: int
    children: int
    step: int  # 0 before the first
    compilations: int  # by perf/compilations of the last step


class Check(NamedTuple):
    """One part of the verdict."""

    name: str
    good: bool
    text: str


def verdict(samples: Sequence[Sample], warmup: float) -> list[Check]:
    """Judges the samples taken `warmup` seconds after the start or later; see the module's docstring."""
    steady = [sample for sample in samples if sample.seconds >= warmup]
    if len(steady) < 2:
        return [Check("samples", False, f"{len(steady)} after the warm-up of {warmup / 60:g} min; expected at least 2")]
    if steady[0].step < 1:
        return [Check("steps", False, f"none in the warm-up of {warmup / 60:g} min; give more --warmup")]
    count = max(1, len(steady) // 10)
    first, last = steady[:count], steady[-count:]
    compilations = [sample.compilations for sample in (steady[0], steady[-1])]
    return [
        _steps(steady[0].step, steady[-1].step),
        _memory("memory", [s.memory for s in first], [s.memory for s in last]),
        _memory("children's memory", [s.child_memory for s in first], [s.child_memory for s in last]),
        _count("open files", [s.files for s in first], [s.files for s in last]),
        _count("threads", [s.threads for s in first], [s.threads for s in last]),
        Check("compilations", compilations[0] == compilations[1], f"{compilations[0]} -> {compilations[1]}"),
    ]


def _steps(first: int, last: int) -> Check:
    return Check("steps", last > first, f"{first} -> {last}")  # a command that hangs would pass all else


def _memory(name: str, first: Sequence[int], last: Sequence[int]) -> Check:
    before, after = median(first), median(last)
    growth = after / before - 1 if before else float(after > 0)
    text = f"median {before / MIB:.1f} -> {after / MIB:.1f} MiB, {growth:+.2%} (limit {MAX_GROWTH:+.0%})"
    return Check(name, growth < MAX_GROWTH, text)


def _count(name: str, first: Sequence[int], last: Sequence[int]) -> Check:
    return Check(name, min(last) <= max(first), f"at most {max(first)} -> at least {min(last)}")


def look(process: psutil.Process, run_dir: Path, start: float) -> Sample:
    """Takes a sample. psutil.NoSuchProcess if the process has ended."""
    children = []
    for child in process.children(recursive=True):
        try:
            children.append(child.memory_info().rss)
        except psutil.NoSuchProcess:
            continue  # ended since it was listed: it holds nothing
    with process.oneshot():
        memory, files, threads = process.memory_info().rss, process.num_fds(), process.num_threads()
    step, compilations = progress(run_dir / "metrics.jsonl")
    return Sample(
        seconds=time.monotonic() - start,
        memory=memory,
        child_memory=sum(children),
        files=files,
        threads=threads,
        children=len(children),
        step=step,
        compilations=compilations,
    )


def progress(path: Path) -> tuple[int, int]:
    """Step and compilations by the last whole line of metrics.jsonl; (0, 0) before the first step."""
    if not path.exists():
        return 0, 0
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        lines = file.read().split(b"\n")[:-1]  # what follows the last line break is still being written
    row = json.loads(lines[-1]) if lines else {"step": 0}
    return row["step"], int(row.get("perf/compilations", 0))


def watch(process: subprocess.Popen, run_dir: Path, minutes: float) -> list[Sample]:
    """Samples until the time is over or the process has ended; prints a line a minute."""
    start, samples = time.monotonic(), []
    watched = psutil.Process(process.pid)
    for i in range(1, int(minutes * 60 / INTERVAL) + 1):
        if _ends_by(process, start + i * INTERVAL):
            break
        try:
            samples.append(look(watched, run_dir, start))
        except psutil.Error:  # it has ended since
            break
        if i % round(60 / INTERVAL) == 0:
            print(_line(samples[-1]), flush=True)
    return samples


def _ends_by(process: subprocess.Popen, moment: float) -> bool:
    """Waits for the end of the process, but not longer than to a moment of the monotonic clock."""
    try:
        process.wait(moment - time.monotonic())
    except subprocess.TimeoutExpired:
        return False
    return True


def _line(s: Sample) -> str:
    return (
        f"{s.seconds / 60:4.0f} min  step {s.step}  memory {s.memory / MIB:.1f} MiB  files {s.files}  "
        f"threads {s.threads}  compilations {s.compilations}  children {s.children} with {s.child_memory / MIB:.1f} MiB"
    )


def soak(command: Sequence[str], run_dir: Path, *, minutes: float) -> tuple[list[Sample], Check]:
    """Runs the command, watches it and ends it. Its output goes to soak.log in `run_dir`."""
    with (run_dir / LOG).open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            samples = watch(process, run_dir, minutes)
            early = process.poll() is not None
            process.send_signal(signal.SIGTERM)  # nothing, if it has ended
            if not _ends_by(process, time.monotonic() + STOP_SECONDS):
                return samples, Check("end", False, f"still running {STOP_SECONDS:.0f} s after SIGTERM; killed")
        finally:
            process.kill()  # nothing, if it has ended
            process.wait()
    text = f"{'ended by itself' if early else 'stopped with SIGTERM'}, exit code {process.returncode}"
    return samples, Check("end", not early and process.returncode == 0, text)


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    """A line a sample, a column a field."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Sample._fields)
        writer.writerows(samples)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The arguments of this script, checked, and those of the training command."""
    cut = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="from the start, warm-up included")
    parser.add_argument("--warmup", type=float, default=5.0, help="minutes that are not judged")
    parser.add_argument("--config", default="quickstart", help="the recipe")
    parser.add_argument("--run_dir", type=Path, help="a new or empty folder, kept")
    parser.add_argument("--csv", type=Path, help="where to write the samples")
    args = parser.parse_args(arguments[:cut])
    if args.warmup < 0:
        raise UserError(f"--warmup {args.warmup:g}: expected minutes of at least 0")
    if (args.minutes - args.warmup) * 60 < 2 * INTERVAL:
        raise UserError(
            f"--minutes {args.minutes:g} leaves {args.minutes - args.warmup:g} min after --warmup {args.warmup:g}: two "
            f"samples, {INTERVAL:.0f} s each, are the least that can be compared"
        )
    if args.run_dir and args.run_dir.exists() and (not args.run_dir.is_dir() or any(args.run_dir.iterdir())):
        raise UserError(f"--run_dir {args.run_dir} must be new or empty: the run would resume what is in it")
    if args.csv and not args.csv.absolute().parent.is_dir():
        raise UserError(f"--csv {args.csv}: its folder does not exist; make it first")
    return args, list(arguments[cut + 1 :])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    args, more = parse(sys.argv[1:] if arguments is None else arguments)
    with nullcontext(args.run_dir) if args.run_dir else tempfile.TemporaryDirectory(prefix="soak.") as folder:
        run_dir = Path(folder)
        run_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "jaxrl_llm.train", "--config", args.config, f"--config.run_dir={run_dir}"]
        command += ["--config.total_steps=1000000", "--config.total_epochs=0", "--config.optimizer.schedule=constant"]
        samples, end = soak([*command, *more], run_dir, minutes=args.minutes)
        if args.csv:
            write_csv(args.csv, samples)
        if not end.good:
            print("".join((run_dir / LOG).read_text(errors="replace").splitlines(keepends=True)[-40:]))
    checks = [end, *verdict(samples, args.warmup * 60)]
    for check in checks:
        print(f"{'ok    ' if check.good else 'FAILED'}  {check.name}: {check.text}")
    return 0 if all(check.good for check in checks) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
