import subprocess
import sys

import pytest

from jaxrl_llm.rewards.loading import load
from jaxrl_llm.types import UserError

SAMPLE = {
    "data_source": "toy",
    "solution_str": "#### 7",
    "ground_truth": "7",
    "extra_info": {"row": 3},
    "prompt_str": "What is 3 + 4?",
    "response_length": 5,
}


@pytest.fixture
def reward_file(tmp_path):
    def write(text, name="rewards.py"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def refusal(spec, kwargs={}):  # noqa: B006
    with pytest.raises(UserError) as caught:
        load(spec, kwargs)
    return str(caught.value)


def test_a_built_in_function_is_called_with_what_it_names():
    function = load("gsm8k")
    assert function.fields == ("solution_str", "ground_truth")
    assert function(SAMPLE)["acc"] == 1.0


def test_kwargs_are_given_at_every_call():
    assert load("length", {"max_length": 10})(SAMPLE) == {"length": 0.5}


def test_a_function_with_kwargs_of_its_own_gets_all_fields(reward_file):
    path = reward_file("def fn(**kwargs):\n    return kwargs\n")
    assert load(f"{path}:fn", {"scale": 2})(SAMPLE) == {**SAMPLE, "scale": 2}


def test_the_signature_of_verl_is_called_with_its_four_arguments(reward_file):
    path = reward_file(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'row': extra_info['row'], 'same': solution_str.endswith(ground_truth)}\n"
    )
    function = load(f"{path}:compute_score")
    assert function.name == "compute_score"
    assert function(SAMPLE) == {"row": 3, "same": True}


def test_a_relative_path_is_resolved_once_and_for_all(reward_file, tmp_path, monkeypatch):
    reward_file("def fn(): return 1\n")
    monkeypatch.chdir(tmp_path)
    assert load("rewards.py:fn").spec == f"{tmp_path.resolve()}/rewards.py:fn"


def test_a_file_is_imported_once_and_under_a_name_of_its_own(reward_file, tmp_path):
    text = "import pathlib\nwith open({log!r}, 'a') as f: f.write('x')\ndef a(): return 1\ndef b(): return 2\n"
    log = tmp_path / "log"
    first = reward_file(text.format(log=str(log)), "json.py")
    assert load(f"{first}:a")({**SAMPLE}) == 1
    assert load(f"{first}:b")({**SAMPLE}) == 2
    assert log.read_text() == "x"
    assert sys.modules["json"].dumps({}) == "{}"


def test_an_unknown_built_in_is_refused_with_the_nearest_and_all_names():
    text = refusal("gms8k")
    assert "'gms8k'" in text
    assert "did you mean 'gsm8k'" in text
    assert "exact_match" in text
    assert "path/to/file.py:function" in text


def test_a_missing_file_is_refused_with_its_full_path(tmp_path):
    assert str(tmp_path / "none.py") in refusal(f"{tmp_path}/none.py:fn")


def test_a_missing_function_is_refused_with_the_public_ones(reward_file):
    path = reward_file("import os\nfrom math import sqrt\ndef score(): ...\ndef other(): ...\ndef _own(): ...\n")
    text = refusal(f"{path}:scor")
    assert "did you mean 'score'" in text
    assert text.endswith("expected other, score")


def test_what_is_no_function_is_refused(reward_file):
    assert "is a int, expected a function" in refusal(reward_file("score = 3\n") + ":score")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\ny = x / 0\ndef fn(): ...\n", "ZeroDivisionError: division by zero (rewards.py:2)"),
        ("\n\nimport no_such_module_here\n", "No module named 'no_such_module_here' (rewards.py:3)"),
        ("def fn(:\n", "SyntaxError: invalid syntax (rewards.py:1)"),
        ("import sys\nsys.exit('no')\n", "SystemExit: no (rewards.py:2)"),
        ("import json\njson.loads('{')\n", "(rewards.py:2)"),
    ],
)
def test_a_file_that_fails_to_import_is_refused_with_its_line(reward_file, text, expected):
    path = reward_file(text)
    assert expected in refusal(f"{path}:fn")
    assert expected in refusal(f"{path}:fn")  # and the second time is no different


def test_a_file_that_is_no_python_is_refused(reward_file):
    assert "there is no Python file" in refusal(reward_file("", "rewards.txt") + ":fn")


def test_a_parameter_that_nobody_gives_is_refused_with_the_valid_ones(reward_file):
    text = refusal(reward_file("def fn(solution, ground_truth): return 1\n") + ":fn")
    assert "'solution'" in text
    assert "data_source, solution_str, ground_truth, extra_info, prompt_str, response_length" in text
    assert "'max_length'" in refusal("length")
    assert "'solution_str'" in refusal(reward_file("def fn(solution_str, /): return 1\n", "b.py") + ":fn")


def test_kwargs_that_the_function_does_not_have_are_refused():
    text = refusal("length", {"max_len": 10, "max_length": 10})
    assert "'max_len'" in text
    assert "did you mean 'max_length'" in text
    assert "max_length, buffer" in text


def test_kwargs_cannot_replace_what_is_scored():
    assert "'ground_truth' cannot be set" in refusal("gsm8k", {"ground_truth": "7"})


def test_what_a_worker_imports_does_not_bring_jax():
    code = "import sys, jaxrl_llm.rewards, jaxrl_llm.rewards.worker; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
