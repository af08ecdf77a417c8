import math
import sys

import pytest

from jaxrl_llm.types import UserError
from scripts.bench_algorithms import PAIRS, Row, main, measured, request

SMALL = ["--batch", "16", "--tokens", "32", "--repeats", "1"]
RESULT = {"loss": 0.5, "gradient_norm": 0.25, "seconds": 2.0, "memory": 3 * 2**20, "inputs": 64, "compile_seconds": 1.0}


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_a_row_for_each_pair(capsys):
    assert main(["grpo+vanilla", "gae+gspo+correction", *SMALL]) == 0
    head, _, *rows, empty, copied, compiled = capsys.readouterr().out.splitlines()
    assert cells(head) == ["pair", "jaxrl_llm s", "MiB", "verl s", "MiB", "time ratio", "memory ratio"]
    assert [cells(row)[0] for row in rows] == ["grpo+vanilla", "gae+gspo+correction"]
    for row in rows:
        seconds, memory, *verl = cells(row)[1:]
        assert math.isfinite(float(seconds))
        assert math.isfinite(float(memory))
        assert verl == ["-"] * 4
    assert empty == ""
    assert copied.startswith("A copy moves ")
    assert compiled.startswith("jaxrl_llm compiles, once, for ")


@pytest.mark.parametrize(
    ("pair", "told"),
    [
        ("grop+vanilla", "advantage.*'grop'.*grpo"),
        ("grpo+vanila", "loss.*'vanila'.*vanilla"),
        ("grpo", "'grpo' is no pair"),
        ("grpo+vanilla+corection", "corection' is no pair.*\\+correction"),
    ],
)
def test_an_unknown_pair_is_told(pair, told):
    with pytest.raises(UserError, match=told):
        main([pair, *SMALL])


def test_the_default_pairs_exist():
    assert len({request(pair, 16, 32, 1)["loss"] for pair in PAIRS}) == 8


@pytest.mark.parametrize(
    ("python", "told"), [(sys.executable, "cannot import verl: .*'verl'"), ("/no/python", "is no Python interpreter")]
)
def test_an_interpreter_without_verl_is_told(python, told):
    with pytest.raises(UserError, match=f"--verl {python} {told}"):
        main(["grpo+vanilla", "--verl", python, *SMALL])


def test_ratios_are_of_ours_to_verls():
    row = Row("grpo+vanilla", RESULT, RESULT | {"seconds": 4.0, "memory": 2**20, "loss": 0.5 + 1e-5})
    assert cells(row.line()) == ["grpo+vanilla", "2", "3", "4", "1", "0.50", "3.00"]
    assert row.wrong() == []


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_what_differs_is_marked(name):
    row = Row("grpo+vanilla", RESULT, RESULT | {name: RESULT[name] + 1e-3})
    assert cells(row.line())[0] == "grpo+vanilla ✗"
    assert [text.split(" is ")[0] for text in row.wrong()] == [f"DIFFERS grpo+vanilla: {name}"]


def test_a_measurement_that_fails_is_told():
    text = measured(sys.executable, "bench_algorithms_jax.py", {"no": "request"})
    assert "unexpected keyword argument 'no'" in text
    row = Row("grpo+vanilla", text, RESULT)
    assert cells(row.line())[:4] == ["grpo+vanilla ✗", "failed", "failed", "2"]
    assert row.wrong() == [f"FAILED grpo+vanilla: jaxrl_llm: {text}"]
