"""Every check of a config that needs more than one key, or a range. Touches no file and no device."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from jaxrl_llm.config import Config, flatten
from jaxrl_llm.types import UserError


def validate(config: Config, *, training: bool = True, files: bool = True) -> None:
    """Every check that needs more than one key or a range, those of training alone only if it is for training, and
    that data and tokenizer are named only if `files` are read. Raises UserError with all of them; touches no device."""
    problems = [text for wrong, text in _checks(config, training, files) if wrong]
    if problems:
        raise UserError("\n".join(problems))


def _checks(c: Config, training: bool, files: bool) -> Iterator[tuple[bool, str]]:
    yield from _choices(c)
    yield from _ranges(c)
    m = c.model
    yield bool(m.path) == bool(len(m.hf_config)), "give either config.model.path or config.model.hf_config"
    yield files and bool(len(m.hf_config)) and not m.tokenizer, "config.model.hf_config needs config.model.tokenizer"
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
        yield from _schedule(c, files)
        yield from _batches(c)
        yield from _algorithm(c)


def _schedule(c: Config, files: bool) -> Iterator[tuple[bool, str]]:
    """How long, and what happens at which steps."""
    d, k, e = c.data, c.checkpoint, c.eval
    yield files and not d.train, "config.data.train is empty: name at least one file"
    yield (
        (c.total_steps == 0) == (c.total_epochs == 0),
        f"config.total_steps={c.total_steps} and config.total_epochs={c.total_epochs}: set the one to count by, "
        "and the other to 0",
    )
    yield (
        files and e.every > 0 and not d.val,
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
        rl and r.temperature <= 0,
        f"config.rollout.temperature={r.temperature} would be greedy: training needs a temperature above 0",
    )


# Advantages that compare the samples of a prompt.
_GROUP_ADVANTAGES = (
    "grpo",
    "grpo_passk",
    "gdpo",
    "reinforce_plus_plus_baseline",
    "rloo",
    "opo",
    "gpg",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "prime",
)


def _algorithm(c: Config) -> Iterator[tuple[bool, str]]:
    """Keys of the algorithm that go with each other, and with the rest."""
    if c.task != "rl":
        return
    a, r, f, k = c.algorithm, c.rollout, c.filter, c.rollout_correction
    yield (
        a.advantage in _GROUP_ADVANTAGES and r.n < 2,
        f"config.algorithm.advantage={a.advantage!r} compares the samples of a prompt: config.rollout.n must be at "
        f"least 2, got {r.n}",
    )
    yield (
        bool(f.by) and r.n < 2,
        f"config.filter.by={f.by!r} compares the samples of a prompt: config.rollout.n must be at least 2, got {r.n}",
    )
    for key in ("mean_range", "entropy_range"):
        limits = f[key]
        yield bool(limits) and not f.by, f"config.filter.{key}={limits} needs config.filter.by"
        yield (
            bool(limits) and not (len(limits) == 2 and limits[0] <= limits[1]),
            f"config.filter.{key}={limits} must be two numbers, the lowest and the highest",
        )
    yield (
        bool(f.by and c.total_epochs),
        f"config.total_epochs={c.total_epochs} with config.filter.by={f.by!r}: a step reads as many prompts as it "
        "needs; set config.total_steps instead",
    )
    yield f.gen_batch_size > 0 and not f.by, f"config.filter.gen_batch_size={f.gen_batch_size} needs config.filter.by"
    yield (
        c.reward.overlong_buffer > c.data.max_response_length,
        f"config.reward.overlong_buffer={c.reward.overlong_buffer} is more than config.data.max_response_length="
        f"{c.data.max_response_length}",
    )
    yield (
        a.kl_target > 0 and not a.kl_reward_coef,
        f"config.algorithm.kl_target={a.kl_target} steers the KL in the reward: set "
        "config.algorithm.kl_reward_coef, the weight to begin with",
    )
    yield (
        a.advantage == "gdpo" and not a.components,
        "config.algorithm.advantage='gdpo' needs config.algorithm.components: the names of the reward components",
    )
    yield from _correction(k, a)


def _correction(k: Config, a: Config) -> Iterator[tuple[bool, str]]:
    from jaxrl_llm.algorithms import correction
    from jaxrl_llm.algorithms.policy_losses import WITHOUT_RATIO

    try:
        correction.check(k.rollout_is, k.rollout_is_threshold, k.rollout_rs, k.rollout_rs_threshold)
    except UserError as error:
        yield True, f"config.rollout_correction: {error}"
    yield (
        k.bypass and bool(k.rollout_is) and a.loss not in WITHOUT_RATIO,
        f"config.rollout_correction.bypass=True: the ratio of config.algorithm.loss={a.loss!r} is to the sampler "
        f"already, and config.rollout_correction.rollout_is={k.rollout_is!r} would correct twice; it goes with "
        f"{' and '.join(WITHOUT_RATIO)}",
    )
    yield (
        k.bypass and a.advantage in ("optimal_token_baseline", "tir_optimal_token_baseline"),
        f"config.rollout_correction.bypass=True leaves out the forward pass that config.algorithm.advantage="
        f"{a.advantage!r} needs",
    )


def _choices(c: Config) -> Iterator[tuple[bool, str]]:
    from jaxrl_llm.algorithms.aggregation import AGGREGATIONS
    from jaxrl_llm.algorithms.kl import EXACT, KL_ESTIMATORS
    from jaxrl_llm.algorithms.reweighting import METHODS
    from jaxrl_llm.models.attention import PROGRAMS

    for key, valid in {
        "task": ("rl", "sft"),
        "model.dtype": ("float32", "bfloat16"),
        "model.remat": ("none", "dots", "full"),
        "model.attention": PROGRAMS,
        "rollout.engine": ("jax",),
        "rollout.dtype": ("float32", "bfloat16"),
        "data.prompt_style": ("auto", "chat", "plain"),
        "data.overlong": ("drop", "error"),
        "data.remainder": ("drop", "carry"),
        "optimizer.schedule": ("constant", "cosine", "linear"),
        "optimizer.first_moment_dtype": ("float32", "bfloat16"),
        "algorithm.aggregation": AGGREGATIONS,
        "algorithm.kl_estimator": (*KL_ESTIMATORS, EXACT),
        "algorithm.kl_reward_estimator": ("k1", "abs", "k2", "k3", "low_var_kl"),
        "algorithm.reweight": ("", *METHODS),
        "filter.at_bound": ("fill", "error"),
        "critic.aggregation": AGGREGATIONS,
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
        "algorithm.clip_ratio_low algorithm.clip_ratio_high algorithm.f_norm algorithm.tau_pos algorithm.tau_neg "
        "algorithm.kl_horizon filter.max_batches critic.learning_rate critic.epochs critic.value_clip "
        "prime.learning_rate prime.beta"
    )
    for key in positive.split():
        yield flat[key] <= 0, f"config.{key} must be more than 0, got {flat[key]}"
    not_negative = (
        "total_steps total_epochs data.val_limit rollout.tensor rollout.top_k eval.every eval.temperature eval.top_k "
        "checkpoint.every checkpoint.keep_best optimizer.warmup_steps optimizer.weight_decay optimizer.max_grad_norm "
        "log.samples_every log.samples algorithm.length_norm algorithm.kl_loss_coef algorithm.kl_reward_coef "
        "algorithm.kl_target algorithm.clip_cov_ratio algorithm.kl_cov_ratio algorithm.ppo_kl_coef algorithm.dro_beta "
        "algorithm.gamma algorithm.lam algorithm.reweight_power reward.overlong_buffer reward.overlong_factor "
        "filter.gen_batch_size critic.warmup_steps seed optimizer.beta1 optimizer.beta2 rollout.min_p "
        "optimizer.final_fraction"
    )
    for key in not_negative.split():
        yield flat[key] < 0, f"config.{key} must not be negative, got {flat[key]}"
    for key in ("rollout.top_p", "eval.top_p"):
        yield not 0 < flat[key] <= 1, f"config.{key} must be above 0 and at most 1, got {flat[key]}"
    for key in ("algorithm.gamma", "algorithm.lam", "algorithm.clip_cov_ratio", "algorithm.kl_cov_ratio"):
        yield flat[key] > 1, f"config.{key} must be at most 1, got {flat[key]}"
    yield flat["optimizer.final_fraction"] > 1, "config.optimizer.final_fraction must be at most 1"
    for key in ("rollout.min_p", "optimizer.beta1", "optimizer.beta2"):
        yield flat[key] >= 1, f"config.{key} must be below 1, got {flat[key]}"
    yield (
        c.algorithm.clip_ratio_c <= 1,
        f"config.algorithm.clip_ratio_c must be above 1, got {c.algorithm.clip_ratio_c}",
    )
