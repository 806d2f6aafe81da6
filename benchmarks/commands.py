"""Commands of a package that lies in a folder, each in a process of its own that begins with the
libraries loaded, which spares the seconds of importing them."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measuring import ROOT

PACKAGE = "alignment"
LIBRARIES = ["torch", "transformers", "safetensors.torch", "peft", "tyro", "rich.console"]
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
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(folder)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LIBRARIES)
    process = context.Process(target=_run_module, args=(folder, command, flags))
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


def _run_module(folder: Path, command: str, flags: Sequence[str]) -> None:
    """Run a command in this process, as `python -m` would in `folder`."""
    log = os.open(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    # The process has loaded the checkout's package, for the sake of this function.
    for name in list(sys.modules):
        if name.partition(".")[0] == PACKAGE:
            del sys.modules[name]
    others = [entry for entry in sys.path if entry not in ("", str(ROOT))]
    sys.path = [str(folder), *others]
    sys.argv = [command, *flags]
    runpy.run_module(f"{PACKAGE}.{command}", run_name="__main__", alter_sys=True)
