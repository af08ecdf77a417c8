"""What a plan found: memory by phase, work and time by program, a verdict, and which keys to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxrl_llm.config import Config
from jaxrl_llm.planning.chips import GIB, Topology
from jaxrl_llm.planning.programs import Compiled, DoesNotFit
from jaxrl_llm.planning.shapes import Workload


@dataclass(frozen=True)
class Program:
    """One program; all figures are one device's, of one call."""

    topology: Topology
    calls: float  # in a training step
    extra: float  # bytes beside its arguments; inf: the compiler refuses it
    flops: float
    model_flops: float  # what is asked for: without what is computed twice
    collective_bytes: dict[str, float]  # by kind
    memory_bytes: float  # that it reads at least
    compiled: Compiled | DoesNotFit | None  # None: estimated

    @property
    def seconds(self) -> dict[str, float]:
        """That each resource is busy, at the chip's peak rates."""
        chip = self.topology.chip
        rate = chip.network_rate if chip.node and self.topology.count > chip.node else chip.link_rate
        return {
            "compute": self.flops / chip.flops,
            "memory": self.memory_bytes / chip.hbm_rate,
            "collectives": sum(self.collective_bytes.values()) / rate,
        }

    @property
    def roofline(self) -> float:
        """Seconds of a call, if the busiest resource hides the others."""
        return max(self.seconds.values())


@dataclass(frozen=True)
class Place:
    """Devices that hold the same: all of them, or the learner's, or the engine's."""

    name: str
    topology: Topology
    resident: dict[str, float]  # bytes on a device in every phase, by kind
    phases: dict[str, dict[str, float]]  # bytes on a device beside these, by kind

    def total(self, phase: str) -> float:
        """Bytes on a device in a phase."""
        return sum(self.resident.values()) + sum(self.phases[phase].values())

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.total)

    @property
    def fits(self) -> bool:
        """Whether every phase does."""
        return self.total(self.peak) <= self.topology.chip.hbm


@dataclass(frozen=True)
class Plan:
    """All of it."""

    config: Config
    parameters: int
    workload: Workload
    attention: str  # of the learner's rows
    places: tuple[Place, ...]
    programs: dict[str, Program]

    @property
    def fits(self) -> bool:
        """Whether the run does."""
        return all(place.fits for place in self.places)

    @property
    def step_seconds(self) -> float:
        """Of a training step, one program after the other."""
        return sum(program.calls * program.roofline for program in self.programs.values())

    @property
    def devices(self) -> int:
        """In all."""
        return sum(place.topology.count for place in self.places)


def suggestions(plan: Plan) -> list[str]:
    """Which keys to change where something does not fit, the one that gives most first."""
    out: list[str] = []
    for place in plan.places:
        if not place.fits:
            phase = place.peak
            parts = {**place.resident, **place.phases[phase]}
            for kind in sorted(parts, key=lambda kind: -parts[kind]):
                out += [text for text in _advice(plan.config, kind) if text not in out]
    return out


def _advice(c: Config, kind: str) -> Iterator[str]:
    if kind == "activations and temporaries":
        if c.model.remat != "full":
            yield "config.model.remat='full': keep only each layer's input"
        if c.model.dtype != "bfloat16":
            yield "config.model.dtype='bfloat16': activations and gathered weights of half the size"
        yield f"config.mesh.context above {c.mesh.context}, or config.mesh.tensor: less of each row on a device"
        if c.model.logits_chunk > 64:
            yield f"config.model.logits_chunk below {c.model.logits_chunk}: fewer logits at the same time"
        yield f"config.learner.micro_batch_rows below {c.learner.micro_batch_rows}, if a device has several rows"
    elif kind in ("parameters", "optimizer", "gradients", "reference"):
        if kind == "optimizer" and c.optimizer.first_moment_dtype != "bfloat16":
            yield "config.optimizer.first_moment_dtype='bfloat16': two bytes less a parameter"
        if c.mesh.data > 1:
            yield f"config.mesh.data=1 and more config.mesh.fsdp: each of the {c.mesh.data} replicas holds all of it"
        yield "a larger topology, with its devices on config.mesh.fsdp"
    elif kind == "rollout weights":
        if c.rollout.dtype != "bfloat16":
            yield "config.rollout.dtype='bfloat16': weights and cache of half the size"
        yield "config.rollout.tensor larger: the engine's weights cut over more devices"
    elif kind == "KV cache":
        yield f"config.rollout.slots below {c.rollout.slots}: fewer sequences at the same time"


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON object; sizes in bytes, times in seconds, of one device where nothing else is said."""
    w = plan.workload
    return {
        "fits": plan.fits,
        "parameters": plan.parameters,
        "attention": plan.attention,
        "places": {
            place.name: {
                "topology": place.topology.name,
                "devices": place.topology.count,
                "compiled": place.topology.compiled,
                "hbm_bytes": place.topology.chip.hbm if math.isfinite(place.topology.chip.hbm) else None,
                "fits": place.fits,
                "peak_phase": place.peak,
                "resident_bytes": {kind: int(size) for kind, size in place.resident.items()},
                "phases": {
                    phase: {
                        "bytes": {kind: _whole(size) for kind, size in kinds.items()},
                        "total_bytes": _whole(place.total(phase)),
                    }
                    for phase, kinds in place.phases.items()
                },
            }
            for place in plan.places
        },
        "programs": {name: _program_json(program) for name, program in plan.programs.items()},
        "step": {
            "tokens": w.tokens,
            "seconds": _finite(plan.step_seconds),
            "tokens_per_second": _finite(w.tokens / plan.step_seconds) if plan.step_seconds else None,
        },
        "suggestions": suggestions(plan),
    }


def _program_json(program: Program) -> dict[str, Any]:
    out: dict[str, Any] = {
        "calls_per_step": program.calls,
        "flops": program.flops,
        "model_flops": program.model_flops,
        "model_flop_ratio": program.model_flops / program.flops if program.flops else None,
        "collective_bytes": program.collective_bytes,
        "seconds": {what: _finite(seconds) for what, seconds in program.seconds.items()},
        "roofline_seconds": _finite(program.roofline),
    }
    if isinstance(program.compiled, Compiled):
        c = program.compiled
        out["compiler"] = {
            "arguments_bytes": c.arguments,
            "outputs_bytes": c.outputs,
            "aliased_bytes": c.aliased,
            "temporaries_bytes": c.temporaries,
            "peak_bytes": c.peak,
            "hlo_bytes": c.text,
            "seconds": round(c.seconds, 1),
            "kernels": c.cost.kernels,
            "largest_arrays": c.cost.arrays,
            "matrix_products_not_counted": c.cost.uncounted,
        }
    elif program.compiled is not None:
        out["refused"] = {"needed": program.compiled.needed, "largest_arrays": list(program.compiled.largest)}
    return out


def _whole(size: float) -> int | None:
    return int(size) if math.isfinite(size) else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def show(plan: Plan, console: Console) -> None:
    """The plan as tables."""
    w = plan.workload
    console.print(
        f"{plan.parameters:,} parameters; a step: {w.prompts} prompts x {w.samples} samples of {w.prompt_length} + "
        f"{w.response_length} tokens, {w.mini_batches} updates x {w.epochs} epochs of {w.micro_batches} "
        f"micro-batches of {w.rows} rows x {w.row_length}; attention: {plan.attention}"
    )
    for place in plan.places:
        _show_memory(place, console)
    _show_programs(plan, console)
    if math.isfinite(plan.step_seconds):
        console.print(
            f"a step at the roofline: {plan.step_seconds:.2f} s, {w.tokens / plan.step_seconds:,.0f} tokens/s, "
            f"{w.tokens / plan.step_seconds / plan.devices:,.0f} a device"
        )
    for text in suggestions(plan):
        console.print(f"  change: {text}")
    console.print("fits" if plan.fits else "does NOT fit", style="bold green" if plan.fits else "bold red")


def _show_memory(place: Place, console: Console) -> None:
    how = "compiled for it" if place.topology.compiled else "estimated by formula: no compiler for it here"
    table = Table(title=f"{place.name}: {place.topology.name}, {place.topology.count} devices, {how}; GiB a device")
    table.add_column("")
    for phase in place.phases:
        table.add_column(phase, justify="right")
    kinds = dict.fromkeys([*place.resident, *(kind for phase in place.phases.values() for kind in phase)])
    for kind in kinds:
        sizes = [place.resident.get(kind, place.phases[phase].get(kind, 0.0)) for phase in place.phases]
        table.add_row(kind, *(_gib(size) for size in sizes))
    table.add_section()
    table.add_row("total", *(_gib(place.total(phase)) for phase in place.phases))
    hbm = place.topology.chip.hbm
    verdicts = ["fits" if place.total(phase) <= hbm else "does not fit" for phase in place.phases]
    table.add_row(f"of {_gib(hbm)}" if math.isfinite(hbm) else "", *verdicts)
    console.print(table)
    for phase in place.phases:
        if not math.isfinite(place.total(phase)):
            console.print(f"{phase}: the compiler refuses it")


def _show_programs(plan: Plan, console: Console) -> None:
    table = Table(title="one call of each program, on one device")
    for name in ("", "calls a step", "TFLOP", "model FLOPs", "collectives GiB", "seconds at the roofline", "bound by"):
        table.add_column(name, justify="right" if name else "left")
    for name, program in plan.programs.items():
        refused = isinstance(program.compiled, DoesNotFit)
        ratio = f"{program.model_flops / program.flops:.0%}" if program.flops else ""
        seconds = program.seconds
        table.add_row(
            name,
            f"{program.calls:,.0f}",
            "refused" if refused else f"{program.flops / 1e12:.4g}",
            "" if refused else ratio,
            "" if refused else f"{sum(program.collective_bytes.values()) / GIB:.3g}",
            "" if refused or not math.isfinite(program.roofline) else f"{program.roofline:.4g}",
            "" if refused or not math.isfinite(program.roofline) else max(seconds, key=lambda what: seconds[what]),
        )
    console.print(table)
    for name, program in plan.programs.items():
        if isinstance(program.compiled, DoesNotFit):
            console.print(f"{name}: {program.compiled.needed}; largest: {', '.join(program.compiled.largest)}")


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if math.isfinite(size) else "too much"
