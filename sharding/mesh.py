"""Device meshes. The only place that states axis types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

AXES = ("data", "fsdp", "expert", "context", "tensor")
_TYPES = (AxisType.Auto,) * len(AXES)


class ShardingError(ValueError):
    """A mesh or a layout that cannot be made, with the axis, tensor and dimension that are at fault."""


def make_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of AXES, of size 1 where `shape` does not name them.

    `shape` maps axis names to sizes; one size may be -1 and takes the devices that are left. `devices`
    defaults to all devices of all processes. Raises ShardingError if the sizes do not multiply to their number.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = mesh_sizes(shape, len(devices))
    return jax.make_mesh(tuple(sizes.values()), AXES, axis_types=_TYPES, devices=devices)


def regroup(mesh: Mesh, tensor: int) -> Mesh:
    """The same devices in the same order as replicas (data axis) of `tensor` devices each. A program can lead from the
    one mesh to the other, for it has one order of devices. Raises ShardingError."""
    if mesh.size % tensor:
        raise ShardingError(f"{mesh.size} devices cannot be grouped by {tensor}; change config.rollout.tensor")
    sizes = mesh_sizes({"data": -1, "tensor": tensor}, mesh.size)
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), AXES, axis_types=_TYPES)


def abstract_mesh(shape: Mapping[str, int], count: int, kind: str, platform: str = "gpu") -> AbstractMesh:
    """The mesh over so many devices of a kind that is not here: enough for layouts, not for running."""
    sizes = mesh_sizes(shape, count)
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=_TYPES, abstract_device=device)


def mesh_sizes(shape: Mapping[str, int], count: int) -> dict[str, int]:
    """The size of each of AXES, where `shape` is over so many devices; see `make_mesh`."""
    unknown = sorted(set(shape) - set(AXES))
    if unknown:
        raise ShardingError(f"mesh axis {unknown[0]!r} is unknown; the axes are {', '.join(AXES)}")
    sizes = {axis: int(shape.get(axis, 1)) for axis in AXES}
    bad = {axis: size for axis, size in sizes.items() if size < 1 and size != -1}
    free = [axis for axis, size in sizes.items() if size == -1]
    if bad or len(free) > 1:
        raise ShardingError(f"mesh sizes must be positive, and at most one of them -1; got {sizes}; change config.mesh")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    if free and count % fixed == 0:
        sizes[free[0]] = count // fixed
    if math.prod(sizes.values()) != count:
        used = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1) or "1"
        raise ShardingError(
            f"mesh {used} needs {fixed} device{'s' if fixed != 1 else ''}{' times a whole number' if free else ''}, "
            f"but there are {count}; change config.mesh (one axis may be -1)"
        )
    return sizes
