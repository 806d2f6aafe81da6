"""The audit of a base model: its table, and what a run says of it."""

import json

import pytest
import small_tokenizers
from command_line import exit_code

from alignment import evaluate
from alignment.evaluation.audit import write_audit
from alignment.runs.summary import best_audit


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
    assert lines[0] == "m on gsm8k: 50 problems, best format first"
    assert [line.split("|")[1].strip() for line in lines[4:6]] == ["few-shot", "r1_zero"]
    cells = [cell.strip() for cell in lines[4].split("|")[4:-1]]
    assert cells == ["0.500", "0.400 .. 0.600", "0.500", "0.25", "1.00", "31"]
    assert (folder / "audit_base.md").read_text() == text
    words = "m, before any training, in its best format of audit_m (few-shot): "
    assert best_audit(tmp_path, "m", "gsm8k") == f"{words}0.500 (0.400 .. 0.600)"
    assert best_audit(tmp_path, "m", "svamp") == ""


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
