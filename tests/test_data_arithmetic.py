import pytest

from jaxrl_llm.data.arithmetic import generate
from jaxrl_llm.types import UserError


def test_a_spec_always_gives_the_same_rows():
    assert generate("arithmetic:op=+,min=0,max=99,count=3,seed=0") == [
        {"prompt": "11+63=", "answer": "74", "response": "74", "data_source": "arithmetic"},
        {"prompt": "91+68=", "answer": "159", "response": "159", "data_source": "arithmetic"},
        {"prompt": "65+6=", "answer": "71", "response": "71", "data_source": "arithmetic"},
    ]


def test_a_longer_run_begins_with_the_shorter_one_and_another_seed_differs():
    short, long = generate("arithmetic:count=50,seed=3"), generate("arithmetic:count=80,seed=3")
    assert long[:50] == short
    assert generate("arithmetic:count=50,seed=4") != short


@pytest.mark.parametrize("spec", ["op=+-*,terms=4,min=-9,max=9", "op=*", "op=-,terms=3,max=9"])
def test_answers_are_the_value_of_the_problem(spec):
    for row in generate(f"arithmetic:{spec},count=300"):
        assert row["answer"] == str(eval(row["prompt"].rstrip("=")))


def test_asking_for_the_whole_space_gives_every_problem_once():
    prompts = [row["prompt"] for row in generate("arithmetic:op=+-,min=0,max=9,count=200")]
    assert sorted(prompts) == sorted(f"{a}{op}{b}=" for a in range(10) for b in range(10) for op in "+-")


@pytest.mark.parametrize("seeds", [(0, 0), (0, 7)])
def test_train_and_test_share_no_problem_and_together_are_the_space(seeds):
    train_count = _most("arithmetic:max=29,split=train")
    test_count = _most("arithmetic:max=29,split=test")
    train = generate(f"arithmetic:max=29,split=train,seed={seeds[0]},count={train_count}")
    test = generate(f"arithmetic:max=29,split=test,seed={seeds[1]},count={test_count}")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in test}
    assert len(train) + len(test) == 900
    assert 60 <= len(test) <= 120


def test_a_problem_is_in_the_same_split_whatever_the_range_and_wording():
    test = {row["prompt"] for row in generate("arithmetic:max=99,split=test,count=900")}
    train = generate("arithmetic:max=9,split=train,count=50,chat=true")
    spelled = {row["prompt"][0]["content"].removeprefix("What is ").split("?")[0].replace(" ", "") for row in train}
    assert len(spelled) == 50
    assert not {f"{problem}=" for problem in spelled} & test


def test_the_split_of_a_problem_never_changes():
    test = {row["prompt"] for row in generate("arithmetic:max=9,split=test,count=15")}
    assert {"0+4=", "1+5=", "8+5="} < test
    assert not {"0+0=", "4+0=", "5+1="} & test


def test_too_many_problems_is_an_error_that_says_how_many_exist():
    with pytest.raises(UserError, match=r"count=5 .* only 4 distinct ones exist in split=all"):
        generate("arithmetic:max=1,count=5")


def test_chat_asks_in_words_as_one_user_message():
    row = generate("arithmetic:op=-,min=-3,max=-3,count=1,chat=true")[0]
    assert row["prompt"] == [
        {"role": "user", "content": "What is -3 - (-3)? Answer with the number only."},
    ]
    assert row["answer"] == "0"


def test_spaces_far_too_large_to_list_are_drawn_from():
    rows = generate("arithmetic:op=+-*,terms=6,max=1000000000,count=20")
    assert len({row["prompt"] for row in rows}) == 20


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("trems=3", "unknown key 'trems'; did you mean 'terms'"),
        ("count=many", "count=many must be a whole number"),
        ("chat=yes", "chat=yes must be true or false"),
        ("op=/", "op=/ must be one or more of"),
        ("op=", "op= must be one or more of"),
        ("op=++", "names an operation twice"),
        ("min=5,max=4", "min=5 is above max=4"),
        ("terms=1", "terms=1 must be 2 or more"),
        ("count=0", "count=0 must be 1 or more"),
        ("split=dev", "split=dev must be all, train or test"),
    ],
)
def test_a_bad_spec_is_refused_by_name(spec, message):
    with pytest.raises(UserError) as caught:
        generate(f"arithmetic:{spec}")
    assert message in str(caught.value)
    assert f"arithmetic:{spec}" in str(caught.value)


def _most(spec: str) -> int:
    """The number of problems that the error for asking too many says there are."""
    with pytest.raises(UserError) as caught:
        generate(f"{spec},count=1000000")
    return int(str(caught.value).split("only ")[1].split()[0])


def test_mistakes_are_in_the_demonstrations_only_and_in_one_digit():
    right = generate("arithmetic:op=+-,min=0,max=99,count=500")
    rows = generate("arithmetic:op=+-,min=0,max=99,count=500,mistakes=60")
    assert [row["answer"] for row in rows] == [row["answer"] for row in right]
    wrong = [row for row in rows if row["response"] != row["answer"]]
    assert 250 < len(wrong) < 350
    for row in wrong:
        assert len(row["response"]) == len(row["answer"])
        assert sum(a != b for a, b in zip(row["response"], row["answer"], strict=True)) == 1
