"""The lines that are printed of a step."""

import io
import math

from rich.console import Console

from alignment.runs.step_lines import step_lines, step_words
from alignment.runs.summary import rewards_of_parts
from alignment.system.terminal import progress_line

RECORD = {
    "step": 3,
    "reward": 0.5,
    "loss": -0.01234,
    "reward_std": 0.433,
    "response_length": 41.7,
    "kl": 0.00123,
    "clip_fraction": 0.021,
    "grad_norm": 0.5312,
    "learning_rate": 1e-5,
    "seconds": 8.512,
    "seconds_sample": 3.1,
    "seconds_update": 5.2,
    "seconds_old_log_probs": 0.1,
    "tokens_per_second_sample": 1.0,
}


def test_a_step_is_two_lines_with_its_seconds_by_phase():
    numbers, seconds = step_lines(RECORD)
    assert numbers == (
        "  loss -0.0123, reward std 0.43, 42 tokens, KL 0.0012, clipped 0.021, gradient 0.531,"
        " rate 1e-05"
    )
    assert seconds == "  8.51 s: update 5.20, sample 3.10, old log probs 0.10"


def test_each_part_of_a_reward_stands_beside_their_sum():
    rewards = {"reward": 0.2, "format_reward": 0.0, "part_accuracy": 0.0, "part_brief": 1.0}
    assert step_words(rewards) == "reward 0.20, format 0.00, accuracy 0.00, brief 1.00"
    alone = {"reward": 0.5, "format_reward": 0.75, "reward_std": 0.1}
    assert step_words(alone) == "reward 0.50, format 0.75"


def test_what_a_run_does_not_have_is_left_out_and_lines_stay_within_100_columns():
    numbers, _ = step_lines({**RECORD, "kl": None, "clip_fraction": math.nan})
    assert "KL" not in numbers and "clipped nan" in numbers
    many = {f"seconds_{name * 8}": 1.0 for name in "abcdefghijkl"}
    for line in step_lines({**RECORD, **many, "loss": 1e40}):
        assert len(line) <= 100


def test_details_follow_the_plain_line():
    printed = io.StringIO()
    with progress_line("RL", 2, Console(file=printed, width=200)) as advance:
        advance(1, "reward 0.50", ("  a", "  b"))
    [line, *details] = printed.getvalue().splitlines()
    assert line.startswith("RL, step 1 of 2, reward 0.50") and details == ["  a", "  b"]


def test_the_learning_curve_has_a_line_for_each_part_of_the_reward():
    records = [{"step": 1, "part_format": 0.5}, {"step": 2, "part_format": 1, "part_mine.f": 2}]
    parts = rewards_of_parts(records)
    assert parts["format"] == [0.5, 1] and math.isnan(parts["mine.f"][0])
    assert parts["mine.f"][1] == 2
