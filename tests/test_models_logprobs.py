from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.logprobs import (
    TokenStats,
    exact_kl,
    kl_divergence,
    logprob_and_entropy,
    shift_to_tokens,
    squared_probabilities,
    token_logprobs,
)

INF = float("inf")
compute = jax.jit(token_logprobs, static_argnames=("vocab_size", "chunk", "entropy", "sum_pi_squared"))
compute_kl = jax.jit(exact_kl, static_argnames=("vocab_size", "chunk"))


def drawn(segments):
    """Where tokens stand that have others before them in their segment."""
    for b, t in np.ndindex(*segments.shape):
        if t and segments[b, t] and segments[b, t] == segments[b, t - 1]:
            yield b, t


def probabilities(hidden_D, head, temperature):
    logits = head.astype(np.float64) @ hidden_D / temperature
    p = np.exp(logits - logits.max())
    return p / p.sum()


def reference(hidden, head, ids, segments, temperature):
    """In float64, a token at a time."""
    logprob, entropy, squares = np.zeros((3, *ids.shape))
    for b, t in drawn(segments):
        p = probabilities(hidden[b, t - 1], head, temperature)
        logprob[b, t], entropy[b, t], squares[b, t] = np.log(p[ids[b, t]]), -(p * np.log(p)).sum(), (p**2).sum()
    return TokenStats(logprob, entropy, squares)


def inputs():
    B, T, D, V = 3, 10, 6, 12
    rng = np.random.default_rng(0)
    hidden, head = rng.normal(size=(B, T, D)).astype(np.float32), rng.normal(size=(V, D)).astype(np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1], [1] * T])
    return hidden, head, rng.integers(0, V, (B, T)), segments


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407605964), (0.5, -0.142931628), (0.6, -0.202573100)])
def test_temperature_divides_the_logits(temperature, expected):
    # The hidden state of the first token has the logits [2, 1, 0]; the second token is 0.
    hidden, head = jnp.array([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]]), jnp.eye(3)
    ids, segments = jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32)
    options = {"vocab_size": 3, "temperature": temperature, "chunk": 2, "entropy": False}
    stats = compute(hidden, head, ids, segments, **options)
    assert stats.entropy is None
    assert stats.sum_pi_squared is None
    assert stats.logprob[0, 0] == 0
    assert float(stats.logprob[0, 1]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("logits", "entropy", "gradient"),
    [
        ([0.0, 0.0, -INF], 0.693147181, [0.0, 0.0, 0.0]),
        ([1.0, 0.0, -INF], 0.582203109, [-0.196611933, 0.196611933, 0.0]),
        (np.array([65504, -65504], np.float16), 0.0, [0.0, 0.0]),
    ],
)
def test_entropy_and_its_gradient_are_finite_where_a_token_has_no_probability(logits, entropy, gradient):
    def h(logits):
        return logprob_and_entropy(logits, jnp.int32(0))[1]

    logits = jnp.asarray(logits)
    assert float(h(logits)) == pytest.approx(entropy, abs=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(h))(logits), gradient, atol=1e-6)


def test_the_logprob_of_a_possible_token_has_finite_gradients_beside_an_impossible_one():
    gradient = jax.grad(lambda x: logprob_and_entropy(x, jnp.int32(1))[0])(jnp.array([1.0, 0.0, -INF]))
    np.testing.assert_allclose(gradient, [-0.731058579, 0.731058579, 0.0], atol=1e-6)


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (3, 0.7), (4, 1.0), (7, 0.7), (10, 0.7), (64, 1.0)])
def test_values_stand_at_their_own_token_and_are_zero_where_a_segment_starts(chunk, temperature):
    hidden, head, ids, segments = inputs()
    options = {"vocab_size": 12, "temperature": temperature, "chunk": chunk, "entropy": True, "sum_pi_squared": True}
    stats = compute(hidden, head, ids, segments, **options)
    for got, expected in zip(stats, reference(hidden, head, ids, segments, temperature), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)
    starts_and_padding = [[0, 3, 7, 8, 9], [0, 1, 2], [0]]
    for values in stats:
        assert [np.flatnonzero(row == 0).tolist() for row in np.asarray(values)] == starts_and_padding


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunks_change_neither_values_nor_gradients(chunk):
    hidden, head, ids, segments = inputs()
    weights = np.random.default_rng(1).normal(size=(2, *ids.shape)).astype(np.float32)

    def loss(hidden, head, chunk):
        options = {"vocab_size": 12, "temperature": 0.8, "chunk": chunk, "entropy": True}
        stats = token_logprobs(hidden, head, ids, segments, **options)
        return jnp.sum(weights[0] * stats.logprob + weights[1] * stats.entropy)

    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    whole, whole_grads = value_and_grad(hidden, head, 10)
    parts, grads = value_and_grad(hidden, head, chunk)
    assert float(parts) == pytest.approx(float(whole), rel=1e-5)
    for got, expected in zip(grads, whole_grads, strict=True):
        assert float(jnp.abs(expected).max()) > 0.1
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_rows_that_pad_the_vocabulary_have_no_probability_and_no_gradient():
    hidden, head, ids, segments = inputs()
    padded = np.concatenate([head, np.full((4, 6), 5.0, np.float32)])
    options = {"vocab_size": 12, "temperature": 1.0, "chunk": 4, "entropy": True, "sum_pi_squared": True}

    def stats(head):
        return compute(hidden, head, ids, segments, **options)

    for got, expected in zip(stats(padded), stats(head), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda head: sum(x.sum() for x in stats(head))))(padded)
    assert bool(jnp.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[12:], 0.0)
    assert float(jnp.abs(gradient[:12]).max()) > 0.1


def test_values_are_float32_when_the_hidden_states_are_not():
    hidden, head, ids, segments = inputs()
    options = {"vocab_size": 12, "temperature": 1.0, "chunk": 4, "entropy": True, "sum_pi_squared": True}
    stats = compute(hidden.astype(jnp.bfloat16), head, ids, segments, **options)
    assert [values.dtype for values in stats] == [jnp.float32] * 3
    np.testing.assert_allclose(stats.logprob, reference(hidden, head, ids, segments, 1.0).logprob, atol=0.1)


@pytest.mark.parametrize("backward", [False, True])
def test_memory_is_bounded_by_a_chunk(backward):
    T, D, V, chunk = 1024, 16, 8192, 64
    shapes = [
        jax.ShapeDtypeStruct((1, T, D), jnp.float32),
        jax.ShapeDtypeStruct((V, D), jnp.float32),
        jax.ShapeDtypeStruct((1, T), jnp.int32),
        jax.ShapeDtypeStruct((1, T), jnp.int32),
    ]

    def temporary(chunk):
        f = partial(token_logprobs, vocab_size=V, temperature=0.9, chunk=chunk, entropy=True, sum_pi_squared=True)

        def loss(*args):
            stats = f(*args)
            return jnp.sum(stats.logprob * args[2] + stats.entropy + stats.sum_pi_squared)

        function = jax.grad(loss, (0, 1)) if backward else f
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    bound = 8 * chunk * V * 4  # a few float32 copies of one chunk's logits
    assert temporary(chunk) < bound
    assert temporary(T) > T * V * 4 > bound


@pytest.mark.parametrize(
    ("logits", "expected"), [([0.0, 0.0, -INF], 0.5), ([np.log(4), 0.0], 0.68), ([1e4, 0.0, 0.0], 1.0)]
)
def test_squared_probabilities_are_summed_over_the_vocabulary(logits, expected):
    value, gradient = jax.jit(jax.value_and_grad(squared_probabilities))(jnp.array(logits))
    assert float(value) == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(gradient).all()


def test_values_are_shifted_to_the_tokens_that_were_drawn_there():
    values = jnp.array([[1.0, 2.0, 3.0, 4.0, jnp.nan], [jnp.nan, 6.0, 7.0, 8.0, 9.0]])
    segments = jnp.array([[1, 1, 2, 2, 0], [0, 1, 1, 1, 1]])
    expected = [[0, 1, 0, 3, 0], [0, 0, 6, 7, 8]]
    np.testing.assert_array_equal(shift_to_tokens(values, segments), expected)


def other_inputs():
    """Hidden states and head of a reference model that is wider."""
    rng = np.random.default_rng(7)
    return rng.normal(size=(3, 10, 8)).astype(np.float32), rng.normal(size=(12, 8)).astype(np.float32)


@pytest.mark.parametrize(("chunk", "temperature"), [(1, 1.0), (3, 0.7), (4, 1.0), (10, 0.7), (64, 1.0)])
def test_the_exact_kl_is_that_of_whole_distributions_at_the_sampling_temperature(chunk, temperature):
    hidden, head, _, segments = inputs()
    other_hidden, other_head = other_inputs()
    expected = np.zeros(segments.shape)
    for b, t in drawn(segments):
        p = probabilities(hidden[b, t - 1], head, temperature)
        q = probabilities(other_hidden[b, t - 1], other_head, temperature)
        expected[b, t] = (p * np.log(p / q)).sum()
    assert expected.max() > 1
    options = {"vocab_size": 12, "temperature": temperature, "chunk": chunk}
    kl = compute_kl(hidden, head, other_hidden, other_head, segments, **options)
    assert kl.dtype == jnp.float32
    np.testing.assert_allclose(kl, expected, rtol=1e-5, atol=1e-6)


def test_the_exact_kl_and_its_gradient_of_two_tokens():
    # Policy softmax([theta, 0]) with theta = ln 4, so (.8, .2), and reference (.5, .5).
    def kl(theta):
        hidden = jnp.stack([jnp.array([theta, 0.0]), jnp.zeros(2)])[None]
        head, segments = jnp.eye(2), jnp.ones((1, 2), jnp.int32)
        values = exact_kl(hidden, head, 0 * hidden, head, segments, vocab_size=2, temperature=1.0, chunk=2)
        return values[0, 1]

    value, gradient = jax.jit(jax.value_and_grad(kl))(jnp.log(4.0))
    assert float(value) == pytest.approx(0.192744757, abs=1e-6)
    assert float(gradient) == pytest.approx(0.221807098, abs=1e-6)


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunks_change_neither_the_exact_kl_nor_its_gradients(chunk):
    hidden, head, _, segments = inputs()
    weights = np.random.default_rng(1).normal(size=segments.shape).astype(np.float32)

    def loss(hidden, head, chunk):
        values = exact_kl(hidden, head, *other_inputs(), segments, vocab_size=12, temperature=0.8, chunk=chunk)
        return jnp.sum(weights * values)

    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)
    whole, whole_grads = value_and_grad(hidden, head, 10)
    parts, grads = value_and_grad(hidden, head, chunk)
    assert float(parts) == pytest.approx(float(whole), rel=1e-5)
    for got, expected in zip(grads, whole_grads, strict=True):
        assert float(jnp.abs(expected).max()) > 0.1
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_the_exact_kl_of_identical_models_is_zero_and_pushes_nowhere():
    hidden, head, _, segments = inputs()

    def total(hidden, head):
        values = exact_kl(hidden, head, hidden, head, segments, vocab_size=12, temperature=0.8, chunk=4)
        return values.sum(), values

    gradients, values = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)
    np.testing.assert_array_equal(values, 0.0)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


def test_the_reference_of_the_exact_kl_gets_no_gradient():
    hidden, head, _, segments = inputs()

    def total(*models):
        return exact_kl(*models, segments, vocab_size=12, temperature=0.8, chunk=4).sum()

    gradients = jax.jit(jax.grad(total, (0, 1, 2, 3)))(hidden, head, *other_inputs())
    for policy, reference in zip(gradients[:2], gradients[2:], strict=True):
        assert float(jnp.abs(policy).max()) > 0.1
        np.testing.assert_array_equal(reference, 0.0)


def test_rows_that_pad_the_vocabulary_have_no_part_in_the_exact_kl():
    hidden, head, _, segments = inputs()
    other_hidden, other_head = other_inputs()
    options = {"vocab_size": 12, "temperature": 1.0, "chunk": 4}

    def pad(head):
        return np.concatenate([head, np.full((4, head.shape[1]), 5.0, np.float32)])

    def kl(head, other_head):
        return compute_kl(hidden, head, other_hidden, other_head, segments, **options)

    np.testing.assert_allclose(kl(pad(head), pad(other_head)), kl(head, other_head), rtol=1e-5)
    gradient = jax.jit(jax.grad(lambda head: kl(head, pad(other_head)).sum()))(pad(head))
    assert bool(jnp.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[12:], 0.0)
    assert float(jnp.abs(gradient[:12]).max()) > 0.1


@pytest.mark.parametrize(
    ("logits", "other", "expected"),
    [
        ([0.0, 0.0, -INF], [0.0, 0.0, -INF], 0.0),
        ([0.0, -INF, -INF], [0.0, 0.0, -INF], 0.693147181),
        ([0.0, -200.0], [0.0, 0.0], 0.693147181),
        ([0.0, -200.0], [0.0, -INF], 0.0),
        ([0.0, 0.0], [0.0, -INF], INF),
    ],
)
def test_impossible_tokens_have_no_part_in_the_divergence_unless_only_the_reference_excludes_them(
    logits, other, expected
):
    value, gradient = jax.jit(jax.value_and_grad(kl_divergence))(jnp.array(logits), jnp.array(other))
    assert float(value) == pytest.approx(expected, abs=1e-6)
    assert np.isfinite(gradient).all() or expected == INF


@pytest.mark.parametrize("backward", [False, True])
def test_the_exact_kl_keeps_the_logits_of_a_chunk_at_most(backward):
    T, D, V, chunk = 1024, 16, 8192, 64
    model = [jax.ShapeDtypeStruct((1, T, D), jnp.float32), jax.ShapeDtypeStruct((V, D), jnp.float32)]
    shapes = [*model, *model, jax.ShapeDtypeStruct((1, T), jnp.int32)]

    def temporary(chunk):
        f = partial(exact_kl, vocab_size=V, temperature=0.9, chunk=chunk)
        function = jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1)) if backward else f
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    bound = 8 * chunk * V * 4  # a few float32 copies of the two logits of one chunk
    assert temporary(chunk) < bound
    assert temporary(T) > 2 * T * V * 4 > bound
