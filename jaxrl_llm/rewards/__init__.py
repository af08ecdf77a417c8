"""Rewards: functions that judge a response, and the pool of processes that runs them.

Importing this package is cheap on purpose: every worker process does it. RewardPool, which brings jax in
through jaxrl_llm.types, is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxrl_llm.rewards.functions import REWARDS

if TYPE_CHECKING:
    from jaxrl_llm.rewards.pool import RewardPool

__all__ = ["REWARDS", "RewardPool"]


def __getattr__(name: str) -> Any:
    if name == "RewardPool":
        from jaxrl_llm.rewards.pool import RewardPool

        return RewardPool
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
