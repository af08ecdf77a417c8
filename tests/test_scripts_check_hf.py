import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from jaxrl_llm.models.families import FAMILIES
from scripts.check_hf import main

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_hf.py"


def run(*folders):
    # Less optimised code compiles in half the time, and compiling is nearly all that the script does here.
    environment = os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, str(SCRIPT), *map(str, folders)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def copy(source, target, *, config=None, change=None):
    """A golden folder with some keys of its config changed and its tensors passed through `change`."""
    shutil.copytree(source, target)
    if config:
        path = target / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))
    if change:
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file(tensors, target / "model.safetensors")
    return target


def test_all_golden_folders_pass(golden):
    folders = sorted((golden / "hf").iterdir())
    done = run(*folders)
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line[0] for line in lines] == [folder.name for folder in folders]
    families = [json.loads((folder / "config.json").read_text())["model_type"] for folder in folders]
    assert [line[1] for line in lines] == families
    assert all(line[3:] == ["greedy ok", "export ok", "OK"] for line in lines)
    assert all(0 < float(line[2].removeprefix("logits within ")) < 1e-5 for line in lines)


def test_altered_weights_and_altered_golden_tokens_fail_and_the_next_folder_is_checked(golden, tmp_path):
    def other_head(tensors):
        tensors["lm_head.weight"][:, 0] += 0.5

    altered = copy(golden / "hf" / "qwen2_untied", tmp_path / "altered", change=other_head)
    tokens = copy(golden / "hf" / "qwen2_untied", tmp_path / "tokens")
    arrays = dict(np.load(tokens / "golden.npz"))
    arrays["greedy"][2, -1] += 1
    np.savez(tokens / "golden.npz", **arrays)
    done = run(altered, tokens)
    assert done.returncode == 1
    first, second = done.stdout.splitlines()
    assert "FAILED: logits differ by more than 2e-04" in first
    assert "export ok" in first
    assert second.startswith("tokens  qwen2  logits within ")
    assert second.endswith("greedy wrong  export ok  FAILED: the greedy tokens differ")


def test_folders_that_cannot_be_checked_fail_with_the_reason(golden, tmp_path, capsys):
    source = golden / "hf" / "qwen3"
    folders = [
        copy(source, tmp_path / "unknown", config={"model_type": "parrot"}),
        copy(source, tmp_path / "lacking", change=lambda tensors: tensors.pop("model.norm.weight")),
        copy(source, tmp_path / "no_golden"),
        copy(source, tmp_path / "no_weights"),
        tmp_path / "nowhere",
        copy(source, tmp_path / "no_greedy"),
    ]
    (folders[2] / "golden.npz").unlink()
    (folders[3] / "model.safetensors").unlink()
    arrays = dict(np.load(folders[5] / "golden.npz"))
    del arrays["greedy"], arrays["ragged_logits_1"]
    np.savez(folders[5] / "golden.npz", **arrays)
    unlike = "does not hold the model of its config.json"
    assert main([str(folder) for folder in folders]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"unknown  parrot  FAILED: unknown family 'parrot'; known families: {', '.join(sorted(FAMILIES))}",
        f"lacking  FAILED: {folders[1]} {unlike}: missing: model.norm.weight",
        f"no_golden  FAILED: {folders[2]} has no golden.npz",
        f"no_weights  FAILED: {folders[3]} has no model.safetensors",
        f"nowhere  FAILED: {folders[4]} has no config.json; is it a Hugging Face model folder?",
        f"no_greedy  FAILED: {folders[5] / 'golden.npz'} lacks greedy, ragged_logits_1",
    ]
