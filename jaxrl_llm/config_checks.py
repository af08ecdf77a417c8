"""Every check of a config that needs more than one key, or a range. Touches no file and no device."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from jaxrl_llm.config import Config, flatten
from jaxrl_llm.types import UserError


def validate(config: Config, *, training: bool = True) -> None:
    """Every check that needs more than one key or a range, those of training alone only if it is for training. Raises
    UserError with all of them; touches no device."""
    problems = [text for wrong, text in _checks(config, training) if wrong]
    if problems:
        raise UserError("\n".join(problems))


def _checks(c: Config, training: bool) -> Iterator[tuple[bool, str]]:
    yield from _choices(c)
    yield from _ranges(c)
    m = c.model
    yield bool(m.path) == bool(len(m.hf_config)), "give either config.model.path or config.model.hf_config"
    yield bool(len(m.hf_config)) and not m.tokenizer, "config.model.hf_config needs config.model.tokenizer"
    yield not c.run_dir or "://" in c.run_dir, f"config.run_dir={c.run_dir!r} must be a folder of a file system"
    yield "" in c.rollout.stop, "config.rollout.stop holds an empty text, which every response contains"
    yield (
        c.eval.temperature == 0 and c.eval.n > 1,
        f"config.eval.temperature=0 is greedy: config.eval.n={c.eval.n} samples would all be the same",
    )
    yield (
        c.mesh.expert != 1,
        f"config.mesh.expert={c.mesh.expert}: no model family has experts; leave it at 1",
    )
    if training:
        yield from _schedule(c)
        yield from _batches(c)


def _schedule(c: Config) -> Iterator[tuple[bool, str]]:
    """How long, and what happens at which steps."""
    d, k, e = c.data, c.checkpoint, c.eval
    yield not d.train, "config.data.train is empty: name at least one file"
    yield (
        (c.total_steps == 0) == (c.total_epochs == 0),
        f"config.total_steps={c.total_steps} and config.total_epochs={c.total_epochs}: set the one to count by, "
        "and the other to 0",
    )
    yield (
        e.every > 0 and not d.val,
        f"config.eval.every={e.every} but config.data.val is empty; set config.eval.every=0 to train without",
    )
    yield (
        bool(k.keep_best and k.every and e.every and d.val) and k.every % e.every != 0,
        f"config.checkpoint.keep_best={k.keep_best} needs an evaluation at every checkpoint: config.checkpoint.every="
        f"{k.every} is not a multiple of config.eval.every={e.every}",
    )


def _batches(c: Config) -> Iterator[tuple[bool, str]]:
    """Sizes that must fit together."""
    d, r, l = c.data, c.rollout, c.learner
    yield any(n < 1 for n in l.row_lengths), f"config.learner.row_lengths={l.row_lengths} must all be positive"
    yield (
        l.mini_batch_size > 0 and d.train_batch_size % l.mini_batch_size != 0,
        f"config.data.train_batch_size={d.train_batch_size} is not a multiple of "
        f"config.learner.mini_batch_size={l.mini_batch_size}",
    )
    rl = c.task == "rl"
    sequences = l.mini_batch_size * (r.n if rl else 1)
    yield (
        l.micro_batch_rows > sequences,
        f"config.learner.micro_batch_rows={l.micro_batch_rows} is more than the {sequences} sequences of a mini-batch "
        f"(config.learner.mini_batch_size={l.mini_batch_size}{f' x config.rollout.n={r.n}' if rl else ''})",
    )
    total = d.max_prompt_length + d.max_response_length
    yield (
        bool(l.row_lengths) and max(l.row_lengths) < total,
        f"config.learner.row_lengths={l.row_lengths} has no room for a sequence of {total} tokens "
        "(config.data.max_prompt_length + config.data.max_response_length)",
    )
    yield (
        rl and c.algorithm.advantage in ("grpo", "rloo") and r.n < 2,
        f"config.algorithm.advantage={c.algorithm.advantage!r} compares the samples of a prompt: config.rollout.n must "
        f"be at least 2, got {r.n}",
    )
    yield (
        rl and r.temperature <= 0,
        f"config.rollout.temperature={r.temperature} would be greedy: training needs a temperature above 0",
    )


def _choices(c: Config) -> Iterator[tuple[bool, str]]:
    from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
    from jaxrl_llm.algorithms.kl import KL_ESTIMATORS

    for key, valid in {
        "task": ("rl", "sft"),
        "model.dtype": ("float32", "bfloat16"),
        "model.remat": ("none", "dots", "full"),
        "rollout.engine": ("jax",),
        "rollout.dtype": ("float32", "bfloat16"),
        "data.prompt_style": ("auto", "chat", "plain"),
        "data.overlong": ("drop", "error"),
        "data.remainder": ("drop", "carry"),
        "optimizer.schedule": ("constant", "cosine", "linear"),
        "optimizer.first_moment_dtype": ("float32", "bfloat16"),
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.kl_estimator": tuple(KL_ESTIMATORS),
    }.items():
        value = dict(flatten(c))[key]
        near = difflib.get_close_matches(value, valid, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield value not in valid, f"config.{key}={value!r} is not one of {', '.join(map(repr, valid))}{hint}"


def _ranges(c: Config) -> Iterator[tuple[bool, str]]:
    flat = dict(flatten(c))
    for key, value in flat.items():
        yield isinstance(value, float) and not math.isfinite(value), f"config.{key} must be finite, got {value}"
    positive = (
        "data.max_prompt_length data.max_response_length data.train_batch_size rollout.n rollout.slots "
        "rollout.prefill_batch rollout.steps_per_dispatch reward.workers reward.timeout_s learner.mini_batch_size "
        "learner.epochs learner.max_skipped_steps learner.micro_batch_rows model.logits_chunk "
        "model.vocab_pad_multiple eval.n optimizer.learning_rate optimizer.epsilon checkpoint.keep_last "
        "algorithm.clip_ratio_low algorithm.clip_ratio_high"
    )
    for key in positive.split():
        yield flat[key] <= 0, f"config.{key} must be more than 0, got {flat[key]}"
    not_negative = (
        "total_steps total_epochs data.val_limit rollout.top_k eval.every eval.temperature eval.top_k checkpoint.every "
        "checkpoint.keep_best optimizer.warmup_steps optimizer.weight_decay optimizer.max_grad_norm log.samples_every "
        "log.samples algorithm.length_norm algorithm.kl_loss_coef "
        "seed optimizer.beta1 optimizer.beta2 rollout.min_p optimizer.final_fraction"
    )
    for key in not_negative.split():
        yield flat[key] < 0, f"config.{key} must not be negative, got {flat[key]}"
    for key in ("rollout.top_p", "eval.top_p"):
        yield not 0 < flat[key] <= 1, f"config.{key} must be above 0 and at most 1, got {flat[key]}"
    yield flat["optimizer.final_fraction"] > 1, "config.optimizer.final_fraction must be at most 1"
    for key in ("rollout.min_p", "optimizer.beta1", "optimizer.beta2"):
        yield flat[key] >= 1, f"config.{key} must be below 1, got {flat[key]}"
    yield (
        c.algorithm.clip_ratio_c <= 1,
        f"config.algorithm.clip_ratio_c must be above 1, got {c.algorithm.clip_ratio_c}",
    )
