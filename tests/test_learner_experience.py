"""From what the models say of a batch to advantages, masks and weights."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import segments
from jaxrl_llm.algorithms.advantages import Advantages
from jaxrl_llm.algorithms.kl import kl_penalty
from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.learner.actor import RewardKL
from jaxrl_llm.learner.experience import TokenViews, at_last_token, complete
from jaxrl_llm.metrics import finish
from tests.builders import make_objective, make_scored

PADDED = PackSpec(1, 8, 8, (24,), packing=False)
PACKED = PackSpec(1, 8, 4, (48,), packing=True)
BOTH = pytest.mark.parametrize("pack_spec", [PADDED, PACKED], ids=["padded", "packed"])


def batch_of(scored, pack_spec=PADDED):
    return jax.tree.map(jnp.asarray, pack(scored, pack_spec))


def views_of(batch, **more):
    """The learner's log-probabilities are a little off the sampler's."""
    shift = 0.2 * jnp.cos(jnp.arange(64.0))[batch.token_ids]
    return TokenViews(jnp.where(batch.action_mask, batch.sampler_logprobs + shift, 0), **more)


def showing(field, **changes):
    """An objective whose advantages are a field of the experience."""
    return replace(
        make_objective(**changes), advantage=lambda e: Advantages(getattr(e, field), jnp.zeros_like(e.token_rewards))
    )


KEY = jax.random.key(0)


@BOTH
def test_a_sequences_reward_stands_at_its_last_action(pack_spec):
    scored = [replace(s, reward=1.0 + i) for i, s in enumerate(make_scored())]
    batch = batch_of(scored, pack_spec)
    rejected = batch.action_mask & ~((batch.sequence_ids == 2) & (batch.positions > 6))
    placed = np.asarray(at_last_token(batch.rewards, rejected, batch.sequence_ids))
    assert (placed != 0).sum() == 8
    for i, s in enumerate(scored):
        (at,) = np.asarray(batch.positions)[placed == 1.0 + i]
        last = np.flatnonzero(s.rollout.action_mask)[-1]
        assert at == (min(last, 6) if i == 2 else last)


def test_a_sequence_without_an_action_has_its_reward_nowhere():
    batch = batch_of(make_scored())
    mask = batch.action_mask & (batch.sequence_ids != 4)
    placed = at_last_token(jnp.arange(1.0, 9.0), mask, batch.sequence_ids)
    assert sorted(np.asarray(placed)[np.asarray(placed) != 0]) == [1, 2, 3, 4, 6, 7, 8]


@BOTH
def test_the_kl_in_the_reward_is_taken_off_every_token_and_off_the_sum(pack_spec):
    batch = batch_of(make_scored(failed=(3,)), pack_spec)
    views = views_of(batch, reference_logprobs=batch.sampler_logprobs)
    kl_coef = jnp.float32(0.3)
    penalty = 0.3 * np.asarray(
        kl_penalty(views.old_logprobs, batch.sampler_logprobs, "k1", mask=batch.action_mask), np.float64
    )
    o = showing("token_rewards", reward_kl=RewardKL(0.3, "k1"))
    made, next_coef, metrics = complete(o, batch, views, kl_coef, KEY)
    at_end = np.asarray(at_last_token(batch.rewards, batch.action_mask, batch.sequence_ids))
    np.testing.assert_allclose(made.advantages, at_end - penalty, atol=1e-6)
    rewards = []
    o = replace(o, advantage=lambda e: (rewards.append(e.rewards), Advantages(e.token_rewards, e.token_rewards))[1])
    complete(o, batch, views, kl_coef, KEY)
    of_sequence = [penalty[np.asarray(batch.sequence_ids) == i].sum() for i in range(8)]
    np.testing.assert_allclose(rewards[0], np.asarray(batch.rewards) - of_sequence, atol=1e-5)
    assert next_coef == kl_coef
    assert finish(metrics)["actor/reward_kl_penalty_coeff"] == pytest.approx(0.3)


def test_the_adaptive_coefficient_follows_the_mean_over_sequences_of_their_token_mean():
    batch = batch_of(make_scored(failed=(3,)))
    views = views_of(batch, reference_logprobs=batch.sampler_logprobs)
    kl = np.asarray(kl_penalty(views.old_logprobs, batch.sampler_logprobs, "k2", mask=batch.action_mask))
    ids, mask = np.asarray(batch.sequence_ids), np.asarray(batch.action_mask)
    mean = np.mean([kl[mask & (ids == i)].mean() for i in range(8) if i != 3])
    for target, factor in ((mean / 2, 1 + 0.2 * 8 / 100), (mean * 2, 1 - 0.2 * 8 / 100), (mean, 1.0)):
        o = showing("token_rewards", reward_kl=RewardKL(0.3, "k2", target=float(target), horizon=100))
        _, coef, metrics = complete(o, batch, views, jnp.float32(0.3), KEY)
        assert float(coef) == pytest.approx(0.3 * factor, rel=1e-4)
        assert finish(metrics)["actor/reward_kl_penalty"] == pytest.approx(mean, rel=1e-5)


@BOTH
def test_a_correction_weighs_and_rejects_and_advantages_are_of_what_is_left(pack_spec):
    batch = batch_of(make_scored(), pack_spec)
    views = views_of(batch)
    correction = {"rollout_is": "token", "rollout_is_threshold": 1.1, "rollout_rs": "token_k1"}
    o = make_objective(correction=correction | {"rollout_rs_threshold": "0.9_1.15"})
    made, _, metrics = complete(o, batch, views, None, KEY)
    mask = np.asarray(batch.action_mask)
    ratio = np.exp(np.asarray(views.old_logprobs - batch.sampler_logprobs))
    kept = mask & (1 / ratio >= 0.9) & (1 / ratio <= 1.15)  # k1 is of the sampler's to the learner's
    assert 0 < kept.sum() < mask.sum()
    np.testing.assert_array_equal(made.mask, kept)
    np.testing.assert_allclose(np.asarray(made.is_weights)[mask], np.minimum(ratio, 1.1)[mask], rtol=1e-5)
    assert (np.asarray(made.advantages)[~kept] == 0).all()
    assert finish(metrics)["rollout_corr/rollout_is_mean"] > 0


def test_without_a_correction_there_are_diagnostics_and_nothing_changes():
    batch = batch_of(make_scored())
    made, _, metrics = complete(make_objective(), batch, views_of(batch), None, KEY)
    np.testing.assert_array_equal(made.mask, batch.action_mask)
    assert made.is_weights is None
    assert finish(metrics)["rollout_corr/kl"] != 0
    assert finish(metrics)["training/rollout_logprobs_diff_max"] == pytest.approx(0.2, rel=1e-2)


def test_in_bypass_mode_the_samplers_log_probabilities_are_the_old_ones():
    batch = batch_of(make_scored())
    made, _, metrics = complete(make_objective(bypass=True), batch, TokenViews(batch.sampler_logprobs), None, KEY)
    np.testing.assert_array_equal(made.old_logprobs, batch.sampler_logprobs)
    assert not [name for name in metrics if name.startswith(("rollout_corr/", "training/"))]


def test_reweighting_counts_each_sequence_as_often_as_it_is_drawn():
    scored = make_scored(failed=(3,))
    batch = batch_of(scored)
    made, _, _ = complete(make_objective(reweight=("pow", 2.0)), batch, views_of(batch), None, KEY)
    weights = np.asarray(made.sequence_weights)
    assert weights.sum() == 7
    assert {i for i in range(8) if weights[i]} <= {i for i, s in enumerate(scored) if s.reward == 1.0}
    plain, _, _ = complete(make_objective(), batch, views_of(batch), None, KEY)
    np.testing.assert_array_equal(made.advantages, plain.advantages)


def test_baselines_and_components_reach_the_advantage():
    scored = [
        replace(s, baseline=0.5 * (i % 2), components={"a": float(i % 2), "b": float(i // 4)})
        for i, s in enumerate(make_scored())
    ]
    batch = batch_of(scored, PADDED._replace(baseline=True, components=(("a", 1.0), ("b", 0.5))))
    mask, ids = np.asarray(batch.action_mask), np.asarray(batch.sequence_ids)
    made, _, _ = complete(make_objective(advantage="remax"), batch, views_of(batch), None, KEY)
    expected = np.array([s.reward - s.baseline for s in scored])
    np.testing.assert_allclose(np.asarray(made.advantages)[mask], expected[ids[mask]], atol=1e-6)
    made, _, _ = complete(make_objective(advantage="gdpo"), batch, views_of(batch), None, KEY)
    by_sample = np.asarray(segments.sequence_mean(made.advantages, mask, ids, 8))
    assert (by_sample[1::2] > by_sample[::2]).all()  # "b" is the same within each group: "a" alone decides
