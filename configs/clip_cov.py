"""Clip-Cov (The Entropy Mechanism, arXiv:2505.22617): entropy is kept up by leaving out tokens that would spend it.

    cov = (A - mean A)(log p - mean log p) of each token;  of those with 1 < cov < 5 a fraction of 0.0002 of all tokens,
    chosen at random, has no gradient;  the others: max(-A ratio, -A clip(ratio, 0.8, 1.2)), mean over all tokens

At least one token is left out of each update, where there is one in the range. A as in GRPO.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "clip_cov"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.clip_cov_ratio = 0.0002
    a.clip_cov_lb = 1.0
    a.clip_cov_ub = 5.0
    a.aggregation = "token-mean"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/clip_cov"
    return c
