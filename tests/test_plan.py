"""Plans from shapes alone: the presets, what is read from compiled programs, the command."""

import json
import math
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_llm import plan
from jaxrl_llm.models import huggingface
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.models.decoder import build
from jaxrl_llm.models.presets import PRESETS, preset
from jaxrl_llm.planning import hlo, shapes
from jaxrl_llm.planning.chips import GIB, topology
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.types import UserError
from tests.builders import TINY

# As the models' pages say.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The command sets these for its own process, which here is that of all tests."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def planned(capsys, *argv):
    """The exit code and the JSON object of the command."""
    code = 0
    try:
        plan.run([*argv, "--json"])
    except SystemExit as exit_:
        code = exit_.code
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_as_many_parameters_as_the_models(name):
    config = huggingface.decoder_config(preset(name))
    assert shapes.parameters(config) == PARAMETERS[name]
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(build(config).abstract)) == PARAMETERS[name]


def test_an_unknown_preset_is_refused_with_all_names():
    with pytest.raises(ModelError, match=r"no preset 'qwen9'; choose one of qwen2\.5-0\.5b, .*mistral-7b"):
        preset("qwen9")


def test_biases_and_padding_are_counted_as_parameters_are():
    config = TINY.replace(output_bias=True, mlp_bias=True, qk_norm=True, tie_embeddings=False)
    assert shapes.parameters(config) == sum(math.prod(x.shape) for x in jax.tree.leaves(build(config).abstract))


@pytest.mark.parametrize("window", [None, 3, 100])
def test_pairs_of_queries_and_keys(window):
    assert shapes.pairs(7, window) == sum(min(t + 1, window or 7) for t in range(7))


def test_loops_count_as_often_as_they_run():
    def program(x, ws, n):
        x, _ = jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.cos(x @ ws[0]), x)

    x, ws = jnp.zeros((8, 16)), jnp.zeros((5, 16, 16))
    text = jax.jit(program).lower(x, ws, 3).compile().as_text()
    one = 2 * 8 * 16 * 16
    assert hlo.read(text).flops == (5 + 1) * one
    assert hlo.read(text, unknown_trips=7).flops == (5 + 7) * one
    assert "f32[5,16,16]" in hlo.read(text).arrays


def test_collectives_are_counted_in_loops_by_kind():
    mesh = make_mesh({"fsdp": 4}, jax.devices()[:4])
    cut, whole = NamedSharding(mesh, P(None, "fsdp")), NamedSharding(mesh, P())

    def program(x, ws):
        def layer(x, w):
            return jnp.sin(x @ jax.lax.with_sharding_constraint(w, whole)), None

        return jax.lax.scan(layer, x, ws)[0]

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("fsdp")))
    ws = jax.ShapeDtypeStruct((5, 16, 16), jnp.float32, sharding=cut)
    cost = hlo.read(jax.jit(program).lower(x, ws).compile().as_text())
    assert cost.collective_bytes == {"all-gather": 5 * 16 * 16 * 4}
    assert cost.flops == 5 * 2 * 2 * 16 * 16  # two rows on each device


def test_a_large_model_on_gpus_is_estimated_and_the_sizes_are_those_of_its_layout(capsys):
    code, found = planned(capsys, "--config", "plan_qwen2_5_7b", "--topology", "gpu:8xH100")
    assert (code, found["fits"], found["attention"], found["suggestions"]) == (0, True, "cudnn", [])
    (place,) = found["places"].values()
    assert place["compiled"] is False
    resident, n = place["resident_bytes"], PARAMETERS["qwen2.5-7b"]
    # A few norms and biases lie whole on every device.
    assert resident["parameters"] == pytest.approx(4 * n / 8, rel=1e-3)
    assert resident["optimizer"] == pytest.approx(8 * n / 8, rel=1e-3)
    assert resident["reference"] == pytest.approx(2 * n / 8, rel=1e-3)
    generation = place["phases"]["generation"]["bytes"]
    assert generation["rollout weights"] == pytest.approx(2 * n / 4, rel=1e-3)
    assert generation["KV cache"] == 2 * 2 * 28 * 4 * 128 * 2048 * 256 / 8
    update = found["programs"]["update"]
    assert update["model_flops"] == pytest.approx(512 / 16 * 16 / 8 * 89.41e12, rel=1e-3)
    assert found["step"]["tokens"] == 512 * 2048
    assert found["step"]["seconds"] > 0


def test_an_engine_without_a_tensor_axis_of_its_own_has_the_learner_s(capsys):
    sizes = ["--config.mesh.fsdp=2", "--config.mesh.tensor=-1", "--config.rollout.tensor=0"]
    _, found = planned(capsys, "--config", "plan_qwen2_5_7b", "--topology", "gpu:8xH100", *sizes)
    generation = found["places"]["learner and engine"]["phases"]["generation"]["bytes"]
    assert generation["rollout weights"] == pytest.approx(2 * PARAMETERS["qwen2.5-7b"] / 4, rel=1e-2)


def test_full_rematerialisation_multiplies_the_layers_once_more_and_not_attention(capsys):
    argv = ["--config", "plan_qwen2_5_7b", "--topology", "gpu:8xH100", "--config.model.remat"]
    config = huggingface.decoder_config(preset("qwen2.5-7b"))
    full, none = (planned(capsys, *argv, remat)[1]["programs"]["update"]["flops"] for remat in ("full", "none"))
    assert full - none == pytest.approx(2 * 512 * 2048 / 8 * shapes.layer_weights(config))


def test_what_does_not_fit_says_which_keys_to_change(capsys):
    argv = ["--config", "plan_llama3_1_70b", "--topology", "gpu:8xA100", "--config.learner.micro_batch_rows=8"]
    code, found = planned(capsys, *argv, "--config.rollout.dtype=float32")
    assert (code, found["fits"]) == (plan.DOES_NOT_FIT, False)
    assert any("a larger topology" in text for text in found["suggestions"])
    assert any("config.rollout.dtype='bfloat16'" in text for text in found["suggestions"])


def test_an_engine_of_its_own_is_another_place(capsys):
    argv = ["--config", "plan_qwen2_5_7b", "--topology", "gpu:8xH100", "--rollout_topology", "gpu:4xH200"]
    code, found = planned(capsys, *argv)
    assert (code, list(found["places"])) == (0, ["learner", "engine"])
    assert "rollout weights" not in found["places"]["learner"]["resident_bytes"]
    assert found["places"]["engine"]["hbm_bytes"] == pytest.approx(141e9 - 2 * GIB)
    assert list(found["places"]["engine"]["phases"]) == ["generation"]


def test_a_small_model_is_compiled_for_devices_that_are_here(capsys):
    sizes = ["--config.mesh.tensor=2", "--config.rollout.tensor=4", "--config.learner.micro_batch_rows=4"]
    code, found = planned(capsys, "--config", "quickstart", "--topology", "cpu:4", *sizes)
    assert (code, found["fits"], found["attention"]) == (0, True, "xla")
    assert list(found["programs"]) == ["log-probs", "update", "weight sync", "prefill", "decode"]
    for name in ("log-probs", "update", "prefill", "decode"):
        program = found["programs"][name]
        assert program["compiler"]["matrix_products_not_counted"] == 0
        assert 0.5 < program["model_flop_ratio"] < 1.1, name
    update = found["programs"]["update"]["compiler"]
    assert update["aliased_bytes"] > 0.95 * update["outputs_bytes"]  # the state is updated in place


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5e", r"'' is not the shape of a slice; expected TPU:SHAPE such as v5e:4x4"),
        ("v5e:4y4", r"'4y4' is not the shape of a slice"),
        ("v5e:4x4*2", r"'4x4\*2' is not the shape of a slice"),
        ("v5w:4x4", r"there is no TPU 'v5w'.*TPUs: v5e, v5p, v6e"),
        ("gpu:8xH10", r"'8xH10' is not a number of known GPUs \(did you mean 'H100'\?\)"),
        ("gpu:H100", r"is not a number of known GPUs"),
        ("gpu:0xH100", r"is not a number of known GPUs"),
        ("cpu:x", r"'x' is not a number of devices"),
        ("cpu:64", r"this process has 8 host devices; set XLA_FLAGS=--xla_force_host_platform_device_count=64"),
    ],
)
def test_a_topology_that_is_none_is_told_with_what_is_expected(name, message):
    with pytest.raises(UserError, match=message):
        topology(name)


def test_the_command_needs_a_topology_and_a_mesh_that_fits(capsys):
    with pytest.raises(SystemExit):
        plan.run(["--config", "plan_qwen2_5_7b"])
    assert "expected --topology NAME, such as v5e:4x4" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"micro_batch_rows=16 is not a multiple of the 32 devices"):
        plan.run(["--config", "plan_qwen2_5_7b", "--topology", "gpu:32xH100"])
