"""Commands parse their arguments before they load what is slow to import."""

import subprocess
import sys

import pytest

COMMANDS = [
    "audit_grader", "download", "evaluate", "gradients", "pipeline", "plan", "reference_server", "rejection_sample", "report",
    "sft", "sweep", "train_rl", "verify_resume",
]  # fmt: skip
HEAVY = {"accelerate", "einx", "matplotlib", "pandas", "ray", "scipy", "sympy", "torch", "transformers"}


@pytest.mark.parametrize("command", COMMANDS)
def test_importing_a_command_loads_nothing_heavy(command):
    script = f"import alignment.{command}, sys; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert HEAVY & set(run.stdout.split()) == set()
