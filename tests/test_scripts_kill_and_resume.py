import importlib.util
import json
from pathlib import Path

import pytest

from jaxrl_llm import config
from tests.runs import small

PATH = Path(__file__).parents[1] / "scripts" / "kill_and_resume.py"
spec = importlib.util.spec_from_file_location("kill_and_resume", PATH)
assert spec is not None
assert spec.loader is not None
kill_and_resume = importlib.util.module_from_spec(spec)
spec.loader.exec_module(kill_and_resume)


def go(tmp_path, capsys, recipe, *arguments):
    c = small(tmp_path / "unused", recipe, total_steps=6)
    (tmp_path / "c.json").write_text(config.to_json(c))
    folder = str(tmp_path / "runs")
    command = ["--config", str(tmp_path / "c.json"), "--every", "2", "--folder", folder, *arguments]
    code = kill_and_resume.main(command)
    return code, capsys.readouterr().out


def test_a_run_that_is_killed_and_started_again_ends_as_one_that_was_not(tmp_path, capsys):
    code, shown = go(tmp_path, capsys, "quickstart", "--kills", "2")
    assert code == 0, shown
    assert "killed 2 times" in shown
    assert "equal: 7 lines of metrics" in shown


@pytest.mark.slow
def test_so_does_fine_tuning(tmp_path, capsys):
    code, shown = go(tmp_path, capsys, "sft_arithmetic", "--kills", "3", "--seed", "1")
    assert code == 0, shown


def test_differences_are_found(straight, tmp_path):
    good, bad = straight[0], tmp_path / "bad"
    assert not list(kill_and_resume.differences(good, good))
    bad.mkdir()
    lines = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    lines[2]["actor/entropy"] += 1e-7
    lines[3]["timing_s/step"] += 1.0
    del lines[4]
    (bad / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = list(kill_and_resume.differences(good, bad))
    assert found[0] == "metrics.jsonl: the steps are [0, 1, 2, 3]"
    assert found[1].startswith("metrics.jsonl, step 2: actor/entropy is")
    assert found[2] == "the checkpoints are those of the steps [], expected [2, 4]"
    assert len(found) == 3
