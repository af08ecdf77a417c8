import jax
import pytest
from jax.sharding import AxisType

from jaxrl_llm.sharding.mesh import AXES, ShardingError, make_mesh


def sizes(mesh):
    return {axis: size for axis, size in mesh.shape.items() if size != 1}


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


def test_every_mesh_has_all_five_axes_in_order_and_leaves_propagation_to_the_compiler():
    mesh = make_mesh({"tensor": 2, "fsdp": 4})
    assert mesh.axis_names == AXES == ("data", "fsdp", "expert", "context", "tensor")
    assert mesh.devices.shape == (1, 4, 1, 1, 2)
    assert mesh.axis_types == (AxisType.Auto,) * 5


@pytest.mark.parametrize("axis", AXES)
def test_each_axis_can_take_all_devices(axis):
    assert sizes(make_mesh({axis: 8})) == {axis: 8}
    assert sizes(make_mesh({axis: -1})) == {axis: 8}


@pytest.mark.parametrize(
    ("shape", "filled"),
    [
        ({"data": -1, "tensor": 2}, {"data": 4, "tensor": 2}),
        ({"fsdp": -1, "data": 2, "context": 2}, {"fsdp": 2, "data": 2, "context": 2}),
        ({"fsdp": 8, "expert": -1}, {"fsdp": 8}),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(shape, filled):
    assert sizes(make_mesh(shape)) == filled


def test_a_mesh_may_use_some_of_the_devices_in_the_given_order():
    devices = jax.devices()
    assert ids(make_mesh({"tensor": -1}, devices[4:])) == [4, 5, 6, 7]
    assert ids(make_mesh({"data": 2}, [devices[6], devices[3]])) == [6, 3]
    assert ids(make_mesh({}, devices[:1])) == [0]


@pytest.mark.parametrize(
    ("shape", "devices", "message"),
    [
        ({"tensr": 2}, 8, r"axis 'tensr' is unknown; the axes are data, fsdp, expert, context, tensor"),
        ({"data": 0}, 8, r"must be positive.*'data': 0"),
        ({"data": -2}, 8, r"must be positive.*'data': -2"),
        ({"data": -1, "fsdp": -1}, 8, r"at most one of them -1.*'data': -1, 'fsdp': -1"),
        (
            {"data": 2, "tensor": 2},
            8,
            r"data=2 x tensor=2 needs 4 devices, but there are 8; change config.mesh",
        ),
        ({"tensor": 16}, 8, r"tensor=16 needs 16 devices, but there are 8"),
        ({}, 8, r"needs 1 device, but there are 8"),
        ({"data": -1, "tensor": 3}, 8, r"tensor=3 needs 3 devices times a whole number, but there are 8"),
        ({"data": -1, "tensor": 4}, 2, r"tensor=4 needs 4 devices times a whole number, but there are 2"),
    ],
)
def test_a_mesh_that_cannot_be_made_says_what_is_wrong(shape, devices, message):
    with pytest.raises(ShardingError, match=message):
        make_mesh(shape, jax.devices()[:devices])
