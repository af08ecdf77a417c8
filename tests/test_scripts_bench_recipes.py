import json

import pytest

from scripts import bench_recipes
from scripts.bench_recipes import Result, line, main, result
from tests.mistakes import SMALL

# Of the small run those settings that are no recipe; with an evaluation before and after.
SETTINGS = [
    *(setting for setting in SMALL[2:] if "total_steps" not in setting),
    "--config.data.val=arithmetic:count=4,split=test",
    "--config.eval.every=1",
    "--config.checkpoint.every=0",
]


@pytest.mark.slow
def test_a_recipe_is_trained_and_its_row_printed_and_not_trained_again(tmp_path, capsys):
    arguments = ["rloo", "--steps", "1", "--out", str(tmp_path), "--", *SETTINGS]
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()
    assert first[0] == "| recipe | seeds | steps | accuracy before | after | s/step |"
    cells = first[2].strip("| ").split(" | ")
    assert cells[:3] == ["rloo", "1", "1"]
    assert 0 <= float(cells[3]) <= 1
    before = (tmp_path / "rloo-seed0" / "metrics.jsonl").read_bytes()
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines() == first
    assert (tmp_path / "rloo-seed0" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_fails_is_told_with_its_log(tmp_path, capsys):
    assert main(["rloo", "--out", str(tmp_path), "--seeds", "7", "--", "--config.rollout.n=1"]) == 1
    shown = capsys.readouterr().out
    assert f"FAILED {tmp_path}/rloo-seed7: see {tmp_path}/rloo-seed7.log" in shown
    assert "config.rollout.n must be at least 2" in (tmp_path / "rloo-seed7.log").read_text()


def test_several_seeds_are_one_row():
    row = line("ppo", [Result(100, 0.4, 0.91, 1.0), Result(100, 0.5, 0.93, 1.2)])
    assert row == "| ppo | 2 | 100 | 0.400 to 0.500 | 0.910 to 0.930 | 1.00 to 1.20 |"


def test_accuracy_is_of_the_first_and_the_last_evaluation(tmp_path):
    rows = [
        {"step": 0, "val-core/x/acc/mean@1": 0.25, "val-aux/x/acc/mean@1": 0.1},
        *({"step": step, "timing_s/step": float(step)} for step in (1, 2, 30)),
        {"step": 31, "timing_s/step": 4.0, "val-core/x/acc/mean@1": 0.75},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert result(tmp_path) == Result(31, 0.25, 0.75, 3.0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(bench_recipes.UserError, match="has no accuracy before and after"):
        result(tmp_path)
