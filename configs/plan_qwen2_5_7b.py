"""Qwen2.5-7B, GRPO with a KL term, 512 sequences of 512 + 1,536 tokens a step: a plan for 16 small TPUs.

    python -m jaxrl_llm.plan --config plan_qwen2_5_7b --topology v5e:4x4

`setup` makes any config one of this kind; other presets: jaxrl_llm/models/presets.py.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import base, grpo
from jaxrl_llm.models.presets import preset


def setup(name: str) -> Config:
    """GRPO in bfloat16 with a preset's shape."""
    c = base.get_config()
    grpo.apply(c)
    c.model.hf_config = preset(name)
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.rollout.dtype = "bfloat16"
    c.data.max_prompt_length = 512
    c.data.max_response_length = 1536
    c.data.train_batch_size = 64
    c.learner.mini_batch_size = 64
    c.learner.row_lengths = (2048,)
    return c


def get_config() -> Config:
    c = setup("qwen2.5-7b")
    c.learner.micro_batch_rows = 16
    c.rollout.tensor = 4
    c.rollout.slots = 256
    return c
