import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ragged

from jaxrl_llm.algorithms import aggregation
from jaxrl_llm.algorithms.policy_losses import LOSS_AGGREGATION, POLICY_LOSSES, WHOLE_BATCH_LOSSES, PolicyLoss
from jaxrl_llm.types import UserError

CONSTANTS = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.2,
    "clip_cov_lb": 0.3,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.2,
    "ppo_kl_coef": 0.5,
    "dro_beta": 0.5,
}
BATCH = ragged.batch()
NUM_SEQUENCES = len(BATCH.masks)
layouts = pytest.mark.parametrize("layout", ["padded", "packed"])
RATIOS, ADVANTAGES = [5.0, 5, 0.5, 0.5, 2, 1.1], [-1.0, 1, 1, -1, -1, 2]


def called(name, logprobs, old, advantages, mask, ids, *, num_sequences=NUM_SEQUENCES, **constants):
    """The loss with those of `constants` that it names."""
    function = POLICY_LOSSES[name]
    offered = {"key": jax.random.key(0)} | CONSTANTS | constants
    taken = {key: value for key, value in offered.items() if key in inspect.signature(function).parameters}
    return function(logprobs, old, advantages, mask, sequence_ids=ids, num_sequences=num_sequences, **taken)


@functools.cache
def one_sequence(name):
    """The loss and its gradient for one sequence, as a function of logprobs [T]; old log-probs are 0 if not given."""

    def total(logprobs, advantages, old=None, **constants):
        shape = logprobs.shape
        old = jnp.zeros(shape) if old is None else old
        ids = jnp.zeros(shape, jnp.int32)
        loss = called(name, logprobs, old, advantages, jnp.ones(shape), ids, num_sequences=1, **constants)
        return loss.token_loss.sum(), loss

    return jax.jit(jax.value_and_grad(total, has_aux=True))


def of_ratios(name, ratios, advantages, **constants):
    logs, advantages = np.log(np.array(ratios, np.float32)), np.array(advantages, np.float32)
    (_, loss), gradient = one_sequence(name)(logs, advantages, **constants)
    return loss, gradient


def means(loss):
    return {name: float(total / count) for name, (total, count) in loss.metrics.items()}


def test_vanilla_clips_each_sign_of_advantage_on_its_own_side():
    loss, _ = of_ratios("vanilla", RATIOS, ADVANTAGES)
    np.testing.assert_allclose(loss.token_loss, [3.0, -1.2, -0.5, 0.8, 2.0, -2.2], rtol=1e-6)
    assert means(loss) == pytest.approx(
        {
            "actor/pg_clipfrac": 2 / 6,
            "actor/pg_clipfrac_lower": 1 / 6,
            "actor/ppo_kl": -np.log(RATIOS).mean(),
        },
        rel=1e-6,
    )


def test_vanilla_has_no_gradient_where_a_clip_holds():
    # A ratio too high for A > 0, too low for A < 0, past the dual clip; the last one is inside all of them.
    _, gradient = of_ratios("vanilla", [1.5, 0.5, 4.0, 1.1], [1.0, -1, -1, 1])
    np.testing.assert_allclose(gradient, [0, 0, 0, -1.1], rtol=1e-6)


def test_vanilla_clamps_the_log_ratio_at_20():
    (loss, _), gradient = one_sequence("vanilla")(np.array([100.0, 0], np.float32), -np.ones(2), clip_ratio_c=1e12)
    assert loss == pytest.approx(np.exp(20) + 1, rel=1e-6)
    np.testing.assert_allclose(gradient, [0, 1])


def test_cispo_clips_the_weight_and_keeps_the_gradient():
    loss, gradient = of_ratios("cispo", [5.0, 0.5, 1.1], [1.0, -1, 2])
    np.testing.assert_allclose(gradient, [-1.2, 0.8, -2.2], rtol=1e-6)
    np.testing.assert_allclose(loss.token_loss, [-1.2 * np.log(5), 0.8 * np.log(0.5), -2.2 * np.log(1.1)], rtol=1e-5)
    assert means(loss)["actor/pg_clipfrac"] == pytest.approx(2 / 3)


def test_sapo_fades_by_the_temperature_of_the_sign():
    loss, gradient = of_ratios("sapo", [1.0, 3, 3], [1.0, 1, -1], tau_pos=1.0, tau_neg=2.0)
    gates = np.array([0.5, 1 / (1 + np.exp(-2)), 1 / (1 + np.exp(-4))])
    np.testing.assert_allclose(loss.token_loss, [-2, -4 * gates[1], 2 * gates[2]], rtol=1e-6)
    slopes = 4 * gates * (1 - gates) * [1, 3, 3]
    np.testing.assert_allclose(gradient, slopes * [-1, -1, 1], rtol=1e-5)


def test_gspo_has_one_ratio_a_sequence_whatever_the_padding():
    log_ratios = [0.3, -0.1, 0.4, 5.0]
    wide = np.array([*log_ratios, 5.0], np.float32)
    for row in (wide[:4], wide):
        mask = np.arange(len(row)) < 3
        ids = np.where(mask, 0, 1).astype(np.int32)
        loss = called("gspo", row, 0 * row, 0 * row - 1, mask, ids, num_sequences=1)
        np.testing.assert_allclose(loss.token_loss, np.where(mask, 1.221402758, 0), rtol=1e-6)


def test_gspo_sends_the_gradient_of_the_papers_sequence_loss():
    logs, old = np.array([0.05, -0.02, 0.01], np.float32), np.zeros(3, np.float32)
    _, gradient = one_sequence("gspo")(logs, 2 * np.ones(3, np.float32), old)
    expected = jax.grad(lambda x: -2 * jnp.exp(x.mean()))(logs)
    np.testing.assert_allclose(gradient / 3, expected, rtol=1e-6)


def test_geo_mean_bounds_each_log_ratio_and_ignores_advantages_outside_the_mask():
    logs = np.array([0.1, 0.5, -0.3, 7], np.float32)
    for outside in (0, 10):
        advantages = np.array([2, 2, 2, outside], np.float32)
        mask, ids = np.array([1, 1, 1, 0]), np.array([0, 0, 0, 0])
        loss = called("geo_mean", logs, 0 * logs, advantages, mask, ids, num_sequences=1)
        np.testing.assert_allclose(loss.token_loss, [-2.0] * 3 + [0], atol=1e-6)  # (0.1 + 0.2 - 0.3) / 3 = 0
        assert means(loss)["actor/pg_clipfrac"] == pytest.approx(2 / 3)


def test_geo_mean_leaves_out_the_ratio_where_the_advantage_is_0():
    (_, loss), gradient = one_sequence("geo_mean")(np.array([0.15, 0.15], np.float32), np.array([2.0, 0], np.float32))
    np.testing.assert_allclose(loss.token_loss, -np.exp([0.075, 0.075]), rtol=1e-6)
    np.testing.assert_allclose(gradient, [-np.exp(0.075), 0], rtol=1e-6)


def test_geo_mean_takes_the_geometric_mean_of_importance_weights():
    zeros, ids = jnp.zeros(2), jnp.zeros(2, jnp.int32)
    weights = jnp.array([0.5, 8])
    loss = called("geo_mean", zeros, zeros, zeros + 1, zeros + 1, ids, num_sequences=1, is_weights=weights)
    np.testing.assert_allclose(loss.token_loss, [-2, -2], rtol=1e-6)


def test_dppo_tv_leaves_the_trust_region_by_probabilities():
    # p_old and p: up by 0.3 and by 0.1; down by 0.3 and by 0.1; a large ratio of small probabilities stays inside.
    old, new = np.array([0.2, 0.2, 0.6, 0.6, 1e-3], np.float32), np.array([0.5, 0.3, 0.3, 0.5, 0.1], np.float32)
    for sign, inside in ((1.0, [0, 1, 1, 1, 1]), (-1.0, [1, 1, 0, 1, 1])):
        advantages = np.full(5, sign, np.float32)
        (_, loss), gradient = one_sequence("dppo_tv")(np.log(new), advantages, np.log(old), clip_ratio_c=20.0)
        np.testing.assert_allclose(gradient, -sign * np.array(inside) * np.minimum(new / old, 20), rtol=1e-5)
        assert means(loss)["actor/pg_clipfrac"] == pytest.approx(1 / 5)
        assert means(loss)["actor/pg_clipfrac_lower"] == pytest.approx(1 / 5)


def test_dppo_kl_leaves_the_trust_region_by_the_binary_divergence():
    old, new = np.array([0.2, 0.2, 0.6, 0.6], np.float32), np.array([0.5, 0.3, 0.3, 0.5], np.float32)
    divergences = old * np.log(old / new) + (1 - old) * np.log((1 - old) / (1 - new))
    np.testing.assert_array_equal(divergences > 0.1, [True, False, True, False])
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.1}
    for sign, inside in ((1.0, [0, 1, 1, 1]), (-1.0, [1, 1, 0, 1])):
        advantages = np.full(4, sign, np.float32)
        (_, loss), gradient = one_sequence("dppo_kl")(np.log(new), advantages, np.log(old), **bounds)
        np.testing.assert_allclose(gradient, -sign * np.array(inside) * new / old, rtol=1e-5)
        assert means(loss)["actor/pg_clipfrac"] == pytest.approx(1 / 4)


def test_dppo_kl_takes_a_log_prob_that_rounding_put_above_0():
    logs = np.array([1e-7, 1e-7], np.float32)
    (_, loss), gradient = one_sequence("dppo_kl")(logs, np.ones(2, np.float32), np.array([0, -1e-6], np.float32))
    np.testing.assert_allclose(gradient, [-1, -1], rtol=1e-5)
    assert means(loss)["actor/pg_clipfrac"] == 0


def test_dro_pulls_the_log_ratio_towards_the_advantage():
    # The regression's gradient is 0 at log_ratio = A / beta.
    (_, loss), gradient = one_sequence("dro")(np.array([4.0, 1]), np.array([2.0, 2]), dro_beta=0.5)
    np.testing.assert_allclose(gradient, [0, -1.5])
    np.testing.assert_allclose(loss.token_loss, [-8 + 0.25 * 16, -2 + 0.25])


@pytest.mark.parametrize("name", ["gpg", "reinforce"])
def test_plain_policy_gradients_have_no_ratio(name):
    (_, loss), gradient = one_sequence(name)(np.array([-1.0, -3]), np.array([2.0, -1]), np.array([-2.0, -2]))
    np.testing.assert_array_equal(gradient, [-2, 1])
    np.testing.assert_array_equal(loss.token_loss, [2, -3])
    assert means(loss) == ({"actor/ppo_kl": 0} if name == "reinforce" else {})


def test_reinforce_reports_the_divergence_from_the_sampler():
    (_, loss), _ = one_sequence("reinforce")(np.array([-1.0, -3]), np.ones(2), np.array([-1.5, -1]))
    assert means(loss) == {"actor/ppo_kl": pytest.approx((-0.5 + 2) / 2)}


def laid_out(layout, batch=BATCH):
    """Log-probs, mask and sequence ids. Of samples without a reward no token is in the mask."""
    sees = ragged.experience(batch, layout)
    return sees.old_logprobs, sees.mask & jnp.append(batch.valid, False)[sees.sequence_ids], sees.sequence_ids


@functools.cache
def compiled_chosen(name):
    def chosen(logprobs, old, advantages, mask, ids, constants):
        loss = called(name, logprobs, old, advantages, mask, ids, **constants)
        plain = jnp.where(mask, -advantages * jnp.exp(logprobs - old), 0)
        return (loss.token_loss != plain), loss.metrics

    return jax.jit(chosen)


def chosen_by(name, layout, batch=BATCH, moved=0.0, **constants):
    """bool: of all tokens, sequence by sequence, those that are not left with their plain loss. No token is clipped."""
    logprobs, mask, ids = laid_out(layout, batch)
    advantages = np.sin(7 * logprobs)
    chosen, metrics = compiled_chosen(name)(logprobs + moved, logprobs, advantages, mask, ids, constants)
    return np.concatenate(ragged.taken(chosen, batch, layout)), metrics


def covariances(batch=BATCH):
    """Of the same tokens, all different; NaN outside the mask, as the log-probs are."""
    logprobs = np.concatenate(batch.tokens["old_logprobs"]).astype(np.float32)
    advantages = np.sin(7 * logprobs)
    return (advantages - np.nanmean(advantages)) * (logprobs - np.nanmean(logprobs))


BOUNDS = {"clip_cov_lb": 0.0, "clip_cov_ub": 10.0}


def test_clip_cov_draws_its_quota_among_the_candidates_whatever_the_layout():
    candidates = covariances() > 0
    assert candidates.sum() > 5
    for seed in range(3):
        constants = BOUNDS | {"clip_cov_ratio": 0.2, "key": jax.random.key(seed)}
        drawn, metrics = chosen_by("clip_cov", "padded", **constants)
        assert drawn.sum() == 5  # of 27 tokens in the mask
        assert candidates[drawn].all()
        assert metrics["actor/pg_clipfrac"] == (5, 27)
        np.testing.assert_array_equal(chosen_by("clip_cov", "packed", **constants)[0], drawn)


def test_clip_cov_draws_each_candidate_for_some_key_and_all_alike():
    candidates = covariances() > 0
    keys = [jax.random.key(seed) for seed in range(200)]
    drawn = sum(chosen_by("clip_cov", "padded", key=key, clip_cov_ratio=0.2, **BOUNDS)[0].astype(int) for key in keys)
    expected = 200 * 5 / candidates.sum()
    assert (drawn[~candidates] == 0).all()
    assert drawn[candidates].min() > 0.75 * expected
    assert drawn[candidates].max() < 1.25 * expected


def test_clip_cov_draws_all_candidates_within_its_quota_and_at_least_one():
    candidates = covariances() > 0
    drawn, _ = chosen_by("clip_cov", "padded", clip_cov_ratio=1.0, **BOUNDS)
    np.testing.assert_array_equal(drawn, candidates)
    drawn, _ = chosen_by("clip_cov", "padded", clip_cov_ratio=1e-6, **BOUNDS)
    assert drawn.sum() == 1
    drawn, _ = chosen_by("clip_cov", "padded", clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=0.3)
    np.testing.assert_array_equal(drawn, (covariances() > 0.1) & (covariances() < 0.3))


def test_clip_cov_leaves_alone_what_is_clipped_already():
    loss, gradient = of_ratios("clip_cov", [1.5, 1.5], [2.0, -2], clip_cov_lb=-1e3, clip_cov_ub=1e3, clip_cov_ratio=1.0)
    np.testing.assert_allclose(loss.token_loss, [-2.4, 0], rtol=1e-6)
    np.testing.assert_array_equal(gradient, [0, 0])
    assert means(loss)["actor/pg_clipfrac"] == 0.5


def test_clip_cov_asks_for_a_key():
    one, ids = jnp.ones(1), jnp.zeros(1, jnp.int32)
    with pytest.raises(UserError, match=r"clip_cov .*expected key.*got None"):
        called("clip_cov", one, one, one, one, ids, num_sequences=1, key=None)


@layouts
@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_kl_cov_holds_exactly_the_tokens_of_highest_covariance(seed, layout, ratio):
    batch = ragged.batch(seed)
    values = covariances(batch)
    count = max(1, int(np.isfinite(values).sum() * ratio))
    highest = np.argsort(-values)[:count]  # NaN comes last
    held, _ = chosen_by("kl_cov", layout, batch, moved=0.1, kl_cov_ratio=ratio)
    np.testing.assert_array_equal(np.flatnonzero(held), np.sort(highest))


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0, 1]])
@pytest.mark.parametrize("advantage", [0.0, 0.9])  # nine times 0.9 in float32, divided by nine, is not 0.9
def test_kl_cov_breaks_ties_by_sequence_then_place(rows, advantage):
    # Equal advantages have no covariance. Sequences 0, 1 and 2 in any order of rows.
    ids = jnp.array(rows)[:, None] + jnp.zeros((1, 3), jnp.int32)
    logprobs = -10 + jnp.arange(9.0).reshape(3, 3)[jnp.array(rows)]
    loss = called(
        "kl_cov", logprobs, logprobs - 1, 0 * logprobs + advantage, ids < 3, ids, num_sequences=3, kl_cov_ratio=5 / 9
    )
    held = loss.token_loss - -advantage * np.exp(1) > 0.25
    expected = {0: [True] * 3, 1: [True, True, False], 2: [False] * 3}
    np.testing.assert_array_equal(held, [expected[row] for row in rows])


def test_kl_cov_penalises_moving_away_in_either_direction():
    loss, gradient = of_ratios("kl_cov", [2.0, 0.5], [0.0, 0], kl_cov_ratio=1.0, ppo_kl_coef=0.3)
    np.testing.assert_allclose(loss.token_loss, 0.3 * np.log([2, 2]), rtol=1e-6)
    np.testing.assert_allclose(gradient, [0.3, -0.3], rtol=1e-6)
    assert means(loss)["actor/ppo_kl"] == pytest.approx(np.log(2))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_token_makes_no_loss_and_no_metric(name):
    nothing = jnp.full((2, 3), jnp.nan)
    ids = jnp.full((2, 3), 4)
    loss = called(name, nothing, nothing, nothing, jnp.zeros((2, 3)), ids, num_sequences=4)
    np.testing.assert_array_equal(loss.token_loss, 0)
    assert all(pair == (0, 0) for pair in loss.metrics.values())


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_bfloat16_inputs_give_a_float32_loss(name):
    half = jnp.array([-1.0, -2.0], jnp.bfloat16)
    loss = called(name, half, half, half, jnp.ones(2), jnp.zeros(2, jnp.int32), num_sequences=1)
    assert isinstance(loss, PolicyLoss)
    assert {part.dtype for part in jax.tree.leaves(loss)} == {jnp.dtype("float32")}


def test_what_asks_for_its_own_aggregation_or_the_whole_batch_is_a_loss():
    assert LOSS_AGGREGATION.keys() | WHOLE_BATCH_LOSSES <= POLICY_LOSSES.keys()
    assert set(LOSS_AGGREGATION.values()) <= set(aggregation.AGGREGATIONS)


def test_sft_is_the_mean_negative_log_likelihood_of_the_masked_tokens():
    # The log-prob at a position is that of the token there. Prompt, prompt, two response tokens, padding.
    logprobs = jnp.array([0.0, -10, -1, -2, -20])
    mask = jnp.array([0, 0, 1, 1, 0])
    ids = jnp.array([0, 0, 0, 0, 1])

    def mean(logprobs):
        loss = POLICY_LOSSES["sft"](logprobs, None, None, mask, sequence_ids=ids, num_sequences=1)
        return jnp.sum(aggregation.token_weights("token-mean", mask, ids, 1) * loss.token_loss)

    loss, gradient = jax.value_and_grad(mean)(logprobs)
    assert loss == 1.5
    np.testing.assert_array_equal(gradient, [0, 0, -0.5, -0.5, 0])
