"""A task of the user's own with a rule of its own: its problems, and whole commands on it."""

import sys

import pytest

from alignment import evaluate
from alignment.data.tasks import find_task
from alignment.rewards.rules import find_rule
from alignment.system.files import read_json, read_jsonl

TASK = "my_package.evens:task"


@pytest.mark.parametrize(
    ("response", "reward", "format_reward"),
    [
        (" 4 = 2 * 2 </think> <answer> 4 </answer>", 1, 1),
        (" </think> <answer> 11 </answer>", 0, 1),  # odd
        (" </think> <answer> 12 </answer>", 0, 1),  # not below 12
        (" </think> 4", 0, 0),
    ],
)
def test_the_rule(response, reward, format_reward):
    rule = find_rule("my_package.evens_rule:even_between")
    assert rule(response, "3 12") == {
        "reward": reward,
        "format_reward": format_reward,
        "answer_reward": reward,
    }


def test_every_demonstration_earns_the_reward():
    task = find_task(TASK)
    rule = find_rule(task.rules[0])
    pairs = [pair for split in ("train", "test") for pair in task.demonstrations(split, "", 0)]
    assert len(pairs) == 60 and all(
        rule(response, problem.ground_truth)["reward"] == 1 for problem, response in pairs
    )
    splits = [{problem.id for problem in task.problems(split, "")} for split in ("train", "test")]
    assert list(map(len, splits)) == [54, 6] and not splits[0] & splits[1]


@pytest.mark.slow
def test_it_trains_and_evaluates(train, tiny_folder, tmp_path, monkeypatch):
    run = train(
        "--task", TASK, "--reward", "my_package.evens_rule:even_between", "--run_name", "run"
    )
    assert read_json(run / "args.json")["args"]["task"] == TASK
    assert all(
        "reward_my_package.evens_rule.even_between" in record
        for record in read_jsonl(run / "metrics.jsonl")
    )
    model = ["--model", str(run / "final"), "--output_dir", str(tmp_path), "--max_new_tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["alignment.evaluate", "--task", TASK, *model])
    evaluate.main()
    assert (tmp_path / "evaluate_run_final_my_package.evens.task" / "summary.json").exists()
