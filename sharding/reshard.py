"""Resharding: a pytree of arrays from one layout (mesh, spec, dtype) to another, as a planned step.

    plan = Reshard(params, shardings, jnp.bfloat16)
    plan.lower_bound_bytes, plan.received_bytes
    new, checksum = plan(params)
    verify(new, checksum)

On the same devices it is one jitted cast with out_shardings; towards other devices of the process the cast runs where
the source is, so that only the bytes of the new dtype travel.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxrl_llm.sharding.mesh import ShardingError


@jax.jit
def checksum(tree: Any) -> jax.Array:
    """uint32 []: a checksum of all bits of all arrays that depends on their places but on no layout.

    Integer arithmetic modulo 2^32 is associative, so every mesh computes the same value; weighing each
    element by its own odd number and each array by its index makes swapped elements and arrays show.
    """
    total = jnp.uint32(0)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        width = jnp.dtype(leaf.dtype).itemsize
        bits = jax.lax.bitcast_convert_type(leaf, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        weights = jnp.uint32(2 * i + 1)
        for dim, size in enumerate(leaf.shape):
            place = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
            weights = weights * jnp.uint32(size | 1) + jnp.uint32(2) * place
        total += jnp.sum(bits.astype(jnp.uint32) * weights, dtype=jnp.uint32)
    return total


def verify(tree: Any, expected: int, what: str = "parameters") -> None:
    """Raises ShardingError unless `checksum(tree)` is `expected`."""
    got = int(checksum(tree))
    if got != expected:
        raise ShardingError(f"{what} arrived damaged: checksum {got:#010x}, expected {expected:#010x}")


class Reshard:
    """The conversion of one kind of tree to one layout; compiled once and called every step."""

    def __init__(self, source: Any, shardings: Any, dtype: Any = None, *, donate: bool = False):
        """`source`: a pytree of arrays, or of ShapeDtypeStructs with shardings. `shardings`: same structure.
        `dtype`: of the new arrays; None keeps each one's own. `donate` gives the source's buffers up."""
        self._shardings = shardings
        leaves, targets = jax.tree.leaves(source), jax.tree.leaves(shardings)
        if len(leaves) != len(targets):
            raise ShardingError(f"cannot reshard {len(leaves)} arrays with {len(targets)} shardings")
        dtypes = [jnp.dtype(dtype or leaf.dtype) for leaf in leaves]
        moves = [_moved(leaf, target, dt) for leaf, target, dt in zip(leaves, targets, dtypes, strict=True)]
        self.received_bytes = sum(needed for needed, _ in moves)
        self.lower_bound_bytes = sum(missing for _, missing in moves)
        same_devices = {d for leaf in leaves for d in leaf.sharding.device_set} == {
            d for target in targets for d in target.device_set
        }

        def cast(tree: Any) -> tuple[Any, jax.Array]:
            out = jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype), tree)
            return out, checksum(out)

        self._cast = jax.jit(
            cast,
            out_shardings=(shardings, None) if same_devices else None,
            donate_argnums=(0,) if donate else (),
        )
        self._same_devices = same_devices

    def __call__(self, tree: Any) -> tuple[Any, int]:
        """The tree in its new layout, and the checksum that the receiver must find."""
        out, total = self._cast(tree)
        if not self._same_devices:
            out = jax.device_put(out, self._shardings)
        return out, int(total)


def _moved(leaf: Any, target: Sharding, dtype: Any) -> tuple[int, int]:
    """Bytes that the target's devices hold at the end, and those of them that no source shard of the same device
    has: what must travel at least."""
    shape = tuple(leaf.shape)
    have = leaf.sharding.devices_indices_map(shape)
    needed = missing = 0
    for device, index in target.devices_indices_map(shape).items():
        box = _box(index, shape)
        size = math.prod(stop - start for start, stop in box)
        overlap = 0
        if device in have:
            overlap = math.prod(
                max(0, min(a[1], b[1]) - max(a[0], b[0]))
                for a, b in zip(box, _box(have[device], shape), strict=True)
            )
        needed += size
        missing += size - overlap
    width = np.dtype(dtype).itemsize
    return needed * width, missing * width


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)]
