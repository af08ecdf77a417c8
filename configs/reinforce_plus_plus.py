"""REINFORCE++ (arXiv:2501.03262): no critic, no groups; the whole batch is the baseline.

    return_t = sum over later tokens of rewards, -0.001 k1(policy, reference) at every token included
    A = (return - mean) / std over all tokens of the batch
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "reinforce_plus_plus"
    a.gamma = 1.0
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"
    a.kl_reward_coef = 0.001
    a.kl_reward_estimator = "k1"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/reinforce_plus_plus"
    return c
