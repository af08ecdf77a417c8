"""Small Hugging Face folders with random weights, written without the code that they test."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models import huggingface
from jaxrl_llm.models.decoder import build
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.rules import TRAINING, tree_shardings

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}


def hf_config(**changes):
    """LLAMA with some keys changed; None removes one."""
    return {key: value for key, value in (LLAMA | changes).items() if value is not None}


def make_tensors(hf, seed=0):
    """Random float32 tensors by name: those that the published models of these families have."""
    D, F, V = hf["hidden_size"], hf["intermediate_size"], hf["vocab_size"]
    H = hf.get("head_dim", D // hf["num_attention_heads"])
    NH, KH = hf["num_attention_heads"] * H, hf["num_key_value_heads"] * H
    linears = {
        "self_attn.q_proj": (NH, D),
        "self_attn.k_proj": (KH, D),
        "self_attn.v_proj": (KH, D),
        "self_attn.o_proj": (D, NH),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    biased = {"qwen2": list(linears)[:3]}.get(hf["model_type"], [])
    layer = {f"{name}.weight": shape for name, shape in linears.items()}
    layer |= {f"{name}.bias": linears[name][:1] for name in biased}
    layer |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    if hf["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not hf.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (V, D)
    for i in range(hf["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    rng = np.random.default_rng(seed)
    return {name: (int("norm" in name) + rng.normal(0, 0.2, s)).astype(np.float32) for name, s in shapes.items()}


def write(folder, hf, tensors):
    """A folder of one file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder):
    """All tensors of a folder of one or several files."""
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def load(folder, *, mesh=None, pad=1, **options):
    """The model and its parameters, on one device unless a mesh is given."""
    model = build(huggingface.decoder_config(huggingface.read_config(folder), vocab_pad_multiple=pad), **options)
    mesh = mesh or make_mesh({}, jax.devices()[:1])
    return model, huggingface.load(folder, model, tree_shardings(model.abstract, model.dims, TRAINING, mesh))


def save(out, folder, model, params, **options):
    """Exports what was loaded from `folder`, in float32 unless told otherwise."""
    hf = huggingface.read_config(folder)
    generation = huggingface.generation_config(folder, hf)
    options = {"generation": generation, "tokenizer_folder": folder, "dtype": "float32"} | options
    huggingface.save(out, params, hf, model.config, **options)


def logits(model, params, ids):
    """float32 [B, T, V] of whole rows of one sequence each."""
    ids = jnp.asarray(ids, jnp.int32)

    @jax.jit
    def forward(params, ids):
        module = model.bind(params)
        positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
        return module.logits(module.hidden(ids, positions, jnp.ones_like(ids)))

    return np.asarray(forward(params, ids))
