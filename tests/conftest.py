"""Eight virtual CPU devices for the whole test session."""

import os
from pathlib import Path

import pytest

# Before anything imports jax. The programs are tiny: less optimisation makes the session shorter.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden values."""
    return Path(__file__).parent / "golden"


@pytest.fixture
def engine():
    """One small jax engine for the whole session."""
    from tests.engines import shared_engine

    return shared_engine()


@pytest.fixture
def calls(engine, monkeypatch):
    """What that engine's prefills and dispatches are called with."""
    from tests.engines import count_calls

    return count_calls(engine, monkeypatch)
