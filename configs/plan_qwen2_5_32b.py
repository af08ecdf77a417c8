"""Qwen2.5-32B, GRPO with a KL term, 512 sequences of 512 + 1,536 tokens a step: a plan for 64 TPUs.

python -m jaxrl_llm.plan --config plan_qwen2_5_32b --topology v5p:4x4x4
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs.plan_qwen2_5_7b import setup


def get_config() -> Config:
    c = setup("qwen2.5-32b")
    c.learner.micro_batch_rows = 64
    c.rollout.tensor = 4
    c.rollout.slots = 512
    return c
