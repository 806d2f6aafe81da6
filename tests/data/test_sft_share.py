"""SFT and RL never see the same problems where a share is SFT's."""

import hashlib
import json
import random
from dataclasses import replace

import pytest

from alignment.args import RLArgs, SFTArgs, as_command
from alignment.builders.checks import check_sft, check_sft_share, refuse_other_share
from alignment.builders.data_checks import check_training_split
from alignment.core.records import Endless, Problem
from alignment.data.questions import (
    HELD_OUT_OF_SFT,
    in_sft_share,
    is_held_out_of_sft,
    question_text,
)
from alignment.data.tasks import TASKS, Task
from alignment.rollouts.config import problems_of_step
from alignment.system.errors import UserError

QUESTIONS = [f"How much is {number} and 1?" for number in range(400)]
TRAIN = [Problem(str(n), text, f"Q: {text} A:", str(n + 1)) for n, text in enumerate(QUESTIONS)]
TEST = [Problem("test", "How much is 7 and 1?", "", "8")]
SHOWN = [(problem, f" {problem.ground_truth}") for problem in TRAIN]
TASK = Task(
    "made_up",
    lambda split, path: TEST if split == "test" else TRAIN,
    lambda split, path, seed: SHOWN,
)


def place(text: str) -> float:
    """The place of a question between 0 and 1, by the hash that the pages state."""
    digest = hashlib.sha256(f"sft\0{text}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def asking(text: str) -> Problem:
    return Problem("", text, "", "1")


def test_the_hash_of_the_question_alone_decides():
    for text in map(question_text, TRAIN):
        assert in_sft_share(text, 0.3) == (place(text) < 0.3)
        assert is_held_out_of_sft(text, 0.3) == (place(text) < 0.3 * HELD_OUT_OF_SFT)
        assert is_held_out_of_sft(text, 0.0) == (place(text) < HELD_OUT_OF_SFT)


def test_no_problem_is_of_both_whatever_their_order_or_number():
    asked = {problem.question for problem in TASK.training_problems("", 0.3)}
    untested = TASK.untested(SHOWN, "")
    taught = TASK.taught(untested, "", 0.3, holds_out=True)
    held_out = TASK.held_out_of_sft("", 0.3)
    shown = {problem.question for problem, _ in taught}
    measured = {problem.question for problem in held_out}
    assert not asked & shown and not asked & measured and not shown & measured
    assert asked | shown | measured == set(QUESTIONS) - {"How much is 7 and 1?"}
    assert 80 < len(shown | measured) < 160 and measured
    mixed = [*SHOWN, *SHOWN]
    random.Random(0).shuffle(mixed)
    again = TASK.taught(TASK.untested(mixed, ""), "", 0.3, holds_out=True)
    assert {problem.question for problem, _ in again} == shown and len(again) == 2 * len(shown)


def test_without_a_share_both_train_on_all():
    assert TASK.training_problems("") == TASK.training_problems("", 0.0)
    assert TASK.taught(SHOWN, "", 0.0, holds_out=False) == SHOWN


def test_a_prompt_alone_asks_what_its_training_problem_asks():
    """The question of the prompt decides, and not the whole prompt's hash."""
    prompts = [(replace(problem, question=""), response) for problem, response in SHOWN]
    taught = TASK.taught(prompts, "", 0.3, holds_out=False)
    of_questions = TASK.taught(SHOWN, "", 0.3, holds_out=False)
    assert [problem.id for problem, _ in taught] == [problem.id for problem, _ in of_questions]


def test_every_turn_of_a_conversation_must_be_of_the_share():
    mine = next(text for text in QUESTIONS if place(question_text(asking(text))) < 0.3)
    others = next(text for text in QUESTIONS if place(question_text(asking(text))) >= 0.3)
    turns = (("user", others), ("assistant", "1"), ("user", mine))
    conversation = Problem("talk", mine, "", "1", turns)
    alone = Problem("one", mine, "", "1")
    shown = [(conversation, " 1"), (alone, " 1")]
    assert TASK.taught(shown, "", 0.3, holds_out=False) == [(alone, " 1")]


def test_problems_without_end_are_redrawn():
    task = TASKS["countdown"]
    problems = task.training_problems("", 0.5)
    assert isinstance(problems, Endless)
    drawn = problems_of_step(problems, 200, data_seed=0, step=1)
    assert not any(in_sft_share(task.key(problem), 0.5) for problem in drawn)
    assert drawn == problems_of_step(task.training_problems("", 0.5), 200, 0, 1)


def test_both_commands_say_what_they_train_on(tmp_path, capsys):
    rl = RLArgs(sft_share=0.3)
    sft = as_command(SFTArgs, rl)
    assert sft.sft_share == 0.3
    of_rl = check_training_split(rl.task_in_format, "", rl.sft_share)
    shown = check_sft(replace(sft, sft_base=str(tmp_path / "x"), patience=2))["train"]
    said = capsys.readouterr().err
    key = rl.task_in_format.key
    assert not {key(problem) for problem in of_rl} & {key(problem) for problem, _ in shown}
    assert "--sft_share 0.3: RL trains on " in said and ", and leaves the others to SFT" in said
    assert "--sft_share 0.3 and --patience 2: SFT trains on " in said
    assert "problems beside them" in said


def test_a_share_that_leaves_nothing_is_refused():
    args = SFTArgs(sft_share=1e-9)
    with pytest.raises(UserError, match="SFT trains on 0 of 400 demonstrations; give a larger"):
        check_sft_share(args, TASK, SHOWN)


@pytest.mark.parametrize(
    ("taught", "share", "fault"),
    [
        ({"sft_share": 0.3}, 0.3, ""),
        ({"sft_share": 0.2}, 0.3, ""),
        ({"sft_share": 0.3}, 0.0, ""),
        ({}, 0.3, "was trained on all problems, so RL would ask what it has seen"),
        ({"sft_share": 0.5}, 0.3, "was trained on those of --sft_share 0.5"),
    ],
)
def test_a_warm_start_of_another_share_is_refused(taught, share, fault, tmp_path):
    (tmp_path / "args.json").write_text(json.dumps({"args": taught}))
    args = RLArgs(sft_base=str(tmp_path), sft_share=share)
    if not fault:
        return refuse_other_share(args)
    with pytest.raises(UserError, match=fault):
        refuse_other_share(args)


def test_a_model_that_an_sft_has_trained_is_a_warm_start_too(tmp_path):
    rl = RLArgs(sft_base="", model=str(tmp_path), sft_share=0.3)
    record = tmp_path / "args.json"
    record.write_text(json.dumps({"args": {"curriculum": False, "sft_share": 0.0}}))
    with pytest.raises(UserError, match="trained on all problems, .* name another --model"):
        refuse_other_share(rl)
    record.write_text(json.dumps({"args": {"curriculum": False, "sft_share": 0.3}}))
    refuse_other_share(rl)
    record.write_text(json.dumps({"args": {"loss_type": "grpo"}}))  # of another command
    refuse_other_share(rl)
