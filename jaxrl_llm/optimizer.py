"""The optimizer: AdamW with a warm-up, a schedule and gradient clipping, from optax."""

from __future__ import annotations

import jax
import optax


def schedule(
    kind: str, *, learning_rate: float, warmup_steps: int, total_updates: int, final_fraction: float
) -> optax.Schedule:
    """Learning rate by optimizer update: a linear warm-up from 0 that reaches `learning_rate` at update `warmup_steps`,
    then "constant", or "cosine" or "linear" down to `final_fraction` of it at update `total_updates`."""
    rest = max(total_updates - warmup_steps, 1)
    if kind == "constant":
        after = optax.constant_schedule(learning_rate)
    elif kind == "cosine":
        after = optax.cosine_decay_schedule(learning_rate, rest, alpha=final_fraction)
    elif kind == "linear":
        after = optax.linear_schedule(learning_rate, learning_rate * final_fraction, rest)
    else:
        raise ValueError(f"schedule {kind!r} is not one of constant, cosine, linear")
    warmup = optax.linear_schedule(0.0, learning_rate, max(warmup_steps, 1))
    return optax.join_schedules([warmup, after], [warmup_steps]) if warmup_steps else after


def adamw(
    learning_rate: optax.Schedule,
    *,
    beta1: float,
    beta2: float,
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float,
    first_moment_dtype: str = "float32",
) -> optax.GradientTransformation:
    """AdamW (Loshchilov & Hutter 2019) after clipping by global norm (`max_grad_norm` 0: none). Norm scales and biases
    are not decayed."""
    # Two steps also without clipping: the state's structure, and so the checkpoints, stay the same.
    clip = optax.clip_by_global_norm(max_grad_norm) if max_grad_norm else optax.identity()
    adam = optax.adamw(
        learning_rate,
        beta1,
        beta2,
        epsilon,
        mu_dtype=first_moment_dtype,
        weight_decay=weight_decay,
        mask=_decayed,
    )
    return optax.chain(clip, adam)


def _decayed(params: object) -> object:
    def is_matrix(path: tuple, leaf: object) -> bool:
        return getattr(path[-1], "key", "") in ("kernel", "embedding", "head")

    return jax.tree_util.tree_map_with_path(is_matrix, params)
