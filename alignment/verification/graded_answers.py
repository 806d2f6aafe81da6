"""Do the rules that ship pay for what docs/grading.md says, also where a response tries to deceive?

answers.jsonl has responses with the reward that each rule's definition gives them, judged by hand.
Most are wrong and look right. A rule is left out of a row that its definition does not decide.
parts.jsonl has the same of the parts that --reward adds up."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from alignment.core.records import Completion, Group, Problem, Score
from alignment.rewards.rules import grading_report
from alignment.system.files import read_jsonl
from alignment.verification.check import Check
from alignment.verification.reported import is_near, mean

ANSWERS = Path(__file__).with_name("answers.jsonl")
PARTS = Path(__file__).with_name("parts.jsonl")
QUESTION = "How much is it?"
Part = Callable[[Sequence[Problem], Sequence[Completion], Sequence[Score]], Sequence[float | None]]


def checks_of_rules(
    rules: Mapping[str, Callable[[str, str], Score]], own: Sequence[str]
) -> Iterator[Check]:
    """The check of each of the rules that ship, those that the run is rewarded or evaluated by
    (`own`) first. A rule of the user's own is in no table."""
    rows = read_jsonl(ANSWERS)
    first = [name for name in own if name in rules]
    for name in dict.fromkeys((*first, *rules)):
        of_rule = [row for row in rows if name in row["rewards"]]
        note = ""
        if name in own:
            note = "(this run's)"

        def wrong(name: str = name, of_rule: Sequence[dict] = of_rule) -> list[str]:
            return wrong_rewards(name, rules[name], of_rule)

        yield Check(f"{name}: wrong rewards of {len(of_rule)} answers", 0.0, wrong, note=note)
    yield Check("rules: other means than their answers'", 0.0, lambda: other_means(rules, rows))
    for name in dict.fromkeys(own):
        if ":" in name:
            yield Check(
                f"{name}: wrong rewards", math.inf, lambda: 0.0, not_checked="your own rule"
            )


def other_means(rules: Mapping[str, object], rows: Sequence[Mapping]) -> list[str]:
    """The rules of which another mean reward is reported than the table gives, beside another
    rule's."""
    others = []
    for name in rules:
        of_rule = [row for row in rows if name in row["rewards"]]
        groups = [group_of(number, row) for number, row in enumerate(of_rule)]
        beside = next(other for other in rules if other != name)
        reported = grading_report(groups, (beside, name))[f"reward_{name}"]
        if not is_near(reported, mean([row["rewards"][name] for row in of_rule])):
            others.append(name)
    return others


def check_of_parts(parts: Mapping[str, Part]) -> Check:
    """The check of the parts of rewards that ship, by their names."""
    rows = read_jsonl(PARTS)
    what = f"parts of rewards: wrong values of {len(rows)} answers"
    return Check(what, 0.0, lambda: wrong_parts(parts, rows))


def wrong_parts(parts: Mapping[str, Part], rows: Sequence[Mapping]) -> list[str]:
    """The parts that give an answer another value than the table does, and of which answer."""
    wrong = []
    for row in rows:
        length = row["tokens"]
        problem = Problem("1", QUESTION, row["prompt"], row["ground_truth"])
        completion = Completion(
            (1,), (2,) * length, (-1.0,) * length, row["response"], row["finish_reason"], 0
        )
        score = {"format_reward": row["format"], "answer_reward": row["answer"], "reward": 0.0}
        for name, expected in row["parts"].items():
            (value,) = parts[name]([problem], [completion], [score])
            if value is None or not is_near(value, expected):
                wrong.append(f"{name} of {row['why']}")
    return wrong


def group_of(number: int, row: Mapping) -> Group:
    """A group of one response, that of a row of the table."""
    problem = Problem(str(number), "question", "prompt", row["ground_truth"])
    completion = Completion((1,), (2,), (-1.0,), row["response"], "stop", 0)
    score = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}
    return Group(problem, (completion,), (score,))


def wrong_rewards(
    name: str, rule: Callable[[str, str], Score], rows: Sequence[Mapping]
) -> list[str]:
    """What is special of those answers that a rule gives another reward than the table does."""
    wrong = []
    for row in rows:
        if rule(row["response"], row["ground_truth"])["reward"] != row["rewards"][name]:
            wrong.append(row["why"])
    return wrong
