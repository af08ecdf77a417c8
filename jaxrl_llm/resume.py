"""A run's folder: who may write in it, its config, and where the run in it goes on."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from jaxrl_llm import checkpoint
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import Checkpoints, DamagedCheckpoint
from jaxrl_llm.config import Config
from jaxrl_llm.configs import base
from jaxrl_llm.data.stream import Prompts, PromptStream
from jaxrl_llm.output import write_whole
from jaxrl_llm.plugins import nearest
from jaxrl_llm.pools import Pool
from jaxrl_llm.types import UserError

logger = logging.getLogger("jaxrl_llm.resume")

_HOLDER = ".lock.json"  # who holds .lock, for messages

# A checkpoint is not a state of a run with another one of these.
FIXED = ("task", "seed", "model.path", "model.hf_config", "model.vocab_pad_multiple", "optimizer.first_moment_dtype")


def claim(run_dir: Path) -> FileLock:
    """Makes the folder and holds it until `release()` or the end of the process, however it ends.

    Raises UserError if it cannot be written or another process holds it.
    """
    lock = FileLock(run_dir / ".lock")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_whole(run_dir / _HOLDER, json.dumps(holder) + "\n")
    except Timeout:
        raise UserError(
            f"another run is writing to config.run_dir={str(run_dir)!r}{_holder(run_dir)}; wait for its end, or choose "
            "another config.run_dir"
        ) from None
    except OSError as error:
        raise UserError(f"config.run_dir={str(run_dir)!r} cannot be written: {error}") from error
    return lock


def open_checkpoints(c: Config, held_out: Prompts | None) -> Checkpoints:
    """The checkpoints of the run in config.run_dir, for writing."""
    k, measure = c.checkpoint, {key: value for key, value in c.eval.items() if key not in ("every", "before_training")}
    return Checkpoints(
        Path(c.run_dir),
        keep_last=k.keep_last,
        keep_best=k.keep_best if held_out and c.eval.every else 0,  # else nothing tells which is best
        best_metric=k.best_metric,
        measured=f"{held_out.fingerprint if held_out else ''} {measure} {c.reward.to_json()}",
    )


def candidates(c: Config) -> list[Path]:
    """The checkpoints that the run may go on from, newest first: those in config.run_dir; while there are none, those
    that config.checkpoint.resume names."""
    resume, own = c.checkpoint.resume, _steps(Path(c.run_dir) / "checkpoints")
    if resume == "never" and own:
        raise UserError(
            f"{own[0].parent} has checkpoints up to step {own[0].name} and config.checkpoint.resume is 'never'; choose "
            "another config.run_dir or set config.checkpoint.resume='auto'"
        )
    if own or resume in ("auto", "never"):
        return own
    path = Path(resume).expanduser().absolute()
    found = [path] if path.name.isdigit() and path.is_dir() else _steps(path / "checkpoints") or _steps(path)
    if not found:
        raise UserError(
            f"config.checkpoint.resume={resume!r} is neither 'auto' nor 'never'"
            f"{nearest(resume, ('auto', 'never'))}, nor a run folder with checkpoints, nor a checkpoint in one"
        )
    return found


def check(c: Config, stream: PromptStream) -> list[str]:
    """Raises UserError if the run may not go on from the newest readable checkpoint; returns what has changed in the
    config since, in words. Only reads."""
    for path in candidates(c):
        try:
            return _accept(c, path, checkpoint.read_rest(path), stream)
        except DamagedCheckpoint:
            continue  # `restore` reports it
    return []


def restore(c: Config, stream: PromptStream, pool: Pool) -> dict[str, Any] | None:
    """Goes on from the newest checkpoint that is whole: gives the pool its state, puts the stream where it was and
    returns the rest of it; None without checkpoints. Damaged ones of this run are renamed; one of another run is copied
    into this one, so that the same command goes on with this run's own from then on.

    Raises UserError if there are checkpoints and all are damaged, or if the initial model is another one now.
    """
    own = Path(c.run_dir).absolute() / "checkpoints"
    damaged: dict[Path, DamagedCheckpoint] = {}
    for path in candidates(c):
        try:
            rest = checkpoint.read_rest(path)
            _accept(c, path, rest, stream)
            pool.restore(partial(checkpoint.restore, path))
        except DamagedCheckpoint as error:
            damaged[path] = error
            continue
        if c.algorithm.kl_loss_coef and rest["initial"] != pool.initial_checksum():
            raise UserError(
                f"{path} cannot be continued: config.model.path={c.model.path!r} does not hold the weights any more "
                "that this run began with, and they are its reference model (config.algorithm.kl_loss_coef). "
                "Restore them"
            )
        for bad, error in damaged.items():
            renamed = f"; it was renamed to {checkpoint.set_aside(bad).name}" if bad.parent == own else ""
            logger.warning("checkpoint %s is damaged (%s)%s; going on from %s instead", bad, error, renamed, path)
        if path.parent != own:
            for name in ("metrics.jsonl", "samples.jsonl"):  # of an attempt that had not come to a checkpoint
                (Path(c.run_dir) / name).unlink(missing_ok=True)
            checkpoint.adopt(path, own)
        return rest
    if damaged:
        reasons = "\n".join(f"  {path}: {error}" for path, error in damaged.items())
        raise UserError(f"all checkpoints are damaged; to begin anew, choose another config.run_dir:\n{reasons}")
    return None


def saved(c: Config) -> dict[str, Any]:
    """The config as JSON holds it."""
    return json.loads(configs.to_json(c))


def load_run(run_dir: Path) -> Config:
    """The config that a run was started with."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run folder: it has no config.json")
    return configs.load(str(path))


def _accept(c: Config, path: Path, rest: Mapping[str, Any], stream: PromptStream) -> list[str]:
    """Puts the stream where it was; returns the keys that differ. Raises UserError if it cannot go on with them."""
    was, now = dict(_leaves(rest["config"])), dict(_leaves(saved(c)))
    was = {**{key: value for key, value in _leaves(saved(base.get_config())) if key in now}, **was}  # newer keys
    if was["model.path"] and now["model.path"] and _same_folder(was["model.path"], now["model.path"]):
        was["model.path"] = now["model.path"]
    changed = {key: f"config.{key} was {was.get(key)!r} and is now {now.get(key)!r}" for key in {**was, **now}}
    changed = {key: text for key, text in changed.items() if was.get(key) != now.get(key)}
    fatal = [text for key, text in changed.items() if any(key == f or key.startswith(f"{f}.") for f in FIXED)]
    if fatal:
        raise UserError(
            f"{path} belongs to another run: {'; '.join(fatal)}. Change it back, or choose another config.run_dir"
        )
    try:
        stream.set_state(rest["stream"])
    except UserError as error:
        keys = (
            "; ".join(text for key, text in changed.items() if key.startswith("data.")) or "the config has not changed"
        )
        raise UserError(f"{path} cannot be continued: {error} ({keys})") from error
    return [text for key, text in changed.items() if key not in ("run_dir", "checkpoint.resume")]


def _same_folder(one: str, other: str) -> bool:
    paths = [Path(path).expanduser() for path in (one, other)]
    return all(path.is_dir() for path in paths) and paths[0].samefile(paths[1])


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _steps(folder: Path) -> list[Path]:
    return [folder.absolute() / str(step) for step in reversed(checkpoint.saved_steps(folder))]


def _holder(run_dir: Path) -> str:
    """Who holds the folder, as far as its records tell."""
    try:
        holder = json.loads((run_dir / _HOLDER).read_text())
        return f" (process {holder['pid']} on {holder['host']}, since {holder['time']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
