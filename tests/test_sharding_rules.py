import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_llm.sharding.mesh import ShardingError, make_mesh
from jaxrl_llm.sharding.rules import (
    INFERENCE,
    ONE_DEVICE,
    TRAINING,
    Layout,
    named_sharding,
    partition_spec,
    replicated,
    tree_shardings,
)

QUERY = ("q", (3, 32, 8, 16), ("layers", "embed", "heads", "head_dim"))
KEYS = ("k", (3, 32, 2, 16), ("layers", "embed", "kv_heads", "head_dim"))


@pytest.mark.parametrize(
    ("rules", "shape", "dims", "spec"),
    [
        (TRAINING, (3, 32, 8, 16), ("layers", "embed", "heads", "head_dim"), P(None, "fsdp", "tensor", None)),
        (TRAINING, (160, 32), ("vocab", "norm"), P(("fsdp", "tensor"), None)),
        (TRAINING, (160, 32), ("lookup_vocab", "lookup_width"), P(None, ("fsdp", "tensor"))),
        (TRAINING, (3, 64, 32), ("layers", "mlp", "embed"), P(None, "tensor", "fsdp")),
        (TRAINING, (3, 32), ("layers", "norm"), P(None, None)),
        (TRAINING, (8, 12), ("batch", "length"), P(("data", "fsdp"), None)),
        (INFERENCE, (3, 32, 8, 16), ("layers", "embed", "heads", "head_dim"), P(None, None, "tensor", None)),
        (INFERENCE, (160, 32), ("vocab", "norm"), P("tensor", None)),
        (INFERENCE, (8, 12), ("batch", "length"), P(("data", "fsdp"), None)),
    ],
)
def test_tables_cut_what_they_say(rules, shape, dims, spec):
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert partition_spec("x", shape, dims, rules, mesh) == spec


def test_axes_of_size_one_are_not_named():
    one = make_mesh({}, jax.devices()[:1])
    assert partition_spec(*QUERY, TRAINING, one) == P(None, None, None, None)
    assert partition_spec("x", (8, 2), ("batch", "length"), TRAINING, make_mesh({"fsdp": 8})) == P("fsdp", None)


def test_the_context_axis_cuts_rows_and_weights_in_training_and_sequences_in_inference():
    mesh = make_mesh({"context": 8})
    assert partition_spec("x", (2, 16), ("batch", "length"), TRAINING, mesh) == P(None, "context")
    assert partition_spec("x", (16, 2), ("embed", "mlp"), TRAINING, mesh) == P("context", None)
    assert partition_spec("x", (8, 16), ("batch", "length"), INFERENCE, mesh) == P("context", None)


def test_too_few_key_value_heads_are_kept_whole_on_every_device():
    assert partition_spec(*KEYS, TRAINING, make_mesh({"tensor": 2, "fsdp": 4})) == P(None, "fsdp", "tensor", None)
    assert partition_spec(*KEYS, TRAINING, make_mesh({"tensor": 4, "fsdp": 2})) == P(None, "fsdp", None, None)
    shards = jax.device_put(np.zeros(KEYS[1]), named_sharding(*KEYS, INFERENCE, make_mesh({"tensor": 8})))
    assert {shard.data.shape for shard in shards.addressable_shards} == {KEYS[1]}


@pytest.mark.parametrize(
    ("shape", "dims", "message"),
    [
        (
            (4, 32),
            ("layers", "width"),
            r"layers\.up: no rule for dimension 'width'; rules exist for layers, .*batch",
        ),
        (
            (30, 4),
            ("embed", "heads"),
            r"layers\.up: dimension 'embed' of size 30 .*axis fsdp=4: 30 is not a multiple of 4",
        ),
        (
            (32, 3),
            ("embed", "heads"),
            r"dimension 'heads' of size 3 .*axis tensor=2: 3 is not a multiple of 2$",
        ),
        (
            (164, 32),
            ("vocab", "norm"),
            r"dimension 'vocab' of size 164 .*fsdp=4 x tensor=2: 164 is not a multiple of 8; set model\.vocab_pad_mul",
        ),
        ((6, 32), ("batch", "norm"), r"dimension 'batch' of size 6 .*fsdp=4: 6 is not a multiple of 4"),
        (
            (4, 4),
            ("heads", "mlp"),
            r"layers\.up: mesh axis 'tensor' would cut two dimensions of \('heads', 'mlp'\)",
        ),
        ((4, 4), ("embed", "batch"), r"layers\.up: mesh axis 'fsdp' would cut two dimensions"),
        ((4, 4), ("embed",), r"layers\.up has shape \(4, 4\) but 1 dimension names \('embed',\)"),
        ((4,), ("embed", "heads"), r"layers\.up has shape \(4,\) but 2 dimension names"),
    ],
)
def test_a_rule_that_cannot_apply_names_tensor_dimension_and_axis(shape, dims, message):
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    with pytest.raises(ShardingError, match=message):
        partition_spec("layers.up", shape, dims, TRAINING, mesh)


def test_a_dimension_over_two_axes_must_divide_by_their_product():
    mesh = make_mesh({"data": 2, "fsdp": 4})
    assert partition_spec("x", (8,), ("batch",), TRAINING, mesh) == P(("data", "fsdp"))
    with pytest.raises(ShardingError, match=r"axis data=2 x fsdp=4: 4 is not a multiple of 8"):
        partition_spec("x", (4,), ("batch",), TRAINING, mesh)


def test_a_tree_of_names_gives_a_tree_of_shardings_and_errors_name_the_path():
    mesh = make_mesh({"fsdp": 4, "tensor": 2})
    shapes = {"embedding": (160, 32), "layers": {"up": (3, 32, 64)}}
    dims = {"embedding": ("vocab", "norm"), "layers": {"up": ("layers", "embed", "mlp")}}
    abstract = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    shardings = tree_shardings(abstract, dims, TRAINING, mesh)
    assert shardings["embedding"].spec == P(("fsdp", "tensor"), None)
    assert shardings["layers"]["up"].spec == P(None, "fsdp", "tensor")
    assert shardings["layers"]["up"].mesh == mesh
    dims["layers"]["up"] = ("layers", "embed", "ffn")
    with pytest.raises(ShardingError, match=r"^layers\.up: no rule for dimension 'ffn'"):
        tree_shardings(abstract, dims, TRAINING, mesh)


def test_a_layout_says_how_dimensions_are_cut():
    layout = Layout(TRAINING, make_mesh({"data": 2, "fsdp": 2, "tensor": 2}))
    assert layout.is_cut
    assert (layout.axes("batch"), layout.parts("batch")) == (("data", "fsdp"), 4)
    assert (layout.axes("vocab"), layout.parts("vocab")) == (("fsdp", "tensor"), 4)
    assert (layout.axes("length"), layout.parts("length")) == ((), 1)
    x = jax.jit(lambda: layout.constrain(jnp.zeros((4, 6)), ("batch", "norm")))()
    assert {shard.data.shape for shard in x.addressable_shards} == {(1, 6)}


def test_one_device_cuts_nothing():
    for layout in (ONE_DEVICE, Layout(TRAINING, make_mesh({}, jax.devices()[:1]))):
        assert not layout.is_cut
        assert (layout.axes("batch"), layout.parts("batch")) == ((), 1)
        x = jnp.zeros((4, 6))
        assert layout.constrain(x, ("batch", "norm")) is x


def test_replicated_puts_the_whole_array_on_every_device():
    array = jax.device_put(np.arange(6.0), replicated(make_mesh({"fsdp": 8})))
    assert len(array.addressable_shards) == 8
    assert {shard.data.shape for shard in array.addressable_shards} == {(6,)}
