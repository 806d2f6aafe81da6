"""Evaluations of their own in whole runs: they change no step, and resume as exactly. (With
asynchronous rollouts: test_async.py.)"""

import shutil

import pytest

from alignment.builders.verified_runs import digests
from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said

pytestmark = pytest.mark.slow

OWN = ["--eval_temperature", "0.5", "--eval_top_p", "0.9", "--eval_samples", "2", "--eval_greedy"]
OWN += ["--eval_tasks", "countdown_small"]
PREFIXES = ("", "greedy/", "countdown_small/", "countdown_small/greedy/")


@pytest.fixture(scope="module")
def straight(warm, launcher, tmp_path_factory):
    """An undisturbed run of 4 steps, with 4 problems of each task."""
    output = tmp_path_factory.mktemp("straight")
    assert launcher.run(output, "--sft_base", str(warm), *OWN) == 0, said(output)
    return output


def test_each_evaluation_is_recorded_and_said(straight):
    run = straight / NAME
    records = read_jsonl(run / "evals.jsonl")
    assert [record["step"] for record in records] == [0, 2, 4]
    for record in records:
        for prefix in PREFIXES:
            assert 0 <= record[f"{prefix}avg_all_rewards"] <= 1
            assert record[f"{prefix}problems"] == 4
        assert {"pass@2", "maj@2", "countdown_small/pass@2"} < record.keys()
        assert "greedy/pass@2" not in record
    rewards = [
        line["score"]["reward"] for line in read_jsonl(run / "completions/eval_greedy_000004.jsonl")
    ]
    assert records[-1]["greedy/avg_all_rewards"] == sum(rewards) / 4
    assert len(read_jsonl(run / "completions/eval_000004.jsonl")) == 8
    printed = " ".join(said(straight).split())
    assert "sampled at T=0.5, top-p 0.9, 2 samples a problem" in printed
    for label in ("pass@2", "greedy", "countdown_small maj@2"):
        assert label in printed


def test_steps_are_those_of_a_run_without(straight, warm, launcher, tmp_path):
    assert launcher.run(tmp_path, "--sft_base", str(warm)) == 0, said(tmp_path)
    with_own, without = digests(straight / NAME), digests(tmp_path / NAME)
    for part in ("weights", "optimizer", "metrics"):
        assert with_own[part] == without[part]


def test_a_run_that_resumes_repeats_its_evaluations(straight, warm, launcher, tmp_path):
    """As if it had been killed in step 4."""
    run = tmp_path / NAME
    shutil.copytree(straight / NAME, run)
    (run / "summary.json").unlink()
    for folder in ("step_000004", "final"):
        shutil.rmtree(run / folder)
    flags = ["--sft_base", str(warm), *OWN, "--resume"]
    assert launcher.run(tmp_path, *flags) == 0, said(tmp_path)
    assert digests(run) == digests(straight / NAME)
