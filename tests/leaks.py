"""What a test may leave behind in its process, and in the folders of the machine.

`State.now()` describes the process; `State.since` names what has changed. A test that changes one
of these things without changing it back makes the tests that happen to run after it in the same
process pass or fail.

Every test takes two states, so that each takes but a millisecond or two: processes are only looked
for where there is one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch
import torch.distributed

ROOT = Path(__file__).parents[1]

# A process or thread that has been told to end may take so long on a busy machine.
SETTLE_SECONDS = 20.0

# What stays on purpose, with the reason why.
KEPT_VARIABLES = {
    "PYTEST_CURRENT_TEST",  # pytest writes the name of the test that runs there
}
KEPT_THREADS = (
    "pytest_timeout",  # pytest-timeout ends its own with the test
    "execnet",  # pytest-xdist's connection
    "tqdm",  # the monitor that tqdm starts with the first bar
    "limited_workers",  # the grader's pool, which serves a process until its end
    "OffloadWorker",  # torch's
)
KEPT_PROCESSES = (
    "alignment.sampling.vllm:serve",  # the engine that vLLM's tests share; its fixture sees it end
    "tests/e2e/launcher.py",  # what starts runs for whole commands; its fixture sees it end
    "alignment.system.limited_workers:serve",  # the grader's pool
    "multiprocessing.resource_tracker",  # Python's own, one a process
)
KEPT_ATTRIBUTES = {
    "torch.manual_seed",  # torch wraps it when its compiler is first imported
    "alignment.policy.muon.Muon.step",  # torch wraps a class's step when an optimiser is first made
}
KEPT_FILES = (
    "uv-*.lock",  # uv keeps its locks
    "vllm_dist_*",  # a socket's, of an engine that a test has killed
    # Sockets of engines' processes, named by UUIDs: vLLM removes none of them.
    "????????-????-????-????-????????????",
    "torchinductor_*",  # the compiler's cache, which the session's temporary folder ends with
)
# Modules beside the package's whose functions tests replace.
WATCHED_MODULES = (
    "torch",
    "torch.cuda",
    "torch.distributed",
    "torch.nn.functional",
    "time",
    "os",
    "subprocess",
)
LISTS_CHILDREN = Path("/proc/thread-self/children")  # Not on every kernel, nor on macOS.
HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@dataclasses.dataclass(frozen=True)
class State:
    """The facts of one instant that a test must put back."""

    values: Mapping[str, object]
    environment: Mapping[str, str]
    modules: Mapping[str, object]
    attributes: Mapping[str, Mapping[str, object]]
    threads: set[threading.Thread]
    processes: set[psutil.Process]
    files: set[str]

    @classmethod
    def now(cls) -> State:
        return cls(
            values=_values(),
            environment=dict(os.environ),
            modules={name: sys.modules.get(name) for name in _own_modules(len(sys.modules))},
            attributes=_attributes(),
            threads=set(threading.enumerate()),
            processes=_processes(),
            files=_files(),
        )

    def since(self, before: State) -> list[str]:
        """A line for each thing that is not as it was."""
        faults = _differences(before.values, self.values)
        variables = [
            {k: v for k, v in state.environment.items() if k not in KEPT_VARIABLES}
            for state in (before, self)
        ]
        names = variables[0].keys() | variables[1].keys()
        faults += _differences(
            *({f"the variable {name}": each.get(name) for name in names} for each in variables)
        )
        faults += [
            f"the module {name} is another one, or gone"
            for name, module in before.modules.items()
            if self.modules.get(name) is not module
        ]
        for owner in before.attributes.keys() & self.attributes.keys():
            then, now = before.attributes[owner], self.attributes[owner]
            if then is not now:
                faults += _replaced(owner, then, now)
        faults += [
            f"a thread still runs: {thread.name}"
            for thread in self.threads - before.threads
            if thread.is_alive() and not any(kept in thread.name for kept in KEPT_THREADS)
        ]
        faults += [line for each in self.processes - before.processes if (line := _line_of(each))]
        faults += [
            f"a new file or folder: {path}"
            for path in sorted(self.files - before.files)
            if not any(Path(path).match(kept) for kept in KEPT_FILES)
        ]
        return faults


def faults_since(before: State, with_processes: bool = True) -> tuple[State, list[str]]:
    """The state, and its faults as `State.since` has them, once processes and threads have had the
    time to end; without them for a test that replaces those of its file's fixture, which are looked
    for at the end of the file."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        now = State.now()
        judged = now
        if not with_processes:
            judged = dataclasses.replace(now, processes=before.processes, threads=before.threads)
        faults = judged.since(before)
        if not any("still runs" in fault for fault in faults) or time.monotonic() > deadline:
            return now, faults
        time.sleep(0.05)


def _values() -> dict[str, object]:
    mask = os.umask(0o022)
    os.umask(mask)
    found = {
        "the current folder": os.getcwd(),
        "umask": mask,
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "torch's default process group": torch.distributed.is_initialized(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's threads": torch.get_num_threads(),
        "torch's default type": torch.get_default_dtype(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's precision of products": torch.get_float32_matmul_precision(),
    }
    return found | {f"the handler of {s.name}": signal.getsignal(s) for s in HANDLED_SIGNALS}


def _is_ours(module: str) -> bool:
    return module == "alignment" or module.startswith("alignment.")


@functools.lru_cache(1)
def _own_modules(imported: int) -> list[str]:
    """The package's modules among so many that are `imported`."""
    return [name for name in list(sys.modules) if _is_ours(name)]


@functools.lru_cache(1)
def _owners(imported: int) -> dict[str, object]:
    """The package's modules and classes, and a few other modules, by dotted name."""
    modules = {name: sys.modules[name] for name in (*_own_modules(imported), *WATCHED_MODULES)}
    classes = {
        f"{name}.{key}": value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if _is_ours(name) and isinstance(value, type) and value.__module__ == name
    }
    return modules | classes


_last_attributes: dict[str, dict[str, object]] = {}


def _attributes() -> Mapping[str, Mapping[str, object]]:
    """The attributes of each owner: those that were last read where they are still the same, which
    takes a fraction of the time of a copy."""
    for name, owner in _owners(len(sys.modules)).items():
        if not _are_equal(_last_attributes.get(name), vars(owner)):
            _last_attributes[name] = dict(vars(owner))
    return dict(_last_attributes)


def _are_equal(last: Mapping[str, object] | None, now: Mapping[str, object]) -> bool:
    """Whether all attributes are the same objects, or equal ones. Another tensor or array, which
    does not say whether it is equal, counts as another."""
    try:
        return last == now
    except (RuntimeError, ValueError):
        return False


def _replaced(owner: str, then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """A line for each attribute that is another object than it was. Of modules that are not the
    package's, functions alone count, and a name that has gone or come never does."""
    names = [name for name, value in then.items() if now.get(name, value) is not value]
    return [
        f"{owner}.{name} was {_short(then[name])}, and is {_short(now[name])}"
        for name in names
        if not name.startswith("__")
        and f"{owner}.{name}" not in KEPT_ATTRIBUTES
        and not isinstance(then[name], type(sys))
        and (_is_ours(owner) or callable(then[name]))
    ]


def _differences(then: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    return [
        f"{name} was {_short(then[name])}, and is {_short(now[name])}"
        for name in sorted(then)
        if then[name] != now[name]
    ]


def _short(value: object) -> str:
    return repr(value)[:150]


def _processes() -> set[psutil.Process]:
    """This process's children, theirs included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    if not LISTS_CHILDREN.exists():
        return set(psutil.Process().children(recursive=True))
    found = set()
    for process_id in _descendants(os.getpid()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found.add(psutil.Process(process_id))
    return found


def _descendants(process_id: int) -> list[int]:
    """The children of a process, theirs included, by Linux's own lists, one for each thread.
    psutil reads about every process of the machine for them."""
    found = []
    for children in Path(f"/proc/{process_id}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # The thread or process has ended.
            for child in children.read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _line_of(process: psutil.Process) -> str:
    """A line on a process that runs and is not kept on purpose, else nothing."""
    try:
        words = " ".join(process.cmdline())
        is_over = process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return ""
    if is_over or any(kept in words for kept in KEPT_PROCESSES):
        return ""
    return f"a process still runs: {process.pid} {words[:200]}"


def _files() -> set[str]:
    """The entries of this process's temporary folder, which no other process writes to."""
    return _entries(tempfile.gettempdir())


def files_of_the_repository() -> set[str]:
    """The entries of the folders that commands write to by default, which all processes of the
    tests share."""
    own = (ROOT / name for name in ("", "checkpoints", "dataset", "wandb", "mlruns"))
    entries = set().union(*(_entries(str(folder)) for folder in own if folder.is_dir()))
    return {path for path in entries if not os.path.basename(path).startswith((".", "_"))}


def _entries(folder: str) -> set[str]:
    return {os.path.join(folder, name) for name in os.listdir(folder)}
