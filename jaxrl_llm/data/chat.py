"""Tokenizers and chat templates: from a row's prompt to the exact token ids that the policy continues."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxrl_llm.types import UserError

PROMPT_STYLES = ("auto", "chat", "plain")
# Those that published chat templates know; most of them write any other into the prompt as it is.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython", "observation", "model", "documents")
VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a local model folder, or under a Hugging Face hub name. Runs no code from the folder.

    It always has an EOS token. Where it has no padding token, EOS stands in; nothing in this project tells
    padding from text by its id, so the two may be equal.

    Raises:
        UserError: no such folder or name, files missing, or no EOS token.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        tokenizer = _load_local(folder)
    elif folder.is_absolute() or path.startswith((".", "~")) or path.count("/") > 1:
        raise UserError(f"tokenizer folder {folder} does not exist")
    else:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UserError(
                f"tokenizer {path!r} is neither a local folder nor a name that loads from the hub: {error}"
            ) from error
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"tokenizer {path} has no EOS token, so a response could never end; set eos_token in its "
            "tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def render(
    tokenizer: PreTrainedTokenizerBase,
    row_prompt: Any,
    system_prompt: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    *,
    prompt_style: str = "auto",
    place: str = "prompt",
) -> tuple[str, np.ndarray]:
    """Text and token ids of a prompt, up to where the policy's answer begins.

    Args:
        row_prompt: a string, or a list of messages `{"role": ..., "content": ...}`.
        system_prompt: goes in front, unless the messages begin with a system message of their own; None or
            "" for none.
        template_kwargs: variables for the chat template, for example `{"enable_thinking": False}`.
        prompt_style: "auto" sends messages through the chat template and takes a string as it is; "chat"
            makes a string one user message first; "plain" never uses the template.
        place: where the row comes from, for errors.

    Returns:
        The text, special tokens included, and its ids, int32 [T].

    Without a template (or with "plain"), messages become

        SYSTEM PROMPT

        User: ...
        Assistant: ...
        User: ...
        Assistant:

    Text that goes through a template gets no further special tokens. All other text gets the BOS token if the
    tokenizer puts one in front of its input, and never an EOS.

    Raises:
        UserError: badly formed messages, or a template that refuses them.
    """
    if prompt_style not in PROMPT_STYLES:
        raise UserError(f"prompt_style must be one of {', '.join(PROMPT_STYLES)}, got {prompt_style!r}")
    if isinstance(row_prompt, str) and prompt_style != "chat":
        return _plain(tokenizer, f"{system_prompt}\n\n{row_prompt}" if system_prompt else row_prompt, place)
    if isinstance(row_prompt, str):
        row_prompt = [{"role": "user", "content": row_prompt}]
    messages = _messages(row_prompt, place)
    if system_prompt and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system_prompt}, *messages]
    if prompt_style == "plain" or not tokenizer.chat_template:
        return _plain(tokenizer, _transcript(messages), place)
    try:
        text = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, **(template_kwargs or {})
        )
    except Exception as error:  # a template is a program: beside refusing, it can fail in any way
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(
            f"{place}: the chat template refused messages with the roles {roles}: {error}; change the messages or the "
            "tokenizer's chat template, or do without it: data.prompt_style='plain'"
        ) from error
    assert isinstance(text, str)  # tokenize=False
    return text, _encode(tokenizer, text, place)


def encode_response(tokenizer: PreTrainedTokenizerBase, text: Any, *, place: str = "response") -> np.ndarray:
    """Token ids of a demonstration, int32 [T], ending with exactly one EOS id.

    Raises:
        UserError: if `text` is not a string.
    """
    if not isinstance(text, str):
        raise UserError(f"{place}: the response must be a string, got {type(text).__name__} {text!r:.60}")
    ids, eos = _encode(tokenizer, text, place), np.asarray([tokenizer.eos_token_id], np.int32)
    return ids if np.array_equal(ids[-1:], eos) else np.concatenate([ids, eos])


def check_template_kwargs(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> None:
    """Refuse variables that the chat template never reads: it would ignore them without a word.

    Raises:
        UserError: naming the variable.
    """
    template = tokenizer.chat_template or ""
    for name in template_kwargs:
        if name in ("tokenize", "add_generation_prompt"):
            raise UserError(f"data.template_kwargs: {name} is fixed here and cannot be set")
        if not template:
            raise UserError(f"data.template_kwargs.{name}: the tokenizer has no chat template that could use it")
        if name not in template:
            raise UserError(f"data.template_kwargs: the tokenizer's chat template does not use {name!r}")


def _load_local(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).exists() for name in VOCABULARY_FILES):
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:10]) or "nothing"
        raise UserError(f"folder {folder} holds no tokenizer: expected {' or '.join(VOCABULARY_FILES)}, found {names}")
    config = folder / "tokenizer_config.json"
    try:
        values = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        if not isinstance(values, dict):
            raise UserError(f"{config} must hold a JSON object, got {type(values).__name__}")
        named = values.get("tokenizer_class")
        # AutoTokenizer would put the class of config.json's model_type in place of this one, and that class
        # rebuilds the pre-tokenizer: the same file then encodes differently, or to nothing.
        general = named in ("PreTrainedTokenizerFast", PreTrainedTokenizerFast.__name__)
        loader = PreTrainedTokenizerFast if general else AutoTokenizer
        return loader.from_pretrained(str(folder), trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # these libraries do not check a file: they fail where they stumble, in any way
        raise UserError(
            f"the tokenizer in folder {folder} does not load: {type(error).__name__}: {error}; is one of its files "
            f"({', '.join((*VOCABULARY_FILES[:2], config.name))}) damaged?"
        ) from error


def _messages(value: Any, place: str) -> list[dict[str, Any]]:
    """Checked copies of a row's messages, without the empty fields that Parquet adds."""
    if not isinstance(value, list | tuple) or not value:
        raise UserError(
            f"{place}: a prompt must be a string or a list of messages, got {type(value).__name__} {value!r:.60}; "
            "data.prompt_key names its column"
        )
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping):
            raise UserError(
                f"{place}: message {number} must be an object with role and content, got "
                f"{type(message).__name__} {message!r:.60}"
            )
        for name in ("role", "content"):
            if not isinstance(message.get(name), str):
                near = difflib.get_close_matches(name, message, n=1)
                hint = f" (it has {near[0]!r})" if name not in message and near else ""
                raise UserError(
                    f"{place}: message {number} needs a string {name!r}, got {message.get(name)!r:.60}{hint}"
                )
        if message["role"] not in ROLES:
            near = difflib.get_close_matches(message["role"], ROLES, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            raise UserError(
                f"{place}: message {number} has the role {message['role']!r}{hint} roles are {', '.join(ROLES)}"
            )
        messages.append({name: item for name, item in message.items() if item is not None})
    if messages[-1]["role"] == "assistant":
        raise UserError(
            f"{place}: the last message is the assistant's, so the prompt would hold its own answer; a "
            "prompt must end with a user's or a tool's message"
        )
    return messages


def _transcript(messages: list[dict[str, Any]]) -> str:
    parts = [
        f"{message['content']}\n\n"
        if message["role"] == "system"
        else f"{message['role'].capitalize()}: {message['content']}\n"
        for message in messages
    ]
    return "".join(parts) + "Assistant:"


def _plain(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> tuple[str, np.ndarray]:
    """Text outside any template: BOS as the tokenizer would put it, unless the text already spells it."""
    ids, bos = _encode(tokenizer, text, place), tokenizer.bos_token
    if isinstance(bos, str) and not text.startswith(bos) and tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]:
        # Not by encoding BOS + text: behind a spelled-out BOS some tokenizers cut the first word otherwise.
        return bos + text, np.concatenate([np.asarray([tokenizer.bos_token_id], np.int32), ids])
    return text, ids


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> np.ndarray:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{place}: character {error.start + 1} is half of a surrogate pair, not text") from None
    # verbose=False: lengths are checked against the run's own limits, not against model_max_length.
    return np.asarray(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=np.int32)
