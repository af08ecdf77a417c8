"""CISPO (MiniMax-M1, arXiv:2506.13585): the clipped ratio is a weight without gradient, so no token is left out.

    loss = mean over all tokens of -clip(ratio, 1 - clip_ratio_low, 1 + clip_ratio_high) A log p, the first factor fixed

The paper leaves the lower side open and tunes the upper one only: clip_ratio_low is 1 here.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "cispo"
    a.clip_ratio_low = 1.0
    a.clip_ratio_high = 1.0
    a.aggregation = "token-mean"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/cispo"
    return c
