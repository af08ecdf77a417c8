import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data.chat import check_template_kwargs, encode_response, load_tokenizer, render
from jaxrl_llm.types import UserError

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% if not think | default(true) %}!{% endif %}{% endif %}"
)
USER = [{"role": "user", "content": "1+1"}]


def save_tokenizer(folder, *, template=None, adds_bos=False, **special):
    """A tokenizer with one token a printable ASCII character, saved: <unk> 0, <s> 1, </s> 2, ..."""
    letters = ["<unk>", "<s>", "</s>", "<pad>", "\n", *map(chr, range(32, 127))]
    core = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | special
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def chat_tokenizer(tmp_path):
    return load_tokenizer(save_tokenizer(tmp_path, template=TEMPLATE))


@pytest.fixture
def plain_tokenizer(tmp_path):
    return load_tokenizer(save_tokenizer(tmp_path))


def message_of(function, *args, **kwargs) -> str:
    with pytest.raises(UserError) as caught:
        function(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend"])
def test_the_saved_tokenizer_is_used_whatever_model_stands_beside_it(tmp_path, named):
    folder = save_tokenizer(tmp_path, template=TEMPLATE)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": named}))
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = load_tokenizer(folder)
    assert type(tokenizer) is PreTrainedTokenizerFast
    ids = tokenizer.encode("1+1 =\n2")
    assert len(ids) == 7
    assert tokenizer.decode(ids) == "1+1 =\n2"
    assert tokenizer.chat_template == TEMPLATE


def test_eos_stands_in_for_a_missing_padding_token_and_a_present_one_stays(tmp_path):
    assert load_tokenizer(save_tokenizer(tmp_path / "a")).pad_token_id == 2
    assert load_tokenizer(save_tokenizer(tmp_path / "b", pad_token="<pad>")).pad_token_id == 3


def test_a_tokenizer_without_eos_is_refused(tmp_path):
    assert "has no EOS token" in message_of(load_tokenizer, save_tokenizer(tmp_path, eos_token=None))


def test_missing_folders_and_files_are_named(tmp_path):
    assert f"{tmp_path / 'no'} does not exist" in message_of(load_tokenizer, str(tmp_path / "no"))
    (tmp_path / "model.safetensors").write_text("")
    message = message_of(load_tokenizer, str(tmp_path))
    assert "expected tokenizer.json or" in message
    assert "found model.safetensors" in message


def test_a_damaged_tokenizer_file_names_the_folder(tmp_path):
    folder = save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert f"the tokenizer in folder {folder} does not load" in message_of(load_tokenizer, folder)


def test_messages_go_through_the_template_and_get_no_second_bos(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=TEMPLATE, adds_bos=True))
    text, ids = render(tokenizer, USER)
    assert text == "<s>user:1+1</s><s>assistant:"
    assert ids.dtype == np.int32
    assert ids.tolist()[:2] == [1, tokenizer.convert_tokens_to_ids("u")]
    assert (ids == 1).sum() == 2
    assert tokenizer.decode(ids) == text


def test_a_string_goes_through_the_template_only_in_chat_style(chat_tokenizer):
    templated = "<s>user:1+1</s><s>assistant:"
    assert render(chat_tokenizer, "1+1")[0] == "1+1"
    assert render(chat_tokenizer, "1+1", prompt_style="plain")[0] == "1+1"
    assert render(chat_tokenizer, "1+1", prompt_style="chat")[0] == templated
    assert render(chat_tokenizer, USER, prompt_style="plain")[0] == "User: 1+1\nAssistant:"


def test_without_a_template_messages_become_the_plain_transcript(plain_tokenizer):
    messages = [*USER, {"role": "assistant", "content": "2"}, {"role": "user", "content": "2+2"}]
    text, ids = render(plain_tokenizer, messages, "Count.")
    assert text == "Count.\n\nUser: 1+1\nAssistant: 2\nUser: 2+2\nAssistant:"
    assert plain_tokenizer.decode(ids) == text
    assert render(plain_tokenizer, "1+1", prompt_style="chat")[0] == "User: 1+1\nAssistant:"


def test_the_system_prompt_goes_in_front_but_never_replaces_the_rows_own(chat_tokenizer):
    own = [{"role": "system", "content": "mine"}, *USER]
    assert render(chat_tokenizer, USER, "S")[0] == "<s>system:S</s><s>user:1+1</s><s>assistant:"
    assert render(chat_tokenizer, own, "S")[0] == "<s>system:mine</s><s>user:1+1</s><s>assistant:"
    assert render(chat_tokenizer, "1+1=", "S")[0] == "S\n\n1+1="
    assert render(chat_tokenizer, USER, "")[0] == "<s>user:1+1</s><s>assistant:"


def test_plain_text_gets_the_bos_of_the_tokenizer_once_and_no_eos(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, adds_bos=True))
    assert tokenizer.encode("7") == [1, tokenizer.convert_tokens_to_ids("7"), 2]
    for given in ("7=", "<s>7="):
        text, ids = render(tokenizer, given)
        assert text == "<s>7="
        assert ids.tolist() == [1, *tokenizer.convert_tokens_to_ids(["7", "="])]


def test_text_that_spells_eos_keeps_its_ids_though_padding_is_the_same_id(plain_tokenizer):
    _, ids = render(plain_tokenizer, "7</s>8")
    assert ids.tolist() == [
        plain_tokenizer.convert_tokens_to_ids("7"),
        2,
        plain_tokenizer.convert_tokens_to_ids("8"),
    ]


def test_template_variables_reach_the_template_and_unknown_ones_are_refused(chat_tokenizer, tmp_path):
    assert render(chat_tokenizer, USER, template_kwargs={"think": False})[0].endswith("assistant:!")
    check_template_kwargs(chat_tokenizer, {"think": False})
    assert "does not use 'thnik'" in message_of(check_template_kwargs, chat_tokenizer, {"thnik": False})
    assert "tokenize is fixed" in message_of(check_template_kwargs, chat_tokenizer, {"tokenize": True})


def test_a_template_that_refuses_is_quoted_with_the_row(tmp_path):
    template = "{{ raise_exception('no system role here') }}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    message = message_of(render, tokenizer, USER, "S", place="a.jsonl, row 4")
    assert message.startswith("a.jsonl, row 4: the chat template refused messages with the roles system, user")
    assert "no system role here" in message


def test_empty_fields_that_parquet_adds_do_not_reach_the_template(tmp_path):
    template = "{% for m in messages %}{% if m.tools is defined %}T{% endif %}{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, template=template))
    assert render(tokenizer, [{**USER[0], "tools": None}])[0] == "1+1"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (7, "must be a string or a list of messages, got int 7"),
        ([], "must be a string or a list of messages, got list"),
        (["1+1"], "message 1 must be an object with role and content, got str"),
        ([{"from": "user", "content": "a"}], "message 1 needs a string 'role', got None"),
        (
            [*USER, {"role": "user", "contents": "a"}],
            "message 2 needs a string 'content', got None (it has 'contents')",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "message 1 needs a string 'content', got [{'type'",
        ),
        ([*USER, {"role": "assistant", "content": "2"}], "the last message is the assistant's"),
        ("a\ud800", "character 2 is half of a surrogate pair"),
    ],
)
def test_malformed_prompts_are_refused_with_their_place(plain_tokenizer, prompt, message):
    got = message_of(render, plain_tokenizer, prompt, place="a.jsonl, row 4")
    assert got.startswith("a.jsonl, row 4: ")
    assert message in got


def test_an_unknown_prompt_style_is_refused(plain_tokenizer):
    assert "auto, chat, plain" in message_of(render, plain_tokenizer, "a", prompt_style="chatty")


def test_a_response_ends_with_exactly_one_eos_and_gets_no_bos(tmp_path):
    tokenizer = load_tokenizer(save_tokenizer(tmp_path, adds_bos=True))
    seven = tokenizer.convert_tokens_to_ids("7")
    for text, ids in (("7", [seven, 2]), ("7</s>", [seven, 2]), ("", [2]), ("</s>7", [2, seven, 2])):
        got = encode_response(tokenizer, text)
        assert got.tolist() == ids
        assert got.dtype == np.int32
    assert "must be a string, got int 7" in message_of(encode_response, tokenizer, 7)
