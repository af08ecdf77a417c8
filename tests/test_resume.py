import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from jaxrl_llm import checkpoint, config, resume
from jaxrl_llm.assemble import assemble
from jaxrl_llm.controller import train
from jaxrl_llm.interrupts import Interrupts
from jaxrl_llm.train import _train
from jaxrl_llm.types import UserError
from tests.runs import comparable, run, small


@pytest.fixture
def copy(straight, tmp_path):
    """A finished run of four steps, with checkpoints of steps 2 and 4, to do anything with."""
    folder = tmp_path / "copy"
    shutil.copytree(straight[0], folder)
    return folder


def test_a_run_that_stops_and_is_started_again_gives_the_same_metrics_and_weights(straight, tmp_path):
    _, lines, _, state = straight
    run(small(tmp_path, total_steps=2))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "actor/loss": 9}\n{"step": 4, "act')  # a step beyond the checkpoint, and half a line
    resumed, shown, its_state = run(small(tmp_path))
    assert "resuming after step 2" in shown
    assert "config.total_steps was 2 and is now 4" in shown
    assert comparable(resumed) == comparable(lines)
    jax.tree.map(np.testing.assert_array_equal, its_state, state)


def test_half_precision_moments_and_a_reference_come_back_too(tmp_path):
    changes = {"optimizer.first_moment_dtype": "bfloat16", "algorithm.kl_loss_coef": 0.1, "eval.every": 0}
    lines, _, state = run(small(tmp_path / "straight", **changes))
    run(small(tmp_path / "stopped", total_steps=3, **changes))
    resumed, _, its_state = run(small(tmp_path / "stopped", **changes))
    assert comparable(resumed) == comparable(lines)
    assert {x.dtype.name for x in jax.tree.leaves(its_state.opt_state)} == {"float32", "bfloat16", "int32"}
    jax.tree.map(np.testing.assert_array_equal, its_state, state)


def test_a_damaged_checkpoint_is_renamed_and_the_one_before_it_used(straight, copy, caplog):
    largest = max((copy / "checkpoints" / "4" / "state").rglob("*"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:1000])
    resumed, shown, state = run(small(copy))
    assert "resuming after step 2" in shown
    assert f"checkpoint {copy}/checkpoints/4 is damaged" in caplog.text
    assert f"renamed to 4.damaged-1; going on from {copy}/checkpoints/2 instead" in caplog.text
    assert comparable(resumed) == comparable(straight[1])
    jax.tree.map(np.testing.assert_array_equal, state, straight[3])


def test_if_all_are_damaged_nothing_begins_anew_in_silence(copy):
    for step in ("2", "4"):
        (copy / "checkpoints" / step / "rest" / "metadata").write_text("{")
    with pytest.raises(UserError, match=r"all checkpoints are damaged; to begin anew, choose another"):
        run(small(copy))
    assert checkpoint.saved_steps(copy / "checkpoints") == [2, 4]


@pytest.mark.parametrize("form", ["", "checkpoints", "checkpoints/2"])
def test_a_run_can_begin_at_a_checkpoint_of_another(straight, copy, tmp_path, form):
    if form != "checkpoints/2":
        shutil.rmtree(copy / "checkpoints" / "4")
    c = small(tmp_path / "new", **{"checkpoint.resume": copy / form})
    lines, shown, _ = run(c)
    assert "resuming after step 2" in shown
    assert comparable(lines) == comparable(straight[1])[3:]
    if not form:
        shutil.rmtree(copy)  # the same command again goes on from its own checkpoints
        _, shown, _ = run(c)
        assert "resuming after step 4" in shown


def test_a_run_from_anothers_checkpoint_has_one_of_its_own_at_once(copy, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "metrics.jsonl").write_text('{"step": 1, "of": "an attempt without a checkpoint"}\n')
    parts = assemble(small(tmp_path / "new", **{"checkpoint.resume": copy}), Console(quiet=True))
    parts.resources.close()
    assert checkpoint.saved_steps(tmp_path / "new" / "checkpoints") == [4]
    assert (tmp_path / "new" / "metrics.jsonl").read_text() == ""


def test_a_place_to_resume_from_that_is_none_is_refused(tmp_path):
    with pytest.raises(
        UserError, match=r"checkpoint\.resume='atuo' is neither 'auto' nor 'never' \(did you mean 'auto'"
    ):
        run(small(tmp_path / "run", **{"checkpoint.resume": "atuo"}))
    assert not (tmp_path / "run").exists()


def test_two_runs_in_one_folder_are_refused_and_the_first_one_is_named(copy):
    lock = resume.claim(copy)
    with pytest.raises(UserError, match=rf"another run is writing to .*copy' \(process {os.getpid()} on "):
        run(small(copy, total_steps=6))
    lock.release()
    resume.claim(copy).release()


def test_a_resume_from_another_model_is_refused_by_name(straight, tmp_path):
    run_dir, *_ = straight
    model = tmp_path / "model"
    shutil.copytree(config.load("quickstart").model.path, model)
    with pytest.raises(UserError, match=r"belongs to another run: config\.model\.path was '.*' and is now '.*model'"):
        run(small(run_dir, **{"model.path": model, "total_steps": 6}))


def test_a_reference_model_that_has_changed_on_disk_is_refused(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(config.load("quickstart").model.path, model)
    changes = {"model.path": model, "algorithm.kl_loss_coef": 0.1, "eval.every": 0}
    run(small(tmp_path / "run", total_steps=1, **changes))
    tensors = load_file(model / "model.safetensors")
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] + tensors[name]}, model / "model.safetensors")
    with pytest.raises(UserError, match="does not hold the weights any more that this run began with"):
        run(small(tmp_path / "run", total_steps=2, **changes))


def test_resuming_can_be_forbidden(straight):
    run_dir, *_ = straight
    with pytest.raises(UserError, match=r"checkpoints up to step 4 and config\.checkpoint\.resume is 'never'"):
        run(small(run_dir, **{"checkpoint.resume": "never"}))


def test_a_resume_with_other_data_is_refused_by_name(straight):
    run_dir, *_ = straight
    with pytest.raises(UserError, match=r"config\.seed was 0 and is now 5"):
        run(small(run_dir, seed=5, total_steps=6))
    with pytest.raises(UserError, match=r"config\.data\.train_batch_size was 8 and is now 16"):
        run(small(run_dir, total_steps=6, **{"data.train_batch_size": 16, "learner.mini_batch_size": 8}))


def test_every_start_is_on_record(copy):
    run(small(copy, total_steps=5))
    first, second = (json.loads(line) for line in (copy / "provenance.jsonl").read_text().splitlines())
    assert (first["step"], second["step"]) == (0, 4)
    assert first["data"] == second["data"]
    assert set(first["data"]) == {"train", "val"}
    assert first["packages"]["jax"] == jax.__version__
    assert first["devices"] == ["cpu cpu"] * 8


def test_a_disk_that_is_full_names_the_last_good_checkpoint(tmp_path):
    parts = assemble(small(tmp_path), Console(quiet=True))
    score, calls = parts.run.collect._score, []

    def fill(rollouts):
        calls.append(rollouts)
        if len(calls) == 3:
            parts.run.writer._file = open("/dev/full", "w")  # noqa: SIM115
        return score(rollouts)

    parts.run.collect._score = fill
    words = rf"No space left on device; the last good checkpoint is {tmp_path}/checkpoints/2\. Make room"
    with pytest.raises(UserError, match=words):
        _train(parts, Interrupts())


def test_steps_that_are_done_are_saved_when_scoring_fails(straight, tmp_path):
    parts = assemble(small(tmp_path), Console(quiet=True))
    score, calls = parts.run.collect._score, []

    def fail(rollouts):
        calls.append(rollouts)
        if len(calls) == 4:
            raise UserError("no sample could be scored")
        return score(rollouts)

    parts.run.collect._score = fail
    with pytest.raises(UserError, match="no sample could be scored"):
        _train(parts, Interrupts())
    resumed, shown, _ = run(small(tmp_path))
    assert "resuming after step 3" in shown
    assert comparable(resumed) == comparable(straight[1])


def test_a_signal_while_a_failed_run_is_closing_does_not_hide_its_error(tmp_path):
    with Interrupts() as interrupts:
        parts = assemble(small(tmp_path), Console(quiet=True), interrupts)
        parts.run.collect._score = lambda rollouts: (_ for _ in ()).throw(UserError("broken"))
        parts.resources.callback(os.kill, os.getpid(), signal.SIGTERM)
        with pytest.raises(UserError, match="broken"):
            _train(parts, interrupts)


def interrupted(run_dir, stage, number):
    """The small run, with a signal at the third step of a stage; returns what `train` does."""
    with Interrupts() as interrupts:
        parts = assemble(small(run_dir), Console(quiet=True), interrupts)
        owner = parts.run if stage == "sync" else parts.run.collect
        function, calls = getattr(owner, stage), []

        def signalled(*args):
            calls.append(args)
            if len(calls) == (
                3 if stage != "sync" else 4
            ):  # weights are given to the engine once before the first step
                os.kill(os.getpid(), number)
            return function(*args)

        setattr(owner, stage, signalled)
        with parts.resources:
            return train(parts.run)


@pytest.mark.parametrize(
    ("stage", "number", "done"),
    [("_generate", signal.SIGTERM, 2), ("_score", signal.SIGINT, 2), ("sync", signal.SIGTERM, 3)],
)
def test_a_signal_ends_a_run_with_everything_saved(straight, tmp_path, stage, number, done):
    before = signal.signal(number, signal.SIG_DFL)  # a shell's background jobs, such as this one, may ignore SIGINT
    assert interrupted(tmp_path, stage, number) == done
    assert signal.signal(number, before) == signal.SIG_DFL
    assert checkpoint.saved_steps(tmp_path / "checkpoints") == [2, 3][: done - 1]
    resumed, shown, state = run(small(tmp_path))
    assert f"resuming after step {done}" in shown
    assert comparable(resumed) == comparable(straight[1])
    jax.tree.map(np.testing.assert_array_equal, state, straight[3])


def test_the_second_signal_ends_the_process():
    code = (
        "import os, signal\nfrom jaxrl_llm.interrupts import Interrupts\n"
        "with Interrupts() as i, i.uncut():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('alive')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGTERM
    assert not done.stdout


def sft(run_dir, devices, steps, resume="auto"):
    """Fine-tunes on so many virtual devices; returns the losses and gradient norms of its steps."""
    c = small(run_dir, "sft_arithmetic", **{"eval.every": 0, "total_steps": steps, "optimizer.schedule": "constant"})
    c.mesh.fsdp, c.mesh.tensor = -1, 1
    c.learner.mini_batch_size = c.learner.micro_batch_rows = 8
    c.checkpoint.resume = str(resume)
    path = run_dir.with_suffix(".json")
    path.write_text(config.to_json(c))
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "jaxrl_llm.train", "--config", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert f"devices: {devices} x cpu" in done.stdout
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return np.array([(line["actor/loss"], line["actor/grad_norm"], line["actor/lr"]) for line in lines])


def test_a_run_on_eight_devices_goes_on_exactly_and_on_four_within_rounding(tmp_path):
    expected = sft(tmp_path / "straight", 8, 4)
    sft(tmp_path / "stopped", 8, 2)
    np.testing.assert_array_equal(sft(tmp_path / "eight", 8, 4, tmp_path / "stopped"), expected[2:])
    np.testing.assert_allclose(sft(tmp_path / "stopped", 4, 4), expected, rtol=1e-5)
