"""Says whether a run fits, before devices are rented: `python -m jaxrl_llm.plan --config NAME --topology v5e:4x4`."""

from __future__ import annotations

import json
import os
import sys

USAGE = """usage: python -m jaxrl_llm.plan --config NAME --topology NAME [--rollout_topology NAME]
                                [--config.KEY=VALUE ...] [--json] [--debug]

  --config NAME            a recipe, as in training; the model's weights and the data need not be there
  --topology NAME          devices of the run: v5e:4x4, v5p:4x4x8, gpu:8xH100, cpu:8
  --rollout_topology NAME  devices of the engine's own; without it, it shares the learner's
  --config.KEY=VALUE       changes one key
  --json                   prints one JSON object

Needs no accelerator. For TPUs, the update, the log-probabilities, the prefill, the decoding and the weight sync are
compiled by the TPU compiler (pip install 'jaxrl-llm[tpu]'); for GPUs they are estimated by formula. Prints memory by
phase, work and time by program at the chip's peak rates, a verdict, and which keys to change. Exits with 0 if the run
fits, 3 if not.
Recipes with real models' shapes: plan_qwen2_5_7b, plan_qwen2_5_32b, plan_llama3_1_70b."""

DOES_NOT_FIT = 3


def run(argv: list[str]) -> None:
    """Plans by these arguments."""
    from jaxrl_llm import config as configs
    from jaxrl_llm.arguments import Parser

    c, rest = configs.parse(argv)
    parser = Parser("plan")
    parser.add_argument("--topology")
    parser.add_argument("--rollout_topology")
    parser.add_argument("--json", action="store_true")
    args = parser.read(rest)
    if args.topology is None:
        parser.error("expected --topology NAME, such as v5e:4x4")
    _without_devices([args.topology, args.rollout_topology or ""])
    from rich.console import Console

    from jaxrl_llm.config_checks import validate
    from jaxrl_llm.planning import build, report
    from jaxrl_llm.planning.chips import topology
    from jaxrl_llm.policy import shape_source

    validate(c, files=False)
    source = shape_source(c)
    console = Console(stderr=args.json, soft_wrap=False, highlight=False)
    learner_on = topology(args.topology)
    engine_on = topology(args.rollout_topology) if args.rollout_topology else None
    plan = build.make(c, source, learner_on, engine_on, lambda text: console.print(text, style="dim"))
    if args.json:
        print(json.dumps(report.as_json(plan)))
    else:
        report.show(plan, console)
    if not plan.fits:
        sys.exit(DOES_NOT_FIT)


def _without_devices(topologies: list[str]) -> None:
    """JAX shall take no accelerator that may be here, and have as many host devices as are asked for."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    hosts = [int(name[4:]) for name in topologies if name.startswith("cpu:") and name[4:].isdigit()]
    if hosts:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={max(hosts)}".strip()


def main() -> None:
    """The command."""
    from jaxrl_llm.cli import command

    command(run, sys.argv[1:], USAGE)


if __name__ == "__main__":
    main()
