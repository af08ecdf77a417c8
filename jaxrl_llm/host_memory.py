"""Keeps the host memory of a process that runs for days level, where the C library is glibc.

By default its malloc gives every thread an arena that keeps what it frees, and Orbax writes checkpoints from threads
that are new each time: a quickstart that ran for 40 minutes grew from 680 to 720 MiB, 7 %.
"""

from __future__ import annotations

import ctypes

_M_ARENA_MAX = -8  # malloc.h
_libc = ctypes.CDLL(None)


def limit_arenas() -> None:
    """Two arenas for all threads; to be called before there are many. Costs the host about 4 % of a CPU-only step."""
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 2)


def give_back() -> None:
    """Returns what is free to the system; takes milliseconds."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)
