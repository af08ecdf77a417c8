"""DPPO (arXiv:2602.04879): the trust region is a bound on how far a token's probability has moved, not on its ratio.

    loss = mean over all tokens of -A min(ratio, 20), without gradient where the probability has moved by more than 0.05
    down or 0.08 up, in the direction that the advantage pushes (total variation);  A as in GRPO

config.algorithm.loss=dppo_kl bounds the KL divergence of the two-way choice, this token or another, instead.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "dppo_tv"
    a.clip_ratio_low = 0.05
    a.clip_ratio_high = 0.08
    a.clip_ratio_c = 20.0
    a.aggregation = "token-mean"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/dppo"
    return c
