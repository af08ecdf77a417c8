"""GRPO (DeepSeekMath, arXiv:2402.03300): the samples of a prompt are each other's baseline.

    A = (r - mean(r of the prompt)) / std(r of the prompt), the same at every token
    loss = mean over responses of the mean over tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))
           + 0.001 k3(policy, reference)

Deviations: the weight of the KL is 0.001, as in verl's examples (paper: 0.04); dual clip as in verl.

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
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "seq-mean-token-mean"
    a.kl_loss_coef = 0.001
    a.kl_estimator = "k3"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/grpo"
    return c
