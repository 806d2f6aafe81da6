"""A frozen model as a part of a reward."""

import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment.core.records import Completion, Problem
from alignment.rewards.judge import Judge, filled, judge_name, read_rubric, summary_of
from alignment.rewards.rules import find_reward, try_reward
from alignment.system.errors import UserError

PROBLEM = Problem("a", "What is 2 + {response}?", "User: ...", "5")
RESPONSE = "<think> two and {question} </think> <answer> 5 </answer>"


def completion(text: str) -> Completion:
    return Completion((1,), (2,), (-0.1,), text, "stop", 0)


def test_the_probability_is_that_of_yes_among_yes_and_no():
    ids = {"yes": 0, "Yes": 1, " yes": 1, " Yes": 0, "no": 2, "No": 3, " no": 2, " No": 3}

    def encode(text, add_special_tokens=True):
        return [ids.get(text, 5), 7]

    def model(input_ids):
        # Weights 3 and 1 of yes, 2 and 2 of no, 100 of another token: 4 / 8.
        logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 100.0]).log()
        return SimpleNamespace(logits=torch.stack([torch.zeros(5), logits])[None])

    tokenizer = SimpleNamespace(encode=encode)
    assert Judge(model, tokenizer, "cpu").probability_of_yes("so?") == pytest.approx(0.5)


def test_a_rubric_reads_the_whole_response_or_its_summary():
    assert summary_of(RESPONSE) == "5"
    assert summary_of("no thought") == "no thought"
    rubric = "Q {question} R {response} S {summary}"
    assert filled(rubric, PROBLEM, RESPONSE) == f"Q {PROBLEM.question} R {RESPONSE} S 5"
    assert "{summary}" in read_rubric("helpful") and "{response}" in read_rubric("harmless")


def test_a_judge_is_a_weighted_part_of_the_reward(tiny_folder):
    name = f"judge:{tiny_folder}@helpful"
    reward = find_reward(f"accuracy,{name}:0.5", ("r1_zero",))
    [group] = reward.score([PROBLEM], [[completion(RESPONSE), completion("so")]])
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    for score, text in zip(group.scores, (RESPONSE, "so"), strict=True):
        prompt = f"{filled(read_rubric('helpful'), PROBLEM, text)}\nAnswer:"
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1]
        # " yes" and " no" begin with the same space here, which tells nothing.
        assert tokenizer.encode(" yes")[0] == tokenizer.encode(" no")[0]
        weights = {}
        for word in ("yes", "no"):
            firsts = {tokenizer.encode(spelling)[0] for spelling in (word, word.title())}
            weights[word] = sum(logits[first].exp().item() for first in firsts)
        expected = weights["yes"] / (weights["yes"] + weights["no"])
        [part] = [value for key, value in score.items() if key.startswith("part_judge.")]
        assert part == pytest.approx(expected, abs=1e-6)
        assert score["reward"] == pytest.approx(score["answer_reward"] + 0.5 * part)


def test_names():
    assert judge_name("judge:mine") is None  # a function of a module of the user's
    name = judge_name("judge:a/b@my/rubric.txt")
    assert name is not None and name.metric == "judge.b@rubric"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("judge:nowhere@helpful", "judge:nowhere: there is no model in this folder"),
        # A folder that is missing beside others, and no name of the hub.
        ("judge:made/later@helpful", "judge:made/later: there is no model in this folder"),
        ("judge:{folder}@helpfull", "@helpfull: there is no such rubric; choose one of harmless,"),
        ("judge:{folder}@{file}", "the rubric has no place for what is judged"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_loads(
    part, message, tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made").mkdir()
    file = tmp_path / "rubric.txt"
    file.write_text("Is it good?")
    with pytest.raises(UserError, match=re.escape(message)):
        find_reward(part.format(folder=tiny_folder, file=file), ("r1_zero",))


def test_a_trial_of_the_reward_loads_no_judge(tmp_path):
    (tmp_path / "config.json").write_text("{}")  # no model, which is not found out
    try_reward(find_reward(f"judge:{tmp_path}@harmless", ("r1_zero",)), PROBLEM)
