"""A whole run of on-policy distillation: the student nears its teacher, asynchronous rollouts
without staleness change nothing, and a killed run ends as the undisturbed one."""

import signal

import pytest

from alignment.builders.verified_runs import TIMINGS, digests
from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said

pytestmark = pytest.mark.slow


def test_a_student_nears_its_teacher(warm, warm_start, launcher, tmp_path):
    flags = ["--sft_base", str(warm), "--teacher", str(warm_start / "sft"), "--advantage", "none"]
    flags += ["--learning_rate", "1e-3", "--warmup_steps", "0", "--num_steps", "12"]
    flags += ["--prompts_per_rollout", "8", "--train_mini_batch_size", "16"]
    flags += ["--eval_interval", "12", "--save_interval", "4"]
    outputs = {name: tmp_path / name for name in ("sync", "async", "killed")}
    assert launcher.run(outputs["sync"], *flags) == 0, said(outputs["sync"])
    ours = read_jsonl(outputs["sync"] / NAME / "metrics.jsonl")
    divergences = [step["teacher_kl"] for step in ours]
    assert sum(divergences[-3:]) / 3 < 0.75 * divergences[0], divergences
    # Rewards decide nothing: every response has a gradient.
    assert {step["rows_with_gradient"] for step in ours} == {32}

    asynchronous = ["--rollouts", "async", "--max_staleness", "0"]
    assert launcher.run(outputs["async"], *flags, *asynchronous) == 0, said(outputs["async"])
    launcher.start(outputs["killed"], *flags, phase="update", nth=19)
    assert launcher.wait() == -signal.SIGKILL, said(outputs["killed"])
    assert launcher.run(outputs["killed"], *flags, "--resume") == 0, said(outputs["killed"])
    assert digests(outputs["killed"] / NAME) == digests(outputs["sync"] / NAME)

    theirs = read_jsonl(outputs["async"] / NAME / "metrics.jsonl")
    for one, other in zip(ours, theirs, strict=True):
        assert other.pop("staleness") == 0
        assert {k: v for k, v in one.items() if not k.startswith(TIMINGS)} == {
            k: v for k, v in other.items() if not k.startswith(TIMINGS)
        }
