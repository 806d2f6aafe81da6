"""Whether a model continues the beginning of a test question word for word."""

import json

import pytest
import small_tokenizers
from command_line import exit_code

from alignment import evaluate
from alignment.ablation.referee import referee_answers
from alignment.ablation.study import read_study
from alignment.core.records import Problem
from alignment.evaluation.partial_prompts import (
    FILE,
    continues_question,
    partial_problems,
    write_partial_prompts,
)
from tests.ablation.test_report import make_run

QUESTION = "Ann has 12 red apples and gives away 5. How many are left?"  # 13 words


def test_the_first_words_are_given_and_the_others_are_the_truth():
    short = Problem("short", "How much is 3 and 4?", "", "7")  # 6 words, which leave 2
    [partial] = partial_problems([Problem("long", QUESTION, "", "7"), short], 0.6)
    assert partial.id == "long"
    assert partial.prompt == "Ann has 12 red apples and gives away"
    assert partial.ground_truth == "5. How many are left?"


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        (" away 5. How many are left?", 1),
        (" away 5.\nHow many are left?\nAnswer: 7", 1),
        (" away 5. How many are left", 0),
        (" away 4. How many are left?", 0),
        ("", 0),
    ],
)
def test_a_continuation_is_word_for_word(response, reward):
    assert continues_question(response, "away 5. How many are left?")["reward"] == reward


def evaluated(model: str, task: str) -> dict:
    return {
        "model": model,
        "task": task,
        "problems": 100,
        "avg_all_rewards": 0.03,
        "avg_all_rewards_ci": [0.01, 0.085],
        "format": "few-shot",
    }


def test_the_referee_sees_what_was_probed_and_audited(tmp_path):
    run = make_run(tmp_path / "run", 0, 0.5, task="svamp", model="m")
    asked = "Were test questions seen before?"
    base = "What can the base model do in its best format, before any training?"

    def answers() -> dict:
        study = read_study([run])
        return {answer.question: answer for answer in referee_answers(study, [])}

    before = answers()
    assert (before[asked].status, before[base].status) == ("partly", "no")
    folder = tmp_path / "probe"
    folder.mkdir()
    [line] = write_partial_prompts(folder, [evaluated("m", "svamp")], 0.6)
    said = "m continued the first 60% of 100"
    assert line.startswith(f"{said} questions of svamp word for word in 0.030 (0.010 .. 0.085)")
    rows = [evaluated("m", "svamp")]
    (folder / "audit_base.json").write_text(json.dumps({"evaluations": rows}))
    after = answers()
    assert (after[asked].status, after[base].status) == ("yes", "yes")
    assert f"{said} word for word in 0.030 (0.010 .. 0.085)" in after[asked].words
    assert "in its best format of probe (few-shot): 0.030" in after[base].words
    other = json.loads((folder / FILE).read_text())
    assert other["share"] == 0.6


@pytest.mark.slow
def test_a_model_is_probed(tmp_path, monkeypatch, capsys):
    tokenizer = small_tokenizers.wrapped(small_tokenizers.byte_level())
    model = small_tokenizers.save_model(tmp_path / "m", tokenizer, max_position_embeddings=512)
    rows = [{"question": f"{number} {QUESTION}", "answer": "7"} for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "rows.jsonl")
    flags = ["--partial_prompts", "0.6", "--model", model, "--task", f"file:{file}"]
    flags += [
        "--test_split",
        file,
        "--sampler",
        "transformers",
        "--output_dir",
        str(tmp_path / "o"),
    ]
    assert exit_code(monkeypatch, evaluate.main, "evaluate", *flags) == 0
    assert "continued the first 60% of 4 questions of" in capsys.readouterr().out
    [probe] = tmp_path.glob(f"o/*/{FILE}")
    assert json.loads(probe.read_text())["evaluations"][0]["avg_all_rewards"] == 0
