"""SAPO (arXiv:2511.20347): a soft gate on the ratio instead of a clip, steeper where the advantage is negative.

    gate(x) = sigmoid(tau (x - 1)) 4 / tau, tau = 1.0 where A > 0, else 1.05
    loss = mean over responses of the mean over tokens of -A gate(ratio), A as in GRPO

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "sapo"
    a.tau_pos = 1.0
    a.tau_neg = 1.05


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/sapo"
    return c
