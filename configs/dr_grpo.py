"""Dr. GRPO (arXiv:2503.20783): GRPO without its two biases, by the prompt's difficulty and by the response's length.

    A = r - mean(r of the prompt)
    loss = mean over responses of the sum over tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2)) / longest response

No KL, as in the paper; dual clip as in verl.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = False
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "seq-mean-token-sum-norm"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/dr_grpo"
    return c
