import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.correction import REJECTIONS, check, correct
from jaxrl_llm.types import UserError


def finished(metrics):
    """Without prefix, on the host; those that nothing was counted for are left out."""
    pairs = {name: np.asarray(pair, np.float64) for name, pair in metrics.items()}
    return {name.removeprefix("rollout_corr/"): total / count for name, (total, count) in pairs.items() if count}


settings = ("num_sequences", "rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
settings = (*settings, "rollout_rs", "rollout_rs_threshold")
jitted = jax.jit(correct, static_argnames=settings)


def corrected(log_ratios, ids=None, mask=None, **given):
    """Of a learner whose log-probabilities are the engine's plus `log_ratios`."""
    log_ratios = jnp.asarray(log_ratios, jnp.float32)
    ids = jnp.zeros(log_ratios.shape, jnp.int32) if ids is None else jnp.asarray(ids, jnp.int32)
    mask = jnp.ones(log_ratios.shape, bool) if mask is None else jnp.asarray(mask)
    count = given.pop("num_sequences", int(ids.max()) + 1)
    return jitted(
        log_ratios - 2.0, jnp.full(log_ratios.shape, -2.0), mask, sequence_ids=ids, num_sequences=count, **given
    )


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", 10.0, [2, 2, 0.5, 0.25]),
        ("token", 1.5, [1.5, 1.5, 0.5, 0.25]),
        ("token", "1.5", [1.5, 1.5, 0.5, 0.25]),
        ("token", "0.3_1.5", [0, 0, 0.5, 0]),
        ("token", "0.3_3", [2, 2, 0.5, 0]),
        ("sequence", 10, [4, 4, 0.125, 0.125]),
        ("sequence", 3.0, [3, 3, 0.125, 0.125]),
        ("sequence", "0.1_3", [0, 0, 0.125, 0.125]),
        ("sequence", " 0.2_5 ", [4, 4, 0, 0]),
        ("token", "0.3_inf", [2, 2, 0.5, 0]),
    ],
)
def test_one_threshold_truncates_weights_and_two_make_those_outside_zero(level, threshold, expected):
    given = {"rollout_is": level, "rollout_is_threshold": threshold}
    correction = corrected([LN2, LN2, -LN2, -2 * LN2], [0, 0, 1, 1], **given)
    np.testing.assert_allclose(correction.weights, expected, rtol=1e-5)
    assert correction.mask.all()


@pytest.mark.parametrize(("level", "mean"), [("token", (2 + 1 + 1 + 3) / 4), ("sequence", (2 + 3) / 2)])
def test_normalised_weights_have_mean_one_over_tokens_or_over_sequences(level, mean):
    given = {"rollout_is": level, "rollout_is_threshold": 10.0}
    log_ratios, ids = np.log([2.0, 1.0, 1.0, 3.0]), [0, 0, 0, 1]
    plain = corrected(log_ratios, ids, **given)
    normalised = corrected(log_ratios, ids, **given, rollout_is_batch_normalize=True)
    np.testing.assert_allclose(normalised.weights, plain.weights / mean, rtol=1e-6)
    metrics = finished(normalised.metrics)
    assert metrics.pop("rollout_is_batch_norm_factor") == pytest.approx(mean, rel=1e-6)
    assert metrics == finished(plain.metrics)


def test_weights_that_are_all_zero_are_not_normalised():
    given = {"rollout_is": "token", "rollout_is_threshold": "0.9_1.1", "rollout_is_batch_normalize": True}
    correction = corrected([LN2, -LN2], **given)
    np.testing.assert_array_equal(correction.weights, 0)
    metrics = finished(correction.metrics)
    assert np.isfinite(list(metrics.values())).all()
    assert metrics["rollout_is_batch_norm_factor"] == 1
    assert metrics["rollout_is_oob_ratio"] == 1


# By hand, with l = [ln 2, 0], [-ln 2, ln 2], [0]: k1 = -l, k2 = l^2 / 2 with ln(2)^2 / 2 = .240, k3 = 1 - ln 2 = .307
# at ln 2 and ln 2 - 1/2 = .193 at -ln 2.
@pytest.mark.parametrize(
    ("criteria", "thresholds", "kept"),
    [
        ("token_k1", "0.4_2.1", [1, 1, 1, 1, 1]),
        ("token_k1", "0.6_2.1", [0, 1, 1, 0, 1]),
        ("token_k1", "0.4_1.9", [1, 1, 0, 1, 1]),
        ("token_k1", "1.9", [0, 1, 0, 0, 1]),
        ("token_k1", 2.1, [1, 1, 1, 1, 1]),
        ("token_k2", "0.23", [0, 1, 0, 0, 1]),
        ("token_k3", "0.25", [0, 1, 1, 0, 1]),
        ("seq_sum_k1", "0.6_1.5", [0, 0, 1, 1, 1]),
        ("seq_mean_k1", "0.7_1.5", [1, 1, 1, 1, 1]),
        ("seq_mean_k1", "0.72_1.5", [0, 0, 1, 1, 1]),
        ("seq_sum_k2", "0.3", [1, 1, 0, 0, 1]),
        ("seq_mean_k2", "0.2", [1, 1, 0, 0, 1]),
        ("seq_sum_k3", "0.4", [1, 1, 0, 0, 1]),
        ("seq_mean_k3", "0.2", [1, 1, 0, 0, 1]),
        ("seq_max_k2", "0.23", [0, 0, 0, 0, 1]),
        ("seq_max_k3", "0.25", [0, 0, 0, 0, 1]),
        ("token_k3,token_k2", "0.25, 0.3", [0, 1, 1, 0, 1]),
        ("token_k2, token_k3", "0.3", [0, 1, 1, 0, 1]),
        ("token_k1,seq_sum_k3,token_k1", "0.4_1.9,0.4", [1, 1, 0, 0, 1]),
    ],
)
def test_what_exceeds_a_threshold_is_taken_out_of_the_mask(criteria, thresholds, kept):
    log_ratios, ids = [LN2, 0, -LN2, LN2, 0], [0, 0, 1, 1, 2]
    correction = corrected(log_ratios, ids, rollout_rs=criteria, rollout_rs_threshold=thresholds)
    np.testing.assert_array_equal(correction.mask, kept)
    assert correction.weights is None


def test_of_a_chain_all_criteria_must_hold_and_each_reports_what_it_reports_alone():
    rng = np.random.default_rng(3)
    log_ratios, ids = rng.normal(scale=0.3, size=24), np.repeat(np.arange(6), 4)
    alone = [
        corrected(log_ratios, ids, rollout_rs="token_k1", rollout_rs_threshold="0.7_1.4"),
        corrected(log_ratios, ids, rollout_rs="seq_mean_k2", rollout_rs_threshold="0.05"),
    ]
    chain = corrected(log_ratios, ids, rollout_rs="token_k1,seq_mean_k2", rollout_rs_threshold="0.7_1.4,0.05")
    masks = [np.asarray(correction.mask) for correction in alone]
    assert (masks[0] & ~masks[1]).any()
    assert (masks[1] & ~masks[0]).any()
    np.testing.assert_array_equal(chain.mask, masks[0] & masks[1])
    metrics = finished(chain.metrics)
    for name, correction in zip(("token_k1", "seq_mean_k2"), alone, strict=True):
        for key, value in finished(correction.metrics).items():
            if name in key:
                assert metrics[key] == pytest.approx(value, rel=1e-6)
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(1 - np.mean(masks[0] & masks[1]))


BOTH = {"rollout_is": "sequence", "rollout_is_threshold": 1.8, "rollout_is_batch_normalize": True}
BOTH |= {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.6_1.7,0.4"}


def random_batch():
    """Six sequences, [6, 5]; one of them has no token in the mask, others have holes in it."""
    rng = np.random.default_rng(5)
    mask = rng.random((6, 5)) < 0.7
    mask[:, 1], mask[4] = True, False
    return rng.normal(scale=0.3, size=(6, 5)), mask, np.repeat(np.arange(6), 5).reshape(6, 5)


def test_sequences_that_are_not_in_the_batch_do_not_count():
    log_ratios, mask, ids = random_batch()
    found, expected = (corrected(log_ratios, ids, mask, **BOTH, num_sequences=count) for count in (9, 6))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("padding", [True, False])
def test_a_batch_without_tokens_is_finite(level, padding):
    ids = np.full((2, 3), 2) if padding else [[0, 0, 0], [1, 1, 1]]
    mask = np.full((2, 3), padding)
    correction = corrected(np.full((2, 3), np.nan), ids, mask, **BOTH | {"rollout_is": level}, num_sequences=2)
    np.testing.assert_array_equal(correction.weights, 0)
    assert not correction.mask.any()
    for total, count in correction.metrics.values():
        assert np.isfinite(total)
        assert np.isfinite(count)
        assert not padding or (total, count) == (0, 0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
def test_policies_that_are_far_apart_stay_finite(level, log_ratio):
    given = {"rollout_rs": ",".join(REJECTIONS), "rollout_rs_threshold": "2.0"}
    correction = corrected([log_ratio, 0.0], rollout_is=level, rollout_is_threshold="inf", **given)
    assert float(correction.weights[0]) == pytest.approx(math.exp(math.copysign(20, log_ratio)), rel=1e-5)
    assert not correction.mask.any()
    metrics = finished(correction.metrics)
    perplexities = {name for name in metrics if "ppl" in name and "log" not in name}
    assert {name for name, value in metrics.items() if not np.isfinite(value)} <= perplexities


def test_a_token_whose_ratio_is_not_a_number_is_rejected():
    for criterion in REJECTIONS:
        correction = corrected([math.nan, 0.0], [0, 1], rollout_rs=criterion, rollout_rs_threshold="2.0")
        np.testing.assert_array_equal(correction.mask, [False, True])


def test_nothing_has_a_gradient():
    log_ratios, mask, ids = random_batch()

    def total(logprobs, rollout):
        correction = correct(logprobs, rollout, mask, sequence_ids=ids, num_sequences=6, **BOTH)
        return correction.weights.sum() + sum(total for total, _ in correction.metrics.values())

    gradients = jax.jit(jax.grad(total, (0, 1)))(jnp.asarray(log_ratios), jnp.zeros((6, 5)))
    np.testing.assert_array_equal(gradients, np.zeros((2, 6, 5)))


def test_bfloat16_is_lifted():
    zeros = jnp.zeros(3, jnp.bfloat16)
    options = {"sequence_ids": jnp.zeros(3, jnp.int32), "num_sequences": 1, "rollout_is": "token"}
    correction = jitted(zeros, zeros, jnp.ones(3), **options)
    assert correction.weights.dtype == jnp.float32
    np.testing.assert_array_equal(correction.weights, 1)
    assert {x.dtype for pair in correction.metrics.values() for x in pair} == {jnp.dtype("float32")}


def test_small_differences_are_measured_exactly():
    log_ratios = 1e-4 * np.random.default_rng(0).normal(size=(50, 40))
    log_ratios -= log_ratios.mean()
    ids = np.repeat(np.arange(50), 40).reshape(50, 40)
    given = {"rollout_is": "token", "rollout_is_threshold": 2.0}
    metrics = finished(corrected(log_ratios, ids, **given).metrics)
    # As float32 sees them: log-probabilities near -2 are multiples of 2.4e-7 or so.
    seen = np.asarray(np.float32(log_ratios) - np.float32(2), np.float64) + 2
    assert metrics["rollout_is_std"] == pytest.approx(np.exp(seen).std(), rel=1e-3)
    assert metrics["chi2_token"] == pytest.approx(np.expm1(2 * seen).mean(), rel=1e-3)
    assert metrics["chi2_seq"] == pytest.approx(np.expm1(2 * seen.sum(1)).mean(), rel=1e-3)
    assert metrics["kl"] == pytest.approx(-seen.mean(), rel=1e-3)
    assert metrics["log_ppl_abs_diff"] == pytest.approx(np.abs(seen.mean(1)).mean(), rel=1e-3)
    assert metrics["k3_kl"] == pytest.approx((seen**2 / 2).mean(), rel=0.05)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rollout_is": "tokens"}, "rollout_is 'tokens' is unknown; expected one of token, sequence"),
        ({"rollout_is_threshold": None}, "rollout_is_threshold None: 'None' is no threshold; expected a positive"),
        ({"rollout_is_threshold": ""}, "rollout_is_threshold '': '' is no threshold"),
        ({"rollout_is_threshold": "two"}, "rollout_is_threshold 'two'.*such as 2.0, or two with the smaller first"),
        ({"rollout_is_threshold": 0.0}, "rollout_is_threshold 0.0"),
        ({"rollout_is_threshold": -1}, "rollout_is_threshold -1"),
        ({"rollout_is_threshold": math.nan}, "rollout_is_threshold nan"),
        ({"rollout_is_threshold": True}, "rollout_is_threshold True"),
        ({"rollout_is_threshold": "2.0_0.5"}, "rollout_is_threshold '2.0_0.5'"),
        ({"rollout_is_threshold": "0_2"}, "rollout_is_threshold '0_2'"),
        ({"rollout_is_threshold": "0.5_1_2"}, "rollout_is_threshold '0.5_1_2'"),
        ({"rollout_is_threshold": "0.5_"}, "rollout_is_threshold '0.5_'"),
        ({"rollout_rs": "token_k4"}, "rollout_rs has 'token_k4'; expected one of token_k1, .*seq_max_k3"),
        ({"rollout_rs": "seq_max_k1"}, "rollout_rs has 'seq_max_k1'"),
        ({"rollout_rs": "token_k1,"}, "rollout_rs has ''"),
        ({"rollout_rs_threshold": None}, "rollout_rs_threshold None: 'None' is no threshold"),
        ({"rollout_rs_threshold": "2_0.5"}, "rollout_rs_threshold '2_0.5'"),
        ({"rollout_rs_threshold": "0.5"}, "'0.5' for token_k1, .*expected a number of 1 or more, or both bounds"),
        ({"rollout_rs_threshold": "0.5_2,0.1"}, "has 2 thresholds for 1 criteria, token_k1; expected one for all"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,3,4"}, "has 3 thresholds for 2 criteria"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1_0.2"}, "'0.1_0.2' for token_k2.*upper bound alone"),
        ({"rollout_rs": "token_k1,seq_sum_k3", "rollout_rs_threshold": "2, x"}, "'x' is no threshold"),
    ],
)
def test_what_cannot_be_read_is_refused(given, message):
    good = {"rollout_is": "token", "rollout_is_threshold": 2.0, "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
    with pytest.raises(UserError, match=message):
        check(**good | given)
    with pytest.raises(UserError, match=message):
        corrected([0.0], **good | given)


@pytest.mark.parametrize(
    "given",
    [
        ("", None, "", None),
        (None, 2.0, None, "nonsense"),
        ("sequence", 2, "", ""),
        ("token", "0.5_5", "token_k1, seq_mean_k3", "0.5_2.0, 0.01"),
        ("token", "1e-3_1e3", ",".join(REJECTIONS), 1.5),
    ],
)
def test_what_can_be_read_or_is_not_asked_for_is_accepted(given):
    assert check(*given) is None


def test_without_settings_there_are_diagnostics_only():
    correction = corrected([LN2, 0.0, 0.0], [0, 0, 1], [True, True, False])
    assert correction.weights is None
    np.testing.assert_array_equal(correction.mask, [True, True, False])
    metrics = finished(correction.metrics)
    assert not any(name.startswith("rollout_") and "ppl" not in name for name in metrics)
    assert metrics["kl"] == pytest.approx(-LN2 / 2, rel=1e-6)
    assert metrics["chi2_token"] == pytest.approx(1.5, rel=1e-6)
