import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.aggregation import token_weights
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS, adapted_coefficient, kl_penalty
from jaxrl_llm.types import UserError


@pytest.mark.parametrize(
    ("estimator", "at_plus_half", "at_minus_half"),
    [
        ("k1", 0.5, -0.5),
        ("abs", 0.5, 0.5),
        ("k2", 0.125, 0.125),
        ("k3", 0.106530660, 0.148721271),
        ("low_var_kl", 0.106530660, 0.148721271),
        ("k1+", 0.5, -0.5),
        ("k3+", 0.106530660, 0.148721271),
    ],
)
def test_each_name_means_its_own_estimator(estimator, at_plus_half, at_minus_half):
    values = kl_penalty(jnp.array([-1.0, -1.5]), jnp.array([-1.5, -1.0]), estimator)
    np.testing.assert_allclose(values, [at_plus_half, at_minus_half], atol=1e-7)


@pytest.mark.parametrize(
    ("estimator", "expectation", "path_gradient"),
    [
        ("k1", 0.192744757, 0.0),
        ("k2", 0.172320235, 0.221807098),
        ("k3", 0.192744757, 0.3),
        ("k1+", 0.192744757, 0.221807098),
        ("k3+", 0.192744757, 0.221807098),
    ],
)
def test_expectation_and_path_gradient_over_a_whole_vocabulary(estimator, expectation, path_gradient):
    """Policy softmax([theta, 0]) = (.8, .2), reference (.5, .5); d KL / d theta = 0.221807098."""

    def expected_value(theta):
        logprobs = jax.nn.log_softmax(jnp.array([theta, 0.0]))
        values = kl_penalty(logprobs, jnp.log(jnp.array([0.5, 0.5])), estimator)
        return jnp.sum(jax.lax.stop_gradient(jnp.exp(logprobs)) * values)

    with jax.enable_x64(True):
        value, gradient = jax.value_and_grad(expected_value)(jnp.log(4.0))
    assert value == pytest.approx(expectation, abs=1e-9)
    assert gradient == pytest.approx(path_gradient, abs=1e-9)


@pytest.mark.parametrize("masked", [jnp.inf, -jnp.inf, jnp.nan])
def test_k3_of_a_far_off_token_is_clamped_and_a_masked_one_does_not_leak(masked):
    mask = jnp.array([1, 1, 0])
    ids = jnp.zeros(3, jnp.int32)
    reference = jnp.array([99.0, -0.5, masked])

    def mean(logprobs):
        values = kl_penalty(logprobs, reference, "k3", mask=mask)
        return jnp.sum(token_weights("token-mean", mask, ids, 1) * values), values

    (loss, values), gradient = jax.value_and_grad(mean, has_aux=True)(jnp.array([-1.0, -1.0, -1.0]))
    np.testing.assert_allclose(values, [10, 0.148721271, 0], rtol=1e-6)
    assert loss == pytest.approx((10 + 0.148721271) / 2, rel=1e-6)
    np.testing.assert_allclose(gradient, [0, (1 - np.exp(0.5)) / 2, 0], rtol=1e-6)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_far_off_tokens_stay_finite(estimator):
    def total(logprobs):
        return kl_penalty(logprobs, jnp.array([0.0, -1000.0]), estimator).sum()

    value, gradient = jax.value_and_grad(total)(jnp.array([-1000.0, 0.0]))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_equal_policies_have_no_divergence_and_bfloat16_is_lifted(estimator):
    logprobs = jnp.array([-0.1, -3.0], jnp.bfloat16)
    values = kl_penalty(logprobs, logprobs, estimator)
    assert values.dtype == jnp.float32
    np.testing.assert_array_equal(values, 0)


@pytest.mark.parametrize("estimator", sorted(KL_ESTIMATORS.keys() - {"k1"}))
def test_equal_policies_are_not_pushed_apart(estimator):
    logprobs = jnp.array([-0.1, -3.0])
    gradient = jax.grad(lambda x: kl_penalty(x, logprobs, estimator).sum())(logprobs)
    np.testing.assert_array_equal(gradient, 0)


def test_an_unknown_estimator_is_refused_with_all_names():
    with pytest.raises(UserError, match=r"KL estimator 'low_var'; expected one of k1.*low_var_kl"):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), "low_var")


@pytest.mark.parametrize(
    ("kl", "factor"),
    [(6.0, 1), (6.6, 1 + 0.1 * 0.0256), (60.0, 1 + 0.2 * 0.0256), (5.4, 1 - 0.1 * 0.0256), (0.0, 1 - 0.2 * 0.0256)],
)
@pytest.mark.parametrize("adapted", [adapted_coefficient, jax.jit(adapted_coefficient)])
def test_the_coefficient_follows_the_divergence_within_a_fifth_per_horizon(adapted, kl, factor):
    with jax.enable_x64(True):
        coefficient = adapted(0.2, kl, target=6.0, horizon=10000, num_sequences=256)
    assert float(coefficient) == pytest.approx(0.2 * factor, rel=1e-12)


def test_the_coefficient_is_one_float32_number_after_any_number_of_steps():
    coefficient = 0.2
    for _ in range(10):
        coefficient = adapted_coefficient(coefficient, 60.0, target=6.0, horizon=1000, num_sequences=jnp.array(100))
    assert coefficient.dtype == jnp.float32
    assert coefficient.shape == ()
    assert float(coefficient) == pytest.approx(0.2 * 1.02**10, rel=1e-6)
