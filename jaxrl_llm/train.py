"""Trains a policy: `python -m jaxrl_llm.train --config NAME [--config.KEY=VALUE ...]`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_llm.assemble import Assembled
    from jaxrl_llm.config import Config
    from jaxrl_llm.interrupts import Interrupts

USAGE = """usage: python -m jaxrl_llm.train --config NAME [--config.KEY=VALUE ...] [--debug]

  --config NAME         a recipe: the name of a built-in one, a Python file with get_config(), or the config.json of
                        an earlier run
  --config.KEY=VALUE    changes one key, for example --config.optimizer.learning_rate=1e-6
  --debug               shows the whole traceback of errors

All keys, with their defaults and meanings, stand in configs/base.py. Built-in recipes: {recipes}.
The same command again resumes the run in config.run_dir. Ctrl-C, SIGTERM and SIGHUP end a run with everything saved."""


def run(argv: list[str]) -> None:
    """Trains by these arguments."""
    from rich.console import Console

    from jaxrl_llm import config as configs

    c, rest = configs.parse(argv)
    if rest:
        raise configs.unknown_argument(rest[0])
    from jaxrl_llm import host_memory

    host_memory.limit_arenas()
    if c.deterministic:
        # Read when JAX starts; assemble() checks that it was set in time.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_deterministic_ops=true".strip()
    from jaxrl_llm.assemble import assemble
    from jaxrl_llm.interrupts import Interrupted, Interrupts

    console = Console(soft_wrap=True, highlight=False)
    with Interrupts() as interrupts:
        try:
            parts = assemble(c, console, interrupts)
        except Interrupted:
            console.out("stopped before the first step; the same command begins again")
            return
        done = _train(parts, interrupts)
    console.out(_summary(c, parts, done))


def _train(parts: Assembled, interrupts: Interrupts) -> int:
    from jaxrl_llm.cli import DISK_FULL
    from jaxrl_llm.controller import train
    from jaxrl_llm.types import UserError

    try:
        with parts.resources:
            try:
                return train(parts.run)
            finally:
                interrupts.finish()
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"{error.filename or parts.run_dir} cannot be written: {error.strerror}; "
            f"{parts.run.checkpoints.last_good()}. Make room, and the same command goes on from there"
        ) from error


def _summary(c: Config, parts: Assembled, done: int) -> str:
    run, where = parts.run, parts.run_dir
    if done == 0 and run.total_steps:
        head = "stopped before the first step was done; the same command begins again"
    elif done < run.total_steps:
        head = f"stopped after step {done} of {run.total_steps}; the same command goes on from there"
    elif run.start_step >= run.total_steps:
        head = f"nothing left to do: step {run.start_step} of {run.total_steps} is done (see config.total_steps)"
    else:
        head = f"done: {done} steps"
    samples = f"  samples      {where / 'samples.jsonl'}\n" if (where / "samples.jsonl").stat().st_size else ""
    board = f" (TensorBoard: {where / 'tensorboard'})" if c.log.tensorboard else ""
    return (
        f"{head}\n"
        f"  metrics      {where / 'metrics.jsonl'}{board}\n"
        f"{samples}"
        f"  checkpoints  {where / 'checkpoints'}\n"
        f"  export with  python -m jaxrl_llm.export --run {where} --out {where / 'export'}"
    )


def main() -> None:
    """Entry point."""
    from jaxrl_llm.cli import command
    from jaxrl_llm.config import built_in

    command(run, sys.argv[1:], USAGE.format(recipes=", ".join(built_in())))


if __name__ == "__main__":
    main()
