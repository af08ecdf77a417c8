"""What a run was made from: one line in provenance.jsonl for every time that it is started."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxrl_llm

_PACKAGES = ("jaxrl-llm", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "transformers", "numpy")


def record(run_dir: Path, *, step: int, seed: int, data: Mapping[str, str], specs: Iterable[str]) -> None:
    """Appends the line of this start.

    `step`: steps already done. `data`: a fingerprint by the name of the dataset. `specs`: names of functions; those
    that come from files are recorded with a hash of the file.
    """
    files = {Path(spec.rpartition(":")[0]) for spec in specs if ":" in spec}
    line = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "step": step,
        "seed": seed,
        "command": sys.argv,
        "folder": str(Path.cwd()),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "devices": [f"{device.platform} {device.device_kind}" for device in jax.devices()],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(("JAX_", "XLA_", "LIBTPU_", "NCCL_"))},
        "git": {"jaxrl_llm": git_state(Path(jaxrl_llm.__file__).parent), "folder": git_state(Path.cwd())},
        "data": dict(data),
        "files": {str(path): hashlib.sha256(path.expanduser().read_bytes()).hexdigest() for path in sorted(files)},
    }
    path = run_dir / "provenance.jsonl"
    cut = path.exists() and not path.read_bytes().endswith(b"\n")  # by a kill
    with path.open("a") as file:
        file.write("\n" * cut + json.dumps(line) + "\n")


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, files that differ from it and a hash of the differences; None outside of a repository or without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD").strip()
        changed = _git(folder, "status", "--porcelain").splitlines()
        return {
            "commit": commit,
            "changed": changed,
            "diff": hashlib.sha256(_git(folder, "diff", "HEAD").encode()).hexdigest(),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", timeout=20, check=True
    )
    return done.stdout


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
