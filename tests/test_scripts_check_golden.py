import json
from pathlib import Path

import pytest

from jaxrl_llm.algorithms.advantages import ADVANTAGES
from jaxrl_llm.algorithms.correction import IMPORTANCE_LEVELS, REJECTIONS
from jaxrl_llm.algorithms.kl import KL_ESTIMATORS
from jaxrl_llm.algorithms.policy_losses import POLICY_LOSSES
from scripts.check_golden import KINDS, main

FILE = Path(__file__).parent / "golden" / "verl_core_algos.json"
GOLDEN = json.loads(FILE.read_text())
ONE_WAY = ["--program", "eager", "--dtype", "float64", "--layout", "padded"]


def case(kind, name):
    """A copy of the first such case."""
    return dict(next(c for c in GOLDEN["cases"] if c["kind"] == kind and c["name"] == name))


def run(tmp_path, capsys, *cases, ways=ONE_WAY):
    """Exit code and lines for a file with these cases."""
    path = tmp_path / "golden.json"
    path.write_text(json.dumps({"batches": GOLDEN["batches"], "cases": cases}))
    code = main([str(path), *ways])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("ways", "count"),
    [
        (["--program", "jit", "--dtype", "float32", "--layout", "packed"], 1),
        pytest.param(["--program", "eager", "--dtype", "float64", "--layout", "padded"], 1, marks=pytest.mark.slow),
        pytest.param([], 8, marks=pytest.mark.slow),
    ],
    ids=["jit float32 packed", "eager float64 padded", "all"],
)
def test_the_library_agrees_with_verl(ways, count, capsys):
    code = main([str(FILE), *ways])
    shown = capsys.readouterr().out
    assert "FAILED" not in shown
    assert f"388 cases in {count} ways" in shown
    assert shown.endswith(f": {388 * count} passed, 0 failed\n")
    assert code == 0


def test_all_that_verl_has_is_compared():
    def names(kind):
        return {name for c in GOLDEN["cases"] if c["kind"] == kind for name in c["name"].split(",")}

    assert names("advantage") == ADVANTAGES.keys() - {"prime"}
    assert names("policy_loss") == POLICY_LOSSES.keys() - {"reinforce", "sft"}
    assert names("kl") == KL_ESTIMATORS.keys() - {"low_var_kl"}
    assert names("rollout_correction") == {*IMPORTANCE_LEVELS, *REJECTIONS}


def moved(values):
    """Nested lists with the first number that is not 0 moved by 1e-6."""
    if isinstance(values, dict):
        return {name: value + 1e-6 for name, value in values.items()}
    if isinstance(values, list):
        for i, value in enumerate(values):
            if (changed := moved(value)) != value:
                return [*values[:i], changed, *values[i + 1 :]]
        return values
    return values + 1e-6 if values else values


@pytest.mark.parametrize(
    ("kind", "name", "field", "words"),
    [
        ("advantage", "grpo", "advantages", "advantages differs by 1.0e-06"),
        ("advantage", "gae", "returns", "returns differs by 1.0e-06"),
        ("policy_loss", "vanilla", "loss", "loss differs by 1.0e-06"),
        ("policy_loss", "vanilla", "grad_logprobs", "grad_logprobs differs by 1.0e-06"),
        ("policy_loss", "vanilla", "metrics", "the metric actor/ppo_kl differs by 1.0e-06"),
        ("kl", "k3", "value", "value differs by 1.0e-06"),
        ("kl", "k3", "grad_logprobs", "grad_logprobs differs by 1.0e-06"),
        ("value_loss", "clipped", "grad_values", "grad_values differs by 1.0e-06"),
        ("value_loss", "clipped", "clip_fraction", "the metric critic/vf_clipfrac differs by 1.0e-06"),
        ("rollout_correction", "token", "weights", "weights differs by 1.0e-06"),
        ("rollout_correction", "token_k1", "mask", "mask differs by 1.0e-06"),
        ("rollout_correction", "token", "metrics", "the metric rollout_corr/kl differs by 1.0e-06"),
    ],
)
def test_a_value_that_differs_fails_and_is_named(kind, name, field, words, tmp_path, capsys):
    wrong = case(kind, name)
    wrong[field] = moved(wrong[field])
    code, lines = run(tmp_path, capsys, wrong)
    assert code == 1
    assert any(line.startswith(f"FAILED {kind} {name}") and words in line for line in lines)
    assert lines[-1].endswith("0 passed, 1 failed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "advantages"}, "unknown kind 'advantages' (did you mean 'advantage'?)"),
        ({"name": "grop"}, "'grop' (did you mean 'grpo'?)"),
        ({"params": {"beta": 1.0}}, "unknown constant 'beta'"),
        ({"batch": "nowhere"}, "the field 'nowhere' is missing"),
        ({"advantages": None}, "the field 'advantages' is missing"),
        ({"advantages": [[0.0]]}, "an array has the shape [1, 1]"),
    ],
)
def test_what_is_not_known_or_missing_fails_and_is_named(change, words, tmp_path, capsys):
    changed = {name: value for name, value in (case("advantage", "grpo") | change).items() if value is not None}
    code, lines = run(tmp_path, capsys, case("advantage", "grpo"), changed)
    assert code == 1
    assert [line for line in lines if line.startswith("FAILED") and words in line]
    assert lines[-1].endswith("1 passed, 1 failed")


@pytest.mark.parametrize("change", [{"name": "nonesuch"}, {"params": {"nonesuch": 1.0}}], ids=["name", "constant"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_tells_names_and_constants_that_it_does_not_know(kind, change, tmp_path, capsys):
    first = next(c for c in GOLDEN["cases"] if c["kind"] == kind)
    code, lines = run(tmp_path, capsys, first | change)
    assert code == 1
    assert [line for line in lines if line.startswith("FAILED") and "'nonesuch'" in line]


def test_a_wrong_loss_is_told_with_the_ways_in_which_it_fails(tmp_path, capsys):
    """1e-6 is nothing in float32."""
    wrong = case("kl", "k1")
    wrong["value"] = moved(wrong["value"])
    code, lines = run(tmp_path, capsys, wrong, ways=["--program", "jit"])
    assert code == 1
    assert lines[0].endswith("(jit float64 padded, jit float64 packed)")
    assert lines[-1].endswith("2 passed, 2 failed")


@pytest.mark.parametrize("text", [None, "{", "[]", '{"batches": {}, "cases": []}', '{"batches": {}}'])
def test_what_is_no_golden_file_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit_:
        main([str(path)])
    assert exit_.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {path} is not a golden file: ")
    assert len(shown.splitlines()) == 1
