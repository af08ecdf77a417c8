import csv
import json
import sys

import pytest

from jaxrl_llm.types import UserError
from scripts import soak
from scripts.soak import MIB, Sample, verdict

WARMUP = 300.0
USUAL = Sample(
    seconds=0.0,
    memory=800 * MIB,
    child_memory=80 * MIB,
    files=40,
    threads=60,
    children=2,
    step=0,
    compilations=15,
)


def samples(count=360, **changes):
    """An hour of a steady run; a change is a function of the sample's number."""
    rows = [USUAL._replace(seconds=10.0 * i, step=10 * i) for i in range(1, count + 1)]
    for name, change in changes.items():
        rows = [row._replace(**{name: change(i)}) for i, row in enumerate(rows)]
    return rows


def failed(rows):
    return [check.name for check in verdict(rows, WARMUP) if not check.good]


def test_a_steady_run_passes():
    assert failed(samples()) == []


def test_memory_may_grow_by_less_than_two_percent():
    assert failed(samples(memory=lambda i: int(800 * MIB * (1 + 0.03 * i / 330)))) == ["memory"]
    assert failed(samples(memory=lambda i: int(800 * MIB * (1 + 0.01 * i / 330)))) == []
    assert failed(samples(child_memory=lambda i: int(80 * MIB * (1 + 0.03 * i / 330)))) == ["children's memory"]
    assert failed(samples(child_memory=lambda i: 0)) == []


def test_what_grows_in_the_warm_up_is_not_judged():
    grows = lambda i: (min(i, 28) + 1) * MIB  # noqa: E731
    assert failed(samples(memory=grows, files=grows, threads=grows, compilations=grows)) == []


def test_noise_is_no_growth():
    noisy = samples(
        memory=lambda i: (800 + 200 * (i % 7 == 0)) * MIB,
        files=lambda i: 40 + 9 * (i % 5 == 0),
        threads=lambda i: 60 + i % 3,
    )
    assert failed(noisy) == []
    ends_high = [*noisy[:-1], noisy[-1]._replace(memory=1200 * MIB, files=90, threads=90)]
    assert failed(ends_high) == []


@pytest.mark.parametrize(("field", "name"), [("files", "open files"), ("threads", "threads")])
def test_a_file_or_thread_more_and_more_is_growth(field, name):
    assert failed(samples(**{field: lambda i: 40 + i // 100})) == [name]
    assert failed(samples(**{field: lambda i: 400 - i})) == []


def test_one_more_compilation_fails():
    assert failed(samples(compilations=lambda i: 15 + (i > 200))) == ["compilations"]
    (check,) = [c for c in verdict(samples(compilations=lambda i: 15 + (i > 200)), WARMUP) if not c.good]
    assert check.text == "15 -> 16"


def test_a_run_that_makes_no_steps_fails():
    assert failed(samples(step=lambda i: 7)) == ["steps"]
    (check,) = verdict(samples(step=lambda i: max(0, i - 50)), WARMUP)
    assert not check.good
    assert "none in the warm-up of 5 min; give more --warmup" in check.text


def test_two_samples_are_the_least():
    assert len(verdict(samples(31), WARMUP)) == 6
    (check,) = verdict(samples(30), WARMUP)
    assert (check.good, check.text) == (False, "1 after the warm-up of 5 min; expected at least 2")


def test_step_and_compilations_are_those_of_the_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert soak.progress(path) == (0, 0)
    path.write_text('{"st')
    assert soak.progress(path) == (0, 0)
    path.write_text('{"step": 0, "val-core/a": 0.5}\n')
    assert soak.progress(path) == (0, 0)
    lines = [{"step": i, "perf/compilations": float(10 + i), "long": "x" * 1000} for i in range(1, 200)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 200, "perf/co')
    assert soak.progress(path) == (199, 209)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--minutes", "5"], "--minutes 5 leaves 0 min after --warmup 5"),
        (["--minutes", "1", "--warmup", "0.9"], "two samples, 10 s each"),
        (["--warmup", "-1"], "--warmup -1: expected minutes of at least 0"),
        (["--run_dir", "."], "must be new or empty"),
        (["--csv", "nowhere/soak.csv"], "its folder does not exist"),
    ],
)
def test_arguments_that_cannot_work_are_refused(arguments, text):
    with pytest.raises(UserError, match=text):
        soak.main(arguments)


def test_what_follows_two_dashes_is_for_the_training_command():
    args, more = soak.parse(["--minutes", "60", "--", "--config.seed=1", "--", "x"])
    assert (args.minutes, args.warmup, args.config) == (60.0, 5.0, "quickstart")
    assert more == ["--config.seed=1", "--", "x"]
    assert soak.parse([])[1] == []


STOPS_WELL = """
import json, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
with (pathlib.Path(sys.argv[1]) / "metrics.jsonl").open("w") as file:
    for step in range(1, 10**6):
        print(json.dumps({"step": step, "perf/compilations": 3.0}), file=file, flush=True)
        time.sleep(0.01)
"""


def test_a_command_is_watched_and_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "INTERVAL", 0.5)
    found, end = soak.soak([sys.executable, "-c", STOPS_WELL, str(tmp_path)], tmp_path, minutes=2.1 / 60)
    assert end == ("end", True, "stopped with SIGTERM, exit code 0")
    assert len(found) == 4
    assert all(s.memory > MIB and s.files >= 3 and s.threads == 1 and s.children == 0 for s in found)
    assert found[-1].compilations == 3
    assert found[0].step < found[-1].step
    soak.write_csv(tmp_path / "soak.csv", found)
    rows = list(csv.DictReader((tmp_path / "soak.csv").open()))
    assert [int(row["memory"]) for row in rows] == [s.memory for s in found]


def test_a_command_that_ends_by_itself_fails_with_the_tail_of_its_log(tmp_path, capsys):
    arguments = ["--minutes", "10", "--run_dir", str(tmp_path / "new"), "--", "--config.optimizer.learing_rate=1"]
    assert soak.main(arguments) == 1
    shown = capsys.readouterr().out
    assert "did you mean config.optimizer.learning_rate" in shown
    assert "FAILED  end: ended by itself, exit code 1" in shown
    assert "FAILED  samples: 0 after" in shown


def test_a_command_that_dies_of_the_signal_fails(tmp_path):
    _, end = soak.soak([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, minutes=0)
    assert end == ("end", False, "stopped with SIGTERM, exit code -15")
