"""RLOO (arXiv:2402.14740): REINFORCE with the mean of the prompt's other samples as baseline.

    A = r - mean(r of the other samples);  r includes -0.001 k1(policy, reference)
    loss = mean over responses of the sum over tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))

Deviation: the paper takes one update a batch, where the ratio is 1 and this is REINFORCE; the clip is for several.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "rloo"
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "seq-mean-token-sum"
    a.kl_reward_coef = 0.001
    a.kl_reward_estimator = "k1"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/rloo"
    return c
