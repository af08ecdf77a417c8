import numpy as np
import pytest

from jaxrl_llm.evaluation import summarize
from jaxrl_llm.types import Prompt, Rollout, Scored


def sample(source, components, reward, length=3):
    ids = np.zeros(length + 1, np.int32)
    prompt = Prompt(0, 0, ids[:1], "", source)
    zeros = np.zeros(length + 1, np.float32)
    rollout = Rollout(prompt, 0, ids, np.arange(length + 1) > 0, zeros, ids, "eos", "")
    return Scored(rollout, components, reward)


def test_sources_are_apart_and_a_failed_sample_is_a_wrong_answer():
    scored = [
        sample("a", {"acc": 1.0, "format": 0.5}, 1.05),
        sample("a", {"acc": 1.0, "format": 1.0}, 1.1, length=5),
        sample("a", {}, None),
        sample("a", {"acc": 0.0, "format": 0.5}, 0.05),
        sample("b", {"near": 0.5}, 0.5),
    ]
    assert summarize(scored, 4) == pytest.approx(
        {
            "val-core/a/acc/mean@4": 0.5,
            "val-aux/a/format/mean@4": 0.5,
            "val-aux/a/reward/mean@4": 0.55,
            "val-aux/a/response_length/mean": 3.5,
            "val-aux/a/failed": 1.0,
            "val-core/b/reward/mean@4": 0.5,
            "val-aux/b/near/mean@4": 0.5,
            "val-aux/b/response_length/mean": 3.0,
            "val-aux/b/failed": 0.0,
        }
    )


def test_accuracy_is_its_own_component_not_a_reward_of_one():
    scored = [sample("a", {"acc": acc}, reward) for acc, reward in ((1.0, 1.0), (0.0, 0.5), (0.0, -1.0))]
    metrics = summarize(scored, 1)
    assert metrics["val-core/a/acc/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-aux/a/reward/mean@1"] == pytest.approx(0.166667, abs=1e-6)
