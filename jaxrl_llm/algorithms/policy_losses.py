"""The policy's loss, per token and before aggregation: what a loss takes, and all losses by name.

A loss is `fn(logprobs, old_logprobs, advantages, mask, *, sequence_ids, num_sequences, **constants)`:

    logprobs       float [...], of the policy that is trained, each token's given all before it
    old_logprobs   float [...], of the policy before this update
    advantages     float [...]
    mask           bool or number [...], the tokens that the policy chose
    sequence_ids   int32 [...], for losses that look at whole sequences; num_sequences at padding
    num_sequences  S, static

and gets two more keywords if it names them:

    is_weights     float [...] or None, importance weights: the loss then applies them itself. Every other loss is
                   multiplied by them, token by token, by whoever calls it
    key            a key of jax.random, for what is chosen at random

All token arrays have one shape. What stands outside the mask has no influence, not even NaN or infinity.
The result goes to `sum(weights * token_loss)` with the weights of `aggregation.token_weights`.

Values, gradients and metrics are those of verl's losses of the same names.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.algorithms.covariance_losses import clip_cov, kl_cov
from jaxrl_llm.algorithms.sequence_losses import geo_mean, gspo
from jaxrl_llm.algorithms.token_losses import (
    PolicyLoss,
    cispo,
    dppo_kl,
    dppo_tv,
    dro,
    gpg,
    reinforce,
    sapo,
    sft,
    vanilla,
)

__all__ = ["LOSS_AGGREGATION", "POLICY_LOSSES", "WHOLE_BATCH_LOSSES", "WITHOUT_RATIO", "PolicyLoss"]

POLICY_LOSSES: dict[str, Callable[..., PolicyLoss]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "dro": dro,
    "reinforce": reinforce,
    "sft": sft,
}

# Where the aggregation is part of the method, whatever the config says.
LOSS_AGGREGATION: dict[str, str] = {
    "gspo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "geo_mean": "batch-mean-token-mean",
}

# They compare all tokens of a mini-batch and have to be given all of it at once, not a micro-batch.
WHOLE_BATCH_LOSSES: frozenset[str] = frozenset({"clip_cov", "kl_cov"})

# Without a ratio of new to old probability: samples of another policy are weighted by importance weights alone.
WITHOUT_RATIO: tuple[str, ...] = ("reinforce", "gpg")
