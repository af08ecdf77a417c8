"""REINFORCE++ with a baseline (arXiv:2501.03262): the prompt's mean goes off, then the whole batch normalises.

    A = (r - mean(r of the prompt)), then whitened over all tokens of the batch
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2)) + 0.001 k2(policy, reference)

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "reinforce_plus_plus_baseline"
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"
    a.kl_loss_coef = 0.001
    a.kl_estimator = "k2"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/reinforce_plus_plus_baseline"
    return c
