"""Whole runs whose reference is reset: killed ones end as undisturbed ones. (With adapters and
ranks: test_lora_runs.py. With asynchronous rollouts: test_async.py.)"""

import dataclasses
import shutil
import signal

import pytest

from alignment.builders.verified_runs import digests
from alignment.runs.run_folder import checkpoint_folder
from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said

pytestmark = pytest.mark.slow

RESETS = ["--beta", "0.1", "--reference_reset_interval", "3", "--learning_rate", "1e-2"]
RESETS += ["--warmup_steps", "0", "--train_mini_batch_size", "0", "--num_steps", "8"]
RESETS += ["--save_interval", "2", "--keep_checkpoints", "1", "--eval_interval", "8"]


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """A finished run: where it is, its flags, and its steps."""

    output: object
    flags: list[str]

    @property
    def steps(self) -> list[dict]:
        return read_jsonl(self.output / NAME / "metrics.jsonl")


@pytest.fixture(scope="module")
def undisturbed(warm, launcher, tmp_path_factory) -> Undisturbed:
    output = tmp_path_factory.mktemp("undisturbed")
    flags = ["--sft_base", str(warm), *RESETS, "--reference_reset_optimizer"]
    assert launcher.run(output, *flags) == 0, said(output)
    return Undisturbed(output, flags)


def test_the_divergence_is_0_after_each_reset_and_what_it_needs_is_kept(undisturbed):
    steps = undisturbed.steps
    assert [step["reference_step"] for step in steps] == [0, 0, 0, 3, 3, 3, 6, 6]
    divergences = [step["kl"] for step in steps]
    for step, divergence in enumerate(divergences, start=1):
        if step in (1, 4, 7):
            assert divergence == 0
        else:
            assert divergence > 1e-6
    printed = said(undisturbed.output)
    for step in (3, 6):
        assert f"The reference of --beta has the policy's weights of step {step} now" in printed
    kept = sorted(path.name for path in (undisturbed.output / NAME).glob("step_*"))
    assert kept == ["step_000006", "step_000008"]


def test_a_killed_run_ends_as_the_undisturbed_one(undisturbed, launcher, tmp_path):
    """Killed while it saves a checkpoint."""
    launcher.start(tmp_path, *undisturbed.flags, phase="checkpoint", nth=900)
    assert launcher.wait() == -signal.SIGKILL, said(tmp_path)
    assert launcher.run(tmp_path, *undisturbed.flags, "--resume") == 0, said(tmp_path)
    assert digests(tmp_path / NAME) == digests(undisturbed.output / NAME)


@pytest.fixture(scope="module")
def of_every_step(undisturbed, launcher, tmp_path_factory) -> Undisturbed:
    """The same, with a checkpoint of every step."""
    output = tmp_path_factory.mktemp("of_every_step")
    flags = [*undisturbed.flags, "--save_interval", "1", "--keep_checkpoints", "0"]
    assert launcher.run(output, *flags) == 0, said(output)
    return Undisturbed(output, flags)


@pytest.mark.parametrize("last", [6, 7])
def test_a_run_resumes_at_and_after_a_reset(undisturbed, of_every_step, launcher, tmp_path, last):
    """As if it had been killed in the next step."""
    cut = tmp_path / NAME
    shutil.copytree(of_every_step.output / NAME, cut)
    (cut / "summary.json").unlink()
    shutil.rmtree(cut / "final")
    for step in range(last + 1, 9):
        shutil.rmtree(checkpoint_folder(cut, step))
    assert launcher.run(tmp_path, *of_every_step.flags, "--resume") == 0, said(tmp_path)
    ours, theirs = digests(cut), digests(undisturbed.output / NAME)
    for part in ("weights", "optimizer", "metrics"):
        assert ours[part] == theirs[part]
