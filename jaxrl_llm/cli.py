"""What all commands share: help, and errors as one message with an exit code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable


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
    try:
        run([arg for arg in argv if arg != "--debug"])
    except (UserError, ModelError, ShardingError) as error:
        if debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
