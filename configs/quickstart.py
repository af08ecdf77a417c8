"""GRPO teaches a tiny model to add: the first thing to run, and a template for runs of your own.

The base model (0.8 M parameters, made by sft_arithmetic.py) has learned from demonstrations full of mistakes: sampled,
it answers four in ten sums of two numbers below 100 rightly. After the run it answers more than nine in ten of the
held-out ones. Three minutes on two CPU cores.
"""

from pathlib import Path

import jaxrl_llm
from jaxrl_llm.config import Config
from jaxrl_llm.configs import base


def get_config() -> Config:
    c = base.get_config()
    c.run_dir = "runs/quickstart"
    c.total_steps = 200
    c.model.path = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic_base")
    c.data.train = ("arithmetic:op=+,min=0,max=99,count=9000,split=train",)
    c.data.val = ("arithmetic:op=+,min=0,max=99,count=256,split=test",)
    c.data.max_prompt_length = 8
    c.data.max_response_length = 8
    c.data.train_batch_size = 64
    c.rollout.n = 8
    c.rollout.slots = 512
    c.rollout.prefill_batch = 64
    c.rollout.steps_per_dispatch = 8
    c.reward.functions = ("exact_match",)
    c.learner.mini_batch_size = 32
    c.learner.micro_batch_rows = 16
    c.learner.row_lengths = (64,)
    c.optimizer.learning_rate = 3e-4
    c.optimizer.warmup_steps = 5
    c.optimizer.schedule = "cosine"
    c.optimizer.final_fraction = 0.1
    c.eval.every = 20
    c.checkpoint.every = 40
    c.log.samples_every = 20
    return c
