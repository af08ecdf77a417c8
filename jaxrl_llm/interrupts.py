"""SIGTERM, SIGHUP and Ctrl-C: the run ends with everything saved, at once or when what it is doing is whole."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

logger = logging.getLogger("jaxrl_llm.interrupts")


class Interrupted(BaseException):
    """The user or the machine has asked the run to end. Not an Exception: nothing on the way may swallow it."""


class Interrupts:
    """While entered, the first SIGTERM, SIGHUP or SIGINT raises `Interrupted` in the main thread: at once, or when a
    block that must not be cut has ended. The second one ends the process as if there were no handler."""

    def __init__(self) -> None:
        self._asked = self._uncut = self._ending = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # What is ignored stays ignored: nohup does so with SIGHUP.
        numbers = [n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def uncut(self) -> Iterator[None]:
        """A block that is finished before `Interrupted` is raised."""
        self._uncut = True
        try:
            yield
        finally:
            self._uncut = False
        if self._asked:
            raise Interrupted

    def finish(self) -> None:
        """From here on the run is ending anyway, and the first signal changes nothing."""
        self._uncut = self._ending = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._asked:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._asked = True
        when = "when this step is whole" if self._uncut else "now"
        what = "is ending" if self._ending else f"is saved and ends {when}"
        logger.warning("%s: the run %s; once more: it ends at once", name, what)
        if not self._uncut:
            raise Interrupted
