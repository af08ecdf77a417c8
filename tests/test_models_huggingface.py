import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import huggingface
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.logprobs import logprob_and_entropy
from jaxrl_llm.rollout.sampling import Filters, sample
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAINING, tree_shardings
from tests.hf_folders import hf_config, load, logits, make_tensors, read, save, write

WIDE_HEADS = {"model_type": "qwen3", "hidden_size": 64, "head_dim": 32}


def make(folder, **changes):
    """A folder and its tensors."""
    hf = hf_config(**changes)
    tensors = make_tensors(hf)
    return write(folder, hf, tensors), tensors


def assert_same_tensors(got, expected):
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].tobytes() == tensor.tobytes(), name


# ---- there and back ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "mistral", "sliding_window": 3, "tie_word_embeddings": True},
        {"model_type": "qwen2"},
        WIDE_HEADS,
    ],
)
@pytest.mark.parametrize("limit", [2**30, 10_000])
def test_export_after_import_gives_the_same_names_shapes_and_bytes(tmp_path, changes, limit):
    folder, tensors = make(tmp_path / "in", **changes)
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params, max_shard_bytes=limit)
    assert_same_tensors(read(tmp_path / "out"), tensors)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (limit < 2**30)
    assert huggingface.read_config(tmp_path / "out") == huggingface.read_config(folder)


def test_a_head_size_that_is_not_width_over_heads_shapes_the_tensors_and_stays_in_the_config(tmp_path):
    folder, _ = make(tmp_path / "in", **WIDE_HEADS)
    model, params = load(folder)
    assert params["layers"]["q"]["kernel"].shape == (2, 64, 4, 32)
    save(tmp_path / "out", folder, model, params)
    written = read(tmp_path / "out")
    assert written["model.layers.1.self_attn.q_proj.weight"].shape == (128, 64)
    assert written["model.layers.1.self_attn.o_proj.weight"].shape == (64, 128)
    assert huggingface.read_config(tmp_path / "out")["head_dim"] == 32


def test_shards_are_loaded_and_written_with_an_index_that_is_true(tmp_path):
    folder, tensors = make(tmp_path / "in")
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params, max_shard_bytes=15_000)
    index = huggingface.read_json(tmp_path / "out" / "model.safetensors.index.json")
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    n = len(files)
    assert n > 3
    assert files == [f"model-{i + 1:05d}-of-{n:05d}.safetensors" for i in range(n)]
    held = {key: name for name in files for key in load_file(tmp_path / "out" / name)}
    assert index["weight_map"] == held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "out" / name).values()) for name in files]
    assert max(sizes) <= 15_000
    _, again = load(tmp_path / "out")
    jax.tree.map(np.testing.assert_array_equal, again, params)


@pytest.mark.parametrize("spelling", ["dtype", "torch_dtype"])
def test_bfloat16_is_written_rounded_and_read_exactly(tmp_path, spelling):
    folder, tensors = make(tmp_path / "in", **({"dtype": None} | {spelling: "float32"}))
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params, dtype="bfloat16")
    written = read(tmp_path / "out")
    rounded = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()}
    assert_same_tensors(written, rounded)
    hf = huggingface.read_config(tmp_path / "out")
    assert (hf["dtype"], hf[spelling]) == ("bfloat16", "bfloat16")
    _, again = load(tmp_path / "out")
    assert again["norm"].dtype == jnp.float32
    np.testing.assert_array_equal(again["norm"], rounded["model.norm.weight"].astype(np.float32))


def test_parameters_are_read_in_the_dtype_asked_for(tmp_path):
    folder, tensors = make(tmp_path / "in")
    model, params = load(folder)
    half = huggingface.load(folder, model, jax.tree.map(lambda x: x.sharding, params), jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    np.testing.assert_array_equal(half["norm"], tensors["model.norm.weight"].astype(ml_dtypes.bfloat16))


# ---- embeddings, biases, vocabulary ------------------------------------------------------------------------


def test_tied_embeddings_load_with_and_without_an_identical_head_in_the_file(tmp_path):
    folder, tensors = make(tmp_path / "without", tie_word_embeddings=True)
    head = tensors["model.embed_tokens.weight"]
    twice = write(tmp_path / "with", huggingface.read_config(folder), tensors | {"lm_head.weight": head})
    (model, params), (_, again) = load(folder), load(twice)
    assert "head" not in params
    assert model.bind(params).head_matrix().tobytes() == head.tobytes()
    jax.tree.map(np.testing.assert_array_equal, again, params)
    save(tmp_path / "out", twice, model, again)
    assert_same_tensors(read(tmp_path / "out"), tensors)


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    folder, tensors = make(tmp_path / "model", tie_word_embeddings=True)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.weight differs from model.embed_tokens.weight.* ties them"):
        load(folder)
    del tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": np.ones((100, 32), np.float32)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: model.embed_tokens.weight$"):
        load(folder)


def test_untied_embeddings_are_two_arrays(tmp_path):
    folder, tensors = make(tmp_path / "model")
    _, params = load(folder)
    np.testing.assert_array_equal(params["head"], tensors["lm_head.weight"])
    np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])


def test_biases_matter(tmp_path):
    folder, _ = make(tmp_path / "model", model_type="qwen2")
    model, params = load(folder)
    ids = np.arange(8)[None]
    before = logits(model, params, ids)
    for name in "qkv":
        layer = params["layers"] | {name: params["layers"][name] | {"bias": params["layers"][name]["bias"] * 0}}
        changed = np.abs(logits(model, params | {"layers": layer}, ids) - before).max(axis=(0, 2))
        # A key's bias changes nothing for the first token, which has but one key.
        assert changed[1:].min() > 1e-3, name


@pytest.mark.parametrize("tied", [False, True])
def test_a_padded_vocabulary_is_neither_sampled_nor_counted_nor_exported(tmp_path, tied):
    folder, tensors = make(tmp_path / "in", tie_word_embeddings=tied)
    model, params = load(folder, pad=64)
    name = "embedding" if tied else "head"
    assert params[name].shape == (128, 32)
    np.testing.assert_array_equal(params[name][100:], 0.0)
    params = params | {name: params[name].at[100:].set(100.0)}  # the likeliest ids, if they counted
    x = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)

    @jax.jit
    def outcome(table):
        scores = model.bind(params | {name: table}).logits(x)
        return scores, logprob_and_entropy(scores, jnp.zeros(16, jnp.int32))

    scores, (logprob, entropy) = outcome(params[name])
    assert np.isneginf(scores[:, 100:]).all()
    assert np.isfinite(scores[:, :100]).all()
    expected = logprob_and_entropy(scores[:, :100], jnp.zeros(16, jnp.int32))
    np.testing.assert_allclose(logprob, expected[0], rtol=1e-5)
    np.testing.assert_allclose(entropy, expected[1], rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda t: sum(part.sum() for part in outcome(t)[1])))(params[name])
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[100:], 0.0)
    draw = jax.jit(sample, static_argnames="filtered")
    seeds, positions = jnp.arange(16, dtype=jnp.uint32), jnp.zeros(16, jnp.int32)
    for temperature in (0.0, 50.0):
        filters = Filters(jnp.float32(temperature), jnp.int32(0), jnp.float32(1.0), jnp.float32(0.0))
        tokens, logprobs = draw(scores, seeds, positions, filters, filtered=False)
        assert int(tokens.max()) < 100
        assert np.isfinite(logprobs).all()
    save(tmp_path / "out", folder, model, params)
    assert_same_tensors(read(tmp_path / "out"), tensors)


# ---- meshes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"fsdp": 2, "tensor": 4}, {"data": 4, "fsdp": 2}])
def test_a_mesh_loads_the_same_parameters_each_device_its_part_and_writes_the_same_files(golden, tmp_path, axes):
    folder = golden / "hf" / "qwen2_untied"
    mesh = make_mesh(axes)
    (model, single), (_, params) = load(folder), load(folder, mesh=mesh)
    jax.tree.map(np.testing.assert_array_equal, params, single)
    wanted = tree_shardings(model.abstract, model.dims, TRAINING, mesh)
    assert jax.tree.map(lambda x: x.sharding, params) == wanted
    kernel = params["layers"]["gate"]["kernel"]
    part = (3, 32 // axes["fsdp"], 72 // axes.get("tensor", 1))
    assert {shard.data.shape for shard in kernel.addressable_shards} == {part}
    ids = np.load(folder / "golden.npz")["input_ids"]
    np.testing.assert_allclose(logits(model, params, ids), logits(model, single, ids), atol=1e-5)
    save(tmp_path / "out", folder, model, params)
    assert_same_tensors(read(tmp_path / "out"), read(folder))


# ---- what else is in a folder ------------------------------------------------------------------------------


def test_lists_of_special_tokens_survive_export_whole(tmp_path):
    folder, _ = make(tmp_path / "in", pad_token_id=[7, 8])
    generation = {"eos_token_id": [5, 6, 7], "pad_token_id": 7, "top_k": 20, "transformers_version": "4.0"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params)
    assert huggingface.read_config(tmp_path / "out")["pad_token_id"] == [7, 8]
    assert huggingface.read_json(tmp_path / "out" / "generation_config.json") == generation
    assert huggingface.eos_ids(generation, huggingface.read_config(folder)) == (5, 6, 7, 2)


def test_without_a_generation_config_the_special_tokens_of_the_config_are_written(tmp_path):
    folder, _ = make(tmp_path / "in", eos_token_id=[2, 3])
    expected = {"bos_token_id": 1, "eos_token_id": [2, 3]}
    assert huggingface.generation_config(folder, huggingface.read_config(folder)) == expected
    assert huggingface.generation_config(None, huggingface.read_config(folder)) == expected
    assert huggingface.eos_ids({}, {}) == ()


def test_tokenizer_files_are_copied_and_nothing_else(tmp_path):
    folder, _ = make(tmp_path / "in")
    for name in ("tokenizer.json", "chat_template.jinja", "README.md", "optimizer.bin"):
        (folder / name).write_text(name)
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


# ---- refusals ----------------------------------------------------------------------------------------------


def test_missing_unknown_and_misshaped_tensors_are_all_listed(tmp_path):
    folder, tensors = make(tmp_path / "model")
    for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight"):
        del tensors[name]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)  # some old files have it
    tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((32, 16), np.float32)
    tensors["lm_head.weight"] = np.zeros((101, 32), np.float32)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value).splitlines() == [
        f"{folder} does not hold the model of its config.json:",
        "  missing: model.layers.1.mlp.up_proj.weight",
        "  missing: model.norm.weight",
        "  unknown: model.layers.0.self_attn.q_proj.bias",
        "  unknown: model.layers.2.mlp.up_proj.weight",
        "  shape of lm_head.weight: (101, 32), the config says (100, 32)",
        "  shape of model.layers.0.self_attn.k_proj.weight: (32, 16), the config says (16, 32)",
    ]


def test_a_table_that_gives_one_tensor_to_two_parameters_is_refused_with_both(tmp_path, monkeypatch):
    folder, _ = make(tmp_path / "model")
    llama = FAMILIES["llama"]

    def table(c):
        right = llama.tensors(c)
        return right | {"layers.up.kernel": right["layers.gate.kernel"]}

    monkeypatch.setitem(FAMILIES, "llama", llama._replace(tensors=table))
    message = r"model.layers.0.mlp.gate_proj.weight twice, for layers.gate.kernel and layers.up.kernel"
    with pytest.raises(ModelError, match=message):
        load(folder)


def test_a_table_that_forgets_a_parameter_is_refused_with_its_name(tmp_path, monkeypatch):
    folder, _ = make(tmp_path / "model")
    llama = FAMILIES["llama"]
    short = llama._replace(tensors=lambda c: {k: v for k, v in llama.tensors(c).items() if k != "norm"})
    monkeypatch.setitem(FAMILIES, "llama", short)
    with pytest.raises(ModelError, match=r"table and the decoder disagree on \['norm'\]"):
        load(folder)


@pytest.mark.parametrize("size", [0, 5, 200, -4])
def test_a_file_that_is_cut_short_is_named(tmp_path, size):
    folder, _ = make(tmp_path / "in")
    model, params = load(folder)
    save(tmp_path / "out", folder, model, params, max_shard_bytes=15_000)
    damaged = sorted((tmp_path / "out").glob("*.safetensors"))[1]
    damaged.write_bytes(damaged.read_bytes()[:size])
    with pytest.raises(ModelError, match=rf"{damaged} is damaged or cut short"):
        load(tmp_path / "out")
    damaged.unlink()
    with pytest.raises(ModelError, match=rf"out has no {damaged.name}$"):
        load(tmp_path / "out")


def test_pickles_are_refused_as_what_they_are(tmp_path):
    folder, _ = make(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"no model.safetensors; pytorch_model.bin is a pickle and is never read"):
        load(folder)


def test_a_folder_without_a_readable_config_is_refused(tmp_path):
    folder, _ = make(tmp_path / "model")
    (folder / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ModelError, match=rf"{folder}/config.json is not valid JSON: "):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=rf"{folder} has no config.json; is it a Hugging Face model folder\?"):
        load(folder)
    with pytest.raises(ModelError, match=r"model folder '.*/nowhere' does not exist"):
        huggingface.find(tmp_path / "nowhere")
    assert huggingface.find(str(folder)) == folder


def test_an_unknown_model_type_is_refused_with_the_known_ones(tmp_path):
    folder, _ = make(tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(hf_config(model_type="parrot")))
    with pytest.raises(ModelError, match=f"'parrot' is unknown; known families: .*{', '.join(sorted(FAMILIES))}"):
        load(folder)


# ---- exports that go wrong ---------------------------------------------------------------------------------


def test_an_export_never_touches_what_is_there(tmp_path):
    folder, _ = make(tmp_path / "in")
    model, params = load(folder)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", folder, model, params)
    before = sorted(path.name for path in (tmp_path / "empty").iterdir())
    for out in (tmp_path / "empty", tmp_path / "empty" / "config.json"):
        with pytest.raises(ModelError, match=f"{out} exists and is not empty"):
            save(out, folder, model, params)
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == before


def test_an_export_that_fails_midway_leaves_nothing_under_its_name_and_can_be_repeated(tmp_path):
    folder, tensors = make(tmp_path / "in")
    model, params = load(folder)
    (folder / "tokenizer.json").mkdir()  # cannot be copied, and is only met after the weights are written
    out = tmp_path / "deep" / "out"
    with pytest.raises(IsADirectoryError):
        save(out, folder, model, params)
    assert not out.exists()
    (folder / "tokenizer.json").rmdir()
    save(out, folder, model, params)
    assert_same_tensors(read(out), tensors)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_an_unknown_export_dtype_is_refused_before_anything_is_written(tmp_path):
    folder, _ = make(tmp_path / "in")
    model, params = load(folder)
    with pytest.raises(ModelError, match="cannot export as 'int8'; choose one of float32, bfloat16, float16"):
        save(Path(tmp_path / "out"), folder, model, params, dtype="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
