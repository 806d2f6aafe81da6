"""A run of two machines, with sampling engines on both, beside one process; and what it does when
an engine or a machine is lost.

uv run -m benchmarks.machines                       # as root in two network namespaces, else by two
torchruns on 127.0.0.1 uv run -m benchmarks.machines --only undisturbed "engine killed"
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import tyro
from rich.console import Console
from rich.table import Table

from alignment.data.embedded import embedded_model
from alignment.sampling.transformers import open_transformers
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

DEADLINE = 60  # --rank_timeout
HANG_SECONDS = 20  # --sampler_timeout where an engine hangs
STEPS = 4
HARMED_VERSION = 2  # of the weights with which the engine that is harmed samples
COLUMNS = (
    "reward",
    "answer_reward",
    "format_reward",
    "response_length",
    "zero_variance_groups",
    "grad_norm",
)
FLAGS = [
    "--preset",
    "tiny",
    "--prompts_per_rollout",
    "6",
    "--group_size",
    "4",
    "--max_problems",
    "16",
    "--num_steps",
    str(STEPS),
]
FLAGS += [
    "--train_mini_batch_size",
    "24",
    "--eval_interval",
    "2",
    "--save_interval",
    "1",
    "--keep_checkpoints",
    "0",
]
FLAGS += ["--run_name", "run", "--sampler", "benchmarks.machines:harmed_engine"]
CASES = {
    "undisturbed": "",
    "three engines": "",
    "async": "",
    "engine killed": "SIGKILL",
    "engine stopped": "SIGSTOP",
    "machine's processes killed": "wait",
    "machine's network lost": "wait",
}


def harmed_engine(config, tokenizer, policy):
    """A transformers sampler that harms itself once, as the file "harm" says, where it is another
    machine's and has the weights of `HARMED_VERSION`."""
    sampler, shared = (
        open_transformers(config, tokenizer, policy),
        Path(os.environ["MACHINES_CASE"]),
    )
    draw = sampler.sample

    def sample(prompts, sampling, *others):
        harm = (shared / "harm").read_text()
        if (
            harm
            and sampling.first_prompt
            and sampler.policy_version == HARMED_VERSION
            and not (shared / "harmed").exists()
        ):
            (shared / "harmed").write_text(str(time.time()))
            time.sleep(3600) if harm == "wait" else os.kill(os.getpid(), getattr(signal, harm))
        return draw(prompts, sampling, *others)

    sampler.sample = sample
    return sampler


class Machines:
    """Two machines: network namespaces with a link between them, or 127.0.0.1 twice where they
    cannot be made."""

    def __init__(self):
        self.names = [f"machine{os.getpid()}{letter}" for letter in "ab"]
        self.isolated = os.geteuid() == 0 and shutil.which("ip") is not None
        self.addresses = ["10.77.0.1", "10.77.0.2"] if self.isolated else ["127.0.0.1"] * 2

    def __enter__(self) -> Machines:
        if self.isolated:
            links = [f"link{letter}" for letter in "ab"]
            for name in self.names:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            self._ip(
                "-n",
                self.names[0],
                "link",
                "add",
                links[0],
                "type",
                "veth",
                "peer",
                "name",
                links[1],
                "netns",
                self.names[1],
            )
            for name, link, address in zip(self.names, links, self.addresses, strict=True):
                self._ip("-n", name, "address", "add", f"{address}/24", "dev", link)
                # Names, as machines have them: torch looks up that of every address, and would wait
                # for a name server.
                (folder := Path("/etc/netns", name)).mkdir(parents=True)
                (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
                hosts = zip(self.addresses, self.names, strict=True)
                (folder / "hosts").write_text(
                    "127.0.0.1 localhost\n" + "".join(f"{at} {host}\n" for at, host in hosts)
                )
            self.connect(True)
        return self

    def connect(self, connected: bool) -> None:
        for name, letter in zip(self.names, "ab", strict=True):
            self._ip("-n", name, "link", "set", f"link{letter}", "up" if connected else "down")

    def __exit__(self, *error) -> None:
        for name in self.names if self.isolated else ():
            self._ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name))

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    def start(self, shared: Path, port: int, *flags: str) -> list[subprocess.Popen]:
        """A torchrun of two ranks on each machine, each in a folder of its own, and the run in the
        folder `shared`."""
        started = []
        for number, (name, letter) in enumerate(zip(self.names, "ab", strict=True)):
            folder = shared / f"machine {letter}"
            folder.mkdir()
            line = [
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc_per_node",
                "2",
                "--rdzv_backend",
                "c10d",
            ]
            line += [
                "--rdzv_endpoint",
                f"{self.addresses[0]}:{port}",
                "--rdzv_id",
                "machines",
                "--rdzv_conf",
            ]
            line += [
                f"is_host={1 - number}",
                "--local_addr",
                self.addresses[number],
                "-m",
                "alignment.train_rl",
                "--policy_parallelism",
                "sharded",
                *flags,
            ]
            named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$0" "$@"']
            inside = ["ip", "netns", "exec", name, *named] if self.isolated else []
            network = {"GLOO_SOCKET_IFNAME": f"link{letter}"} if self.isolated else {}
            with (folder / "log").open("wb") as log:
                output = {"stdout": log, "stderr": log}
                command = [*inside, sys.executable, *line]
                started.append(
                    subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environment(shared, MACHINE=letter, **network),
                        **output,
                    )
                )
            time.sleep(0 if number else 2)  # so that the first one keeps the store
        return started


def environment(shared: Path, **more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "MACHINES_CASE": str(shared),
        **more,
    }


def processes_of(shared: Path, machine: str | None = None) -> list[psutil.Process]:
    """The processes of a case that are alive, those of one of its machines where one is named."""
    found = []
    for process in psutil.process_iter():
        try:
            own = process.environ()
            mine = own.get("MACHINES_CASE") == str(shared) and machine in (None, own.get("MACHINE"))
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


def alone(shared: Path, *flags: str) -> Path:
    """The folder of a run of one process with one engine."""
    if (shared / "run" / "summary.json").exists():  # of an earlier call with --keep
        return shared / "run"
    prepare(shared, "")
    line = [sys.executable, "-m", "alignment.train_rl", *flags, "--policy_parallelism", "single"]
    done = subprocess.run(line, cwd=shared, env=environment(shared), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return shared / "run"


def prepare(shared: Path, harm: str) -> None:
    shared.mkdir()
    (shared / "harm").write_text(harm)


def differences(run: Path, other: Path) -> str:
    """How many completions have other tokens, and by how much columns and accuracies differ."""
    drawn = [
        [(c["question"], c["token_ids"]) for c in completions(folder)] for folder in (run, other)
    ]
    if len(drawn[0]) != len(drawn[1]):
        return f"{len(drawn[1])} completions instead of {len(drawn[0])}"
    unlike = sum(one != two for one, two in zip(*drawn, strict=True))
    steps = list(
        zip(*(read_jsonl(folder / "metrics.jsonl") for folder in (run, other)), strict=True)
    )
    apart = {
        name: max(abs(one[name] - two[name]) for one, two in steps)
        for name in COLUMNS
        if name in steps[0][0]
    }
    evaluations = zip(*(read_jsonl(folder / "evals.jsonl") for folder in (run, other)), strict=True)
    apart["avg_answer_rewards"] = max(
        abs(one["avg_answer_rewards"] - two["avg_answer_rewards"]) for one, two in evaluations
    )
    words = ", ".join(
        f"{name} {value:.0e}" if value else f"{name} 0" for name, value in apart.items()
    )
    return f"{unlike} of {len(drawn[0])} completions; largest differences: {words}"


def completions(run: Path) -> list[dict]:
    return [
        json.loads(line)
        for file in sorted(run.glob("completions/*.jsonl"))
        for line in file.read_text().splitlines()
    ]


def outcome(machines: Machines, case: str, shared: Path, port: int, flags: list[str]) -> list[str]:
    """Seconds from the fault to the line that tells of the lost engine, or to the end of all
    processes, the line that says so, and how many processes were left."""
    prepare(shared, CASES[case])
    begun = time.time()
    started = machines.start(shared, port, "--output_dir", str(shared), *flags)
    while not (shared / "harmed").exists() and any(process.poll() is None for process in started):
        time.sleep(0.05)
    at = float((shared / "harmed").read_text()) if (shared / "harmed").exists() else begun
    if case == "machine's processes killed":
        at = time.time()
        for process in processes_of(shared, "b"):
            if (
                "alignment.train_rl" in process.cmdline()
                and "torch.distributed.run" not in process.cmdline()
            ):
                # its ranks: the engine, the torchrun and rank 0 have to notice by themselves
                process.kill()
    if case == "machine's network lost":
        at = time.time()
        machines.connect(False)
    # whose torchrun waits for its own store, for ever
    replaced, cut_off = (
        None,
        case == "machine's network lost",
    )
    while any(process.poll() is None for process in started[: 1 if cut_off else 2]):
        if replaced is None and "started again" in (shared / "machine a" / "log").read_text(
            errors="replace"
        ):
            replaced = time.time() - at
        time.sleep(0.05)
        if time.time() - at > 500:
            break
    while left := [
        p for p in processes_of(shared) if not (cut_off and "torch.distributed.run" in p.cmdline())
    ]:
        if time.time() - at > 500:
            break
        time.sleep(0.1)
    ended = time.time() - at
    for process in processes_of(shared):
        process.kill()
    if case == "machine's network lost":
        machines.connect(True)
    lines = "".join(
        (shared / f"machine {letter}" / "log").read_text(errors="replace") for letter in "ab"
    ).splitlines()
    words = ("error: ", "the sampler is started again: ", "engines sample on")
    said = next(
        (line[line.index(word) :] for word in words for line in lines if word in line),
        lines[-1] if lines else "",
    )
    codes = [str(process.poll()) for process in started]
    seconds = (
        f"{replaced:.1f} until it is noticed"
        if replaced and CASES[case].startswith("SIG")
        else f"{ended:.1f}"
    )
    return [seconds, " ".join(codes), re.sub(r"; go on.*", "", said), str(len(left))]


def main(only: tuple[str, ...] = (), sft_steps: int = 200, keep: str = ""):
    """Print the table; exit code 1 where completions differ, a process is left, or a run takes
    longer than it may."""
    table = Table(title=f"two machines of two ranks, an engine each; --rank_timeout {DEADLINE}")
    for heading in (
        "case",
        "seconds",
        "exit codes",
        "line",
        "left",
        "beside one process with one engine",
    ):
        table.add_column(heading, overflow="fold")
    bad = []
    with tempfile.TemporaryDirectory() as name, Machines() as machines:
        top = Path(keep or name)
        base = str(top / "sft")
        flags = [
            "--num_steps",
            str(sft_steps),
            "--max_problems",
            "16",
            "--sft_base",
            base,
            "--output_dir",
            str(top),
        ]
        embedded_model("tiny", str(top))
        if not Path(base).exists():
            subprocess.run(
                [sys.executable, "-m", "alignment.sft", *flags], env=environment(top), check=True
            )
        reference = alone(
            top / "alone", *FLAGS, "--sft_base", base, "--output_dir", str(top / "alone")
        )
        ahead = [*FLAGS, "--sft_base", base, "--rollouts", "async", "--loss_type", "grpo_clip"]
        for number, case in enumerate(case for case in CASES if not only or case in only):
            expected, own = reference, [*FLAGS, "--sft_base", base, "--rank_timeout", str(DEADLINE)]
            if case == "async":
                expected = alone(
                    top / "alone async", *ahead, "--output_dir", str(top / "alone async")
                )
                own = [*ahead, "--rank_timeout", str(DEADLINE)]
            if case == "three engines":
                own += ["--sample_device", "cpu", "cpu", "cpu"]
            if CASES[case] == "SIGSTOP":
                own += ["--sampler_timeout", str(HANG_SECONDS)]
            if case == "machine's network lost" and not machines.isolated:
                continue
            found = outcome(machines, case, top / case.replace("'", ""), 29500 + number, own)
            run = top / case.replace("'", "") / "run"
            ends = CASES[case] == "wait"
            compared = (
                ""
                if ends
                else (
                    differences(expected, run)
                    if (run / "summary.json").exists()
                    else "it did not end"
                )
            )
            table.add_row(case, *found, compared)
            Console(width=250, markup=False).print(case, *found, compared)
            if found[-1] != "0" or not ends and not compared.startswith("0 of"):
                bad.append(case)
    where = "network namespaces" if machines.isolated else "two torchruns on 127.0.0.1"
    Console(width=250, markup=False).print(where, table)
    if bad:
        raise UserError(f"not as it should be: {'; '.join(bad)}")


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
