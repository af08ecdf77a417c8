"""The implicit process reward of PRIME (arXiv:2502.01456): a language model that learns from outcomes alone gives a
reward for every token.

With the log-probabilities of the reward model and of its reference (what it was before training),

    token reward    r_t = beta (log p(y_t | y_<t) - log p_ref(y_t | y_<t))
    sequence        logit = sum over t of r_t: the log-odds that the response is right
    loss            binary cross-entropy of the logit with the outcome reward, 0 to 1
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import segments


def process_rewards(logprobs: jax.Array, reference_logprobs: jax.Array, mask: jax.Array, *, beta: float) -> jax.Array:
    """float32 [...]: the reward of each token in `mask`, 0 outside it. All arguments have one shape."""
    difference = segments.as_float(logprobs) - segments.as_float(reference_logprobs)
    return beta * jnp.where(mask.astype(bool), difference, 0)


def cross_entropy(
    token_rewards: jax.Array,
    outcomes_S: jax.Array,
    mask: jax.Array,
    sequence_ids: jax.Array,
    num_sequences: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Loss of each sequence, float32 [S], 0 for those without tokens here; bool [S], whether its logit is on the right
    side; and bool [S], whether it has tokens here.

    Args:
        token_rewards: float [...], of `process_rewards`.
        outcomes_S: float [S], clipped to 0 .. 1.
        mask: bool [...]; sequence_ids: int32 [...], num_sequences at padding. A sequence's tokens must all be here.
    """
    logits_S = segments.sequence_sum(token_rewards, mask, sequence_ids, num_sequences)
    present_S = segments.sequence_lengths(mask, sequence_ids, num_sequences) > 0
    outcomes_S = jnp.clip(jnp.where(present_S, segments.as_float(outcomes_S), 0), 0, 1)
    loss_S = jax.nn.softplus(logits_S) - outcomes_S * logits_S
    right_S = (logits_S > 0) == (outcomes_S > 0.5)
    return jnp.where(present_S, loss_S, 0), right_S & present_S, present_S
