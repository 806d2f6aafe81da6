"""A loss of the user's own: its values, whole runs with it, and sweeps."""

import math
import subprocess
import sys

import pytest
import torch

from alignment import sweep
from alignment.core.losses import LossConfig, LossInputs
from alignment.system.files import read_json, read_jsonl


def test_topr():
    from my_package import topr

    log_probs = torch.tensor([[0.2, 0.4]] * 2).log().requires_grad_()
    old_log_probs = torch.tensor([[0.4, 0.2]] * 2).log()
    inputs = LossInputs(
        LossConfig(topr.entry),
        log_probs,
        advantages=torch.tensor([[1.0], [-1.0]]),
        old_log_probs=old_log_probs,
    )
    loss, metadata = topr.topr(inputs)
    expected = [[-math.log(0.2), -math.log(0.4)], [0.5 * math.log(0.2), math.log(0.4)]]
    torch.testing.assert_close(loss, torch.tensor(expected))
    assert metadata["clipped"].tolist() == [[False, False], [False, True]]
    loss.sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[-1.0, -1.0], [0.5, 1.0]]))


@pytest.mark.slow
def test_runs_record_it_and_resume_to_the_same_weights(train, train_in_two_parts, weights):
    runs = {name: train("--loss_type", f"my_package.topr:{name}") for name in ("topr", "entry")}
    for name, run in runs.items():
        assert run.name == f"tiny_my_package.topr.{name}_seed0"
        assert read_json(run / "args.json")["args"]["loss_type"] == f"my_package.topr:{name}"
        assert all(0.5 < record["ratio_mean"] < 2 for record in read_jsonl(run / "metrics.jsonl"))
    resumed = train_in_two_parts("--loss_type", "my_package.topr:entry")
    assert resumed.name == "tiny_my_package.topr.entry_seed0-2"
    assert weights(resumed) == weights(runs["entry"])


def dry_run(monkeypatch, capsys, *flags: str) -> str:
    command = ["alignment.sweep", "--dry_run", "--seed", "0", "1", "--sft_base", "", *flags]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setenv("COLUMNS", "200")
    sweep.main()
    return capsys.readouterr().out


def test_it_is_an_arm_of_a_sweep(monkeypatch, capsys):
    arms = ["--loss_type", "grpo_clip", "my_package.topr:entry"]
    printed = dry_run(monkeypatch, capsys, *arms)
    assert (
        "2 arms x 2 seeds = 4 runs" in printed
        and "my_package.topr.entry" in printed
        and "warning" not in printed
    )
    # The design reads the entry: with one update a rollout the ratio is 1, and the two are one
    # loss.
    assert "have the gradient of reinforce_with_baseline" in dry_run(
        monkeypatch, capsys, *arms, "--train_mini_batch_size", "0"
    )
    # Of a function nothing is known, so no argument is said to play no part.
    arms = ["--loss_type", "my_package.topr:topr", "--cliprange", "0.1", "0.2"]
    assert "warning" not in dry_run(monkeypatch, capsys, *arms)


@pytest.mark.parametrize(
    ("loss_type", "message"),
    [
        ("my_package.topr:nothing", "cannot be imported (AttributeError"),
        ("my_package.nothing:topr", "cannot be imported (ModuleNotFoundError"),
        ("topr", "there is no such loss type; choose one of"),
    ],
)
def test_a_wrong_path_is_refused_before_torch_loads(loss_type, message, rl_flags):
    script = (
        "import sys\nfrom alignment.system.errors import run_command\nfrom alignment.train_rl"
        " import main\n"
    )
    script += "try:\n    run_command(main)\nfinally:\n    print('torch' in sys.modules)\n"
    command = [sys.executable, "-c", script, *rl_flags, "--loss_type", loss_type]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr.startswith(f"error: --loss_type {loss_type}: {message}")
    assert (ended.returncode, ended.stdout.strip()) == (2, "False")
