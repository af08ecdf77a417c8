"""Hugging Face model folders: import straight into sharded arrays, export to folders that transformers and vLLM load.

Both directions walk the family's one table, a tensor at a time: host memory holds this process's part of one stacked
parameter when reading, one file's worth of tensors when writing.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import traverse_util
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxrl_llm.models.config import DecoderConfig, ModelError
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.models.families import family_of
from jaxrl_llm.models.families.table import Tensor, check_kinds, require

INDEX = "model.safetensors.index.json"
# What makes a tokenizer; copied as it is from the source folder to an exported one.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_STORED_DTYPES = ("F64", "F32", "F16", "BF16")
_LAYER = re.compile(r"(.*?\blayers\.)(\d+)(\..*)")
_EXPORT_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def find(name: str | Path, kind: str = "model") -> Path:
    """A local folder as it is; otherwise a hub name, downloaded to the local cache where the network allows.

    `kind` says in messages what is looked for: "tokenizer". Raises ModelError if there is neither.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or str(name).count("/") != 1:
        what = "is a file, expected a folder" if folder.exists() else "does not exist"
        raise ModelError(f"{kind} folder {str(name)!r} {what}; a relative path starts at {Path.cwd()}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(name), allow_patterns=["*.json", "*.safetensors", *TOKENIZER_FILES]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:  # ValueError: no name of the hub
        raise ModelError(
            f"{kind} {str(name)!r} is neither a folder here nor could it be fetched from the Hugging Face hub: {error}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}; is it a Hugging Face model folder?") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8, or a number of 5000 digits
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it stands."""
    return read_json(folder / "config.json")


def decoder_config(hf: Mapping[str, Any], *, vocab_pad_multiple: int = 1) -> DecoderConfig:
    """The decoder that a Hugging Face config describes."""
    family = family_of(hf)
    check_kinds(hf)
    return family.config(hf).replace(vocab_pad_multiple=vocab_pad_multiple)


def generation_config(folder: Path | None, hf: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json, or what config.json says of the special tokens where there is none."""
    if folder is not None and (folder / "generation_config.json").exists():
        return read_json(folder / "generation_config.json")
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {key: hf[key] for key in keys if hf.get(key) is not None}


def eos_ids(generation: Mapping[str, Any], hf: Mapping[str, Any]) -> tuple[int, ...]:
    """All ids that end a response: the union of both configs' lists. ModelError for one that is no token."""
    check_kinds(hf)
    ids: list[int] = []
    for name, config in (("generation_config.json", generation), ("config.json", hf)):
        value = config.get("eos_token_id")
        found = value if isinstance(value, list) else [] if value is None else [value]
        wrong = [id for id in found if type(id) is not int or not 0 <= id < require(hf, "vocab_size")]
        if wrong:
            raise ModelError(
                f"{name}: eos_token_id={value!r:.80}: {wrong[0]!r} is no token of a vocabulary of {hf['vocab_size']}; "
                "expected one id below that, or a list of them"
            )
        ids += found
    return tuple(dict.fromkeys(ids))


# ---- reading ----------------------------------------------------------------------------------------------------


class _Files:
    """Open safetensors files of a folder, tensors by name."""

    def __init__(self, folder: Path):
        self._by_name: dict[str, Any] = {}
        if (folder / INDEX).exists():
            files = _index(folder / INDEX)
        else:
            files = ["model.safetensors"]
        for name in files:
            if not (folder / name).exists():
                pickled = sorted(p.name for p in folder.glob("*.bin"))
                hint = f"; {pickled[0]} is a pickle and is never read: convert it to safetensors" if pickled else ""
                source = f"{INDEX} names a file that is not there: " if name != "model.safetensors" else ""
                raise ModelError(f"{source}{folder} has no {name}{hint}")
            try:
                opened = safe_open(folder / name, "np")
            except (SafetensorError, OSError) as error:  # OSError: a folder of that name
                raise ModelError(f"{folder / name} is damaged or cut short: {error}") from error
            self._by_name |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> set[str]:
        return set(self._by_name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._by_name[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors writes it: "BF16"."""
        return self._by_name[name].get_slice(name).get_dtype()

    def read(self, name: str) -> np.ndarray:
        return self._by_name[name].get_tensor(name)


def _index(path: Path) -> list[str]:
    """Names of the files that an index names."""
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{path} must have an object weight_map of tensor names to file names, got {names!r:.80}")
    return sorted(set(names.values()))


def check(folder: Path, model: Model) -> None:
    """Looks at the names, shapes and types of a folder's tensors; of their values it reads no more than a tied head.

    Raises ModelError with the full list if tensors are missing, unknown or of another shape or type than the config
    says, or if a file is missing or damaged.
    """
    _checked(folder, model)


def _checked(folder: Path, model: Model) -> tuple[_Files, dict[str, Tensor], dict[str, Any]]:
    files = _Files(folder)
    table = family_of(read_config(folder)).tensors(model.config)
    shapes: dict[str, Any] = traverse_util.flatten_dict(model.abstract, sep=".")
    _check(folder, files, table, shapes, model.config)
    return files, table, shapes


def load(folder: Path, model: Model, shardings: Any, dtype: Any = jnp.float32) -> Any:
    """The parameters of a folder as a pytree of arrays of `dtype`, each created in its sharding.

    Raises ModelError as `check` does.
    """
    files, table, shapes = _checked(folder, model)
    flat_shardings = traverse_util.flatten_dict(shardings, sep=".")
    params = {
        path: _read_parameter(files, entry, shapes[path].shape, flat_shardings[path], jnp.dtype(dtype))
        for path, entry in table.items()
    }
    return traverse_util.unflatten_dict(params, sep=".")


def _check(
    folder: Path, files: _Files, table: Mapping[str, Tensor], shapes: Mapping[str, Any], c: DecoderConfig
) -> None:
    if set(table) != set(shapes):
        raise ModelError(f"the family's table and the decoder disagree on {sorted(set(table) ^ set(shapes))}")
    expected: dict[str, tuple[int, ...]] = {}
    user: dict[str, str] = {}
    for path, entry in table.items():
        for name, shape in _stored(entry, shapes[path].shape, c):
            if name in expected:
                raise ModelError(f"the family's table uses {name} twice, for {user[name]} and {path}")
            expected[name], user[name] = shape, path
    names = {n for n in files.names() if not n.endswith("rotary_emb.inv_freq")}
    tied = table["embedding"].name
    if c.tie_embeddings and "lm_head.weight" in names:
        if tied in names and not np.array_equal(files.read("lm_head.weight"), files.read(tied)):
            raise ModelError(f"{folder}: lm_head.weight differs from {tied}, but config.json ties them")
        names.remove("lm_head.weight")
    known = sorted(names & set(expected))
    problems = [("missing: ", n, "") for n in sorted(set(expected) - names)]
    problems += [("unknown: ", n, "") for n in sorted(names - set(expected))]
    problems += [
        ("shape of ", n, f": {files.shape(n)}, the config says {expected[n]}")
        for n in known
        if files.shape(n) != expected[n]
    ]
    problems += [
        ("type of ", n, f": {files.dtype(n)}, expected one of {', '.join(_STORED_DTYPES)}")
        for n in known
        if files.dtype(n) not in _STORED_DTYPES
    ]
    if problems:
        lines = "\n  ".join(_by_layers(problems))
        raise ModelError(f"{folder} does not hold the model of its config.json:\n  {lines}")


def _by_layers(problems: Sequence[tuple[str, str, str]]) -> list[str]:
    """Lines (before, tensor's name, after); what is the same in several layers is one line, `layers.{0,1,2}.`."""
    layers: dict[tuple[str, ...], list[str]] = {}
    for before, name, after in problems:
        match = _LAYER.fullmatch(name)
        head, layer, tail = match.groups() if match else (name, "", "")
        layers.setdefault((before + head, tail + after), []).append(layer)
    return [
        head + (found[0] if len(found) == 1 else "{" + ",".join(sorted(found, key=int)) + "}") + tail
        for (head, tail), found in layers.items()
    ]


def _stored(entry: Tensor, ours: tuple[int, ...], c: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the Hugging Face tensors that make one parameter."""
    layers = range(ours[0]) if "{i}" in entry.name else [None]
    shape = ours if layers == [None] else ours[1:]
    if entry.vocab:
        shape = (c.vocab_size, *shape[1:])
    elif entry.inputs:
        shape = (math.prod(shape[entry.inputs :]), math.prod(shape[: entry.inputs]))
    else:
        shape = (math.prod(shape),)
    for i in layers:
        yield entry.name.format(i=i), shape


def _from_stored(tensor: np.ndarray, entry: Tensor, shape: tuple[int, ...]) -> np.ndarray:
    """One layer's Hugging Face tensor in our shape."""
    if entry.vocab:
        return np.pad(tensor, ((0, shape[0] - tensor.shape[0]), (0, 0)))
    return (tensor.T if entry.inputs else tensor).reshape(shape)


def _to_stored(tensor: np.ndarray, entry: Tensor, c: DecoderConfig) -> np.ndarray:
    """The inverse of `_from_stored`."""
    if entry.vocab:
        return tensor[: c.vocab_size]
    return tensor.reshape(math.prod(tensor.shape[: entry.inputs]), -1).T if entry.inputs else tensor.reshape(-1)


def _read_parameter(files: _Files, entry: Tensor, shape: tuple[int, ...], sharding: Any, dtype: Any) -> jax.Array:
    """Reads each tensor once and fills all local shards of the (stacked) parameter from it."""
    stacked = "{i}" in entry.name
    index_of = sharding.addressable_devices_indices_map(shape)
    buffers: dict[Any, np.ndarray] = {}
    for index in index_of.values():
        key = _bounds(index, shape)
        buffers.setdefault(key, np.empty([stop - start for start, stop in key], dtype))
    for i in range(shape[0]) if stacked else [None]:
        ours = _from_stored(files.read(entry.name.format(i=i)), entry, shape[1:] if stacked else shape)
        for key, buffer in buffers.items():
            cuts = tuple(slice(*pair) for pair in key)
            if i is None:
                buffer[...] = ours[cuts]
            elif key[0][0] <= i < key[0][1]:
                buffer[i - key[0][0]] = ours[cuts[1:]]
    shards = [jax.device_put(buffers[_bounds(index, shape)], device) for device, index in index_of.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True))


# ---- writing ----------------------------------------------------------------------------------------------------


def tensors(params: Any, hf: Mapping[str, Any], c: DecoderConfig, dtype: Any) -> Iterator[tuple[str, np.ndarray]]:
    """All Hugging Face (name, tensor) pairs of the parameters, one at a time on the host.

    Every process of a multi-host run must walk it together.
    """
    flat: dict[str, Any] = traverse_util.flatten_dict(params, sep=".")
    for path, entry in family_of(hf).tensors(c).items():
        for i in range(flat[path].shape[0]) if "{i}" in entry.name else [None]:
            part = flat[path] if i is None else flat[path][i]
            host = _to_stored(_to_host(part), entry, c)
            yield entry.name.format(i=i), np.ascontiguousarray(host.astype(dtype, copy=False))


def _to_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def save(
    out: Path,
    params: Any,
    hf: Mapping[str, Any],
    config: DecoderConfig,
    *,
    generation: Mapping[str, Any],
    tokenizer_folder: Path | None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 2**30,
) -> None:
    """Writes a model folder: config, generation config, tokenizer files, safetensors (with an index if several).

    The folder appears under its name only when it is complete. Raises ModelError if it exists and is not empty.
    """
    if dtype not in _EXPORT_DTYPES:
        raise ModelError(f"cannot export as {dtype!r}; choose one of {', '.join(_EXPORT_DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"{out} exists and is not empty; choose another folder or remove it")
    partial = out.with_name(out.name + ".partial")
    writer = jax.process_index() == 0
    if writer:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    pairs = tensors(params, hf, config, _EXPORT_DTYPES[dtype])
    files: list[tuple[Path, list[str], int]] = []
    for chunk in _chunks(pairs, max_shard_bytes):
        path = partial / f"part-{len(files)}.safetensors"
        files.append((path, list(chunk), sum(t.nbytes for t in chunk.values())))
        if writer:
            save_file(chunk, path, metadata={"format": "pt"})
    if not writer:
        return
    _name_files(partial, files)
    old_spelling = {"torch_dtype": dtype} if "torch_dtype" in hf else {}
    _write_json(partial / "config.json", {**hf, "dtype": dtype, **old_spelling})
    _write_json(partial / "generation_config.json", dict(generation))
    for name in TOKENIZER_FILES:
        if tokenizer_folder is not None and (tokenizer_folder / name).exists():
            shutil.copyfile(tokenizer_folder / name, partial / name)
    if out.exists():
        out.rmdir()
    partial.rename(out)


def _chunks(pairs: Iterator[tuple[str, np.ndarray]], limit: int) -> Iterator[dict[str, np.ndarray]]:
    chunk: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in pairs:
        if chunk and size + tensor.nbytes > limit:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = tensor
        size += tensor.nbytes
    yield chunk


def _name_files(folder: Path, files: list[tuple[Path, list[str], int]]) -> None:
    if len(files) == 1:
        files[0][0].rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, (path, names, _) in enumerate(files):
        name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        path.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    total = sum(size for _, _, size in files)
    _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
