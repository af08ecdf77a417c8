import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.data.sources import read
from jaxrl_llm.types import UserError
from scripts.prepare_gsm8k import INSTRUCTION, main

SCRIPT = Path(__file__).parent.parent / "scripts" / "prepare_gsm8k.py"
LINES = [
    {"question": "Two apples and three?", "answer": "2 + 3 = <<2+3=5>>5 apples.\n#### 5"},
    {"question": "A loss?", "answer": "It is <<1000-2234.5=-1234.5>>-1234.5.\n#### -1,234.5"},
]


def write(path, lines):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def test_rows_hold_prompt_final_number_source_and_reference(tmp_path):
    main([write(tmp_path / "gsm8k_train.jsonl", LINES), "--out", str(tmp_path / "out")])
    rows = read([str(tmp_path / "out" / "train.parquet")])
    assert rows[0] == {
        "prompt": [{"role": "user", "content": f"Two apples and three?\n{INSTRUCTION}"}],
        "answer": "5",
        "data_source": "openai/gsm8k",
        "extra_info": {"index": 0, "split": "train", "answer": LINES[0]["answer"]},
    }
    assert rows[1]["answer"] == "-1234.5"
    assert rows[1]["extra_info"]["index"] == 1
    assert len(rows) == 2


def test_the_instruction_asks_for_the_marker_that_the_answers_carry():
    assert "####" in INSTRUCTION


def test_plain_style_and_own_instruction_give_text(tmp_path):
    path = write(tmp_path / "test.jsonl", LINES)
    main([path, "--out", str(tmp_path), "--style", "plain", "--instruction", "Be brief."])
    row = read([str(tmp_path / "test.parquet")])[0]
    assert row["prompt"] == "Question: Two apples and three?\nBe brief.\nAnswer:"
    assert row["extra_info"]["split"] == "test"


def test_sft_adds_the_solution_without_calculator_marks(tmp_path):
    main([write(tmp_path / "train.jsonl", LINES), "--out", str(tmp_path), "--sft"])
    responses = [row["response"] for row in read([str(tmp_path / "train.parquet")])]
    assert responses == ["2 + 3 = 5 apples.\n#### 5", "It is -1234.5.\n#### -1,234.5"]


def test_other_names_are_kept_and_clashes_are_refused(tmp_path):
    paths = [write(tmp_path / f"{name}.jsonl", LINES) for name in ("socratic", "a_train", "b_train")]
    main([paths[0], "--out", str(tmp_path)])
    assert len(read([str(tmp_path / "socratic.parquet")])) == 2
    with pytest.raises(UserError, match=r"would both be written to .*train.parquet"):
        main([*paths[1:], "--out", str(tmp_path)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"question": "q", "answer": "It is five."}, "line 3: the answer must end in '#### NUMBER'"),
        ({"question": "q", "answer": "#### many"}, "line 3: the answer must end in '#### NUMBER'"),
        ({"question": "q"}, "line 3: expected a string 'answer'; columns: question"),
    ],
)
def test_a_line_without_a_final_number_is_refused_with_its_number(tmp_path, line, message):
    path = write(tmp_path / "train.jsonl", [*LINES, line])
    with pytest.raises(UserError) as caught:
        main([path, "--out", str(tmp_path)])
    assert f"{path}, {message}" in str(caught.value)
    assert not (tmp_path / "train.parquet").exists()


def test_the_command_reports_what_it_wrote_and_fails_in_one_line(tmp_path):
    def run(path):
        command = [sys.executable, str(SCRIPT), path, "--out", str(tmp_path)]
        environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent), "JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    good = run(write(tmp_path / "train.jsonl", LINES))
    assert (good.returncode, good.stdout) == (0, f"{tmp_path / 'train.parquet'}: 2 rows\n")
    bad = run(str(tmp_path / "no.jsonl"))
    assert (bad.returncode, bad.stderr) == (1, f"error: {tmp_path / 'no.jsonl'} does not exist\n")
