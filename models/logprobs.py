"""Log-probabilities and entropies of given tokens, from hidden states, without ever holding all logits.

Shapes: B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.models.decoder import head_logits


def logprob_and_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """log softmax at `targets` and the entropy, both float32 [...], of logits [..., V].

    Logits of -inf have probability 0 and add nothing to the entropy or to its gradient.
    """
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    finite = jnp.where(jnp.isneginf(logits), 0.0, logits)  # p is 0 there, and 0 * -inf would be NaN
    p = jnp.exp(logits - log_z[..., None])
    return chosen - log_z, log_z - jnp.sum(p * finite, axis=-1)


def token_logprobs(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    token_ids_BT: jax.Array,
    segment_ids_BT: jax.Array,
    *,
    vocab_size: int,
    temperature: float,
    chunk: int,
    entropy: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """Log-probability of every token given those before it in its segment, float32 [B, T], at `temperature`.

    Aligned with the token itself: out[b, t] is for token_ids[b, t], read off hidden[b, t - 1]; the first token of a
    segment, and padding, get 0. With `entropy`, also the entropy of the distribution that the token was drawn from.
    The head is applied to `chunk` tokens of each row at a time and again in the backward pass, so that at most
    [B, chunk, V] logits exist.
    """
    B, T = token_ids_BT.shape
    targets = jnp.roll(token_ids_BT, -1, axis=1)
    chunk = min(chunk, T)
    pad = -T % chunk
    n = (T + pad) // chunk
    hidden = jnp.pad(hidden_BTD, ((0, 0), (0, pad), (0, 0))).reshape(B, n, chunk, -1).swapaxes(0, 1)
    targets = jnp.pad(targets, ((0, 0), (0, pad))).reshape(B, n, chunk).swapaxes(0, 1)

    @jax.checkpoint
    def one(hidden_BcD: jax.Array, targets_Bc: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        logits = head_logits(hidden_BcD, head_VD, vocab_size) / temperature
        logprob, h = logprob_and_entropy(logits, targets_Bc)
        return logprob, h if entropy else None

    _, parts = jax.lax.scan(lambda _, xs: (None, one(*xs)), None, (hidden, targets))
    previous = jnp.roll(segment_ids_BT, 1, axis=1).at[:, 0].set(0)
    has_context = (segment_ids_BT > 0) & (segment_ids_BT == previous)

    def to_tokens(part: jax.Array) -> jax.Array:
        flat = part.swapaxes(0, 1).reshape(B, n * chunk)[:, :T]
        return jnp.where(has_context, jnp.roll(flat, 1, axis=1), 0.0)

    return jax.tree.map(to_tokens, parts)
