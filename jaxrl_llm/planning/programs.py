"""Compiling the programs of a run from shapes alone, for devices that are not here."""

from __future__ import annotations

import re
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.data.packing import PackSpec
from jaxrl_llm.learner.programs import Programs
from jaxrl_llm.planning import hlo
from jaxrl_llm.planning.hlo import Cost
from jaxrl_llm.rollout.programs import Programs as EnginePrograms
from jaxrl_llm.rollout.programs import Slots
from jaxrl_llm.rollout.sampling import Filters
from jaxrl_llm.sharding.rules import replicated
from jaxrl_llm.types import SequenceBatch, TrainBatch


class Compiled(NamedTuple):
    """What the compiler says of a program, in bytes on one device."""

    arguments: int
    outputs: int
    aliased: int  # outputs that take the place of arguments
    temporaries: int
    peak: int  # of all of them at the same time
    text: int  # of the program, as HLO
    seconds: float  # that compiling took
    cost: Cost


class DoesNotFit(NamedTuple):
    """A program that the compiler refuses, because the devices have too little memory."""

    needed: str  # in the compiler's words
    largest: tuple[str, ...]  # arrays


def compile_program(lowered: Any, *, unknown_trips: int = 1) -> Compiled | DoesNotFit:
    """Compiles. `unknown_trips`: how often loops run whose trip count is data."""
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message or "hbm" not in message.lower():
            raise
        return DoesNotFit(*_refusal(message))
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    live = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Compiled(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        getattr(memory, "peak_memory_in_bytes", 0) or live + memory.temp_size_in_bytes,
        len(text),
        seconds,
        hlo.read(text, unknown_trips=unknown_trips),
    )


def _refusal(message: str) -> tuple[str, tuple[str, ...]]:
    found = re.search(r"Used [\d.]+[KMGT] of [\d.]+[KMGT] hbm|[^\n]*exceeds available HBM[^\n]*", message)
    shapes = re.findall(r"Size: (\S+)\n(?:.*\n){0,3}?\s*Shape: (\S+)", message)
    return found.group(0).strip() if found else message.splitlines()[0], tuple(f"{s} {size}" for size, s in shapes[:4])


def abstract_batch(programs: Programs, spec: PackSpec, length: int) -> SequenceBatch:
    """Shapes of a packed batch of rows of `length` tokens, where it lies."""
    A, M, B, S = spec.mini_batches, spec.micro_batches, spec.rows, spec.sequences

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = (A, M, B, length)
    batch = SequenceBatch(
        token_ids=array(jnp.int32, *rows),
        segment_ids=array(jnp.int32, *rows),
        positions=array(jnp.int32, *rows),
        sequence_ids=array(jnp.int32, *rows),
        action_mask=array(jnp.bool_, *rows),
        sampler_logprobs=array(jnp.float32, *rows),
        num_micro=array(jnp.int32, A),
        group_ids=array(jnp.int32, S),
        rewards=array(jnp.float32, S),
        valid=array(jnp.bool_, S),
        baseline_rewards=array(jnp.float32, S) if spec.baseline else None,
        components=array(jnp.float32, S, len(spec.components)) if spec.components else None,
        component_weights=array(jnp.float32, len(spec.components)) if spec.components else None,
    )
    return jax.tree.map(_placed, batch, programs.batch_shardings(batch))


def lower_prepare(programs: Programs, batch: SequenceBatch) -> Any:
    """Old and reference log-probabilities, values and advantages."""
    return programs.prepare.lower(programs.abstract, programs.abstract_reference, batch)


def lower_update(programs: Programs, batch: SequenceBatch) -> Any:
    """One mini-batch of the policy."""
    reference = programs.read_by_loss(programs.abstract_reference)
    return programs.update.lower(programs.abstract.actor, reference, *_completed(programs, batch))


def lower_update_beside(programs: Programs, batch: SequenceBatch, name: str) -> Any:
    """One mini-batch of the critic or the reward model."""
    return programs.update_beside[name].lower(getattr(programs.abstract, name), *_completed(programs, batch))


def _completed(programs: Programs, batch: SequenceBatch) -> tuple[TrainBatch, Any]:
    """What `prepare` makes of the batch, and the index of a mini-batch."""
    train = jax.eval_shape(programs.prepare, programs.abstract, programs.abstract_reference, batch)[0]
    index = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(programs.mesh))
    return jax.tree.map(_placed, train, programs.batch_shardings(train)), index


def lower_prefill(engine: EnginePrograms, params: Any, width: int) -> Any:
    """Reading prompts, padded to `width` tokens."""
    rows = engine.prompt_rows
    ids = jax.ShapeDtypeStruct((engine.prefill_batch, width), jnp.int32, sharding=rows)
    lengths = jax.ShapeDtypeStruct((engine.prefill_batch,), jnp.int32, sharding=rows)
    return engine.prefill.lower(params, ids, lengths)


def lower_decode(engine: EnginePrograms, params: Any) -> Any:
    """A dispatch that reads the whole cache."""
    S, everywhere = engine.slots, engine.everywhere

    def column(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((S,), dtype, sharding=everywhere)

    def scalar(dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((), dtype, sharding=everywhere)

    slots = Slots(*(column(dtype) for dtype in (jnp.int32, jnp.int32, jnp.int32, jnp.bool_, jnp.uint32)))
    filters = Filters(scalar(jnp.float32), scalar(jnp.int32), scalar(jnp.float32), scalar(jnp.float32))
    return engine.dispatch.lower(
        params, engine.abstract_cache, slots, column(jnp.bool_), filters, view=engine.length, filtered=False
    )


def _placed(shape: Any, sharding: Any) -> Any:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
