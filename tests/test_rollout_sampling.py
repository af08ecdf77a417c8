import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.logprobs import logprob_and_entropy
from jaxrl_llm.rollout.sampling import Filters, keep, sample

run = jax.jit(sample, static_argnames="filtered")
kept = jax.jit(keep)


def filters(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    return Filters(jnp.float32(temperature), jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p))


def draw(logits, seeds, positions=0, **settings):
    """Tokens and log-probabilities as numpy; one row of logits serves all seeds. Rows are repeated
    up to one of three sizes, so that little is compiled."""
    seeds = np.atleast_1d(np.asarray(seeds, np.uint32))
    n = len(seeds)
    logits = np.broadcast_to(np.asarray(logits, np.float32), (n, np.shape(logits)[-1]))
    positions = np.broadcast_to(np.asarray(positions, np.int32), n)
    rows = np.arange(1 if n == 1 else 200 if n <= 200 else 20_000) % n
    filtered = bool(set(settings) & {"top_k", "top_p", "min_p"})
    out = run(logits[rows], seeds[rows], positions[rows], filters(**settings), filtered=filtered)
    return [np.asarray(x)[:n] for x in out]


def log_softmax(x):
    x = np.asarray(x, np.float64)
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


def reference_keep(row, top_k, top_p, min_p):
    """The definition, token by token, in float64."""
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    allowed = ranked[: top_k or len(row)]
    p = {token: np.exp(float(row[token]) - float(row[ranked[0]])) for token in allowed}
    total = sum(p.values())
    chosen, reached = {ranked[0]}, 0.0
    for token in allowed:
        if reached < top_p and p[token] >= min_p * p[ranked[0]]:
            chosen.add(token)
        reached += p[token] / total
    return [token in chosen for token in range(len(row))]


SETTINGS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 23},
    {"top_k": 400},
    {"top_p": 0.13},
    {"top_p": 0.61},
    {"top_p": 0.97},
    {"min_p": 0.07},
    {"min_p": 0.53},
    {"top_k": 6, "top_p": 0.83},
    {"top_k": 9, "min_p": 0.11},
    {"top_p": 0.71, "min_p": 0.21},
    {"top_k": 7, "top_p": 0.91, "min_p": 0.031},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_tokens_left_in_are_those_of_the_definition_also_among_ties(settings):
    rng = np.random.default_rng(0)
    smooth = rng.normal(size=(100, 23)) * rng.uniform(0.1, 4, size=(100, 1))
    ties = rng.integers(-2, 3, size=(100, 23))
    logits = np.concatenate([smooth, ties, np.zeros((1, 23))]).astype(np.float32)
    logits[::7, 3:9] = -np.inf
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **settings}
    expected = np.array([reference_keep(row, **values) for row in logits]) & (logits > -np.inf)
    np.testing.assert_array_equal(kept(logits, filters(**settings)), expected)


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 0.9999}, {"top_k": 1, "top_p": 1e-9, "min_p": 0.9999}],
)
def test_the_most_likely_token_always_stays(settings):
    logits = np.random.default_rng(1).normal(size=(50, 23)).astype(np.float32)
    mask = np.asarray(kept(logits, filters(**settings)))
    assert mask[np.arange(50), logits.argmax(-1)].all()
    flat = np.zeros((1, 23), np.float32)
    assert kept(flat, filters(**settings))[0, 0]


def test_unlikely_tokens_stay_if_no_filter_says_otherwise():
    logits = np.array([[30.0, 0.0, 0.0, 0.0, -1.0]], np.float32)  # float32 sums reach 1 with the first
    np.testing.assert_array_equal(kept(logits, filters(top_k=3)), [[True, True, True, False, False]])
    np.testing.assert_array_equal(kept(logits, filters(min_p=1e-30)), [[True] * 5])


@pytest.mark.parametrize("settings", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}])
def test_greedy_takes_the_first_of_the_most_likely_whatever_the_seed(settings):
    logits = np.random.default_rng(2).normal(size=(64, 23)).astype(np.float32)
    tokens, logprobs = draw(logits, np.arange(64), temperature=0.0, **settings)
    np.testing.assert_array_equal(tokens, logits.argmax(-1))
    np.testing.assert_allclose(logprobs, log_softmax(logits).max(-1), atol=1e-5)
    tokens, _ = draw([0.0, 1.0, 1.0], np.arange(64), temperature=0.0, **settings)
    assert set(tokens) == {1}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("settings", [{}, {"top_k": 4, "top_p": 0.8, "min_p": 0.05}])
def test_log_probabilities_are_those_after_temperature_before_filters(temperature, settings):
    logits = np.random.default_rng(3).normal(size=(200, 23)).astype(np.float32)
    tokens, logprobs = draw(logits, np.arange(200), 5, temperature=temperature, **settings)
    expected = log_softmax(logits / temperature)[np.arange(200), tokens]
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)


def test_the_learner_sees_ratio_one_for_filtered_samples():
    logits = np.log([[0.6, 0.3, 0.1]] * 200).astype(np.float32)
    tokens, logprobs = draw(logits, np.arange(200), top_p=0.9)
    assert {0, 1} <= set(tokens)
    np.testing.assert_allclose(logprobs[tokens == 0], np.log(0.6), rtol=1e-6)  # not ln(2/3)
    np.testing.assert_allclose(logprobs[tokens == 1], np.log(0.3), rtol=1e-6)
    learner, _ = logprob_and_entropy(jnp.asarray(logits), jnp.asarray(tokens))
    np.testing.assert_allclose(np.exp(learner - logprobs), 1.0, rtol=1e-6)


def test_temperature_reaches_sampler_and_learner_alike():
    tokens, logprobs = draw([2.0, 1.0, 0.0], np.arange(50), temperature=0.5)
    np.testing.assert_allclose(logprobs[tokens == 0], -0.142931628, rtol=1e-5)
    tokens, logprobs = draw([2.0, 1.0, 0.0], np.arange(50), temperature=0.6)
    np.testing.assert_allclose(logprobs[tokens == 0], -0.202573100, rtol=1e-5)


LOGITS = np.array([1.0, 0.2, -0.5, 2.0, 0.0, -np.inf, 1.9, -3.0])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 3.0},
        {"top_k": 3},
        {"top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.3},
    ],
    ids=str,
)
def test_frequencies_over_seeds_and_over_positions_are_the_probabilities(settings):
    n = 20_000
    scaled = LOGITS / settings.get("temperature", 1.0)
    only = {key: value for key, value in settings.items() if key != "temperature"}
    p = np.exp(scaled) * reference_keep(scaled, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **only})
    p /= p.sum()
    sigma = np.sqrt(p * (1 - p) / n)
    over_seeds, _ = draw(LOGITS, np.arange(n), 3, **settings)
    over_positions, _ = draw(LOGITS, np.full(n, 123), np.arange(n), **settings)
    for tokens in (over_seeds, over_positions):
        frequencies = np.bincount(tokens, minlength=len(p)) / n
        assert (np.abs(frequencies - p) <= 4 * sigma).all(), (frequencies, p)


def test_neighbouring_seeds_and_positions_are_independent():
    n = 20_000
    coin = [0.0, 0.0] + [-np.inf] * 6
    here, _ = draw(coin, np.arange(n), 3)
    next_seed, _ = draw(coin, np.arange(n) + 1, 3)
    next_position, _ = draw(coin, np.arange(n), 4)
    for other in (next_seed, next_position):
        assert abs(np.mean(here == other) - 0.5) < 4 * 0.5 / np.sqrt(n)


@pytest.mark.parametrize("settings", [{}, {"top_k": 20}, {"top_p": 0.999}, {"min_p": 1e-9}], ids=str)
def test_tokens_of_no_probability_are_never_sampled(settings):
    logits = np.full(8, -np.inf)
    logits[[4, 6]] = [0.0, -1.0]
    tokens, logprobs = draw(logits, np.arange(20_000), temperature=50.0, **settings)
    assert set(tokens) == {4, 6}
    assert np.isfinite(logprobs).all()
    logits[6] = -np.inf
    tokens, logprobs = draw(logits, np.arange(20_000), **settings)
    assert set(tokens) == {4}
    np.testing.assert_array_equal(logprobs, 0.0)


@pytest.mark.parametrize("settings", [{}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_a_token_depends_on_its_own_seed_position_and_logits_only(settings):
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(40, 23)).astype(np.float32)
    seeds, positions = rng.integers(0, 2**32, 40, dtype=np.uint32), rng.integers(0, 1000, 40)
    tokens, logprobs = draw(logits, seeds, positions, **settings)
    order = rng.permutation(40)
    permuted, permuted_logprobs = draw(logits[order], seeds[order], positions[order], **settings)
    np.testing.assert_array_equal(permuted, tokens[order])
    np.testing.assert_allclose(permuted_logprobs, logprobs[order], atol=1e-6)
    for i in (0, 17, 39):
        alone, _ = draw(logits[i], seeds[i], positions[i], **settings)
        assert alone[0] == tokens[i]
    assert (draw(logits, seeds + np.uint32(1), positions, **settings)[0] != tokens).any()
    assert (draw(logits, seeds, positions + 1, **settings)[0] != tokens).any()
