import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.types import Prompt, Rollout, UserError

# What `act` does is what the response says; a number is its own reward.
ACTIONS = """
import os, signal, sys, time
import numpy as np

def hang():
    while True:
        time.sleep(0.01)

def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    hang()

def fail(): return 1 / 0

def signals():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
    return 1.0

def pid():
    time.sleep(0.005)
    return os.getpid()

DO = {
    "hang": hang,
    "deaf": deaf,
    "raise": fail,
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "infinite": lambda: {"act": 1.0, "other": -float("inf")},
    "string": lambda: "1.0",
    "string in dict": lambda: {"act": "1.0"},
    "answer": lambda: {"act": 1.0, "pred": "42"},
    "no answer": lambda: {"act": 0.0, "pred": None},
    "answer is a number": lambda: {"act": 1.0, "pred": 42},
    "answer only": lambda: {"pred": "42"},
    "list": lambda: [1.0],
    "complex": lambda: 1j,
    "key": lambda: {3: 1.0},
    "huge": lambda: 10**400,
    "empty": lambda: {},
    "exit": lambda: os._exit(3),
    "exit 0": lambda: os._exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sys.exit": lambda: sys.exit("enough"),
    "signals": signals,
    "bool": lambda: True,
    "numpy": lambda: {"act": np.float32(0.5), "flag": np.bool_(True), "count": np.int64(3)},
    "pid": pid,
    "jax": lambda: "jax" in sys.modules,
}

def act(solution_str):
    return DO[solution_str]() if solution_str in DO else float(solution_str)
"""


def rollout(text, truth="7", *, uid=0, sample=0, actions=4, **columns):
    prompt = Prompt(uid, uid, np.arange(2, dtype=np.int32), "What?", "toy", truth, columns)
    return Rollout(
        prompt=prompt,
        sample=sample,
        token_ids=np.arange(2 + actions, dtype=np.int32),
        action_mask=np.arange(2 + actions) >= 2,
        logprobs=np.zeros(2 + actions, np.float32),
        versions=np.zeros(2 + actions, np.int32),
        stop_reason="eos",
        text=text,
    )


def rollouts(*texts):
    return [rollout(text, uid=uid) for uid, text in enumerate(texts)]


@contextmanager
def pool_of(*functions, weights={}, workers=1, timeout_s=10.0, kwargs={}):  # noqa: B006
    with RewardPool(functions, weights=weights, kwargs=kwargs, workers=workers, timeout_s=timeout_s) as pool:
        yield pool


@pytest.fixture(scope="module")
def actions(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "actions.py"
    path.write_text(ACTIONS)
    return f"{path}:act"


@pytest.fixture(scope="module")
def pool(actions):
    """Two workers with a time-out that no test but those of hangs comes near."""
    with pool_of(actions, workers=2, timeout_s=0.5) as pool:
        yield pool


@pytest.fixture(scope="module")
def built_in():
    names = ["gsm8k", "format", "length"]
    with pool_of(*names, weights={"length": -0.5, "acc": 2}, kwargs={"length": {"max_length": 8}}) as pool:
        yield pool


def test_the_reward_is_the_weighted_sum_of_raw_components(built_in):
    right, wrong = built_in.score([rollout("<think>3+4</think><answer>#### 7</answer>"), rollout("8")])
    assert right.components == {"acc": 1.0, "format": 1.0, "length": 0.5}
    assert right.reward == 2 * 1.0 + 1 * 1.0 - 0.5 * 0.5
    assert wrong.components == {"acc": 0.0, "format": 0.0, "length": 0.5}
    assert wrong.reward == -0.25
    assert right.error is None
    assert wrong.error is None


def test_a_number_becomes_a_component_named_after_the_function(pool):
    integer, boolean = pool.score(rollouts("2", "bool"))
    assert integer.components == {"act": 2.0}
    assert boolean.components == {"act": 1.0}
    assert boolean.reward == 1.0


def test_scalars_of_numpy_are_numbers(pool):
    (scored,) = pool.score(rollouts("numpy"))
    assert scored.components == {"act": 0.5, "flag": 1.0, "count": 3.0}
    assert all(type(value) is float for value in scored.components.values())


def test_200_samples_keep_their_order(pool):
    given = rollouts(*(str(n) for n in range(200)))
    scored = pool.score(given)
    assert [s.reward for s in scored] == [float(n) for n in range(200)]
    assert all(s.rollout is r for s, r in zip(scored, given, strict=True))


def test_long_responses_and_no_rollouts_at_all(pool):
    assert [s.reward for s in pool.score(rollouts(*["0" * 100_000 + "1"] * 50))] == [1.0] * 50
    assert pool.score([]) == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("raise", "act: ZeroDivisionError: division by zero (actions.py:13)"),
        ("none", "act: returned None"),
        ("nan", "act: returned nan"),
        ("infinite", "act: returned -inf for component 'other'"),
        ("string", "act: returned str '1.0', expected a number"),
        ("string in dict", "act: returned str '1.0', expected a number for component 'act'"),
        ("list", "act: returned list [1.0], expected a number"),
        ("complex", "act: returned complex 1j, expected a number"),
        ("key", "act: returned a dict with the key 3, expected strings"),
        ("huge", "act: OverflowError: int too large to convert to float"),
        ("empty", "no function returned a component"),
        ("answer only", "no function returned a component"),
        (
            "answer is a number",
            "act: returned int 42 for 'pred', expected the extracted answer as a text, or None",
        ),
        ("sys.exit", "act: SystemExit: enough (actions.py:"),
        ("exit", "act: its process died with exit code 3"),
        ("kill", "act: its process died of SIGKILL"),
        ("hang", "act: timed out after 0.5 s"),
        ("deaf", "act: timed out after 0.5 s"),
        ("exit 0", "act: timed out after 0.5 s"),
    ],
)
def test_a_failure_costs_its_own_sample_and_says_why(pool, text, error):
    before, failed, after = pool.score(rollouts("1", text, "2"))
    assert failed.reward is None
    assert failed.components == {}
    assert failed.error.startswith(error)
    assert [(s.reward, s.error) for s in (before, after)] == [(1.0, None), (2.0, None)]
    assert [s.reward for s in pool.score(rollouts("3", "4"))] == [3.0, 4.0]


def test_samples_without_a_reward_count_for_nothing_in_a_mean(pool):
    rewards = [s.reward for s in pool.score(rollouts("1", "0", "none", "1"))]
    assert rewards == [1.0, 0.0, None, 1.0]
    assert np.mean([r for r in rewards if r is not None]) == pytest.approx(2 / 3)


def test_what_cannot_be_sent_to_a_worker_costs_its_own_sample(pool):
    good, bad = pool.score([rollout("1"), rollout("1", truth=lambda: None)])
    assert good.reward == 1.0
    assert bad.reward is None
    assert bad.error.startswith("the sample cannot be pickled: ")


def test_scoring_in_another_thread_is_the_same(built_in):
    given = [rollout("#### 7"), rollout("#### 8")]
    found = []
    threads = [threading.Thread(target=lambda: found.append(built_in.score(given))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[s.reward for s in scored] for scored in found] == [[1.75, -0.25]] * 3


def test_no_worker_is_lost_after_50_hangs(actions):
    with pool_of(actions, workers=2, timeout_s=0.2) as pool:
        for _ in range(25):
            scored = pool.score(rollouts("1", "hang", "2", "3", "4", "hang", "5", "6"))
            assert [s.reward for s in scored] == [1.0, None, 2.0, 3.0, 4.0, None, 5.0, 6.0]
        pids = {s.reward for s in pool.score(rollouts(*["pid"] * 200))}
    assert len(pids) == 2


def test_idle_workers_that_are_killed_are_replaced(actions):
    with pool_of(actions) as pool:
        (scored,) = pool.score(rollouts("pid"))
        os.kill(int(scored.reward), signal.SIGKILL)
        assert [s.reward for s in pool.score(rollouts("1", "2"))] == [1.0, 2.0]
        (scored,) = pool.score(rollouts("pid"))
        os.kill(int(scored.reward), signal.SIGKILL)
        time.sleep(0.5)
        assert [s.reward for s in pool.score(rollouts("1", "2"))] == [1.0, 2.0]


def test_workers_do_not_import_jax(pool):
    assert [s.reward for s in pool.score(rollouts("jax"))] == [0.0]


def test_every_field_reaches_the_function(tmp_path):
    file = tmp_path / "fields.py"
    file.write_text(
        "def fn(data_source, solution_str, ground_truth, extra_info, prompt_str, response_length):\n"
        "    raise ValueError(repr((data_source, solution_str, ground_truth, extra_info, prompt_str,"
        " response_length)))\n"
    )
    with pool_of(f"{file}:fn") as pool:
        (scored,) = pool.score([rollout("text", truth=[1], actions=9, level=3)])
    assert "('toy', 'text', [1], {'level': 3}, 'What?', 9)" in scored.error


def test_a_prediction_is_no_component(pool):
    answer, none, number = pool.score(rollouts("answer", "no answer", "2"))
    assert (answer.components, answer.reward, answer.prediction) == ({"act": 1.0}, 1.0, "42")
    assert (none.components, none.reward, none.prediction) == ({"act": 0.0}, 0.0, None)
    assert number.prediction is None


def test_of_two_predictions_the_first_functions_counts(tmp_path):
    file = tmp_path / "two.py"
    file.write_text(
        "def a(solution_str): return {'a': 1, 'pred': solution_str or None}\ndef b(): return {'b': 2, 'pred': 'of b'}\n"
    )
    with pool_of(f"{file}:a", f"{file}:b") as pool:
        assert [s.prediction for s in pool.score(rollouts("of a", ""))] == ["of a", "of b"]


def test_a_component_of_two_functions_is_an_error_of_the_sample():
    with pool_of("gsm8k", "exact_match") as pool:
        (scored,) = pool.score(rollouts("7"))
    assert scored.reward is None
    assert scored.error == "component 'acc' comes from two functions: gsm8k, exact_match"


def test_a_file_that_takes_longer_to_import_than_the_time_out_is_no_time_out(tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import time\ntime.sleep(0.6)\ndef fn(): return 1\n")
    with pool_of(f"{file}:fn", timeout_s=0.3) as pool:
        assert [s.reward for s in pool.score(rollouts("a", "b"))] == [1.0, 1.0]


def test_a_weight_that_names_no_component_of_three_scored_batches_is_refused(actions):
    with pool_of(actions, weights={"atc": 2.0}) as pool:
        (failed,) = pool.score(rollouts("none"))
        assert failed.error == "act: returned None"
        for _ in range(2):
            pool.score(rollouts("1"))
        with pytest.raises(UserError, match=r"'atc'.*did you mean 'act'.*Known components: act\."):
            pool.score(rollouts("none", "1"))


def test_three_batches_that_fail_altogether_are_refused(actions):
    with pool_of(actions) as pool:
        for texts in (["none"], ["raise", "none"], ["1", "none"], ["none"], ["none"]):
            pool.score(rollouts(*texts))
        with pytest.raises(UserError, match=r"last 3 batches .* act\. The last error: act: returned nan"):
            pool.score(rollouts("none", "nan"))


def test_three_failures_of_a_batch_are_logged(pool, caplog):
    with caplog.at_level(logging.WARNING, logger="jaxrl_llm.rewards"):
        pool.score([rollout("1")] + [rollout("x" * 300 + "y", uid=17 + n, sample=n) for n in range(5)])
    assert len(caplog.messages) == 3
    assert "sample 1 of prompt 18 (5 of 6 in this batch): act: ValueError" in caplog.messages[1]
    assert caplog.messages[1].endswith("response: '" + "x" * 200 + "'")


@pytest.mark.parametrize(
    ("functions", "arguments", "text"),
    [
        ([], {}, "at least one reward function"),
        (["gsm8"], {}, "did you mean 'gsm8k'"),
        (["gsm8k", "gsm8k"], {}, "two functions have the name 'gsm8k'"),
        (["length"], {"kwargs": {"lenght": {}}}, "did you mean 'length'"),
        (["length"], {}, "'max_length'"),
        (["gsm8k"], {"workers": 0}, "at least 1 worker"),
        (["gsm8k"], {"timeout_s": 0}, "timeout_s=0"),
        (["gsm8k"], {"weights": {"acc": math.nan}}, "a finite number as the weight of 'acc', got nan"),
    ],
)
def test_mistakes_are_refused_before_any_worker_starts(functions, arguments, text):
    with pytest.raises(UserError) as caught:
        RewardPool(functions, **{"weights": {}, "workers": 1, "timeout_s": 1.0, **arguments})
    assert text in str(caught.value)


def test_workers_that_cannot_start_are_reported(tmp_path):
    file = tmp_path / "once.py"
    file.write_text("import os\ndef fn(): return os.getpid()\n")
    with pool_of(f"{file}:fn") as pool:
        (scored,) = pool.score(rollouts("a"))
        file.unlink()
        os.kill(int(scored.reward), signal.SIGKILL)
        time.sleep(0.5)
        with pytest.raises(UserError, match="the workers for fn died 3 times"):
            pool.score(rollouts("a"))


def test_a_closed_pool_scores_nothing():
    with pool_of("gsm8k") as pool:
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            pool.score(rollouts("#### 7"))


SCRIPT = """
import sys, threading, time
from tests.test_rewards_pool import rollouts
from jaxrl_llm.rewards.pool import RewardPool

if __name__ == "__main__":
    pool = RewardPool([sys.argv[1]], weights={}, workers=1, timeout_s=1000.0)
    print(int(pool.score(rollouts("pid"))[0].reward), flush=True)
    threading.Thread(target=pool.score, args=(rollouts("hang"),), daemon=True).start()
    time.sleep(0.3)
    if sys.argv[2] == "wait":
        time.sleep(1000)
    if sys.argv[2] == "close":
        pool.close()
"""


@pytest.fixture
def script(tmp_path, actions):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu"}
    return lambda end: subprocess.Popen(
        [sys.executable, str(path), actions, end], env=env, stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("end", ["return", "close"])
def test_a_hanging_function_does_not_keep_the_interpreter_from_exiting(script, end):
    with script(end) as process:
        pid = int(process.stdout.readline())
        assert process.wait(timeout=20) == 0
    assert_gone(pid)


def test_workers_end_with_a_main_process_that_is_killed(script):
    with script("wait") as process:
        pid = int(process.stdout.readline())
        process.kill()
    assert_gone(pid)


def assert_gone(pid):
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail(f"worker {pid} is still there after 10 s")


def test_a_signal_to_the_process_group_costs_no_sample(pool):
    """The main process decides what it means: it may still need what is being scored."""
    assert [s.reward for s in pool.score(rollouts("signals", "2.0"))] == [1.0, 2.0]
