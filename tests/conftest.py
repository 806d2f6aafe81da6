"""Imported before any test module, so that the package can set OpenMP's waiting policy before torch
is loaded."""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

import alignment  # noqa: F401
from alignment.system import signals, terminal

# Tests start some hundred interpreters; where none may keep what it has compiled, half of each
# start is compiling torch again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Where vLLM is not installed beside pytest, e2e/test_vllm.py runs that folder in an environment
# that has it.
collect_ignore = [] if find_spec("vllm") else ["with_vllm"]


LONGEST = (
    "test_vllm.py",
    "test_faults.py",
    "test_sweep.py",
    "test_async.py",
    "test_pipeline.py",
    "test_commands.py",
)


def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: a third of the time a test waits for processes that it has
    started."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that the processes of the tests end together."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


# How long an example takes says more about the machine than about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def no_signal_of_an_earlier_test():
    """A command that a signal has ended remembers it for its exit code; the tests of one process
    are many commands."""
    signals._state.deferred, signals._state.received = False, None


@pytest.fixture(autouse=True)
def nothing_said_by_an_earlier_test():
    """A command says some things once a process; the tests of one process are many commands."""
    terminal.say_once.cache_clear()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """The folder of the embedded model, untrained: it can learn from any reward."""
    from alignment.data.embedded import build_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    folder.mkdir()
    build_tiny(folder)
    return folder


@pytest.fixture
def policy(tiny_folder):
    """The tiny model as a policy on the CPU."""
    from rollout_helpers import open_tiny

    return open_tiny(tiny_folder)


@pytest.fixture
def sampler(tiny_folder):
    """A sampler with weights of its own, as on another device."""
    import torch

    from alignment.model.loading import load_model, load_tokenizer
    from alignment.sampling.transformers import TransformersSampler

    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    return TransformersSampler(model, load_tokenizer(str(tiny_folder)), context=256)


WARM_START = "WARM_START_OF_THE_TESTS"  # set where vLLM's tests run in an environment of their own


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory) -> Path:
    """A folder with a barely trained model, sft, made by the real command in a process of its own,
    which printed `log`.

    It is made once for all processes of the tests.
    """
    if made := os.environ.get(WARM_START):
        return Path(made)
    base = tmp_path_factory.getbasetemp()
    output = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "warm_start"
    flags = ["--num_steps", "100", "--batch_size", "32", "--max_problems", "32"]
    flags += ["--sft_base", str(output / "sft"), "--output_dir", str(output)]
    with FileLock(output.with_suffix(".lock")):
        if not output.exists():
            done = subprocess.run(
                [sys.executable, "-m", "alignment.sft", *flags],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            (output / "log").write_text(done.stdout)
    return output


@pytest.fixture(scope="session")
def wait_for():
    """A function that waits until a condition is true."""

    def waiting(condition, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    return waiting
