"""The models beside the policy: PPO's critic and PRIME's reward model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import segments
from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.metrics import finish
from tests.builders import make_learner, make_objective, make_scored, mesh

GAE = {"advantage": "gae", "constants": {"gamma": 1.0, "lam": 1.0}}
PRIME = {"advantage": "prime"}


def spec(rows=4, *, packing=False, sequences=8, minis=1, length=24):
    return PackSpec(minis, sequences, rows, (length,), packing)


def ppo(on=None, *, critic=None, **more):
    return make_learner(on or mesh(), make_objective(**GAE), critic=critic or {}, **more)


def prepared(learner, scored, pack_spec):
    return learner.prepare(learner.place(pack(scored, pack_spec)))


def same(actual, expected, rtol=1e-4):
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale), actual, expected)


def test_a_fresh_critic_says_0_and_its_targets_are_the_rewards():
    batch, metrics = prepared(ppo(), make_scored(failed=(3,)), spec())
    mask = np.asarray(batch.mask)
    assert (np.asarray(batch.values) == 0).all()
    rewards = np.asarray(segments.to_tokens(batch.sequences.rewards, batch.sequences.sequence_ids))
    np.testing.assert_allclose(np.asarray(batch.returns)[mask], rewards[mask], rtol=1e-6)
    assert finish(metrics)["critic/vf_explained_var"] == pytest.approx(
        1 - np.var(rewards[mask]) / np.var(rewards[mask]), abs=1e-6
    )


def test_the_critic_learns_the_returns():
    learner = ppo(learning_rate=3e-3, critic={"warmup_steps": 1000, "epochs": 2})
    scored = make_scored()
    explained = []
    for _ in range(40):
        batch, metrics = prepared(learner, scored, spec(packing=True, length=48))
        explained.append(finish(metrics)["critic/vf_explained_var"])
        last = finish(learner.update(batch))
    assert explained[0] == pytest.approx(0, abs=1e-6)
    assert explained[-1] > 0.85  # not 1: before the first action all samples of a prompt have the same value
    assert last["critic/vf_loss"] < 0.02
    mask = np.asarray(batch.mask)
    np.testing.assert_allclose(
        finish(metrics)["critic/vf_explained_var"],
        1 - np.var((batch.returns - batch.values)[mask]) / np.var(np.asarray(batch.returns)[mask]),
        rtol=1e-4,
    )


def test_the_policy_waits_while_the_critic_warms_up():
    learner = ppo(critic={"warmup_steps": 2, "epochs": 3})
    pack_spec = spec(minis=2)
    before = jax.device_get(learner.state.params)
    for step in range(3):
        assert int(learner.state.step) == 0
        batch, _ = prepared(learner, make_scored(), pack_spec)
        metrics = finish(learner.update(batch))
        assert int(learner.state.critic.step) == (step + 1) * 2 * 3
        assert ("actor/loss" in metrics) == (step == 2)
        if step < 2:
            jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state.params), before)
    assert int(learner.state.step) == 2


def test_values_do_not_depend_on_the_sampling_temperature():
    scored, values = make_scored(), []
    for temperature in (1.0, 0.5):
        learner = make_learner(mesh(), make_objective(temperature=temperature, **GAE), critic={})
        learner.update(prepared(learner, scored, spec())[0])
        values.append(np.asarray(prepared(learner, scored, spec())[0].values))
    assert np.abs(values[0]).max() > 1e-3
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize(
    ("axes", "pack_spec"),
    [
        pytest.param({}, spec(2, packing=True, length=48), marks=pytest.mark.slow),
        ({"data": 2, "fsdp": 2, "tensor": 2}, spec(4, packing=True, length=48)),
    ],
    ids=["packed", "data 2, fsdp 2, tensor 2, packed"],
)
@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_updates_do_not_depend_on_micro_batches_packing_or_the_mesh(name, axes, pack_spec):
    def trained(on, pack_spec):
        learner = ppo(on) if name == "critic" else make_learner(on, make_objective(**PRIME), prime=True)
        for _ in range(2):
            metrics = finish(learner.update(prepared(learner, make_scored(failed=(3,)), pack_spec)[0]))
        return jax.device_get(getattr(learner.state, name).params), metrics

    expected, its_metrics = trained(mesh(), spec(8))
    params, metrics = trained(mesh(int(np.prod([*axes.values()])), **axes), pack_spec)
    same(params, expected)
    for key in (f"{name}/loss", f"{name}/grad_norm"):
        assert metrics[key] == pytest.approx(its_metrics[key], rel=1e-4), key


@pytest.mark.parametrize("name", ["critic", "reward_model"])
def test_they_are_sharded_like_the_policy_and_keep_their_places(name):
    on = mesh(8, fsdp=4, tensor=2)
    learner = ppo(on) if name == "critic" else make_learner(on, make_objective(**PRIME), prime=True)
    state = getattr(learner.state, name)
    kernel, of_policy = (x["layers"]["q"]["kernel"] for x in (state.params, learner.state.params))
    assert kernel.sharding == of_policy.sharding
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape == kernel.shape]
    assert len(moments) == 2
    assert all(m.sharding == kernel.sharding for m in moments)
    before = jax.tree.map(lambda x: (x.dtype, x.sharding), learner.state)
    learner.update(prepared(learner, make_scored(), spec())[0])
    assert jax.tree.map(lambda x: (x.dtype, x.sharding), learner.state) == before


def test_an_update_of_the_critic_that_is_not_finite_is_not_made_and_counted_as_its_own():
    learner = ppo()
    batch, _ = prepared(learner, make_scored(), spec())
    before = jax.device_get(learner.state.critic)
    metrics = finish(learner.update(batch._replace(returns=batch.returns * np.nan)))
    assert metrics["critic/skipped_updates"] == 1
    assert metrics["actor/skipped_updates"] == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(learner.state.critic), before)
    assert int(learner.state.step) == 1


def test_the_reward_model_begins_as_the_policy_and_learns_the_outcomes():
    learner = make_learner(mesh(), make_objective(**PRIME), prime=True, learning_rate=3e-3)
    scored = make_scored(failed=(3,))
    batch, metrics = prepared(learner, scored, spec())
    assert finish(metrics)["critic/process_rewards/mean"] == 0
    losses, accuracies = [], []
    for _ in range(40):
        metrics = finish(learner.update(batch))
        losses.append(metrics["reward_model/loss"])
        accuracies.append(metrics["reward_model/accuracy"])
    assert losses[0] == pytest.approx(np.log(2), rel=1e-5)
    assert losses[-1] < 0.2
    assert accuracies[-1] == 1
    # What it now says of the tokens adds up to more where the outcome was right.
    s = batch.sequences
    rewards = learner.programs.views(learner.state, learner.reference, s).process_rewards
    sums = np.asarray(segments.sequence_sum(rewards, s.action_mask, s.sequence_ids, 8))
    right, wrong = (sums[[i for i, x in enumerate(scored) if x.reward == r]] for r in (1.0, 0.0))
    assert right.min() > 0 > wrong.max()


def test_the_reward_models_reference_is_the_first_policy_not_the_present_one():
    learner = make_learner(mesh(), make_objective(**PRIME), prime=True)
    first, _ = prepared(learner, make_scored(), spec())
    learner.update(first)
    second, _ = prepared(learner, make_scored(), spec())
    np.testing.assert_array_equal(second.reference_logprobs, first.reference_logprobs)
    assert np.abs(np.asarray(second.old_logprobs - first.old_logprobs)).max() > 1e-3


def test_nothing_compiles_again():
    learner = ppo()
    for seed in range(3):
        batch, _ = prepared(learner, make_scored(seed=seed), spec(2, packing=True, length=48))
        learner.update(batch)
    p = learner.programs
    assert [f._cache_size() for f in (p.prepare, p.update, p.update_beside["critic"])] == [1, 1, 1]
    assert jnp.isfinite(learner.state.critic.params["value"]).all()
