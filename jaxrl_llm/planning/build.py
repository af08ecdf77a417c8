"""From a config and topologies to a plan. Each side of a run is compiled where there is a compiler for its devices, and
estimated where there is none."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm import placement
from jaxrl_llm.config import Config
from jaxrl_llm.planning import compiled, estimated, shapes
from jaxrl_llm.planning.chips import Topology
from jaxrl_llm.planning.report import Place, Plan, Program
from jaxrl_llm.planning.sides import WORKING, Say, Side, workload
from jaxrl_llm.policy import Source, decoder_config


def make(c: Config, source: Source, learner_on: Topology, engine_on: Topology | None, say: Say) -> Plan:
    """The plan of a validated config. `engine_on`: devices of the engine's own; None: it shares the learner's. `say` is
    told what is being compiled."""
    w = workload(c)
    learner = (compiled if learner_on.compiled else estimated).learner(c, source, learner_on, w, say)
    programs = dict(learner.programs)
    places = [Place("learner", learner_on, learner.held, learner.phases)]
    if c.task == "rl":
        on = engine_on or learner_on
        axes = placement.inference_axes(c, learner_on.count)
        engine = (compiled if on.compiled else estimated).engine(c, source, on, axes, w, say)
        sync = _sync(c, source, learner_on, on, learner, engine, say)
        programs |= {"weight sync": sync, **engine.programs}
        places = _apart(learner, engine, sync, learner_on, on) if engine_on else [_together(learner, engine, sync, on)]
    parameters = shapes.parameters(decoder_config(c, source))
    return Plan(c, parameters, w, learner.attention, tuple(places), programs)


def _sync(
    c: Config, source: Source, learner_on: Topology, on: Topology, learner: Side, engine: Side, say: Say
) -> Program:
    """The weights' way from the learner to the engine."""
    if learner_on is on and on.compiled:
        return compiled.weight_sync(c, source, on, say)
    # Towards other devices the learner casts its parts, which then travel.
    cast = learner.held["parameters"] * jnp.dtype(c.rollout.dtype).itemsize / 4
    weights = engine.held["rollout weights"]
    return Program(on, 1, weights if learner_on is on else cast, 0.0, 0.0, {"all-gather": weights}, 0.0, None)


def _together(learner: Side, engine: Side, sync: Program, on: Topology) -> Place:
    """The engine's weights are there from the weight sync to the end of the generation."""
    weights = engine.held["rollout weights"]
    phases = {
        "generation": {"rollout weights": weights, **engine.phases["generation"]},
        **learner.phases,
        "weight sync": {"rollout weights": weights, WORKING: max(sync.extra - weights, 0.0)},
    }
    return Place("learner and engine", on, learner.held, phases)


def _apart(learner: Side, engine: Side, sync: Program, learner_on: Topology, engine_on: Topology) -> list[Place]:
    return [
        Place("learner", learner_on, learner.held, {**learner.phases, "weight sync": {WORKING: sync.extra}}),
        Place("engine", engine_on, engine.held, engine.phases),
    ]
