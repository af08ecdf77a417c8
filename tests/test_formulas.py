import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import formulas
from jaxrl_llm.algorithms.advantages import ADVANTAGES, grpo
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES, vanilla
from jaxrl_llm.types import UserError

CONSTANTS = {"normalize_by_std": False, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 3.0}
LOSS = (
    "import jax\nimport jax.numpy as jnp\nfrom jaxrl_llm.algorithms.policy_losses import PolicyLoss\n"
    "def loss(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences):\n"
)


def own(tmp_path, text, function):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return f"{path}:{function}"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_of_the_house_fits(name):
    assert callable(formulas.advantage(name, CONSTANTS))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_of_the_house_fits(name):
    assert callable(formulas.loss(name, CONSTANTS))


def test_an_advantage_is_bound_to_the_constants_that_it_names():
    arrays = (jnp.array([0.0, 1.0]), jnp.array([0, 0]), jnp.array([True, True]), 1)
    np.testing.assert_array_equal(formulas.advantage("grpo", CONSTANTS)(*arrays), [-0.5, 0.5])
    np.testing.assert_array_equal(formulas.advantage("grpo", {})(*arrays), grpo(*arrays))


def test_a_loss_is_bound_to_the_constants_that_it_names():
    logprobs, old, advantages = jnp.array([[0.1, 0.9]]), jnp.zeros((1, 2)), jnp.ones((1, 2))
    arrays = (logprobs, old, advantages, jnp.array([[True, True]]))
    where = {"sequence_ids": jnp.zeros((1, 2), jnp.int32), "num_sequences": 1}
    expected = vanilla(*arrays, **where, clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)
    found = formulas.loss("vanilla", CONSTANTS)(*arrays, **where)
    np.testing.assert_array_equal(found.token_loss, expected.token_loss)
    np.testing.assert_allclose(found.token_loss, [[-np.exp(0.1), -1.3]], rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "    return PolicyLoss(logprobs * nothing, {})\n",
            "fails: NameError: name 'nothing' is not defined (mine.py:5)",
        ),
        ("    return -logprobs\n", "PolicyLoss(token_loss, metrics), got float32 [2, 5]"),
        ("    return PolicyLoss(logprobs.sum(), {})\n", "[2, 5] here (the shape of logprobs); got float32 []"),
        ("    return PolicyLoss(logprobs, [])\n", "must return its metrics as a dict"),
        ("    return PolicyLoss(logprobs, {'a': (mask, mask)})\n", "the metric 'a' must be a pair of numbers"),
        (
            "    x = jax.lax.while_loop(lambda x: x.sum() < 0, jnp.sin, logprobs)\n    return PolicyLoss(x, {})\n",
            "the gradient of config.algorithm.loss=",
        ),
    ],
)
def test_a_loss_that_could_not_train_is_refused_before_it_does(tmp_path, body, words):
    with pytest.raises(UserError) as caught:
        formulas.loss(own(tmp_path, LOSS + body, "loss"), CONSTANTS)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    return 1 / 0\n", "fails: ZeroDivisionError: division by zero (mine.py:2)"),
        ("    return None\n", "[7] here (the shape of rewards); got None"),
        ("    return valid\n", "got bool [7]"),
        ("    return rewards[:3]\n", "got float32 [3]"),
        ("    return rewards if rewards.sum() > 0 else -rewards\n", "(mine.py:2); under jax.jit arrays have shapes"),
    ],
)
def test_an_advantage_that_could_not_train_is_refused_before_it_does(tmp_path, body, words):
    spec = own(tmp_path, f"def advantage(rewards, group_ids, valid, num_groups):\n{body}", "advantage")
    with pytest.raises(UserError) as caught:
        formulas.advantage(spec, CONSTANTS)
    assert words in str(caught.value)


def test_other_arguments_than_those_given_are_refused_with_the_signature(tmp_path):
    spec = own(
        tmp_path, "def advantage(rewards, group_ids, valid, num_groups, beta):\n    return rewards\n", "advantage"
    )
    with pytest.raises(UserError, match=r"signature advantage\(rewards, .* beta\) does not take: missing .* 'beta'"):
        formulas.advantage(spec, CONSTANTS)
    assert callable(formulas.advantage(spec, CONSTANTS | {"beta": 1.0}))
