"""The table of answers that rules are verified by: its size, and faults of a rule that it shows."""

from functools import partial

import pytest

from alignment.rewards import boxed, r1_zero
from alignment.rewards.rules import CONTROLS, PARTS, RULES, CosineLength, make_text_part
from alignment.system.files import read_jsonl
from alignment.verification.graded_answers import (
    ANSWERS,
    check_of_parts,
    checks_of_rules,
    wrong_rewards,
)

ROWS = read_jsonl(ANSWERS)


def wrong(name: str) -> list[str]:
    rows = [row for row in ROWS if name in row["rewards"]]
    return wrong_rewards(name, RULES[name], rows)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_has_forty_answers_of_which_most_are_wrong(rule):
    rewards = [row["rewards"][rule] for row in ROWS if rule in row["rewards"]]
    assert len(rewards) >= 40 and 5 <= sum(rewards) < len(rewards) / 2
    assert wrong(rule) == []


def test_no_answer_is_listed_twice():
    pairs = {(row["response"], row["ground_truth"]) for row in ROWS}
    assert len(pairs) == len(ROWS)


def test_the_runs_own_rules_come_first_and_the_users_own_is_not_checked():
    checks = list(checks_of_rules(RULES, ("boxed", "mine.module:rule")))
    assert checks[0].what == "boxed: wrong rewards of 121 answers" and len(checks) == 8
    assert checks[-1].not_checked == "your own rule"


def test_the_first_answer_in_the_place_of_the_last(monkeypatch):
    def first(response):
        return response.partition("<answer>")[2].partition("</answer>")[0].strip() or None

    monkeypatch.setattr(r1_zero, "_last_answer", first)
    assert "two answers, the first one right" in wrong("r1_zero")


def test_a_rule_that_takes_a_list_of_guesses(monkeypatch):
    def lenient(response, truth):
        return {"reward": float(truth in response)}

    monkeypatch.setitem(RULES, "r1_zero_strict", lenient)
    assert "two guesses" in wrong("r1_zero_strict")


def test_a_box_within_thoughts(monkeypatch):
    monkeypatch.setattr(boxed, "outside_thoughts", lambda response: response)
    assert "a right box in the thoughts alone" not in wrong("boxed")  # The last box counts.
    assert "a wrong box before a right thought" in wrong("boxed")


def wrong_values(**changes) -> list[str]:
    cosine = partial(PARTS["cosine_length"], settings=CosineLength(longest=256))
    found = check_of_parts({**CONTROLS, **PARTS, "cosine_length": cosine, **changes}).quantity()
    assert isinstance(found, list)
    return found


def test_parts_of_rewards_with_other_values():
    assert wrong_values() == []
    tags = make_text_part(lambda problem, text: float("<answer>" in text))
    assert "tag_count of two answers, the last one wrong" in wrong_values(tag_count=tags)
    swapped = CosineLength(longest=256, right_short=1.0, right_long=2.0)
    assert "cosine_length of a right answer behind the prompt's opening tag" in wrong_values(
        cosine_length=partial(PARTS["cosine_length"], settings=swapped)
    )
    assert wrong_values(inverted=PARTS["accuracy"])
