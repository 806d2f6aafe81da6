"""Facts about the R1-Zero reward: which answers equal which, which do not, and that hostile text
does nothing."""

from __future__ import annotations

import json
import signal
import threading
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.rewards.grading import cascade
from alignment.rewards.grading.cascade import grade
from alignment.rewards.r1_zero import extract_answer, r1_zero_reward_fn

GSM8K = Path(__file__).parents[4] / "shared" / "dataset" / "gsm8k"
RIGHT = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
WRONG = {"reward": 0.0, "format_reward": 1.0, "answer_reward": 0.0}
MISSHAPEN = {"reward": 0.0, "format_reward": 0.0, "answer_reward": 0.0}


def shaped(answer: str) -> str:
    return f"I think. </think> <answer> {answer} </answer>"


# --- the format rule ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("2 + 3 is 5 </think> <answer> 5 </answer>", RIGHT),
        ("<think> 2 + 3 </think> <answer>5</answer>", RIGHT),
        ("</think> <answer> 5 </answer> and so on", RIGHT),
        ("</think> <answer> 6 </answer>", WRONG),
        ("</think> <answer></answer>", WRONG),
        ("5", MISSHAPEN),
        ("", MISSHAPEN),
        (r"so \boxed{5}", MISSHAPEN),
        ("<answer> 5 </answer>", MISSHAPEN),
        ("</think><answer> 5 </answer>", MISSHAPEN),  # the space is part of the rule
        ("</think>\n<answer> 5 </answer>", MISSHAPEN),
        ("</think>  <answer> 5 </answer>", MISSHAPEN),
        ("</THINK> <ANSWER> 5 </ANSWER>", MISSHAPEN),
        ("</think> <answer> 5", MISSHAPEN),
        ("</think> 5 </answer>", MISSHAPEN),
        # The last <answer> counts, and it has to be closed.
        ("</think> <answer> 4 </answer> no: <answer> 5 </answer>", RIGHT),
        ("</think> <answer> 5 </answer> no: <answer> 4 </answer>", WRONG),
        ("</think> <answer> 5 </answer> <answer> 5", WRONG),
        ("</answer> </think> <answer> 5", WRONG),
        ("</think> <answer> 5 </answer> 6 </answer>", RIGHT),
        # The last box counts.
        (shaped(r"\boxed{5}"), RIGHT),
        (shaped(r"the answer is \boxed{5}."), RIGHT),
        (shaped(r"\boxed{4}, no, \boxed{5}"), RIGHT),
        (shaped(r"\boxed{5}, no, \boxed{4}"), WRONG),
        (shaped(r"5, no, \boxed{4}"), WRONG),
        (shaped(r"\boxed{5"), WRONG),
        (shaped("the answer is 5"), RIGHT),
        (shaped("the answer is not 5"), WRONG),
    ],
)
def test_scores(response: str, score: dict[str, float]) -> None:
    assert r1_zero_reward_fn(response, "5") == score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (shaped("42"), "42"),
        (shaped(r"\boxed{\frac{1}{2}}"), r"\frac{1}{2}"),
        (shaped(r"\boxed{\boxed{7}}"), "7"),
        (shaped(r"$\boxed{x^{2^{3}}}$ cm"), "x^{2^{3}}"),
        (shaped(r"\boxed{\{1,2\}}"), r"\{1,2\}"),
        (shaped(r"\fbox{3}"), "3"),
        (shaped(r"\boxed 5"), "5"),
        (shaped(r"$\boxed 5$ eggs"), "5"),
        (shaped(""), ""),
        ("42", None),
        ("</think> <answer> 42", None),
        ("</think> <answer> 42 </answer> <answer>", None),
    ],
)
def test_extracts(response: str, answer: str | None) -> None:
    assert extract_answer(response) == answer


def test_every_score_is_a_float() -> None:
    assert all(type(part) is float for part in r1_zero_reward_fn(shaped("5"), "5").values())


# --- what equals what -----------------------------------------------------------------------------

ACCEPTED = [
    # spelling
    ("18", "18"),
    (" 18 ", "18"),
    ("18.", "18"),
    ("$18$", "18"),
    ("$$18$$", "18"),
    (r"\(18\)", "18"),
    (r"\[18\]", "18"),
    ("**18**", "18"),
    (r"\text{18}", "18"),
    (r"\mathbf{18}", "18"),
    (r"\boxed{18}", "18"),
    ("007", "7"),
    (".5", "0.5"),
    ("0.50", ".5"),
    ("5.", "5"),
    ("+5", "5"),
    ("−5", "-5"),
    ("- 5", "-5"),
    ("(-5)", "-5"),
    ("1,234", "1234"),
    ("1,234,567.50", "1234567.5"),
    ("10{,}000", "10000"),
    (r"10\,000", "10000"),
    (r"10,\!000", "10000"),
    ("10\u202f000", "10000"),
    # numbers
    ("0.5", "1/2"),
    ("-1/2", "-0.5"),
    ("2/4", "1/2"),
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", "1/2"),
    (r"\frac1{2}", "1/2"),
    (r"\dfrac{3}{4}", r"\tfrac34"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    ("½", "0.5"),
    ("⅞", "7/8"),
    ("3½", "3.5"),
    ("3 1/2", "7/2"),
    ("-3 1/2", "-7/2"),
    (r"3\frac{1}{2}", "3.5"),
    ("1e3", "1000"),
    ("1.5E-2", "0.015"),
    (r"1.5 \times 10^3", "1500"),
    ("1.5 x 10^{3}", "1500"),
    ("2^10", "1024"),
    ("3-2", "1"),
    ("2 × 3", "6"),
    (r"6 \div 4", "1.5"),
    ("(3)(2)", "6"),
    ("4!", "4!"),
    # per cent
    ("50%", r"50\%"),
    ("50%", "0.5"),
    ("50%", "1/2"),
    ("50%", "50"),
    ("50", "50%"),
    ("50 percent", "50%"),
    ("12.5%", "1/8"),
    # money and units
    ("$18", "18"),
    (r"\$18", "18"),
    ("$1,000.00", "1000"),
    ("-$5", "-5"),
    ("$-5", "-5"),
    ("18 dollars", "$18"),
    ("$18 per day", "18"),
    ("£7", "7"),
    ("7 €", "7"),
    ("5 cm", "5"),
    ("5cm", "5 centimeters"),
    (r"5\text{ cm}", "5 cm"),
    (r"5\,\mathrm{cm}", "5 cm"),
    (r"12\text{ cm}^2", "12 square centimeters"),
    ("5 m", "5 meters"),
    ("3 hours", "3"),
    ("3/4 hours", "0.75"),
    ("60 miles per hour", "60 miles/hour"),
    ("60 mph", "60"),
    ("18 eggs", "18"),
    ("18 eggs per day", "18"),
    ("3 people", "3"),
    (r"90^\circ", "90"),
    ("90°", "90 degrees"),
    # labels
    ("x = 5", "5"),
    ("x=5", "x = 5.0"),
    ("f(x) = 2x", "2x"),
    ("$y = x + 1$", "1 + x"),
    # expressions
    ("x + 1", "1 + x"),
    ("2(x+3)", "2x+6"),
    ("(x+1)^2", "x^2 + 2x + 1"),
    ("(x^2 - 1)/(x - 1)", "x + 1"),
    ("x²", "x*x"),
    ("x**2", "x^{2}"),
    ("2xy", "2yx"),
    (r"\frac{x}{2}", "x/2"),
    (r"\frac{1}{2}x", "0.5x"),
    ("√2", r"\sqrt{2}"),
    ("sqrt(8)", r"2\sqrt{2}"),
    (r"\sqrt 4", "2"),
    (r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt2}{2}"),
    (r"\sqrt[3]{-8}", "-2"),
    (r"\sqrt{x^2}", "|x|"),
    (r"\left|x\right|", "abs(x)"),
    ("x^{2/3}", r"\sqrt[3]{x^2}"),
    ("2pi", r"2\pi"),
    ("2π", r"2 \cdot \pi"),
    (r"\frac{\pi}{3}", "pi/3"),
    ("e^2", "exp(2)"),
    (r"\ln e^3", "3"),
    (r"\log 1000", "3"),
    (r"\log_2 8", "3"),
    (r"\frac{\log 8}{\log 2}", "3"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\sin 2x", r"2 \sin x \cos x"),
    (r"\tan(x)", r"\frac{\sin x}{\cos x}"),
    (r"\sin(\pi/6)", "1/2"),
    (r"\cos(\pi)", "-1"),
    (r"\alpha + \beta", "beta + alpha"),
    ("2^{100}", "4^{50}"),
    ("-2^2", "-4"),
    ("2^3^2", "512"),
    # structure and words
    ("(1, 2)", "(1,2)"),
    (r"\left( \frac{1}{2}, 3 \right)", "(0.5, 3)"),
    ("{1,2}", r"\{2, 1\}"),
    ("{1/2, x+1}", "{1+x, 0.5}"),
    ("[0,1)", "[0, 1.0)"),
    (r"(-\infty, 5]", "(-∞,5]"),
    ("1, 2", "1,2"),
    ("(1,000, 2)", "(1000, 2)"),
    ("((1,2),3)", "((1, 2), 3)"),
    ("(A)", "A"),
    (r"\text{(B)}", "b"),
    ("Yes", "yes"),
    (r"\text{Even}", "even"),
    ("New York", "new york"),
    ("straße", "STRASSE"),
    ("3:4", "3/4"),
    ("five", "5"),
    (r"\ln x^2", r"2 \ln x"),  # wherever both are defined
    ("60 minutes", "1 hour"),
]

REJECTED = [
    # another number
    ("19", "18"),
    ("-5", "5"),
    ("5", "50"),
    ("12", "1 2"),
    ("1,2", "12"),
    ("12,34", "1234"),
    ("1,234", "1.234"),
    ("1,234", "1, 234"),
    ("(1,234)", "1234"),
    ("0,123", "123"),
    ("1 234", "234"),
    ("5 6", "11"),
    ("5 6", "30"),
    ("5{6}", "30"),
    ("$5$6", "56"),
    (r"1\left2", "12"),
    ("1.2.3", "1.23"),
    ("3. 5", "3.5"),
    ("0.333...", "0.333"),
    ("1.99999999999999999999", "2"),
    ("5 3/2", "6.5"),
    ("5 1/2", "5/2"),
    ("3 1/2", "3/2"),
    ("1e3", "103"),
    ("1/0", "0"),
    ("0/0", "1"),
    ("0^0", "1"),
    ("9999999999999999999", "10000000000000000000"),
    # more than one answer, or none
    ("", "5"),
    (" ", "5"),
    ("5 or 6", "5"),
    ("5 or 6", "6"),
    ("5 and 6", "5"),
    ("5, 6", "5"),
    ("5; 6", "5"),
    ("5/6", "5"),
    ("5 (or 6)", "5"),
    ("between 5 and 6", "5"),
    ("5 = 6", "5"),
    ("5 = 6", "6"),
    ("x = 5 or x = 6", "5"),
    ("not 5", "5"),
    ("5?", "5"),
    ("±5", "5"),
    (r"\pm 5", "5"),
    ("> 5", "5"),
    ("5+", "5"),
    ("5!", "5"),
    # the number is changed by a word
    ("5 thousand", "5"),
    ("5 thousands", "5"),
    ("5 million dollars", "5"),
    ("$1.5 million", "1.5"),
    ("5 dozen", "5"),
    ("5 dozens", "5"),
    ("3 fourths", "3"),
    ("2 halves", "2"),
    ("5 squared", "5"),
    ("5 and a half", "5"),
    ("5 hours 30 minutes", "5"),
    ("5 less than 8", "5"),
    # units and per cent
    ("5 cm", "5 m"),
    ("5 cm", "5 cm^2"),
    ("5 ms", "5 m"),
    ("$5", "5 cents"),
    ("$5", "£5"),
    ("5 apples", "5 oranges"),
    ("60 miles per hour", "60 miles per minute"),
    ("50", "0.5"),
    ("50%", "5"),
    ("50%", "500"),
    ("0.5%", "50"),
    ("50%", "0.5 cm"),
    ("5 + 50%", "55%"),
    # letters
    ("5m", "5"),
    ("5x", "5"),
    ("2x + 3 h", "2x + 3"),
    ("x", "y"),
    ("x = 5", "y = 5"),
    ("x + 1", "x - 1"),
    ("x2", "2x"),
    ("x^2", "2x"),
    ("(x+1)^2", "x^2+1"),
    (r"\sqrt{x^2}", "x"),
    ("|x|", "x"),
    (r"\ln x", r"\log x"),
    (r"\sin x", r"\cos x"),
    (r"\sin^{-1} x", r"\frac{1}{\sin x}"),
    (r"\frac{1}{2x}", "x/2"),
    (r"\frac123", "1/23"),
    (r"\sqrt{-4}", "2"),
    ("sqrt(2) + 10^{-90}", "sqrt(2)"),
    ("e^{-150}", "0"),
    ("x - x", "y"),
    # structure and words
    ("(2, 1)", "(1, 2)"),
    ("(1, 2, 3)", "(1, 2)"),
    ("[1, 2]", "(1, 2)"),
    ("{1, 2}", "(1, 2)"),
    ("{1, 1, 2}", "{1, 2}"),
    ("{1, 2}", "{1, 3}"),
    ("(1, 2)", "1"),
    ("(1, (2, 3))", "((1, 2), 3)"),
    ("(A)", "B"),
    ("A, B", "A"),
    ("A or B", "A"),
    ("no", "on"),
    ("dog", "god"),
    ("yes", "no"),
    ("yes", "1"),
    ("yes and no", "yes"),
]


@pytest.mark.parametrize(("answer", "truth"), ACCEPTED)
def test_accepts(answer: str, truth: str) -> None:
    assert grade(answer, truth)
    assert grade(truth, answer)
    assert r1_zero_reward_fn(shaped(answer), truth) == RIGHT


@pytest.mark.parametrize(("answer", "truth"), REJECTED)
def test_rejects(answer: str, truth: str) -> None:
    assert not grade(answer, truth)
    assert not grade(truth, answer)
    assert r1_zero_reward_fn(shaped(answer), truth) == WRONG


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("0.333333333333333333", "1/3"),
        ("0.33", "1/3"),
        ("3.14", r"\pi"),
        ("3.141592653589793238462643383279502884197169399", r"\pi"),
        ("1.41421356237309504880168872420969807857", r"\sqrt{2}"),
        ("about 5", "5"),
        ("≈5", "5"),
    ],
)
def test_an_approximation_is_right_only_where_the_truth_is_one(answer: str, truth: str) -> None:
    assert not grade(answer, truth)
    assert grade(truth, answer)


# --- with math-verify as the last stage -----------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\sum_{n=1}^{5} n", r"\sum_{k=1}^{5} k"),
        (r"\int_{0}^{1} 2x \, dx", "1"),
        (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    ],
)
def test_slow_accepts_notation_that_fast_does_not_read(
    answer: str, truth: str, monkeypatch
) -> None:
    # the clock runs on while a busy machine does something else
    monkeypatch.setattr(cascade, "SECONDS", 20.0)
    assert grade(answer, truth)
    assert not grade(answer, truth, fast=True)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 2 & 1 \end{pmatrix}"),
        (
            r"\begin{pmatrix} 0.333333333 & 2 \end{pmatrix}",
            r"\begin{pmatrix} \frac{1}{3} & 2 \end{pmatrix}",
        ),
        (r"(-\infty,1]\cup(2,\infty)", r"(2,\infty)\cup(-\infty,1)"),
        ("x > 2", "x > 3"),
        (r"x \ge 2", "x > 2"),
        ("7 = 5", "5"),  # math-verify alone accepts these four
        ("1 < 2", "2 < 3"),
        ("5 6", "11"),
        ("0.333333333", "1/3"),
        ("9^9^9^9 < x", "x > 9"),
        (r"\begin{pmatrix} 10^{10^{10}} \end{pmatrix}", r"\begin{pmatrix} 1 \end{pmatrix}"),
        (r"\sum_{n=1}^{\infty} n > x", "x < 1"),
    ],
)
def test_slow_rejects(answer: str, truth: str) -> None:
    assert not grade(answer, truth)


def test_slow_works_in_a_thread_where_alarms_cannot() -> None:
    verdicts: list[bool] = []
    ask = [(r"\int_{0}^{1} 2x\,dx", "1"), (r"\int_{0}^{1} 2x\,dx", "2")]
    thread = threading.Thread(target=lambda: verdicts.extend(grade(a, t) for a, t in ask))
    thread.start()
    thread.join()
    assert verdicts == [True, False]


def test_slow_leaves_the_callers_timer_running() -> None:
    running = signal.setitimer(signal.ITIMER_REAL, 500)
    try:
        assert grade(r"\sum_{n=1}^{6} n", "21")
        assert 490 < signal.getitimer(signal.ITIMER_REAL)[0] <= 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, *running)


# --- hostile text ---------------------------------------------------------------------------------


def hostile(planted: Path) -> list[str]:
    call = f"__import__('os').system('touch {planted}')"
    return [
        call,
        f"$ {call} $",
        rf"\boxed{{{call}}}",
        rf"\text{{{call}}}",
        f"open('{planted}', 'w')",
        f"x = {call}",
        "ｅｘｅｃ(1)",
        "𝐞𝐱𝐢𝐭()",
        "lambda: 0",
        "().__class__.__bases__[0].__subclasses__()",
        "9^9^9^9",
        "9**9**9**9",
        "((9^9)^9)^9",
        "10^{10^{10}}",
        "10^(-10^10)",
        "2^{99999999999999999999}",
        "1e999999999",
        "1e999 * 1e999",
        "e^{e^{e^{e^9}}}",
        "exp(" * 25 + "9" + ")" * 25,
        r"\sin(10^{1000})",
        "(x+1)^{999}" * 15,
        "7/" * 95 + "3",
        "-" * 150 + "1",
        "2" + "^2" * 90,
        "|" * 101,
        "1," * 400,
        "(1," * 200 + "1" + ")" * 200,
        "{" + ",".join(f"x+{i}" for i in range(20)) + "}",
        "{{" + "},{".join(",".join("1" for _ in range(15)) for _ in range(15)) + "}}",
        "(" * 10**6,
        "(" * 10**6 + "1" + ")" * 10**6,
        r"\boxed{" * 10**5,
        "9" * 10**5,
        "9" * 900,
        "0." + "3" * 900,
        r"\frac{1}{" * 5000 + "1" + "}" * 5000,
        r"\frac{1}{" * 60 + "1" + "}" * 60,
        r"\sqrt" * 150 + "2",
        r"\text{" * 150,
        "sin " * 150 + "x",
        "5 " + "m" * 900,
        "1 " * 450,
        " " * 10**6,
        "$" * 901,
        "\0",
        "5\0",
        "\ud800",
        "5\udfff",
        "٣",
        "²",
        "\\",
        "^",
        "_",
    ]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fast", [True, False])
def test_hostile_text_is_wrong_and_does_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture, fast: bool
) -> None:
    planted = tmp_path / "planted"
    for text in hostile(planted):
        for truth in (
            "5",
            "x + 1",
            "(1, 2)",
            "{" + ",".join(f"{i}/2+x" for i in range(50, 70)) + "}",
        ):
            assert not grade(text, truth, fast), text[:50]
            assert not grade(truth, text, fast), text[:50]
            assert r1_zero_reward_fn(shaped(text), truth, fast) == WRONG, text[:50]
    assert not planted.exists()
    assert capfd.readouterr().out == ""


def test_an_answer_beyond_1000_characters_is_wrong_even_if_equal() -> None:
    assert grade("1" * 1000, "1" * 1000)
    assert not grade("1" * 1001, "1" * 1001)


@given(st.text(), st.text())
def test_any_text_is_graded(answer: str, truth: str) -> None:
    assert grade(answer, truth) in (True, False)
    score = r1_zero_reward_fn(shaped(answer), truth)
    assert score["reward"] == score["format_reward"] * score["answer_reward"]


MATHS = st.lists(
    st.sampled_from(
        [
            r"0",
            r"1",
            r"2",
            r"7",
            r"12",
            r"0.5",
            r",",
            r".",
            r"+",
            r"-",
            r"*",
            r"/",
            r"^",
            r"(",
            r")",
            r"[",
            r"]",
            r"{",
            r"}",
            r"|",
            r"=",
            r"<",
            r"%",
            r"$",
            r"!",
            r"x",
            r"y",
            r"e",
            r"i",
            r"\pi",
            r"\frac{1}{2}",
            r"\frac",
            r"\sqrt",
            r"\sqrt[3]",
            r"\sin",
            r"\log_",
            r"\ln",
            r"\text{cm}",
            r"cm",
            r"m",
            r"or",
            r"\left",
            r"\right",
            r"\infty",
            r"\cup",
            r"\begin{pmatrix}",
            r"\\",
            r"&",
            r"\boxed{",
            r"</answer>",
            r"<answer>",
        ]
        + [" "]
    ),
    max_size=14,
).map("".join)


@given(MATHS, MATHS)
@settings(max_examples=500)
def test_any_jumble_of_notation_is_graded(answer: str, truth: str) -> None:
    assert grade(answer, truth) in (True, False)
    assert grade(answer, answer, fast=True) <= grade(answer, answer)
    score = r1_zero_reward_fn(shaped(answer), truth)
    assert score["reward"] == score["format_reward"] * score["answer_reward"]


# --- numbers --------------------------------------------------------------------------------------


def renderings(value: Fraction) -> list[str]:
    p, q = value.numerator, value.denominator
    whole, rest = divmod(abs(p), q)
    sign = "-" if p < 0 else ""
    texts = [
        f"{p}/{q}",
        rf"\frac{{{p}}}{{{q}}}",
        rf"$\dfrac{{{p}}}{{{q}}}$",
        rf"\boxed{{{p} / {q}}}",
        f"x = {p}/{q}",
    ]
    texts += [
        f"({p})/({q})",
        f"{p * 6}/{q * 6}",
        f"{p}/{q}.",
        f"{p:,}/{q:,}" if q > 999 else f"{p}/{q}",
    ]
    texts += (
        [f"{sign}{whole} {rest}/{q}", rf"{sign}{whole}\frac{{{rest}}}{{{q}}}"]
        if whole and rest
        else []
    )
    texts += (
        [f"{p}", f"{p:,}", f"${p}", f"{p}.00", f"{p} dollars", f"{p * 100}%", f"{p}e0"]
        if q == 1
        else []
    )
    return texts


@given(st.fractions(max_denominator=10**6))
def test_a_rational_equals_itself_in_every_rendering(value: Fraction) -> None:
    texts = renderings(value)
    assert [(text, truth) for text in texts for truth in texts[:2] if not grade(text, truth)] == []


@given(st.fractions(max_denominator=10**6), st.fractions(max_denominator=10**6).filter(bool))
def test_a_rational_equals_no_other(value: Fraction, difference: Fraction) -> None:
    truth = renderings(value)[0]
    assert [
        text
        for text in renderings(value + difference)
        if not text.endswith("%") and grade(text, truth)
    ] == []


@given(st.integers(-(10**60), 10**60))
def test_an_integer_is_not_its_successor(n: int) -> None:
    for text in (f"{n}", f"{n:,}", f"${n}$", f"{n}.0", rf"\boxed{{{n}}}"):
        assert grade(text, str(n))
        assert not grade(text, str(n + 1))


@given(st.decimals(-(10**9), 10**9, places=6))
def test_a_decimal_equals_its_fraction_only(value: Decimal) -> None:
    exact = Fraction(value)
    assert grade(f"{value:f}", f"{exact.numerator}/{exact.denominator}")
    assert not grade(f"{value:f}", f"{exact.numerator * 10**30 + 1}/{exact.denominator * 10**30}")


# --- GSM8K ----------------------------------------------------------------------------------------


def test_every_gsm8k_gold_answer_is_accepted_and_its_successor_rejected() -> None:
    if not GSM8K.is_dir():
        pytest.skip(f"no GSM8K files in {GSM8K}")
    rows = [
        line
        for split in ("train", "test")
        for line in (GSM8K / f"{split}.jsonl").read_text("utf-8").splitlines()
    ]
    assert len(rows) == 8792
    for row in rows:
        gold = json.loads(row)["answer"].rpartition("#### ")[2]
        n = int(gold.replace(",", ""))
        for text in (gold, str(n), f"{n:,}", f"${n}", f"{n}.00", rf"\boxed{{{n:,}}}"):
            assert r1_zero_reward_fn(shaped(text), gold) == RIGHT, (text, gold)
        assert r1_zero_reward_fn(shaped(str(n + 1)), gold) == WRONG, gold
