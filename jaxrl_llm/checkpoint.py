"""Checkpoints: the whole state of a run, written by Orbax in the background and visible only when complete.

A checkpoint knows what it should hold: the layout of its arrays, a checksum of their values, a digest of the rest. So
one that was cut short or altered on disk is told from one of another model, and neither is ever trained on.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.types import TrainState, UserError

logger = logging.getLogger("jaxrl_llm.checkpoint")


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or not what was saved."""


class Checkpoints:
    """The checkpoints of one run, `run_dir/checkpoints/STEP`."""

    def __init__(self, run_dir: Path, *, keep_last: int, keep_best: int, best_metric: str):
        """For the run that writes them. Keeps the newest `keep_last`, and `keep_best` more by the highest `best_metric`
        ("": the first val-core metric given to `save`)."""
        self.folder = run_dir.absolute() / "checkpoints"
        self._best_metric = best_metric
        self._writing: int | None = None  # the step that is being saved in the background
        policies: list[Any] = [checkpoint_managers.LatestN(keep_last)]
        if keep_best:
            policies.append(
                checkpoint_managers.BestN(get_metric_fn=_best, n=keep_best, keep_checkpoints_without_metrics=False)
            )
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=_best if keep_best else None,  # without it metrics are not written, and a resume forgets the best
            save_decision_policy=None,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,  # what a killed run was writing
        )
        for step in saved_steps(self.folder):
            _drop_unreadable_score(self.folder / str(step))
        self._manager = ocp.CheckpointManager(self.folder, options=self._options)

    def save(self, step: int, state: TrainState, rest: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts writing; returns when the arrays have been copied. `rest`: JSON values (data position, config).
        Raises UserError if the previous checkpoint could not be written."""
        if not self._best_metric:
            self._best_metric = next((name for name in metrics if name.startswith("val-core/")), "")
        best = metrics.get(self._best_metric)
        if metrics and best is None:
            logger.warning(
                "checkpoint %d counts as the worst: config.checkpoint.best_metric=%r is not among %s",
                step,
                self._best_metric,
                ", ".join(metrics),
            )
        self.wait()
        self._writing = step
        contents = {"rest": dict(rest), "layout": _layout(state), "checksum": int(checksum(state))}
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state._asdict()),
            rest=ocp.args.JsonSave({**contents, "digest": _digest(contents)}),
        )
        try:
            self._manager.save(step, args=items, metrics=None if best is None else {"best": float(best)}, force=True)
        except Exception as error:  # the file system's, as Orbax passes them on: of many types
            raise self._unwritten(error) from error

    def check(self) -> None:
        """Raises UserError if the checkpoint that is being written has failed."""
        try:
            self._manager.check_for_errors()
        except Exception as error:
            raise self._unwritten(error) from error

    def wait(self) -> None:
        """Waits until everything is on disk. Raises UserError if it could not be written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._unwritten(error) from error
        self._writing = None

    def close(self) -> None:
        """Waits until everything is on disk, unless it is known that this failed."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def newest(self) -> Path | None:
        """The complete checkpoint of the highest step."""
        return newest(self.folder)

    def _unwritten(self, error: Exception) -> UserError:
        step, self._writing = self._writing, None
        return UserError(
            f"checkpoint {self.folder / str(step)} could not be written: {_reason(error)}; the last good checkpoint is "
            f"{self.newest() or 'none: the run began here'}. Make room, and the same command goes on from there"
        )


def saved_steps(folder: Path) -> list[int]:
    """Steps of the complete checkpoints in a folder, in order."""
    return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit() and p.is_dir())


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the highest step."""
    return next((folder / str(step) for step in reversed(saved_steps(folder))), None)


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint, so that nothing takes it for a good one; returns its new path."""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    return path.rename(aside)


def read_rest(path: Path) -> dict[str, Any]:
    """What `save` got beside the state, from one checkpoint. Raises DamagedCheckpoint."""
    return _contents(path)["rest"]


def saved_checksum(path: Path) -> int:
    """The checksum of the state that was saved. Raises DamagedCheckpoint."""
    return _contents(path)["checksum"]


def restore(path: Path, abstract: TrainState) -> TrainState:
    """The state of one checkpoint; arrays come into the shardings of `abstract`.

    Raises UserError, naming what differs, if it is one of another model or optimizer, and DamagedCheckpoint.
    """
    contents = _contents(path)
    layout = _layout(abstract)
    if contents["layout"] != layout:
        raise UserError(
            f"checkpoint {path} does not fit this run's model and optimizer: {_differences(contents['layout'], layout)}"
        )
    state = TrainState(
        **_read(path / "state", ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(abstract._asdict()))
    )
    if (found := int(checksum(state))) != contents["checksum"]:
        raise DamagedCheckpoint(f"its values have the checksum {found:#010x}, saved were {contents['checksum']:#010x}")
    return state


def restore_params(path: Path, abstract_params: Any) -> Any:
    """The parameters alone."""
    layout = {name: v for name, v in _contents(path)["layout"].items() if name.startswith(".params")}
    wanted = _layout(TrainState(abstract_params, None, None))  # type: ignore[arg-type]
    if layout != wanted:
        raise UserError(f"checkpoint {path} does not fit this model: {_differences(layout, wanted)}")
    restored = _read(
        path / "state",
        ocp.PyTreeCheckpointHandler(),
        ocp.args.PyTreeRestore(
            item={"params": abstract_params},
            restore_args={"params": ocp.checkpoint_utils.construct_restore_args(abstract_params)},
            partial_restore=True,
        ),
    )
    return restored["params"]


def _contents(path: Path) -> dict[str, Any]:
    contents = _read(path / "rest", ocp.JsonCheckpointHandler(), ocp.args.JsonRestore())
    if not isinstance(contents, dict) or contents.pop("digest", None) != _digest(contents):
        raise DamagedCheckpoint(f"{path / 'rest'} is not what was saved")
    return contents


def _read(folder: Path, handler: Any, args: Any) -> Any:
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            return checkpointer.restore(folder, args=args)
    except (jax.errors.JaxRuntimeError, MemoryError, PermissionError):
        raise  # not the checkpoint's fault
    except Exception as error:  # tensorstore's and Orbax's, for files that are missing, short or garbled: of many types
        raise DamagedCheckpoint(f"{folder}: {_reason(error)}") from error


def _layout(state: TrainState) -> dict[str, str]:
    """Shape and dtype of each array, by path."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    lines = [
        f"{name} is {saved.get(name, 'missing')}, expected {wanted.get(name, 'nothing')}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    return "; ".join(lines[:5]) + (f"; and {len(lines) - 5} more" if len(lines) > 5 else "")


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def _best(metrics: Mapping[str, float]) -> float:
    return metrics["best"]


def _drop_unreadable_score(checkpoint: Path) -> None:
    """The manager reads the scores of all checkpoints when it starts, and stops at one that it cannot read."""
    path = checkpoint / "metrics" / "metrics"
    try:
        if path.exists():
            float(json.loads(path.read_text())["best"])
    except (ValueError, KeyError, TypeError):
        logger.warning("%s is damaged: checkpoint %s counts as the worst", path, checkpoint.name)
        shutil.rmtree(path.parent)


def _reason(error: Exception) -> str:
    """The end of a library's chain of messages: what the file system said."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause).split(" [")[0].split("\n")[0].rsplit(": ", 1)[-1] or type(cause).__name__
