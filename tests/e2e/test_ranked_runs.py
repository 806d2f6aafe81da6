"""Runs of several processes, started, resumed and stopped as a user does it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from alignment import sft
from alignment.builders.verified_runs import digests
from alignment.model.loading import load_model
from alignment.policy.single_device import read_parts
from alignment.runs.run_folder import TRAINER, checkpoint_folder, last_whole_step
from alignment.system.files import read_jsonl
from alignment.system.ranks import close_ranks
from tests.command_line import exit_code
from tests.e2e.conftest import FEW_PROBLEMS, NAME, SMALL, STEPS, said

pytestmark = pytest.mark.slow

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}


def ranks(kind: str, number: int) -> list[str]:
    return ["--policy_parallelism", kind, "--policy_ranks", str(number)]


SHARDED = ranks("sharded", 3)  # the tensors are not cut evenly


def run_flags(warm: Path, *flags: str) -> list[str]:
    """Beside `SMALL` and the folder."""
    return [*FEW_PROBLEMS, "--sft_base", str(warm), "--keep_checkpoints", "0", *flags]


def command(warm: Path, *flags: str) -> list[str]:
    return ["-m", "alignment.train_rl", *SMALL, "--output_dir", ".", *run_flags(warm, *flags)]


@pytest.fixture(scope="module")
def sharded(warm, launcher, tmp_path_factory) -> Path:
    """The folder of an undisturbed run of three processes."""
    output = tmp_path_factory.mktemp("sharded")
    assert launcher.run(output, *run_flags(warm, *SHARDED)) == 0, said(output)
    return output / NAME


def cut_after_step_2(run: Path, output: Path) -> Path:
    """A copy of the run as if it had been killed in its third step."""
    cut = output / NAME
    shutil.copytree(run, cut)
    for part in ("final", checkpoint_folder(cut, 3).name, checkpoint_folder(cut, 4).name):
        shutil.rmtree(cut / part, ignore_errors=True)
    (cut / "summary.json").unlink()
    return cut


def assert_near(run: Path, other: Path) -> None:
    """The same run but for the order of sums."""
    weights, others = (load_file(folder / "final" / "model.safetensors") for folder in (run, other))
    differences = torch.cat([(weights[name] - others[name]).flatten() for name in weights]).abs()
    assert differences.mean() < 1e-7 and differences.max() < 1e-4
    for record, near in zip(
        *(read_jsonl(folder / "metrics.jsonl") for folder in (run, other)), strict=True
    ):
        assert (
            near["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)
            and near["reward"] == record["reward"]
        )


def test_supervised_fine_tuning_by_two_processes_is_that_of_one(tmp_path, monkeypatch):
    rows = ({"prompt": f"{number} + 3 =", "response": f" {number + 3}"} for number in range(60))
    (tmp_path / "shown.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--num_steps",
        "2",
        "--batch_size",
        "8",
        "--max_problems",
        "4",
        "--max_new_tokens",
        "16",
        "--demonstrations",
        "shown.jsonl",
        "--output_dir",
        ".",
    ]
    monkeypatch.chdir(tmp_path)
    assert exit_code(monkeypatch, sft.main, "alignment.sft", *flags, "--sft_base", "one") == 0
    by_two = [*flags, "--sft_base", "two", *ranks("sharded", 2)]
    assert exit_code(monkeypatch, sft.main, "alignment.sft", *by_two) == 0
    close_ranks()  # which a command leaves to the end of its process
    one, two = (load_file(tmp_path / folder / "model.safetensors") for folder in ("one", "two"))
    assert one.keys() == two.keys() and all(
        (one[name] - two[name]).abs().max() < 1e-5 for name in one
    )


def test_a_resumed_run_has_the_bits_of_the_undisturbed_one(sharded, warm, launcher, tmp_path):
    cut = cut_after_step_2(sharded, tmp_path)
    flags = run_flags(warm, *SHARDED, "--resume")
    assert launcher.run(tmp_path, *flags) == 0, said(tmp_path)
    assert digests(cut) == digests(sharded)


def test_two_ranks_of_which_one_is_killed_and_then_one_process_go_on_with_a_run_of_three(
    sharded, warm, launcher, tmp_path, wait_for
):
    """Three write steps 1 and 2, two step 3, and one process step 4."""
    cut = cut_after_step_2(sharded, tmp_path)
    by_two = run_flags(warm, *ranks("sharded", 2), "--resume")
    pid = launcher.start(tmp_path, *by_two, pause=3)
    wait_for(checkpoint_folder(cut, 3).exists)
    (follower,) = psutil.Process(pid).children()
    follower.kill()
    assert launcher.wait() == 1
    assert "error: rank 1 of 2 on " in said(tmp_path) and "killed by SIGKILL" in said(tmp_path)
    assert "go on with: uv run -m alignment.train_rl" in said(tmp_path)
    assert not psutil.pid_exists(follower.pid)
    by_one = run_flags(warm, "--policy_parallelism", "single", "--resume")
    assert launcher.run(tmp_path, *by_one) == 0, said(tmp_path)
    assert_near(cut, sharded)
    files = [len(list((checkpoint_folder(cut, step) / TRAINER).iterdir())) for step in (2, 3, 4)]
    assert files == [3, 2, 1]


@pytest.mark.parametrize(
    ("harm", "said"), [("lost", "is missing"), ("flipped", "has changed since it was written")]
)
def test_a_ranks_part_that_is_lost_or_damaged_is_named_and_the_step_before_is_used(
    sharded, tmp_path, harm, said
):
    cut = cut_after_step_2(sharded, tmp_path)
    folder = checkpoint_folder(cut, 2) / TRAINER
    part = sorted(folder.iterdir())[2]
    if harm == "lost":
        part.unlink()
        parameters = list(
            load_model(str(checkpoint_folder(cut, 1)), ("cpu",), torch.float32).parameters()
        )
        with pytest.raises(OSError, match=r"parts of \d+\.exp_avg are missing"):
            read_parts(folder, parameters)
    else:
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    step, damages = last_whole_step(cut)
    assert step == 1 and damages == [
        f"{checkpoint_folder(cut, 2)} is damaged: {TRAINER}/{part.name} {said}"
    ]


def test_two_machines_go_on_with_a_run_of_three_processes(sharded, warm, tmp_path):
    """Two torchruns; a run that is named goes on by itself. Each machine holds all of the policy;
    the first one writes it."""
    cut = cut_after_step_2(sharded, tmp_path)
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc_per_node",
        "2",
        "--rdzv_backend",
        "c10d",
    ]
    torchrun += [
        "--rdzv_endpoint",
        f"127.0.0.1:{20000 + os.getpid() % 10000}",
        "--rdzv_id",
        "test",
    ]
    line = [*torchrun, *command(warm, "--policy_parallelism", "sharded")]
    logs = [tmp_path / "machine0.log", tmp_path / "machine1.log"]
    machines = []
    for log in logs:
        with log.open("w") as said:
            options = {
                "cwd": tmp_path,
                "env": ENVIRONMENT,
                "stdout": said,
                "stderr": subprocess.STDOUT,
            }
            machines.append(subprocess.Popen([sys.executable, *line], **options))
    try:
        codes = [machine.wait() for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
        print(*(log.read_text() for log in logs), sep="\n--- the other machine ---\n")
    assert codes == [0, 0]
    assert_near(cut, sharded)
    assert last_whole_step(cut) == (STEPS, [])
