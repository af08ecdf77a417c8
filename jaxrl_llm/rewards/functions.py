"""The built-in reward functions.

A reward function is called by keyword with those of these values that its signature names (with all of them
if it takes **kwargs):

    data_source: str      name of the dataset
    solution_str: str     the response, decoded, without EOS or stop string
    ground_truth          the dataset's answer column (config.data.answer_key), as it is
    extra_info: dict      all other columns of the row
    prompt_str: str       the rendered prompt
    response_length: int  number of tokens that the policy chose

and returns a number, which becomes one component named after the function, or a dict of numbers, which are
components by their keys. The key "pred" is no component: its value is a text, the answer that the function has
extracted, or None; samples with the same text vote together in evaluations. Any other parameter must have a default or
be given in the configuration's kwargs. An exception, None, NaN, infinity or anything but a number leaves the sample
without a reward.

Nothing here imports jax, so that worker processes start in a fraction of a second.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

# A minus (not that of "10-3") and a dollar sign may come first; a full stop at the end is no part of it.
_NUMBER = (
    r"(?:(?<![\w)])-)?\$?(?:(?<=\$)-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)"
)
_ANY_NUMBER = re.compile(_NUMBER)
_MARKED_NUMBER = re.compile(rf"####\s*({_NUMBER})")
_BARE_NUMBER = re.compile(rf"\s*({_NUMBER})\.?\s*")

# `\\` is a line break of LaTeX, but models also write `\\boxed` when they escape their output.
_BRACE = re.compile(r"\\boxed\s*\{|\\\\(?!boxed)|\\[{}]|[{}]")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textrm|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}")
# A space between two digits stays: 1 2 is not 12.
_LAYOUT = re.compile(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:!$ ]|[$~]|(?<![0-9]) | (?![0-9])")


Result = dict[str, float | str | None]


def gsm8k(solution_str: str, ground_truth: Any) -> Result:
    """1 if the number after the response's last `#### ` equals the truth, as the prompt of GSM8K asks for it.

    `ground_truth` is a number or a whole GSM8K answer that ends with `#### 72`. "1,000", "$1000" and "1000.0"
    are equal. The prediction is the number as digits: "1000". Raises ValueError if the truth holds no number.
    """
    return _same_number(_last_number(_MARKED_NUMBER, solution_str), ground_truth)


def gsm8k_flexible(solution_str: str, ground_truth: Any) -> Result:
    """As gsm8k, for the last number anywhere in the response."""
    return _same_number(_last_number(_ANY_NUMBER, solution_str), ground_truth)


def exact_match(solution_str: str, ground_truth: Any) -> Result:
    """1 if the response is the ground truth, white space around either left aside. The prediction is the response."""
    answer = solution_str.strip()
    return {"acc": float(answer == _true_text(ground_truth).strip()), "pred": answer or None}


def boxed(solution_str: str, ground_truth: Any) -> Result:
    r"""1 if the content of the response's last complete `\boxed{...}` is the ground truth.

    The ground truth may be boxed too. Both are compared as numbers if both are, else as strings without
    layout: white space, `$`, `\left`, `\right`, `\text{}` and a full stop at the end; `\dfrac` is `\frac`.
    It decides no mathematical equality: 1/2 is not 0.5. The prediction is what is compared.
    """
    truth = _true_text(ground_truth)
    unboxed_truth = _last_boxed(truth)
    answer = _last_boxed(solution_str)
    if answer is None:
        return {"acc": 0.0, "pred": None}
    plain = _plain(answer)
    number = _as_number(plain)
    return {
        "acc": float(_same_answer(plain, _plain(truth if unboxed_truth is None else unboxed_truth))),
        "pred": (plain or None) if number is None else _digits(number),
    }


def format(
    solution_str: str,
    pattern: str = r"<think>.*?</think>\s*<answer>.*?</answer>",
    whole: bool = True,
) -> dict[str, float]:
    """1 if the regular expression `pattern` matches the whole response, white space around it left aside, or
    with whole=False a part of it. A dot matches line breaks too.

    If the chat template ends the prompt with `<think>`, the pattern must start after that tag.
    """
    search = re.fullmatch if whole else re.search
    return {"format": float(search(pattern, solution_str.strip(), re.DOTALL) is not None)}


def length(response_length: int, max_length: int, buffer: int | None = None) -> dict[str, float]:
    """How far a response reaches into the last `buffer` tokens before `max_length`: 0 up to
    max_length - buffer, rising linearly to 1 at max_length and 1 beyond. Without a buffer it is the fraction
    of max_length used.

    A negative weight makes it a penalty: with weight -1 it is DAPO's soft over-long punishment
    (arXiv:2503.14476, eq. 13). Raises ValueError unless 0 < buffer <= max_length.
    """
    ramp = max_length if buffer is None else buffer
    if not 0 < ramp <= max_length:
        raise ValueError(f"expected 0 < buffer <= max_length, got buffer={buffer}, max_length={max_length}")
    return {"length": min(max((response_length - (max_length - ramp)) / ramp, 0.0), 1.0)}


REWARDS: dict[str, Callable[..., Any]] = {
    "boxed": boxed,
    "exact_match": exact_match,
    "format": format,
    "gsm8k": gsm8k,
    "gsm8k_flexible": gsm8k_flexible,
    "length": length,
}


def _true_text(ground_truth: Any) -> str:
    if ground_truth is None:
        raise ValueError("the row has no ground truth to compare with")
    return str(ground_truth)


def _true_number(ground_truth: Any) -> Decimal:
    text = _true_text(ground_truth)
    number = _last_number(_MARKED_NUMBER, text) if "####" in text else _as_number(text)
    if number is None:
        raise ValueError(f"expected a number or a text with `#### <number>` as ground truth, got {text[:100]!r}")
    return number


def _same_number(answer: Decimal | None, ground_truth: Any) -> Result:
    return {"acc": float(answer == _true_number(ground_truth)), "pred": None if answer is None else _digits(answer)}


def _digits(number: Decimal) -> str:
    """The shortest way to write a number without an exponent, the same for equal numbers."""
    text = f"{number.copy_abs():f}"  # abs() and normalize() would round to 28 digits
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return f"-{text}" if number < 0 else text


def _last_number(pattern: re.Pattern[str], text: str) -> Decimal | None:
    found = pattern.findall(text)
    return _as_number(found[-1]) if found else None


def _as_number(text: str) -> Decimal | None:
    match = _BARE_NUMBER.fullmatch(text)
    return Decimal(match[1].replace(",", "").replace("$", "")) if match else None


def _last_boxed(text: str) -> str | None:
    r"""Content of the complete `\boxed{...}` that opens last, in one pass whatever the nesting."""
    opened: list[tuple[int, bool]] = []  # where the content starts, and whether a \boxed opened it
    last: tuple[int, int] | None = None
    for token in _BRACE.finditer(text):
        if token[0].startswith("\\boxed"):
            opened.append((token.end(), True))
        elif token[0] == "{":
            opened.append((token.end(), False))
        elif token[0] == "}" and opened:
            start, is_boxed = opened.pop()
            if is_boxed and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else text[slice(*last)]


def _same_answer(answer: str, truth: str) -> bool:
    """Both plain."""
    if answer == truth:
        return True
    number = _as_number(answer)
    return number is not None and number == _as_number(truth)


def _plain(latex: str) -> str:
    latex = " ".join(latex.replace("{,}", ",").split())
    latex = _TEXT_COMMAND.sub(r"\1", latex.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac"))
    return _LAYOUT.sub("", latex).replace("\\%", "%").removesuffix(".")
