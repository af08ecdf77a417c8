from dataclasses import replace

import numpy as np
import pytest

from jaxrl_llm.collect import Collector, GroupFilter, LengthPenalty
from jaxrl_llm.metrics import Timer, reward_metrics
from jaxrl_llm.types import Prompt, Rollout, Scored, UserError

BY_REWARD = GroupFilter("reward", (), (), max_batches=10)
DAPO = LengthPenalty(limit=100, buffer=20, factor=1.0)


def sample(reward, *, uid=0, length=3, logprob=-1.0, error=None, **components):
    prompt = Prompt(uid, uid, np.zeros(2, np.int32), "", "test")
    actions = np.arange(2 + length) >= 2
    logprobs = np.where(actions, logprob, 0).astype(np.float32)
    rollout = Rollout(prompt, 0, np.zeros(2 + length, np.int32), actions, logprobs, logprobs, "eos", "")
    return Scored(rollout, components or {"acc": reward}, reward, error)


def group(rewards, **more):
    return [sample(reward, **more) for reward in rewards]


class Stream:
    """Prompts 0, 1, ... in batches, without end."""

    def __init__(self, batch):
        self.batch, self.seen = batch, 0

    def next(self):
        self.seen += self.batch
        return [sample(0.0, uid=uid).rollout.prompt for uid in range(self.seen - self.batch, self.seen)]


def collector(rewards, *, batch=2, groups=2, **more):
    """`rewards`: by prompt, of its samples; of prompts beyond the list, of its last entry."""

    def generate(prompts):
        return [replace(sample(0.0).rollout, prompt=p, sample=i) for p in prompts for i in range(len(rewards[0]))]

    def score(rollouts):
        of = {r: rewards[min(r.prompt.uid, len(rewards) - 1)][r.sample] for r in map(Hashed, rollouts)}
        return [Scored(r.rollout, {"acc": reward}, reward) for r, reward in of.items()]

    return Collector(Stream(batch), generate, score, groups=groups, **more)


class Hashed:
    def __init__(self, rollout):
        self.rollout, self.prompt, self.sample = rollout, rollout.prompt, rollout.sample


def uids(scored):
    return [s.rollout.prompt.uid for s in scored]


def test_without_a_filter_a_batch_is_generated_once():
    collect = collector([[1.0, 1.0]])
    scored, generated, metrics = collect(Timer())
    assert scored == generated
    assert uids(scored) == [0, 0, 1, 1]
    assert metrics == {}


def test_dynamic_sampling_refills_from_the_stream_until_the_batch_is_informative():
    collect = collector([[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], group_filter=BY_REWARD)
    scored, generated, metrics = collect(Timer())
    assert uids(scored) == [2, 2, 4, 4]
    assert uids(generated) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert metrics["train/num_gen_batches"] == 3
    assert metrics["train/informative_groups"] == pytest.approx(3 / 6)
    assert metrics["train/uninformative_groups_used"] == 0
    # The next step goes on where this one stopped.
    assert uids(collect(Timer()).scored) == [6, 6, 7, 7]


def test_at_the_bound_prompts_that_tell_nothing_fill_the_batch_and_are_counted():
    bounded = replace(BY_REWARD, max_batches=3)
    collect = collector([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]], group_filter=bounded)
    scored, generated, metrics = collect(Timer())
    assert uids(scored) == [1, 1, 0, 0]
    assert len(generated) == 12
    assert metrics["train/num_gen_batches"] == 3
    assert metrics["train/uninformative_groups_used"] == 0.5


def test_at_the_bound_the_run_can_end_instead():
    bounded = replace(BY_REWARD, max_batches=3, fill=False)
    with pytest.raises(UserError, match=r"1 of the 6 prompts generated .* tell something, and a batch needs 2: raise"):
        collector([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]], group_filter=bounded)(Timer())


def test_batches_that_are_generated_may_be_smaller_than_the_one_that_is_learned():
    collect = collector([[1.0, 1.0], [1.0, 0.0]], batch=1, groups=3, group_filter=BY_REWARD)
    assert uids(collect(Timer()).scored) == [1, 1, 2, 2, 3, 3]
    assert collect.stream.seen == 4


@pytest.mark.parametrize(
    ("scored", "kept"),
    [
        (group([1.0, 0.0, 0.0, 0.0]), True),
        (group([1.0, 1.0, 1.0, 1.0]), False),
        (group([0.7, 0.7, 0.7]), False),  # whose mean is not 0.7 in floating point
        (group([1.0, None, 1.0]), False),
        (group([1.0, None, 0.0]), True),
        (group([None, None]), False),
    ],
)
def test_a_group_tells_something_if_its_scored_samples_differ(scored, kept):
    assert BY_REWARD.informative(scored) == kept


@pytest.mark.parametrize(("rewards", "kept"), [([1, 0, 0, 0, 0], True), ([1] * 9 + [0], False), ([0, 1], True)])
def test_a_range_of_the_mean_leaves_out_what_is_too_hard_or_too_easy(rewards, kept):
    assert GroupFilter("reward", (0.2, 0.8), (), 10).informative(group(rewards)) == kept


@pytest.mark.parametrize(("logprob", "kept"), [(-0.05, False), (-0.1, True), (-2.0, True), (-2.1, False)])
def test_a_range_of_the_entropy_leaves_out_what_is_certain_or_at_random(logprob, kept):
    by_entropy = GroupFilter("reward", (), (0.09, 2.0), 10)
    assert by_entropy.informative(group([1.0, 0.0], logprob=logprob)) == kept


def test_the_entropy_is_a_mean_over_tokens_of_all_samples():
    mixed = [sample(1.0, length=1, logprob=-4.0), sample(0.0, length=3, logprob=0.0)]
    assert GroupFilter("reward", (), (0.99, 1.01), 10).informative(mixed)


def test_a_component_can_decide_and_an_unknown_one_is_told():
    scored = [sample(1.0, acc=1.0, style=0.2), sample(0.0, acc=1.0, style=-0.8)]
    assert not GroupFilter("acc", (), (), 10).informative(scored)
    assert GroupFilter("style", (), (), 10).informative(scored)
    with pytest.raises(
        UserError, match=r"config.filter.by='styl' is not \"reward\", .*did you mean 'style'\?\): acc, style"
    ):
        GroupFilter("styl", (), (), 10).informative(scored)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 0), (80, 0), (81, -0.05), (85, -0.25), (90, -0.5), (100, -1), (101, -1)]
)
def test_the_length_penalty_falls_over_the_buffer_and_no_further(length, expected):
    penalised = DAPO(sample(1.0, length=length))
    assert penalised.components["overlong"] == pytest.approx(expected)
    assert penalised.reward == pytest.approx(1 + expected)


def test_the_length_penalty_has_a_factor_and_a_weight_and_spares_what_has_no_reward():
    penalised = LengthPenalty(100, 20, factor=0.5, weight=2.0)(sample(1.0, length=90))
    assert penalised.components["overlong"] == pytest.approx(-0.25)
    assert penalised.reward == pytest.approx(0.5)
    failed = sample(None, length=100, error="raised")
    assert DAPO(failed) is failed


def test_a_component_of_the_penaltys_name_is_told():
    with pytest.raises(UserError, match="'overlong', which is the length penalty's name"):
        DAPO(sample(1.0, overlong=0.0))


def test_the_length_penalty_makes_no_group_informative():
    lengths = [50, 85, 90, 101]
    solved = [sample(1.0, length=length) for length in lengths]
    assert [DAPO(s).reward for s in solved] == pytest.approx([1, 0.75, 0.5, 0])
    assert not BY_REWARD.informative(solved)
    # In the order of a step: what is filtered is what was scored.
    scored, generated, _ = collector(
        [[1.0, 1.0], [1.0, 0.0]], group_filter=BY_REWARD, penalty=LengthPenalty(4, 2, 1.0)
    )(Timer())
    assert uids(scored) == [1, 1, 2, 2]
    assert [s.reward for s in scored] == [0.5, -0.5, 0.5, -0.5]
    assert {s.reward for s in generated} == {0.0, 1.0}


def test_what_is_logged_has_weights_and_penalties_in_rewards_and_none_in_scores():
    generated = [sample(1.0 * 1 + 0.5 * 2, a=1.0, b=2.0, length=90)]
    metrics = reward_metrics(generated, [DAPO(s) for s in generated])
    assert metrics["critic/score/mean"] == 2.0
    assert metrics["critic/rewards/mean"] == 1.5
    assert metrics["reward/overlong/mean"] == -0.5
    three = [sample(reward) for reward in (1.0, 0.5, -1.0)]
    assert reward_metrics(three, three)["critic/score/mean"] == pytest.approx(1 / 6)


def test_remax_compares_with_one_greedy_answer_a_prompt():
    asked = []

    def greedy(prompts):
        asked.extend(p.uid for p in prompts)
        return [replace(sample(0.0).rollout, prompt=p) for p in prompts]

    rewards = [[1.0, 0.0], [0.0, 1.0]]
    scored = collector(rewards, greedy=greedy)(Timer()).scored
    assert asked == [0, 1]
    assert [s.reward for s in scored] == [1.0, 0.0, 0.0, 1.0]
    assert [s.baseline for s in scored] == [1.0, 1.0, 0.0, 0.0]  # what sample 0 of each prompt is worth here
    with_penalty = collector(rewards, greedy=greedy, penalty=LengthPenalty(4, 2, 1.0))(Timer()).scored
    assert [s.baseline for s in with_penalty] == [0.5, 0.5, -0.5, -0.5]


def test_a_greedy_answer_without_a_reward_leaves_its_prompt_out():
    collect = collector(
        [[1.0, 0.0], [None, 1.0]], greedy=lambda prompts: [replace(sample(0.0).rollout, prompt=p) for p in prompts]
    )
    scored = collect(Timer()).scored
    assert [s.reward for s in scored] == [1.0, 0.0, None, None]
    assert "no reward for the greedy answer" in scored[3].error
