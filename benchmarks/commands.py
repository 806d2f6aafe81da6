"""Commands of a package that lies in a folder, each in a process of its own that begins with the
libraries loaded, which spares the seconds of importing them. So do commands that these start."""

import importlib
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from benchmarks.measuring import ROOT

PACKAGE = "alignment"
LIBRARIES = [
    "torch",
    "transformers",
    "transformers.models.qwen2.modeling_qwen2",
    "safetensors.torch",
    "peft",
    "tyro",
    "rich.console",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "tensorboard.backend.event_processing.event_accumulator",
]
LOG = "command.log"
SECONDS_BETWEEN_LOOKS = 0.2
SECONDS_BEHIND = 2.0


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Its exit code; below 0 where a signal ended it."""
    printed: str


def run_command(
    folder: Path, command: str, flags: Sequence[str], ends_behind: str | None = None
) -> Ended:
    """Run a command of the package that is in `folder`, there, with one thread. It is ended
    `SECONDS_BEHIND` after it has printed the word `ends_behind`, if it ever does."""
    process = _make_process(folder, command, flags, folder / LOG)
    (folder / LOG).touch()
    process.start()
    if ends_behind is None:
        process.join()
    while process.is_alive():
        process.join(SECONDS_BETWEEN_LOOKS)
        if ends_behind is not None and ends_behind in (folder / LOG).read_text():
            process.join(SECONDS_BEHIND)
            process.terminate()
            process.join()
    return Ended(process.exitcode or 0, (folder / LOG).read_text())


def _make_process(folder: Path, command: str, flags: Sequence[str], log: Path) -> BaseProcess:
    """The process of a command, which has not begun."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    return context.Process(target=_run_module, args=(folder, command, flags, log))


class _ForkedCommand:
    """A command that a command has started, with what `subprocess.Popen` says of it."""

    def __init__(self, process: BaseProcess):
        self._process = process
        # The process looks for this module there, and would import the main module of this one.
        sys.path.append(str(ROOT))
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        process.start()
        sys.modules["__main__"] = main
        sys.path.pop()
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _run_module(folder: Path, command: str, flags: Sequence[str], log: Path) -> None:
    """Run a command in this process, as `python -m` would in `folder`."""
    os.setsid()  # As the package starts commands: it kills their process group.
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    # The process has loaded the checkout's package, for the sake of this function.
    for name in list(sys.modules):
        if name.partition(".")[0] == PACKAGE:
            del sys.modules[name]
    others = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    sys.path = [str(folder), *others]

    # A process of the server may ask it for further ones, but would start a server of its own.
    vars(multiprocessing.forkserver._forkserver)["ensure_running"] = lambda: None

    def start_command(module: str, flags: Sequence[str], log: Path) -> _ForkedCommand:
        name = module.removeprefix(f"{PACKAGE}.")
        return _ForkedCommand(_make_process(folder, name, flags, log.resolve()))

    processes = importlib.import_module(f"{PACKAGE}.system.processes")
    vars(processes)["start_command"] = start_command
    sys.argv = [command, *flags]
    runpy.run_module(f"{PACKAGE}.{command}", run_name="__main__", alter_sys=True)
