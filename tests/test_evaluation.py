import math
from itertools import combinations

import numpy as np
import pytest

from jaxrl_llm.evaluation import majority, pass_at, powers_to, summarize
from jaxrl_llm.types import Prompt, Rollout, Scored


def sample(source, components, reward, length=3, *, uid=0, prediction=None):
    ids = np.zeros(length + 1, np.int32)
    prompt = Prompt(uid, uid, ids[:1], "", source)
    zeros = np.zeros(length + 1, np.float32)
    rollout = Rollout(prompt, 0, ids, np.arange(length + 1) > 0, zeros, ids, "eos", "")
    return Scored(rollout, components, reward, prediction=prediction)


def answers(*groups, source="a"):
    """A prompt for each text: its letters are the samples' predictions, capital ones are right, "-" is none."""
    return [
        sample(
            source,
            {"acc": float(letter.isupper())},
            float(letter.isupper()),
            uid=uid,
            prediction=None if letter == "-" else letter.lower(),
        )
        for uid, letters in enumerate(groups)
        for letter in letters
    ]


def test_sources_are_apart_and_a_failed_sample_is_a_wrong_answer():
    scored = [
        sample("a", {"acc": 1.0, "format": 0.5}, 1.05),
        sample("a", {"acc": 1.0, "format": 1.0}, 1.1, length=5),
        sample("a", {}, None),
        sample("a", {"acc": 0.0, "format": 0.5}, 0.05),
        sample("b", {"near": 0.5}, 0.5),
        sample("b", {"near": 0.25}, 0.25),
        sample("b", {"near": 0.25}, 0.25),
        sample("b", {"near": 1.0}, 1.0),
    ]
    assert summarize(scored, 4) == pytest.approx(
        {
            "val-core/a/acc/mean@4": 0.5,
            "val-core/a/acc/best@4": 1.0,
            "val-core/a/acc/pass@1": 0.5,
            "val-core/a/acc/pass@2": 1 - 1 / 6,
            "val-core/a/acc/pass@4": 1.0,
            "val-aux/a/format/mean@4": 0.5,
            "val-aux/a/format/best@4": 1.0,
            "val-aux/a/reward/mean@4": 0.55,
            "val-aux/a/reward/best@4": 1.1,
            "val-aux/a/response_length/mean": 3.5,
            "val-aux/a/failed": 1.0,
            "val-core/b/reward/mean@4": 0.5,
            "val-core/b/reward/best@4": 1.0,
            "val-aux/b/near/mean@4": 0.5,
            "val-aux/b/near/best@4": 1.0,
            "val-aux/b/response_length/mean": 3.0,
            "val-aux/b/failed": 0.0,
        }
    )


def test_one_sample_a_prompt_has_a_mean_only():
    metrics = summarize(answers("A", "b"), 1)
    assert {name: value for name, value in metrics.items() if "@" in name} == {
        "val-core/a/acc/mean@1": 0.5,
        "val-aux/a/reward/mean@1": 0.5,
    }


def test_the_first_core_metric_is_the_mean():
    assert (
        next(name for name in summarize(answers("Aab"), 3) if name.startswith("val-core/")) == "val-core/a/acc/mean@3"
    )


def test_accuracy_is_its_own_component_not_a_reward_of_one():
    scored = [sample("a", {"acc": acc}, reward) for acc, reward in ((1.0, 1.0), (0.0, 0.5), (0.0, -1.0))]
    metrics = summarize(scored, 1)
    assert metrics["val-core/a/acc/mean@1"] == pytest.approx(1 / 3)
    assert metrics["val-aux/a/reward/mean@1"] == pytest.approx(0.166667, abs=1e-6)


def test_pass_at_k_is_the_fraction_of_subsets_with_a_right_sample():
    for n in range(1, 8):
        for c in range(n + 1):
            right = [i < c for i in range(n)]
            for k in range(1, n + 1):
                subsets = list(combinations(right, k))
                assert pass_at(k, n, c) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_exact_for_200_samples():
    assert [pass_at(1, 200, c) for c in (0, 3, 200)] == [0.0, 0.015, 1.0]
    # 1 - (100/200)(99/199)(98/198), and with one right sample exactly k/n, for C(199, k) / C(200, k) = (200 - k) / 200.
    assert pass_at(100, 200, 3) == 1 - 100 * 99 * 98 / (200 * 199 * 198)
    assert [pass_at(k, 200, 1) for k in (7, 64, 128, 199)] == [0.035, 0.32, 0.64, 0.995]
    assert pass_at(150, 200, 51) == 1.0
    assert pass_at(100, 200, 100) == 1.0 - 1 / math.comb(200, 100)


def test_pass_at_k_is_reported_for_powers_of_two_and_n():
    assert [powers_to(n) for n in (1, 2, 3, 8, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_the_most_frequent_prediction_wins_and_the_first_of_equals():
    values = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert majority(["x", "y", "y", "z", "x"], values) == 0.1
    assert majority(["x", "y", "y", "z", "z"], values) == 0.2
    assert majority([None, None, None, "z", "x"], values) == 0.4
    assert majority([None, "b", None, "a", "a"], values) == 0.4
    assert majority([None] * 5, values) == 0.0


def test_votes_are_counted_prompt_by_prompt_and_a_prompt_without_any_counts_0():
    metrics = summarize(answers("Aab-", "bbA-", "----", "-A--"), 4)
    assert metrics["val-core/a/acc/maj@4"] == pytest.approx((1 + 0 + 0 + 1) / 4)
    assert "val-aux/a/reward/maj@4" not in metrics


def test_without_any_prediction_there_is_no_vote():
    assert not [name for name in summarize(answers("--", "--"), 2) if "maj@" in name]


def test_prompts_with_more_samples_do_not_count_more():
    metrics = summarize(answers("A", "Aaaa", "aaaaaa"), 6)
    assert metrics["val-core/a/acc/mean@6"] == pytest.approx((1 + 1 / 4 + 0) / 3)
    assert metrics["val-core/a/acc/best@6"] == pytest.approx(2 / 3)
    assert metrics["val-core/a/acc/maj@6"] == pytest.approx(2 / 3)
    assert metrics["val-core/a/acc/pass@1"] == pytest.approx((1 + 1 / 4 + 0) / 3)
    # Of prompts with fewer samples than k nothing is known.
    assert metrics["val-core/a/acc/pass@2"] == pytest.approx((2 / 4 + 0) / 2)
    assert metrics["val-core/a/acc/pass@4"] == pytest.approx((1 + 0) / 2)
    assert metrics["val-core/a/acc/pass@6"] == 0.0


def test_half_an_accuracy_is_no_pass():
    scored = [sample("a", {"acc": acc}, acc) for acc in (0.5, 1.0)]
    metrics = summarize(scored, 2)
    assert metrics["val-core/a/acc/mean@2"] == 0.75
    assert metrics["val-core/a/acc/pass@1"] == 0.5
