"""Pass@k training (arXiv:2503.19595): only the best sample of a prompt learns, by what it adds to the second best.

    A(best) = (r_best - r_second) / std(r of the prompt), 0 for all others
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))

With rewards of 0 and 1 a prompt teaches only if exactly one of its samples is right, so that what most samples solve is
left as it is: with few samples a prompt, as here, that is late.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "grpo_passk"
    a.normalize_by_std = True
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/passk"
    c.rollout.n = 2
    c.data.train_batch_size = 256
    c.learner.mini_batch_size = 128
    return c
