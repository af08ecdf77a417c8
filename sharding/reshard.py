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

    Integer arithmetic modulo 2^32 is associative, so every mesh computes the same value; mixing each
    element's bits with its own place, and with its array's index, makes swapped elements and arrays show.
    """
    total = jnp.uint32(0)
    for i, leaf in enumerate(jax.tree.leaves(tree)):
        width = jnp.dtype(leaf.dtype).itemsize
        bits = jax.lax.bitcast_convert_type(leaf, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
        place = jnp.uint32(2 * i + 1)
        for dim, size in enumerate(leaf.shape):
            index = jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, dim)
            place = place * jnp.uint32(size | 1) + jnp.uint32(2) * index
        total += jnp.sum(_mixed(bits.astype(jnp.uint32) + place), dtype=jnp.uint32)
    return total


def _mixed(x: jax.Array) -> jax.Array:
    # The finalizer of MurmurHash3: one to one, so that no single change is lost, and not linear: a sum of
    # bits weighed by places misses x and -x changing places, for 2^31 times any even number is 0.
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


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
        # One jit can only span layouts that list the same devices in the same order.
        orders = {
            tuple(sharding.devices_indices_map(tuple(leaf.shape)))
            for leaf, target in zip(leaves, targets, strict=True)
            for sharding in (leaf.sharding, target)
        }
        self._one_program = len(orders) == 1
        self._donate = donate

        def cast(tree: Any) -> tuple[Any, jax.Array]:
            out = jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype), tree)
            return out, checksum(out)

        self.program = jax.jit(
            cast,
            out_shardings=(shardings, None) if self._one_program else None,
            donate_argnums=(0,) if donate else (),
        )

    def __call__(self, tree: Any) -> tuple[Any, int]:
        """The tree in its new layout, and the checksum that the receiver must find."""
        out, total = self.program(tree)
        if not self._one_program:
            out = jax.device_put(out, self._shardings)
        if self._donate:  # jit keeps donated buffers that no output can use, such as those of another dtype
            for leaf in jax.tree.leaves(tree):
                leaf.delete()
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
                max(0, min(a[1], b[1]) - max(a[0], b[0])) for a, b in zip(box, _box(have[device], shape), strict=True)
            )
        needed += size
        missing += size - overlap
    width = np.dtype(dtype).itemsize
    return needed * width, missing * width


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[tuple[int, int]]:
    return [cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)]
