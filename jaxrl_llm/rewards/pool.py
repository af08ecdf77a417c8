"""The pool of processes that runs reward functions."""

from __future__ import annotations

import logging
import math
import multiprocessing
import pickle
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pebble

from jaxrl_llm.plugins import nearest
from jaxrl_llm.rewards import worker
from jaxrl_llm.rewards.loading import load
from jaxrl_llm.rewards.worker import Result
from jaxrl_llm.types import Rollout, Scored, UserError

logger = logging.getLogger("jaxrl_llm.rewards")

# Pebble asks a hung worker to end, waits this long (s), then kills it; meanwhile all others stand still.
pebble.CONSTS.term_timeout = 0.1

_LOGGED_FAILURES = 3  # a batch
_FAILED_BATCHES = 3  # in a row, before training on nothing is refused
_WEIGHED_BATCHES = 3  # until a weight must have met its component: sources of data may differ in what they give
_POOL_LOSSES = 3  # in a batch, before the workers are taken for unable to start


class RewardPool:
    """Scores rollouts with reward functions in worker processes, where they can hang, crash or leak.

    Every sample is one job, so that a time-out or a crash costs that sample alone; a job costs about 0.1 ms.
    `score` may be called from any thread; batches are scored one after the other. Workers are started by
    "spawn", which imports the module that was run as the main one again in each of them: a command that makes
    a pool should import what is slow, jax above all, inside its main function.
    """

    def __init__(
        self,
        functions: Sequence[str],
        *,
        weights: Mapping[str, float],
        kwargs: Mapping[str, Mapping[str, Any]] = {},
        workers: int,
        timeout_s: float,
    ):
        """`functions` as jaxrl_llm.rewards.loading.load takes them; `weights` by component name, 1 for those
        not named; `kwargs` by function name (what follows the colon, for a function from a file); `timeout_s`
        for one sample, all functions together. Raises UserError if any of it is wrong."""
        if workers < 1:
            raise UserError(f"reward pool: expected at least 1 worker, got workers={workers}")
        if not 0 < timeout_s < math.inf:
            raise UserError(f"reward pool: expected a time-out of more than 0 s, got timeout_s={timeout_s}")
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise UserError(f"reward pool: expected a finite number as the weight of {name!r}, got {weight!r}")
        self._weights = dict(weights)
        self._workers = workers
        self._timeout_s = timeout_s
        names = [spec.rpartition(":")[2] for spec in functions]
        self._check_names(functions, names, kwargs)
        # Loaded here too, so that mistakes show before any worker or model is started.
        loaded = [load(spec, kwargs.get(name, {})) for spec, name in zip(functions, names, strict=True)]
        self._names = ", ".join(names)
        self._initargs = ([(function.spec, function.kwargs) for function in loaded],)
        self._lock = threading.Lock()
        self._closed = False
        self._known: set[str] = set()  # components seen in the first batches
        self._weighed_batches = 0
        self._failed_batches = 0
        self._pool: pebble.ProcessPool | None = None  # started by the first batch

    def score(self, rollouts: Sequence[Rollout]) -> list[Scored]:
        """One Scored for each rollout, in the same order; the reward is the sum of weight times component. A
        sample that raises, hangs, kills its worker or returns anything but finite numbers has no components,
        reward None and the reason in `error`.

        Raises UserError if a weight names no component of the first three batches that could be scored, or if three
        batches in a row failed altogether.
        """
        with self._lock:
            self._refuse_if_closed()
            scored = [
                self._scored(rollout, result) for rollout, result in zip(rollouts, self._run(rollouts), strict=True)
            ]
            self._report_failures(scored)
            self._meet_components(scored)
        return scored

    def check_weights(self) -> None:
        """Raises UserError if a weight names no component that has been seen so far."""
        missing = [name for name in self._weights if name not in self._known]
        if missing and self._known:
            raise UserError(
                f"reward pool: there is a weight for {missing[0]!r}, which no reward function returned in "
                f"{self._weighed_batches} batches{nearest(missing[0], self._known)}. Known components: "
                f"{', '.join(sorted(self._known))}."
            )

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool was closed")

    def close(self) -> None:
        """Ends the workers, whatever they are doing. The pool scores nothing afterwards."""
        self._closed = True
        self._stop()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _check_names(functions: Sequence[str], names: Sequence[str], kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        if not functions:
            raise UserError("reward pool: expected at least one reward function, got none")
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    f"reward pool: two functions have the name {name!r}, which names their components: "
                    f"{', '.join(functions)}. Rename one of them."
                )
        for name in kwargs:
            if name not in names:
                raise UserError(
                    f"reward pool: kwargs for {name!r}, which is not among the reward "
                    f"functions{nearest(name, names)}: {', '.join(names)}"
                )

    def _start(self) -> pebble.ProcessPool:
        return pebble.ProcessPool(
            max_workers=self._workers,
            initializer=worker.start,
            initargs=self._initargs,
            context=multiprocessing.get_context("spawn"),
        )

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _run(self, rollouts: Sequence[Rollout]) -> list[Result]:
        results: list[Result | None] = []
        payloads: dict[int, bytes] = {}
        for index, rollout in enumerate(rollouts):
            try:
                payloads[index] = pickle.dumps(_sample(rollout))
                results.append(None)
            except Exception as error:  # what a dataset's columns hold is the user's
                results.append(Result({}, error=f"the sample cannot be pickled: {type(error).__name__}: {error}"))
        for _ in range(_POOL_LOSSES):
            pool = self._pool = self._pool or self._start()
            for index, future in self._futures(pool, payloads).items():
                result = self._result(future)
                if result is not None:
                    results[index] = result
                    del payloads[index]
            if not payloads:
                return [result for result in results if result is not None]
            self._refuse_if_closed()
            # Pebble gives the whole pool up when a worker dies that has no job, for example out of memory.
            logger.warning("the reward workers died and are started again")
            self._stop()
        raise UserError(
            f"reward pool: the workers for {self._names} died {_POOL_LOSSES} times before taking a sample. "
            "Their own messages are above; if there are none, look for a lack of memory."
        )

    def _futures(self, pool: pebble.ProcessPool, payloads: Mapping[int, bytes]) -> dict[int, Future]:
        """A future for each payload, done unless the pool was lost."""
        futures: dict[int, Future] = {}
        try:
            for index, payload in payloads.items():
                futures[index] = pool.schedule(worker.score, args=(payload,), timeout=self._timeout_s)
        except RuntimeError:  # how pebble says that the pool is lost
            return futures
        # A pool that is lost leaves jobs that it had not yet sent to a worker waiting for ever.
        while wait(futures.values(), timeout=1.0).not_done and pool.active:
            pass
        return futures

    def _result(self, future: Future) -> Result | None:
        """What the worker returned, or why it could not; None if the pool was lost and the sample with it."""
        if not future.done():
            return None
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, BrokenProcessPool):
            return None
        if isinstance(error, TimeoutError):
            return Result({}, error=f"{self._names}: timed out after {self._timeout_s:g} s")
        if isinstance(error, pebble.ProcessExpired):
            return Result({}, error=f"{self._names}: its process died {_cause_of_death(error.exitcode)}")
        raise error

    def _scored(self, rollout: Rollout, result: Result) -> Scored:
        if result.error is not None:
            return Scored(rollout, {}, None, result.error)
        reward = sum(self._weights.get(name, 1.0) * value for name, value in result.components.items())
        return Scored(rollout, result.components, reward, prediction=result.prediction)

    def _report_failures(self, scored: Sequence[Scored]) -> None:
        failed = [sample for sample in scored if sample.error is not None]
        for sample in failed[:_LOGGED_FAILURES]:
            logger.warning(
                "no reward for sample %d of prompt %d (%d of %d in this batch): %s; response: %r",
                sample.rollout.sample,
                sample.rollout.prompt.uid,
                len(failed),
                len(scored),
                sample.error,
                sample.rollout.text[:200],
            )
        if len(failed) < len(scored):
            self._failed_batches = 0
        elif failed:
            self._failed_batches += 1
        if failed and self._failed_batches >= _FAILED_BATCHES:
            raise UserError(
                f"reward pool: no sample of the last {self._failed_batches} batches could be scored by "
                f"{self._names}. The last error: {failed[-1].error}"
            )

    def _meet_components(self, scored: Sequence[Scored]) -> None:
        found = {name for sample in scored for name in sample.components}
        if not found or self._weighed_batches == _WEIGHED_BATCHES:
            return
        self._known |= found
        self._weighed_batches += 1
        if self._weighed_batches == _WEIGHED_BATCHES:
            self.check_weights()


def _sample(rollout: Rollout) -> dict[str, Any]:
    return {
        "data_source": rollout.prompt.data_source,
        "solution_str": rollout.text,
        "ground_truth": rollout.prompt.ground_truth,
        "extra_info": dict(rollout.prompt.extra_info),
        "prompt_str": rollout.prompt.text,
        "response_length": rollout.response_length,
    }


def _cause_of_death(exitcode: int) -> str:
    if exitcode < 0:
        return f"of {signal.Signals(-exitcode).name}"
    return f"with exit code {exitcode}"
