"""The published rule, as described in its papers: what it takes for right, and what it does not."""

import pytest

from benchmarks.reference_grader import reference_verdict


@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        ("18", "18", True),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", True),
        (r"\frac12", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"5\text{ cm}", "5", True),
        ("5 cm", "5 m", False),  # "m" is not among the units it removes
        ("x = 5", "5", True),
        (r"\sqrt2", r"\sqrt{2}", True),
        ("1,234", "1234", True),
        ("50%", "50", True),
        ("50%", "0.5", False),
        ("(1, 2)", "(1,2)", True),
        ("(1, 2)", "[1,2]", False),
        ("(2, 1)", "(1,2)", False),
        ("2/4", "1/2", False),  # plain fractions have to be reduced
        ("x+1", "1+x", True),
        ("x^{10}", "x^{5} x^{5}", False),  # powers in braces are not simplified
        (r"\pi", "3.14", False),
        ("", "5", False),
        ("5" * 1001, "5" * 1001, False),
    ],
)
def test_the_published_rule(answer, truth, equal):
    assert reference_verdict(answer, truth)[0] is equal


def test_it_says_which_part_decided():
    assert reference_verdict("18", "18")[1].startswith("MATH")
    assert reference_verdict("1,234", "1234")[1].startswith("PRM800K")
    assert reference_verdict("19", "18") == (False, "neither part")
