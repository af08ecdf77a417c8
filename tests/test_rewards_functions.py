import fractions

import numpy as np
import pytest

from jaxrl_llm.rewards.functions import REWARDS, boxed, exact_match, format, gsm8k, gsm8k_flexible, length

GSM8K_ANSWER = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = <<48+24=72>>72.\n#### 72"


def acc(result):
    assert set(result) == {"acc", "pred"}
    return result["acc"]


def test_registry_holds_the_documented_names():
    assert sorted(REWARDS) == ["boxed", "exact_match", "format", "gsm8k", "gsm8k_flexible", "length"]


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("so #### 72", "72", 1.0),
        ("so #### 72", GSM8K_ANSWER, 1.0),
        ("#### 73", GSM8K_ANSWER, 0.0),
        ("#### 24 and then #### 72", GSM8K_ANSWER, 1.0),
        ("#### 72 and then #### 24", GSM8K_ANSWER, 0.0),
        ("the answer is 72", "72", 0.0),
        ("", "72", 0.0),
        ("#### seventy-two", "72", 0.0),
        ("#### 1,000", "1000", 1.0),
        ("#### 1000.0", "1,000", 1.0),
        ("#### 1,234,567.50", "1234567.5", 1.0),
        ("#### $18", "18", 1.0),
        ("#### -$18", "-18", 1.0),
        ("#### $-18", "-18", 1.0),
        ("#### 18.", "18", 1.0),
        ("#### 18", "18.", 1.0),
        ("#### 18", "$18", 1.0),
        ("#### 18 dollars", "18", 1.0),
        ("####18", "18", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### 3", "-3", 0.0),
        ("#### .5", "0.5", 1.0),
        ("#### 0.1", "0.10000000000000001", 0.0),
        ("#### 42" + " and so on" * 48, "42", 1.0),
        ("#### 72", 72, 1.0),
        ("#### 72", 72.0, 1.0),
        ("#### 72", np.int64(72), 1.0),
    ],
)
def test_gsm8k_compares_the_number_after_the_last_mark(response, truth, expected):
    assert acc(gsm8k(response, truth)) == expected


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        ("It is 5, or rather 72.", GSM8K_ANSWER, 1.0),
        ("It is 72, or rather 5.", GSM8K_ANSWER, 0.0),
        ("She pays $1,000 in total.", "1000", 1.0),
        ("The temperature is -3 degrees", "-3", 1.0),
        ("We subtract: 10-3", "3", 1.0),
        ("f(x)-3", "3", 1.0),
        ("**-3**", "-3", 1.0),
        ("42" + " and so on" * 1000, "42", 1.0),
        ("no number here", "72", 0.0),
        ("#### 72", "72", 1.0),
    ],
)
def test_gsm8k_flexible_compares_the_last_number_anywhere(response, truth, expected):
    assert acc(gsm8k_flexible(response, truth)) == expected


@pytest.mark.parametrize(
    ("function", "response", "prediction"),
    [
        (gsm8k, "#### 1,000", "1000"),
        (gsm8k, "#### 5 so #### $1000.00", "1000"),
        (gsm8k, "#### 010", "10"),
        (gsm8k, "#### -.50", "-0.5"),
        (gsm8k, "#### -0.0", "0"),
        (gsm8k, "#### 1" + 29 * "0" + ".1", "1" + 29 * "0" + ".1"),
        (gsm8k, "it is 7", None),
        (gsm8k_flexible, "it is 7, or 1,000.0", "1000"),
        (gsm8k_flexible, "nothing", None),
        (exact_match, " Paris\n", "Paris"),
        (exact_match, "7.0", "7.0"),
        (exact_match, " ", None),
        (boxed, r"so \boxed{\$1{,}000.00}", "1000"),
        (boxed, r"so \boxed{ \dfrac{1}{2} }", r"\frac{1}{2}"),
        (boxed, r"so \boxed{}", None),
        (boxed, "so 7", None),
    ],
)
def test_the_prediction_is_the_extracted_answer_in_one_way_of_writing_it(function, response, prediction):
    assert function(response, "7") == {"acc": 0.0, "pred": prediction}


@pytest.mark.parametrize("truth", ["", "many", "#### many", "1 2", True])
def test_a_truth_without_a_number_is_an_error_that_shows_it(truth):
    with pytest.raises(ValueError, match="ground truth") as caught:
        gsm8k("#### 72", truth)
    assert repr(str(truth)) in str(caught.value)


@pytest.mark.parametrize("function", [gsm8k, gsm8k_flexible, exact_match, boxed])
def test_a_missing_truth_is_an_error(function):
    with pytest.raises(ValueError, match="no ground truth"):
        function("None", None)


def test_exact_match_ignores_only_the_white_space_around():
    assert acc(exact_match(" Paris\n", "Paris ")) == 1.0
    assert acc(exact_match("paris", "Paris")) == 0.0
    assert acc(exact_match("Pa ris", "Paris")) == 0.0
    assert acc(exact_match("7", 7)) == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "expected"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1", 0.0),
        (r"\boxed{\frac{\sqrt{3}}{2}}", r"\frac{\sqrt{3}}{2}", 1.0),
        (r"first \boxed{5} ... so \boxed{7}.", "7", 1.0),
        (r"first \boxed{5} ... so \boxed{7}.", "5", 0.0),
        (r"<answer>\boxed{42}</answer>", "42", 1.0),
        (r"\boxed{\text{E}}", "E", 1.0),
        (r"\boxed{1", "1", 0.0),
        (r"\boxed{5} and cut off at \boxed{7", "5", 1.0),
        ("the answer is 1", "1", 0.0),
        (r"so \boxed{5}", r"\boxed{5}", 1.0),
        (r"\boxed{\boxed{5}}", "5", 1.0),
        (r"\boxed {5}", "5", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{1,2\}", 1.0),
        (r"} { \boxed{5}", "5", 1.0),
        (r"a\\\boxed{5}", "5", 1.0),
        (r"\\boxed{5}", "5", 1.0),
        (r"\boxed{" + "x + " * 50 + "1}", "x + " * 50 + "1", 1.0),
        (r"\boxed{5}" + " so it is" * 500, "5", 1.0),
        (r"\boxed{\left( 0, 1 \right)}", "(0,1)", 1.0),
        (r"\boxed{(0,1)}", "(0,1.5)", 0.0),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{$18$}", "18", 1.0),
        (r"\boxed{\$18.00}", "18", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{1{,}000}", "1000", 1.0),
        (r"\boxed{1\,000}", "1000", 1.0),
        (r"\boxed{1 2}", "12", 0.0),
        (r"\boxed{1  2}", "1 2", 1.0),
        (r"\boxed{50\%}", "50%", 1.0),
        (r"\boxed{12:00}", "1:00", 0.0),
        (r"\boxed{2021}", r"\pm 2021", 0.0),
        (r"\boxed{1-1/e}", "1+1/e", 0.0),
        (r"\boxed{\leftarrow}", r"arrow", 0.0),
        (r"\boxed{5}", 5, 1.0),
    ],
)
def test_boxed_compares_the_last_complete_box(response, truth, expected):
    assert acc(boxed(response, truth)) == expected


def test_boxed_reads_a_long_text_of_open_boxes_once():
    assert acc(boxed(r"\boxed{" * 20_000, "5")) == 0.0
    assert acc(boxed(r"\boxed{5}" + "(" * 20_000 + r"\boxed{" * 20_000, "5")) == 1.0


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>a\nb</think>\n<answer>7</answer>", 1.0),
        ("  <think></think><answer></answer>\n", 1.0),
        ("<think>a</think> so <answer>7</answer>", 0.0),
        ("Well: <think>a</think><answer>7</answer>", 0.0),
        ("<think>a<answer>7</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_asks_for_thought_then_answer_and_nothing_else(response, expected):
    assert format(response) == {"format": expected}


def test_format_takes_another_pattern_for_the_whole_or_a_part():
    assert format("it is [7]", pattern=r"\[\d\]") == {"format": 0.0}
    assert format("it is [7]", pattern=r"\[\d\]", whole=False) == {"format": 1.0}


def test_length_is_the_fraction_of_the_maximum_used():
    assert [length(n, max_length=100)["length"] for n in (0, 25, 100, 101)] == [0.0, 0.25, 1.0, 1.0]


def test_length_with_a_buffer_is_the_soft_overlong_punishment():
    values = [length(n, max_length=100, buffer=20)["length"] for n in (80, 81, 85, 90, 100, 101)]
    expected = [fractions.Fraction(n, 100) for n in (0, 5, 25, 50, 100, 100)]
    assert values == pytest.approx([float(e) for e in expected], abs=1e-12)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_length_refuses_a_buffer_that_does_not_fit(buffer):
    with pytest.raises(ValueError, match="buffer"):
        length(10, max_length=100, buffer=buffer)
