import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

import jaxrl_llm
from jaxrl_llm import generate
from jaxrl_llm.output import TextStream
from jaxrl_llm.rollout.engine import Sampling
from jaxrl_llm.types import UserError
from tests.engines import answers, random_prompts, response, spell
from tests.mistakes import usage_error

MODEL = str(Path(jaxrl_llm.__file__).parent / "assets" / "arithmetic_base")


# ---- what streams --------------------------------------------------------------------------------


def spelled(ids):
    return bytes(ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_pieces_hold_whole_characters_and_join_to_the_text(step):
    text = "naïve €5 \N{GRINNING FACE}\N{REPLACEMENT CHARACTER}日本 end"
    ids, pieces = list(text.encode()), []
    stream = TextStream(spelled, pieces.append)
    for n in range(step, len(ids), step):
        stream(0, ids[:n], False)
        assert "".join(pieces) == text[: len("".join(pieces))]
    stream(0, ids, True)
    stream.finish(text)
    assert "".join(pieces) == text
    assert all(pieces)


def test_a_text_that_ends_within_a_character_shows_so_at_the_end():
    pieces = []
    stream = TextStream(spelled, pieces.append)
    stream(0, b"5 \xe2\x82", False)
    assert pieces == ["5 "]
    stream.finish(spelled(b"5 \xe2\x82"))
    assert pieces == ["5 ", "\N{REPLACEMENT CHARACTER}"]


def test_a_stop_text_is_never_begun():
    pieces = []
    stream = TextStream(spelled, pieces.append, ["END", "\n\n"])
    for text in (b"a", b"a E", b"a EN", b"a ENvy\n", b"a ENvy\n!\n", b"a ENvy\n!\n\n"):
        stream(0, text, text.endswith(b"\n\n"))
    stream.finish("a ENvy\n!")
    assert pieces == ["a", " ", "ENvy", "\n!"]


@pytest.mark.parametrize("stop", [(), ("7",)])
def test_the_engine_tells_every_token_after_every_dispatch(engine, stop):
    prompts = random_prompts([5, 9, 3], seed=4)
    sampling = Sampling(n=2, max_tokens=12, stop=stop)
    told = {place: [] for place in range(6)}
    ended = []

    def listen(place, token_ids, has_ended):
        told[place].append(list(token_ids))
        ended.extend([place] if has_ended else [])

    rollouts = engine.generate(sampling.requests(prompts), sampling, listen)
    assert answers(rollouts) == answers(engine.generate(sampling.requests(prompts), sampling))
    assert sorted(ended) == list(range(6))
    for place, rollout in enumerate(rollouts):
        assert told[place][-1] == response(rollout)
        for before, after in zip(told[place], told[place][1:], strict=False):
            assert after[: len(before)] == before
    if not stop:
        assert [len(ids) for ids in told[0]] == [1, 6, 11, 12]


@pytest.mark.parametrize("stop", [(), ("7",), ("1,0",)])
def test_what_streams_from_the_engine_joins_to_the_response(engine, stop):
    for seed in range(3):
        sampling = Sampling(max_tokens=12, stop=stop, seed=seed)
        pieces = []
        stream = TextStream(spell, pieces.append, stop)
        (rollout,) = engine.generate(sampling.requests(random_prompts([6])), sampling, stream)
        stream.finish(rollout.text)
        assert "".join(pieces) == rollout.text


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def say(capsys, tmp_path):
    """Runs the command; returns what it printed and what it wrote."""

    def run(*arguments):
        generate.run(["--model", MODEL, "--out", str(tmp_path / "out.jsonl"), *arguments])
        printed = capsys.readouterr().out.replace(f"written to {tmp_path / 'out.jsonl'}\n", "")
        return printed, [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    return run


def test_one_answer_is_printed_alone(say):
    printed, (line,) = say("12+7=", "--temperature", "0")
    assert printed == line["response"] + "\n"
    assert line["response"].isdigit()
    assert line["prompt"] == "12+7="
    assert (line["sample"], line["stop_reason"], line["response_length"]) == (0, "eos", len(line["response"]) + 1)


def test_several_prompts_come_in_order_and_by_the_seed(say):
    prompts = ["12+7=", "3+4=", "50+49="]
    printed, lines = say(*prompts, "--n", "3", "--seed", "5", "--temperature", "1")
    assert [(line["prompt"], line["sample"]) for line in lines] == [(p, s) for p in prompts for s in range(3)]
    shown = iter(printed.splitlines())
    for i, prompt in enumerate(prompts):
        assert f" prompt {i + 1} of 3 " in next(shown)
        assert [next(shown), next(shown)] == [prompt, ""]
        for s in range(3):
            assert [next(shown), next(shown)] == [f"sample {s + 1} of 3", lines[3 * i + s]["response"]]
    assert not list(shown)
    assert say(*prompts, "--n", "3", "--seed", "5", "--temperature", "1")[1] == lines
    assert say(*prompts, "--n", "3", "--seed", "6", "--temperature", "1")[1] != lines


def test_prompts_come_from_lines_or_json_lines(say, tmp_path):
    (tmp_path / "a.txt").write_text("1+1=\n\n2+2=\n")
    objects = [{"prompt": "1+1=", "other": 1}, {"prompt": [{"role": "user", "content": "1"}]}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, objects)))
    texts = [[line["prompt"] for line in say("--file", str(tmp_path / name))[1]] for name in ("a.txt", "b.jsonl")]
    assert texts == [["1+1=", "2+2="], ["1+1=", "User: 1\nAssistant:"]]


def test_a_response_ends_before_a_stop_text_and_at_the_limit(say):
    whole = say("50+49=", "--temperature", "0")[1][0]["response"]
    assert len(whole) > 1
    printed, (line,) = say("50+49=", "--temperature", "0", "--stop", whole[1])
    assert (line["response"], line["stop_reason"]) == (whole[: whole.index(whole[1])], "stop_string")
    assert printed == line["response"] + "\n"
    (line,) = say("50+49=", "--temperature", "0", "--max_tokens", "1")[1]
    assert (line["response"], line["stop_reason"]) == (whole[0], "length")


def test_a_conversation_keeps_its_history_until_it_is_full(say, monkeypatch):
    lines = ["1+1=", "", "2+2=", "3+3+3+3+3+3=", "/new", "4+4=", "/quit", "5+5="]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    printed, spoken = say("--chat", "--max_tokens", "4", "--temperature", "0")
    first, second, afresh = spoken
    assert first["prompt"] == "User: 1+1=\nAssistant:"
    assert second["prompt"] == f"{first['prompt']} {first['response']}\nUser: 2+2=\nAssistant:"
    assert afresh["prompt"] == "User: 4+4=\nAssistant:"
    refusal = printed.splitlines()[2]
    assert "the answer up to 4, but the model was made for 64 in all" in refusal
    assert [line for line in printed.splitlines() if line != refusal] == [line["response"] for line in spoken]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--modle", "x"], "unknown option '--modle' (did you mean '--model'?)"),
        (["1+1="], "got neither"),
        (["--model", MODEL], 'expected one of "PROMPT", --file FILE and --chat'),
        (["--model", MODEL, "--chat", "1+1="], 'expected one of "PROMPT", --file FILE and --chat'),
        (["--model", MODEL, " "], "the prompt is empty"),
        (["--model", MODEL, "1+1=", "--n", "2", "--temperature", "0"], "all be the same at temperature 0"),
        (["--model", MODEL, "--chat", "--n", "2"], "one answer at a time"),
        (["--model", MODEL, "1+1=", "--top_p", "0"], "--top_p: must be above 0 and at most 1, got 0"),
        (["--model", MODEL, "1+1=", "--temperature", "hot"], "--temperature: expected a number, got 'hot'"),
        (["--model", MODEL, "1+1=", "--max_tokens", "0"], "--max_tokens: must be at least 1, got 0"),
        (["--model", MODEL, "1+1=", "--stop", ""], "--stop is empty"),
        (["--model", MODEL, "1+1=", "--config", "quickstart"], "--config is not needed here"),
    ],
)
def test_mistakes_in_the_arguments_are_one_line_and_exit_2(arguments, words, capsys):
    assert words in usage_error(generate.run, arguments, capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("\n", "holds no prompts"),
        ('{"question": "1+1="}\n', 'line 1: expected "prompt" with a text or a list of messages; it has question'),
    ],
)
def test_a_file_without_prompts_is_refused(tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=words):
        generate.run(["--model", MODEL, "--file", str(file)])


def test_a_prompt_that_leaves_no_room_is_refused_with_all_numbers():
    with pytest.raises(UserError) as caught:
        generate.run(["--model", MODEL, "1+1=", "10+10=", "--max_tokens", "60"])
    text = str(caught.value)
    assert "prompt 2 has 6 tokens; with --max_tokens 60 that makes 66, more than the 64 tokens" in text
    assert "give --max_tokens 58 or less" in text


def test_help_and_mistakes_have_their_exit_codes():
    base = [sys.executable, "-m", "jaxrl_llm.generate"]
    done = subprocess.run([*base, "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--temperature T" in done.stdout
    done = subprocess.run([*base, "--run", "nowhere", "1+1="], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "error: nowhere is not a run folder: it has no config.json"
    done = subprocess.run([*base, "1+1="], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
