"""From logical dimension names to mesh axes: one table for training, one for inference.

A tensor is declared with a name for each of its dimensions; a table says over which mesh axes a dimension of
that name is cut. Dimensions without an entry (head_dim, norm, layers, ...) are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.sharding.mesh import ShardingError

Rules = Mapping[str, tuple[str, ...]]

_UNCUT: Rules = {"layers": (), "head_dim": (), "norm": (), "accumulation": ()}

# FSDP cuts every weight along the model width, TP along heads, ffn and vocabulary; batches are cut over both
# data-like axes.
TRAINING: Rules = {
    **_UNCUT,
    "batch": ("data", "fsdp"),
    "length": ("context",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

# Decoding reads all weights for every token, so they are only cut where no gather is needed; what FSDP cuts in
# training becomes room for more sequences.
INFERENCE: Rules = {
    **_UNCUT,
    "batch": ("data", "fsdp"),
    "length": (),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

# Fewer key/value heads than tensor-parallel devices: every device keeps all of them (they are small).
_REPLICATED_IF_UNEVEN = {"kv_heads"}


def partition_spec(name: str, shape: Sequence[int], dims: Sequence[str], rules: Rules, mesh: Mesh) -> PartitionSpec:
    """The PartitionSpec of tensor `name` with the given shape and dimension names.

    Raises ShardingError, naming tensor, dimension and axis, for a name that the table lacks, a dimension that the axis
    does not divide, or two dimensions on one axis.
    """
    if len(shape) != len(dims):
        raise ShardingError(f"{name} has shape {tuple(shape)} but {len(dims)} dimension names {tuple(dims)}")
    spec, used = [], set()
    for dim, size in zip(dims, shape, strict=True):
        if dim not in rules:
            raise ShardingError(f"{name}: no rule for dimension {dim!r}; rules exist for {', '.join(rules)}")
        axes = tuple(axis for axis in rules[dim] if mesh.shape[axis] > 1)
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            if dim not in _REPLICATED_IF_UNEVEN:
                raise ShardingError(
                    f"{name}: dimension {dim!r} of size {size} cannot be cut over mesh axis "
                    f"{' x '.join(f'{axis}={mesh.shape[axis]}' for axis in axes)}: {size} is not a multiple of {parts}"
                    + ("; set model.vocab_pad_multiple to a multiple of it" if dim == "vocab" else "")
                )
            axes = ()
        if used & set(axes):
            raise ShardingError(f"{name}: mesh axis {sorted(used & set(axes))[0]!r} would cut two dimensions of {dims}")
        used |= set(axes)
        spec.append(axes[0] if len(axes) == 1 else axes or None)
    return PartitionSpec(*spec)


def named_sharding(name: str, shape: Sequence[int], dims: Sequence[str], rules: Rules, mesh: Mesh) -> NamedSharding:
    """`partition_spec` on its mesh."""
    return NamedSharding(mesh, partition_spec(name, shape, dims, rules, mesh))


def tree_shardings(abstract: Any, dims: Any, rules: Rules, mesh: Mesh) -> Any:
    """Shardings for a pytree of shapes, given the pytree (same structure) of their dimension names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: named_sharding(
            jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape, names, rules, mesh
        ),
        abstract,
        dims,
    )


Constrain = Callable[[jax.Array, Sequence[str]], jax.Array]


def constrainer(rules: Rules, mesh: Mesh) -> Constrain:
    """A function that tells the compiler how an activation with these dimension names lies."""

    def constrain(x: jax.Array, dims: Sequence[str]) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, named_sharding("activation", x.shape, dims, rules, mesh))

    return constrain


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device of the mesh holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())
