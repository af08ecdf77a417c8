"""KL-Cov (The Entropy Mechanism, arXiv:2505.22617): entropy is kept up by holding back the tokens that would spend it.

    cov = (A - mean A)(log p - mean log p) of each token;  loss = mean over all tokens of -A ratio, + 1.0 |log ratio|
    for the fraction of 0.0002 of the tokens, at least one, with the highest cov.  A as in GRPO.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo"
    a.normalize_by_std = True
    a.loss = "kl_cov"
    a.kl_cov_ratio = 0.0002
    a.ppo_kl_coef = 1.0
    a.aggregation = "token-mean"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/kl_cov"
    return c
