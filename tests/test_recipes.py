"""Every recipe is a whole run, and what an algorithm has beside the policy comes back when a run goes on."""

import jax
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.assemble_learner import objective
from jaxrl_llm.config_checks import validate
from jaxrl_llm.configs import base
from scripts.bench_recipes import RECIPES
from tests.runs import comparable, run, small

# Those that need more than the policy and its samples; the others differ in functions that have tests of their own.
WITH_MORE = ("ppo", "dapo", "remax", "prime", "kl_cov")
BRIEF = {"total_steps": 2, "eval.every": 0, "checkpoint.every": 0}


def brief(recipe, run_dir, **changes):
    return small(run_dir, recipe, **BRIEF | changes)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_valid_and_says_what_it_is(recipe):
    c = configs.load(recipe)
    validate(c)
    objective(c)
    assert c.run_dir == f"runs/{recipe}"
    module = __import__(f"jaxrl_llm.configs.{recipe}", fromlist=["apply"])
    assert "arXiv:" in module.__doc__
    # `apply` makes any config one of the algorithm.
    other = configs.load("grpo_gsm8k")
    other.total_steps, other.total_epochs = 100, 0
    module.apply(other)
    validate(other)
    changed = {key: value for key, value in c.algorithm.items() if value != base.get_config().algorithm[key]}
    assert {key: other.algorithm[key] for key in changed} == changed


@pytest.mark.parametrize("recipe", [r if r in WITH_MORE else pytest.param(r, marks=pytest.mark.slow) for r in RECIPES])
def test_a_recipe_trains(recipe, tmp_path):
    more = {"ppo": {"critic.warmup_steps": 1}, "dapo": {"reward.weights.overlong": 0.5, "total_steps": 4}}
    lines, _, state = run(brief(recipe, tmp_path, **more.get(recipe, {})))
    assert len(lines) == (4 if recipe == "dapo" else 2)
    assert all(np.isfinite(value) for line in lines for value in line.values())
    assert not any(value for line in lines for name, value in line.items() if name.endswith("/skipped_updates"))
    assert np.isfinite(lines[-1]["actor/loss"])
    assert (state.critic is not None) == (recipe == "ppo")
    assert (state.reward_model is not None) == (recipe == "prime")
    assert ("train/num_gen_batches" in lines[0]) == (recipe in ("dapo", "prime"))


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("ppo", {"critic.warmup_steps": 1, "algorithm.kl_reward_coef": 0.1, "algorithm.kl_target": 0.01}),
        pytest.param("prime", {}, marks=pytest.mark.slow),
    ],
)
def test_critic_reward_model_and_kl_coefficient_come_back(recipe, changes, tmp_path):
    changes = {"eval.every": 0, **changes}
    lines, _, state = run(small(tmp_path / "straight", recipe, **changes))
    run(small(tmp_path / "stopped", recipe, total_steps=2, **changes))
    resumed, shown, its_state = run(small(tmp_path / "stopped", recipe, **changes))
    assert "resuming after step 2" in shown
    assert comparable(resumed) == comparable(lines)
    jax.tree.map(np.testing.assert_array_equal, its_state, state)
    beside = state.critic if recipe == "ppo" else state.reward_model
    assert int(beside.step) == 8
    if recipe == "ppo":
        coefficients = [line["actor/reward_kl_penalty_coeff"] for line in lines]
        assert len(set(coefficients)) == 4
