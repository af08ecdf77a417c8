"""What the policy's loss can be made of, computed micro-batch by micro-batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.data.packing import PackSpec, pack
from jaxrl_llm.metrics import finish
from jaxrl_llm.types import TrainBatch
from tests.builders import make_learner, make_objective, make_scored, mesh

IN_ONE_PIECE = (mesh, {}, PackSpec(1, 8, 8, (24,), packing=False))
PACKED = (mesh, {}, PackSpec(1, 8, 1, (48,), packing=True))
SHARDED = (mesh, {"devices": 8, "data": 2, "fsdp": 2, "tensor": 2}, PackSpec(1, 8, 4, (48,), packing=True))
REJECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}
WEIGHTS = {"rollout_is": "token", "rollout_is_threshold": 1.05}
OBJECTIVES = {
    "kl_cov": {"loss": "kl_cov", "constants": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}},
    "clip_cov": {"loss": "clip_cov", "constants": {"clip_cov_ratio": 0.9, "clip_cov_lb": 0.1, "clip_cov_ub": 9.0}},
    "bypass with rejection": {"bypass": True, "correction": REJECTION},
    "bypass with weights": {"loss": "reinforce", "bypass": True, "correction": {**REJECTION, **WEIGHTS}},
    "exact KL": {"kl_coef": 0.5, "kl_estimator": "exact"},
}


def place(learner, scored, pack_spec, **changes):
    """A batch off the policy, with an advantage of its own for each sequence."""
    batch = learner.place(pack(scored, pack_spec))
    sequence = jnp.append(jnp.sin(1.0 + jnp.arange(batch.group_ids.shape[0])), 0.0)
    advantages = jnp.where(batch.action_mask, sequence[batch.sequence_ids], 0.0)
    made = TrainBatch(batch, batch.sampler_logprobs, batch.sampler_logprobs - 0.1, advantages, batch.action_mask)
    return made._replace(**changes)


def tokens_of(batch):
    """The only micro-batch."""
    return jax.tree.map(lambda x: x[0, 0] if x.ndim == 4 else x, batch.sequences)


@functools.cache
def samples():
    """With log-probabilities of the policy, shifted by up to 0.2 a token."""
    scored = make_scored()
    batch = pack(scored, IN_ONE_PIECE[2])
    logprobs = make_learner(mesh(), make_objective()).prepare(jax.tree.map(jnp.asarray, batch))[0].old_logprobs
    by_token = {}
    for index in zip(*np.nonzero(batch.action_mask), strict=True):
        by_token[int(batch.sequence_ids[index]), int(batch.positions[index])] = float(logprobs[index])
    for i, s in enumerate(scored):
        for t in np.flatnonzero(s.rollout.action_mask):
            s.rollout.logprobs[t] = by_token[i, int(t)] + 0.2 * np.sin(i + 2.0 * t)
    return scored


def gradients(layout, objective, **changes):
    make_mesh, axes, pack_spec = layout
    learner = make_learner(make_mesh(**axes), make_objective(**objective))
    if objective.get("kl_estimator") == "exact":
        learner.reference = jax.tree.map(lambda x: 0.7 * x, learner.reference)
    grads, metrics = learner.gradients(place(learner, samples(), pack_spec, **changes))
    return jax.device_get(grads), finish(metrics)


def assert_same(actual, expected, rtol=2e-5):
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(expected))
    assert scale > 1e-3
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale), actual, expected)


@pytest.mark.parametrize("layout", [PACKED, SHARDED], ids=["packed", "sharded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_and_devices_change_nothing(name, layout):
    expected, its_metrics = gradients(IN_ONE_PIECE, OBJECTIVES[name])
    got, metrics = gradients(layout, OBJECTIVES[name])
    assert_same(got, expected)
    for key, value in its_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    terms = metrics["actor/pg_loss"] + 0.5 * metrics.get("actor/kl_loss", 0)
    assert metrics["actor/loss"] == pytest.approx(terms, rel=1e-5, abs=1e-6)


def test_losses_of_the_whole_batch_choose_tokens_and_the_gradient_knows():
    plain, _ = gradients(IN_ONE_PIECE, {})
    for name in ("kl_cov", "clip_cov", "bypass with rejection"):
        other, metrics = gradients(IN_ONE_PIECE, OBJECTIVES[name])
        scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(plain))
        differences = jax.tree.map(lambda a, b: np.abs(a - b).max(), plain, other)
        assert max(jax.tree.leaves(differences)) > 1e-2 * scale, name
        assert np.isfinite(metrics["actor/pg_loss"])


def test_in_bypass_mode_the_correction_is_against_the_policy_as_it_is_now():
    learner = make_learner(mesh(), make_objective(**OBJECTIVES["bypass with rejection"]))
    batch = place(learner, samples(), IN_ONE_PIECE[2])
    logprobs = np.asarray(learner.programs.actor.stats(learner.state.params, tokens_of(batch)).logprob)
    mask, ids = (np.asarray(x[0, 0]) for x in (batch.mask, batch.sequences.sequence_ids))
    difference = np.asarray(batch.old_logprobs)[0, 0] - logprobs
    kept = [i for i in range(8) if 0.9 <= np.exp(difference[mask & (ids == i)].mean()) <= 1.1]
    assert 0 < len(kept) < 8
    alone = make_learner(mesh(), make_objective())
    of_kept = mask & np.isin(ids, kept)
    expected, _ = alone.gradients(batch._replace(mask=jnp.asarray(of_kept)[None, None]))
    got, metrics = learner.gradients(batch)
    assert_same(jax.device_get(got), jax.device_get(expected))
    assert finish(metrics)["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 - len(kept) / 8)


def test_the_exact_kl_is_summed_over_the_vocabulary_and_pulls_towards_the_reference():
    learner = make_learner(mesh(), make_objective(kl_coef=0.5, kl_estimator="exact", temperature=0.8))
    batch = place(learner, samples(), IN_ONE_PIECE[2], advantages=jnp.zeros((1, 1, 8, 24)))
    grads, metrics = learner.gradients(batch)
    assert finish(metrics)["actor/kl_loss"] == 0
    assert max(float(np.abs(g).max()) for g in jax.tree.leaves(grads)) < 1e-6
    learner.reference = jax.tree.map(lambda x: 0.7 * x, learner.reference)
    tokens = tokens_of(batch)

    def logits(params):
        module = learner.programs.actor.model.bind(params)
        hidden = module.hidden(tokens.token_ids, tokens.positions, tokens.segment_ids)
        return jax.nn.log_softmax(hidden @ module.head_matrix().T / 0.8)

    def divergence(params):
        log_p, log_q = logits(params), logits(learner.reference)
        kl = jnp.roll((jnp.exp(log_p) * (log_p - log_q)).sum(-1), 1, axis=1)
        return 0.5 * jnp.where(batch.mask[0, 0], kl, 0).sum() / batch.mask.sum()

    value, expected = jax.value_and_grad(divergence)(learner.state.params)
    grads, metrics = learner.gradients(batch)
    assert finish(metrics)["actor/kl_loss"] == pytest.approx(2 * float(value), rel=1e-4)
    assert_same(jax.device_get(grads), jax.device_get(expected), rtol=1e-4)


def test_a_sequence_that_counts_twice_is_there_twice_and_one_that_counts_never_is_not():
    weights = jnp.array([2, 0, 1, 1, 3, 0, 0, 1], jnp.int32)
    got, _ = gradients(PACKED, {}, sequence_weights=weights)
    learner = make_learner(mesh(), make_objective(aggregation="token-sum"))
    batch = place(learner, samples(), IN_ONE_PIECE[2])
    times = jnp.append(weights, 0)[batch.sequences.sequence_ids]
    expected, _ = learner.gradients(batch._replace(advantages=batch.advantages * times))
    total = float((times * batch.mask).sum())
    assert_same(got, jax.tree.map(lambda g: np.asarray(g) / total, expected))


def test_importance_weights_multiply_the_loss_of_their_token():
    learner = make_learner(mesh(), make_objective())
    batch = place(learner, samples(), IN_ONE_PIECE[2])
    weights = jnp.where(batch.mask, 1 + 0.5 * jnp.sin(batch.sequences.token_ids.astype(jnp.float32)), 0)
    got, _ = learner.gradients(batch._replace(is_weights=weights))
    expected, _ = learner.gradients(batch._replace(advantages=batch.advantages * weights))
    assert_same(jax.device_get(got), jax.device_get(expected))
