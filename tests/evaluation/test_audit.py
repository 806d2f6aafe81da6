"""The audit of a base model: its table, and what a run says of it."""

import dataclasses
import json
import signal
from types import SimpleNamespace

import pytest
import small_tokenizers
from command_line import exit_code
from rich.console import Console

from alignment import evaluate
from alignment.args import EvaluateArgs
from alignment.evaluation.audit import write_audit
from alignment.runs.summary import best_audit
from alignment.system.signals import Interrupted


def row(name: str, accuracy: float, **facts) -> dict:
    return {
        "model": "m",
        "task": "gsm8k",
        "format": name,
        "prompt": "chat",
        "rule": "boxed",
        "problems": 50,
        "avg_all_rewards": accuracy,
        "avg_all_rewards_ci": [accuracy - 0.1, accuracy + 0.1],
        "reward_flexible": 0.5,
        "avg_format_rewards": 0.25,
        "finished": 1.0,
        "response_length": 31.4,
        **facts,
    }


def test_the_best_format_comes_first_and_a_run_names_it(tmp_path):
    folder = tmp_path / "audit_m"
    folder.mkdir()
    text = write_audit(folder, [row("r1_zero", 0.125), row("few-shot", 0.5), row("x", 0, task="t")])
    lines = text.splitlines()
    assert lines[0] == "m on gsm8k, best format first"
    assert [line.split("|")[1].strip() for line in lines[4:6]] == ["few-shot", "r1_zero"]
    cells = [cell.strip() for cell in lines[4].split("|")[4:-1]]
    assert cells == ["50", "0.500", "0.400 .. 0.600", "0.500", "0.25", "1.00", "31"]
    assert (folder / "audit_base.md").read_text() == text
    words = "m, before any training, in its best format of audit_m (few-shot): "
    assert best_audit(tmp_path, "m", "gsm8k") == f"{words}0.500 (0.400 .. 0.600)"
    assert best_audit(tmp_path, "m", "svamp") == ""


@pytest.mark.parametrize("left_out", [0, 12])
def test_an_audit_that_was_stopped_names_no_best_format(left_out, tmp_path, monkeypatch, capsys):
    """One of two formats was evaluated, on all problems or on the first."""

    def evaluated(args, models, tasks, console):
        facts = row("", 0.5, problems=8)
        del facts["format"], facts["model"], facts["task"]
        if left_out:
            facts["left_out"] = left_out
        yield "m", "arithmetic, r1_zero", SimpleNamespace(record=facts, groups=[])
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(evaluate, "evaluate_models", evaluated)
    args = EvaluateArgs(audit_base=True, model="m", output_dir=str(tmp_path), run_name="audit")
    asked = dataclasses.replace(args, audit_base=False)
    tasks = {f"arithmetic, {name}": asked for name in ("r1_zero", "few-shot")}
    checked = evaluate.CheckedEvaluation(["m"], tasks)
    with pytest.raises(Interrupted):
        evaluate.evaluate_and_report(args, checked, Console(width=200))
    assert best_audit(tmp_path, "m", "arithmetic") == ""
    page = (tmp_path / "audit" / "audit_base.md").read_text()
    printed = capsys.readouterr().out
    assert page.startswith("Stopped before every format") and page in printed
    cells = [cell.strip() for cell in page.splitlines()[-1].split("|")]
    assert (cells[1], cells[4]) == ("r1_zero", "8 of 20" if left_out else "8")
    assert "stopped: 1 of 2 evaluations were made\n" in printed
    first = "stopped: m was evaluated on the first 8 of 20 problems in the format r1_zero\n"
    assert (first in printed) == bool(left_out)


def test_a_format_with_some_of_the_problems_makes_no_audit(tmp_path):
    """Each was begun; the last was stopped."""
    write_audit(tmp_path, [row("r1_zero", 0.5), row("few-shot", 1.0, left_out=40)], False)
    assert [file.name for file in tmp_path.glob("*")] == ["audit_base.md"]


CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"


@pytest.mark.slow
@pytest.mark.parametrize("has_chat", [True, False])
def test_a_model_is_audited_in_each_format_that_it_has(has_chat, tmp_path, monkeypatch, capsys):
    tokenizer = small_tokenizers.wrapped(small_tokenizers.byte_level())
    if has_chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    model = small_tokenizers.save_model(tmp_path / "m", tokenizer, max_position_embeddings=2048)
    flags = ["--audit_base", "--max_problems", "4", "--max_new_tokens", "4", "--model", model]
    flags += ["--sampler", "transformers", "--output_dir", str(tmp_path / "out")]
    assert exit_code(monkeypatch, evaluate.main, "evaluate", *flags) == 0
    left_out = "arithmetic: not in a chat, since the model has no chat template"
    assert (left_out in capsys.readouterr().out) == (not has_chat)
    [file] = tmp_path.glob("out/*/audit_base.json")
    rows = json.loads(file.read_text())["evaluations"]
    expected = {
        "bare question": ("question", "flexible", "arithmetic"),
        "chat and boxed": ("chat", "boxed", "arithmetic"),
        "r1_zero": ("r1_zero", "r1_zero", "arithmetic"),
        "few-shot": ("question_answer", "boxed", "arithmetic"),
    }
    if not has_chat:
        del expected["chat and boxed"]
    formats = {row["format"]: (row["prompt"], row["rule"], row["task"]) for row in rows}
    assert formats == expected
    assert best_audit(tmp_path / "out", model, "arithmetic")


def test_a_task_with_a_rule_of_its_own_is_not_audited(monkeypatch, capsys):
    flags = ["--audit_base", "--task", "countdown"]
    assert exit_code(monkeypatch, evaluate.main, "evaluate", *flags) == 2
    assert "--audit_base: --task countdown is graded by countdown" in capsys.readouterr().err
