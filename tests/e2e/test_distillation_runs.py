"""A whole run of on-policy distillation: the student nears its teacher, asynchronous rollouts
without staleness change nothing, and a killed run ends as the undisturbed one."""

import shutil
import signal
from pathlib import Path

import pytest

from alignment.builders.verified_runs import TIMINGS, digests
from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def flags(warm, warm_start) -> list[str]:
    flags = ["--sft_base", str(warm), "--teacher", str(warm_start / "sft"), "--advantage", "none"]
    flags += ["--learning_rate", "1e-3", "--warmup_steps", "0", "--num_steps", "12"]
    flags += ["--prompts_per_rollout", "8", "--train_mini_batch_size", "16"]
    return [*flags, "--eval_interval", "12", "--save_interval", "4"]


@pytest.fixture(scope="module")
def undisturbed(flags, launcher, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed")
    assert launcher.run(output, *flags) == 0, said(output)
    return output / NAME


def test_a_student_nears_its_teacher(undisturbed):
    steps = read_jsonl(undisturbed / "metrics.jsonl")
    divergences = [step["teacher_kl"] for step in steps]
    assert sum(divergences[-3:]) / 3 < 0.75 * divergences[0], divergences
    # Rewards decide nothing: every response has a gradient.
    assert {step["rows_with_gradient"] for step in steps} == {32}


def test_a_killed_run_ends_as_the_undisturbed_one(undisturbed, flags, launcher, tmp_path):
    """Killed in the update of its ninth step, after the last checkpoint but one."""
    cut = tmp_path / NAME
    shutil.copytree(undisturbed, cut)
    for folder in ("final", "step_000012"):
        shutil.rmtree(cut / folder)
    (cut / "summary.json").unlink()
    launcher.start(tmp_path, *flags, "--resume", phase="update", nth=19)
    assert launcher.wait() == -signal.SIGKILL, said(tmp_path)
    assert launcher.run(tmp_path, *flags, "--resume") == 0, said(tmp_path)
    assert digests(cut) == digests(undisturbed)


def test_a_run_does_not_go_on_under_another_teacher(undisturbed, flags, warm, launcher, tmp_path):
    cut = tmp_path / NAME
    shutil.copytree(undisturbed, cut)
    for folder in ("final", "step_000012"):
        shutil.rmtree(cut / folder)
    (cut / "summary.json").unlink()
    teacher = Path(flags[flags.index("--teacher") + 1])
    kept = tmp_path / "kept"
    shutil.copytree(teacher, kept)
    try:
        shutil.copy(warm / "model.safetensors", teacher / "model.safetensors")
        (teacher / "manifest.sha256.json").unlink(missing_ok=True)
        assert launcher.run(tmp_path, *flags, "--resume") == 2
    finally:
        shutil.rmtree(teacher)
        shutil.copytree(kept, teacher)
    assert "the weights of the teacher" in said(tmp_path)
    assert not (cut / "final").exists()


def test_asynchronous_rollouts_without_staleness_change_nothing(
    undisturbed, flags, launcher, tmp_path
):
    """In the first half of the steps, which do not depend on how many there are."""
    asynchronous = ["--rollouts", "async", "--max_staleness", "0", "--num_steps", "6"]
    assert launcher.run(tmp_path, *flags, *asynchronous) == 0, said(tmp_path)
    ours = read_jsonl(undisturbed / "metrics.jsonl")[:6]
    theirs = read_jsonl(tmp_path / NAME / "metrics.jsonl")
    for one, other in zip(ours, theirs, strict=True):
        assert other.pop("staleness") == 0
        assert {k: v for k, v in one.items() if not k.startswith(TIMINGS)} == {
            k: v for k, v in other.items() if not k.startswith(TIMINGS)
        }
