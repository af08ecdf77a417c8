"""GSPO (arXiv:2507.18071): importance ratios of whole sequences, with a clip range to match.

    s = exp(mean over tokens of log ratio), with the gradient of each token's own log-probability
    loss = mean over responses of max(-A s, -A clip(s, 1 - 0.0003, 1 + 0.0004)), A as in GRPO

No KL, as in the paper.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "gspo"
    a.clip_ratio_low = 0.0003
    a.clip_ratio_high = 0.0004


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/gspo"
    return c
