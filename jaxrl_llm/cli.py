"""What all commands share: help, and errors as one message with an exit code."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Callable

# What a disk says that is full, over a quota, or broken.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def _without_closed_loops(unraisable: sys.UnraisableHookArgs) -> None:
    """Leaves out what Orbax's threads say after a write that has failed, which is an error of its own by then."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def command(run: Callable[[list[str]], None], argv: list[str], usage: str) -> None:
    """Runs a command. A user's mistake is printed without a traceback and exits with 1; --debug shows the traceback."""
    if not argv or "--help" in argv or "-h" in argv:
        print(usage)
        sys.exit(0 if argv else 2)
    from jaxrl_llm.models.config import ModelError
    from jaxrl_llm.sharding.mesh import ShardingError
    from jaxrl_llm.types import UserError

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("jaxrl_llm").setLevel(logging.INFO)
    debug = "--debug" in argv
    if not debug:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax logs the traceback of every error that it raises
        sys.unraisablehook = _without_closed_loops
    try:
        run([arg for arg in argv if arg != "--debug"])
    except (UserError, ModelError, ShardingError, OSError) as error:
        if debug or (isinstance(error, OSError) and error.errno not in DISK_FULL):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        if debug:
            raise
        print("interrupted", file=sys.stderr)
        sys.exit(130)
