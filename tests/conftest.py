"""Eight virtual CPU devices, and one cache of compiled programs, for the whole test session."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before anything imports jax. The programs are tiny: less optimisation makes the session shorter.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"

# Whole runs compile the same programs again and again, in this process and in those that tests start.
_CACHE = tempfile.mkdtemp(prefix="jaxrl_llm_tests_")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


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


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """A run of four steps: its folder, its lines of metrics, what it showed, its state."""
    from tests.runs import run, small

    run_dir = tmp_path_factory.mktemp("straight")
    return run_dir, *run(small(run_dir))
