"""Paired differences by hand, and what is shown of them."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from alignment.core.records import Completion, Group, Problem
from alignment.evaluation.accuracy import paired_difference, write_comparison


def groups(rewards, text="t"):
    made = []
    for i, row in enumerate(rewards):
        drawn = tuple(Completion((1,), (2,), (-0.1,), f"{text}{i}", "stop", 0) for _ in row)
        scores = tuple({"reward": r, "format_reward": 1.0, "answer_reward": r} for r in row)
        made.append(Group(Problem(str(i), f"q{i}", "", "5"), drawn, scores))
    return made


def compare(a, b):
    return paired_difference(groups(a, "a"), groups(b, "b"))


def test_single_answers_have_newcombes_interval():
    """Of 21 pairs 1 right by both, 1 by the first only, 7 by the second only, 12 by neither: p1 =
    2/21, p2 = 8/21."""
    a = [[1]] * 2 + [[0]] * 19
    b = [[1]] + [[0]] + [[1]] * 7 + [[0]] * 12
    found = compare(a, b)
    assert found.difference == pytest.approx(6 / 21)
    z, n = 1.96, 21

    def wilson(p):
        centre, half = (p + z * z / (2 * n)), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (centre - half) / (1 + z * z / n), (centre + half) / (1 + z * z / n)

    (l1, u1), (l2, u2) = wilson(2 / 21), wilson(8 / 21)
    phi = (1 * 12 - 1 * 7) / math.sqrt(2 * 19 * 8 * 13)
    low = 6 / 21 - math.sqrt(
        (8 / 21 - l2) ** 2 - 2 * phi * (8 / 21 - l2) * (u1 - 2 / 21) + (u1 - 2 / 21) ** 2
    )
    high = 6 / 21 + math.sqrt(
        (u2 - 8 / 21) ** 2 - 2 * phi * (u2 - 8 / 21) * (2 / 21 - l1) + (2 / 21 - l1) ** 2
    )
    # The sides' own intervals take the unbiased variance between problems, so they are a little
    # wider than Wilson's.
    assert found.interval == pytest.approx((low, high), abs=0.01)
    assert len(found.won) == 7 and len(found.lost) == 1


def test_pairing_narrows_the_interval():
    a = [[1]] * 50 + [[0]] * 50
    together, apart = [[1]] * 55 + [[0]] * 45, [[0]] * 45 + [[1]] * 55
    narrow, wide = compare(a, together).interval, compare(a, apart).interval
    assert narrow[1] - narrow[0] < 0.5 * (wide[1] - wide[0])
    assert narrow[0] > 0 > wide[0]


def test_equal_answers_still_leave_doubt():
    # 1 - Wilson's bound of 20 of 20
    assert compare([[1]] * 20, [[1]] * 20).interval == pytest.approx((-0.161, 0.161), abs=0.001)


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 1), min_size=2, max_size=2),
            st.lists(st.integers(0, 1), min_size=2, max_size=2),
        ),
        min_size=2,
        max_size=12,
    )
)
def test_the_other_way_round_is_the_same_with_other_signs(pairs):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    one, other = compare(a, b), compare(b, a)
    assert one.interval == pytest.approx((-other.interval[1], -other.interval[0]))
    assert one.interval[0] <= one.difference <= one.interval[1]


def test_the_page_shows_both_sides_and_runs_nothing(tmp_path, capsys):
    a, b = groups([[0], [1], [1]], "<script>alert(1)</script>"), groups([[1], [0], [1]], "b")
    found = paired_difference(a, b)
    names = ["checkpoints_" + "first_" * 30 + "final", "second"]
    page = write_comparison(found, names, tmp_path, Console()).read_text()
    assert (
        page.count(f"<th>{names[0]}</th>") == 2
        and "viewport" in page
        and "prefers-color-scheme: dark" in page
    )
    assert "&lt;script&gt;alert(1)&lt;/script&gt;0" in page and "<script>" not in page
    assert "won: 1" in page and "lost: 1" in page and "b1" in page
    rows = [json.loads(line) for line in (tmp_path / "comparison.jsonl").read_text().splitlines()]
    assert [(row["outcome"], row["problem"]) for row in rows] == [("won", "0"), ("lost", "1")]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"second - {names[0]}: +0.0000 (95 %: -0.") and printed[
        0
    ].endswith("1 problems won, 1 lost")
    first = ["won: q0", f"  {names[0]}: <script>alert(1)</script>0", "  second: b0"]
    assert printed[1:] == [
        *first,
        "lost: q1",
        f"  {names[0]}: <script>alert(1)</script>1",
        "  second: b1",
        *printed[7:],
    ]
    assert printed[7].startswith("all of them, side by side: ") and len(printed) == 8


def test_what_a_terminal_would_obey_is_written_out(tmp_path, capsys):
    found = paired_difference(groups([[0], [0]], "\x1b[2J"), groups([[1], [0]], "b"))
    write_comparison(found, ["a", "b"], tmp_path, Console())
    assert "  a: \\x1b[2J0\n" in capsys.readouterr().out
