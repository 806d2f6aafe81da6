"""A run ends at an accuracy that is enough, and prints nothing where it is told to be quiet."""

import sys

import pytest
from command_line import exit_code

from alignment import train_rl
from alignment.system.files import read_json, read_jsonl

RULE = """
def always_right(response, ground_truth):
    return {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
"""


@pytest.fixture
def train(tiny_folder, tmp_path, monkeypatch, undrawn_curve):
    """Trains for at most six steps, with an evaluation after every second that finds all right."""
    (tmp_path / "easy_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = (
        f"--sft_base {tiny_folder} --output_dir {tmp_path} --run_name run --num_steps 6"
        " --eval_interval 2 --save_interval 5 --prompts_per_rollout 2 --group_size 2"
        " --train_mini_batch_size 4 --max_new_tokens 8 --max_problems 4 --reward random"
        " --eval_rule easy_rule:always_right"
    )

    def training(*flags: str):
        code = exit_code(monkeypatch, train_rl.main, "alignment.train_rl", *words.split(), *flags)
        return code, tmp_path / "run"

    yield training
    sys.modules.pop("easy_rule", None)


@pytest.mark.slow
def test_a_run_ends_at_its_target_accuracy_and_goes_on_without(train, capsys):
    code, run = train("--target_accuracy", "0.9")
    assert code == 0
    assert "--target_accuracy 0.9 is reached after step 2 of 6: accuracy 1.000" in (
        capsys.readouterr().out
    )
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2]
    assert read_json(run / "summary.json")["steps"] == 2
    assert (run / "step_000002").is_dir() and (run / "final" / "config.json").is_file()
    code, _ = train("--target_accuracy", "0", "--resume")
    assert code == 0
    assert [record["step"] for record in read_jsonl(run / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_a_quiet_run_prints_nothing_but_errors(train, capfd):
    code, run = train("--num_steps", "2", "--quiet")
    assert code == 0 and (run / "summary.json").exists()
    assert capfd.readouterr().out == ""
    code, _ = train("--num_steps", "2", "--quiet")
    printed = capfd.readouterr()
    assert code == 2 and printed.out == "" and printed.err.startswith("error: ")
