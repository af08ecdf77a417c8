import json

import pytest
from safetensors import safe_open

from jaxrl_llm.models.config import ModelError, Rope
from jaxrl_llm.models.decoder import build
from jaxrl_llm.models.families import FAMILIES, family_of
from jaxrl_llm.models.huggingface import decoder_config
from tests.hf_folders import hf_config

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("family", LLAMA_LIKE)
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(
    ("scaling", "rope"),
    [
        ({"rope_type": "default"}, Rope(5e5)),
        ({"rope_type": "linear", "factor": 2.0}, Rope(5e5, "linear", 2.0)),
        ({"rope_type": "llama3", **LLAMA3}, Rope(5e5, "llama3", 8.0, 1.0, 4.0, 8192)),
    ],
)
def test_old_and_new_spelling_of_rope_give_the_same_config(family, key, scaling, rope):
    renamed = {key if k == "rope_type" else k: v for k, v in scaling.items()}
    old = decoder_config(hf_config(model_type=family, rope_theta=5e5, rope_scaling=renamed))
    new = decoder_config(hf_config(model_type=family, rope_theta=None, rope_parameters={"rope_theta": 5e5, **scaling}))
    assert old == new
    assert old.rope == rope


def test_without_scaling_both_spellings_of_theta_count_and_the_default_is_ten_thousand():
    plain = hf_config(rope_theta=None)
    assert decoder_config(plain).rope == Rope(10_000.0)
    assert decoder_config(plain | {"rope_scaling": None, "rope_theta": 1e6}).rope == Rope(1e6)
    assert decoder_config(plain | {"rope_parameters": {"rope_theta": 1e6}}).rope == Rope(1e6)


@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
def test_rope_of_another_type_is_refused_with_its_name(spelling, kind):
    hf = hf_config(**{spelling: {"rope_type": kind, "factor": 4.0}})
    with pytest.raises(ModelError, match=rf"rope type '{kind}' is not supported; default, linear and llama3 are"):
        decoder_config(hf)


def test_scaling_that_lacks_numbers_is_refused_with_their_names():
    hf = hf_config(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0})
    with pytest.raises(ModelError, match="'llama3' lacks high_freq_factor, original_max_position_embeddings"):
        decoder_config(hf)


@pytest.mark.parametrize("family", LLAMA_LIKE)
def test_another_activation_is_refused(family):
    with pytest.raises(ModelError, match="hidden_act='gelu' is not supported, only 'silu'"):
        decoder_config(hf_config(model_type=family, hidden_act="gelu"))


@pytest.mark.parametrize("name", ["parrot", None])
def test_an_unknown_model_type_is_refused_with_the_known_ones(name):
    with pytest.raises(ModelError) as caught:
        family_of(hf_config(model_type=name))
    assert str(caught.value) == f"model_type {name!r} is unknown; known families: {', '.join(sorted(FAMILIES))}"


@pytest.mark.parametrize("key", ["vocab_size", "num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_missing_size_is_named(key):
    with pytest.raises(ModelError, match=f"config.json of a qwen2 model lacks '{key}'"):
        decoder_config(hf_config(model_type="qwen2", **{key: None}))


def test_sizes_come_from_the_config():
    c = decoder_config(hf_config(max_position_embeddings=77), vocab_pad_multiple=64)
    assert (c.vocab_size, c.padded_vocab) == (100, 128)
    assert (c.num_layers, c.embed, c.mlp) == (2, 32, 48)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (4, 2, 8)
    assert (c.norm_epsilon, c.max_position) == (1e-5, 77)


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [("llama", None, 8), ("llama", 16, 16), ("mistral", None, 8), ("qwen3", None, 128), ("qwen3", 16, 16)],
)
def test_the_head_size_is_the_given_one_or_the_familys_default(family, given, expected):
    assert decoder_config(hf_config(model_type=family, head_dim=given)).head_dim == expected


def test_key_value_heads_default_to_all_heads_but_to_eight_in_mistral():
    sizes = {"num_attention_heads": 16, "num_key_value_heads": None}
    assert decoder_config(hf_config(**sizes)).num_kv_heads == 16
    assert decoder_config(hf_config(model_type="mistral", **sizes)).num_kv_heads == 8


def test_heads_that_cannot_be_grouped_are_refused():
    with pytest.raises(ModelError, match="4 query heads cannot share 3 key/value heads"):
        decoder_config(hf_config(num_key_value_heads=3))


def test_biases_and_norms_are_the_familys():
    def switches(**changes):
        c = decoder_config(hf_config(**changes))
        return c.qkv_bias, c.output_bias, c.mlp_bias, c.qk_norm

    assert switches() == (False, False, False, False)
    assert switches(attention_bias=True) == (True, True, False, False)
    assert switches(mlp_bias=True) == (False, False, True, False)
    assert switches(model_type="mistral") == (False, False, False, False)
    assert switches(model_type="qwen2") == (True, False, False, False)
    assert switches(model_type="qwen3") == (False, False, False, True)
    assert switches(model_type="qwen3", attention_bias=True) == (True, True, False, True)


@pytest.mark.parametrize(
    ("family", "keys", "expected"),
    [
        ("llama", {"sliding_window": 5}, (None, None)),
        ("mistral", {"sliding_window": 5}, (5, 5)),
        ("mistral", {}, (4096, 4096)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": False}, (None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True}, (None, None)),
        ("qwen2", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1}, (None, 5)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            "qwen3",
            {
                "sliding_window": 5,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (5, None),
        ),
    ],
)
def test_windows_follow_the_familys_rules(family, keys, expected):
    assert decoder_config(hf_config(model_type=family, **keys)).windows == expected


def test_a_null_window_is_no_window():
    assert decoder_config({**hf_config(model_type="mistral"), "sliding_window": None}).windows == (None, None)


@pytest.mark.parametrize(
    "folder",
    ["llama3_rope_scaling", "llama_tied_bias", "mistral_sliding", "qwen2_tied", "qwen2_untied", "qwen3"],
)
def test_the_table_has_a_tensor_for_every_parameter_and_a_parameter_for_every_tensor(golden, folder):
    hf = json.loads((golden / "hf" / folder / "config.json").read_text())
    c = decoder_config(hf)
    table = family_of(hf).tensors(c)
    parameters = {".".join(path) for path in leaves(build(c).abstract)}
    assert set(table) == parameters
    names = {entry.name.format(i=i) for entry in table.values() for i in range(c.num_layers)}
    with safe_open(golden / "hf" / folder / "model.safetensors", "np") as file:
        assert names == set(file.keys())


def leaves(tree, path=()):
    """Paths of a tree of dicts."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)
