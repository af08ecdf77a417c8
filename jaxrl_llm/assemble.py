"""The door: from a validated config to the parts of a run. Commands come through here; below, nothing sees a config."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import controller, provenance, resume
from jaxrl_llm.assemble_learner import learner, objective, programs
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.collect import Collector, GroupFilter, LengthPenalty
from jaxrl_llm.config import Config
from jaxrl_llm.config_checks import validate
from jaxrl_llm.data import demonstrations
from jaxrl_llm.data.packing import PackSpec, default_row_lengths
from jaxrl_llm.data.stream import Prompts, PromptStream, load_prompts
from jaxrl_llm.evaluation import evaluate
from jaxrl_llm.interrupts import Interrupts
from jaxrl_llm.learner.learner import Learner
from jaxrl_llm.metrics import Writer
from jaxrl_llm.models.decoder import Model
from jaxrl_llm.output import write_whole
from jaxrl_llm.placement import check_weights, inference_mesh, inference_model, training_mesh
from jaxrl_llm.policy import Source, critic_source, decoder, inference_shardings, model_source
from jaxrl_llm.pools import LocalPool, Pool
from jaxrl_llm.rewards.pool import RewardPool
from jaxrl_llm.rollout.engine import Sampling
from jaxrl_llm.rollout.jax_engine import JaxEngine
from jaxrl_llm.sharding.reshard import Reshard
from jaxrl_llm.sharding.rules import AnyMesh
from jaxrl_llm.types import UserError


def mesh_of(c: Config) -> Mesh:
    """The learner's mesh over all devices, checked against the batch."""
    if jax.process_count() > 1:
        raise UserError(f"this is one of {jax.process_count()} processes; a run on several hosts is not supported")
    if (
        c.deterministic
        and jax.default_backend() == "gpu"
        and "gpu_deterministic_ops=true" not in os.environ.get("XLA_FLAGS", "")
    ):
        raise UserError(
            "config.deterministic=True needs XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment before JAX "
            "starts; python -m jaxrl_llm.train sets it by itself"
        )
    return training_mesh(c)


def prompts(c: Config, tokenizer: Any, paths: tuple[str, ...], *, sft: bool, limit: int = 0) -> Prompts:
    """The rows of some data files, tokenized."""
    d = c.data
    return load_prompts(
        paths,
        tokenizer,
        max_prompt_length=d.max_prompt_length,
        max_response_length=d.max_response_length,
        prompt_key=d.prompt_key,
        answer_key=None if sft else d.answer_key or None,
        response_key=d.response_key if sft else None,
        source_key=d.source_key,
        system_prompt=d.system_prompt or None,
        prompt_style=d.prompt_style,
        template_kwargs=d.template_kwargs.to_dict(),
        overlong=d.overlong,
        limit=limit or None,
    )


def engine(c: Config, source: Source, model: Model, mesh: AnyMesh) -> JaxEngine:
    """The inference engine, still without weights."""
    return JaxEngine(
        model,
        mesh,
        eos_ids=source.eos_ids,
        decode_text=lambda ids: source.tokenizer.decode(ids, skip_special_tokens=True),
        max_prompt_length=c.data.max_prompt_length,
        max_response_length=c.data.max_response_length,
        slots=c.rollout.slots,
        prefill_batch=c.rollout.prefill_batch,
        steps_per_dispatch=c.rollout.steps_per_dispatch,
    )


def reward_pool(c: Config) -> RewardPool:
    """The reward workers, started."""
    weights = c.reward.weights.to_dict()
    if c.reward.overlong_buffer:
        weights.pop(LengthPenalty.NAME, None)  # no function's
    return RewardPool(
        c.reward.functions,
        weights=weights,
        kwargs=c.reward.kwargs.to_dict(),
        workers=c.reward.workers,
        timeout_s=c.reward.timeout_s,
    )


def local_pool(
    c: Config, source: Source, mesh: Mesh, policy: Learner, rewards: RewardPool, console: Console
) -> LocalPool:
    """Learner and engine on one mesh of this process."""
    mesh = inference_mesh(c, mesh)
    model = inference_model(c, source, mesh)
    reshard = Reshard(policy.state.params, inference_shardings(model, mesh), model.dtype)
    console.out(f"attention: {policy.programs.actor.model.attention} in training, {model.attention} in the engine")
    gib = 2**30
    console.out(
        f"weight sync: {reshard.received_bytes / gib:.3f} GiB into the inference layout, of which "
        f"{reshard.lower_bound_bytes / gib:.3f} GiB come from other devices"
    )
    return LocalPool(policy, engine(c, source, model, mesh), reshard, rewards)


def pack_spec(c: Config, pad_id: int, reads: frozenset[str]) -> PackSpec:
    """The static shape of the batches. `reads`: what the advantage looks at."""
    n = 1 if c.task == "sft" else c.rollout.n
    longest = c.data.max_prompt_length + c.data.max_response_length
    return PackSpec(
        mini_batches=c.data.train_batch_size // c.learner.mini_batch_size,
        sequences=c.data.train_batch_size * n,
        rows=c.learner.micro_batch_rows,
        row_lengths=tuple(sorted(c.learner.row_lengths)) or default_row_lengths(longest),
        packing=c.learner.packing,
        pad_id=pad_id,
        mask_truncated=c.task == "rl" and c.algorithm.mask_truncated,
        components=tuple((name, float(c.reward.weights.get(name, 1.0))) for name in c.algorithm.components),
        baseline="baseline_rewards" in reads,
    )


def sampling(c: Config) -> Sampling:
    """How training samples."""
    r = c.rollout
    return Sampling(r.n, r.temperature, r.top_k, r.top_p, r.min_p, c.data.max_response_length, r.stop, c.seed)


def eval_sampling(c: Config) -> Sampling:
    """How evaluation samples; its noise is the same every time and has nothing to do with training's."""
    e = c.eval
    return Sampling(e.n, e.temperature, e.top_k, e.top_p, 0.0, c.data.max_response_length, c.rollout.stop, c.seed + 1)


def collector(c: Config, stream: PromptStream, pool: Pool, reads: frozenset[str]) -> Collector:
    """Where scored batches come from. SFT reads its rollouts from the data."""
    groups = c.data.train_batch_size
    if c.task == "sft":
        return Collector(stream, demonstrations.rollouts, demonstrations.ungraded, groups=groups)
    f, w = c.filter, c.reward
    penalty = LengthPenalty(
        c.data.max_response_length, w.overlong_buffer, w.overlong_factor, float(w.weights.get(LengthPenalty.NAME, 1.0))
    )
    greedy = replace(sampling(c), n=1, temperature=0.0)
    return Collector(
        stream,
        partial(pool.generate, sampling=sampling(c)),
        pool.score,
        groups=groups,
        group_filter=GroupFilter(f.by, f.mean_range, f.entropy_range, f.max_batches, f.at_bound == "fill")
        if f.by
        else None,
        penalty=penalty if w.overlong_buffer else None,
        greedy=partial(pool.generate, sampling=greedy) if "baseline_rewards" in reads else None,
    )


class Assembled(NamedTuple):
    """A run that is ready to start."""

    run: controller.Run
    run_dir: Path
    resources: ExitStack  # closes the reward workers, the checkpoints and the metric files, in the right order


def assemble(c: Config, console: Console, interrupts: Interrupts | None = None) -> Assembled:
    """Builds everything, in the order in which users' mistakes cost least: files and data first, then the devices'
    mesh and reward functions, then weights. Nothing is written before all but the weights has been checked."""
    validate(c)
    source = model_source(c)
    decoder(c, source, c.model.dtype)
    stream, held_out = _data(c, source, console)
    total_steps = c.total_steps or stream.steps(c.total_epochs)
    minimised = objective(c)
    reads = minimised.advantage.reads if minimised.advantage else frozenset()
    mesh = mesh_of(c)
    console.out(f"devices: {describe_devices(mesh)}")
    check_weights(c, source, mesh)
    if "values" in reads:
        check_weights(c, critic_source(c, source), mesh)
    with ExitStack() as resources:
        rewards = reward_pool(c)
        resources.callback(rewards.close)
        changes = resume.check(c, stream)
        resources.callback(resume.claim(Path(c.run_dir)).release)
        pool = local_pool(
            c, source, mesh, learner(c, source, programs(c, source, mesh, minimised, total_steps)), rewards, console
        )
        resources.callback(pool.close)
        rest = resume.restore(c, stream, pool) or {"step": 0, "skipped_steps": 0, "initial": pool.initial_checksum()}
        start = rest["step"]
        if start:
            console.out("\n  ".join([f"resuming after step {start}", *changes]))
        write_whole(Path(c.run_dir) / "config.json", configs.to_json(c))
        provenance.record(
            Path(c.run_dir),
            step=start,
            seed=c.seed,
            data={"train": stream.prompts.fingerprint, **({"val": held_out.fingerprint} if held_out else {})},
            specs=(*c.reward.functions, c.algorithm.loss, c.algorithm.advantage),
        )
        checkpoints = resume.open_checkpoints(c, held_out)
        resources.callback(checkpoints.close)
        writer = Writer(
            Path(c.run_dir),
            first_step=start,
            total_steps=total_steps,
            tensorboard=c.log.tensorboard,
            console=console,
            task=c.task,
        )
        resources.callback(writer.close)
        run = _run(
            c,
            source,
            reads,
            collector(c, stream, pool, reads),
            held_out,
            pool,
            checkpoints,
            writer,
            total_steps,
            rest,
            interrupts or Interrupts(),
        )
        return Assembled(run, Path(c.run_dir), resources.pop_all())


def _data(c: Config, source: Source, console: Console) -> tuple[PromptStream, Prompts | None]:
    """The training stream, and the held-out prompts if there are any; prints what was read and left out."""
    d = c.data
    stream = PromptStream(
        prompts(c, source.tokenizer, d.train, sft=c.task == "sft"),
        batch_size=c.filter.gen_batch_size or d.train_batch_size,
        seed=c.seed,
        shuffle=d.shuffle,
        remainder=d.remainder,
    )
    console.out(f"training data: {stream.prompts.describe()}; {stream.describe()}")
    if not d.val:
        return stream, None
    held_out = prompts(c, source.tokenizer, d.val, sft=False, limit=d.val_limit)
    console.out(f"evaluation data: {held_out.describe()}")
    return stream, held_out


def _run(
    c: Config,
    source: Source,
    reads: frozenset[str],
    collect: Collector,
    held_out: Prompts | None,
    pool: LocalPool,
    checkpoints: Checkpoints,
    writer: Writer,
    total_steps: int,
    rest: Mapping[str, Any],
    interrupts: Interrupts,
) -> controller.Run:
    """The controller's parts. SFT gives the engine weights only to measure them."""
    sft = c.task == "sft"

    def measure(step: int) -> dict[str, float]:
        assert held_out is not None
        if sft:
            pool.sync_weights(step)
        return evaluate(
            held_out,
            eval_sampling(c),
            generate=pool.generate,
            score=pool.score,
        )

    return controller.Run(
        collect=collect,
        sync=(lambda step: None) if sft else pool.sync_weights,
        evaluate=measure if held_out else None,
        pool=pool,
        pack_spec=pack_spec(c, source.tokenizer.pad_token_id, reads),
        checkpoints=checkpoints,
        writer=writer,
        interrupts=interrupts,
        total_steps=total_steps,
        start_step=rest["step"],
        initial=rest["initial"],
        skipped_steps=rest["skipped_steps"],
        max_skipped_steps=c.learner.max_skipped_steps,
        eval_before=c.eval.before_training and c.eval.every > 0,
        eval_every=c.eval.every,
        save_every=c.checkpoint.every,
        samples_every=0 if sft else c.log.samples_every,
        samples=c.log.samples,
        devices=jax.device_count(),
        saved_config=resume.saved(c),
    )


def describe_devices(mesh: Mesh) -> str:
    """One line: platform, number of devices, mesh."""
    axes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    shape = json.dumps(axes) if axes else "of one device"
    return f"{mesh.devices.size} x {mesh.devices.flat[0].device_kind}, mesh {shape}"
