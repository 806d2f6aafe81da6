"""What a resumed run's first update begins with: the killed run's state on any device, and the
fault that loses a part of it."""

import dataclasses
import hashlib
import math
import shutil
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from rich.console import Console

from alignment import verify
from alignment.args import RLArgs, from_preset
from alignment.builders import training, verified_data, verified_runs, verified_updates
from alignment.builders.checks import check_rl
from alignment.builders.verified_runs import differing_parts, log_as_killed_later, other_state
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts import source
from alignment.rollouts.config import RolloutConfig
from alignment.runs.state import digest_of_tensors, read_state
from alignment.system.files import read_json, read_jsonl, write_json, write_jsonl
from alignment.train_rl import train
from alignment.verification import checks
from alignment.verification.checks import Check, promises_bits
from alignment.verify import report
from tests.command_line import exit_code

STEPS = 2


def arguments(folder, base, **others) -> RLArgs:
    facts = {
        "prompts_per_rollout": 2,
        "group_size": 4,
        "train_mini_batch_size": 4,
        "max_new_tokens": 8,
        "max_problems": 2,
        "num_problems": 64,  # of 23,677, all of which every start would encode
    }
    facts |= {
        "reward": "random",
        "num_steps": STEPS,
        "eval_interval": 2,
        "save_interval": 1,
        "log_state": True,
    }
    return from_preset(
        RLArgs, "tiny", output_dir=str(folder), sft_base=str(base), run_name="run", **facts | others
    )


def trained(args: RLArgs):
    check_rl(args)
    return train(args, Console(quiet=True))


@pytest.fixture(scope="module")
def straight(small_folder, tmp_path_factory):
    """A run of two steps with a checkpoint after each."""
    return trained(arguments(tmp_path_factory.mktemp("straight"), small_folder))


@pytest.fixture
def resumed(straight, small_folder, tmp_path):
    """A function that resumes a copy of that run, as it was when it was killed in its second step;
    returns its folder."""

    def resume():
        shutil.copytree(straight, tmp_path / "run")
        for name in ("step_000002", "final"):
            shutil.rmtree(tmp_path / "run" / name)
        (tmp_path / "run" / "summary.json").unlink()
        return trained(arguments(tmp_path, small_folder, resume=True))

    return resume


def differences(straight, run) -> list[str]:
    return other_state(read_state(straight, 2), read_state(run, 2), sampled_before=False)


def noisy_step(policy, rate, real=SingleDevicePolicy.step) -> None:
    """As on a GPU, whose sums are in no fixed order: the gradient's last digits are others each
    time."""
    for parameter in policy.model.parameters():
        parameter.grad *= 1 + 1e-6 * torch.rand(
            parameter.shape, generator=torch.Generator().manual_seed(torch.seed())
        )
    real(policy, rate)


def test_a_digest_is_of_names_shapes_types_and_bits():
    pairs = [("a", torch.tensor([[1.0, 2.0]])), ("b", torch.tensor(3.0, dtype=torch.bfloat16))]
    text = (
        b"a (1, 2) torch.float32" + b"\0\0\x80\x3f\0\0\0\x40" + b"b () torch.bfloat16" + b"\x40\x40"
    )
    assert digest_of_tensors(pairs) == hashlib.sha256(text).hexdigest()
    assert digest_of_tensors(pairs[::-1]) != digest_of_tensors(pairs)


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_killed_ones_state(straight, resumed):
    run = resumed()
    assert [record["step"] for record in read_jsonl(run / "state.jsonl")] == [1, 2]
    assert differences(straight, run) == [] == differing_parts(straight, run)
    first, second = (read_state(straight, step) for step in (1, 2))
    assert all(
        first[part] != second[part]
        for part in ("weights", "moments", "problems", "sampling_seed", "completions")
    )


@pytest.mark.slow
def test_other_bits_in_an_update_are_no_other_beginning(straight, resumed, monkeypatch):
    """The second step's update itself differs, and so does all that follows from it."""
    monkeypatch.setattr(SingleDevicePolicy, "step", noisy_step)
    run = resumed()
    assert differences(straight, run) == []
    assert {"weights", "optimizer"} <= set(differing_parts(straight, run))


@pytest.mark.slow
def test_lost_moments(straight, resumed, monkeypatch):
    monkeypatch.setattr(SingleDevicePolicy, "load_optimizer", lambda policy, folder: None)
    assert differences(straight, resumed()) == ["moments"]


@pytest.mark.slow
def test_swapped_moments(straight, resumed, monkeypatch):
    """The first parameter's two moments change places."""
    real = SingleDevicePolicy.load_optimizer

    def swap(policy, folder):
        real(policy, folder)
        state = next(iter(policy.optimizer.state.values()))
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]

    monkeypatch.setattr(SingleDevicePolicy, "load_optimizer", swap)
    assert differences(straight, resumed()) == ["moments"]


@pytest.mark.slow
def test_a_shifted_order_of_the_data(straight, resumed, monkeypatch):
    real = source.problems_of_step

    def shifted(problems, number, seed, step):
        return real(problems, number, seed, step + 1)

    monkeypatch.setattr(source, "problems_of_step", shifted)
    assert differences(straight, resumed()) == ["problems"]


@pytest.mark.slow
def test_a_lost_seed(straight, resumed, monkeypatch):
    real = RolloutConfig.sampling_of_step

    def unseeded(config, *step):
        return dataclasses.replace(real(config, *step), seed=1234)

    monkeypatch.setattr(RolloutConfig, "sampling_of_step", unseeded)
    assert differences(straight, resumed()) == ["sampling_seed"]


@pytest.mark.slow
def test_weights_that_are_rounded_on_their_way(straight, resumed, monkeypatch):
    real = training.make_policy

    def rounding(*arguments):
        policy = real(*arguments)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.copy_(parameter.bfloat16())
        return policy

    monkeypatch.setattr(training, "make_policy", rounding)
    assert differences(straight, resumed()) == ["weights"]


def test_completions_count_where_the_checkpoint_holds_them():
    before = OrderedDict(weights="a", completions="b")
    after = {"weights": "a", "completions": "c"}
    assert other_state(before, after, sampled_before=False) == []
    assert other_state(before, after, sampled_before=True) == ["completions"]


def test_a_gpu_promises_bits_with_deterministic_kernels_alone():
    assert promises_bits(("cpu", "cpu:0"), False) and promises_bits(("cuda:0", "cpu"), True)
    assert not promises_bits(("cpu", "cuda:0"), False)


def peaks_as_predicted(summary: Path) -> None:
    """Write the predicted peaks in the place of the measured ones, which the command compares:
    what other tests have left in this process is resident, too."""
    facts = read_json(summary)
    for phases in facts["peak_bytes"].values():
        for phase, (_, predicted) in phases.items():
            phases[phase] = [predicted, predicted]
    write_json(summary, facts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "flags", "code"), [(("cpu",), (), 1), ((), (), 0), ((), ("--deterministic",), 1)]
)
def test_the_command_fails_for_other_bits_where_they_are_promised(
    kinds, flags, code, straight, tmp_path, monkeypatch
):
    """A resumed run whose update differs, on a CPU, on a kind of device that promises no bits, and
    there with --deterministic."""
    run = tmp_path / "other"
    undisturbed = tmp_path / "straight"
    shutil.copytree(straight, undisturbed)
    peaks_as_predicted(undisturbed / "summary.json")
    shutil.copytree(undisturbed, run)
    (run / "metrics.jsonl").write_text(
        (undisturbed / "metrics.jsonl").read_text().replace('"grad_norm": ', '"grad_norm": 1')
    )

    def trained_before(rl, killed, console):
        shutil.copytree(undisturbed, f"{rl.output_dir}/{rl.run_name}")
        shutil.copytree(run, killed)
        return other_state(read_state(straight, 2), read_state(killed, 2), sampled_before=False)

    monkeypatch.setattr(checks, "SAME_BITS", kinds)
    monkeypatch.setattr(checks, "checks_without_model", lambda config: [])
    monkeypatch.setattr(verified_data, "checks_of_rewards", lambda args: [])
    monkeypatch.setattr(verified_data, "checks_of_data", lambda args, base: [])
    monkeypatch.setattr(verified_updates, "training_checks", lambda args, base: [])
    monkeypatch.setattr(verified_updates, "first_weights", lambda args, plan: {})
    monkeypatch.setattr(verified_runs, "short_run_checks", lambda *arguments: [])
    monkeypatch.setattr(verified_runs, "train_and_resume", trained_before)
    base = ("--sft_base", "", "--output_dir", str(tmp_path), "--run_name", "verified")
    assert (
        exit_code(monkeypatch, verify.main, "verify", *base, "--max_new_tokens", "8", *flags)
        == code
    )
    records = {
        record["what"]: record
        for record in read_json(tmp_path / "verified" / "summary.json")["checks"]
    }
    assert records["resumed: other parts of the next step's start"]["measured"] == 0
    assert records["peak / plan's: cpu"]["measured"] == 1
    parts = records["killed, resumed: parts with other bits"]
    assert parts["error"] == "other metrics" and (parts["passed"] is False) == (code == 1)
    assert any(
        what.startswith("seconds / plan's range") and record["passed"] is None
        for what, record in records.items()
    )


def test_what_is_not_promised_passes_and_is_named(capsys):
    """A difference is listed; a run that would stop fails, whatever is promised."""
    console = Console(width=200)
    promised, free, none = report(
        [
            Check("promised", 0.0, lambda: ["weights", "metrics"]),
            Check("free", math.inf, lambda: ["weights", "metrics"], "statistical"),
            Check("none", math.inf, lambda: []),
        ],
        console,
    )
    lines = capsys.readouterr().out.splitlines()
    assert promised["passed"] is False and lines[0].endswith("FAILED other weights, metrics")
    assert free["passed"] is None and free["measured"] == 2
    assert lines[1].endswith("measured other weights, metrics")
    assert none["passed"] is None and none["measured"] == 0 and lines[2].endswith("measured")


def test_a_killed_run_gets_what_another_has_logged_of_its_next_step(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    for run, steps in ((straight, 3), (killed, 1)):
        (run / "completions").mkdir(parents=True)
        write_jsonl(run / "metrics.jsonl", [{"step": step} for step in range(1, steps + 1)])
        write_jsonl(run / "evals.jsonl", [{"step": 0}])
        for step in range(1, steps + 1):
            (run / f"completions/rollout_{step:06d}.jsonl").touch()
    for _ in range(2):  # The second time it lacks nothing.
        log_as_killed_later(straight, killed, 2)
        assert [row["step"] for row in read_jsonl(killed / "metrics.jsonl")] == [1, 2]
        assert [row["step"] for row in read_jsonl(killed / "evals.jsonl")] == [0]
        files = sorted(file.name for file in (killed / "completions").iterdir())
        assert files == ["rollout_000001.jsonl", "rollout_000002.jsonl"]
