"""What --preview prints, of a model folder without weights."""

import json
import re
import shutil
import sys

import pytest

from alignment import evaluate, sft, train_rl
from alignment.args import RLArgs, from_preset
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import open_source

PROMPT = "User: {}\nAssistant: <think>"


@pytest.fixture
def preview(tiny_folder, tmp_path, monkeypatch, capsys):
    """A function that runs a command and gives what it prints; it leaves no file but the
    model's."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.chdir(tmp_path)

    def run(command, *flags: str) -> str:
        before = sorted(tmp_path.rglob("*"))
        monkeypatch.setattr(
            sys, "argv", [command.__name__, "--model", str(folder), "--preview", "2", *flags]
        )
        command.main()
        assert sorted(tmp_path.rglob("*")) == before
        return capsys.readouterr().out

    return run


def write_rows(file, **answers: str) -> str:
    file.write_text(
        "".join(
            json.dumps({"question": q, "solution": "so", "answer": a}) + "\n"
            for q, a in answers.items()
        )
    )
    return f"file:{file}"


def test_train_rl_shows_the_prompts_of_its_first_step_and_their_rewards(preview, tiny_folder):
    from alignment.model.loading import load_tokenizer

    tokenizer = load_tokenizer(str(tiny_folder))
    problems = problems_of_step(
        open_source(from_preset(RLArgs, "tiny").rollout_config, tokenizer).problems, 2, 5, 1
    )
    lines = preview(
        train_rl, "--sft_base", "", "--seed", "5", "--reward", "format:0.5,accuracy"
    ).splitlines()
    assert lines.pop(0) == (
        "--prompt tiny, graded by the rule r1_zero; '</answer>' ends a response"
    )
    assert lines.pop(0) == (
        "each gold answer is scored in made-up responses of 3 formats: in tags, in a box, bare; one"
        " that is paid is enough"
    )
    assert re.fullmatch(
        r"of all (\d+) gold answers, not only those shown, the rule pays \1 in one of these"
        r" formats",
        lines.pop(),
    )
    for problem, start in zip(problems, (0, 7), strict=True):
        head, *rest = lines[start : start + 7]
        assert (
            head
            == f"{problem.id}: the prompt, {len(tokenizer(problem.prompt)['input_ids'])} tokens:"
        )
        assert "\n".join(rest[:2]) == PROMPT.format(problem.question) == problem.prompt
        assert rest[2:4] == [
            f"the gold answer: {problem.ground_truth}",
            (
                f"  in tags: ' </think> <answer> {problem.ground_truth} </answer>' gets"
                " reward 1.5, format_reward 1, answer_reward 1, part_format 1, part_accuracy 1"
            ),
        ]
        assert [re.search("reward [0-9.]+", line)[0] for line in rest[4:]] == ["reward 0"] * 2
    assert len(lines) == 14


def test_evaluate_warns_of_gold_answers_that_are_not_paid(preview, tmp_path):
    """The second row's answer reads as an interval that is open where the grader's reading of it
    fails."""
    data = [
        "--task",
        write_rows(tmp_path / "train.jsonl", a="1", b="2"),
        "--test_split",
        str(tmp_path / "test.jsonl"),
    ]
    write_rows(tmp_path / "test.jsonl", **{"c?": "7", "d?": "</answer> 8"})
    fine, wrong = preview(evaluate, *data, "--prompt", "tiny").split("test.jsonl:2: ")
    assert "in tags: ' </think> <answer> 7 </answer>' gets reward 1," in fine
    assert "in a box: ' \\boxed{7}' gets reward 0," in fine and "warning" not in fine
    assert wrong.count(" gets reward 0,") == 3
    assert (
        "warning: none is paid more than without the answer: is this --reward, column or"
        " --answer_pattern right?" in wrong
    )


def test_the_last_line_counts_all_gold_answers(preview, tmp_path):
    """Two of three are shown, and the third is the one that no response can meet."""
    write_rows(tmp_path / "test.jsonl", **{"c?": "7", "d?": "8", "e?": "</answer> 9"})
    task = write_rows(tmp_path / "train.jsonl", a="1", b="2")
    printed = preview(evaluate, "--task", task, "--test_split", "test.jsonl", "--prompt", "tiny")
    assert printed.splitlines()[-1] == (
        "of all 3 gold answers, not only those shown, the rule pays 2 in one of these formats; the"
        " first that it does not pay is that of test.jsonl:3"
    )


def test_sft_tells_trained_tokens_from_those_that_are_not(preview, tmp_path):
    task = write_rows(tmp_path / "train.jsonl", **{f"{n}?": str(n) for n in range(9)})
    write_rows(tmp_path / "test.jsonl", other="1")
    printed = preview(
        sft, "--task", task, "--test_split", "test.jsonl", "--prompt", "tiny", "--sft_base", "made"
    )
    shown = re.findall(
        r"the prompt, (\d+) tokens, not trained:\nUser: (\d)\?\nAssistant: <think>\n"
        r"the response, (\d+) tokens, all trained:\n so </think> <answer> (\d)"
        r" </answer><\|endoftext\|>\n",
        printed,
    )
    assert len(shown) == 2 and all(question == answer for _, question, _, answer in shown)
    assert {(prompt, response) for prompt, _, response, _ in shown} == {("13", "19")}


def test_a_lost_backslash_and_an_answer_that_is_none_look_like_what_they_are(
    preview, tmp_path, capsys
):
    """The author wrote \\frac and \\times with one backslash; the response that holds this text is
    paid all the same."""
    golds = [r"\frac{22}{7}", r"3 \times x", "notfound"]
    lines = [
        f'{{"question": "{number}?", "answer": "{gold}"}}' for number, gold in enumerate(golds)
    ]
    (tmp_path / "test.jsonl").write_text("\n".join(lines))
    task = write_rows(tmp_path / "train.jsonl", a="1", b="2")
    printed = preview(
        evaluate, "--task", task, "--test_split", "test.jsonl", "--prompt", "tiny", "--preview", "3"
    )
    assert "the gold answer: <form feed>rac{22}{7}\n" in printed
    assert "' </think> <answer> <form feed>rac{22}{7} </answer>' gets" in printed
    assert "the gold answer: 3 <tab>imes x\n" in printed
    assert (
        "the gold answer: notfound\n  warning: it says that there is none, and a response that says"
        " so is paid" in printed
    )
