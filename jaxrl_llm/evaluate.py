"""Measures a policy on data files: `python -m jaxrl_llm.evaluate --run runs/NAME`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import argparse
    from pathlib import Path

    from rich.table import Table

    from jaxrl_llm.arguments import Parser
    from jaxrl_llm.config import Config
    from jaxrl_llm.data.stream import Prompts
    from jaxrl_llm.policy import Source, Weights
    from jaxrl_llm.rollout.engine import Sampling
    from jaxrl_llm.types import Rollout, Scored

USAGE = """usage: python -m jaxrl_llm.evaluate (--run RUN_DIR [--step N] | --model FOLDER [--config NAME]) [options]

Lets a policy answer every prompt of the data once or several times, scores the answers with reward functions, and
prints and writes the means.

A run, on the data and with the reward functions that it was trained with:
  python -m jaxrl_llm.evaluate --run runs/quickstart
The model that the quickstart begins with, eight samples a prompt, so that pass@k and majority votes show:
  python -m jaxrl_llm.evaluate --model jaxrl_llm/assets/arithmetic_base --config quickstart --n 8
Any model folder on data of your own:
  python -m jaxrl_llm.evaluate --model FOLDER --data test.jsonl --config.reward.functions=exact_match --temperature 0

which policy
  --run RUN_DIR         a run folder; its config.json says data, rewards and sampling
  --step N              the checkpoint (default: the newest)
  --model FOLDER        a Hugging Face folder, or its name on the hub
  --config NAME         with --model: the recipe that says the rest (default: configs/base.py)
on what, and how
  --data FILE           JSONL, Parquet, ... (repeatable; default: config.data.val)
  --limit N             only the first N rows (default: config.data.val_limit; 0: all)
  --n N                 samples a prompt (default: config.eval.n)
  --temperature T       0 is greedy (default: config.eval.temperature)
  --max_tokens N        of a response (default: config.data.max_response_length)
  --config.KEY=VALUE    changes any other key; see configs/base.py
where to
  --out DIR             for metrics.json and samples.jsonl (default: RUN_DIR/evaluations/step_N, or evaluations/MODEL)
  --debug               shows the whole traceback of errors

docs/evaluation.md has the metrics' formulas."""


def run(argv: list[str]) -> None:
    """Evaluates by these arguments."""
    from jaxrl_llm import arguments
    from jaxrl_llm import config as configs

    given = configs.split(argv)
    parser = _parser()
    args = parser.read(given.rest)
    arguments.check_policy(parser, args, given.recipe)

    from rich.console import Console

    from jaxrl_llm import assemble, evaluation, output, policy

    console = Console(soft_wrap=True, highlight=False)
    c = _config(parser, args, given)
    source = policy.model_source(c)
    prompts = _prompts(c, source)
    sampling = assemble.eval_sampling(c)
    with assemble.reward_pool(c) as rewards:
        weights = _weights(c, source, args, own_mesh=any(key.startswith("mesh.") for key, _ in given.overrides))
        out = args.out or _default_out(args, weights.step)
        output.prepare_folder(out, "--out")
        console.out(f"policy: {_name(args, weights.step)} on {assemble.describe_devices(weights.mesh)}")
        console.out(f"data: {prompts.describe()}")
        if left_out := prompts.counts["rows"] - prompts.counts["kept"]:
            console.out(f"{left_out} rows are left out; see config.data.max_prompt_length")
        console.out(f"rewards: {', '.join(c.reward.functions)}")
        rollouts, seconds = _generate(c, source, weights, prompts, sampling)
        scored = rewards.score(rollouts)
        rewards.check_weights()
    metrics = evaluation.summarize(scored, sampling.n)
    tokens = sum(r.response_length for r in rollouts)
    output.write_json_lines(out / "samples.jsonl", [_line(s) for s in scored])
    summary = {
        "policy": str(args.run or args.model),
        "step": weights.step if args.run else None,
        "data": list(c.data.val),
        **{f"rows_{name}": count for name, count in prompts.counts.items() if name != "rows"},
        "rewards": list(c.reward.functions),
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_tokens,
        "samples": len(scored),
        "tokens": tokens,
        "seconds": seconds,
        "metrics": metrics,
    }
    output.write_json(out / "metrics.json", summary)
    Console(width=1000, highlight=False).print(table(metrics))  # a narrow one would cut the numbers
    failed = sum(s.reward is None for s in scored)
    console.out(
        f"{len(prompts)} prompts x {sampling.n} = {len(scored)} samples"
        + (f", {failed} of them without a reward, which count 0" if failed else "")
        + f"\n{tokens:,} tokens in {seconds:.1f} s, compilation included: {tokens / seconds:,.0f} tok/s\n"
        f"  metrics  {out / 'metrics.json'}\n  samples  {out / 'samples.jsonl'}"
    )


def _parser() -> Parser:
    from pathlib import Path

    from jaxrl_llm import arguments

    parser = arguments.Parser("evaluate")
    arguments.add_policy(parser)
    parser.add_argument("--data", action="append")
    parser.add_argument("--limit", type=arguments.at_least(0))
    parser.add_argument("--n", type=arguments.at_least(1))
    parser.add_argument("--temperature", type=arguments.temperature)
    parser.add_argument("--max_tokens", type=arguments.at_least(1))
    parser.add_argument("--out", type=Path)
    return parser


def _config(parser: Parser, args: argparse.Namespace, given: Any) -> Config:
    from jaxrl_llm import policy
    from jaxrl_llm.config_checks import validate

    c = policy.config_of(args.run, args.model, given.recipe, given.overrides)
    c.data.val = tuple(args.data) if args.data else c.data.val
    c.data.val_limit = c.data.val_limit if args.limit is None else args.limit
    c.data.max_response_length = args.max_tokens or c.data.max_response_length
    c.eval.n = args.n or c.eval.n
    c.eval.temperature = c.eval.temperature if args.temperature is None else args.temperature
    if not c.data.val:
        parser.error("there is nothing to evaluate on: give --data FILE")
    if c.eval.n > 1 and c.eval.temperature == 0:
        parser.error(
            f"{c.eval.n} samples of a prompt would all be the same at temperature 0: "
            "give --n 1 or a --temperature above 0"
        )
    validate(c, training=False)
    return c


def _prompts(c: Config, source: Source) -> Prompts:
    """The prompts. Sets config.data.max_prompt_length to the longest one's: the cache need be no longer."""
    from jaxrl_llm import assemble, policy
    from jaxrl_llm.models import huggingface

    prompts = assemble.prompts(c, source.tokenizer, c.data.val, sft=False, limit=c.data.val_limit)
    longest = max(len(p.token_ids) for p in prompts.records)
    limit = huggingface.decoder_config(source.hf).max_position
    policy.check_length(longest, c.data.max_response_length, limit, "the longest prompt")
    c.data.max_prompt_length = longest
    return prompts


def _weights(c: Config, source: Source, args: argparse.Namespace, *, own_mesh: bool) -> Weights:
    """The policy's weights, on the mesh that the command line asks for, or on any: a run's may be another machine's."""
    from jaxrl_llm import policy
    from jaxrl_llm.sharding.mesh import make_mesh

    mesh = make_mesh(c.mesh.to_dict()) if own_mesh else policy.any_mesh(policy.decoder(c, source, c.rollout.dtype))
    return policy.weights(c, source, mesh, trained=args.run is not None, step=args.step)


def _generate(
    c: Config, source: Source, weights: Weights, prompts: Prompts, sampling: Sampling
) -> tuple[list[Rollout], float]:
    """All rollouts, and the seconds that they took."""
    import time

    from rich.console import Console

    from jaxrl_llm import assemble, output

    requests = sampling.requests(prompts.records)
    c.rollout.slots = min(c.rollout.slots, len(requests))
    engine = assemble.engine(c, source, weights.model, weights.mesh)
    engine.load(weights.params, weights.step, weights.checksum)
    start = time.perf_counter()
    with output.progress(Console(stderr=True), len(requests)) as listener:
        rollouts = engine.generate(requests, sampling, listener)
    engine.close()
    return rollouts, time.perf_counter() - start


def _default_out(args: argparse.Namespace, step: int) -> Path:
    from pathlib import Path

    if args.run is not None:
        return args.run / "evaluations" / f"step_{step}"
    return Path("evaluations") / Path(args.model).expanduser().resolve().name


def _name(args: argparse.Namespace, step: int) -> str:
    return f"step {step} of {args.run}" if args.run is not None else args.model


def _line(s: Scored) -> dict[str, Any]:
    """What samples.jsonl says of one sample."""
    r = s.rollout
    return {
        "source": r.prompt.data_source,
        "row": r.prompt.row,
        "sample": r.sample,
        "prompt": r.prompt.text,
        "response": r.text,
        "ground_truth": r.prompt.ground_truth,
        "reward": s.reward,
        "components": dict(s.components),
        "prediction": s.prediction,
        "stop_reason": r.stop_reason,
        "response_length": r.response_length,
        "error": s.error,
    }


def table(metrics: Mapping[str, float]) -> Table:
    """A row a source and component, a column a metric."""
    from rich.markup import escape
    from rich.table import Table

    rows: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in metrics.items():
        source, component, metric = (["", *name.split("/", 1)[1].rsplit("/", 2)])[-3:]
        if "@" in metric:
            rows.setdefault((source, component), {})[metric] = value
    columns: Sequence[str] = list(dict.fromkeys(metric for row in rows.values() for metric in row))
    shown = Table()
    for title in ("source", "component"):
        shown.add_column(title)
    for metric in columns:
        shown.add_column(metric, justify="right")
    for (source, component), row in rows.items():
        cells = [f"{row[metric]:.3f}" if metric in row else "" for metric in columns]
        shown.add_row(escape(source), escape(component), *cells)
    return shown


def main() -> None:
    """Entry point."""
    from jaxrl_llm.cli import command

    command(run, sys.argv[1:], USAGE)


if __name__ == "__main__":
    main()
