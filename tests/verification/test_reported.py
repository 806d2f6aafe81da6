"""What is reported of a run, and what is asked in it, is judged by counting."""

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignment.builders.verified_data import summarised
from alignment.core.records import Problem
from alignment.data.rows import read_rows
from alignment.evaluation.accuracy import figures, paired_difference
from alignment.verification import reported
from alignment.verification.asked import AskedQuestions, gives, read_json_lines
from alignment.verification.made_up_evaluation import MadeUpEvaluation
from alignment.verification.papers import PaperPart
from alignment.verification.precision import rounded_share
from alignment.verification.reported import EXACT, StepFigures, figures_of_rows
from alignment.verification.whole_update import UpdateFigures


def row(reward: float, length: int, finish_reason: str) -> dict:
    score = {"reward": reward, "format_reward": 1.0, "answer_reward": reward, "part_x": 0.5}
    return {"score": score, "token_ids": [1] * length, "finish_reason": finish_reason}


def test_the_figures_of_a_steps_completions():
    rows = [row(0.0, 2, "stop"), row(1.0, 4, "length"), row(1.0, 3, "stop"), row(1.0, 3, "stop")]
    # The longest response may have 4 tokens, of which 2 are punished: 0, -1, -1/2 and -1/2.
    setting = {"group_size": 2, "overlong_buffer": 2, "max_new_tokens": 4}
    assert figures_of_rows(rows, setting) == {
        "reward": 0.75,
        "reward_std": math.sqrt(3) / 4,
        "frac_reward_zero_std": 0.5,
        "format_reward": 1.0,
        "answer_reward": 0.75,
        "response_length": 3.0,
        "finished": 0.75,
        "responses": 4,
        "overlong_penalty": -0.5,
        "part_x": 0.5,
    }


def with_vote(vote: int, reward: float, has_format: bool = True) -> dict:
    score = {"reward": reward, "format_reward": float(has_format), "answer_reward": reward}
    return {"score": score | {"vote": float(vote)}, "token_ids": [1], "finish_reason": "stop"}


def test_votes_and_categories_of_an_evaluation():
    """Two answers of two votes each, of which one is right; and nobody's."""
    group = [with_vote(0, 1.0), with_vote(1, 0.0), with_vote(1, 0.0), with_vote(0, 1.0)]
    assert reported.share_of_leaders(group) == 0.5
    assert reported.share_of_leaders([with_vote(-1, 0.0, has_format=False)]) == 0
    intervals = {f"{name}_ci": [0.0, 1.0] for name in reported.PARTS_OF_SCORES}
    record = {"maj@4": 0.5, "categories": {"format and answer": 2, "format only": 2}, **intervals}
    named = {"maj@4", "categories"}
    assert not named & set(reported.faults_of_evaluation(record, [group]))
    record = {"maj@4": 1.0, "categories": {"format and answer": 1, "neither": 3}, **intervals}
    assert named <= set(reported.faults_of_evaluation(record, [group]))


def test_an_interval_by_hand():
    """Wilson's of 3 right answers of 4 problems: n = 4 * 3 / 4 = 3 by the unbiased variance 1/4,
    (p + z^2 / 2n -+ z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)."""
    low, high = reported.wilson_interval([[1.0], [1.0], [0.0], [1.0]])
    assert (low, high) == pytest.approx((0.2561, 0.9632), abs=1e-4)
    assert reported.share_of_choices([[1, 0, 0], [0, 0, 0]], 2) == pytest.approx(1 / 3)


SETTING = {
    "loss": "grpo_clip",
    "cliprange": 0.2,
    "cliprange_high": None,
    "dual_clip": 0.0,
    "beta": 0.0,
    "kl_estimator": "k3",
    "teacher": "",
    "entropy_coefficient": 0.0,
    "entropy_target": 0.0,
    "token_selection": "none",
    "old_log_probs": "policy",
    "rollouts": "sync",
    "max_staleness": 0,
    "kl_cov_coefficient": 1.0,
    "sampler_correction": "none",
    "correction_floor": 0.0,
    "correction_cap": 2.0,
    "loss_normalization": "token_mean",
    "max_new_tokens": 8,
}


def step_of(advantage: float) -> StepFigures:
    """An update of one response of two tokens, whose ratios are 1 and 1.5."""
    rows = [[-1.0, math.log(1.5) - 1], [-1.0, -1.0], [-1.0, -1.0], [-1.0, -1.0], [0.5, 1.5]]
    part = PaperPart(SETTING, 1.0, [advantage] * 2, rows, [False] * 2, [2], share=0.0)
    update = UpdateFigures(1e-3, 2.0, 0.0, {0: part}, {0: [0.5, 1.0]})
    return StepFigures([update], SETTING, 0.0, None, is_near_edge=False)


def test_the_figures_of_an_update_by_hand():
    # -(min(1, 1) + min(1.5, 1.2)) / 2
    expected = {"loss": -1.1, "grad_norm": 2.0, "learning_rate": 1e-3, "rows_with_gradient": 1}
    expected |= {"entropy": 1.0, "sampling_entropy": 0.75, "ratio_mean": 1.25, "ratio_max": 1.5}
    expected |= {"clip_fraction": 0.5}
    found = step_of(1.0).expected()
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert step_of(1.0).faults(expected, EXACT) == []
    assert step_of(1.0).faults({**expected, "entropy": 0.75, "kl": 0.0}, EXACT) == ["entropy", "kl"]


@pytest.mark.parametrize(
    ("flags", "faults"),
    [
        ({}, ["loss"]),
        ({"sampler_correction": "token_truncate"}, []),
        ({"old_log_probs": "sampler"}, []),
        ({"rollouts": "async", "max_staleness": 1}, []),
        ({"old_log_probs": "sampler", "loss": "reinforce_with_baseline"}, ["loss"]),
    ],
)
def test_a_loss_of_advantages_that_cancel_may_be_off_by_the_samplers_drift(flags, faults):
    """Two responses of one token, of advantages 1 and -1 and so of a loss of 0: 3e-6 off is more
    than rounding, unless the sampler's log-probs weigh the tokens. 3e-4 is too much."""
    setting = SETTING | flags
    parts = {}
    for row, advantage in enumerate((1.0, -1.0)):
        log_probs = [[-1.0]] * 4 + [[0.5]]
        parts[row] = PaperPart(setting, 1.0, [advantage], log_probs, [False], [1, 1], share=0.0)
    update = UpdateFigures(1e-3, 2.0, 0.0, parts, {0: [0.5], 1: [0.5]})
    step = StepFigures([update], setting, 0.0, None, is_near_edge=False)
    assert step.expected()["loss"] == 0
    assert step.faults({"loss": 3e-6}, EXACT) == faults
    assert step.faults({"loss": 3e-4}, EXACT) == ["loss"]


def test_an_update_without_an_advantage_computes_no_row():
    found = step_of(0.0).expected()
    assert found["rows_with_gradient"] == 0 and "entropy" not in found


def test_what_is_reported_of_made_up_answers():
    sound = MadeUpEvaluation(figures, paired_difference, summarised)
    assert sound.other_figures() == [] and sound.other_differences() == []
    swapped = MadeUpEvaluation(figures, lambda a, b: paired_difference(b, a), summarised)
    assert "difference" in swapped.other_differences()

    def as_written(groups):
        return figures(groups) | {"maj@4": {"value": 0.5}}

    assert MadeUpEvaluation(as_written, paired_difference, summarised).other_figures() == ["maj@4"]

    def of_one_category(groups):
        record, kept = summarised(groups)
        return {**record, "categories": {"format only": 24}}, kept

    other = MadeUpEvaluation(figures, paired_difference, of_one_category)
    assert other.other_figures() == ["categories"]


def test_numbers_that_are_rounded_to_16_bits():
    numbers = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    assert rounded_share([numbers]) < 0.01
    assert rounded_share([numbers.bfloat16()]) == rounded_share([numbers.half()]) == 1
    assert rounded_share([numbers[:5].bfloat16()]) == 0  # Of few numbers nothing is said.


def asked(problems: list[Problem], tmp_path: Path, **flags) -> AskedQuestions:
    """Questions in the words of a template, of a file of rows."""
    (tmp_path / "plain.prompt").write_text("Q: {question}\nA:")
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "One?", "a": "so #### 17"}\n{"q": "Two?", "a": 5}\n')
    values = {
        "num_problems": 0,
        "max_prompt_tokens": 0,
        "pass_rates": "",
        "stop": (),
        "task": f"file:{file}",
        "question_column": "q",
        "answer_column": "a",
        "answer_pattern": "",
        "test_split": "",
    }

    def tokenizer(prompt, add_special_tokens=True):
        return {"input_ids": list(prompt)}

    tokenizer.eos_token_id = "<eos>"

    return AskedQuestions(
        problems,
        [],
        problems,
        "plain",
        tmp_path,
        ("\n",),
        [],
        tokenizer,
        values | flags,
    )


ROWS = [
    Problem("1", "One?", "Q: One?\nA:", "17"),
    Problem("2", "Two?", "Q: Two?\nA:", "5"),
]


def test_questions_as_their_file_and_template_have_them(tmp_path):
    sound = asked(ROWS, tmp_path, num_problems=2, max_prompt_tokens=10, stop=("\n",))
    assert (sound.other_prompts(), sound.faults_of_flags(), sound.misread_rows()) == (0, [], 0)
    cut = [Problem("1", "One?", "Q: One?", "1"), ROWS[1]]
    faulty = asked(cut, tmp_path, num_problems=1, max_prompt_tokens=9, stop=("#",))
    assert faulty.other_prompts() == 1
    assert faulty.faults_of_flags() == ["num_problems", "max_prompt_tokens", "stop"]
    assert faulty.misread_rows() == 1
    assert asked(ROWS[:1], tmp_path).misread_rows() == 1  # The second row is not asked.


def test_rows_of_two_files(tmp_path):
    """Of both files the rows are counted, and a row of the second that no problem asks."""
    test_rows = '{"q": "Three?", "a": "#### 3"}\n'
    (tmp_path / "test.jsonl").write_text(test_rows)
    third = Problem("3", "Three?", "Q: Three?\nA:", "3")
    flags = {"test_split": str(tmp_path / "test.jsonl")}
    assert asked([*ROWS, third], tmp_path, **flags).misread_rows() == 0
    assert asked(ROWS, tmp_path, **flags).misread_rows() == 1
    [*_, check] = asked(ROWS, tmp_path, test_split="test.csv").checks()
    assert "no files of JSON lines" in check.not_checked


@pytest.mark.parametrize(
    ("cell", "truth"),
    [
        (r"so $\boxed{(3, -4)}$.", "(3, -4)"),
        (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"\left( 3, \frac{\pi}{2} \right)"),
        (r"it is $\boxed 5$.", "5"),
        (r"it is \fbox{ 5 }", "5"),
        (r"\boxed{1} or not: \boxed{3}, \boxed{(5, 6)}", "3, (5, 6)"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{x = \boxed{2}}", r"x = \boxed{2}"),
        ("0.10", "0.10"),
    ],
)
def test_answers_that_a_cell_gives(cell, truth):
    assert gives(cell, truth)


@pytest.mark.parametrize(
    ("cell", "truth"),
    [
        (r"so $\boxed{(3, -4)}$.", "(3"),
        (r"so $\boxed 57$", "5"),
        (r"\boxed{3}, \boxed{5}", "3"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2"),
    ],
)
def test_answers_that_a_cell_does_not_give(cell, truth):
    assert not gives(cell, truth)


@pytest.mark.parametrize(
    "text",
    [
        '\ufeff{"q": "One?", "a": 0.10}\n',
        '[{"q": "One?", "a": 0.10}]\n',
        '[\n{"q": "One?",\r\n"a": 0.10}]',
        '{"q": "One\u2028\u2029\u0085?", "a": 0.10}\r\n',
    ],
)
def test_files_of_rows_are_read_as_training_reads_them(tmp_path, text):
    file = tmp_path / "rows.jsonl"
    file.write_text(text, encoding="utf-8")
    [(_, row)] = read_rows(file)
    [again] = read_json_lines(file)
    assert again == {name: str(cell) for name, cell in row.items()}
    assert again["a"] == "0.10"


def test_a_prompts_tokens_are_counted_with_one_beginning(tmp_path):
    """The tokenizer adds a BOS to a prompt that spells it out, and an EOS."""

    def tokenizer(prompt, add_special_tokens=True):
        ids = [1, *map(ord, prompt[3:])] if prompt.startswith("<s>") else list(map(ord, prompt))
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    tokenizer.eos_token_id = 2
    problems = [Problem("1", "One?", "<s>One?", "17")]
    questions = asked(problems, tmp_path, max_prompt_tokens=5)
    of_llama = AskedQuestions(**{**vars(questions), "tokenizer": tokenizer})
    assert of_llama.faults_of_flags() == []
    shorter = {**vars(of_llama), "flags": {**questions.flags, "max_prompt_tokens": 4}}
    assert AskedQuestions(**shorter).faults_of_flags() == ["max_prompt_tokens"]


def test_a_chat_ends_where_its_answer_begins(tmp_path):
    def render(turns, **options):
        return f"<u>{turns[-1]['content']}</u><a>"

    questions = asked([], tmp_path, system_prompt="Be brief.")
    tokenizer = SimpleNamespace(apply_chat_template=render)
    chat = AskedQuestions(**{**vars(questions), "template": "chat", "tokenizer": tokenizer})
    prompts = ["<s>Be brief.</s><u>One?</u><a>", "<s>Be brief.</s><u>One?</u>", "<u>One?</u><a>"]
    for prompt, faults in zip(prompts, (0, 1, 1), strict=True):
        with_prompt = {**vars(chat), "trained": [Problem("1", "One?", prompt, "17")]}
        assert AskedQuestions(**with_prompt).other_prompts() == faults
