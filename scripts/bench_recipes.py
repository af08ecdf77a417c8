"""Train the recipes, one after the other, and print a table: steps, held-out accuracy, seconds a step.

    python scripts/bench_recipes.py --out runs/recipes --steps 100
    python scripts/bench_recipes.py grpo dapo --seeds 0 1 2 --out runs/recipes -- --config.optimizer.learning_rate=1e-4

Recipes are names as in `--config`; without any, all that belong to one algorithm. Every run is a training command of
its own, in a folder RECIPE-seedN of --out; what follows `--` goes to it. A run that is complete is not repeated, one
that was cut off goes on, so the same command again finishes the table.

The table has a row a recipe, in Markdown; several seeds are given as lowest to highest. Accuracy is `acc` of the first
evaluation and of the last, seconds are the median of timing_s/step. Exits with 1 if a run failed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

from jaxrl_llm.arguments import Parser, at_least
from jaxrl_llm.cli import command
from jaxrl_llm.types import UserError

RECIPES = (
    "ppo",
    "grpo",
    "dr_grpo",
    "dapo",
    "gspo",
    "rloo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gmpo",
    "cispo",
    "sapo",
    "gpg",
    "clip_cov",
    "kl_cov",
    "dppo",
    "prime",
    "passk",
)
ACCURACY = re.compile(r"val-core/.*/acc/mean@\d+")


class Result(NamedTuple):
    """What a run's metrics say."""

    steps: int
    before: float  # accuracy
    after: float
    seconds: float  # a step


def train(recipe: str, seed: int, steps: int, run_dir: Path, more: Sequence[str]) -> bool:
    """Whether the training command ended well; what it says is in RUN_DIR.log."""
    settings = [f"--config.seed={seed}", f"--config.total_steps={steps}", f"--config.run_dir={run_dir}", *more]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{run_dir}.log").open("a") as log:
        argv = [sys.executable, "-m", "jaxrl_llm.train", "--config", recipe, *settings]
        return subprocess.run(argv, stdout=log, stderr=subprocess.STDOUT, check=False).returncode == 0


def result(run_dir: Path) -> Result:
    """Reads metrics.jsonl. Raises UserError if it has no evaluation before and after training."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracies = [value for row in rows for name, value in row.items() if ACCURACY.fullmatch(name)]
    if len(accuracies) < 2:
        raise UserError(f"{run_dir / 'metrics.jsonl'} has no accuracy before and after training")
    seconds = median(row["timing_s/step"] for row in rows if "timing_s/step" in row)
    return Result(rows[-1]["step"], accuracies[0], accuracies[-1], seconds)


def line(recipe: str, results: Sequence[Result]) -> str:
    """A recipe's row of the table."""

    def shown(values: Sequence[float], digits: int) -> str:
        texts = [f"{value:.{digits}f}" for value in (min(values), max(values))]
        return texts[0] if texts[0] == texts[1] else " to ".join(texts)

    steps, before, after, seconds = zip(*results, strict=True)
    cells = [recipe, len(results), shown(steps, 0), shown(before, 3), shown(after, 3), shown(seconds, 2)]
    return "| " + " | ".join(map(str, cells)) + " |"


def main(argv: list[str]) -> int:
    """The exit code; see the module's docstring."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser("bench_recipes")
    parser.prog = "python scripts/bench_recipes.py"
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=at_least(0), nargs="+", default=[0])
    parser.add_argument("--steps", type=at_least(1), default=100)
    args: argparse.Namespace = parser.read(argv[:cut])
    recipes = args.recipes or RECIPES
    folders = {recipe: [args.out / f"{Path(recipe).stem}-seed{s}" for s in args.seeds] for recipe in recipes}
    failed = []
    runs = [(recipe, *run) for recipe in recipes for run in zip(args.seeds, folders[recipe], strict=True)]
    for recipe, seed, run_dir in track(runs, "runs", console=Console(stderr=True), transient=True):
        if not train(recipe, seed, args.steps, run_dir, argv[cut + 1 :]):
            failed.append(run_dir)
            print(f"FAILED {run_dir}: see {run_dir}.log", flush=True)
    print("| recipe | seeds | steps | accuracy before | after | s/step |\n|---|---|---|---|---|---|")
    for recipe in recipes:
        complete = [result(folder) for folder in folders[recipe] if folder not in failed]
        if complete:
            print(line(recipe, complete))
    return 1 if failed else 0


if __name__ == "__main__":
    command(lambda argv: sys.exit(main(argv)), sys.argv[1:], __doc__ or "")
