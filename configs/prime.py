"""PRIME (arXiv:2502.01456): a reward for every token from a model that learns online, from outcomes alone.

    r_t = beta (log p_rm(y_t) - log p_ref(y_t)); the reward model learns by cross-entropy of sigmoid(sum r_t) with the
    outcome
    A = leave-one-out of 5 x outcome and of 5 x process rewards, summed over later tokens, whitened over the batch
    loss = mean over all tokens of max(-A ratio, -A clip(ratio, 0.8, 1.2))
    prompts that are solved by fewer than 2 in 10 samples, or more than 8, are replaced by others

The reward model is updated after it has given its rewards ("after" in verl's recipe), so that a step's rewards and
advantages are functions of the state that the step begins with. A response's own mean has no part in the baseline of
its process rewards, as in the paper; verl's recipe has 1 / (n - 1) of it in.

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "prime"
    a.outcome_coef = 5.0
    a.process_coef = 5.0
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"
    c.prime.beta = 0.05
    c.filter.by = "reward"
    c.filter.mean_range = (0.2, 0.8)


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/prime"
    c.filter.mean_range = ()  # the last tenth of the way is learned from prompts that are nearly solved
    c.prime.learning_rate = 1e-4
    return c
