"""Faults, injected into real runs: killed anywhere, stopped by signals, out of disk, beside another
run of the same folder."""

import dataclasses
import errno
import hashlib
import importlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from alignment import train_rl
from alignment.args import RLArgs, from_preset
from alignment.builders.verified_runs import digests
from alignment.rewards.rules import CONTROLS, RULES, make_part
from alignment.runs import run as run_module
from alignment.runs.run_folder import last_whole_step
from alignment.system.errors import run_command
from alignment.system.files import read_jsonl
from alignment.system.locks import lock_run_folder
from alignment.system.manifests import find_damage
from tests.command_line import exit_code
from tests.e2e.conftest import NAME, SMALL, STEPS, Launcher, said
from tests.files import digest

pytestmark = pytest.mark.slow

ENDS_A_RUN = 5


@pytest.fixture(autouse=True)
def quick_ends(undrawn_curve):
    """A run's end in this process takes no longer than its steps."""


@pytest.fixture(scope="module")
def straight(warm, launcher, tmp_path_factory):
    """The undisturbed run, and how many calls it makes in each phase."""
    output = tmp_path_factory.mktemp("straight")
    code = launcher.run(output, "--sft_base", str(warm), count=str(output / "counts.json"))
    assert code == 0, (output / "log").read_text()
    return output / NAME, json.loads((output / "counts.json").read_text())


# --- killed and stopped ---------------------------------------------------------------------------


def resume(launcher: Launcher, warm: Path, output: Path, *flags: str, **request) -> int:
    """Go on, or begin where the run was killed before it had a folder."""
    started = (output / NAME / "args.json").exists()
    return launcher.run(
        output, "--sft_base", str(warm), *(["--resume"] if started else []), *flags, **request
    )


@dataclasses.dataclass(frozen=True)
class Ending:
    """A signal that ends runs, in all phases but `without`, in the middle of what a run with
    `flags` does."""

    number: int
    code: int
    times: int
    without: frozenset[str]
    flags: tuple[str, ...]


KILL = Ending(signal.SIGKILL, -signal.SIGKILL, 22, frozenset(), ())
# No checkpoint is due before the end, so that those that are there are the signal's.
STOP = Ending(signal.SIGTERM, 143, 8, frozenset({"report", "start"}), ("--save_interval", "100"))


@pytest.mark.parametrize("ending", [KILL, STOP], ids=["SIGKILL", "SIGTERM"])
def test_a_run_ended_anywhere_and_resumed_ends_as_the_undisturbed_one(
    ending, straight, warm, launcher, tmp_path
):
    """Ended at points drawn from every phase, inside checkpoints, evaluations and weight syncs too.

    A run is ended several times on its way: of what it resumes, no kill reaches further than the
    last.
    """
    run, counts = straight
    expected = digests(run)
    rng, ended = random.Random(7), Counter()
    assert {
        "checkpoint",
        "evaluation",
        "weight sync",
        "update",
        "sampling",
        "logging",
        "start",
        "final",
    } <= set(counts)
    phases = sorted(set(counts) - ending.without)
    for trial in itertools.count():
        output, points = tmp_path / str(trial), []
        while not (output / NAME / "summary.json").exists():
            phase = phases[ended.total() % len(phases)]
            points.append(
                (phase, rng.randint(1, max(1, counts[phase] // (1 if len(points) == 0 else STEPS))))
            )
            last = ended.total() >= ending.times or len(points) > ENDS_A_RUN
            request = {} if last else {"phase": phase, "nth": points[-1][1]}
            request["signal"] = int(ending.number)
            code = resume(launcher, warm, output, *ending.flags, **request)
            ended[phase] += code == ending.code
            assert code in (0, ending.code) and "Traceback" not in said(output), said(output)
        assert digests(output / NAME) == expected, f"ended at {points}"
        assert not list(output.rglob(".*.tmp"))
        if ended.total() >= ending.times:
            break
    assert set(ended) == set(phases)
    print(f"\n{ended.total()} times: {dict(ended)}; weights {expected['weights'][:16]}")


def test_two_runs_with_one_seed_write_the_same_and_other_seeds_do_not(
    straight, warm, launcher, tmp_path
):
    run, _ = straight
    expected = digests(run)
    assert launcher.run(tmp_path / "same", "--sft_base", str(warm)) == 0
    assert digests(tmp_path / "same" / NAME) == expected
    asked = [
        record["problem"] for record in read_jsonl(run / "completions" / "rollout_000001.jsonl")
    ]
    for flag, same_order in (("--sampling_seed", True), ("--data_seed", False)):
        output = tmp_path / flag.strip("-")
        assert launcher.run(output, "--sft_base", str(warm), flag, "5") == 0
        other = read_jsonl(output / NAME / "completions" / "rollout_000001.jsonl")
        assert ([record["problem"] for record in other] == asked) == same_order
        assert digests(output / NAME)["weights"] != expected["weights"]
    assert json.loads((output / NAME / "args.json").read_text())["seeds"] == {
        "data": 5,
        "sampling": 0,
        "model": 0,
    }


# --- signals --------------------------------------------------------------------------------------


def children_of(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_what_is_done_and_the_run_goes_on_from_there(
    number, code, straight, warm, launcher, tmp_path, wait_for
):
    """No checkpoint is due before the end, so the one that is there is the signal's."""
    flags = ["--sft_base", str(warm), "--save_interval", "100"]
    pid = launcher.start(tmp_path, *flags, workers=True, pause=0.5)
    run = tmp_path / NAME
    wait_for(lambda: len(read_jsonl(run / "metrics.jsonl")) >= 2)
    workers = children_of(pid)
    assert workers
    os.kill(pid, number)
    assert launcher.wait() == code
    done, wrong = last_whole_step(run)
    assert done == len(read_jsonl(run / "metrics.jsonl")) >= 2 and wrong == []
    stopped = f"stopped after step {done} ({signal.Signals(number).name})"
    assert f"{stopped}; go on with: uv run -m alignment.train_rl --resume {run}\n" in said(tmp_path)
    assert "Traceback" not in said(tmp_path)
    assert psutil.wait_procs(workers, timeout=40)[1] == []
    if os.path.isdir("/dev/shm"):
        assert [
            name for name in os.listdir("/dev/shm") if str(pid) in name.replace("_", " ").split()
        ] == []
    assert not list(tmp_path.rglob(".*.tmp"))
    assert launcher.run(tmp_path, *flags, "--resume") == 0
    assert digests(run) == digests(straight[0])


def test_ctrl_c_while_a_command_is_still_importing_is_no_traceback(wait_for):
    process = subprocess.Popen(
        [sys.executable, "-m", "alignment.evaluate"], stderr=subprocess.PIPE, text=True
    )
    # of about ten seconds that the imports take
    wait_for(lambda: psutil.Process(process.pid).cpu_times().user > 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode in (-signal.SIGINT, 130) and "Traceback" not in errors


def test_an_interrupted_import_that_fails_otherwise_is_no_traceback(capsys):
    def main() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except BaseException:
            raise ImportError("cannot import name 'tensor'") from None

    with pytest.raises(SystemExit) as stop:
        run_command(main)
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted by SIGINT\n"
    with pytest.raises(ImportError):
        run_command(lambda: importlib.import_module("alignment.nothing"))


def test_a_second_signal_ends_even_what_is_held():
    """A second signal within a moment is the same one, as it reaches a process group; a later one
    means it."""
    script = """if True:
        import os, signal, time
        from alignment.system import signals
        with signals.interruptible():
            signals.defer_signals()
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            print("held", flush=True)
            time.sleep(signals.REPEAT_SECONDS + 0.1)
            os.kill(os.getpid(), signal.SIGINT)
            print("not reached", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "held\n")


# --- the disk -------------------------------------------------------------------------------------


def test_a_disk_that_is_full_leaves_the_last_checkpoint_whole(straight, warm, launcher, tmp_path):
    """A limit on file sizes stands for the full disk: the weights fit below it, the optimiser's
    state does not."""
    assert launcher.run(tmp_path, "--sft_base", str(warm), "--num_steps", "2") == 0
    (tmp_path / "log").unlink()
    assert resume(launcher, warm, tmp_path, file_limit=3_000_000) == 1
    run, errors = tmp_path / NAME, [line for line in said(tmp_path).splitlines() if "error" in line]
    assert len(errors) == 1 and "Traceback" not in said(tmp_path)
    assert (
        "step_000003 could not be written" in errors[0]
        and "its checkpoint of step 2 is whole" in errors[0]
    )
    assert last_whole_step(run) == (2, []) and not list(run.rglob(".*.tmp"))
    assert resume(launcher, warm, tmp_path) == 0
    assert digests(run) == digests(straight[0])


def test_the_newest_whole_checkpoint_is_used_and_a_damaged_one_is_named_and_kept(
    straight, warm, launcher, tmp_path
):
    assert launcher.run(tmp_path, "--sft_base", str(warm), "--num_steps", "3") == 0
    run = tmp_path / NAME
    weights = run / "step_000003" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1  # one bit, which loads without complaint
    weights.write_bytes(content)
    assert find_damage(run / "step_000003") == "model.safetensors has changed since it was written"
    assert launcher.run(tmp_path, "--sft_base", str(warm), "--resume") == 0
    assert (
        "step_000003 is damaged: model.safetensors has changed since it was written; it is put"
        " aside" in said(tmp_path).replace("\n", " ")
    )
    put_aside = run / "damaged_step_000003" / "model.safetensors"
    assert digest(put_aside) == hashlib.sha256(content).hexdigest()
    ours, theirs = digests(run), digests(straight[0])
    assert {name for name in ours if ours[name] != theirs[name]} <= {"evaluations"}


# --- in process -----------------------------------------------------------------------------------


def main(monkeypatch, warm: Path, output: Path, *flags: str) -> int:
    words = ["train_rl", *SMALL, "--sft_base", str(warm), "--output_dir", str(output), *flags]
    return exit_code(monkeypatch, train_rl.main, *words)


def test_a_folder_in_use_is_refused_and_a_stale_lock_is_not(warm, tmp_path, monkeypatch, capsys):
    assert main(monkeypatch, warm, tmp_path, "--num_steps", "1") == 0
    run = tmp_path / NAME
    with lock_run_folder(run):
        assert main(monkeypatch, warm, tmp_path, "--num_steps", "2", "--resume") == 2
    assert f"{run} is in use by process {os.getpid()} on" in capsys.readouterr().err
    (run / ".lock").write_text("process 1 on some machine that was switched off\n")
    assert main(monkeypatch, warm, tmp_path, "--num_steps", "2", "--resume") == 0


def test_steps_without_a_finite_gradient_are_skipped_kept_and_at_last_stop_the_run(
    warm, tmp_path, monkeypatch, capsys
):
    """Rewards that are no numbers in steps 2, 4, 5 and 6, by a reward function that counts its
    calls."""
    calls = iter(range(-2, 10_000))  # the first two are for made-up responses, before a model loads

    def reward(problem, text, score):
        return float("nan") if next(calls) // 8 + 1 in (2, 4, 5, 6) else float(len(text) % 2)

    monkeypatch.setitem(CONTROLS, "random", make_part(reward))
    flags = [
        "--num_steps",
        "9",
        "--max_bad_steps",
        "3",
        "--train_mini_batch_size",
        "0",
        "--loss_type",
        "no_baseline",
    ]
    assert main(monkeypatch, warm, tmp_path, *flags, "--save_interval", "100") == 1
    run = tmp_path / NAME
    steps = read_jsonl(run / "metrics.jsonl")
    assert [(s["updates"], s["bad_updates"]) for s in steps] == [
        (1, 0),
        (0, 1),
        (1, 0),
        (0, 1),
        (0, 1),
        (0, 1),
    ]
    kept = sorted(file.name for file in (run / "bad_batches").iterdir())
    assert kept == [f"step_{step:06d}_1.safetensors" for step in (2, 4, 5, 6)]
    batch = load_file(run / "bad_batches" / kept[0])
    assert (
        batch["raw_rewards_B1"].isnan().all() and batch["input_ids"].shape == batch["labels"].shape
    )
    captured = capsys.readouterr()
    assert (
        "3 steps in a row had no finite loss and gradient" in captured.err.splitlines()[-1]
        and captured.err.count("\n") == 2  # behind the warning that responses were cut off
    )
    # saved when it stopped; the weights are those after step 3
    assert last_whole_step(run) == (
        6,
        [],
    )
    assert all(
        tensor.isfinite().all()
        for tensor in load_file(run / "step_000006" / "model.safetensors").values()
    )


def test_a_disk_that_is_full_at_the_end_is_the_systems_error(warm, tmp_path, monkeypatch, capsys):
    def fail(path, *rest):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(run_module, "write_summary", fail)
    assert main(monkeypatch, warm, tmp_path, "--num_steps", "1") == 2
    said = capsys.readouterr().err
    _warning_of_cut_off_responses, error = said.splitlines()
    assert error == f"error: {tmp_path / NAME}: no space left on device"
    assert last_whole_step(tmp_path / NAME) == (1, [])


@pytest.mark.parametrize(("rollouts", "trained"), [("sync", [1]), ("async", [2, 3])])
def test_a_sampler_that_loses_a_tensor_stops_the_run_before_it_samples(
    rollouts, trained, warm, tmp_path, monkeypatch, capsys
):
    """The transfer after step 2, at a learning rate that log-probs do not show. What was sampled
    ahead with the weights of step 1 may still be trained on."""
    flags = [
        "--sampler",
        "tests.sampling.test_arrival:open_faulty",
        "--rollouts",
        rollouts,
        "--learning_rate",
        "1e-7",
    ]
    flags += ["--eval_interval", "100"]
    assert main(monkeypatch, warm, tmp_path, *flags) == 1
    said = capsys.readouterr().err
    assert (
        "after step 2 the sampler holds other weights than the trainer: 1 of 26 tensors differ,"
        " such as model.layers.1" in said
    )
    last = read_jsonl(tmp_path / NAME / "metrics.jsonl")[-1]["step"]
    # rollouts sampled ahead are lost
    assert last in trained and last_whole_step(tmp_path / NAME)[0] in (
        last,
        last - 1,
    )


def test_gradings_that_fail_are_counted_and_too_many_stop_the_run(
    warm, tmp_path, monkeypatch, capsys
):
    def reward_fn(text, truth):
        return {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0, "grading_failed": 1.0}

    monkeypatch.setitem(RULES, "r1_zero", reward_fn)
    assert main(monkeypatch, warm, tmp_path, "--max_grader_failures", "0.1") == 1
    steps = read_jsonl(tmp_path / NAME / "metrics.jsonl")
    # 24 of 24, more than a tenth of 20 steps' 160
    assert [s["grading_failed"] for s in steps] == [
        8,
        8,
        8,
    ]
    assert "grading failed on 24 of 24 answers" in capsys.readouterr().err


def test_arguments_say_where_each_seed_comes_from():
    args = from_preset(RLArgs, "tiny", seed=3, sampling_seed=9)
    assert args.seeds == {"data": 3, "sampling": 9, "model": 3}
