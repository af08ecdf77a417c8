"""Log-probabilities, entropies and divergences of given tokens, from hidden states, without ever holding all logits.

Shapes: B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.decoder import head_logits
from jaxrl_llm.sharding.rules import ONE_DEVICE, Layout


class TokenStats(NamedTuple):
    """What is known of a token and the distribution that it was drawn from; None where not asked for."""

    logprob: jax.Array  # float32 [...]
    entropy: jax.Array | None = None  # float32 [...], nats
    sum_pi_squared: jax.Array | None = None  # float32 [...], sum over the vocabulary of the squared probability


def logprob_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log softmax at `targets` and the entropy, both float32 [...], of logits [..., V].

    Logits of -inf have probability 0 and add nothing to the entropy or to its gradient.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A sum with one term, not a gather: where the vocabulary is cut over devices each adds what it has.
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.sum(jnp.where(ids == targets[..., None], logits, 0.0), axis=-1)
    finite = jnp.where(jnp.isneginf(logits), 0.0, logits)  # p is 0 there, and 0 * -inf would be NaN
    p = jnp.exp(logits - log_z[..., None])
    return chosen - log_z, log_z - jnp.sum(p * finite, axis=-1)


def squared_probabilities(logits: jax.Array) -> jax.Array:
    """Sum over the vocabulary of the squared probability, float32 [...], of logits [..., V]: 1 / V to 1."""
    return jnp.sum(jax.nn.softmax(logits.astype(jnp.float32), axis=-1) ** 2, axis=-1)


def kl_divergence(logits: jax.Array, reference_logits: jax.Array) -> jax.Array:
    """KL(policy || reference) = sum_v p_v (log p_v - log q_v), float32 [...], of two logits [..., V].

    What the policy gives no probability, by a logit of -inf or by underflow, adds nothing to it or to its gradient.
    Equal logits give exactly 0.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    log_q = jax.nn.log_softmax(reference_logits.astype(jnp.float32), axis=-1)
    p = jnp.exp(log_p)
    return jnp.sum(p * jnp.where(p > 0, log_p - log_q, 0.0), axis=-1)


def token_logprobs(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    token_ids_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    vocab_size: int,
    temperature: float,
    chunk: int,
    entropy: bool = False,
    sum_pi_squared: bool = False,
    layout: Layout = ONE_DEVICE,
) -> TokenStats:
    """Log-probability of every token given those before it in its segment, float32 [B, T], at `temperature`.

    Aligned with the token itself: out[b, t] is for token_ids[b, t], read off hidden[b, t - 1]; the first token of a
    segment, and padding, get 0. With `entropy` and `sum_pi_squared`, also these of the distribution that the token was
    drawn from. The head is applied to `chunk` tokens of each row at a time and again in the backward pass, so that at
    most [B, chunk, V] logits exist; on a mesh, of each device's part of each row, and cut along the vocabulary.
    """

    def stats(hidden: jax.Array, targets: jax.Array) -> TokenStats:
        logits = _logits(layout, hidden, head_VD, vocab_size) / temperature
        logprob, h = logprob_and_entropy(logits, targets)
        return TokenStats(logprob, h if entropy else None, squared_probabilities(logits) if sum_pi_squared else None)

    targets_BT = jnp.roll(token_ids_BT, -1, axis=1)
    return _of_drawn_tokens(stats, (hidden_BTD, targets_BT), segment_ids_BT, chunk, layout)


def exact_kl(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    reference_hidden_BTD: jax.Array,
    reference_head_VD: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    vocab_size: int,
    temperature: float,
    chunk: int,
    layout: Layout = ONE_DEVICE,
) -> jax.Array:
    """KL(policy || reference) over the whole vocabulary, of the distributions that each token was drawn from at
    `temperature`: float32 [B, T], differentiable in `hidden_BTD` and `head_VD` only.

    Aligned and chunked as `token_logprobs`, 0 where that is; at most two [B, chunk, V] logits exist. The reference may
    have another width D.
    """
    reference_hidden_BTD, reference_head_VD = jax.lax.stop_gradient((reference_hidden_BTD, reference_head_VD))

    def kl(hidden: jax.Array, reference: jax.Array) -> jax.Array:
        logits = _logits(layout, hidden, head_VD, vocab_size) / temperature
        return kl_divergence(logits, _logits(layout, reference, reference_head_VD, vocab_size) / temperature)

    return _of_drawn_tokens(kl, (hidden_BTD, reference_hidden_BTD), segment_ids_BT, chunk, layout)


def shift_to_tokens(values_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """From what is known at each token to what was known when it was drawn: out[b, t] is values[b, t - 1], and 0 for
    the first token of a segment and for padding."""
    previous_BT = jnp.roll(segment_ids_BT, 1, axis=1).at[:, 0].set(0)
    has_context = (segment_ids_BT > 0) & (segment_ids_BT == previous_BT)
    return jnp.where(has_context, jnp.roll(values_BT, 1, axis=1), 0)


def _logits(layout: Layout, hidden_BXcD: jax.Array, head_VD: jax.Array, vocab_size: int) -> jax.Array:
    """[B, X, chunk, V], cut along the vocabulary as the head is."""
    return layout.constrain(head_logits(hidden_BXcD, head_VD, vocab_size), ("head_batch", "norm", "norm", "vocab"))


def _of_drawn_tokens(
    function: Callable[..., Any], inputs: tuple[jax.Array, ...], segment_ids_BT: jax.Array, chunk: int, layout: Layout
) -> Any:
    """Applies `function`, from pieces [B, X, chunk, ...] of the inputs [B, T, ...] to arrays [B, X, chunk], to one
    piece after the other and anew in the backward pass; its results [B, T] stand at the tokens that were drawn there.
    X: the parts into which a row is cut over devices, each of which has its own chunk of tokens in every piece."""
    B, T = segment_ids_BT.shape
    X = layout.parts("length")
    chunk = min(chunk, T // X)
    n = -(-T // X // chunk)
    pad = n * chunk - T // X

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(B, X, T // X, *x.shape[2:])
        x = jnp.pad(x, ((0, 0), (0, 0), (0, pad), *((0, 0) for _ in x.shape[3:])))
        return jnp.moveaxis(x.reshape(B, X, n, chunk, *x.shape[3:]), 2, 0)

    def join(part_nBXc: jax.Array) -> jax.Array:
        whole = jnp.moveaxis(part_nBXc, 0, 2).reshape(B, X, n * chunk)[:, :, : T // X].reshape(B, T)
        return shift_to_tokens(whole, segment_ids_BT)

    @jax.checkpoint
    def piece(xs: tuple[jax.Array, ...]) -> Any:
        # All devices that hold a part of the head get the tokens, and only what comes out goes back to theirs.
        xs = jax.tree.map(lambda x: layout.constrain(x, ("head_batch", *["norm"] * (x.ndim - 1))), xs)
        return jax.tree.map(lambda x: layout.constrain(x, ("batch", "length", "norm")), function(*xs))

    _, parts = jax.lax.scan(lambda _, xs: (None, piece(xs)), None, jax.tree.map(cut, inputs))
    return jax.tree.map(join, parts)
