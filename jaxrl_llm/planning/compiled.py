"""Both sides of a run, compiled from shapes alone by the compiler of their devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm import assemble, placement
from jaxrl_llm.assemble_learner import objective, programs
from jaxrl_llm.config import Config
from jaxrl_llm.models.attention import splash_shape
from jaxrl_llm.models.config import DecoderConfig
from jaxrl_llm.planning import programs as planned
from jaxrl_llm.planning import shapes
from jaxrl_llm.planning.chips import Topology
from jaxrl_llm.planning.programs import Compiled, DoesNotFit, compile_program
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
from jaxrl_llm.policy import Source, inference_shardings
from jaxrl_llm.rollout.programs import round_up
from jaxrl_llm.sharding.mesh import make_mesh
from jaxrl_llm.sharding.reshard import Reshard


class _Rows(NamedTuple):
    """The rows that one device's attention kernels read in one call."""

    config: DecoderConfig
    rows: float
    length: int
    context: int
    tensor: int

    def flops(self, kernels: dict[str, int]) -> float:
        """Of calls of the TPU kernel, which the compiler does not count: whole blocks, heads as wide as its lanes."""
        block, width = splash_shape(self.length, self.context, self.config.head_dim)
        c, total = self.config, 0.0
        for name, calls in kernels.items():
            products = 5 if "dkv" in name else 2  # scores, weights; backward also by values, keys and queries
            pairs = sum(shapes.pairs(self.length, window) + self.length * block / 2 for window in c.windows)
            one = 2.0 * pairs / c.num_layers * c.num_heads * width * self.rows / (self.context * self.tensor)
            total += calls * products * one
        return total


def learner(c: Config, source: Source, on: Topology, w: Workload, say: Say) -> Side:
    """The training side: log-probabilities and updates."""
    mesh = placement.training_mesh(c, on.devices)
    made = programs(c, source, mesh, objective(c), max(c.total_steps, 1))
    config, advantage = made.actor.model.config, made.objective.advantage
    spec = assemble.pack_spec(c, 0, advantage.reads if advantage else frozenset())
    batch = planned.abstract_batch(made, spec, w.row_length)
    rows = w.rows / (mesh.shape["data"] * mesh.shape["fsdp"])
    kernels = _Rows(config, rows, w.row_length, mesh.shape["context"], mesh.shape["tensor"])

    def compiled(name: str, lowered: Any, model_flops: float, calls: float) -> Program:
        say(f"compiling {name} for {on.name}")
        result = compile_program(lowered, unknown_trips=w.micro_batches)
        return _program(on, result, model_flops / mesh.size, calls, kernels)

    out: dict[str, Program] = {}
    if advantage is not None:
        flops = forward_models(made.objective) * shapes.forward_flops(config, w)
        out["log-probs"] = compiled("log-probs", planned.lower_prepare(made, batch), flops, 1)
    flops, updates = shapes.training_flops(config, w) / w.mini_batches, w.mini_batches * w.epochs
    out["update"] = compiled("update", planned.lower_update(made, batch), flops, updates)
    for model in made.update_beside:
        lowered = planned.lower_update_beside(made, batch, model)
        updates = w.mini_batches * (c.critic.epochs if model == "critic" else 1)
        out[f"update of the {model}"] = compiled(f"update of the {model}", lowered, flops, updates)
    phases = {}
    for name, program in out.items():
        gradients = min(float(bytes_a_device(made.abstract.params)), program.extra) if "update" in name else 0.0
        phases[name] = {"gradients": gradients, WORKING: program.extra - gradients}
    held = held_by_learner(made) | {"batch": float(bytes_a_device(batch))}
    return Side(held, phases, out, made.actor.model.attention)


def engine(c: Config, source: Source, on: Topology, axes: Mapping[str, int], w: Workload, say: Say) -> Side:
    """The engine's side: reading prompts and decoding. `axes`: of its mesh."""
    assert on.devices is not None
    mesh = make_mesh(axes, on.devices)
    model = placement.inference_model(c, source, mesh)
    made = assemble.engine(c, source, model, mesh).programs
    params = placement.abstract_weights(model, mesh)
    weights, cache = float(bytes_a_device(params)), float(bytes_a_device(made.abstract_cache))
    prompts, parts = made.prefill_batch, mesh.size // mesh.shape["tensor"]
    kernels = _Rows(model.config, prompts / parts, w.prompt_length, 1, mesh.shape["tensor"])
    say(f"compiling prefill for {on.name}")
    result = compile_program(planned.lower_prefill(made, params, round_up(w.prompt_length, 8)))
    flops = shapes.prefill_flops(model.config, prompts, w.prompt_length) / mesh.size
    prefill = _program(on, result, flops, prefills(w, prompts), kernels, weights)
    say(f"compiling decode for {on.name}")
    result = compile_program(planned.lower_decode(made, params))
    seen = mean_context(w)
    flops = shapes.decode_flops(model.config, made.slots, int(seen * w.length)) / mesh.size
    decode = _program(on, result, flops, decoded_tokens(w, made.slots), kernels, weights + seen * cache)
    working = {"KV cache": cache, WORKING: max(prefill.extra, decode.extra)}
    return Side(
        {"rollout weights": weights}, {"generation": working}, {"prefill": prefill, "decode": decode}, model.attention
    )


def weight_sync(c: Config, source: Source, on: Topology, say: Say) -> Program:
    """From the learner's layout to the engine's, on the same devices."""
    mesh = placement.training_mesh(c, on.devices)
    to = placement.inference_mesh(c, mesh)
    model = placement.inference_model(c, source, to)
    params = placement.abstract_weights(model, mesh, training=True)
    say(f"compiling the weight sync for {on.name}")
    result = compile_program(Reshard(params, inference_shardings(model, to), model.dtype).program.lower(params))
    return _program(on, result, 0.0, 1, None)


def _program(
    on: Topology,
    compiled: Compiled | DoesNotFit,
    model_flops: float,
    calls: float,
    kernels: _Rows | None,
    memory_bytes: float = 0.0,
) -> Program:
    if isinstance(compiled, DoesNotFit):
        return Program(on, calls, math.inf, 0.0, model_flops, {}, memory_bytes, compiled)
    cost = compiled.cost
    flops = cost.flops + (kernels.flops(cost.kernels) if kernels else 0.0)
    extra = float(compiled.peak - compiled.arguments)
    return Program(on, calls, extra, flops, model_flops, cost.collective_bytes, memory_bytes, compiled)
