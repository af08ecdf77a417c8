"""A run's folder: its config, and whether the run in it can go on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import Config
from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.types import UserError

# A checkpoint is not a state of a run with another one of these.
FIXED = ("task", "seed", "model.path", "model.hf_config", "model.vocab_pad_multiple")


def open_checkpoints(c: Config) -> Checkpoints:
    """The checkpoints of the run in config.run_dir, which is made where it is not there."""
    try:
        Path(c.run_dir).mkdir(parents=True, exist_ok=True)
        (Path(c.run_dir) / "config.json").touch()
        k = c.checkpoint
        keep_best = k.keep_best if c.data.val and c.eval.every else 0  # nothing tells which is best
        return Checkpoints(Path(c.run_dir), keep_last=k.keep_last, keep_best=keep_best, best_metric=k.best_metric)
    except OSError as error:
        raise UserError(f"config.run_dir={c.run_dir!r} cannot be written: {error}") from error


def steps_done(c: Config, checkpoints: Checkpoints, stream: PromptStream) -> int:
    """The newest checkpoint's step, or 0 without one; puts the stream where that checkpoint left it.

    Raises UserError if the run may not or cannot go on, naming what differs.
    """
    step = checkpoints.latest()
    if step is None:
        return 0
    if c.checkpoint.resume == "never":
        raise UserError(
            f"{checkpoints.folder} has checkpoints up to step {step} and config.checkpoint.resume is 'never'; choose "
            "another config.run_dir or set config.checkpoint.resume='auto'"
        )
    rest = checkpoints.rest(step)
    changes = [
        f"config.{key} was {_get(rest['config'], key)!r} and is now {_get(saved(c), key)!r}"
        for key in FIXED
        if _get(rest["config"], key) != _get(saved(c), key)
    ]
    if changes:
        raise UserError(
            f"{checkpoints.folder / str(step)} belongs to another run: {'; '.join(changes)}. Change it back, or choose "
            "another config.run_dir"
        )
    stream.set_state(rest["stream"])
    return step


def saved(c: Config) -> dict[str, Any]:
    """The config as JSON holds it."""
    return json.loads(configs.to_json(c))


def load_run(run_dir: Path) -> Config:
    """The config that a run was started with."""
    path = run_dir / "config.json"
    if not path.is_file():
        raise UserError(f"{run_dir} is not a run folder: it has no config.json")
    return configs.load(str(path))


def _get(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values
