"""Accelerators, and how many of them: the peak rates that a plan assumes, and where these figures come from.

TPUs: the system architecture pages of Cloud TPU's documentation (links are one way, half of the bidirectional figure
there) and, for `hbm`, the limit that the TPU compiler names when it refuses a program. GPUs: NVIDIA's data
sheets (dense bfloat16, SXM; NVLink one way; 400 Gbit/s of network a GPU, as in DGX H100); of their memory,
_GPU_RESERVE is left to CUDA, cuDNN and NCCL.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_llm.plugins import nearest
from jaxrl_llm.types import UserError

GIB = 2**30
_GPU_RESERVE = 2.0  # GiB


class Chip(NamedTuple):
    """One accelerator."""

    name: str
    flops: float  # bfloat16 a second, dense
    hbm: float  # bytes that programs may use
    hbm_rate: float  # bytes a second
    link_rate: float  # bytes a second to the others of its slice or node, one way
    network_rate: float = math.nan  # bytes a second to other nodes, one way
    node: int = 0  # GPUs of a node; 0: there are none


TPUS = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 15.75 * GIB, 819e9, 200e9),
        Chip("v5p", 459e12, 95.74 * GIB, 2765e9, 600e9),
        Chip("v6e", 918e12, 31.25 * GIB, 1640e9, 400e9),
    )
}
GPUS = {
    chip.name: chip
    for chip in (
        Chip("A100", 312e12, 80e9 - _GPU_RESERVE * GIB, 2039e9, 300e9, 25e9, 8),
        Chip("H100", 989e12, 80e9 - _GPU_RESERVE * GIB, 3350e9, 450e9, 50e9, 8),
        Chip("H200", 989e12, 141e9 - _GPU_RESERVE * GIB, 4800e9, 450e9, 50e9, 8),
        Chip("B200", 2250e12, 180e9 - _GPU_RESERVE * GIB, 8000e9, 900e9, 50e9, 8),
    )
}
# Host devices stand for accelerators without known rates: programs are compiled, times and verdicts mean nothing.
_HOST = Chip("cpu", math.nan, math.inf, math.nan, math.nan)


class Topology(NamedTuple):
    """What a plan is for."""

    name: str  # as the user wrote it
    chip: Chip
    count: int
    devices: Sequence[Any] | None  # to compile for; None: there is no compiler for them here

    @property
    def compiled(self) -> bool:
        """Whether programs can be compiled for it here."""
        return self.devices is not None


def topology(name: str) -> Topology:
    """Of "v5e:4x4" (a TPU slice), "gpu:8xH100", or "cpu:8" (host devices). Raises UserError."""
    kind, _, shape = name.partition(":")
    if kind == "gpu":
        return _gpus(name, shape)
    if kind == "cpu":
        return _host_devices(name, shape)
    if kind not in TPUS:
        raise UserError(f"--topology {name!r}: there is no TPU {kind!r}{nearest(kind, TPUS)}; {_EXPECTED}")
    if not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise UserError(f"--topology {name!r}: {shape!r} is not the shape of a slice; {_EXPECTED}")
    devices = _tpu_devices(name)
    return Topology(name, TPUS[kind], len(devices), devices)


_EXPECTED = (
    f"expected TPU:SHAPE such as v5e:4x4 or v5p:4x4x8 (TPUs: {', '.join(TPUS)}), "
    f"gpu:NxNAME such as gpu:8xH100 (GPUs: {', '.join(GPUS)}), or cpu:N"
)


def _gpus(name: str, shape: str) -> Topology:
    count, _, kind = shape.partition("x")
    if not count.isdigit() or int(count) < 1 or kind not in GPUS:
        raise UserError(
            f"--topology {name!r}: {shape!r} is not a number of known GPUs{nearest(kind, GPUS)}; {_EXPECTED}"
        )
    return Topology(name, GPUS[kind], int(count), None)


def _host_devices(name: str, shape: str) -> Topology:
    if not shape.isdigit() or int(shape) < 1:
        raise UserError(f"--topology {name!r}: {shape!r} is not a number of devices; {_EXPECTED}")
    devices = jax.devices("cpu")
    if len(devices) < int(shape):
        raise UserError(
            f"--topology {name!r}: this process has {len(devices)} host devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape}"
        )
    return Topology(name, _HOST, int(shape), devices[: int(shape)])


def _tpu_devices(name: str) -> Sequence[Any]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU here to ask
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except Exception as error:  # whatever a missing or older libtpu raises
        text = str(error)
        if "libtpu" in text or "not installed" in text:
            raise UserError(
                f"--topology {name!r} needs the TPU compiler: pip install 'jaxrl-llm[tpu]' (in a clone: pip install -e "
                f"'.[tpu]'). It said: {text.splitlines()[0]}"
            ) from error
        raise UserError(f"--topology {name!r}: the TPU compiler knows no such slice: {text.splitlines()[0]}") from error
