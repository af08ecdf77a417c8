"""From logical dimension names to mesh axes: one table for training, one for inference.

A tensor is declared with a name for each of its dimensions; a table says over which mesh axes a dimension of
that name is cut. Dimensions without an entry (head_dim, norm, layers, ...) are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.sharding.mesh import ShardingError

Rules = Mapping[str, tuple[str, ...]]
AnyMesh = Mesh | AbstractMesh

_UNCUT: Rules = {"layers": (), "head_dim": (), "norm": (), "accumulation": ()}

# FSDP cuts every weight of a layer along the model width, over the context axis too, and TP along heads and ffn;
# batches are cut over both data-like axes and rows over the context axis.
#
# The two tables, [vocabulary, width], are cut along the vocabulary. The output head stays so: the tokens of all devices
# that hold different parts of it ("head_batch") come to each part, some at a time, because they are smaller than the
# head. Looking up input embeddings wants whole columns instead ("lookup_..."): each device looks all tokens up in its
# columns, and an all-to-all makes rows of them.
TRAINING: Rules = {
    **_UNCUT,
    "batch": ("data", "fsdp"),
    "length": ("context",),
    "embed": ("fsdp", "context"),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("fsdp", "context", "tensor"),
    "head_batch": ("data",),
    "lookup_batch": ("data",),
    "lookup_vocab": (),
    "lookup_width": ("fsdp", "context", "tensor"),
}

# Decoding reads all weights for every token, so they are only cut where no gather is needed; what FSDP and the context
# axis cut in training becomes room for more sequences.
INFERENCE: Rules = {
    **_UNCUT,
    "batch": ("data", "fsdp", "context"),
    "length": (),
    "embed": (),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "head_batch": ("data", "fsdp", "context"),
    "lookup_batch": ("data", "fsdp", "context"),
    "lookup_vocab": ("tensor",),
    "lookup_width": (),
}

# Key/value heads that the tensor axis does not divide: every device keeps the weights of all of them (they are small).
# Their activations and caches are repeated until it does: see models.attention.
_REPLICATED_IF_UNEVEN = {"kv_heads"}


def partition_spec(name: str, shape: Sequence[int], dims: Sequence[str], rules: Rules, mesh: AnyMesh) -> PartitionSpec:
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


def named_sharding(name: str, shape: Sequence[int], dims: Sequence[str], rules: Rules, mesh: AnyMesh) -> NamedSharding:
    """`partition_spec` on its mesh."""
    return NamedSharding(mesh, partition_spec(name, shape, dims, rules, mesh))


def tree_shardings(abstract: Any, dims: Any, rules: Rules, mesh: AnyMesh) -> Any:
    """Shardings for a pytree of shapes, given the pytree (same structure) of their dimension names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf, names: named_sharding(
            jax.tree_util.keystr(path, simple=True, separator="."), leaf.shape, names, rules, mesh
        ),
        abstract,
        dims,
    )


class Layout:
    """How arrays with named dimensions lie on a mesh. Without a mesh there is one device, and all is on it."""

    def __init__(self, rules: Rules | None = None, mesh: AnyMesh | None = None):
        self.rules, self.mesh = rules or {}, mesh

    @property
    def is_cut(self) -> bool:
        """Whether there is more than one device."""
        return self.mesh is not None and self.mesh.size > 1

    @property
    def platform(self) -> str:
        """That computes: "cpu", "gpu" or "tpu"."""
        if self.mesh is None:
            return jax.default_backend()
        if isinstance(self.mesh, AbstractMesh):
            return self.mesh.abstract_device.platform
        return self.mesh.devices.flat[0].platform

    def axes(self, dim: str) -> tuple[str, ...]:
        """The mesh axes over which a dimension of this name is cut, without those of size 1."""
        return () if self.mesh is None else tuple(axis for axis in self.rules[dim] if self.mesh.shape[axis] > 1)

    def parts(self, dim: str) -> int:
        """Into how many parts a dimension of this name is cut."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.rules[dim])

    def spec(self, name: str, shape: Sequence[int], dims: Sequence[str]) -> PartitionSpec:
        """See `partition_spec`."""
        assert self.mesh is not None
        return partition_spec(name, shape, dims, self.rules, self.mesh)

    def constrain(self, x: jax.Array, dims: Sequence[str]) -> jax.Array:
        """Tells the compiler that an activation with these dimension names lies as the rules say."""
        if not self.is_cut:
            return x
        assert self.mesh is not None
        return jax.lax.with_sharding_constraint(x, named_sharding("activation", x.shape, dims, self.rules, self.mesh))


ONE_DEVICE = Layout()


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather(layout: Layout, dims: Sequence[str], weight: jax.Array) -> jax.Array:
    """A layer's weight with its model width whole, as its products want it; its gradient is cut again at once.

    Left to itself, the compiler turns the products into loops that pass parts of the weight around, more of them than
    there are.
    """
    return layout.constrain(weight, ["norm" if dim == "embed" else dim for dim in dims])


def _gather_forward(layout: Layout, dims: Sequence[str], weight: jax.Array) -> tuple[jax.Array, None]:
    return gather(layout, dims, weight), None


def _gather_backward(layout: Layout, dims: Sequence[str], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (layout.constrain(gradient, dims),)


gather.defvjp(_gather_forward, _gather_backward)


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Every device of the mesh holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())
