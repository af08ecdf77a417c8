"""Builders of what users get wrong. Each makes files in a folder and returns the arguments that follow SMALL."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

import jaxrl_llm

BASE_MODEL = Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic_base"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"

GOOD_ROW = '{"prompt": "1+1=", "answer": "2"}\n'

Build = Callable[[Path], list[str]]

# A run that takes seconds, on the eight devices of the tests.
SMALL = [
    "--config",
    "quickstart",
    "--config.data.train=arithmetic:count=20,split=train",
    "--config.data.val=()",
    "--config.mesh.fsdp=2",
    "--config.mesh.tensor=4",
    "--config.data.train_batch_size=4",
    "--config.learner.mini_batch_size=4",
    "--config.learner.micro_batch_rows=2",
    "--config.learner.row_lengths=(16,)",
    "--config.rollout.n=2",
    "--config.rollout.slots=8",
    "--config.rollout.prefill_batch=4",
    "--config.reward.workers=1",
    "--config.total_steps=4",
    "--config.eval.every=0",
    "--config.checkpoint.every=0",
    "--config.log.tensorboard=false",
    "--config.log.samples_every=0",
]


def sets(*items: str) -> list[str]:
    """Arguments that set keys."""
    return [f"--config.{item}" for item in items]


# ---- data -------------------------------------------------------------------------------------------------------


def data(name: str, content: str | bytes, *more: str) -> Build:
    """A data file with this content."""

    def build(folder: Path) -> list[str]:
        raw = content.encode() if isinstance(content, str) else content
        (folder / name).write_bytes(raw)
        return sets(f"data.train={folder / name}", *more)

    return build


def rows(*values: Any, keys: tuple[str, ...] = ()) -> Build:
    """A JSONL file: eight good rows, then these."""
    good = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    lines = [json.dumps(value) for value in (*good, *values)]
    return data("rows.jsonl", "\n".join(lines), *keys)


def prompts(value: Any) -> Build:
    """A JSONL file with a ninth row of this prompt."""
    return rows({"prompt": value, "answer": "1"})


def parquet(table: dict[str, Any], *more: str, cut: int = 0) -> Build:
    """A Parquet file, of which the last `cut` bytes are lost."""

    def build(folder: Path) -> list[str]:
        path = folder / "rows.parquet"
        pq.write_table(pa.table(table), path)
        path.write_bytes(path.read_bytes()[: -cut or None])
        return sets(f"data.train={path}", *more)

    return build


def saved_dataset(state: str) -> Build:
    """A folder like those of Dataset.save_to_disk, with this state.json."""

    def build(folder: Path) -> list[str]:
        (folder / "saved").mkdir()
        (folder / "saved" / "dataset_info.json").write_text("{}")
        (folder / "saved" / "state.json").write_text(state)
        return sets(f"data.train={folder / 'saved'}")

    return build


def folder_in_place_of(name: str, key: str) -> Build:
    """A folder where a file should be."""

    def build(folder: Path) -> list[str]:
        (folder / name).mkdir()
        return sets(f"{key}={folder / name}")

    return build


# ---- model ------------------------------------------------------------------------------------------------------


def model(change: Callable[[Path], object], *more: str) -> Build:
    """The quickstart's base model with something changed."""

    def build(folder: Path) -> list[str]:
        copy = folder / "model"
        shutil.copytree(BASE_MODEL, copy)
        change(copy)
        return sets(f"model.path={copy}", *more)

    return build


def write(name: str, content: str | bytes) -> Callable[[Path], object]:
    """Puts this into a file of the model."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def remove(*names: str) -> Callable[[Path], object]:
    """Takes files away."""
    return lambda folder: [(folder / name).unlink() for name in names]


def edit(name: str, **changes: Any) -> Callable[[Path], object]:
    """Changes keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        values = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))

    return change


def tensors(change: Callable[[dict[str, np.ndarray]], object]) -> Callable[[Path], object]:
    """Changes the weights."""

    def edited(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return edited


def cut(name: str, keep: int) -> Callable[[Path], object]:
    """Keeps only the first bytes of a file."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def folder(name: str) -> Callable[[Path], object]:
    """A folder in place of a file."""

    def change(at: Path) -> None:
        (at / name).unlink()
        (at / name).mkdir()

    return change


def hf(**changes: Any) -> Build:
    """The model with other keys in its config.json."""
    return model(edit("config.json", **changes))


def norm(values: np.ndarray) -> Callable[[Path], object]:
    """Other values of the last norm."""
    return tensors(lambda weights: weights.update({NORM: values}))


def template(text: str) -> Build:
    """A chat template, used for every prompt."""
    return model(write("chat_template.jinja", text), "data.prompt_style=chat")


def pickled(folder: Path) -> None:
    """Weights as a pickle that would make the file RAN in the working directory."""
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch RAN'\ntR.")


# ---- Python files -----------------------------------------------------------------------------------------------


def recipe(body: str) -> Build:
    """A recipe file."""

    def build(folder: Path) -> list[str]:
        (folder / "recipe.py").write_text(body)
        return ["--config", str(folder / "recipe.py")]

    return build


def changes(*lines: str) -> Build:
    """A recipe that does this to the quickstart."""
    body = "".join(f"    {line}\n" for line in lines)
    return recipe(
        "import numpy as np\nfrom jaxrl_llm.configs import quickstart\n"
        f"def get_config():\n    c = quickstart.get_config()\n{body}    return c\n"
    )


def reward(body: str, *more: str) -> Build:
    """A file with the reward function `fn`."""
    return _python("rewards.py", body, "reward.functions", "fn", *more)


def loss(body: str, *more: str) -> Build:
    return _python("mine.py", body, "algorithm.loss", "loss", *more)


def advantage(body: str) -> Build:
    return _python("mine.py", body, "algorithm.advantage", "advantage")


def _python(name: str, body: str, key: str, function: str, *more: str) -> Build:
    def build(folder: Path) -> list[str]:
        (folder / name).write_text(body)
        return sets(f"{key}={folder / name}:{function}", *more)

    return build


def saved_config(text: str) -> Build:
    """A saved config.json given as the config."""

    def build(folder: Path) -> list[str]:
        (folder / "saved.json").write_bytes(text.encode(errors="surrogateescape"))
        return ["--config", str(folder / "saved.json")]

    return build


def file_in(folder: Path) -> Path:
    """A file."""
    (folder / "mine").write_text("mine")
    return folder / "mine"


def usage_error(run, arguments, capsys) -> str:
    """The one line that a command prints when its options are wrong; it ends with 2."""
    with pytest.raises(SystemExit) as caught:
        run(arguments)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message
