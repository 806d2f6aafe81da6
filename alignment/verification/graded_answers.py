"""Do the rules that ship pay for what docs/grading.md says, also where a response tries to deceive?

answers.jsonl has responses with the reward that each rule's definition gives them, judged by hand.
Most are wrong and look right. A rule is left out of a row that its definition does not decide."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from alignment.core.records import Score
from alignment.system.files import read_jsonl
from alignment.verification.check import Check

ANSWERS = Path(__file__).with_name("answers.jsonl")


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
    for name in dict.fromkeys(own):
        if ":" in name:
            yield Check(
                f"{name}: wrong rewards", math.inf, lambda: 0.0, not_checked="your own rule"
            )


def wrong_rewards(
    name: str, rule: Callable[[str, str], Score], rows: Sequence[Mapping]
) -> list[str]:
    """What is special of those answers that a rule gives another reward than the table does."""
    wrong = []
    for row in rows:
        if rule(row["response"], row["ground_truth"])["reward"] != row["rewards"][name]:
            wrong.append(row["why"])
    return wrong
