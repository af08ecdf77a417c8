"""Small real parts that several tests need."""

import functools

import jax
import numpy as np

from jaxrl_llm import formulas, optimizer
from jaxrl_llm.learner.actor import Actor, Objective
from jaxrl_llm.learner.critic import Critic, ValueObjective
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.programs import Programs
from jaxrl_llm.learner.reward_model import RewardModel
from jaxrl_llm.learner.trainable import param_shardings
from jaxrl_llm.models.config import DecoderConfig, Rope
from jaxrl_llm.models.decoder import build
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAINING, Layout
from jaxrl_llm.types import Prompt, Rollout, Scored

TINY = DecoderConfig(
    vocab_size=64,
    num_layers=2,
    embed=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp=64,
    norm_epsilon=1e-6,
    rope=Rope(),
    max_position=64,
    qkv_bias=True,
    tie_embeddings=True,
)


def mesh(devices=1, **axes):
    return make_mesh(axes, jax.devices()[:devices])


CONSTANTS = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}


def make_objective(*, loss="vanilla", advantage="grpo", constants=None, **changes):
    """`advantage` None: demonstrations."""
    constants = CONSTANTS | (constants or {})
    values = {
        "loss": formulas.loss(loss, constants),
        "advantage": advantage and formulas.advantage(advantage, constants),
        "aggregation": "token-mean",
        "length_norm": 16.0,
        "temperature": 1.0,
        **changes,
    }
    return Objective(**values)


def make_learner(
    on, objective, *, learning_rate=1e-2, epochs=1, remat="none", dtype="float32", seed=0, critic=None, prime=False
):
    """`critic`: changes of its ValueObjective; None: no critic."""
    model = build(TINY, dtype=dtype, remat=remat, layout=Layout(TRAINING, on))
    rate = optimizer.schedule(
        "constant", learning_rate=learning_rate, warmup_steps=0, total_updates=1, final_fraction=1.0
    )
    transform = optimizer.adamw(rate, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01, max_grad_norm=1.0)
    value, value_params = None, None
    if critic is not None:
        value_model = build(TINY, dtype=dtype, remat=remat, layout=Layout(TRAINING, on), value_head=True)
        value = {"aggregation": "token-mean", "length_norm": 16.0, "value_clip": 0.5, "warmup_steps": 0, "epochs": 1}
        value = Critic(value_model, on, transform, rate, ValueObjective(**value | critic))
        value_params = _random_params(seed) | {"value": np.zeros(TINY.embed, np.float32)}
        value_params = jax.device_put(value_params, param_shardings(value_model, on))
    programs = Programs(
        on,
        objective,
        Actor(model, on, transform, rate, objective, logits_chunk=8),
        critic=value,
        reward_model=RewardModel(model, on, transform, rate, beta=0.5, temperature=1.0, logits_chunk=8)
        if prime
        else None,
    )
    params = jax.device_put(_random_params(seed), param_shardings(model, on))
    return Learner(programs, params, epochs=epochs, critic_params=value_params)


@functools.cache
def _random_params(seed):
    return jax.device_get(jax.jit(build(TINY).init)(jax.random.key(seed)))


def make_scored(groups=4, samples=2, *, seed=0, shortest=3, longest=14, failed=()):
    """Ragged sequences with random tokens, rewards, sampler log-probs and a hole in every third one's actions."""
    rng = np.random.default_rng(seed)
    out = []
    for i in range(groups * samples):
        group, sample = divmod(i, samples)
        prompt_ids = np.random.default_rng(group).integers(0, TINY.vocab_size, 2 + group % 3).astype(np.int32)
        n = int(rng.integers(shortest, longest + 1))
        ids = np.concatenate([prompt_ids, rng.integers(0, TINY.vocab_size, n)]).astype(np.int32)
        actions = np.arange(len(ids)) >= len(prompt_ids)
        if i % 3 == 0:
            actions[len(prompt_ids) + 1] = False
        rollout = Rollout(
            prompt=Prompt(group, group, prompt_ids, "", "test"),
            sample=sample,
            token_ids=ids,
            action_mask=actions,
            logprobs=np.where(actions, rng.normal(-4, 0.3, len(ids)), 0).astype(np.float32),
            versions=np.where(actions, 0, -1).astype(np.int32),
            stop_reason="length",
            text="",
        )
        out.append(Scored(rollout, {"acc": 0.0}, None if i in failed else float(rng.integers(0, 2))))
    return out
