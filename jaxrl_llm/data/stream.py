"""From datasets to batches: rows tokenized once, then an endless order that resumes from one integer."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import grain
import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_llm.data import arithmetic, chat, sources
from jaxrl_llm.types import Prompt, UserError

OVERLONG = ("drop", "error")
REMAINDERS = ("drop", "carry")


@dataclass(frozen=True)
class Prompts:
    """The rows of a dataset that fit, tokenized. Each one's `uid` is its place here."""

    records: Sequence[Prompt]
    counts: Mapping[str, int]  # rows = kept + too_long + empty
    longest: int  # tokens of the longest prompt, those too long included
    longest_response: int  # tokens of the longest demonstration, likewise; 0 without
    max_prompt_length: int
    max_response_length: int | None

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Prompt:
        return self.records[index]

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal SHA-256 of all that the rows are to the learner and to reward functions, in order."""
        digest = hashlib.sha256()
        for record in self.records:
            response = b"" if record.response_ids is None else record.response_ids.astype("<i4").tobytes()
            others = repr((record.data_source, record.ground_truth, sorted(record.extra_info.items()))).encode()
            for part in (record.text.encode(), record.token_ids.astype("<i4").tobytes(), response, others):
                digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()

    def describe(self) -> str:
        """One line for the log: rows read, kept and dropped, and the longest against the limits."""
        line = (
            f"{self.counts['rows']} rows, {self.counts['kept']} kept, {self.counts['too_long']} too long, "
            f"{self.counts['empty']} empty; longest prompt {self.longest} tokens, "
            f"limit {self.max_prompt_length}"
        )
        if not self.longest_response:
            return line
        limit = "no limit" if self.max_response_length is None else f"limit {self.max_response_length}"
        return f"{line}; longest response {self.longest_response} tokens, {limit}"


def load_prompts(
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    max_response_length: int | None = None,
    prompt_key: str = "prompt",
    answer_key: str | None = "answer",
    response_key: str | None = None,
    source_key: str = "data_source",
    default_source: str | None = None,
    system_prompt: str | None = None,
    prompt_style: str = "auto",
    template_kwargs: Mapping[str, Any] | None = None,
    overlong: str = "drop",
    limit: int | None = None,
) -> Prompts:
    """Read `paths` (see sources.read), render and tokenize every row, and keep those that fit.

    Args:
        max_prompt_length: tokens, counted after the chat template.
        max_response_length: tokens of a demonstration, EOS included; None for no limit.
        prompt_key: column of the prompt, a string or a message list.
        answer_key: column of the ground truth; None or "" for none. Like prompt_key and response_key it
            may reach into nested columns: "reward_model.ground_truth".
        response_key: column of the demonstration, for supervised fine-tuning; None or "" for none.
        source_key: column with the dataset's name; rows without it get `default_source`, or the file's stem.
        overlong: "drop" leaves out rows over a limit and counts them, "error" refuses them.
        limit: use only the first `limit` rows of all paths together; None or 0 for all.

    All other columns go to `extra_info`; a column `extra_info` that is an object is merged into it.

    Raises:
        UserError: unreadable data, a missing column, a row too long with overlong="error", or no row left.
    """
    if overlong not in OVERLONG:
        raise UserError(f"overlong must be one of {', '.join(OVERLONG)}, got {overlong!r}")
    chat.check_template_kwargs(tokenizer, template_kwargs or {})
    counts, records = {"rows": 0, "kept": 0, "too_long": 0, "empty": 0}, []
    longest = longest_response = 0
    for index, (place, stem, row) in enumerate(islice(_rows(paths), limit or None)):
        counts["rows"] += 1
        content = _column(row, prompt_key, place, "data.prompt_key")
        answer = _answer(row, answer_key, place) if answer_key else None
        response = _column(row, response_key, place, "data.response_key") if response_key else None
        if _blank(content) or (response_key and _blank(response)):
            counts["empty"] += 1
            continue
        text, ids = chat.render(
            tokenizer, content, system_prompt, template_kwargs, prompt_style=prompt_style, place=place
        )
        longest, response_ids = max(longest, len(ids)), None
        if response_key:
            response_ids = chat.encode_response(tokenizer, response, place=place)
            longest_response = max(longest_response, len(response_ids))
        excess = _excess(ids, response_ids, max_prompt_length, max_response_length)
        if excess and overlong == "error":
            raise UserError(f"{place}: {excess}; raise that limit, or leave such rows out: data.overlong='drop'")
        if excess or not len(ids):
            counts["too_long" if excess else "empty"] += 1
            continue
        records.append(
            Prompt(
                uid=len(records),
                row=index,
                token_ids=ids,
                text=text,
                data_source=str(row.get(source_key) or default_source or stem),
                ground_truth=answer,
                extra_info=_extra_info(row, (prompt_key, answer_key, response_key, source_key)),
                response_ids=response_ids,
            )
        )
    counts["kept"] = len(records)
    prompts = Prompts(records, counts, longest, longest_response, max_prompt_length, max_response_length)
    if not records:
        raise _nothing_left(paths, prompts, prompt_key)
    return prompts


class PromptStream:
    """An endless order over prompts, epoch after epoch, each epoch in its own order.

    The order is a function of the seed and the position alone (grain's random-access shuffle), so the whole
    state is the number of prompts handed out. With `remainder="drop"` an epoch is the first
    floor(N / batch_size) batches of its order and the other rows are left out of it; with "carry" batches run
    across the ends of epochs and every row comes exactly once an epoch.
    """

    def __init__(
        self,
        prompts: Prompts,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool = True,
        remainder: str = "drop",
    ):
        """Raises UserError for an unknown remainder, or fewer rows than one batch with remainder="drop"."""
        if remainder not in REMAINDERS:
            raise UserError(f"remainder must be one of {', '.join(REMAINDERS)}, got {remainder!r}")
        if remainder == "drop" and len(prompts) < batch_size:
            raise UserError(
                f"the data hold {len(prompts)} rows, fewer than one batch of {batch_size}, and "
                "data.remainder='drop' would leave them all out; lower data.train_batch_size or set "
                "data.remainder='carry'"
            )
        self.prompts = prompts
        self.batch_size = batch_size
        self.rows_per_epoch = len(prompts) - (len(prompts) % batch_size if remainder == "drop" else 0)
        self._settings = {
            "seed": seed,
            "shuffle": shuffle,
            "rows": len(prompts),
            "batch_size": batch_size,
            "remainder": remainder,
            "data": prompts.fingerprint,
        }
        self._position = 0
        order = grain.MapDataset.range(len(prompts))
        if shuffle:
            # grain shuffles epoch e with seed + e: unmixed, seed 1 would be seed 0 one epoch further on.
            order = order.shuffle(int(np.random.SeedSequence(seed).generate_state(1)[0]))
        self._order = order.repeat()

    def next(self) -> list[Prompt]:
        """The next `batch_size` prompts; `uid` is the position in the stream."""
        start, self._position = self._position, self._position + self.batch_size
        return [self._at(position) for position in range(start, self._position)]

    @property
    def epoch(self) -> float:
        """Epochs handed out so far: 1.5 is halfway through the second."""
        return self._position / self.rows_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Batches an epoch; with remainder="carry" the last one may reach into the next epoch."""
        return self.steps(1)

    def steps(self, epochs: float) -> int:
        """Batches that hand out at least `epochs` epochs."""
        return math.ceil(epochs * self.rows_per_epoch / self.batch_size)

    def describe(self) -> str:
        """One line for the log: rows, batches an epoch, and what becomes of the rest."""
        rows, rest = len(self.prompts), len(self.prompts) % self.batch_size
        line = f"{rows} rows in batches of {self.batch_size}: {self.steps_per_epoch} batches an epoch"
        if not rest:
            return line
        if self._settings["remainder"] == "drop":
            return f"{line}, {rest} rows left out of each epoch"
        return f"{line}, the last one filled from the next epoch"

    def get_state(self) -> dict[str, Any]:
        """Position, and what the order depends on; plain integers and strings."""
        return {"position": self._position, **self._settings}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from where `get_state` was called, in this process or another.

        Raises:
            UserError: if the state is of other data or another order, naming what differs.
        """
        differences = [
            f"{name} was {state[name]!r} and is now {value!r}"
            for name, value in self._settings.items()
            if state[name] != value
        ]
        if differences:
            raise UserError(
                f"the saved position belongs to another data stream: {'; '.join(differences)} "
                "(data is a hash of all prompts); restore the old data settings, or start a new run"
            )
        self._position = state["position"]

    def _at(self, position: int) -> Prompt:
        epoch, offset = divmod(position, self.rows_per_epoch)
        row = self._order[epoch * len(self.prompts) + offset]
        assert row is not None  # grain's type allows filtered elements; nothing filters here
        return replace(self.prompts[row], uid=position)


def _rows(paths: Sequence[str]) -> Iterator[tuple[str, str, sources.Row]]:
    """Triples (place for errors, name of the source, row)."""
    for path, rows in sources.read_each(paths):
        generated = path.startswith(arithmetic.PREFIX)
        stem = arithmetic.PREFIX.rstrip(":") if generated else Path(path).stem
        for number, row in enumerate(rows, start=1):
            yield f"{path}, row {number}", stem, row


def _column(row: sources.Row, key: str, place: str, setting: str) -> Any:
    """Value of a column; where no column has the whole name, dots lead into nested ones."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = difflib.get_close_matches(key, row, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{place} has no column {key!r}; {hint}columns: {', '.join(row)}. Set {setting}")
        value = value[part]
    return value


def _answer(row: sources.Row, key: str, place: str) -> Any:
    answer = _column(row, key, place, "data.answer_key")
    if answer is None:
        raise UserError(f"{place}: the answer in column {key!r} is empty; give it, or remove the row")
    return answer


def _nothing_left(paths: Sequence[str], prompts: Prompts, prompt_key: str) -> UserError:
    if prompts.counts["too_long"]:
        fix = f"raise data.max_prompt_length{' or data.max_response_length' if prompts.longest_response else ''}"
    else:
        fix = f"is data.prompt_key={prompt_key!r} the right column?"
    return UserError(f"no row of {', '.join(paths)} is left: {prompts.describe()}; {fix}")


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip()) or value == []


def _excess(
    ids: np.ndarray, response_ids: np.ndarray | None, max_prompt_length: int, max_response_length: int | None
) -> str:
    """Which limit a row breaks, in words; empty if none."""
    if len(ids) > max_prompt_length:
        return f"the prompt has {len(ids)} tokens, over data.max_prompt_length={max_prompt_length}"
    if response_ids is None or max_response_length is None or len(response_ids) <= max_response_length:
        return ""
    return f"the response has {len(response_ids)} tokens, over data.max_response_length={max_response_length}"


def _extra_info(row: sources.Row, used: Sequence[str | None]) -> dict[str, Any]:
    others = {name: value for name, value in row.items() if name not in used}
    if isinstance(others.get("extra_info"), Mapping):
        others |= others.pop("extra_info")
    return others
