"""Tests that another interpreter runs, each reported under its own name: those of an extra that has
an environment of its own.

Here they are items without code. The first that runs starts a pytest of the other interpreter,
which runs one item after another as it is asked to, and sends its reports of them.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[1]
DESCRIPTOR = "TESTS_OF_ANOTHER_INTERPRETER"  # the variable with that of the other's end of the pipe
OPTIONS = ("-n", "0", "-p", "no:cacheprovider", "-m", "slow or not slow")
QUICK = "not slow"  # the expression of a session that leaves these tests out


class OtherModule(pytest.File):
    """A file of tests, of whose items the other interpreter gives the names."""

    def collect(self) -> Iterator[OtherItem]:
        if self.config.option.markexpr == QUICK:  # it would only be made to leave them out
            return
        start = self.path.relative_to(ROOT).as_posix() + "::"
        for node in shared_node_ids(self.config, self.python(), self.path.parent):
            if node.startswith(start):
                item = OtherItem.from_parent(self, name=node.removeprefix(start))
                item.add_marker(pytest.mark.slow)
                item.add_marker(pytest.mark.timeout(0))
                yield item

    @staticmethod
    def python() -> str:
        """The other interpreter, whose environment is made on first use."""
        raise NotImplementedError


class OtherItem(pytest.Item):
    """A test that the other interpreter runs, with its own time limit for it."""

    def runtest(self) -> None:
        raise NotImplementedError("`Asking` has it run elsewhere")

    def reportinfo(self):
        return self.path, None, self.name


@functools.cache
def shared_node_ids(config: pytest.Config, python: str, folder: Path) -> list[str]:
    """As `node_ids`, of which several processes of the same session ask once: it imports all that
    the tests import."""
    if not hasattr(config, "workerinput"):
        return node_ids(python, folder)
    file = Path(config.option.basetemp).parent / f"{folder.name}.json"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_text(json.dumps(node_ids(python, folder)))
        return json.loads(file.read_text())


def node_ids(python: str, folder: Path) -> list[str]:
    """Of all tests of a folder, as the interpreter `python` collects them."""
    command = [python, "-m", "pytest", "--collect-only", *OPTIONS, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise pytest.Collector.CollectError(f"{command}\n{done.stdout}\n{done.stderr}")
    return [line for line in done.stdout.splitlines() if "::" in line]


class OtherPytest:
    """The pytest of another interpreter, which runs the tests of a folder."""

    def __init__(self, python: str, folder: Path):
        self.connection, other = Pipe()
        self.printed = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `end`)
        command = [python, "-m", "pytest", *OPTIONS, str(folder)]
        environment = {**os.environ, DESCRIPTOR: str(other.fileno())}
        environment.pop("OMP_NUM_THREADS", None)  # which is that of the tests of this interpreter
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            pass_fds=(other.fileno(),),
            stdout=self.printed,
            stderr=subprocess.STDOUT,
        )
        other.close()

    def run(self, node: str, following: str) -> Iterator[dict]:
        """The reports of a test. Fixtures that `following`, the next one, shares stay."""
        self.connection.send((node, following))
        while (report := self.connection.recv()) is not None:
            yield report

    def end(self) -> str:
        """End it; returns the last of what it has printed."""
        self.connection.close()
        code = self.process.wait()
        self.printed.seek(max(0, self.printed.seek(0, os.SEEK_END) - 5000))
        text = self.printed.read().decode(errors="replace")
        self.printed.close()
        return f"the other interpreter's pytest has ended with exit code {code}\n{text}"


def ask_or_serve(config: pytest.Config) -> None:
    """Let a session that begins ask another interpreter for such tests, or be the one asked."""
    if DESCRIPTOR in os.environ:
        connection = Connection(int(os.environ.pop(DESCRIPTOR)))
        config.pluginmanager.register(Serving(config, connection))
    else:
        config.pluginmanager.register(Asking(config))


class Asking:
    """The plugin of the session that reports."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.other: OtherPytest | None = None

    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not isinstance(item, OtherItem):
            return None
        following = nextitem.nodeid if isinstance(nextitem, OtherItem) else ""
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        try:
            if self.other is None:
                self.other = OtherPytest(item.parent.python(), item.path.parent)
            for data in self.other.run(item.nodeid, following):
                read = self.config.hook.pytest_report_from_serializable
                report = read(config=self.config, data=data)
                item.ihook.pytest_runtest_logreport(report=report)
        except (EOFError, OSError):
            said, self.other = self.other.end(), None
            failed = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", said, "call", duration=0.0
            )
            item.ihook.pytest_runtest_logreport(report=failed)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def pytest_unconfigure(self) -> None:
        if self.other is not None:
            self.other.end()


class Serving:
    """The plugin of the session that runs tests for another one."""

    def __init__(self, config: pytest.Config, connection: Connection):
        self.config, self.connection = config, connection

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        while True:
            try:
                node, following = self.connection.recv()
            except EOFError:
                return True
            self.config.hook.pytest_runtest_protocol(
                item=items[node], nextitem=items.get(following)
            )
            self.connection.send(None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.connection.send(
            self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        )
