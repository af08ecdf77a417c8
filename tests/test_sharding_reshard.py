import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm.sharding.mesh import ShardingError, make_mesh
from jaxrl_llm.sharding.reshard import Reshard, checksum, verify

CUT = {"a": P("fsdp", "tensor"), "b": {"c": P("tensor"), "d": P(None, "fsdp", "tensor")}}
TENSOR = {"a": P(None, "tensor"), "b": {"c": P("tensor"), "d": P(None, None, "tensor")}}
WHOLE = {"a": P(), "b": {"c": P(), "d": P()}}


def mesh(first=0, last=8, **axes):
    return make_mesh(axes, jax.devices()[first:last])


# name: source mesh and specs, target mesh and specs; made when they are asked for
MOVES = {
    "the same layout": lambda: (mesh(fsdp=4, tensor=2), CUT, mesh(fsdp=4, tensor=2), CUT),
    "fsdp x tensor to replicas of tensor": lambda: (
        mesh(fsdp=4, tensor=2),
        CUT,
        mesh(data=4, tensor=2),
        TENSOR,
    ),
    "fsdp x tensor to wider tensor": lambda: (mesh(fsdp=4, tensor=2), CUT, mesh(data=2, tensor=4), TENSOR),
    "the first four devices to the last four": lambda: (
        mesh(0, 4, fsdp=2, tensor=2),
        CUT,
        mesh(4, 8, tensor=4),
        TENSOR,
    ),
    "eight devices to four": lambda: (mesh(fsdp=4, tensor=2), CUT, mesh(0, 4, tensor=4), TENSOR),
    "four devices to eight": lambda: (mesh(2, 6, fsdp=2, tensor=2), CUT, mesh(data=2, tensor=4), TENSOR),
    "one device to eight": lambda: (mesh(3, 4), WHOLE, mesh(data=4, tensor=2), TENSOR),
    "one device to itself": lambda: (mesh(0, 1), WHOLE, mesh(0, 1), WHOLE),
    "the same devices in another order": lambda: (
        mesh(fsdp=4, tensor=2),
        CUT,
        make_mesh({"data": 2, "tensor": 4}, jax.devices()[::-1]),
        TENSOR,
    ),
}


def host_tree():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return {"a": normal(8, 16), "b": {"c": normal(16), "d": normal(3, 4, 8)}}


def shardings(on, specs):
    return jax.tree.map(lambda spec: NamedSharding(on, spec), specs)


def bits(tree):
    return [np.asarray(leaf).view({2: np.uint16, 4: np.uint32}[leaf.dtype.itemsize]) for leaf in jax.tree.leaves(tree)]


def assert_bit_equal(actual, expected):
    for got, want in zip(bits(actual), bits(expected), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize("move", MOVES)
def test_values_arrive_bit_for_bit_in_the_new_layout_and_the_source_is_untouched(move, dtype):
    on, specs, to, new_specs = MOVES[move]()
    host, target = host_tree(), shardings(to, new_specs)
    source = jax.device_put(host, shardings(on, specs))
    new, total = Reshard(source, target, dtype)(source)
    expected = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16) if dtype else x, host)
    assert_bit_equal(new, expected)
    for leaf, sharding in zip(jax.tree.leaves(new), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == sharding
    verify(new, total)
    assert total == int(checksum(expected))
    assert_bit_equal(source, host)
    for leaf in jax.tree.leaves(source):
        leaf.delete()
    assert_bit_equal(new, expected)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
@pytest.mark.parametrize(
    "move", ["the same layout", "eight devices to four", "the first four devices to the last four"]
)
def test_a_donated_source_is_freed(move, dtype):
    on, specs, to, new_specs = MOVES[move]()
    source = jax.device_put(host_tree(), shardings(on, specs))
    new, total = Reshard(source, shardings(to, new_specs), dtype, donate=True)(source)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(source))
    verify(new, total)


def test_a_plan_can_be_made_from_shapes_and_used_for_every_new_version():
    on, specs, to, new_specs = MOVES["fsdp x tensor to replicas of tensor"]()
    first = jax.device_put(host_tree(), shardings(on, specs))
    second = jax.tree.map(lambda x: 2 * x, first)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), first)
    plan = Reshard(abstract, shardings(to, new_specs))
    (one, check_one), (two, check_two) = plan(first), plan(second)
    assert_bit_equal(one, host_tree())
    assert_bit_equal(two, jax.tree.map(lambda x: 2 * x, host_tree()))
    assert check_one != check_two


def test_each_array_keeps_its_dtype_unless_told():
    on = mesh(fsdp=8)
    source = jax.device_put(
        [np.ones(8, np.float32), np.ones(8, ml_dtypes.bfloat16)], [NamedSharding(on, P("fsdp"))] * 2
    )
    new, _ = Reshard(source, [NamedSharding(on, P())] * 2)(source)
    assert [leaf.dtype for leaf in new] == [jnp.float32, jnp.bfloat16]


def test_a_wrong_number_of_shardings_is_refused():
    source = [jnp.zeros(3), jnp.zeros(3)]
    with pytest.raises(ShardingError, match="cannot reshard 2 arrays with 1 shardings"):
        Reshard(source, [NamedSharding(mesh(0, 1), P())])


# Numbers of bytes of a float32 [8, 16] array (512 bytes), counted by hand.
@pytest.mark.parametrize(
    ("source", "target", "dtype", "missing", "received"),
    [
        # Nothing moves where the layout stays, or where each device keeps a part of what it has.
        ((0, 8, {"fsdp": 8}, P("fsdp")), (0, 8, {"fsdp": 8}, P("fsdp")), None, 0, 512),
        ((0, 8, {"fsdp": 8}, P()), (0, 8, {"fsdp": 8}, P("fsdp")), None, 0, 512),
        ((0, 8, {"fsdp": 8}, P()), (0, 4, {"tensor": 4}, P()), None, 0, 4 * 512),
        # Other devices: all that they will hold.
        ((0, 4, {"fsdp": 4}, P("fsdp")), (4, 8, {"fsdp": 4}, P("fsdp")), None, 512, 512),
        ((0, 4, {"fsdp": 4}, P("fsdp")), (4, 8, {"fsdp": 4}, P()), jnp.bfloat16, 4 * 256, 4 * 256),
        # All-gather: every device has an eighth of 512 bytes and needs the rest.
        ((0, 8, {"fsdp": 8}, P("fsdp")), (0, 8, {"fsdp": 8}, P()), None, 8 * (512 - 64), 8 * 512),
        # fsdp 4 x tensor 2 to four replicas of tensor 2: it holds [2, 8] of the half [8, 8] it needs.
        (
            (0, 8, {"fsdp": 4, "tensor": 2}, P("fsdp", "tensor")),
            (0, 8, {"data": 4, "tensor": 2}, P(None, "tensor")),
            jnp.bfloat16,
            8 * 2 * (64 - 16),
            8 * 2 * 64,
        ),
        # Rows 01 23 45 67 on four devices to one row on each of eight: only the first has its row.
        ((0, 4, {"fsdp": 4}, P("fsdp")), (0, 8, {"fsdp": 8}, P("fsdp")), None, 7 * 64, 512),
        # Rows to columns: a device has 1 row of 16 and needs 2 columns of 8, of which it holds 2 elements.
        (
            (0, 8, {"fsdp": 8}, P("fsdp")),
            (0, 8, {"tensor": 8}, P(None, "tensor")),
            None,
            8 * 4 * (16 - 2),
            512,
        ),
    ],
)
def test_the_plan_says_how_many_bytes_must_move_at_least(source, target, dtype, missing, received):
    def layout(first, last, axes, spec):
        return NamedSharding(mesh(first, last, **axes), spec)

    array = jax.device_put(np.zeros((8, 16), np.float32), layout(*source))
    plan = Reshard([array, array], [layout(*target)] * 2, dtype)
    assert plan.lower_bound_bytes == 2 * missing
    assert plan.received_bytes == 2 * received


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_checksum_is_the_same_on_every_layout(dtype):
    host = jax.tree.map(lambda x: x.astype(dtype), host_tree())
    expected = int(checksum(host))
    for move in MOVES.values():
        on, specs, to, new_specs = move()
        for layout in (shardings(on, specs), shardings(to, new_specs)):
            assert int(checksum(jax.device_put(host, layout))) == expected


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_the_checksum_changes_with_any_single_bit(dtype):
    host = (100 * np.random.default_rng(1).normal(size=(4, 6))).astype(dtype)
    expected = int(checksum([host]))
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32}[host.dtype.itemsize]
    for place in (0, 7, 23):
        for bit in range(8 * host.dtype.itemsize):
            damaged = host.copy()
            damaged.view(unsigned).flat[place] ^= unsigned(1 << bit)
            assert int(checksum([damaged])) != expected, (place, bit)


def test_the_checksum_changes_if_two_elements_change_places():
    host = np.random.default_rng(2).normal(size=(5, 8)).astype(np.float32)
    host[1, 2] = -host[4, 4]  # their bits differ in the highest alone
    host[0, 1], host[0, 2] = 1.0, 2.0  # round numbers: bits differ far up alone
    expected = int(checksum([host]))
    for first, second in (
        ((1, 2), (4, 4)),
        ((0, 1), (0, 2)),
        ((0, 0), (4, 7)),
        ((2, 3), (2, 4)),
        ((1, 1), (3, 1)),
    ):
        swapped = host.copy()
        swapped[first], swapped[second] = host[second], host[first]
        assert int(checksum([swapped])) != expected, (first, second)


def test_the_checksum_changes_if_tensors_rows_or_dimensions_change_places():
    a, b = np.random.default_rng(3).normal(size=(2, 6, 6)).astype(np.float32)
    expected = int(checksum({"a": a, "b": b}))
    assert int(checksum({"a": b, "b": a})) != expected
    assert int(checksum({"a": a.T, "b": b})) != expected
    assert int(checksum({"a": a[::-1], "b": b})) != expected
    assert int(checksum({"a": a, "b": a})) != expected


def test_the_checksum_changes_if_rounded_rows_change_places_far_apart():
    # bfloat16 values as float32 differ by multiples of 2^16; so far apart, a weighted sum would not see it.
    table = np.random.default_rng(4).normal(size=(2**15 + 1, 4)).astype(ml_dtypes.bfloat16).astype(np.float32)
    swapped = table.copy()
    swapped[[0, 2**15]] = table[[2**15, 0]]
    assert int(checksum([swapped])) != int(checksum([table]))


def test_verify_refuses_damaged_arrays_with_both_checksums():
    tree = host_tree()
    right = int(checksum(tree))
    verify(tree, right)
    tree["b"]["c"][3] += 1
    wrong = int(checksum(tree))
    with pytest.raises(
        ShardingError,
        match=f"weights of version 4 arrived damaged: checksum {wrong:#010x}, expected {right:#010x}",
    ):
        verify(tree, right, "weights of version 4")
