import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm import evaluate
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.types import UserError
from tests.mistakes import usage_error
from tests.runs import run as train
from tests.runs import small

MODEL = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic_base")
WORTH = [1, 1, 1, 1, 1, 1, 1, 0, 0, 0]
REWARD = """
def worth(extra_info, ground_truth, solution_str):
    if extra_info["worth"] is None:
        raise ValueError("no worth")
    return {"acc": extra_info["worth"], "pred": solution_str or None}
"""


@pytest.fixture
def rows(tmp_path):
    """A data file with a row for each number, and the arguments that score each by its number."""

    def write(worth, name="sums.jsonl"):
        lines = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "worth": w} for i, w in enumerate(worth)]
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "worth.py").write_text(REWARD)
        reward = f"--config.reward.functions={tmp_path}/worth.py:worth"
        # The recipe brings what a tiny model needs.
        options = ["--config", "quickstart", reward, "--config.reward.workers=1", "--config.rollout.slots=8"]
        return ["--model", MODEL, "--data", str(tmp_path / name), "--out", str(tmp_path / "out"), *options]

    return write


def results(tmp_path):
    summary = json.loads((tmp_path / "out" / "metrics.json").read_text())
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


@pytest.mark.parametrize("mesh", [["--config.mesh.data=8"], []], ids=["data=8", "any"])
def test_on_eight_devices_every_row_counts_once(rows, tmp_path, mesh, capsys):
    evaluate.run([*rows(WORTH), *mesh])
    summary, samples = results(tmp_path)
    assert summary["metrics"]["val-core/sums/acc/mean@1"] == pytest.approx(0.7)
    assert [s["row"] for s in samples] == list(range(10))
    assert [s["components"]["acc"] for s in samples] == WORTH
    assert (summary["samples"], summary["rows_kept"], summary["n"]) == (10, 10, 1)
    out = capsys.readouterr().out
    assert "8 x cpu" in out
    assert "0.700" in out
    assert "10 prompts x 1 = 10 samples" in out


def test_a_line_says_all_of_a_sample_and_a_failed_one_counts_0(rows, tmp_path):
    evaluate.run([*rows([1, None]), "--n", "3", "--temperature", "0.5", "--max_tokens", "4"])
    summary, samples = results(tmp_path)
    assert [(s["row"], s["sample"]) for s in samples] == [(r, n) for r in (0, 1) for n in range(3)]
    first, failed = samples[0], samples[3]
    assert set(first) == {
        *("source", "row", "sample", "prompt", "response", "ground_truth", "reward", "components"),
        *("prediction", "stop_reason", "response_length", "error"),
    }
    assert (first["source"], first["prompt"], first["ground_truth"]) == ("sums", "0+0=", "0")
    assert (first["reward"], first["components"], first["error"]) == (1.0, {"acc": 1.0}, None)
    assert first["prediction"] == first["response"]
    assert (failed["reward"], failed["components"], failed["prediction"]) == (None, {}, None)
    assert failed["error"].startswith("worth: ValueError: no worth")
    assert all(1 <= s["response_length"] <= 4 for s in samples)
    assert summary["tokens"] == sum(s["response_length"] for s in samples)
    assert summary["metrics"]["val-core/sums/acc/pass@3"] == 0.5
    assert summary["metrics"]["val-aux/sums/failed"] == 3.0
    assert (summary["temperature"], summary["max_tokens"]) == (0.5, 4)


def test_several_files_are_several_sources_and_limit_counts_rows_of_both(rows, tmp_path):
    arguments = rows([1, 0, 1])
    evaluate.run([*rows([0], "more.jsonl"), *arguments[2:4], "--limit", "3"])
    summary, samples = results(tmp_path)
    assert [s["source"] for s in samples] == ["more", "sums", "sums"]
    assert summary["metrics"]["val-core/more/acc/mean@1"] == 0.0
    assert summary["metrics"]["val-core/sums/acc/mean@1"] == 0.5


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps with a checkpoint and an evaluation each."""
    changes = {
        "total_steps": 2,
        "data.val": "arithmetic:count=24,split=test",
        "optimizer.learning_rate": 0.01,
        "optimizer.warmup_steps": 0,
        "eval.every": 1,
        "eval.n": 2,
        "checkpoint.every": 1,
    }
    c = small(tmp_path_factory.mktemp("runs") / "two", **changes)
    train(c)
    return Path(c.run_dir)


def test_a_run_is_measured_as_it_was_while_training(trained, capsys):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: {k: v for k, v in line.items() if k.startswith("val-")} for line in lines}
    assert steps[1] != steps[2]
    same_mesh = "--config.mesh.fsdp=2"
    evaluate.run(["--run", str(trained), same_mesh])
    evaluate.run(["--run", str(trained), same_mesh, "--step", "1"])
    for step in (1, 2):
        summary = json.loads((trained / "evaluations" / f"step_{step}" / "metrics.json").read_text())
        assert (summary["step"], summary["n"]) == (step, 2)
        assert summary["metrics"] == pytest.approx(steps[step])
    with pytest.raises(UserError, match=r"no checkpoint of step 7; there are: 1, 2"):
        evaluate.run(["--run", str(trained), "--step", "7"])


def test_the_table_has_a_row_a_component_and_leaves_unknown_metrics_empty():
    metrics = {
        "val-core/openai/gsm8k/acc/mean@2": 0.25,
        "val-core/openai/gsm8k/acc/pass@2": 0.5,
        "val-aux/openai/gsm8k/format/mean@2": 1.0,
        "val-aux/openai/gsm8k/response_length/mean": 9.0,
        "val-aux/openai/gsm8k/failed": 0.0,
    }
    table = evaluate.table(metrics)
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns == {
        "source": ["openai/gsm8k", "openai/gsm8k"],
        "component": ["acc", "format"],
        "mean@2": ["0.250", "1.000"],
        "pass@2": ["0.500", ""],
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modle", "x"], "unknown option '--modle' (did you mean '--model'?)"),
        (["--data", "x.jsonl"], "either --run RUN_DIR or --model FOLDER, got neither"),
        (["--run", "a", "--model", "b"], "got both"),
        (["--model", MODEL], "there is nothing to evaluate on: give --data FILE"),
        (["--model", MODEL, "--data", "x", "--n", "0"], "argument --n: must be at least 1, got 0"),
        (["--model", MODEL, "--data", "x", "--max_tokens", "0"], "argument --max_tokens: must be at least 1, got 0"),
        (["--model", MODEL, "--data"], "argument --data: expected one argument"),
        (["--model", MODEL, "--data", "x", "--step", "3"], "--step chooses a checkpoint of --run"),
        (["--model", MODEL, "--data", "x", "--n", "2", "--temperature", "0"], "all be the same at temperature 0"),
        (["--run", "a", "--config", "quickstart"], "--config goes with --model"),
    ],
)
def test_mistakes_in_the_arguments_are_one_line_and_exit_2(arguments, words, capsys):
    assert words in usage_error(evaluate.run, arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--run", "nowhere"], "nowhere is not a run folder"),
        (["--model", "./nowhere", "--data", "x"], "'./nowhere' does not exist"),
        (["--model", MODEL, "--data", "nothing.jsonl"], "data file nothing.jsonl does not exist"),
        (["--model", MODEL, "--data", "arithmetic:count=2"], "--max_tokens 512 that makes 5"),
        (["--model", MODEL, "--data", "x", "--config.eval.m=3"], "config.eval.m does not exist"),
    ],
)
def test_what_is_missing_is_named(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, ModelError)) as caught:
        evaluate.run(arguments)
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_command_exits_with_1_and_no_traceback():
    command = [sys.executable, "-m", "jaxrl_llm.evaluate", "--run", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: nowhere is not a run folder: it has no config.json"
    assert "Traceback" not in done.stderr
