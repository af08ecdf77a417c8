"""ReMax (arXiv:2310.10505): REINFORCE whose baseline is the reward of the greedy answer to the same prompt.

    A = r - r(greedy answer);  r includes -0.001 k1(policy, reference)
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))

Deviations: several samples a prompt (paper: one); the clip, for several updates a batch.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "remax"
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"
    a.kl_reward_coef = 0.001
    a.kl_reward_estimator = "k1"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/remax"
    return c
