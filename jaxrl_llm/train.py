"""Trains a policy: `python -m jaxrl_llm.train --config NAME [--config.KEY=VALUE ...]`."""

from __future__ import annotations

import sys

USAGE = """usage: python -m jaxrl_llm.train --config NAME [--config.KEY=VALUE ...] [--debug]

  --config NAME         a recipe: the name of a built-in one, a Python file with get_config(), or the config.json of
                        an earlier run
  --config.KEY=VALUE    changes one key, for example --config.optimizer.learning_rate=1e-6
  --debug               shows the whole traceback of errors

All keys, with their defaults and meanings, stand in configs/base.py. Built-in recipes: {recipes}.
The same command again resumes the run in config.run_dir."""


def run(argv: list[str]) -> None:
    """Trains by these arguments."""
    from rich.console import Console

    from jaxrl_llm import config as configs

    c, rest = configs.parse(argv)
    if rest:
        raise configs.unknown_argument(rest[0])
    from jaxrl_llm.assemble import assemble
    from jaxrl_llm.controller import train

    console = Console(soft_wrap=True, highlight=False)
    parts = assemble(c, console)
    with parts.resources:
        train(parts.run)
    where = parts.run_dir
    samples = f"  samples      {where / 'samples.jsonl'}\n" if (where / "samples.jsonl").exists() else ""
    board = f" (TensorBoard: {where / 'tensorboard'})" if c.log.tensorboard else ""
    console.out(
        f"done: {parts.run.total_steps} steps\n"
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
