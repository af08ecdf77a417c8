"""Both sides of a run, estimated by formula: sizes are exact where the layout gives them, the rest is `analytic`."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrl_llm import assemble, placement
from jaxrl_llm.assemble_learner import objective, programs
from jaxrl_llm.config import Config
from jaxrl_llm.planning import analytic, shapes
from jaxrl_llm.planning.analytic import Estimate, Parts
from jaxrl_llm.planning.chips import Topology
from jaxrl_llm.planning.report import Program
from jaxrl_llm.planning.shapes import Workload, bytes_a_device
from jaxrl_llm.planning.sides import (
    WORKING,
    Say,
    Side,
    decoded_tokens,
    forward_models,
    held_by_learner,
    mean_context,
    prefills,
)
from jaxrl_llm.policy import Source
from jaxrl_llm.sharding.mesh import abstract_mesh

_WIDTH = {"float32": 4, "bfloat16": 2}


def learner(c: Config, source: Source, on: Topology, w: Workload, say: Say) -> Side:
    """The training side: log-probabilities and updates."""
    mesh = abstract_mesh(c.mesh.to_dict(), on.count, on.chip.name)
    placement.check_rows(c, mesh)
    made = programs(c, source, mesh, objective(c), max(c.total_steps, 1))
    config, width = made.actor.model.config, _WIDTH[c.model.dtype]
    parts = Parts(*(mesh.shape[axis] for axis in Parts._fields))
    out: dict[str, Program] = {}
    if models := forward_models(made.objective):
        estimate = analytic.logprobs(config, w, parts, width=width, chunk=c.model.logits_chunk, models=models)
        out["log-probs"] = _program(on, estimate, models * shapes.forward_flops(config, w) / on.count, 1)
    estimate = analytic.update(config, w, parts, width=width, remat=c.model.remat, chunk=c.model.logits_chunk)
    flops, updates = shapes.training_flops(config, w) / w.mini_batches / on.count, w.mini_batches * w.epochs
    out["update"] = _program(on, estimate, flops, updates)
    for model in made.update_beside:
        updates = w.mini_batches * (c.critic.epochs if model == "critic" else 1)
        out[f"update of the {model}"] = _program(on, estimate, flops, updates)
    phases = {}
    for name, program in out.items():
        gradients = float(bytes_a_device(made.abstract.params)) if "update" in name else 0.0
        phases[name] = {"gradients": gradients, WORKING: max(program.extra - gradients, 0.0)}
    return Side(held_by_learner(made), phases, out, made.actor.model.attention)


def engine(c: Config, source: Source, on: Topology, axes: Mapping[str, int], w: Workload, say: Say) -> Side:
    """The engine's side: reading prompts and decoding. `axes`: of its mesh."""
    mesh = abstract_mesh(axes, on.count, on.chip.name)
    model = placement.inference_model(c, source, mesh)
    made = assemble.engine(c, source, model, mesh).programs
    weights = float(bytes_a_device(placement.abstract_weights(model, mesh)))
    cache = float(bytes_a_device(made.abstract_cache))
    data, tensor, width = on.count // mesh.shape["tensor"], mesh.shape["tensor"], _WIDTH[c.rollout.dtype]
    config, prompts, seen = model.config, made.prefill_batch, mean_context(w)
    read = analytic.prefill(config, prompts, w.prompt_length, data=data, tensor=tensor, width=width)
    flops = shapes.prefill_flops(config, prompts, w.prompt_length) / on.count
    prefill = _program(on, read, flops, prefills(w, prompts), weights)
    token = analytic.decode(config, made.slots, w.length, data=data, tensor=tensor, width=width)
    flops = shapes.decode_flops(config, made.slots, int(seen * w.length)) / on.count
    decode = _program(on, token, flops, decoded_tokens(w, made.slots), weights + seen * cache)
    working = {"KV cache": cache, WORKING: max(prefill.extra, decode.extra)}
    return Side(
        {"rollout weights": weights}, {"generation": working}, {"prefill": prefill, "decode": decode}, model.attention
    )


def _program(on: Topology, estimate: Estimate, model_flops: float, calls: float, memory_bytes: float = 0.0) -> Program:
    return Program(
        on, calls, estimate.extra, estimate.flops, model_flops, estimate.collective_bytes, memory_bytes, None
    )
