"""The audit of a run's grading: what it reads, writes and refuses."""

import io
import json

import pytest
from rich.console import Console

from alignment.system.errors import UserError
from benchmarks.audit_grader import (
    AuditArgs,
    ErrorRate,
    ErrorRates,
    audit,
    completion_files,
    error_rates,
    grade_all,
    read_completions,
)


def line(answer: str, truth: str) -> str:
    return (
        json.dumps({"text": f"so </think> <answer> {answer} </answer>", "ground_truth": truth})
        + "\n"
    )


@pytest.fixture
def run(tmp_path):
    """A run of one evaluation with four completions and one rollout with one."""
    completions = tmp_path / "run" / "completions"
    completions.mkdir(parents=True)
    unshaped = json.dumps({"text": "5", "ground_truth": "5"}) + "\n"
    (completions / "eval_000000.jsonl").write_text(
        line("5", "5") + line("2/4", "1/2") + line("2/4", "1/2") + unshaped
    )
    (completions / "rollout_000001.jsonl").write_text(line("six", "5"))
    return tmp_path / "run"


def printed(args: AuditArgs) -> str:
    out = io.StringIO()
    audit(args, Console(file=out, width=200))
    return out.getvalue()


def test_three_graders_on_one_answer():
    (graded,) = grade_all([("2/4", "1/2"), ("2/4", "1/2")])
    assert graded["count"] == 2
    assert graded["verdicts"] == {"ours": True, "math-verify": True, "reference": False}
    assert graded["reasons"]["ours"] == "rational"
    assert graded["reasons"]["reference"] == "neither part"


def test_accuracy_under_each_grader_and_the_file_of_disagreements(run):
    said = printed(AuditArgs(completions=str(run)))
    row = next(text for text in said.splitlines() if "eval_000000" in text)
    assert [cell.strip() for cell in row.split("│")[2:6]] == ["4", "0.7500", "0.7500", "0.2500"]
    (dispute,) = map(json.loads, (run / "grader_disagreements.jsonl").read_text().splitlines())
    assert (dispute["answer"], dispute["ground_truth"], dispute["count"], dispute["label"]) == (
        "2/4",
        "1/2",
        2,
        None,
    )
    assert "errors on" not in said


def test_labels_give_error_rates_and_are_kept(run):
    printed(AuditArgs(completions=str(run)))
    file = run / "grader_disagreements.jsonl"
    file.write_text(file.read_text().replace("null", "true"))
    said = printed(AuditArgs(completions=str(run)))
    assert "errors on 1 labelled disagreements" in said
    row = next(
        text for text in said.splitlines() if "reference" in text and "no such label" in text
    )
    assert "1 of 1 (100%)" in row
    assert json.loads(file.read_text())["label"] is True
    printed(AuditArgs(completions=str(run / "completions" / "rollout_000001.jsonl")))
    assert json.loads(file.read_text())["label"] is True  # though that file has no such answer


def test_error_rates():
    def row(label, **verdicts):
        return {
            "label": label,
            "verdicts": {"ours": False, "math-verify": False, "reference": False} | verdicts,
        }

    rates = error_rates([row(True, ours=True), row(False, ours=True), row(False), row(True)])[
        "ours"
    ]
    # false accepts of the wrong answers, false rejects of the right ones
    assert rates == ErrorRates(false_accepts=ErrorRate(1, 2), false_rejects=ErrorRate(1, 2))


def test_one_file_alone_and_no_disagreement(run):
    said = printed(AuditArgs(completions=str(run / "completions" / "rollout_000001.jsonl")))
    assert "agree on every answer" in said
    assert (run / "grader_disagreements.jsonl").read_text() == ""


@pytest.mark.parametrize(
    "text", ["nonsense", "[]", '{"text": 5, "ground_truth": "5"}', '{"text": "5"}', "[" * 10**5]
)
def test_a_line_that_is_no_completion_is_named(run, text):
    file = run / "completions" / "eval_000000.jsonl"
    file.write_text(line("5", "5") + text + "\n")
    with pytest.raises(UserError, match="eval_000000.jsonl:2: "):
        read_completions(file)


def test_no_completions_and_no_labels_are_refused(run, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="--completions"):
        completion_files(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="--completions"):
        completion_files(str(tmp_path / "nowhere"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="empty"):
        printed(AuditArgs(completions=str(tmp_path / "empty.jsonl")))
    with pytest.raises(UserError, match="--labels"):
        printed(AuditArgs(completions=str(run), labels="/dev/null"))
    with pytest.raises(UserError, match="--labels"):
        printed(AuditArgs(completions=str(run), labels=str(tmp_path / "nowhere.jsonl")))


def test_a_file_that_is_no_text_is_named(run):
    file = run / "completions" / "eval_000000.jsonl"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="eval_000000.jsonl: not UTF-8"):
        read_completions(file)


def test_a_line_separator_inside_a_completion_is_no_new_line(run):
    file = run / "completions" / "eval_000000.jsonl"
    file.write_text('{"text": "a\u2028b", "ground_truth": "5"}\n', "utf-8")
    assert read_completions(file) == [("a\u2028b", "5")]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[1]",
        '{"answer": [], "ground_truth": "1"}',
        '{"answer": "1", "ground_truth": "1", "label": "yes"}',
    ],
)
def test_a_damaged_file_of_labels_is_named_and_not_overwritten(run, text):
    file = run / "grader_disagreements.jsonl"
    file.write_text(text + "\n")
    with pytest.raises(UserError, match="grader_disagreements.jsonl:1: "):
        printed(AuditArgs(completions=str(run)))
    assert file.read_text() == text + "\n"
