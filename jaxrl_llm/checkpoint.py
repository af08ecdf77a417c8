"""Checkpoints: the whole state of a run, written by Orbax in the background and visible only when complete.

A checkpoint knows what it should hold: the layout of its arrays, a checksum of their values, a digest of the rest. So
one that was cut short or altered on disk is told from one of another model, and neither is ever trained on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from jaxrl_llm import host_memory
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.types import ModelState, TrainState, UserError

logger = logging.getLogger("jaxrl_llm.checkpoint")

FORMAT = 1  # of checkpoints


class DamagedCheckpoint(Exception):
    """A checkpoint that is incomplete or not what was saved."""


class Checkpoints:
    """The checkpoints of one run, `run_dir/checkpoints/STEP`."""

    def __init__(self, run_dir: Path, *, keep_last: int, keep_best: int, best_metric: str, measured: str = ""):
        """For the run that writes them. Keeps the newest `keep_last`, and `keep_best` more by the highest `best_metric`
        ("": the first val-core metric given to `save`). `measured` says on what and how: scores that were measured in
        another way are dropped, for they cannot be compared."""
        self.folder = run_dir.absolute() / "checkpoints"
        self._best_metric, self._measured = best_metric, f"{best_metric} {measured}"
        self._writing: int | None = None  # the step that is being saved in the background
        policies: list[Any] = [checkpoint_managers.LatestN(keep_last)]
        if keep_best:
            policies.append(
                checkpoint_managers.BestN(get_metric_fn=_best, n=keep_best, keep_checkpoints_without_metrics=False)
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=_best if keep_best else None,  # without it metrics are not written, and a resume forgets the best
            save_decision_policy=None,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,  # what a killed run was writing
        )
        for step in saved_steps(self.folder):
            self._drop_other_score(self.folder / str(step))
        self._manager = ocp.CheckpointManager(self.folder, options=options)

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
        host_memory.give_back()
        self._writing = step
        contents = {
            "format": FORMAT,
            "rest": dict(rest),
            "layout": _layout(state),
            "checksum": int(checksum(state)),
            "params_checksum": int(checksum(state.params)),
        }
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(_present(state)),
            rest=ocp.args.JsonSave({**contents, "digest": _digest(contents)}),
        )
        try:
            score = None if best is None else {"best": float(best), "measured": self._measured}
            self._manager.save(step, args=items, metrics=score, force=True)
        except Exception as error:  # the file system's, as Orbax passes them on: of many types
            raise self._unwritten(error) from error

    def check(self) -> None:
        """Raises UserError if the checkpoint that was being written has failed; does not wait for it."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

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

    def last_good(self) -> str:
        """Which checkpoint is the newest complete one, in words."""
        path = newest(self.folder)
        return f"the last good checkpoint is {path}" if path else "there is no checkpoint yet"

    def _drop_other_score(self, path: Path) -> None:
        """The manager reads the scores of all checkpoints when it starts, and stops at one that it cannot read."""
        file = path / "metrics" / "metrics"
        if not file.exists():
            return
        try:
            score = json.loads(file.read_text())
            float(score["best"])
            why = "" if score["measured"] == self._measured else "was measured in another way"
        except (ValueError, KeyError, TypeError):
            why = "is damaged"
        if why:
            logger.warning("the score of checkpoint %s %s: it counts as the worst", path, why)
            shutil.rmtree(file.parent)

    def _unwritten(self, error: Exception) -> UserError:
        step, self._writing = self._writing, None
        return UserError(
            f"checkpoint {self.folder / str(step)} could not be written: {_reason(error)}; {self.last_good()}. Make "
            "room, and the same command goes on from there"
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


def restore(path: Path, abstract: TrainState) -> TrainState:
    """The state of one checkpoint; arrays come into the shardings of `abstract`.

    Raises UserError, naming what differs, if it is one of another model or optimizer, and DamagedCheckpoint.
    """
    contents, layout = _contents(path), _layout(abstract)
    theirs, ours = ({name[1:].split(".")[0].split("[")[0] for name in x} for x in (contents["layout"], layout))
    if theirs != ours:
        raise UserError(
            f"checkpoint {path} holds {', '.join(sorted(theirs))}; this run has {', '.join(sorted(ours))}. A run "
            "cannot go on with an algorithm that trains other models. Change it back, or choose another config.run_dir"
        )
    if contents["layout"] != layout:
        raise UserError(
            f"checkpoint {path} does not fit this run's model and optimizer: {_differences(contents['layout'], layout)}"
        )
    parts = _read(path / "state", ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(_present(abstract)))
    for name in ("critic", "reward_model"):
        if name in parts:
            parts[name] = ModelState(**parts[name])
    state = TrainState(**parts)
    _verify(state, contents["checksum"])
    return state


def restore_params(path: Path, abstract_params: Any) -> Any:
    """The parameters alone. Raises like `restore`."""
    contents = _contents(path)
    layout = {name: v for name, v in contents["layout"].items() if name.startswith(".params")}
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
    _verify(restored["params"], contents["params_checksum"])
    return restored["params"]


def adopt(path: Path, folder: Path) -> Path:
    """Copies a checkpoint of another run into a folder of checkpoints; it appears when it is whole."""
    copy = folder / path.name
    unfinished = folder / f"{path.name}.adopting"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.copytree(path, unfinished)
    shutil.rmtree(unfinished / "metrics", ignore_errors=True)  # its score was measured by the other run
    return unfinished.rename(copy)


def _present(state: TrainState) -> dict[str, Any]:
    """The parts of the state that the algorithm has, those of models as dicts, which Orbax can restore."""
    return {
        name: part._asdict() if isinstance(part, ModelState) else part
        for name, part in state._asdict().items()
        if part is not None
    }


def _contents(path: Path) -> dict[str, Any]:
    contents = _read(path / "rest", ocp.JsonCheckpointHandler(), ocp.args.JsonRestore())
    if isinstance(contents, dict) and {"format", "digest"} & set(contents) and contents.get("format") != FORMAT:
        raise UserError(
            f"checkpoint {path} has format {contents.get('format')}, this version of jaxrl_llm reads {FORMAT}: use the "
            "version that wrote it (provenance.jsonl in the run's folder names it)"
        )
    if not isinstance(contents, dict) or contents.pop("digest", None) != _digest(contents):
        raise DamagedCheckpoint(f"{path / 'rest'} is not what was saved")
    return contents


def _verify(tree: Any, expected: int) -> None:
    if (found := int(checksum(tree))) != expected:
        raise DamagedCheckpoint(f"its values have the checksum {found:#010x}, saved were {expected:#010x}")


def _read(folder: Path, handler: Any, args: Any) -> Any:
    try:
        with ocp.Checkpointer(handler) as checkpointer:
            return checkpointer.restore(folder, args=args)
    except (jax.errors.JaxRuntimeError, MemoryError):
        raise  # not the checkpoint's fault
    except Exception as error:  # tensorstore's and Orbax's, for files that are missing, short or garbled: of many types
        if _of_the_system(error):
            raise UserError(f"checkpoint {folder.parent} cannot be read: {_reason(error)}") from error
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


def _of_the_system(error: BaseException | None) -> bool:
    """Whether the system could not read a file that may well be whole (rights, too many open files, a bad disk)."""
    while error is not None:
        gone = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if (isinstance(error, OSError) and not gone) or (code and int(code[1]) not in (errno.ENOENT, errno.ENOTDIR)):
            return True
        error = error.__cause__
    return False


def _reason(error: Exception) -> str:
    """The end of a library's chain of messages: what the file system said."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause).split(" [")[0].split("\n")[0].rsplit(": ", 1)[-1] or type(cause).__name__
