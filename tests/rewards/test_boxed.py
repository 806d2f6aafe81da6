r"""The rules of answers in a box: which box counts, and what a hostile response costs."""

import json
import time
from pathlib import Path

import pytest

from alignment.core.records import Completion, Problem
from alignment.rewards.boxed import boxed_reward_fn, flexible_reward_fn, outside_thoughts
from alignment.rewards.rules import find_reward, find_rule, graded_text, score_groups
from alignment.system.errors import UserError

PAIRS = Path(__file__).parent / "grading"
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
WITHOUT_ANSWER = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"So it is \boxed{42}.", "42", RIGHT),
        (r"First \boxed{41}, no: \boxed{42}", "42", RIGHT),
        (r"First \boxed{42}, no: \boxed{41}", "42", WRONG),
        (r"\boxed{\frac{1}{2}}", "0.5", RIGHT),
        (r"\boxed{\left\{1, \{2\}\right\}} is a set of sets", r"\{1, \{2\}\}", RIGHT),
        (r"\boxed{\boxed{7}}", "7", RIGHT),
        (r"<think>\boxed{1}</think> It is \boxed{2}.", "2", RIGHT),
        (r"<think>\boxed{2}</think> It is two.", "2", WITHOUT_ANSWER),
        (r"\boxed{2} <think> or is it \boxed{2}", "2", WITHOUT_ANSWER),  # it never ends to think
        (r"\boxed{1} was a thought of the prompt's </think> \boxed{2}", "2", RIGHT),
        (r"<think>a</think> \boxed{3} <think>\boxed{4}</think> done", "3", RIGHT),
        (r"\boxed{5} or \boxed{6", "5", WITHOUT_ANSWER),  # cut off
        (r"I put it within \boxed{}.", "5", WITHOUT_ANSWER),
        ("The answer is 42.", "42", WITHOUT_ANSWER),
        ("", "42", WITHOUT_ANSWER),
    ],
)
def test_the_last_box_outside_of_thoughts_is_the_answer(response, truth, score):
    assert boxed_reward_fn(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "reward"),
    [
        ("It has 1,234, so he pays $18.", "18", 1),
        ("It has 18 and so 1,234.50 in all", "1234.5", 1),
        (r"\boxed{5} of 8", "5", 1),
        ("<think> 3 + 4 = 7", "7", 1),
        ("It falls to \u22127.", "-7", 1),  # Unicode's minus sign
        ("It falls to \u22127.", "7", 0),
        ("<think> 3 + 4 = 7 </think> none", "7", 0),
        ("none", "7", 0),
    ],
)
def test_the_flexible_rule_takes_the_last_number_where_there_is_no_box(response, truth, reward):
    assert flexible_reward_fn(response, truth)["reward"] == reward


def test_the_best_answer_to_every_labelled_truth_is_right():
    truths = set()
    for file in PAIRS.glob("*.jsonl"):
        for line in file.read_text("utf-8").splitlines():
            truths.add(json.loads(line).get("ground_truth", ""))
    # A truth that is itself unbalanced, or in a box of its own, fits in no box.
    fitting = [
        truth
        for truth in truths
        if truth.strip() and truth.count("{") == truth.count("}") and "box" not in truth
    ]
    assert len(fitting) > 500
    wrong = [
        truth for truth in fitting if not boxed_reward_fn(rf"\boxed{{{truth}}}", truth)["reward"]
    ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece",
    ["\\boxed\n", r"\boxed{", r"\boxed{1}", "<think></think>", "1,"],
)
def test_a_hostile_response_costs_time_in_proportion_to_its_length(piece):
    """Where a scan began again at every piece, four times the length would cost 16 times the
    time."""

    def cpu_seconds(pieces: int) -> float:
        text = piece * pieces
        start = time.process_time()
        boxed_reward_fn(text, "1")
        flexible_reward_fn(text, "1")
        return time.process_time() - start

    shorter = min(cpu_seconds(50_000) for _ in range(3))
    longer = min(cpu_seconds(200_000) for _ in range(2))
    assert longer < 9 * shorter


def test_a_thought_that_the_prompt_opens_must_close():
    """The prompt of such a model ends with <think>: a box before </think> is a thought's."""
    problem = Problem("1", "?", "<|assistant|>\n<think>\n", "5")
    texts = [r"\boxed{5}", r"so </think> \boxed{5}"]
    completions = [Completion((), (), (), text, "stop", 0) for text in texts]
    for rule, rewards in (("boxed", [0, 1]), ("r1_zero", [0, 0])):
        [group] = score_groups([problem], [completions], find_rule(rule))
        assert [score["reward"] for score in group.scores] == rewards
    assert graded_text(find_rule("boxed"), problem, "x") == "<think>x"
    assert outside_thoughts("a <think> b </think> c") == "a  c"


def test_the_automatic_reward_is_the_box_that_a_prompt_asks_for():
    rules = ("boxed", "flexible")
    assert find_reward("auto", rules).rule is boxed_reward_fn
    assert find_reward("auto", ("r1_zero_strict", "r1_zero")).rule is find_rule("r1_zero")
    assert find_reward("format:0.5,accuracy", rules).rule is boxed_reward_fn
    for named in ("r1_zero", "r1_zero_strict"):
        with pytest.raises(UserError, match=f"--reward {named}: it does not fit"):
            find_reward(named, rules)
    with pytest.raises(UserError, match="tag_count: it counts tags, and the prompt asks for a box"):
        find_reward("accuracy,tag_count", rules)
