"""GPG (arXiv:2504.02546): the plain policy gradient of group-relative rewards: no ratio, no clip, no KL.

    A = (r - mean(r of the prompt)) / f_norm * (samples / samples with a reward other than 0)
    loss = mean over all tokens of -A log p

One update a batch: without a ratio nothing tells of steps between.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "gpg"
    a.f_norm = 1.0
    a.loss = "gpg"
    a.aggregation = "token-mean"
    c.learner.mini_batch_size = c.data.train_batch_size
    c.learner.epochs = 1


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/gpg"
    return c
