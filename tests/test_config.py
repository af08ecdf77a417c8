import json

import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.config_checks import validate
from jaxrl_llm.configs import base
from jaxrl_llm.types import UserError


@pytest.fixture
def c():
    return base.get_config()


def runnable():
    return configs.load("quickstart")


def refused(*argv):
    with pytest.raises(UserError) as error:
        validate(configs.parse(["--config", "quickstart", *argv])[0])
    return str(error.value)


@pytest.mark.parametrize("name", configs.built_in())
def test_every_recipe_is_valid(name):
    c = configs.load(name)
    planned = name.startswith("plan_")  # for a plan: a model's shape without files
    if not c.data.train and not planned:
        c.data.train = ("data.jsonl",)
    validate(c, files=not planned)
    assert c.is_locked


def test_overrides_are_read_by_the_type_of_the_default():
    argv = [
        "--config",
        "quickstart",
        "--config.seed=7",
        "--config.optimizer.learning_rate",
        "1e-6",
        "--config.data.shuffle=false",
        "--config.rollout.stop=('a','b')",
        "--config.data.train=x.jsonl",
        "--config.run_dir=123",
        "--config.reward.weights.acc=0.5",
        "--config.reward.kwargs.length.max_length=20",
        "--config.optimizer.beta1=0",
    ]
    c, rest = configs.parse([*argv, "--debug"])
    assert rest == ["--debug"]
    assert (c.seed, c.optimizer.learning_rate, c.data.shuffle) == (7, 1e-6, False)
    assert (c.rollout.stop, c.data.train, c.run_dir) == (("a", "b"), ("x.jsonl",), "123")
    assert (c.reward.weights.acc, c.reward.kwargs.length.max_length) == (0.5, 20)
    assert isinstance(c.optimizer.beta1, float)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        (
            "--config.optimizer.learing_rate=1e-4",
            ["config.optimizer.learing_rate", "did you mean config.optimizer.learning_rate?"],
        ),
        (
            "--config.learning_rate=1e-4",
            ["config.learning_rate", "did you mean", " or config.optimizer.learning_rate or "],
        ),
        ("--config.optimiser.learning_rate=1", ["did you mean config.optimizer.learning_rate?"]),
        ("--config.optimizer.learning_rate=abc", ["config.optimizer.learning_rate", "a number", "'abc'"]),
        ("--config.lr=1", ["config.lr does not exist"]),
        ("--config.data.train_batch_size=2.0", ["config.data.train_batch_size", "an integer", "2.0"]),
        ("--config.data.train_batch_size=True", ["an integer", "True"]),
        ("--config.data.shuffle=1", ["config.data.shuffle", "true or false"]),
        ("--config.data=3", ["config.data must be a section"]),
        ("--config.data.train_batch_size.x=3", ["config.data.train_batch_size.x does not exist"]),
        ("--config.rollout.n=1", ["config.rollout.n", "at least 2", "got 1"]),
        ("--config.rollout.n=0", ["config.rollout.n must be more than 0"]),
        ("--config.rollout.temperature=0", ["config.rollout.temperature", "greedy"]),
        ("--config.rollout.top_p=0", ["config.rollout.top_p", "above 0"]),
        ("--config.data.max_response_length=0", ["config.data.max_response_length must be more than 0"]),
        (
            "--config.learner.mini_batch_size=48",
            ["config.data.train_batch_size=64", "config.learner.mini_batch_size=48"],
        ),
        ("--config.learner.micro_batch_rows=1024", ["config.learner.micro_batch_rows=1024", "256 sequences"]),
        ("--config.learner.row_lengths=(8,)", ["config.learner.row_lengths", "16 tokens"]),
        ("--config.algorithm.aggregation=token_mean", ["'token_mean'", "did you mean 'token-mean'"]),
        ("--config.model.dtype=fp32", ["config.model.dtype='fp32'", "'float32'"]),
        ("--config.data.val=()", ["config.eval.every=20", "config.data.val is empty"]),
        ("--config.learner.row_lengths=abc", ["config.learner.row_lengths must be a list of integers", "'abc'"]),
        ("--config.data.train=5", ["config.data.train must be a list of texts, got 5"]),
        ("--config.reward.weights=0.5", ["config.reward.weights must be a section"]),
        ("--config.modle.path=x", ["did you mean config.model.path? Keys of config: "]),
        ("--config.lr=1", ["config.lr does not exist. Keys of config: "]),
        ("--config.model.path=", ["config.model.path", "config.model.hf_config"]),
        ("--config.total_steps=0", ["config.total_steps", "config.total_epochs"]),
    ],
)
def test_mistakes_name_the_full_key_the_value_and_what_is_valid(argument, words):
    text = refused(argument)
    for word in words:
        assert word in text


def test_all_contradictions_are_told_at_once():
    text = refused("--config.rollout.n=1", "--config.model.remat=some", "--config.eval.n=0")
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("value", [np.int64(4), np.int32(4), 4])
def test_numpy_integers_are_integers(c, value):
    c.data.train_batch_size = value
    assert c.data.train_batch_size == 4
    assert type(c.data.train_batch_size) is int


@pytest.mark.parametrize("value", [True, 2.0, "3", None, np.float64(2)])
def test_other_things_are_no_integers(c, value):
    with pytest.raises(UserError, match=r"config\.data\.train_batch_size must be an integer"):
        c.data.train_batch_size = value


def test_recipes_cannot_invent_keys(c):
    with pytest.raises(
        UserError,
        match=r"config\.data\.train_batchsize does not exist; did you mean config\.data\.train_batch_size",
    ):
        c.data.train_batchsize = 3


def test_a_section_given_as_a_dict_changes_its_keys_and_no_others(c):
    c.rollout = {"n": 3}
    assert (c.rollout.n, c.rollout.temperature) == (3, 1.0)
    with pytest.raises(UserError, match=r"config\.rollout\.beams does not exist"):
        c.rollout = {"beams": 4}
    with pytest.raises(UserError, match=r"config\.rollout\.n must be an integer"):
        c.rollout = {"n": True}


def test_a_saved_config_is_the_config(tmp_path):
    c = runnable()
    c.reward.weights.acc = 2.0
    path = tmp_path / "config.json"
    path.write_text(configs.to_json(c))
    assert configs.to_json(configs.load(str(path))) == configs.to_json(c)
    assert configs.load(str(path)).data.train == c.data.train


def test_a_saved_config_with_a_key_of_another_version_is_refused(tmp_path):
    values = json.loads(configs.to_json(runnable()))
    values["rollout"]["beams"] = 4
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match=r"config\.rollout\.beams does not exist"):
        configs.load(str(path))


def test_recipes_are_found_by_name_by_file_and_with_an_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert configs.to_json(configs.load("quickstart")) == configs.to_json(configs.load("configs/quickstart.py"))
    (tmp_path / "mine.py").write_text(
        "from jaxrl_llm.configs import quickstart\n"
        "def get_config(steps='3'):\n    c = quickstart.get_config()\n    c.total_steps = int(steps)\n    return c\n"
    )
    assert configs.load("mine.py").total_steps == 3
    assert configs.load("mine.py:5").total_steps == 5


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("quickstrat", ["quickstrat", "did you mean quickstart?", "grpo_gsm8k"]),
        ("base", ["neither a file nor a built-in recipe"]),
        ("empty.py", ["empty.py has no function get_config()"]),
        ("other.py", ["must return the config of jaxrl_llm.configs.base", "dict"]),
        ("broken.json", ["broken.json is not valid JSON"]),
        ("list.json", ["expected a JSON object, got list"]),
        ("raises.py", ["recipe raises.py", "AttributeError", "raises.py:4"]),
        ("syntax.py", ["recipe syntax.py", "SyntaxError"]),
    ],
)
def test_bad_recipes_are_told_apart(source, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.py").write_text("x = 1\n")
    (tmp_path / "other.py").write_text("def get_config():\n    return {}\n")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "syntax.py").write_text("def get_config(:\n")
    (tmp_path / "raises.py").write_text(
        "from jaxrl_llm.configs import base\ndef get_config():\n    c = base.get_config()\n    c.optimiser.x = 1\n"
    )
    with pytest.raises(UserError) as error:
        configs.load(source)
    for word in words:
        assert word in str(error.value)


def test_unknown_arguments_point_to_the_key():
    assert " or --config.optimizer.learning_rate=... or " in str(configs.unknown_argument("--learning_rate=3"))


def test_the_defaults_of_base_are_all_typed():
    kinds = {type(value) for _, value in configs.flatten(base.get_config())}
    assert kinds == {int, float, bool, str, tuple, configs.Config}
