"""The door's part that builds what learns: from a validated config to an objective and a learner."""

from __future__ import annotations

import optax

from jaxrl_llm import formulas, optimizer
from jaxrl_llm.config import Config
from jaxrl_llm.learner.actor import Actor, Objective, RewardKL
from jaxrl_llm.learner.critic import Critic, ValueObjective
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.learner.programs import Programs
from jaxrl_llm.learner.reward_model import RewardModel
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.policy import Source, critic_params, critic_source, decoder, initial_params
from jaxrl_llm.sharding.rules import TRAINING, AnyMesh, Layout
from jaxrl_llm.types import UserError


def objective(c: Config) -> Objective:
    """What the policy learns."""
    a, k = c.algorithm, c.rollout_correction
    length_norm = float(a.length_norm or c.data.max_response_length)
    if c.task == "sft":
        return Objective(formulas.loss("sft", {}), None, a.aggregation, length_norm, temperature=1.0, seed=c.seed)
    loss, advantage = formulas.of_config(a)
    if "components" in advantage.reads and not a.components:
        raise UserError(
            f"config.algorithm.advantage={a.advantage!r} reads reward components: name them in "
            "config.algorithm.components"
        )
    correction = {key: value for key, value in k.items() if key != "bypass"}
    return Objective(
        loss=loss,
        advantage=advantage,
        aggregation=a.aggregation,
        length_norm=length_norm,
        temperature=c.rollout.temperature,
        kl_coef=a.kl_loss_coef,
        kl_estimator=a.kl_estimator,
        entropy_coef=a.entropy_coef,
        reward_kl=RewardKL(a.kl_reward_coef, a.kl_reward_estimator, a.kl_target, a.kl_horizon)
        if a.kl_reward_coef
        else None,
        correction=correction if k.rollout_is or k.rollout_rs else None,
        bypass=k.bypass,
        reweight=(a.reweight, a.reweight_power) if a.reweight else None,
        seed=c.seed,
    )


def programs(c: Config, source: Source, mesh: AnyMesh, minimised: Objective, total_steps: int) -> Programs:
    """What is compiled for the policy; for the critic and the reward model if the advantage reads what they say."""
    reads = minimised.advantage.reads if minimised.advantage else frozenset()
    minis = c.data.train_batch_size // c.learner.mini_batch_size
    model = _model(c, source, mesh)
    made = _optimizer(c, c.optimizer.learning_rate, total_steps * minis * c.learner.epochs)
    return Programs(
        mesh,
        minimised,
        Actor(model, mesh, *made, minimised, logits_chunk=c.model.logits_chunk),
        critic=_critic(c, source, mesh, total_steps * minis) if "values" in reads else None,
        reward_model=RewardModel(
            model,
            mesh,
            *_optimizer(c, c.prime.learning_rate, total_steps * minis),
            beta=c.prime.beta,
            temperature=minimised.temperature,
            logits_chunk=c.model.logits_chunk,
        )
        if "process_rewards" in reads
        else None,
    )


def learner(c: Config, source: Source, compiled: Programs) -> Learner:
    """The models with their first weights."""
    critic = compiled.critic
    return Learner(
        compiled,
        initial_params(c, source, compiled.actor.model, compiled.mesh),
        epochs=c.learner.epochs,
        critic_params=critic and critic_params(c, critic_source(c, source), critic.model, compiled.mesh),
    )


def _model(c: Config, source: Source, mesh: AnyMesh, *, value_head: bool = False) -> Model:
    layout = Layout(TRAINING, mesh)
    return decoder(c, source, c.model.dtype, remat=c.model.remat, layout=layout, value_head=value_head)


def _critic(c: Config, source: Source, mesh: AnyMesh, updates: int) -> Critic:
    k = c.critic
    value = ValueObjective(
        aggregation=k.aggregation,
        length_norm=float(c.algorithm.length_norm or c.data.max_response_length),
        value_clip=k.value_clip,
        warmup_steps=k.warmup_steps,
        epochs=k.epochs,
    )
    model = _model(c, critic_source(c, source), mesh, value_head=True)
    return Critic(model, mesh, *_optimizer(c, k.learning_rate, updates * k.epochs), value)


def _optimizer(
    c: Config, learning_rate: float, total_updates: int
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """What config.optimizer describes, with this peak learning rate."""
    o = c.optimizer
    rate = optimizer.schedule(
        o.schedule,
        learning_rate=learning_rate,
        warmup_steps=o.warmup_steps,
        total_updates=total_updates,
        final_fraction=o.final_fraction,
    )
    made = optimizer.adamw(
        rate,
        beta1=o.beta1,
        beta2=o.beta2,
        epsilon=o.epsilon,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm,
        first_moment_dtype=o.first_moment_dtype,
    )
    return made, rate
