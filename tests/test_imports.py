"""What is imported when: commands say what is wrong with their arguments before they load what
takes seconds."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_bad_input import CASES, MAIN

HEAVY = {
    "accelerate",
    "einx",
    "math_verify",
    "matplotlib",
    "pandas",
    "ray",
    "scipy",
    "sympy",
    "torch",
    "transformers",
}
# What can only be known once the tokenizer and the model's context are there.
NEEDS_MODEL = ("do not fit in the model's context", "the tokenizer of this model has no chat")
NEEDS_NO_FILE = [
    case
    for case in CASES
    if "{world}" not in str(case[1]) and not any(words in case[2] for words in NEEDS_MODEL)
]
SCRIPT = f"""
import importlib, sys
from ast import literal_eval
from alignment.system.errors import run_command

def loaded():
    return sorted({HEAVY} & set(sys.modules))

for command, mistakes in literal_eval(sys.argv[1]):
    main = importlib.import_module(command).main
    print("imported", command, loaded())
    for flags in mistakes:
        sys.argv = [command, *flags]
        try:
            run_command(main)
        except SystemExit as stop:
            print("exit code", stop.code, loaded())
"""


def test_a_mistake_is_said_before_anything_heavy_is_loaded(tmp_path):
    """All commands in one fresh interpreter: nothing heavy after the import of any, nor after any
    of its mistakes."""
    commands = []
    reports_expected = []
    messages = []
    for command, main in MAIN.items():
        mistakes = [case for case in NEEDS_NO_FILE if case[0] == command]
        assert mistakes, command
        commands.append((main.__module__, [flags for _, flags, _ in mistakes]))
        reports_expected.append(f"imported {main.__module__} []")
        reports_expected += ["exit code 2 []"] * len(mistakes)
        messages += [message for _, _, message in mistakes]
    arguments = [sys.executable, "-c", SCRIPT, repr(commands)]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        arguments, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment
    )
    reports = [
        line for line in done.stdout.splitlines() if line.startswith(("imported", "exit code"))
    ]
    assert reports == reports_expected
    for line, message in zip(done.stderr.splitlines(), messages, strict=True):
        assert message in line


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py")),
    ids=lambda file: file.stem,
)
def test_a_benchmark_can_be_imported(file):
    importlib.import_module(f"benchmarks.{file.stem}")


def test_python_m_says_it_before_it_loads_torch():
    """As a user types it."""
    command = [sys.executable, "-X", "importtime", "-m", "alignment.train_rl", "--num_steps", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = {
        line.rpartition("|")[2].strip()
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert done.returncode == 2 and "error: --num_steps 0" in done.stderr
    assert (
        "alignment.train_rl" not in imported
        and "alignment.args" in imported
        and HEAVY & imported == set()
    )


@pytest.mark.parametrize(
    "modules",
    [
        ("alignment.args",),
        ("alignment.core.records", "alignment.system.registry"),
        ("alignment.data.tasks", "alignment.data.tasks.own_data", "alignment.data.prompts"),
        ("alignment.rewards.rules", "alignment.system.limited_workers"),
        ("alignment.drgrpo_grader",),
    ],
    ids=lambda modules: modules[-1],
)
def test_importing_loads_no_heavy_library(modules):
    """Reading arguments, finding a task and grading need none."""
    code = f"import sys, {', '.join(modules)}; print(*{HEAVY} & set(sys.modules))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == ""
    )
