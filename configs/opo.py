"""OPO (arXiv:2505.23585): exactly on-policy, with the baseline that minimises the gradient's variance.

    A = r - sum(length r) / sum(length), over the prompt's samples
    loss = mean over all tokens of -A ratio, one update a batch, so that the ratio is 1; no KL, no entropy bonus

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "opo"
    a.loss = "vanilla"
    a.aggregation = "token-mean"
    c.learner.mini_batch_size = c.data.train_batch_size  # one update a batch
    c.learner.epochs = 1


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/opo"
    return c
