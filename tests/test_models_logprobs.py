from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.logprobs import logprob_and_entropy, token_logprobs

INF = float("inf")
compute = jax.jit(token_logprobs, static_argnames=("vocab_size", "chunk", "entropy"))


def reference(hidden, head, ids, segments, temperature):
    """Log-probabilities and entropies in float64, a token at a time."""
    logprobs, entropies = np.zeros(ids.shape), np.zeros(ids.shape)
    for b, t in np.ndindex(*ids.shape):
        if t and segments[b, t] and segments[b, t] == segments[b, t - 1]:
            logits = head.astype(np.float64) @ hidden[b, t - 1] / temperature
            p = np.exp(logits - logits.max())
            p /= p.sum()
            logprobs[b, t], entropies[b, t] = np.log(p[ids[b, t]]), -(p * np.log(p)).sum()
    return logprobs, entropies


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
    logprobs, entropy = compute(hidden, head, ids, segments, **options)
    assert entropy is None
    assert logprobs[0, 0] == 0
    assert float(logprobs[0, 1]) == pytest.approx(expected, abs=1e-6)


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
    options = {"vocab_size": 12, "temperature": temperature, "chunk": chunk, "entropy": True}
    logprobs, entropy = compute(hidden, head, ids, segments, **options)
    expected, expected_entropy = reference(hidden, head, ids, segments, temperature)
    np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)
    starts_and_padding = [[0, 3, 7, 8, 9], [0, 1, 2], [0]]
    assert [np.flatnonzero(row == 0).tolist() for row in np.asarray(logprobs)] == starts_and_padding


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunks_change_neither_values_nor_gradients(chunk):
    hidden, head, ids, segments = inputs()
    weights = np.random.default_rng(1).normal(size=(2, *ids.shape)).astype(np.float32)

    def loss(hidden, head, chunk):
        options = {"vocab_size": 12, "temperature": 0.8, "chunk": chunk, "entropy": True}
        logprobs, entropy = token_logprobs(hidden, head, ids, segments, **options)
        return jnp.sum(weights[0] * logprobs + weights[1] * entropy)

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
    options = {"vocab_size": 12, "temperature": 1.0, "chunk": 4, "entropy": True}

    def both(head):
        return compute(hidden, head, ids, segments, **options)

    for got, expected in zip(both(padded), both(head), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    gradient = jax.jit(jax.grad(lambda head: sum(x.sum() for x in both(head))))(padded)
    assert bool(jnp.isfinite(gradient).all())
    np.testing.assert_array_equal(gradient[12:], 0.0)
    assert float(jnp.abs(gradient[:12]).max()) > 0.1


def test_values_are_float32_when_the_hidden_states_are_not():
    hidden, head, ids, segments = inputs()
    options = {"vocab_size": 12, "temperature": 1.0, "chunk": 4, "entropy": True}
    logprobs, entropy = compute(hidden.astype(jnp.bfloat16), head, ids, segments, **options)
    assert entropy is not None
    assert (logprobs.dtype, entropy.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(logprobs, reference(hidden, head, ids, segments, 1.0)[0], atol=0.1)


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
        f = partial(token_logprobs, vocab_size=V, temperature=0.9, chunk=chunk, entropy=True)

        def loss(*args):
            logprobs, entropy = f(*args)
            return jnp.sum(logprobs * args[2] + entropy)

        function = jax.grad(loss, (0, 1)) if backward else f
        return jax.jit(function).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    bound = 8 * chunk * V * 4  # a few float32 copies of one chunk's logits
    assert temporary(chunk) < bound
    assert temporary(T) > T * V * 4 > bound
