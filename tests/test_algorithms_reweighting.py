import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.reweighting import METHODS, pf_ppo
from jaxrl_llm.types import UserError

REWARDS = np.array([1.0, 0.5, np.nan, -2.0, 0.0, 1.0], np.float32)
VALID = np.array([True, True, False, True, True, True])
KEYS = jax.random.split(jax.random.key(0), 2000)


@functools.cache
def counts(method, power=2.0, rewards=tuple(REWARDS)):
    """int [2000, S]."""
    draw = functools.partial(pf_ppo, jnp.array(rewards), jnp.array(VALID), method=method, power=power)
    return np.asarray(jax.jit(jax.vmap(lambda key: draw(key)))(KEYS))


@pytest.mark.parametrize(
    ("method", "power", "weights"),
    [
        ("pow", 2.0, [1, 0.25, 0, 4, 0, 1]),
        ("pow", 1.0, [1, 0.5, 0, 2, 0, 1]),
        ("max_min", 2.0, [1, 0, 0, 1, 0, 1]),
        ("max_random", 2.0, [0.4, 0.1, 0, 0.1, 0.1, 0.4]),
    ],
)
def test_samples_are_drawn_as_often_as_they_weigh(method, power, weights):
    expected = 5 * np.array(weights) / np.sum(weights)
    found = counts(method, power)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found.sum(axis=1), 5)
    np.testing.assert_array_equal(found[:, expected == 0], 0)
    error = np.sqrt(expected * (1 - expected / 5) / len(KEYS))
    assert (np.abs(found.mean(axis=0) - expected) <= 5 * error).all()


@pytest.mark.parametrize("method", METHODS)
def test_without_any_reward_each_is_drawn_alike(method):
    mean = counts(method, rewards=(0.0,) * 6).mean(axis=0)
    np.testing.assert_allclose(mean, np.where(VALID, 1, 0), atol=0.1)


def test_the_key_decides_and_nothing_valid_gives_zeros():
    one, again, other = (pf_ppo(REWARDS, VALID, jax.random.key(k), method="max_random") for k in (3, 3, 4))
    np.testing.assert_array_equal(one, again)
    assert (one != other).any()
    nothing = pf_ppo(REWARDS * np.nan, np.zeros(6, bool), jax.random.key(0), method="pow")
    np.testing.assert_array_equal(nothing, np.zeros(6))


def test_an_unknown_method_is_refused_with_all_names():
    with pytest.raises(UserError, match="unknown reweighting 'max'; expected one of pow, max_min, max_random"):
        pf_ppo(REWARDS, VALID, jax.random.key(0), method="max")
