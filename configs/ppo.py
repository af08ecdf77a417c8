"""PPO (Schulman et al. 2017, arXiv:1707.06347) with a critic and generalised advantage estimation.

    delta_t = r_t + gamma V(s_t+1) - V(s_t);  A_t = sum over k of (gamma lam)^k delta_t+k, whitened over the batch
    loss = max(-A ratio, -A clip(ratio, 0.8, 1.2));  critic: 0.5 max((V - R)^2, (clip(V, V_old +- 0.5) - R)^2)

Dual clip (arXiv:1912.09729) bounds the loss at negative advantages, as in verl. The critic begins as the policy, with a
head that says 0; it learns alone for the first steps. No KL: Ouyang et al. (arXiv:2203.02155) put one in the reward
(config.algorithm.kl_reward_coef).

On the quickstart's task; for your own, call `apply` on your config.
"""

from jaxrl_llm.config import Config
from jaxrl_llm.configs import quickstart


def apply(c: Config) -> None:
    """Makes a config one of this algorithm."""
    a = c.algorithm
    a.advantage = "gae"
    a.gamma = 1.0
    a.lam = 1.0  # rewards come at the end of the response: less makes their beginnings learn from the critic alone
    a.loss = "vanilla"
    a.clip_ratio_low = a.clip_ratio_high = 0.2
    a.aggregation = "token-mean"
    c.critic.warmup_steps = 10


def get_config() -> Config:
    c = quickstart.get_config()
    apply(c)
    c.run_dir = "runs/ppo"
    c.critic.learning_rate = 1e-3
    return c
