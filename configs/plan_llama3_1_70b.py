"""Llama-3.1-70B, GRPO with a KL term, 512 sequences of up to 8,192 tokens a step: a plan for a part of a pod.

    python -m jaxrl_llm.plan --config plan_llama3_1_70b --topology v5p:4x4x8
    python -m jaxrl_llm.plan --config plan_llama3_1_70b --topology v5e:16x16 --config.mesh.tensor=8 \
        --config.learner.micro_batch_rows=32 --config.rollout.tensor=32
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs.plan_qwen2_5_7b import setup


def get_config() -> Config:
    c = setup("llama3.1-70b")
    c.data.max_prompt_length = 1024
    c.data.max_response_length = 7168
    c.learner.row_lengths = (8192,)
    c.learner.micro_batch_rows = 128
    c.rollout.tensor = 8
    c.rollout.slots = 256
    return c
