import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import formulas
from jaxrl_llm.algorithms.advantages import ADVANTAGES, Experience, grpo
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES, vanilla
from jaxrl_llm.configs import base
from jaxrl_llm.types import UserError

CONSTANTS = {
    **{
        key: value
        for key, value in base.get_config().algorithm.items()
        if key not in ("loss", "advantage", "constants")
    },
    "normalize_by_std": False,
    "clip_ratio_high": 0.3,
}
LOSS = (
    "import jax\nimport jax.numpy as jnp\nfrom jaxrl_llm.algorithms.policy_losses import PolicyLoss\n"
    "def loss(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences):\n"
)


ADVANTAGE = "from jaxrl_llm.algorithms.advantages import Advantages\ndef advantage(experience, beta):\n"


def own(tmp_path, text, function="advantage"):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return f"{path}:{function}"


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_advantage_of_the_house_fits(name):
    assert callable(formulas.advantage(name, CONSTANTS))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_of_the_house_fits(name):
    assert callable(formulas.loss(name, CONSTANTS))


def experience(rewards):
    """One token a sequence, all of one prompt."""
    size = len(rewards)
    floats = jnp.array(rewards)
    return Experience(
        rewards=floats,
        group_ids=jnp.zeros(size, jnp.int32),
        valid=jnp.ones(size, bool),
        sequence_ids=jnp.arange(size),
        mask=jnp.ones(size, bool),
        token_rewards=floats,
        old_logprobs=jnp.zeros(size),
    )


def test_an_advantage_is_bound_to_the_constants_that_it_names():
    given = experience([0.0, 1.0])
    np.testing.assert_array_equal(formulas.advantage("grpo", CONSTANTS)(given).advantages, [-0.5, 0.5])
    np.testing.assert_array_equal(formulas.advantage("grpo", {})(given).advantages, grpo(given).advantages)


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("gae", "values"),
        ("remax", "baseline_rewards"),
        ("prime", "process_rewards"),
        ("gdpo", "components"),
        ("optimal_token_baseline", "sum_pi_squared"),
    ],
)
def test_what_an_advantage_reads_is_known_before_the_run(name, field):
    assert field in formulas.advantage(name, CONSTANTS).reads
    assert field not in formulas.advantage("grpo", CONSTANTS).reads


def test_importance_weights_multiply_the_token_losses_of_a_loss_that_does_not_take_them():
    logprobs, old, advantages = jnp.array([[0.1, 0.9]]), jnp.zeros((1, 2)), jnp.ones((1, 2))
    arrays = (logprobs, old, advantages, jnp.array([[True, False]]))
    where = {"sequence_ids": jnp.zeros((1, 2), jnp.int32), "num_sequences": 1}
    loss = formulas.loss("vanilla", CONSTANTS)
    found = loss(*arrays, **where, is_weights=jnp.array([[2.0, np.nan]]))
    np.testing.assert_array_equal(found.token_loss, 2 * loss(*arrays, **where).token_loss)
    assert "is_weights" in formulas.loss("geo_mean", CONSTANTS).optional


def test_constants_of_ones_own_reach_a_function_and_a_typo_in_them_is_refused(tmp_path):
    spec = own(tmp_path, ADVANTAGE + "    return Advantages(experience.token_rewards * beta, experience.mask * 1.0)\n")
    section = CONSTANTS | {"loss": "vanilla", "advantage": spec, "constants": {"beta": 3.0}}
    _, advantage = formulas.of_config(section)
    np.testing.assert_array_equal(advantage(experience([1.0, 2.0])).advantages, [3, 6])
    with pytest.raises(UserError, match=r"constants.bta is no argument .* \(did you mean 'beta'\?\)"):
        formulas.of_config(section | {"constants": {"beta": 3.0, "bta": 1.0}})


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
        ("    return 1 / 0\n", "fails: ZeroDivisionError: division by zero (mine.py:3)"),
        ("    return None\n", "Advantages(advantages, returns), got None"),
        ("    return experience.token_rewards\n", "Advantages(advantages, returns), got float32 [2, 5]"),
        (
            "    return Advantages(experience.rewards, experience.rewards)\n",
            "[2, 5] here (the shape of experience.mask)",
        ),
        ("    return Advantages(experience.mask, experience.token_rewards)\n", "got bool [2, 5]"),
        ("    return experience.reward\n", "has no attribute 'reward'"),
        ("    if experience.rewards.sum() > 0: return 1\n", "(mine.py:3); under jax.jit arrays have shapes"),
    ],
)
def test_an_advantage_that_could_not_train_is_refused_before_it_does(tmp_path, body, words):
    with pytest.raises(UserError) as caught:
        formulas.advantage(own(tmp_path, ADVANTAGE.replace(", beta", "") + body), CONSTANTS)
    assert words in str(caught.value)


def test_other_arguments_than_those_given_are_refused_with_the_signature(tmp_path):
    spec = own(tmp_path, ADVANTAGE + "    return Advantages(experience.token_rewards, experience.token_rewards)\n")
    with pytest.raises(UserError, match=r"signature advantage\(experience, beta\) does not take: missing .* 'beta'"):
        formulas.advantage(spec, CONSTANTS)
    assert callable(formulas.advantage(spec, CONSTANTS | {"beta": 1.0}))
