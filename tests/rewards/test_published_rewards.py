"""Rewards as their authors wrote them, beside ours; each figure follows from the authors' own text
by hand."""

import pytest

from alignment.args import RLArgs, parse
from alignment.config.presets import preset_names
from alignment.core.records import Completion, Problem
from alignment.rewards.rules import find_reward, find_rule, graded_text
from alignment.system.errors import UserError

LINES = "<think>\nso\n</think>\n<answer>\n5\n</answer>"
ONE_LINE = "<think>so</think> <answer>5</answer>"
TIGHT = "<think>so</think><answer>5</answer>"
REASONING = "<reasoning>\nso\n</reasoning>\n<answer>\n5\n</answer>"
TWO_ANSWERS = "<think>so</think><answer>5</answer><answer>6</answer>"
IN_THOUGHT = "<think>an <answer> tag</think><answer>5</answer>"
WORD_BEFORE = "Well. <think>so</think> <answer>5</answer>"
TAB = "<think>so</think>\t<answer>5</answer>"

# (name, turn, gold) -> the reward by the author's text, or by ours.
TABLE = [
    # Open R1's format: line breaks around every tag. Ours (r1_zero): one space between the two.
    ("open_r1_format", LINES, "5", 1),
    ("open_r1_format", ONE_LINE, "5", 0),
    ("open_r1_format", LINES + "\nand so on", "5", 1),  # `$` of MULTILINE ends at a line break
    ("open_r1_format", "\n" + LINES, "5", 0),
    ("r1_zero", LINES, "5", 0),
    ("r1_zero", ONE_LINE, "5", 1),
    ("think_answer", LINES, "5", 1),
    ("think_answer", ONE_LINE, "5", 1),
    ("think_answer", TIGHT, "5", 1),
    ("think_answer", REASONING, "5", 1),
    ("think_answer", TWO_ANSWERS, "6", 0),
    # Open R1's count of tags: with line breaks. Ours: tags alone.
    ("open_r1_tag_count", LINES, "5", 1),
    ("open_r1_tag_count", ONE_LINE, "5", 0),
    ("open_r1_tag_count", "<think>\nso</think>\n<answer>\n5\n</answer>", "5", 0.75),
    ("tag_count", ONE_LINE, "5", 1),
    ("tag_count", IN_THOUGHT, "5", 0.75),
    # Open R1's steps: of numbered lines the first line alone, no "Then,".
    ("open_r1_reasoning_steps", "1. a\n2. b\n- c\nThen, d", "5", pytest.approx(2 / 3)),
    ("reasoning_steps", "1. a\n2. b\n- c\nThen, d", "5", 1),
    # simple_GRPO's format: two tags of each kind in all, [\n ] between, nothing before.
    ("simple_grpo_format", TIGHT, "5", 1.25),
    ("simple_grpo_format", LINES, "5", 1.25),
    ("simple_grpo_format", IN_THOUGHT, "5", -1),  # three tags of an answer
    ("simple_grpo_format", TAB, "5", -1),
    ("simple_grpo_format", WORD_BEFORE, "5", -1),
    ("signed_format", IN_THOUGHT, "5", 1.25),
    ("signed_format", TAB, "5", 1.25),
    # simple_GRPO's numbers have no sign and no thousands.
    ("simple_grpo_correct", "it is 1-33", "33", 1),
    ("signed_accuracy", "it is 1-33", "33", -1),
    ("simple_grpo_correct", "it is -3", "-3", -1),
    ("signed_accuracy", "it is -3", "-3", 1),
    ("simple_grpo_correct", "1/2", "0.5", 1),
    ("simple_grpo_correct", "none", "5", -1),
    # GRPO-Zero: the first answer. Ours (countdown): the last.
    (
        "grpo_zero_answer",
        "<think>so</think>\n<answer>6 / 2</answer>\n<answer>6</answer>",
        "3 = 2 6",
        1,
    ),
    ("countdown", "so</think>\n<answer>6 / 2</answer>\n<answer>6</answer>", "3 = 2 6", 0),
    ("grpo_zero_answer", "<answer>6</answer><answer>6 / 2</answer>", "3 = 2 6", 0),
    (
        "grpo_zero_answer",
        "<answer>\n6 / 2</answer>",
        "3 = 2 6",
        0,
    ),  # a line break is no character of it
    ("grpo_zero_answer", "<answer>2 ** 6</answer>", "64 = 2 6", 0),  # 1 by its author
    ("grpo_zero_format", "<think>so</think>\n<answer>1</answer>", "3 = 2 6", 1),
    ("grpo_zero_format", "<think>so</think> <answer>1</answer>", "3 = 2 6", 0.6),
    ("grpo_zero_format", "so <answer>1</answer>", "3 = 2 6", 0.5),
    ("grpo_zero_format", "<think>so</think>", "3 = 2 6", 0.1),
    # The scripts that train by TRL.
    ("soft_format", "<reasoning>so</reasoning> <answer>5</answer> and so on", "5", 1),
    ("soft_format", ONE_LINE, "5", 0),
    ("strict_format", REASONING, "5", 1),
    ("strict_format", REASONING + "\n", "5", 1),
    ("strict_format", REASONING + " and so on", "5", 0),
    ("strict_format", "<reasoning>so</reasoning>\n<answer>\n5\n</answer>", "5", 0),
    ("correct_in_text", "it is 15, or 6", "5", 1),
    ("correct_in_text", "it is 6", "5", 0),
]


@pytest.mark.parametrize(("name", "turn", "gold", "reward"), TABLE)
def test_a_turn_is_paid_by_its_author_and_by_us(name, turn, gold, reward):
    if name in ("r1_zero", "think_answer", "countdown"):
        assert find_rule(name)(turn, gold)["reward"] == reward
        return
    rules = ("countdown",) if " = " in gold else ("r1_zero",)
    problem = Problem("a", "?", "?", gold)
    [group] = find_reward(name, rules).score([problem], [[completion(turn)]])
    assert group.scores[0]["reward"] == reward


def completion(text: str) -> Completion:
    return Completion((1,), (2,), (-0.1,), text, "stop", 0)


def test_a_thought_that_the_prompt_opens_is_part_of_the_turn():
    problem = Problem("a", "?", "Assistant: <think>", "5")
    [group] = find_reward("simple_grpo_format", ("r1_zero",)).score(
        [problem], [[completion("so</think><answer>5</answer>")]]
    )
    assert group.scores[0]["reward"] == 1.25


def test_parts_of_another_format_are_refused():
    with pytest.raises(UserError, match="open_r1_format: it looks for tags, and the prompt asks"):
        find_reward("open_r1_format,accuracy", ("boxed", "flexible"))
    with pytest.raises(UserError, match="correct_in_text: it looks for a number"):
        find_reward("correct_in_text", ("countdown",))
    with pytest.raises(UserError, match="grpo_zero_answer: it evaluates an expression"):
        find_reward("grpo_zero_answer", ("think_answer", "flexible"))


def test_the_answer_is_paid_apart_from_its_format():
    score = find_rule("think_answer")("<answer>\n5\n</answer>", "5")
    assert score == {"reward": 0, "format_reward": 0, "answer_reward": 1}


FORMATS = (
    LINES,
    ONE_LINE,
    TIGHT,
    REASONING,
    "so</think> <answer>5</answer>",
    "so</think>\n<answer>5</answer>",
    "so \\boxed{5}",
    "so\n<answer>5</answer>",
    "so\n#### 5",
    "5",
)


@pytest.mark.parametrize("preset", preset_names())
def test_the_best_paid_answer_of_a_preset_is_right_by_its_evaluation(preset):
    args = parse(RLArgs, ["--preset", preset])
    task = args.task_in_format
    gold, right, wrong = "4711", "4711", "13"
    if "countdown" in task.rules:
        gold, right, wrong = "65 = 19 36 55 7", "55 + 36 - 19 - 7", "55 + 36 + 19 + 7"
    beginning = ""
    if task.prompt in ("r1_zero", "tiny") or task.name.startswith("countdown"):
        beginning = "<think>"
    problem = Problem("a", "?", f"?{beginning}", gold)
    texts = []
    for text in FORMATS:
        response = text.removeprefix(beginning)
        texts += [response.replace("5", answer) for answer in (right, wrong)]
    reward = find_reward(args.reward, task.rules, settings=args.reward_settings)
    [group] = reward.score([problem], [[completion(text) for text in texts]])
    rewards = [score["reward"] for score in group.scores]
    rule = find_rule(args.evaluation_rule)
    for text, paid in zip(texts, rewards, strict=True):
        if paid == max(rewards):
            assert rule(graded_text(rule, problem, text), gold)["answer_reward"] == 1, text
