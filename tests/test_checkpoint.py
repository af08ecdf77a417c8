import json
import os
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm import checkpoint
from jaxrl_llm.checkpoint import Checkpoints, DamagedCheckpoint
from jaxrl_llm.types import ModelState, TrainState, UserError


def state(value):
    rng = np.random.default_rng(value)
    w, m = (jnp.asarray(rng.normal(size=(128, 128)), jnp.float32) for _ in range(2))
    return TrainState({"w": w}, {"m": m.astype(jnp.bfloat16)}, jnp.int32(value))


def abstract():
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


def checkpoints(folder, **changes):
    return Checkpoints(folder, **{"keep_last": 1, "keep_best": 1, "best_metric": "", **changes})


def save(folder, scores, **changes):
    """One process's saves: step -> score, None for a step without evaluation."""
    manager = checkpoints(folder, **changes)
    for step, score in scores.items():
        metrics = {} if score is None else {"val-core/x/acc/mean@1": score, "val-aux/x/length": -score}
        manager.save(step, state(step), {"step": step}, metrics)
    manager.close()
    return set(checkpoint.saved_steps(folder / "checkpoints"))


def test_the_newest_and_the_best_are_kept_and_ties_go_to_the_later(tmp_path):
    assert save(tmp_path, {1: 0.5, 2: 0.9, 3: None, 4: 0.9, 5: 0.1}, keep_best=2) == {2, 4, 5}
    assert save(tmp_path, {6: None}, keep_best=1) == {4, 6}


def test_the_best_of_an_earlier_process_is_still_the_best(tmp_path):
    assert save(tmp_path, {1: 0.9, 2: 0.5}) == {1, 2}
    assert save(tmp_path, {3: 0.2}) == {1, 3}


def test_a_metric_of_choice_decides(tmp_path):
    assert save(tmp_path, {1: 0.9, 2: 0.5, 3: 0.7}, best_metric="val-aux/x/length") == {2, 3}


def test_a_metric_that_is_not_there_is_a_warning_and_the_state_is_saved(tmp_path, caplog):
    assert save(tmp_path, {1: 0.9}, best_metric="val-core/typo") == {1}
    assert "best_metric='val-core/typo' is not among val-core/x/acc/mean@1" in caplog.text


def test_what_was_saved_comes_back_in_the_wanted_layout(tmp_path):
    save(tmp_path, {7: 0.1})
    path = checkpoint.newest(tmp_path / "checkpoints")
    assert path == tmp_path / "checkpoints" / "7"
    assert checkpoint.read_rest(path) == {"step": 7}
    restored = checkpoint.restore(path, abstract())
    assert restored.opt_state["m"].dtype == jnp.bfloat16
    jax.tree.map(np.testing.assert_array_equal, restored, state(7))
    params = checkpoint.restore_params(path, abstract().params)
    np.testing.assert_array_equal(params["w"], state(7).params["w"])


def test_a_checkpoint_of_another_model_is_not_called_damaged(tmp_path):
    save(tmp_path, {7: 0.1})
    path = checkpoint.newest(tmp_path / "checkpoints")
    other = abstract()._replace(params={"v": jax.ShapeDtypeStruct((5,), jnp.float32)})
    with pytest.raises(UserError, match=r"does not fit .*: \.params\['v'\] is missing, expected float32\[5\]; .*'w'"):
        checkpoint.restore(path, other)
    with pytest.raises(UserError, match=r"'w'\] is float32\[128, 128\], expected nothing"):
        checkpoint.restore_params(path, other.params)
    with_critic = abstract()._replace(critic=ModelState(*abstract()[:3]))
    with pytest.raises(UserError, match=r"holds opt_state, params, step; this run has critic, opt_state, params, step"):
        checkpoint.restore(path, with_critic)


def largest(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(bytes(data))


DAMAGE = {
    "array cut short": lambda path: cut(largest(path / "state")),
    "array with one bit changed": lambda path: flip(largest(path / "state")),
    "array missing": lambda path: largest(path / "state").unlink(),
    "index cut short": lambda path: cut(path / "state" / "manifest.ocdbt"),
    "state missing": lambda path: shutil.rmtree(path / "state"),
    "rest cut short": lambda path: cut(path / "rest" / "metadata"),
    "rest altered": lambda path: (path / "rest" / "metadata").write_text('{"rest": {"step": 9}}'),
    "rest missing": lambda path: shutil.rmtree(path / "rest"),
    "empty": lambda path: [shutil.rmtree(path), path.mkdir()],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(tmp_path, kind):
    save(tmp_path, {1: 0.1})
    path = checkpoint.newest(tmp_path / "checkpoints")
    DAMAGE[kind](path)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.restore(path, abstract())
    if kind != "array missing":  # it may be the optimizer's
        with pytest.raises(DamagedCheckpoint):
            checkpoint.restore_params(path, abstract().params)


EXHAUSTED = """
import os, resource, sys
from pathlib import Path
from jaxrl_llm import checkpoint
path = Path(sys.argv[1])
checkpoint.read_rest(path)
free = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free
os.close(free)
resource.setrlimit(resource.RLIMIT_NOFILE, (free, free))
try:
    checkpoint.read_rest(path)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_what_the_system_cannot_read_is_not_called_damaged(tmp_path):
    """In a process of its own, in which nothing else opens files."""
    save(tmp_path, {1: 0.1})
    path = checkpoint.newest(tmp_path / "checkpoints")
    done = subprocess.run([sys.executable, "-c", EXHAUSTED, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == f"UserError: checkpoint {path} cannot be read: Too many open files\n", done.stderr


def test_another_format_is_refused_by_name(tmp_path):
    save(tmp_path, {1: 0.1})
    path = checkpoint.newest(tmp_path / "checkpoints")
    (path / "rest" / "metadata").write_text(json.dumps({"format": 9}))
    with pytest.raises(UserError, match="has format 9, this version of jaxrl_llm reads 1"):
        checkpoint.read_rest(path)


def test_a_score_that_was_measured_in_another_way_does_not_compete(tmp_path, caplog):
    save(tmp_path, {1: 0.9, 2: 0.5}, keep_last=2, measured="ten rows")
    assert save(tmp_path, {3: 0.2, 4: 0.1}, measured="twenty rows") == {3, 4}
    assert "was measured in another way" in caplog.text


def test_a_score_that_cannot_be_read_costs_the_score_only(tmp_path, caplog):
    save(tmp_path, {1: 0.9, 2: 0.5}, keep_last=2)
    cut(tmp_path / "checkpoints" / "1" / "metrics" / "metrics")
    assert save(tmp_path, {3: 0.2}) == {2, 3}
    assert "checkpoints/1 is damaged: it counts as the worst" in caplog.text


def test_damaged_ones_are_renamed_not_deleted(tmp_path):
    for _ in range(2):
        save(tmp_path, {4: None})
        checkpoint.set_aside(tmp_path / "checkpoints" / "4")
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["4.damaged-1", "4.damaged-2"]
    assert checkpoint.newest(tmp_path / "checkpoints") is None


CHILD = """
import sys
from pathlib import Path
from tests.test_checkpoint import checkpoints, state
manager = checkpoints(Path(sys.argv[1]), keep_best=0)
manager.save(1, state(1), {"step": 1}, {})
manager.wait()
if len(sys.argv) > 2:
    import resource
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
manager.save(2, state(2), {"step": 2}, {})
print("saving", flush=True)
if len(sys.argv) > 3:
    for _ in range(1000):
        import time
        time.sleep(0.02)
        manager.check()
manager.wait()
"""


def child(folder, *arguments):
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.1])
def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path, delay):
    process = child(tmp_path)
    assert process.stdout.readline() == b"saving\n"
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    path = checkpoint.newest(tmp_path / "checkpoints")
    step = checkpoint.read_rest(path)["step"]
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(path, abstract()), state(step))
    assert save(tmp_path, {3: None}, keep_best=0) == {3}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["3"]  # what was half-written is gone


@pytest.mark.parametrize("way", [[], ["check"]])
def test_a_full_disk_is_one_error_and_the_last_checkpoint_stays(tmp_path, way):
    process = child(tmp_path, "20000", *way)  # bytes that a file may have: the array of the second one does not fit
    _, errors = process.communicate(timeout=120)
    assert b"in check" in errors or not way
    assert b"checkpoints/2 could not be written: File too large; the last good checkpoint is" in errors
    path = checkpoint.newest(tmp_path / "checkpoints")
    jax.tree.map(np.testing.assert_array_equal, checkpoint.restore(path, abstract()), state(1))
