"""Checkpoints: the whole state of a run, written by Orbax in the background and visible only when complete."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxrl_llm.types import TrainState, UserError

logger = logging.getLogger("jaxrl_llm.checkpoint")


def _best(metrics: Mapping[str, float]) -> float:
    return metrics["best"]


class Checkpoints:
    """The checkpoints of one run, `run_dir/checkpoints/STEP`."""

    def __init__(self, run_dir: Path, *, keep_last: int, keep_best: int, best_metric: str):
        """Keeps the newest `keep_last`, and `keep_best` more by the highest `best_metric` ("": the first val-core
        metric given to `save`)."""
        self.folder = run_dir.absolute() / "checkpoints"
        self._best_metric = best_metric
        policies: list[Any] = [ocp.checkpoint_managers.LatestN(keep_last)]
        if keep_best:
            policies.append(
                ocp.checkpoint_managers.BestN(get_metric_fn=_best, n=keep_best, keep_checkpoints_without_metrics=False)
            )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.AnyPreservationPolicy(policies),
            best_fn=_best if keep_best else None,  # without it metrics are not written, and a resume forgets the best
            save_decision_policy=None,
            enable_async_checkpointing=True,
        )
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The newest complete checkpoint's step."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, rest: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Starts writing; returns when the arrays have been copied. `rest`: JSON values (data position, config)."""
        if not self._best_metric:
            self._best_metric = next((name for name in metrics if name.startswith("val-core/")), "")
        best = metrics.get(self._best_metric)
        if metrics and best is None:
            logger.warning(
                "checkpoint %d counts as the worst: config.checkpoint.best_metric=%r is not among %s",
                step,
                self._best_metric,
                ", ".join(metrics),
            )
        self._manager.save(
            step,
            args=ocp.args.Composite(state=ocp.args.StandardSave(state._asdict()), rest=ocp.args.JsonSave(dict(rest))),
            metrics=None if best is None else {"best": float(best)},
            force=True,
        )

    def rest(self, step: int) -> dict[str, Any]:
        """What `save` got beside the state."""
        return self._manager.restore(step, args=ocp.args.Composite(rest=ocp.args.JsonRestore()))["rest"]

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of a checkpoint; arrays come into the shardings of `abstract`."""
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract._asdict()))
        try:
            restored = self._manager.restore(step, args=args)
        except (ValueError, KeyError, FileNotFoundError) as error:
            raise UserError(
                f"checkpoint {self.folder / str(step)} does not fit this run's model and optimizer, or is "
                f"damaged: {error}"
            ) from error
        return TrainState(**restored["state"])

    def params(self, step: int, abstract_params: Any) -> Any:
        """The parameters of a checkpoint alone."""
        if step not in self._manager.all_steps():
            there = ", ".join(map(str, self._manager.all_steps())) or "none"
            raise UserError(f"{self.folder} has no checkpoint of step {step}; there are: {there}")
        restored = ocp.PyTreeCheckpointer().restore(
            self.folder / str(step) / "state",
            args=ocp.args.PyTreeRestore(
                item={"params": abstract_params},
                restore_args={"params": ocp.checkpoint_utils.construct_restore_args(abstract_params)},
                partial_restore=True,
            ),
        )
        return restored["params"]

    def close(self) -> None:
        """Waits until everything is on disk."""
        self._manager.wait_until_finished()
        self._manager.close()
