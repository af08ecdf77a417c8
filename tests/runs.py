"""Whole runs that take seconds."""

import io
import json

import jax
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm.assemble import assemble
from jaxrl_llm.controller import train


def small(run_dir, recipe="quickstart", **changes):
    c = configs.load(recipe)
    c.run_dir = str(run_dir)
    c.mesh = {"data": 1, "fsdp": 2, "expert": 1, "context": 1, "tensor": 4}
    c.data.train = ("arithmetic:count=20,split=train",)
    c.data.val = ("arithmetic:count=6,split=test",)
    c.data.train_batch_size = 8
    c.learner.mini_batch_size = 4
    c.learner.micro_batch_rows = 2
    c.rollout.n = 2
    c.rollout.slots = 8
    c.rollout.prefill_batch = 4
    c.learner.row_lengths = (16,)
    c.reward.workers = 1
    c.total_steps = 4
    c.eval.every = 2
    c.checkpoint.every = 2
    c.checkpoint.keep_last = 4
    c.log.tensorboard = False
    for key, value in changes.items():
        configs.override(c, key, str(value))
    return c


def run(c):
    out = io.StringIO()
    parts = assemble(c, Console(file=out, width=300))
    with parts.resources:
        train(parts.run)
    lines = [json.loads(line) for line in (parts.run_dir / "metrics.jsonl").read_text().splitlines()]
    return lines, out.getvalue(), jax.device_get(parts.run.pool.state())


def comparable(lines):
    """Without what measures time or this process."""
    return [
        {k: v for k, v in line.items() if not k.startswith(("timing_s/", "perf/throughput", "perf/compilations"))}
        for line in lines
    ]
