"""Does a run of two machines, with sampling engines on both, draw the tokens of one process with
one engine; and what does it do when an engine or a machine is lost?

    uv run -m benchmarks.machines
    uv run -m benchmarks.machines --only undisturbed "engine killed"

Two torchruns of two sharded ranks and an engine each train the tiny preset for a few steps: as root
in two network namespaces with a link between them, else both on 127.0.0.1. A row for each of
`CASES`: seconds from the fault to the end of the run's processes (to the line that says so, where
the run goes on with the engine started again), exit codes, the line that says what happened,
processes that were left, and how completions and metrics differ from those of one process. Exit
code 1 where completions differ, a process is left, or a run takes longer than it may.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import tyro
from rich.console import Console

from alignment.data.embedded import embedded_model
from alignment.sampling.transformers import open_transformers
from alignment.system.files import read_jsonl
from alignment.system.terminal import make_table
from benchmarks.harmed_runs import first_message, live_processes, read_lines, run_environment
from benchmarks.measuring import output_of

RANK_TIMEOUT = 60  # seconds
SAMPLER_TIMEOUT = 20  # seconds, where an engine hangs
END_LIMIT = 500  # seconds from a fault, after which its processes are killed
STEPS = 4
HARMED_VERSION = 2  # of the weights with which the engine that is harmed samples
RUN_NAME = "run"
FLAGS = f"""--preset tiny --prompts_per_rollout 6 --group_size 4 --train_mini_batch_size 24
    --num_steps {STEPS} --max_problems 16 --eval_interval 2 --save_interval 1 --keep_checkpoints 0
    --run_name {RUN_NAME} --sampler benchmarks.machines:harmed_engine"""
COMPARED_METRICS = (
    "reward",
    "answer_reward",
    "format_reward",
    "response_length",
    "zero_variance_groups",
    "grad_norm",
)
MESSAGES = ("error: ", "the sampler is started again: ", "engines sample on")
HEADINGS = (
    "case",
    "seconds",
    "exit codes",
    "line",
    "left",
    "beside one process with one engine",
)

# Files in a case's folder.
HARM = "harm"  # what the second machine's engine shall do to itself
HARMED = "harmed"  # when it began to do so
# The harm of an engine that only waits, so that its machine can be harmed from outside meanwhile.
WAIT = "wait"


# --- machines -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """One machine: its letter, the name of its host and network namespace, and its address."""

    letter: str
    name: str
    address: str

    @property
    def link(self) -> str:
        """The network device that leads to the other machine."""
        return f"link{self.letter}"

    def folder(self, case_folder: Path) -> Path:
        """The folder in which its processes run."""
        return case_folder / f"machine {self.letter}"

    def log(self, case_folder: Path) -> Path:
        return self.folder(case_folder) / "log"


class Machines:
    """Two machines: network namespaces with a link between them, or 127.0.0.1 twice where they
    cannot be made."""

    def __init__(self):
        self.isolated = os.geteuid() == 0 and shutil.which("ip") is not None
        addresses = ("127.0.0.1", "127.0.0.1")
        if self.isolated:
            addresses = ("10.77.0.1", "10.77.0.2")
        self.first = Machine("a", f"machine{os.getpid()}a", addresses[0])
        self.second = Machine("b", f"machine{os.getpid()}b", addresses[1])
        self.both = (self.first, self.second)

    def __enter__(self) -> Machines:
        if not self.isolated:
            return self
        for machine in self.both:
            run_ip("netns", "add", machine.name)
            run_ip("-n", machine.name, "link", "set", "lo", "up")
        # one link, whose other end is in the second machine
        ends = ["peer", "name", self.second.link, "netns", self.second.name]
        run_ip("-n", self.first.name, "link", "add", self.first.link, "type", "veth", *ends)
        for machine in self.both:
            address = ["address", "add", f"{machine.address}/24", "dev", machine.link]
            run_ip("-n", machine.name, *address)
            self._write_names(machine)
        self.set_link("up")
        return self

    def __exit__(self, *error) -> None:
        if not self.isolated:
            return
        for machine in self.both:
            run_ip("netns", "delete", machine.name)
            shutil.rmtree(network_files(machine))

    def _write_names(self, machine: Machine) -> None:
        """Give a machine the names of both, as machines have them: torch looks up the name of every
        address, and would wait for a name server."""
        folder = network_files(machine)
        folder.mkdir(parents=True)
        (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{other.address} {other.name}" for other in self.both]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")

    def set_link(self, state: str) -> None:
        """Set both ends of the link "up" or "down"."""
        for machine in self.both:
            run_ip("-n", machine.name, "link", "set", machine.link, state)

    def start(self, case_folder: Path, port: int, flags: Sequence[str]) -> list[subprocess.Popen]:
        """Start a torchrun of two ranks on each machine, each in a folder of its own; the run
        itself is in `case_folder`."""
        torchruns = [self._start_torchrun(self.first, case_folder, port, flags)]
        time.sleep(2)  # so that the first one has the store
        torchruns.append(self._start_torchrun(self.second, case_folder, port, flags))
        return torchruns

    def _start_torchrun(
        self, machine: Machine, case_folder: Path, port: int, flags: Sequence[str]
    ) -> subprocess.Popen:
        has_store = int(machine == self.first)
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", "2", "--nproc_per_node", "2"]
        command += ["--rdzv_backend", "c10d", "--rdzv_id", "machines"]
        command += ["--rdzv_endpoint", f"{self.first.address}:{port}"]
        command += ["--rdzv_conf", f"is_host={has_store}", "--local_addr", machine.address]
        command += ["-m", "alignment.train_rl", "--policy_parallelism", "sharded"]
        command += ["--output_dir", str(case_folder), *flags]
        environment = run_environment(MACHINES_CASE=str(case_folder), MACHINE=machine.letter)
        if self.isolated:
            set_hostname = ["sh", "-c", f'hostname {machine.name}; exec "$0" "$@"']
            enter = ["ip", "netns", "exec", machine.name, "unshare", "--uts", *set_hostname]
            command = [*enter, *command]
            environment["GLOO_SOCKET_IFNAME"] = machine.link
        machine.folder(case_folder).mkdir()
        with machine.log(case_folder).open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=machine.folder(case_folder),
                env=environment,
                stdout=log,
                stderr=log,
            )


def run_ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def network_files(machine: Machine) -> Path:
    """The folder of files that `ip netns exec` lays over /etc in a machine's namespace."""
    return Path("/etc/netns", machine.name)


# --- faults ---------------------------------------------------------------------------------------


def harmed_engine(config, tokenizer, policy):
    """A transformers sampler that harms itself once, as its case says, where it is the second
    machine's and has the weights of `HARMED_VERSION`."""
    sampler = open_transformers(config, tokenizer, policy)
    case_folder = Path(os.environ["MACHINES_CASE"])
    draw = sampler.sample

    def sample(prompts, sampling, *others):
        # the first machine's engine has the prompts from 0 on
        is_second_machines = sampling.first_prompt > 0
        if is_second_machines and sampler.policy_version == HARMED_VERSION:
            harm_once(case_folder)
        return draw(prompts, sampling, *others)

    sampler.sample = sample
    return sampler


def harm_once(case_folder: Path) -> None:
    """Do to this process what its case says, unless that was done before."""
    harm = (case_folder / HARM).read_text()
    if not harm or (case_folder / HARMED).exists():
        return
    (case_folder / HARMED).write_text(str(time.time()))
    if harm == WAIT:
        time.sleep(3600)
    else:
        os.kill(os.getpid(), signal.Signals[harm])


def leave_alone(machines: Machines, case_folder: Path) -> None:
    """The harm from outside where there is none."""


def kill_ranks(machines: Machines, case_folder: Path) -> None:
    """Kill the second machine's ranks; its engine, its torchrun and rank 0 have to notice that by
    themselves."""
    for process in case_processes(case_folder, MACHINE=machines.second.letter):
        words = process.cmdline()
        if "alignment.train_rl" in words and "torch.distributed.run" not in words:
            process.kill()


def cut_link(machines: Machines, case_folder: Path) -> None:
    """Take the network between the machines away."""
    machines.set_link("down")


@dataclass(frozen=True)
class Case:
    """A run of two machines, and what is done to it."""

    engine_harm: str = ""
    """What the second machine's engine does to itself: nothing, a signal by its name, or `WAIT`."""
    harm_from_outside: Callable[[Machines, Path], None] = leave_alone
    ends_run: bool = False
    """Whether the run has to end; other runs go on and are compared with `reference`."""
    reference: str = "alone"
    """The run of one process, among `REFERENCES`, that has the same tokens."""
    flags: tuple[str, ...] = ()
    """Flags that the reference does not have."""

    @property
    def cuts_link(self) -> bool:
        return self.harm_from_outside is cut_link


REFERENCES = {
    "alone": (),
    "alone async": ("--rollouts", "async", "--loss_type", "grpo_clip"),
}
"""The runs of one process, by the name of their folder, and their flags."""

CASES = {
    "undisturbed": Case(),
    "three engines": Case(flags=("--sample_device", "cpu", "cpu", "cpu")),
    "async": Case(reference="alone async"),
    "engine killed": Case("SIGKILL"),
    "engine stopped": Case("SIGSTOP", flags=("--sampler_timeout", str(SAMPLER_TIMEOUT))),
    "machine's processes killed": Case(WAIT, kill_ranks, ends_run=True),
    "machine's network lost": Case(WAIT, cut_link, ends_run=True),
}


@dataclass(frozen=True)
class Outcome:
    """What became of a case's run."""

    seconds: str
    """From the fault to what the case waits for, and which of the two that is."""
    exit_codes: str
    """Of both torchruns; None for one that had to be killed."""
    line: str
    """What was printed of the fault."""
    left: int
    """Processes that were still alive `END_LIMIT` seconds after the fault."""


def case_processes(case_folder: Path, **variables: str) -> list[psutil.Process]:
    """The live processes of a case, with these variables in their environment."""
    return live_processes(MACHINES_CASE=str(case_folder), **variables)


def is_alive(process: subprocess.Popen) -> bool:
    return process.poll() is None


def run_case(
    machines: Machines, case: Case, case_folder: Path, port: int, flags: Sequence[str]
) -> Outcome:
    """Start a case's run, harm it, and wait for its end."""
    prepare_folder(case_folder, case.engine_harm)
    begun = time.time()
    torchruns = machines.start(case_folder, port, [*flags, *case.flags])
    harmed = case_folder / HARMED
    while not harmed.exists() and any(map(is_alive, torchruns)):
        time.sleep(0.05)
    fault = begun
    if harmed.exists():
        fault = float(harmed.read_text())
    if case.harm_from_outside is not leave_alone:
        fault = time.time()
        case.harm_from_outside(machines, case_folder)

    restarted = await_torchruns(machines, case, case_folder, torchruns, fault)
    left = await_processes(case, case_folder, fault)
    ended = time.time()
    exit_codes = " ".join(str(torchrun.poll()) for torchrun in torchruns)
    for process in case_processes(case_folder):
        process.kill()
    if case.cuts_link:
        machines.set_link("up")

    seconds = f"{ended - fault:.1f}"
    if restarted is not None and case.engine_harm.startswith("SIG"):
        seconds = f"{restarted - fault:.1f} until it is noticed"
    line = first_message(
        read_lines(machine.log(case_folder) for machine in machines.both), MESSAGES
    )
    return Outcome(seconds, exit_codes, re.sub(r"; go on.*", "", line), len(left))


def await_torchruns(
    machines: Machines,
    case: Case,
    case_folder: Path,
    torchruns: Sequence[subprocess.Popen],
    fault: float,
) -> float | None:
    """Wait until the torchruns have ended, at most `END_LIMIT` seconds from the fault; returns when
    the first machine said that a sampler is started again, None where it did not."""
    awaited = torchruns
    if case.cuts_link:
        # the second one waits for its store on the first machine, for ever
        awaited = torchruns[:1]
    restarted = None
    while any(map(is_alive, awaited)) and time.time() - fault <= END_LIMIT:
        first_log = machines.first.log(case_folder).read_text(errors="replace")
        if restarted is None and "started again" in first_log:
            restarted = time.time()
        time.sleep(0.05)
    return restarted


def await_processes(case: Case, case_folder: Path, fault: float) -> list[psutil.Process]:
    """Wait until a case has no process, at most `END_LIMIT` seconds from the fault; returns those
    that are left."""
    while True:
        left = case_processes(case_folder)
        if case.cuts_link:
            left = [process for process in left if "torch.distributed.run" not in process.cmdline()]
        if not left or time.time() - fault > END_LIMIT:
            return left
        time.sleep(0.1)


def prepare_folder(case_folder: Path, engine_harm: str) -> None:
    case_folder.mkdir()
    (case_folder / HARM).write_text(engine_harm)


# --- comparison -----------------------------------------------------------------------------------


def run_alone(case_folder: Path, flags: Sequence[str]) -> Path:
    """The folder of a run of one process with one engine, which is made where it is not there yet:
    several cases compare with it, and so do later calls with --keep."""
    run = case_folder / RUN_NAME
    if not (run / "summary.json").exists():
        prepare_folder(case_folder, engine_harm="")
        command = [sys.executable, "-m", "alignment.train_rl", "--policy_parallelism", "single"]
        command += ["--output_dir", str(case_folder), *flags]
        output_of(command, case_folder, run_environment(MACHINES_CASE=str(case_folder)))
    return run


def describe_differences(reference: Path, run: Path) -> str:
    """How many completions of a run have other tokens than the reference's, and by how much metrics
    and accuracies differ at most."""
    if not (run / "summary.json").exists():
        return "it did not end"
    expected = read_completions(reference)
    completions = read_completions(run)
    if len(expected) != len(completions):
        return f"{len(completions)} completions instead of {len(expected)}"
    different = 0
    for one, other in zip(expected, completions, strict=True):
        if any(one[field] != other[field] for field in ("question", "token_ids")):
            different += 1
    metrics = [read_jsonl(folder / "metrics.jsonl") for folder in (reference, run)]
    evaluations = [read_jsonl(folder / "evals.jsonl") for folder in (reference, run)]
    words = []
    for name in COMPARED_METRICS:
        if name in metrics[0][0]:
            words.append(describe_difference(name, *metrics))
    words.append(describe_difference("avg_answer_rewards", *evaluations))
    return f"{different} of {len(expected)} completions; largest differences: {', '.join(words)}"


def describe_difference(name: str, records: list[dict], others: list[dict]) -> str:
    """The largest difference of a field between the records of two runs."""
    pairs = zip(records, others, strict=True)
    largest = max(abs(one[name] - other[name]) for one, other in pairs)
    if largest == 0:
        return f"{name} 0"
    return f"{name} {largest:.0e}"


def read_completions(run: Path) -> list[dict]:
    """All logged completions of a run, in order."""
    completions = []
    for file in sorted(run.glob("completions/*.jsonl")):
        completions += read_jsonl(file)
    return completions


# --- command --------------------------------------------------------------------------------------


def warm_up(folder: Path, sft_steps: int) -> Path:
    """The warm start of all runs, which is made where it is not there yet."""
    model = folder / "sft"
    embedded_model("tiny", str(folder))
    if not model.exists():
        command = [sys.executable, "-m", "alignment.sft"]
        command += ["--max_problems", "16", "--num_steps", str(sft_steps)]
        command += ["--sft_base", str(model), "--output_dir", str(folder)]
        subprocess.run(command, env=run_environment(), check=True)
    return model


def is_as_it_should_be(case: Case, outcome: Outcome, difference: str) -> bool:
    return outcome.left == 0 and (case.ends_run or difference.startswith("0 of"))


def main(only: tuple[str, ...] = (), sft_steps: int = 200, keep: str = ""):
    """Print a row for each case as it ends, and the table.

    Args:
        only: Names of cases; all of them where none is named.
        sft_steps: Steps of the warm start.
        keep: A folder that keeps runs; a later call takes warm start and runs of one process from
            there.
    """
    chosen = {name: case for name, case in CASES.items() if not only or name in only}
    console = Console(width=250, markup=False)
    rows = []
    failed = []
    with tempfile.TemporaryDirectory() as temporary, Machines() as machines:
        top = Path(keep or temporary)
        base = ("--sft_base", str(warm_up(top, sft_steps)))
        for number, (name, case) in enumerate(chosen.items()):
            if case.cuts_link and not machines.isolated:
                continue
            flags = (*FLAGS.split(), *base, *REFERENCES[case.reference])
            case_folder = top / name.replace("'", "")
            limited = (*flags, "--rank_timeout", str(RANK_TIMEOUT))
            outcome = run_case(machines, case, case_folder, 29500 + number, limited)
            difference = ""
            if not case.ends_run:
                reference = run_alone(top / case.reference, flags)
                difference = describe_differences(reference, case_folder / RUN_NAME)
            row = (
                name,
                outcome.seconds,
                outcome.exit_codes,
                outcome.line,
                str(outcome.left),
                difference,
            )
            console.print(*row)
            rows.append(row)
            if not is_as_it_should_be(case, outcome, difference):
                failed.append(name)
    place = "two torchruns on 127.0.0.1"
    if machines.isolated:
        place = "network namespaces"
    title = f"two machines of two ranks, an engine each; --rank_timeout {RANK_TIMEOUT}"
    console.print(place, make_table(title, HEADINGS, rows))
    if failed:
        sys.exit(f"not as it should be: {'; '.join(failed)}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
