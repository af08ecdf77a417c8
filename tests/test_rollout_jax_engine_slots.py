import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Request, Sampling
from tests.engines import (
    GREEDY,
    RANDOM,
    answers,
    assert_learner_agrees,
    assert_well_formed,
    make_engine,
    random_prompts,
    response,
)


def test_each_prompt_is_read_once_for_all_its_samples(engine, calls):
    prompts = random_prompts([3, 12, 7, 9, 5])
    sampling = Sampling(n=5, max_tokens=4)
    engine.generate(sampling.requests(prompts), sampling)
    read = [row[:n].tolist() for ids, lengths in calls["prefill"] for row, n in zip(ids, lengths, strict=True) if n > 1]
    assert read == [p.token_ids.tolist() for p in prompts]
    assert len(calls["prefill"]) == 3  # two prompts at a time


def test_short_sequences_do_not_wait_for_the_longest(engine, calls):
    prompts = random_prompts([2] * 16)
    budgets = [26] + [6] * 15  # after the first token five dispatches, and one for each of the others
    requests = [Request(p, 0, p.uid, n) for p, n in zip(prompts, budgets, strict=True)]
    rollouts = engine.generate(requests, RANDOM)
    assert [r.response_length for r in rollouts] == budgets
    assert len(calls["dispatch"]) == 5  # three slots serve fifteen short ones meanwhile; in fixed groups it takes 8


def test_a_ragged_crowd_on_few_slots_gets_what_each_gets_alone(engine):
    rng = np.random.default_rng(1)
    prompts = random_prompts(rng.integers(1, 21, 30), seed=2)
    requests = []
    for p in prompts:
        most = 32 - len(p.token_ids)
        budget = most if p.uid % 10 == 0 else int(rng.integers(1, min(most, 14) + 1))
        requests.append(Request(p, p.uid % 3, int(rng.integers(2**32)), budget))
    together = engine.generate(requests, RANDOM)
    assert [(r.prompt.uid, r.sample) for r in together] == [(r.prompt.uid, r.sample) for r in requests]
    assert [r.response_length for r in together] == [r.max_tokens for r in requests]
    for rollout, request in zip(together, requests, strict=True):
        (alone,) = engine.generate([request], RANDOM)
        assert response(rollout) == response(alone)
        np.testing.assert_allclose(rollout.logprobs, alone.logprobs, atol=1e-5)
        assert_well_formed(rollout)


@pytest.mark.parametrize(("slots", "steps"), [(3, 4), (16, 3)])
def test_tokens_depend_neither_on_slots_nor_on_steps_a_dispatch(engine, slots, steps):
    prompts = random_prompts([8, 1, 5, 3, 7, 2, 8, 6])
    # Two end early, so that sixteen slots are refilled by two.
    sampling = Sampling(n=3, max_tokens=8)
    requests = [r._replace(max_tokens=2 if i % 8 == 7 else 8) for i, r in enumerate(sampling.requests(prompts))]
    other = make_engine(slots=slots, prefill_batch=slots, prompt=8, response=8, steps=steps)
    assert answers(other.generate(requests, sampling)) == answers(engine.generate(requests, sampling))


def test_tokens_depend_neither_on_order_nor_on_company(engine):
    sampling = Sampling(n=4, max_tokens=9)
    requests = sampling.requests(random_prompts([6, 11, 3, 8, 4]))
    expected = answers(engine.generate(requests, sampling))
    shuffled = [requests[i] for i in np.random.default_rng(3).permutation(len(requests))]
    assert answers(engine.generate(shuffled, sampling)) == expected
    interleaved = sorted(requests, key=lambda r: r.sample)
    assert answers(engine.generate(interleaved, sampling)) == expected
    some = requests[3::5]
    assert answers(engine.generate(some, sampling)).items() <= expected.items()
    assert engine.generate([], sampling) == []


def test_samples_of_a_prompt_differ_and_the_run_seed_changes_all(engine):
    prompts = random_prompts([6, 6])
    first, again, other = (
        answers(engine.generate(s.requests(prompts), s))
        for s in (Sampling(n=5, max_tokens=9, seed=seed) for seed in (0, 0, 1))
    )
    assert first == again
    assert len({tuple(tokens) for run in (first, other) for tokens, _, _ in run.values()}) == 20


def test_each_request_has_its_own_seed_and_budget(engine):
    (prompt,) = random_prompts([6])
    requests = [Request(prompt, i, seed, n) for i, (seed, n) in enumerate([(5, 4), (5, 9), (6, 9), (2**32 - 1, 7)])]
    short, long, other, last = (response(r) for r in engine.generate(requests, RANDOM))
    assert long[:4] == short
    assert [len(tokens) for tokens in (short, long, other, last)] == [4, 9, 9, 7]
    assert other != long
    assert last != long[:7]


def test_filters_limit_the_tokens_and_leave_the_log_probabilities(engine):
    prompts = random_prompts([5, 7, 3])
    sampling = Sampling(n=3, temperature=1.3, top_k=2, top_p=0.95, max_tokens=4)
    rollouts = engine.generate(sampling.requests(prompts), sampling)
    assert_learner_agrees("qwen2_tied", engine._params, rollouts, 1.3)
    assert len({tuple(response(r)) for r in rollouts}) > 3
    one = Sampling(temperature=1.3, top_k=1, max_tokens=4)
    assert answers(engine.generate(one.requests(prompts), one)) == answers(
        engine.generate(one.requests(prompts), GREEDY)
    )


def test_slots_freed_by_stop_strings_serve_the_next_requests_in_full(engine):
    prompts = random_prompts([3, 9, 5, 14, 7, 2, 11, 4])
    sampling = Sampling(n=3, temperature=1.0, stop=("9,1", "00", "3,0"), max_tokens=12)
    requests = sampling.requests(prompts)
    together = engine.generate(requests, sampling)
    assert {r.stop_reason for r in together} == {"stop_string", "length"}
    assert all(r.response_length == 12 for r in together if r.stop_reason == "length")
    alone = [r for request in requests for r in engine.generate([request], sampling)]
    assert answers(together) == answers(alone)


def test_requests_get_seeds_of_their_own_that_the_run_seed_changes():
    prompts = random_prompts([3, 3, 3])
    requests = Sampling(n=4, max_tokens=5, seed=1).requests(prompts)
    assert [(r.prompt.uid, r.sample) for r in requests] == [(p, i) for p in range(3) for i in range(4)]
    seeds = [r.seed for r in requests]
    assert len(set(seeds)) == 12
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert seeds == [r.seed for r in Sampling(n=4, max_tokens=5, seed=1).requests(prompts)]
    assert not set(seeds) & {r.seed for r in Sampling(n=4, seed=2).requests(prompts)}
