"""Device meshes. The only place that states axis types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")


class ShardingError(ValueError):
    """A mesh or a layout that cannot be made, with the axis, tensor and dimension that are at fault."""


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of AXES, of size 1 where `shape` does not name them.

    `shape` maps axis names to sizes; one size may be -1 and takes the devices that are left. `devices`
    defaults to all devices of all processes. Raises ShardingError if the sizes do not multiply to their number.
    """
    devices = list(jax.devices() if devices is None else devices)
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise ShardingError(f"mesh axis {unknown[0]!r} is unknown; the axes are {', '.join(AXES)}")
    sizes = {axis: int(shape.get(axis, 1)) for axis in AXES}
    bad = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
    free = [axis for axis, size in sizes.items() if size == -1]
    if bad or len(free) > 1:
        raise ShardingError(f"mesh sizes must be positive, and at most one of them -1; got {sizes}; change config.mesh")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % fixed == 0:
        sizes[free[0]] = len(devices) // fixed
    if math.prod(sizes.values()) != len(devices):
        used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1"
        raise ShardingError(
            f"mesh {used} needs {fixed} device{'s' if fixed != 1 else ''}{' times a whole number' if free else ''}, "
            f"but there are {len(devices)}; change config.mesh (one axis may be -1)"
        )
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
