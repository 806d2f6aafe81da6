"""Folders of older runs, whose metrics have other names."""

import json
from dataclasses import asdict

import pytest

from alignment.ablation.study import read_run
from alignment.core.records import SampledStep
from alignment.runs.health import Health
from alignment.runs.run_folder import RunFolder, load_rollouts
from alignment.system.files import read_jsonl, write_jsonl

# A step of a run before the names changed, without the metrics whose names are the same.
OLD_STEP = {
    "step": 1,
    "reward": 0.25,
    "flat_groups": 1.0,
    "fine": -0.5,
    "prompts_asked": 3,
    "reward_asked": 0.125,
    "tokens_asked": 70,
    "responses": 8,
    "response_length": 5.0,
    "entropy": 1.0,
    "updates": 1,
    "bad_updates": 0,
    "warnings": [],
}
NEW_STEP = {
    "step": 1,
    "reward": 0.25,
    "frac_reward_zero_std": 1.0,
    "overlong_penalty": -0.5,
    "prompts_sampled": 3,
    "reward_sampled": 0.125,
    "tokens_sampled": 70,
    "responses": 8,
    "response_length": 5.0,
    "entropy": 1.0,
    "updates": 1,
    "bad_updates": 0,
    "warnings": [],
}


@pytest.fixture
def older_run(tmp_path):
    """The folder of an older run of 6 steps."""
    settings = {"args": {"seed": 0, "group_size": 4}, "command": [], "versions": {}}
    (tmp_path / "args.json").write_text(json.dumps(settings))
    write_jsonl(tmp_path / "metrics.jsonl", [OLD_STEP | {"step": step} for step in range(1, 7)])
    write_jsonl(tmp_path / "evals.jsonl", [{"step": 0, "avg_all_rewards": 0.5}])
    return tmp_path


def test_a_report_reads_an_older_run(older_run):
    """12 responses of 3 prompts, and 70 tokens, were sampled for each step."""
    run = read_run(older_run)
    assert run.metrics[0] == NEW_STEP
    assert run.amounts_until("samples", [{"step": 2}]).tolist() == [24]
    assert run.amounts_until("tokens", [{"step": 2}]).tolist() == [140]


def test_a_resumed_older_run_has_one_name_for_each_metric(older_run):
    RunFolder(older_run, last_step=5).close()
    metrics = read_jsonl(older_run / "metrics.jsonl")
    assert metrics == [NEW_STEP | {"step": step} for step in range(1, 6)]
    assert read_jsonl(older_run / "evals.jsonl") == [{"step": 0, "avg_all_rewards": 0.5}]
    # The steps before the resumption count for its warnings: all of their groups were equal.
    limits = {"max_new_tokens": 64, "max_bad_steps": 5, "max_grader_failures": 0.1}
    health = Health(metrics, **limits, compares_rewards=True)
    _, record = health.judge(NEW_STEP | {"step": 6})
    assert record["warnings"] == ["equal_rewards"]


def test_a_resumed_older_run_has_its_rollouts_sampled_ahead(tmp_path):
    rollout = SampledStep(2, 0, [], {"flat_groups": 0.5}, {"sample": 1.0}, ("a", "b"), seed=3)
    older = asdict(rollout)
    older["asked"] = older.pop("problem_ids")
    (tmp_path / "trainer").mkdir()
    write_jsonl(tmp_path / "trainer" / "rollouts.jsonl", [older])
    (loaded,) = load_rollouts(tmp_path)
    assert loaded.report == {"frac_reward_zero_std": 0.5}
    assert loaded.problem_ids == ("a", "b")
