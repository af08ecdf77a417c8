"""Time and memory of advantages, policy loss and its gradient on the CPU, here and in verl.

    python scripts/bench_algorithms.py grpo+vanilla gae+vanilla
    python scripts/bench_algorithms.py --verl OTHER_ENVIRONMENT/bin/python > table.md

    --batch N --tokens N   size of the batch, 4096 sequences of 8192 tokens by default
    --repeats N            timed runs, of which the median counts, after one to warm up; 3 by default
    --verl PYTHON          an interpreter that has verl: its functions are measured too

A PAIR is advantage+loss or advantage+loss+correction, with the rollout correction (token weights and rejection by
seq_mean_k1); without any, all of the default ones. Every measurement is a process of its own, on the same float32
numbers: 0/1 rewards, groups of 8, sequences of uneven length. MiB is the peak of resident memory less what was held
when the inputs had been made; ratios are jaxrl_llm / verl. Compilation is no part of the seconds.

Prints a table, in Markdown, how long a copy of the inputs takes, and what differs: exits with 1 if loss or norm of the
gradient are not verl's, or if a measurement failed. `-` stands where verl has no such function.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.policy_losses import LOSS_AGGREGATION, POLICY_LOSSES
from jaxrl_llm.arguments import Parser, at_least
from jaxrl_llm.cli import command
from jaxrl_llm.plugins import unknown_name
from jaxrl_llm.types import UserError

PAIRS = (
    "grpo+vanilla",
    "gae+vanilla",
    "rloo+vanilla",
    "reinforce_plus_plus+vanilla",
    "opo+vanilla",
    "remax+vanilla",
    "optimal_token_baseline+vanilla",
    "grpo+gspo",
    "grpo+geo_mean",
    "grpo+cispo",
    "grpo+sapo",
    "grpo+clip_cov",
    "grpo+kl_cov",
    "grpo+dppo_tv",
    "grpo+vanilla+correction",
)
CORRECTION = {
    "rollout_is": "token",
    "rollout_is_threshold": 2.0,
    "rollout_rs": "seq_mean_k1",
    "rollout_rs_threshold": "0.98_1.02",
}
CONSTANTS = {
    "gamma": 1.0,
    "lam": 0.95,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.0002,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.0002,
    "ppo_kl_coef": 1.0,
    "dro_beta": 0.1,
}
OWN_CONSTANTS = {  # of losses whose clip ratios mean something else
    "gspo": {"clip_ratio_low": 0.0003, "clip_ratio_high": 0.0004},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    "cispo": {"clip_ratio_low": 1.0, "clip_ratio_high": 1.0},
    "dppo_tv": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 20.0},
    "dppo_kl": {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 20.0},
}
TOLERANCE = 1e-4  # relative
ROUNDING = 1e-6  # of a loss, the mean of token losses around 1 that cancel out
LOOSE = {"clip_cov": 1e-2}  # chooses tokens at random
NOT_IN_VERL = {"prime", "reinforce", "sft"}
HERE = Path(__file__).parent
MIB = 2**20


class Row(NamedTuple):
    """A pair and its measurements, Results of bench_algorithms_shared.py; a text where one failed, None for none."""

    pair: str
    ours: dict[str, float] | str
    verl: dict[str, float] | str | None

    def wrong(self) -> list[str]:
        """What failed or differs."""
        sides = {"jaxrl_llm": self.ours, "verl": self.verl}
        failed = [f"FAILED {self.pair}: {name}: {text}" for name, text in sides.items() if isinstance(text, str)]
        if failed or not isinstance(self.ours, dict) or not isinstance(self.verl, dict):
            return failed
        tolerance = LOOSE.get(self.pair.split("+")[1], TOLERANCE)
        return [
            f"DIFFERS {self.pair}: {name} is {self.ours[name]:.8g}, verl's {self.verl[name]:.8g}"
            for name, rounding in {"loss": ROUNDING, "gradient_norm": 0.0}.items()
            if not math.isclose(self.ours[name], self.verl[name], rel_tol=tolerance, abs_tol=rounding)
        ]

    def line(self) -> str:
        """The row in Markdown; the pair is marked if anything is wrong."""

        def cells(result: dict[str, float] | str | None) -> list[str]:
            if not isinstance(result, dict):
                return ["failed" if result else "-"] * 2
            return [f"{result['seconds']:.3g}", f"{result['memory'] / MIB:.0f}"]

        ratios = ["-", "-"]
        if isinstance(self.ours, dict) and isinstance(self.verl, dict):
            pairs = [(self.ours[name], self.verl[name]) for name in ("seconds", "memory")]
            ratios = [f"{ours / verl:.2f}" if verl else "-" for ours, verl in pairs]
        name = f"{self.pair} ✗" if self.wrong() else self.pair
        return "| " + " | ".join([name, *cells(self.ours), *cells(self.verl), *ratios]) + " |"


def request(pair: str, sequences: int, tokens: int, repeats: int) -> dict[str, Any]:
    """A Request of bench_algorithms_shared.py. Raises UserError if there is no such pair."""
    advantage, *others = pair.split("+")
    if len(others) not in (1, 2) or others[1:] not in ([], ["correction"]):
        raise UserError(f"{pair!r} is no pair; expected advantage+loss, such as grpo+vanilla, or that and +correction")
    loss = others[0]
    for kind, name, table in (("advantage", advantage, ADVANTAGES), ("loss", loss, POLICY_LOSSES)):
        if name not in table:
            raise unknown_name(kind, name, table)
    return {
        "advantage": advantage,
        "loss": loss,
        "aggregation": LOSS_AGGREGATION.get(loss, "token-mean"),
        "constants": {**CONSTANTS, **OWN_CONSTANTS.get(loss, {})},
        "correction": CORRECTION if others[1:] else None,
        "sequences": sequences,
        "tokens": tokens,
        "repeats": repeats,
    }


def measured(python: str, script: str, request: dict[str, Any]) -> dict[str, float] | str:
    """The Result; what went wrong if there is none."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    argv = [python, str(HERE / script), json.dumps(request)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return (done.stderr.splitlines() or [f"ended with {done.returncode}, which may be for want of memory"])[-1]


def check_verl(python: str) -> None:
    """Raises UserError if it is no interpreter that has verl."""
    try:
        argv = [python, "-c", "import verl.trainer.ppo.core_algos"]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UserError(f"--verl {python} is no Python interpreter: {error.strerror}") from error
    if done.returncode:
        raise UserError(f"--verl {python} cannot import verl: {(done.stderr.splitlines() or ['no reason given'])[-1]}")


def copy_speed(sequences: int, tokens: int) -> float:
    """Bytes that a copy reads and writes in a second, in one thread."""
    source, target = (np.ones((sequences, tokens), np.float32) for _ in range(2))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)


def notes(rows: Sequence[Row], sequences: int, tokens: int) -> list[str]:
    """Lines for below the table."""
    ours = [(row.pair, row.ours) for row in rows if isinstance(row.ours, dict)]
    if not ours:
        return []

    def span(name: str, scale: float, more: int = 0) -> str:
        """The lowest and the highest, and whose they are."""
        ends = [pick(ours, key=lambda item: item[1][name]) for pick in (min, max)]
        texts = [f"{(result[name] + more) / scale:.3g} s ({pair})" for pair, result in ends]
        return " to ".join(dict.fromkeys(texts))

    speed, gradient = copy_speed(sequences, tokens), 4 * sequences * tokens
    return [
        f"A copy moves {speed / 2**30:.1f} GiB/s: to read the inputs of jaxrl_llm once and to write the gradient once "
        f"takes {span('inputs', speed, gradient)}.",
        f"jaxrl_llm compiles, once, for {span('compile_seconds', 1)}.",
    ]


def main(argv: list[str]) -> int:
    """The exit code; see the module's docstring."""
    parser = Parser("bench_algorithms")
    parser.prog = "python scripts/bench_algorithms.py"
    parser.add_argument("pairs", nargs="*", metavar="PAIR")
    for name, default in {"batch": 4096, "tokens": 8192, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--verl", metavar="PYTHON")
    args = parser.read(argv)
    requests = {p: request(p, args.batch, args.tokens, args.repeats) for p in args.pairs or PAIRS}
    if args.verl:
        check_verl(args.verl)
    print("| pair | jaxrl_llm s | MiB | verl s | MiB | time ratio | memory ratio |\n|---|---|---|---|---|---|---|")
    rows = []
    for pair, asked in track(requests.items(), "pairs", console=Console(stderr=True), transient=True):
        in_verl = args.verl and not NOT_IN_VERL & {*pair.split("+")}
        ours = measured(sys.executable, "bench_algorithms_jax.py", asked)
        rows.append(Row(pair, ours, measured(args.verl, "bench_algorithms_verl.py", asked) if in_verl else None))
        print(rows[-1].line(), flush=True)
    wrong = [text for row in rows for text in row.wrong()]
    print("", *notes(rows, args.batch, args.tokens), *wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    command(lambda argv: sys.exit(main(argv)), sys.argv[1:] or [*PAIRS], __doc__ or "")
