import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.rollout.engine import Request, Sampling
from jaxrl_llm.rollout.sampling import Filters, sample
from jaxrl_llm.sharding.mesh import ShardingError, make_mesh
from jaxrl_llm.sharding.reshard import checksum
from jaxrl_llm.types import UserError
from tests.engines import (
    FAMILIES,
    GREEDY,
    RANDOM,
    VOCAB,
    answers,
    assert_learner_agrees,
    assert_well_formed,
    golden,
    make_engine,
    make_prompt,
    random_prompts,
    response,
    spell,
)


@pytest.fixture
def reloaded(engine):
    """The shared engine, which gets its own weights back afterwards."""
    params = engine._params
    yield engine
    engine.load(params, 3, int(checksum(params)))


# ---- every family --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_is_the_golden_answer_and_log_probabilities_are_the_learners(name):
    engine = make_engine(name, slots=9, prefill_batch=3, response=16, steps=15)
    prompts, greedy = golden(name)
    rollouts = engine.generate(Sampling(temperature=0.0, max_tokens=16).requests(prompts), GREEDY)
    assert [response(r) for r in rollouts] == greedy
    assert_learner_agrees(name, engine._params, rollouts, 1.0)
    for temperature in (1.0, 0.7):
        sampling = Sampling(n=3, temperature=temperature, max_tokens=16)
        rollouts = engine.generate(sampling.requests(prompts), sampling)
        for rollout in rollouts:
            assert_well_formed(rollout)
        assert_learner_agrees(name, engine._params, rollouts, temperature)


# ---- how many tokens, and why they end -----------------------------------------------------------


@pytest.mark.parametrize(("budget", "dispatches"), [(1, 0), (3, 1), (6, 1), (7, 2)])
def test_exactly_max_tokens_are_made(engine, calls, budget, dispatches):
    (rollout,) = engine.generate([Request(random_prompts([4])[0], 0, 7, budget)], RANDOM)
    assert (rollout.response_length, len(rollout.token_ids)) == (budget, 4 + budget)
    assert (rollout.stop_reason, rollout.text) == ("length", spell(response(rollout)))
    assert len(calls["dispatch"]) == dispatches  # the first token is the prompt's; five in each
    assert_well_formed(rollout)


@pytest.mark.parametrize(
    ("length", "budget", "message"),
    [
        (4, 0, "max_tokens must be at least 1, got 0"),
        (
            21,
            4,
            "of 21 tokens with max_tokens=4 does not fit .*prompts of 1 to 20 tokens and 32 tokens in all",
        ),
        (0, 4, "of 0 tokens with max_tokens=4 does not fit"),
        (20, 13, "prompt 1 of 20 tokens with max_tokens=13 does not fit .*and 32 tokens in all"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(engine, calls, length, budget, message):
    good, bad = random_prompts([4, length])
    with pytest.raises(UserError, match=message):
        engine.generate([Request(good, 0, 0, 2), Request(bad, 0, 0, budget)], GREEDY)
    assert calls == {"prefill": [], "dispatch": []}


def test_the_last_place_of_the_cache_can_be_used(engine):
    prompts, greedy = golden("qwen2_tied")
    full, long = engine.generate([Request(prompts[0], 0, 0, 12), Request(prompts[2], 0, 0, 25)], GREEDY)
    assert response(full) == greedy[0][:12]
    assert response(long)[:16] == greedy[2]
    assert (len(full.token_ids), len(long.token_ids)) == (32, 32)
    assert_learner_agrees("qwen2_tied", engine._params, [full, long], 1.0)


def test_any_end_of_sequence_id_ends_a_sequence_and_counts_once_as_an_action():
    # What follows greedily: 61 63 101 22 51 ..., 57 73 148 ..., 68 115 73 61 61 ...
    engine = make_engine(eos=(73, 51), slots=8, prefill_batch=5, steps=12)
    prompts, greedy = golden("qwen2_tied")
    inside = make_prompt([*prompts[2].token_ids, 68, 115, 73], 3)  # an end id, which may be the pad id too, in a prompt
    at_once = make_prompt([*prompts[1].token_ids, 57], 4)
    requests = [
        *(Request(p, 0, 0, 12) for p in (*prompts, inside, at_once)),
        Request(prompts[1], 1, 0, 2),  # the end id is the last token that the budget allows
        Request(prompts[1], 2, 0, 1),
    ]
    rollouts = engine.generate(requests, GREEDY)
    assert [(response(r), r.stop_reason, r.text) for r in rollouts] == [
        ([61, 63, 101, 22, 51], "eos", "061,063,101,022,"),
        ([57, 73], "eos", "057,"),
        ([68, 115, 73], "eos", "068,115,"),
        (greedy[2][3:15], "length", spell(greedy[2][3:15])),
        ([73], "eos", ""),
        ([57, 73], "eos", "057,"),
        ([57], "length", "057,"),
    ]
    for rollout in rollouts:
        assert_well_formed(rollout)
    stopped = engine.generate(requests[:3], Sampling(temperature=0.0, stop=("101,02", "7,", "15,")))
    assert [(response(r), r.stop_reason, r.text) for r in stopped] == [
        ([61, 63, 101, 22], "stop_string", "061,063,"),
        ([57], "stop_string", "05"),
        ([68, 115], "stop_string", "068,1"),
    ]


@pytest.mark.parametrize(
    ("stop", "tokens", "text"),
    [
        (("3,10",), [61, 63, 101], "061,06"),  # begins in the second token, complete with the third
        (("061",), [61], ""),
        ((",",), [61], "061"),
        (("022,051,05", "101"), [61, 63, 101], "061,063,"),
        (("01,022,051,", "3,101,0"), [61, 63, 101, 22], "061,06"),  # the one that is complete first
        (("143,143,143,",), [61, 63, 101, 22, 51, 51, 143, 143, 143], "061,063,101,022,051,051,"),
    ],
)
def test_a_stop_string_ends_the_text_before_it_and_the_tokens_with_the_one_that_completes_it(
    engine, stop, tokens, text
):
    sampling = Sampling(temperature=0.0, stop=stop)
    (rollout,) = engine.generate([Request(golden("qwen2_tied")[0][0], 0, 0, 12)], sampling)
    assert (response(rollout), rollout.stop_reason, rollout.text) == (tokens, "stop_string", text)
    assert_well_formed(rollout)


def test_a_stop_string_that_never_comes_changes_nothing(engine):
    sampling = Sampling(temperature=0.0, stop=("end",))
    (rollout,) = engine.generate([Request(golden("qwen2_tied")[0][0], 0, 0, 12)], sampling)
    assert (rollout.stop_reason, rollout.text) == ("length", spell(golden("qwen2_tied")[1][0][:12]))


# ---- weights, memory, devices --------------------------------------------------------------------


def test_an_engine_without_weights_says_so():
    engine = make_engine(load=False)
    assert engine.version == -1
    with pytest.raises(RuntimeError, match=r"no weights yet: call load\(\) first"):
        engine.generate(GREEDY.requests(random_prompts([3])), GREEDY)


def test_new_weights_change_answers_and_versions_and_damaged_ones_are_refused(reloaded):
    engine = reloaded
    requests = Sampling(n=2, max_tokens=8).requests(random_prompts([6, 4]))
    old_params, old = engine._params, engine.generate(requests, RANDOM)
    new_params = jax.tree.map(lambda x: x * 1.5, old_params)
    with pytest.raises(ShardingError, match=r"weights of version 9 arrived damaged: checksum 0x.* expected 0x"):
        engine.load(new_params, 9, int(checksum(old_params)))
    assert engine.version == 3
    assert answers(engine.generate(requests, RANDOM)) == answers(old)

    engine.load(new_params, 9, int(checksum(new_params)))
    new = engine.generate(requests, RANDOM)
    engine.load(old_params, 3, int(checksum(old_params)))
    for before, after in zip(old, new, strict=True):
        assert response(before) != response(after)
        assert_well_formed(after, version=9)
    assert_learner_agrees("qwen2_tied", new_params, new, 1.0)
    assert answers(engine.generate(requests, RANDOM)) == answers(old)


def test_without_any_preference_each_token_is_the_noise_of_its_own_seed_and_position(reloaded):
    flat = jax.tree.map(jnp.zeros_like, reloaded._params)
    reloaded.load(flat, 4, int(checksum(flat)))
    requests = Sampling(n=2, max_tokens=12).requests(random_prompts([6, 4]))
    filters = Filters(jnp.float32(1), jnp.int32(0), jnp.float32(1), jnp.float32(0))
    for request, rollout in zip(requests, reloaded.generate(requests, RANDOM), strict=True):
        positions = np.flatnonzero(rollout.action_mask)
        seeds = np.full(12, request.seed, np.uint32)
        expected, _ = sample(jnp.zeros((12, VOCAB)), seeds, positions, filters, filtered=False)
        assert response(rollout) == expected.tolist()
        np.testing.assert_allclose(rollout.logprobs[positions], -np.log(VOCAB), rtol=1e-5)


def test_sleep_frees_the_cache_and_changes_no_token(engine):
    requests = Sampling(n=2, max_tokens=8).requests(random_prompts([6, 4]))
    before = answers(engine.generate(requests, RANDOM))
    cache = engine._cache
    engine.sleep()
    assert engine._cache is None
    engine.wake()
    assert engine._cache.k.shape == cache.k.shape
    assert answers(engine.generate(requests, RANDOM)) == before
    engine.sleep()
    assert answers(engine.generate(requests, RANDOM)) == before


def test_eight_devices_give_the_tokens_of_one_and_compile_each_program_once(engine):
    prompts, greedy = golden("qwen2_tied")
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    many = make_engine(mesh=mesh, slots=6, prefill_batch=3, steps=17)
    many.wake()
    layout = many._cache.k.sharding
    sampling = Sampling(n=4, max_tokens=12)
    expected = engine.generate(sampling.requests(prompts), sampling)
    for _ in range(2):
        rollouts = many.generate(sampling.requests(prompts), sampling)
        assert answers(rollouts) == answers(expected)
        for a, b in zip(rollouts, expected, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert [response(r) for r in many.generate([Request(p, 0, 0, 12) for p in prompts], GREEDY)] == [
        tokens[:12] for tokens in greedy
    ]
    assert many._cache.k.addressable_shards[0].data.shape == (3, 2, 1, 32, 8)
    assert many._cache.k.sharding == layout
    assert many._cache.v.sharding == layout
    programs = (many.programs.prefill, many.programs.admit, many.programs.dispatch)
    assert [program._cache_size() for program in programs] == [1, 1, 1]
    many.close()
    assert many.version == -1
    with pytest.raises(RuntimeError, match="no weights"):
        many.generate([Request(prompts[0], 0, 0, 1)], GREEDY)
