import json
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat import load_tokenizer
from jaxrl_llm.data.stream import PromptStream, load_prompts
from jaxrl_llm.types import UserError
from tests.test_data_chat import save_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}<s>"


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(save_tokenizer(tmp_path / "tokenizer", template=TEMPLATE))


@pytest.fixture
def load(tmp_path, tokenizer):
    """Prompts of the given rows, written to train.jsonl; one token a character."""

    def load_rows(rows, *, tokenizer=tokenizer, max_prompt_length=100, **options):
        path = tmp_path / "train.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return load_prompts([str(path)], tokenizer, max_prompt_length=max_prompt_length, **options)

    return load_rows


@pytest.fixture
def numbered(load):
    """`numbered(n)`: n prompts "0=", "1=", ..."""
    return lambda n: load([{"prompt": f"{i}=", "answer": str(i)} for i in range(n)])


def rows_of(batches):
    return [[prompt.row for prompt in batch] for batch in batches]


def take(stream, steps):
    return rows_of(stream.next() for _ in range(steps))


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_a_row_becomes_a_prompt_with_its_answer_source_and_other_columns(load, tokenizer):
    rows = [
        {"prompt": "1+1=", "answer": "2", "data_source": "sums", "level": 3, "extra_info": {"index": 9}},
        {"prompt": [{"role": "user", "content": "2+2="}], "answer": [4], "extra_info": "text"},
    ]
    first, second = load(rows)
    assert (first.uid, first.row, first.text, first.ground_truth) == (0, 0, "1+1=", "2")
    assert first.token_ids.tolist() == tokenizer.convert_tokens_to_ids(list("1+1="))
    assert first.token_ids.dtype == np.int32
    assert (first.data_source, first.extra_info) == ("sums", {"level": 3, "index": 9})
    assert first.response_ids is None
    assert (second.uid, second.row, second.text) == (1, 1, "<s>2+2=</s><s>")
    assert (second.ground_truth, second.data_source) == ([4], "train")
    assert second.extra_info == {"extra_info": "text"}


def test_a_rows_source_falls_back_to_the_given_name_then_to_the_files(load, tokenizer):
    rows = [{"prompt": "a", "answer": 1}]
    assert load(rows, default_source="mine")[0].data_source == "mine"
    assert load(rows)[0].data_source == "train"
    spec = load_prompts(["arithmetic:count=1"], tokenizer, max_prompt_length=9)
    assert spec[0].data_source == "arithmetic"


def test_dotted_keys_reach_into_nested_columns(load):
    rows = [{"prompt": "a", "reward_model": {"style": "rule", "ground_truth": "7"}}]
    prompt = load(rows, answer_key="reward_model.ground_truth")[0]
    assert prompt.ground_truth == "7"
    assert prompt.extra_info == {"reward_model": {"style": "rule", "ground_truth": "7"}}


def test_the_length_filter_counts_tokens_after_the_template(load):
    rows = [{"prompt": [{"role": "user", "content": "x" * n}], "answer": 0} for n in (3, 4, 5)]
    prompts = load(rows, max_prompt_length=7)  # the template adds <s>, </s>, <s>
    assert [len(prompt.token_ids) for prompt in prompts] == [6, 7]
    assert [prompt.row for prompt in prompts] == [0, 1]
    assert prompts.counts == {"rows": 3, "kept": 2, "too_long": 1, "empty": 0}
    assert prompts.longest == 8


def test_the_length_filter_counts_tokens_and_not_characters(load):
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("word", -1.0), *((f"<0x{i:02X}>", -9.0) for i in range(256))]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    bytewise = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="</s>")
    rows = [{"prompt": "wordwordword", "answer": 0}, {"prompt": "三个字", "answer": 0}]
    prompts = load(rows, tokenizer=bytewise, max_prompt_length=4)
    assert [prompt.text for prompt in prompts] == ["wordwordword"]
    assert len(prompts[0].token_ids) == 3
    assert prompts.longest == 9


def test_empty_prompts_and_demonstrations_are_counted_apart(load):
    rows = [
        {"prompt": " ", "response": "a"},
        {"prompt": None, "response": "a"},
        {"prompt": [], "response": "a"},
        {"prompt": "a", "response": None},
        {"prompt": "a", "response": ""},
        {"prompt": "toolong", "response": "a"},
        {"prompt": "a", "response": "toolong"},
        {"prompt": "fits", "response": "too"},
    ]
    options = {
        "answer_key": None,
        "response_key": "response",
        "max_prompt_length": 4,
        "max_response_length": 4,
    }
    prompts = load(rows, **options)
    assert prompts.counts == {"rows": 8, "kept": 1, "too_long": 2, "empty": 5}
    assert prompts[0].row == 7
    assert prompts.describe() == (
        "8 rows, 1 kept, 2 too long, 5 empty; longest prompt 7 tokens, limit 4; longest response 8 tokens, limit 4"
    )


def test_a_demonstration_counts_its_eos_against_the_limit_and_ends_with_it(load, tokenizer):
    rows = [{"prompt": "1+1=", "response": text} for text in ("22", "222")]
    prompts = load(rows, answer_key=None, response_key="response", max_response_length=3)
    two = tokenizer.convert_tokens_to_ids("2")
    assert [prompt.response_ids.tolist() for prompt in prompts] == [[two, two, 2]]
    assert prompts[0].ground_truth is None
    assert prompts[0].extra_info == {}


def test_overlong_error_names_the_row_the_length_and_the_limit(load):
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "abcde", "answer": 0}]
    message = message_of(load, rows, max_prompt_length=4, overlong="error")
    assert "train.jsonl, row 2: the prompt has 5 tokens, over data.max_prompt_length=4" in message
    rows = [{"prompt": "a", "response": "abcd"}]
    options = {"answer_key": None, "response_key": "response", "overlong": "error", "max_response_length": 4}
    assert "row 1: the response has 5 tokens, over data.max_response_length=4" in message_of(load, rows, **options)
    assert "drop, error, got 'cut'" in message_of(load, rows, overlong="cut")


def test_losing_every_row_is_an_error_with_the_counts_and_the_key_to_change(load):
    message = message_of(load, [{"prompt": "abcde", "answer": 0}] * 2, max_prompt_length=4)
    assert "2 rows, 0 kept, 2 too long, 0 empty; longest prompt 5 tokens, limit 4" in message
    assert message.endswith("raise data.max_prompt_length")


def test_missing_columns_are_named_with_the_nearest_one(load):
    row = {"prompts": "a", "answer": "1"}
    message = message_of(load, [row])
    assert "row 1 has no column 'prompt'; did you mean 'prompts'? columns: prompts, answer" in message
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b"}]
    assert "row 2 has no column 'answer'; columns: prompt. Set data.answer_key" in message_of(load, rows)
    assert len(load(rows, answer_key=None)) == 2
    assert "no column 'reply'" in message_of(load, rows, answer_key=None, response_key="reply")
    assert "row 1: the answer in column 'answer' is empty" in message_of(load, [{"prompt": "a", "answer": None}])


def test_limit_takes_the_first_rows_of_all_paths_together(load, tokenizer, tmp_path):
    load([{"prompt": "a", "answer": 0}] * 2)
    paths = [str(tmp_path / "train.jsonl"), "arithmetic:count=5"]
    prompts = load_prompts(paths, tokenizer, max_prompt_length=9, limit=3)
    assert [prompt.data_source for prompt in prompts] == ["train", "train", "arithmetic"]
    assert [prompt.row for prompt in prompts] == [0, 1, 2]
    assert "no data files" in message_of(load_prompts, [], tokenizer, max_prompt_length=9)


def test_unknown_template_variables_are_refused_before_reading(load):
    message = message_of(load, [{"prompt": "a", "answer": 0}], template_kwargs={"enable_thinkng": False})
    assert "enable_thinkng" in message


def test_carry_hands_out_every_row_once_an_epoch_in_another_order_each_time(numbered):
    stream = PromptStream(numbered(10), batch_size=4, seed=0, remainder="carry")
    order = [row for batch in take(stream, 15) for row in batch]
    epochs = [order[start : start + 10] for start in range(0, 60, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert stream.steps_per_epoch == 3
    assert stream.steps(6) == 15
    assert stream.epoch == 6.0


def test_drop_uses_whole_batches_of_an_epoch_and_leaves_out_the_rest(numbered):
    stream = PromptStream(numbered(10), batch_size=4, seed=0)
    carry = PromptStream(numbered(10), batch_size=10, seed=0)
    assert stream.steps_per_epoch == 2
    left_out = set()
    for epoch in range(5):
        order = carry.next()
        batches = take(stream, 2)
        assert batches == [[p.row for p in order[:4]], [p.row for p in order[4:8]]]
        assert stream.epoch == epoch + 1
        left_out |= {p.row for p in order[8:]}
    assert len(left_out) > 2
    assert stream.describe() == "10 rows in batches of 4: 2 batches an epoch, 2 rows left out of each epoch"


def test_uids_are_positions_so_equal_prompts_stay_apart(load):
    prompts = load([{"prompt": "same", "answer": 0}] * 3)
    stream = PromptStream(prompts, batch_size=3, seed=0)
    uids = [prompt.uid for _ in range(4) for prompt in stream.next()]
    assert uids == list(range(12))


def test_the_order_depends_on_the_seed_alone(numbered):
    def order(seed):
        return take(PromptStream(numbered(12), batch_size=12, seed=seed), 4)

    assert order(0) == order(0)
    epochs = [tuple(epoch) for seed in range(4) for epoch in order(seed)]
    assert len(set(epochs)) == 16  # no epoch of one seed is an epoch of its neighbour


def test_the_order_of_a_seed_never_changes_between_releases(numbered):
    assert take(PromptStream(numbered(6), batch_size=6, seed=0), 2) == [
        [5, 3, 1, 0, 4, 2],
        [3, 5, 4, 1, 0, 2],
    ]


def test_without_shuffling_rows_come_in_order(numbered):
    stream = PromptStream(numbered(5), batch_size=2, seed=0, shuffle=False, remainder="carry")
    assert take(stream, 3) == [[0, 1], [2, 3], [4, 0]]


@pytest.mark.parametrize("remainder", ["drop", "carry"])
def test_resuming_twice_gives_the_batches_of_an_uninterrupted_run(numbered, remainder):
    def fresh():
        return PromptStream(numbered(20), batch_size=3, seed=0, remainder=remainder)

    straight = take(fresh(), 12)
    first = fresh()
    batches = take(first, 2)
    second = fresh()
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second.get_state()["position"] == 6
    batches += take(second, 3)
    assert second.get_state()["position"] == 15
    third = fresh()
    third.set_state(second.get_state())
    assert batches + take(third, 7) == straight


@pytest.mark.parametrize("remainder", ["drop", "carry"])
def test_resuming_at_an_epochs_end_goes_on_with_the_next_epoch(numbered, remainder):
    def fresh():
        return PromptStream(numbered(12), batch_size=2, seed=0, remainder=remainder)

    straight = fresh()
    expected = [[p.uid for p in straight.next()] for _ in range(12)]
    stopped = fresh()
    take(stopped, 6)
    assert stopped.epoch == 1.0
    resumed = fresh()
    resumed.set_state(stopped.get_state())
    assert [[p.uid for p in resumed.next()] for _ in range(6)] == expected[6:]


def test_a_state_of_other_data_or_another_order_is_refused_by_name(numbered, load):
    state = PromptStream(numbered(8), batch_size=2, seed=0).get_state()
    edited = load([{"prompt": f"{i}+", "answer": "0"} for i in range(8)])
    for stream, difference in (
        (PromptStream(numbered(8), batch_size=2, seed=1), "seed was 0 and is now 1"),
        (PromptStream(numbered(8), batch_size=4, seed=0), "batch_size was 2 and is now 4"),
        (PromptStream(numbered(9), batch_size=2, seed=0), "rows was 8 and is now 9; data was"),
        (PromptStream(numbered(8), batch_size=2, seed=0, remainder="carry"), "remainder was 'drop'"),
        (PromptStream(numbered(8), batch_size=2, seed=0, shuffle=False), "shuffle was True"),
        (PromptStream(edited, batch_size=2, seed=0), "data was"),
    ):
        assert difference in message_of(stream.set_state, state)
        assert stream.get_state()["position"] == 0


def test_the_fingerprint_sees_texts_ids_and_demonstrations(numbered):
    prompts = numbered(3)
    seen = {prompts.fingerprint}
    for change in (
        {"text": "other"},
        {"token_ids": prompts[1].token_ids[::-1].copy()},
        {"response_ids": np.asarray([2], np.int32)},
    ):
        records = [prompts[0], replace(prompts[1], **change), prompts[2]]
        seen.add(replace(prompts, records=records).fingerprint)
    assert len(seen) == 4
    assert numbered(3).fingerprint == prompts.fingerprint


def test_a_batch_larger_than_the_data_needs_carry(numbered):
    message = message_of(PromptStream, numbered(3), batch_size=4, seed=0)
    assert "3 rows, fewer than one batch of 4" in message
    stream = PromptStream(numbered(3), batch_size=4, seed=0, remainder="carry")
    order = [row for batch in take(stream, 3) for row in batch]
    assert [sorted(order[start : start + 3]) for start in range(0, 12, 3)] == [[0, 1, 2]] * 4
    assert "drop, carry, got 'keep'" in message_of(PromptStream, numbered(3), batch_size=1, seed=0, remainder="keep")
