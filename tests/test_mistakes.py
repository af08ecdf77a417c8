"""Users' mistakes: each is one message that says what is wrong, where, and what to do, and leaves nothing of a run that
did not begin."""

import inspect
import json
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.models.config import ModelError
from jaxrl_llm.sharding.mesh import ShardingError
from jaxrl_llm.train import run
from jaxrl_llm.types import UserError
from tests import mistakes as m
from tests.mistake_table import REFUSED
from tests.mistakes import data, model, sets

MESSAGES = (UserError, ModelError, ShardingError)  # what the commands print without a traceback


def failure(tmp_path, arguments):
    """The message of a run with these arguments."""
    given = arguments(tmp_path) if inspect.isfunction(arguments) else arguments
    with pytest.raises(MESSAGES) as caught:
        run([*m.SMALL, f"--config.run_dir={tmp_path / 'run'}", *given])
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [pytest.param(a, w, id=f"{kind}: {name}") for kind, table in REFUSED.items() for name, a, w in table],
)
def test_a_mistake_is_one_message_and_no_run_begins(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    text = failure(tmp_path, arguments)
    for word in words:
        assert word in text
    assert len(text.splitlines()) <= 12
    assert len(text) < 1200
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "RAN").exists()  # what the pickle would do


# ---- runs that begin, and then cannot go on ---------------------------------------------------------------------

ONE_PROMPT = sets("data.train_batch_size=1", "learner.mini_batch_size=1", "rollout.slots=2", "rollout.prefill_batch=2")

STOPPED = [
    (
        "hangs",
        m.reward("import time\ndef fn():\n    time.sleep(99)\n", "reward.timeout_s=0.2"),
        "timed out after 0.2 s",
    ),
    ("text", m.reward("def fn():\n    return '1'\n"), "fn: returned str '1', expected a number"),
    ("None", m.reward("def fn():\n    return None\n"), "fn: returned None"),
    ("not finite", m.reward("def fn():\n    return float('nan')\n"), "fn: returned nan"),
    (
        "weight",
        lambda at: sets("reward.weights.ac=1.0"),
        "there is a weight for 'ac', which no reward function returned",
    ),
]


@pytest.mark.parametrize(("arguments", "words"), [pytest.param(a, w, id=name) for name, a, w in STOPPED])
def test_rewards_that_teach_nothing_stop_the_run_and_its_folder_is_whole(tmp_path, arguments, words):
    text = failure(tmp_path, lambda at: [*ONE_PROMPT, *arguments(at)])
    assert words in text
    assert "3 batches" in text
    assert len(text.splitlines()) == 1
    where = tmp_path / "run"
    assert configs.load(str(where / "config.json")).run_dir == str(where)
    assert [json.loads(line)["step"] for line in (where / "metrics.jsonl").read_text().splitlines()] == [1, 2]
    # Steps without a single reward are not saved, so their prompts come again; those with a wrong weight have taught.
    saved = ["2"] if "weight" in words else []
    assert [path.name for path in (where / "checkpoints").iterdir()] == saved


def test_the_same_command_trains_once_the_reward_function_is_mended(tmp_path):
    broken = m.reward("def fn(solution_str):\n    return 1 / 0\n")
    text = failure(tmp_path, lambda at: [*ONE_PROMPT, *broken(at)])
    assert "no sample of the last 3 batches could be scored by fn. The last error: fn: ZeroDivisionError" in text
    assert "(rewards.py:2)" in text
    mended = m.reward("def fn(solution_str):\n    return len(solution_str)\n")
    run([*m.SMALL, f"--config.run_dir={tmp_path / 'run'}", *ONE_PROMPT, *mended(tmp_path)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(line["reward/failed"] == 0 for line in lines)


# ---- runs that go on --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of one step."""
    folder = tmp_path_factory.mktemp("finished")
    run([*m.SMALL, f"--config.run_dir={folder / 'run'}", *sets("total_steps=1")])
    return folder / "run"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(model(lambda at: None), r"config.model.path was ", id="another model"),
        pytest.param(sets("seed=5"), "config.seed was 0 and is now 5", id="another seed"),
        pytest.param(m.rows(), "was ", id="other data"),
        pytest.param(sets("checkpoint.resume=never"), "config.checkpoint.resume is 'never'", id="no resuming"),
        pytest.param(m.reward("fn = 3\n"), "expected a function", id="a mistake elsewhere"),
    ],
)
def test_what_does_not_belong_to_the_run_is_refused_and_the_run_stays(finished, tmp_path, arguments, words):
    before = contents(finished)
    given = arguments(tmp_path) if inspect.isfunction(arguments) else arguments
    with pytest.raises(UserError) as caught:
        run([*m.SMALL, f"--config.run_dir={finished}", *sets("total_steps=2"), *given])
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 12
    assert contents(finished) == before


def test_a_runs_config_with_a_key_that_is_not_known_is_refused(finished, tmp_path):
    values = json.loads((finished / "config.json").read_text())
    values["rollout"]["beams"] = 4
    text = failure(tmp_path, m.saved_config(json.dumps(values)))
    assert text.startswith("config.rollout.beams does not exist. Keys of config.rollout: ")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- no mistakes ------------------------------------------------------------------------------------------------


def test_unusual_data_and_a_bare_tokenizer_are_no_mistakes(tmp_path):
    reward = (
        "def fn(ground_truth, extra_info, data_source, response_length):\n"
        "    assert ground_truth == 'drei' or (ground_truth == 'zwölf ☃' and extra_info['nothing'] is None)\n"
        "    assert data_source == 'lines' or extra_info['deep'] == {'list': [{'a': None}]}\n"
        "    return response_length\n"
    )
    table = pa.Table.from_pylist(
        [{"prompt": [{"role": "user", "content": "1+1", "name": None}], "reward_model": {"ground_truth": "zwölf ☃"}}]
        * 3
    )
    when = pa.array([10**15] * 3, pa.timestamp("us"))
    deep = pa.array([{"list": [{"a": None}]}] * 3)
    table = table.append_column("nothing", pa.nulls(3)).append_column("when", when).append_column("deep", deep)
    pq.write_table(table, tmp_path / "größe.parquet")
    row = {"prompt": "\u2028٣+1=", "reward_model": {"ground_truth": "drei"}, "tags": ["ü", None]}
    (tmp_path / "lines.jsonl").write_text(f"\ufeff\n{json.dumps(row, ensure_ascii=False)}\r\n\n", encoding="utf-8")
    arguments = [
        *model(m.edit("tokenizer_config.json", pad_token=None))(tmp_path),
        *m.reward(reward, "data.answer_key=reward_model.ground_truth", "data.max_prompt_length=24")(tmp_path),
        *sets(f"data.train={[str(tmp_path / 'größe.parquet'), str(tmp_path / 'lines.jsonl')]}"),
        *sets("learner.row_lengths=(32,)", "total_steps=1", f"run_dir={tmp_path / 'läuft'}"),
    ]
    run([*m.SMALL, *arguments])
    (line,) = map(json.loads, (tmp_path / "läuft" / "metrics.jsonl").read_text().splitlines())
    assert line["reward/failed"] == 0
    assert line["critic/score/mean"] == line["response_length/mean"] > 0


# ---- as a command -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words", "traceback"),
    [
        pytest.param([], 2, "usage: python -m jaxrl_llm.train --config NAME", False, id="nothing given"),
        pytest.param(data("x.jsonl", m.GOOD_ROW + "{"), 1, "x.jsonl, line 2, column 2: broken JSON", False, id="data"),
        pytest.param(m.hf(model_type="gpt2"), 1, "error: model_type 'gpt2' is unknown", False, id="model"),
        pytest.param(m.changes("1 / 0"), 1, "recipe.py: ZeroDivisionError", True, id="debug"),
    ],
)
def test_the_command_says_it_in_one_message_and_by_its_exit_code(tmp_path, arguments, code, words, traceback):
    given = [f"--config.run_dir={tmp_path / 'run'}", *arguments(tmp_path)] if arguments else []
    given = [*m.SMALL, *given, *(["--debug"] if traceback else [])] if given else []
    command = [sys.executable, "-m", "jaxrl_llm.train", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code
    assert words in done.stdout + done.stderr
    assert ("Traceback" in done.stderr) == traceback
    assert not (tmp_path / "run").exists()
