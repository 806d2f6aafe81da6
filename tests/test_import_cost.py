"""Reading arguments, finding a task and grading need no heavy library."""

import subprocess
import sys

import pytest

HEAVY = {"torch", "transformers", "sympy", "math_verify", "scipy"}


@pytest.mark.parametrize(
    "modules",
    [
        ("alignment.core.records", "alignment.system.registry"),
        ("alignment.data.tasks", "alignment.data.tasks.jsonl", "alignment.data.prompts"),
        ("alignment.rewards.reward", "alignment.rewards.grading.workers", "alignment.rewards.grading.reference"),
        ("alignment.drgrpo_grader", "alignment.audit_grader", "alignment.args"),
    ],
)
def test_importing_loads_no_heavy_library(modules):
    code = f"import sys, {', '.join(modules)}; print(*{HEAVY} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
