import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.types import TrainState, UserError


def state(value):
    return TrainState({"w": jnp.full((4,), float(value))}, {"m": jnp.zeros(4)}, jnp.int32(value))


def checkpoints(folder, **changes):
    return Checkpoints(folder, **{"keep_last": 1, "keep_best": 1, "best_metric": "", **changes})


def save(folder, scores, **changes):
    """One process's saves: step -> score, None for a step without evaluation."""
    manager = checkpoints(folder, **changes)
    for step, score in scores.items():
        metrics = {} if score is None else {"val-core/x/acc/mean@1": score, "val-aux/x/length": -score}
        manager.save(step, state(step), {"step": step}, metrics)
    manager.close()
    return {int(p.name) for p in (folder / "checkpoints").iterdir() if p.name.isdigit()}


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
    manager = checkpoints(tmp_path)
    assert manager.latest() == 7
    assert manager.rest(7) == {"step": 7}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))
    restored = manager.restore(7, abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, state(7))
    np.testing.assert_array_equal(manager.params(7, abstract.params)["w"], np.full(4, 7.0))
    with pytest.raises(UserError, match="no checkpoint of step 3; there are: 7"):
        manager.params(3, abstract.params)
    other = abstract._replace(params={"w": jax.ShapeDtypeStruct((5,), jnp.float32, sharding=abstract.step.sharding)})
    with pytest.raises(UserError, match="does not fit this run's model"):
        manager.restore(7, other)
    manager.close()
