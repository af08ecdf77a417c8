"""GMPO (arXiv:2507.20673): the geometric mean of a response's token ratios, each clipped, not the arithmetic one.

    s = exp(mean over tokens of the log-ratio, clipped to [-0.4, 0.4] on the side that the advantage's sign asks for)
    loss = mean over responses of -A s, A as in GRPO

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "geo_mean"
    a.clip_ratio_low = a.clip_ratio_high = 0.4


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/gmpo"
    return c
