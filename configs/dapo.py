"""DAPO (arXiv:2503.14476): GRPO with a higher upper clip, dynamic sampling, token-level loss and soft length penalty.

    A = (r - mean(r of the prompt)) / std(r of the prompt)
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.28)); no KL
    prompts whose samples all have the same reward are replaced by others
    reward component "overlong": 0, falling to -1 over the last tokens before the longest response

Dynamic sampling looks at the reward before the length penalty. Where 10 batches do not hold enough prompts that tell
something, others fill the batch; config.filter.at_bound="error" ends the run instead, as verl does. The paper's
overlong filtering, which it compares with the penalty, is config.algorithm.mask_truncated.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "vanilla"
    a.clip_ratio_low = 0.2
    a.clip_ratio_high = 0.28
    a.clip_ratio_c = 10.0
    a.aggregation = "token-mean"
    c.filter.by = "reward"
    c.filter.max_batches = 10
    c.reward.overlong_buffer = c.data.max_response_length // 5  # 4096 of 20480 tokens in the paper
    c.reward.overlong_factor = 1.0


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/dapo"
    return c
