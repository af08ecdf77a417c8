"""GRPO on GSM8K with a rule-based reward.

    python scripts/prepare_gsm8k.py train.jsonl test.jsonl --out data/gsm8k
    python -m jaxrl_llm.train --config grpo_gsm8k --config.model.path=FOLDER

The JSONL files are those of github.com/openai/grade-school-math. Set model.path to any instruction-tuned model of a
known family (for a try without an accelerator: scripts/fetch_smollm2.py). Sizes suit a 0.5 B model on one accelerator
host.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import base


def get_config() -> Config:
    c = base.get_config()
    c.run_dir = "runs/grpo_gsm8k"
    c.total_steps = 0
    c.total_epochs = 15
    c.model.path = "Qwen/Qwen2.5-0.5B-Instruct"
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.data.train = ("data/gsm8k/train.parquet",)
    c.data.val = ("data/gsm8k/test.parquet",)
    c.data.max_prompt_length = 512
    c.data.max_response_length = 1024
    c.data.train_batch_size = 128
    c.rollout.n = 8
    c.rollout.slots = 256
    c.rollout.dtype = "bfloat16"
    c.reward.functions = ("gsm8k_flexible", "format")
    c.reward.weights = {"acc": 1.0, "format": 0.1}
    c.reward.kwargs = {"format": {"pattern": r"#### -?[0-9.,]+", "whole": False}}
    c.algorithm.kl_loss_coef = 1e-3
    c.learner.mini_batch_size = 64
    c.learner.micro_batch_rows = 16
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.eval.every = 20
    c.eval.temperature = 0.0
    c.checkpoint.every = 40
    return c
