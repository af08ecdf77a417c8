import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.implicit_reward import cross_entropy, process_rewards

LOGPROBS = jnp.array([[-1.0, jnp.nan, -2.0], [-0.5, -3.0, jnp.nan]])
REFERENCE = jnp.array([[-2.0, jnp.nan, -2.5], [-0.5, -1.0, jnp.nan]])
MASK = jnp.array([[1, 0, 1], [1, 1, 0]], bool)
IDS = jnp.array([[0, 0, 0], [2, 2, 4]])
OUTCOMES = jnp.array([1.0, 0.3, 0.0, jnp.nan])


def test_a_token_is_worth_beta_times_its_log_ratio():
    rewards = process_rewards(LOGPROBS, REFERENCE, MASK, beta=0.5)
    np.testing.assert_allclose(rewards, [[0.5, 0, 0.25], [0, -1, 0]], rtol=1e-6)


def test_the_sum_of_a_sequence_is_the_log_odds_that_it_is_right():
    rewards = process_rewards(LOGPROBS, REFERENCE, MASK, beta=0.5)
    loss, right, present = cross_entropy(rewards, OUTCOMES, MASK, IDS, 4)
    sigmoid = 1 / (1 + np.exp([-0.75, 1.0]))
    np.testing.assert_allclose(loss, [-np.log(sigmoid[0]), 0, -np.log(1 - sigmoid[1]), 0], rtol=1e-6)
    np.testing.assert_array_equal(right, [True, False, True, False])
    np.testing.assert_array_equal(present, [True, False, True, False])


def test_outcomes_are_clipped_and_the_gradient_is_finite_where_nothing_may_be_read():
    def total(logprobs, outcome):
        rewards = process_rewards(logprobs, REFERENCE, MASK, beta=0.5)
        return cross_entropy(rewards, OUTCOMES.at[0].set(outcome), MASK, IDS, 4)[0].sum()

    assert total(LOGPROBS, 5.0) == total(LOGPROBS, 1.0)
    assert total(LOGPROBS, -5.0) == total(LOGPROBS, 0.0)
    gradient = jax.grad(total)(LOGPROBS, 1.0)
    sigmoid = 1 / (1 + np.exp([-0.75, 1.0]))
    expected = 0.5 * np.array([sigmoid[0] - 1, sigmoid[1]])[:, None] * np.asarray(MASK)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
