import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(
    p
    for folder in ("jaxrl_llm", "models", "sharding", "configs", "scripts")
    for p in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in p.parents)
)


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([node.module] if node.level == 0 else [])
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def top(name):
    return name.split(".")[0]


def inside(path, *rooms):
    return path.relative_to(ROOT).as_posix().startswith(rooms)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_dependencies_point_one_way(path):
    names = set(imports(path))
    ours = {n for n in names if top(n) == "jaxrl_llm"}
    assert not {n for n in names if top(n) in ("models", "sharding", "configs")}, "import it as jaxrl_llm.X"
    if inside(path, "sharding/"):
        assert all(n.startswith("jaxrl_llm.sharding") for n in ours)
    if inside(path, "models/"):
        assert all(n.startswith(("jaxrl_llm.models", "jaxrl_llm.sharding")) for n in ours)
    if inside(path, "jaxrl_llm/algorithms/"):
        assert all(n.startswith(("jaxrl_llm.algorithms", "jaxrl_llm.types")) for n in ours)
    if not inside(path, "jaxrl_llm/rollout/vllm_engine.py", "scripts/bench_algorithms_verl.py"):
        assert not {n for n in names if top(n) in ("torch", "vllm")}
    if not inside(path, "jaxrl_llm/pools"):
        assert "ray" not in {top(n) for n in names}
    if inside(path, "jaxrl_llm/controller.py"):
        assert not {n for n in names if top(n) in ("jax", "ray", "vllm", "numpy")}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_functions_stay_readable(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "two rooms"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno - node.lineno < 80, f"{node.name} is too long"


def test_only_the_learner_jits_a_training_step():
    steps = [p.name for p in FILES if inside(p, "jaxrl_llm/") and "jax.grad(" in p.read_text()]
    assert steps == ["trainable.py"]


def test_the_folders_are_reached_through_the_package():
    for folder in ("models", "sharding", "configs"):
        link = ROOT / "jaxrl_llm" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
