r"""An answer is paid for all that it states, and a ground truth is met by all that it states:
boxes, lists, chains, thousands, domains and branches. `stated_pairs.jsonl` holds labelled pairs of
these kinds, `hostile_parts` what nobody pays."""

import json
import math
import time
from collections import Counter
from pathlib import Path

import pytest
from hostile import hostile_parts
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.rewards.grading.boxes import find_boxes
from alignment.rewards.grading.cascade import FAILURES, ask_math_verify, grade, grade_detail
from alignment.rewards.grading.expressions import parse_expression
from alignment.rewards.grading.values import equal_values, proportional
from alignment.rewards.r1_zero import extract_answer, r1_zero_reward_fn, r1_zero_strict_reward_fn

PAIRS = [
    json.loads(line)
    for line in (Path(__file__).parent / "stated_pairs.jsonl").read_text("utf-8").splitlines()
]
SECONDS = 30.0  # of a grading on a busy machine, which may not be refused for its time


def shaped(answer: str) -> str:
    return f"I think. </think> <answer> {answer} </answer>"


def test_there_are_pairs_of_every_kind_and_label():
    assert len(PAIRS) >= 120
    assert len({(pair["answer"], pair["ground_truth"]) for pair in PAIRS}) == len(PAIRS)
    kinds = Counter((pair["kind"], pair["equal"]) for pair in PAIRS)
    assert min(kinds.values()) >= 5
    assert (
        {kind for kind, _ in kinds}
        == {kind for kind, equal in kinds if equal}
        == {kind for kind, equal in kinds if not equal}
    )


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_every_pair_is_graded_as_it_is_labelled(kind):
    wrong = [
        pair
        for pair in PAIRS
        if pair["kind"] == kind and grade(pair["answer"], pair["ground_truth"]) != pair["equal"]
    ]
    assert wrong == []


def test_no_part_is_paid_in_either_direction():
    pairs = hostile_parts()
    assert len(set(pairs)) == len(pairs) >= 60
    for answer, truth in pairs:
        for pair in ((answer, truth), (truth, answer)):
            start = time.perf_counter()
            verdict = grade_detail(*pair)
            assert not verdict.equal, pair
            assert verdict.stage not in FAILURES, pair
            assert time.perf_counter() - start < SECONDS, pair


# --- boxes in formulas in sentences ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "states"),
    [
        (r"Answer: -\boxed{5}", "-5"),
        (r"the answer is $-\boxed{5}$.", "-5"),
        (r"\text{The answer is }-\boxed{5}", "-5"),
        ("\u7b54\u6848\u662f-\\boxed{5}", "-5"),
        (r"the answer is \frac{1}{\boxed{5}}", "1/5"),
        (r"the answer is \sqrt{\boxed{5}}, as said", r"\sqrt{5}"),
        (r"the answer is \boxed{5}^2", "25"),
        (r"it equals 10^{\boxed{5}}", "100000"),
        (r"we get 8 - \boxed{5}", "3"),
    ],
)
def test_a_box_in_a_formula_states_the_formula(answer, states):
    assert grade(answer, states)
    assert not grade(answer, "5")


@pytest.mark.parametrize(
    "answer",
    [r"2\boxed{5}", r"\boxed{5}6", r"\boxed{5}0", r"x\boxed{5}", r"the answer is 2\boxed{5}"],
)
def test_what_a_digit_or_a_letter_touches_is_no_value_of_its_own(answer):
    assert not grade(answer, "5")


@pytest.mark.parametrize(
    "answer",
    [
        r"The answer is \boxed{5}!",
        r"answer - \boxed{5}",
        r"Question 3: \boxed{5}",
        r"Step 3. \boxed{5}",
        r"In 1995, \boxed{5}",
        r"For n = 4, \boxed{5}",
        r"There are 3 + 2 = \boxed{5} apples",
        r"2x = 10, so x = \boxed{5}",
        r"thus a + b = \boxed{5}",
        r"costs $\boxed{5}$ dollars",
        r"\Rightarrow \boxed{5}",
        r"is approximately 5.1 \approx \boxed{5}",
        r"is **\boxed{5}**",
        r"is \boxed{5}, not 6",
        "Hence\n\\boxed{5}\n",
    ],
)
def test_a_box_in_a_sentence_states_its_content(answer):
    assert grade(answer, "5")


def test_a_number_behind_words_is_no_part_of_the_boxed_one():
    assert grade(r"Question 3 \boxed{1/2}", "1/2")


# --- boxes in responses ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "paid", "paid_strictly"),
    [
        (r"\boxed{3}, \boxed{5}", "5", 0, 0),
        (r"\boxed{3}, \boxed{5}", "3, 5", 1, 1),
        (r"x = \boxed{3} or x = \boxed{5}", "3, 5", 1, 1),
        (r"\frac{1}{\boxed{5}}", "5", 0, 0),
        (r"\boxed{5} or 6", "5", 0, 0),
        (r"\boxed{5} \times 10^3", "5", 0, 0),
        (r"\boxed{5} \text{ cm}", "5 cm", 1, 1),
        (r"\boxed{5} \text{ cm}", "5 m", 0, 0),
        (r"\boxed{\frac34} or 0.75", "0.75", 1, 1),  # one value in two forms
        (r"\boxed{\frac34} or 0.76", "0.75", 0, 0),
        (r"\boxed{50} or 50\%", "50", 0, 0),
        (
            r"\boxed{3}, no, wait: \boxed{5}",
            "5",
            1,
            0,
        ),  # a correction is no list, but not one final answer either
        (r"a = 3, b = 4, so c = \boxed{5}", "5", 1, 0),
    ],
)
def test_a_response_is_paid_for_all_that_its_answer_states(answer, truth, paid, paid_strictly):
    assert r1_zero_reward_fn(shaped(answer), truth)["reward"] == paid
    assert r1_zero_strict_reward_fn(shaped(answer), truth)["reward"] == paid_strictly


def test_the_answer_that_is_shown_is_what_the_boxes_hold():
    assert extract_answer(shaped(r"\boxed{3}, \boxed{5}")) == "3 ,  5"
    assert extract_answer(shaped(r"first \boxed{3}, then \boxed{5}")) == "3, 5"
    assert extract_answer(shaped(r"\boxed{3}, sorry, \boxed{5}")) == "5"


def test_boxes_are_found_at_any_depth_and_only_closed_ones():
    boxes = find_boxes(r"a \boxed{1 + \fbox{2}} b \boxed{\{3\}} c")
    assert boxes.contents == ("1 +  2", r"\{3\}")
    assert boxes.gaps == ("a", "b") and boxes.rest == "a b c"
    assert find_boxes(r"\boxed{3}, \boxed{5").contents == ()


@given(
    st.lists(
        st.sampled_from([r"\boxed{", r"\boxed ", "{", "}", "5", ",", " ", "\n", "$", r"\}"]),
        max_size=12,
    ).map("".join)
)
@settings(max_examples=300)
def test_any_jumble_of_boxes_gets_a_verdict(text):
    assert grade_detail(text, "5").stage not in FAILURES
    assert grade_detail("5", text).stage not in FAILURES
    assert len(find_boxes(text).gaps) == len(find_boxes(text).contents)


@pytest.mark.parametrize(
    "text_of",
    [lambda n: r"\boxed{" * n + "}" * n, lambda n: r"\boxed{1}" * n],
    ids=["nested", "in a row"],
)
def test_four_times_as_many_boxes_take_about_four_times_as_long(text_of):
    """Sixteen times as long, if each were looked for from the beginning."""

    def seconds(number: int) -> float:
        text = text_of(number)
        best = math.inf
        for _ in range(5):
            start = time.process_time()
            find_boxes(text)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(40_000) < 9 * seconds(10_000)


# --- points of the domain -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (r"3 - \sqrt{x-3}", r"-\sqrt{x-3} + 3", True),
        (r"\sqrt{x-123456}", r"(x-123456)^{1/2}", True),
        (
            r"\sqrt{x-1000} + \sqrt{1001-x}",
            r"\sqrt{1001-x} + \sqrt{x-1000}",
            True,
        ),  # the domain is [1000, 1001]
        (r"\arcsin(2x-19)", r"\arcsin(2x-19) + 0 x", True),  # [9, 10]
        (r"\ln(a-x) + \ln(x-b)", r"\ln((a-x)(x-b))", True),
        (r"\sqrt{1-x^2-y^2-z^2}", r"\sqrt{1-z^2-y^2-x^2}", True),
        (r"\sqrt{x-123456}", r"\sqrt{x-123457}", False),
        (r"\arcsin(2x-19)", r"\arcsin(2x-18)", False),
        (r"|x-10|", "10-x", False),  # equal up to 10
        (r"|x+300|", "x+300", False),
        (r"\sqrt{(x-10)^2}", "10-x", False),
        (r"\lfloor x^2/1000 \rfloor", "0", False),
        (
            r"\sqrt{x-5} \sqrt{4-x}",
            r"\sqrt{4-x} \sqrt{x-5}",
            None,
        ),  # real nowhere: refused, not paid
        (r"\arcsin(x^2+2)", r"\arcsin(2+x^2)", None),
    ],
)
def test_expressions_are_compared_where_both_are_real(a, b, equal):
    assert equal_values(parse_expression(a), parse_expression(b)) is equal
    assert equal_values(parse_expression(b), parse_expression(a)) is equal


def test_equations_with_a_far_domain_are_compared_in_it():
    far = parse_expression(r"y - \sqrt{x-50}")
    assert proportional(far, parse_expression(r"2\sqrt{x-50} - 2y"))
    assert not proportional(far, parse_expression(r"2\sqrt{x-50} - 2y"), positive=True)
    assert not proportional(far, parse_expression(r"y - \sqrt{x-51}"))


# --- what math-verify is asked --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth", "stage"),
    [
        (r"\sum_{n=1}^{2} n, 5", "5", "unread"),  # a list
        (r"\sum_{n=1}^{2} n < 5", "5", "unread"),  # a relation
        (
            r"\sum_{n=1}^{2} n",
            r"\binom{10^9}{5*10^8}",
            "unread",
        ),  # which C would compute for minutes
        (r"((9^{99})^{99})^{99}", r"\sum_{n=1}^{2} n", "unread"),
        (r"\sum_{n=1}^{2} n", r"\Gamma(10^{12})", "unread"),
        (r"\sum_{n=1}^{2} n = 5", "5", "math-verify"),
    ],
)
def test_math_verify_gets_single_expressions_of_a_bounded_size(answer, truth, stage):
    assert ask_math_verify(answer, truth) == (False, stage)
