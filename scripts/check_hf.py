"""Check import, decoder, engine and export against golden Hugging Face folders.

    python scripts/check_hf.py tests/golden/hf/*

Each folder is a model folder (config.json, safetensors) with a golden.npz of what a reference implementation
computed in float32: `input_ids` [B, T] and their `logits` [B, T, V]; `lengths` [B] and `ragged_logits_i`
[lengths[i], V] for the prompt input_ids[i, :lengths[i]] alone; `greedy` [B, N], the likeliest continuation of
each such prompt, end-of-sequence ids passed over. Prints a line a folder; exits with 1 if any of them fails.

The logits of the whole batch, of the prompts padded on the right and of all prompts packed into one row must
be within 2e-4 of the golden ones, the engine's greedy tokens the same, and an export, to one file and to
several, must hold the same bytes under the same names.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import load_file

from jaxrl_llm.models import huggingface
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.models.decoder import Model, build
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.rollout.engine import Sampling
from jaxrl_llm.rollout.jax_engine import JaxEngine
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.sharding.rules import INFERENCE, tree_shardings
from jaxrl_llm.types import Prompt

TOLERANCE = 2e-4
GOLDEN = ("input_ids", "logits", "lengths", "greedy")


def check(folder: Path) -> tuple[bool, str]:
    """Whether a folder passes, and its line without its name."""
    hf = huggingface.read_config(folder)
    family = hf.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        return False, f"{family}  FAILED: unknown family {family!r}; known families: {known}"
    golden = read_golden(folder / "golden.npz")
    mesh = make_mesh({}, jax.devices()[:1])
    model = build(huggingface.decoder_config(hf))
    params = huggingface.load(folder, model, tree_shardings(model.abstract, model.dims, INFERENCE, mesh))
    difference = logits_difference(model, params, golden)
    same_tokens = greedy(model, params, mesh, golden) == golden["greedy"].tolist()
    exported = [export_problem(folder, model, params, files) for files in (1, 4)]
    problems = [problem for problem in exported if problem]
    if not same_tokens:
        problems.insert(0, "the greedy tokens differ")
    if not difference <= TOLERANCE:  # NaN is not
        problems.insert(0, f"logits differ by more than {TOLERANCE:.0e}")
    line = (
        f"{family}  logits within {difference:.1e}  greedy {'ok' if same_tokens else 'wrong'}  "
        f"export {'wrong' if any(exported) else 'ok'}  "
        f"{'FAILED: ' + '; '.join(problems) if problems else 'OK'}"
    )
    return not problems, line


def read_golden(path: Path) -> dict[str, np.ndarray]:
    """The arrays of golden.npz; ModelError if some are missing."""
    if not path.is_file():
        raise ModelError(f"{path.parent} has no {path.name}")
    with np.load(path) as file:
        golden = {name: file[name] for name in file.files}
    ragged = [f"ragged_logits_{i}" for i in range(len(golden.get("lengths", ())))]
    missing = [name for name in (*GOLDEN, *ragged) if name not in golden]
    if missing:
        raise ModelError(f"{path} lacks {', '.join(missing)}")
    return golden


def logits_difference(model: Model, params: Any, golden: Mapping[str, np.ndarray]) -> float:
    """Largest difference from the golden logits, over whole, padded and packed rows; NaN if there is one."""
    ids, lengths = golden["input_ids"].astype(np.int32), golden["lengths"]
    B, T = ids.shape
    width = max(T, int(lengths.sum()))
    real = np.arange(T) < lengths[:, None]
    # B whole rows, B rows of one prompt each, and a row of all prompts: one program for all of them.
    rows, positions, segments = np.zeros((3, 2 * B + 1, width), np.int32)
    rows[:B, :T], segments[:B, :T] = ids, 1
    rows[B:-1, :T], segments[B:-1, :T] = np.where(real, ids, 0), real
    positions[:-1] = np.arange(width)
    packed = slice(0, int(lengths.sum()))
    rows[-1, packed], segments[-1, packed] = ids[real], np.repeat(np.arange(1, B + 1), lengths)
    positions[-1, packed] = np.concatenate([np.arange(n) for n in lengths])

    @jax.jit
    def forward(params: Any, rows: Any, positions: Any, segments: Any) -> jax.Array:
        module = model.bind(params)
        return module.logits(module.hidden(rows, positions, segments))

    ours = np.asarray(forward(params, rows, positions, segments))[:, :, : model.config.vocab_size]
    ragged = np.concatenate([golden[f"ragged_logits_{i}"] for i in range(B)])
    pairs = [(ours[:B, :T], golden["logits"]), (ours[B:-1, :T][real], ragged), (ours[-1, packed], ragged)]
    for mine, theirs in pairs:
        if mine.shape != theirs.shape:
            raise ModelError(f"logits have shape {mine.shape}, the golden ones {theirs.shape}")
    return float(np.max([np.max(np.abs(mine - theirs)) for mine, theirs in pairs]))


def greedy(model: Model, params: Any, mesh: Mesh, golden: Mapping[str, np.ndarray]) -> list[list[int]]:
    """What the engine generates for each prompt at temperature 0."""
    lengths, tokens = golden["lengths"], golden["greedy"].shape[1]
    prompts = [
        Prompt(i, i, ids[:length].astype(np.int32), "", "golden")
        for i, (ids, length) in enumerate(zip(golden["input_ids"], lengths, strict=True))
    ]
    engine = JaxEngine(
        model,
        mesh,
        eos_ids=(),
        decode_text=lambda ids: "",
        max_prompt_length=int(lengths.max()),
        max_response_length=tokens,
        slots=len(prompts),
        prefill_batch=len(prompts),
        steps_per_dispatch=tokens,
    )
    engine.load(params, 0, int(checksum(params)))
    sampling = Sampling(temperature=0.0, max_tokens=tokens)
    rollouts = engine.generate(sampling.requests(prompts), sampling)
    engine.close()
    return [r.token_ids[r.action_mask].tolist() for r in rollouts]


def export_problem(folder: Path, model: Model, params: Any, files_wanted: int) -> str | None:
    """What is wrong with an export of the imported parameters to one or about `files_wanted` files."""
    hf = huggingface.read_config(folder)
    source = tensors(folder)
    size = sum(len(data) for _, _, data in source.values())
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "export"
        huggingface.save(
            out,
            params,
            hf,
            model.config,
            generation=huggingface.generation_config(folder, hf),
            tokenizer_folder=None,
            dtype=next(iter(source.values()))[0],
            max_shard_bytes=-(-size // files_wanted),
        )
        files = len(list(out.glob("*.safetensors")))
        exported = tensors(out)
    if (files > 1) != (files_wanted > 1):
        return f"the export to {files_wanted} files has {files}"
    wrong = sorted(n for n in source.keys() | exported.keys() if source.get(n) != exported.get(n))
    return f"the export to {files} files differs in {', '.join(wrong)}" if wrong else None


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """dtype, shape and bytes of all tensors, each from the file that the index names if there is an index."""
    index = folder / huggingface.INDEX
    place = json.loads(index.read_text())["weight_map"] if index.exists() else None
    found = {}
    for name in sorted(set(place.values())) if place else ["model.safetensors"]:
        for key, tensor in load_file(folder / name).items():
            if place is None or place.get(key) == name:
                found[key] = (str(tensor.dtype), tensor.shape, tensor.tobytes())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    folders = parser.parse_args(arguments).folders
    failed = 0
    for folder in folders:
        try:
            good, line = check(folder)
        except Exception as error:  # a folder that cannot be read at all fails like any other, and the next is checked
            text = "; ".join(part.strip() for part in str(error).splitlines()).replace(":; ", ": ")
            good, line = (
                False,
                f"FAILED: {'' if isinstance(error, ModelError) else type(error).__name__ + ': '}{text}",
            )
        failed += not good
        print(f"{folder.resolve().name}  {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
