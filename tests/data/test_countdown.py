"""Countdown: expressions that are right, what else earns, and problems that can all be solved and
are split for good."""

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.data.tasks import countdown
from alignment.data.tasks.countdown import FULL, SMALL, as_problem
from alignment.rewards.countdown import countdown_reward_fn, is_right, value_of
from alignment.system.errors import UserError

TRUTH = "14 = 3 4 2"


@pytest.mark.parametrize(
    ("numbers", "target", "value"),
    [((8, 5, 7), 20, 20), ((1, 5, 5, 5), 24, 24), ((3, 3, 8, 8), 24, 24), ((7,), 7, 7)],
)
def test_a_right_answer_has_the_targets_value(numbers, target, value):
    answer = countdown.right_answer(countdown.as_problem(numbers, target))
    assert sorted(map(int, re.findall(r"\d+", answer))) == sorted(numbers)
    assert eval(re.sub(r"\d+", r"Fraction(\g<0>)", answer)) == value


@pytest.mark.parametrize(("numbers", "target"), [((1, 1, 1), 50), ((1, 2, 3, 4, 5), 15)])
def test_a_problem_that_is_not_solved_has_its_truth_for_an_answer(numbers, target):
    problem = countdown.as_problem(numbers, target)
    assert countdown.right_answer(problem) == problem.ground_truth


@pytest.mark.parametrize(
    ("expression", "right"),
    [
        ("(3 + 4) * 2", True),
        (" 2*(4+3) ", True),
        ("3 + 4 + 2", False),  # 9
        ("7 * 2", False),  # not the numbers
        ("(3 + 4) * 2 + 3 - 3", False),  # a number used again
        ("34 - 20", False),
        ("3 + 4 * 2 + 3", False),
        ("14", False),
        ("", False),
        ("(3 + 4) * 2 = 14", False),
        ("(3 + 4) ** 2", False),
        ("(3 + 4) // 2", False),
        ("__import__('os')", False),
        ("(3 + 4) * 2.0", False),
        ("(3 + 4) * 02", False),
        ("(3, 4, 2)", False),
    ],
)
def test_an_expression_is_right_if_it_uses_each_number_once_and_reaches_the_target(
    expression, right
):
    assert is_right(expression, TRUTH) is right


def test_quotients_are_exact_and_close_is_close_enough():
    assert value_of("2 / 3 - (1 / 3)")[0] == Fraction(1, 3)
    assert is_right("1 / 3 * 3", "1 = 3 3 1")
    assert is_right("-(3 - 5)", "2 = 3 5")
    assert is_right("7 / 1000000", "0 = 7 1000000") and not is_right("7 / 100000", "0 = 7 100000")
    assert value_of("1 / (2 - 2)") is None
    assert (
        value_of("(" * 90 + "1" + ")" * 90) is not None
        and value_of("(" * 120 + "1" + ")" * 120) is None
    )
    assert value_of("9" * 150 + "*" + "9" * 40) is None


@given(st.text(alphabet="0123456789+-*/() <>", max_size=250))
def test_no_text_breaks_it(text):
    assert is_right(text, TRUTH) in (True, False)


@pytest.mark.parametrize(
    ("response", "format_reward", "answer_reward"),
    [
        (" 3 + 4 = 7 </think>\n<answer>(3 + 4) * 2</answer>", 1, 1),
        (" 3 + 4 = 7 </think>\n<answer>3 + 4 * 2</answer>", 1, 0),
        ("</think> <answer>(3 + 4) * 2</answer>", 0.6, 1),  # no new line between them
        ("</think>\n<answer>(3 + 4) * 2</answer> !", 0.6, 1),
        ("</think> (3 + 4) * 2", 0.1, 0),
        ("<answer>(3 + 4) * 2</answer>", 0.5, 1),
        ("(3 + 4) * 2", 0, 0),
        ("</think>\n<answer>1</answer><answer>(3 + 4) * 2</answer>", 0.6, 1),  # the last one counts
        (" a </think> b </think>\n<answer>(3 + 4) * 2</answer>", 0.6, 1),
    ],
)
def test_graded_format_and_answer(response, format_reward, answer_reward):
    score = countdown_reward_fn(response, TRUTH)
    assert (
        score["format_reward"] == pytest.approx(format_reward)
        and score["answer_reward"] == answer_reward
    )
    assert score["reward"] == answer_reward


def values(numbers):
    """Every value that the numbers can be combined to."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = Fraction(numbers[i]), Fraction(numbers[j])
        for value in {a + b, a - b, a * b, *([a / b] if b else [])}:
            found |= values([*rest, value])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, FULL])
def test_every_problem_can_be_solved_and_none_is_in_both_splits(size):
    made = {
        "test": countdown.problems("test", "", size),
        "train": [countdown.problems("train", "", size)[i] for i in range(1500)],
    }
    seen = {}
    for split, problems in made.items():
        for problem in problems[:: 1 if size is SMALL else 20]:
            target, _, numbers = problem.ground_truth.partition(" = ")
            numbers = list(map(int, numbers.split()))
            assert len(numbers) in size.counts and all(1 <= n <= size.largest for n in numbers)
            assert 1 <= int(target) <= size.target and Fraction(target) in values(numbers)
            assert seen.setdefault((tuple(sorted(numbers)), target), split) == split
    assert len({problem.id for problem in made["train"]}) > 700
    assert (
        countdown.problems("train", "", size)[5 << 40]
        == countdown.problems("train", "", size)[5 << 40]
    )


@pytest.mark.slow
def test_the_teacher_is_careful_at_first_and_forgets_the_target_in_the_end():
    shown = countdown.small_demonstrations("train")

    def rewards(some):
        return [countdown_reward_fn(response, problem.ground_truth) for problem, response in some]

    assert all(
        score == {"reward": 1, "format_reward": 1, "answer_reward": 1}
        for score in rewards(shown[:500])
    )
    careless = rewards(shown[-500:])
    assert all(score["format_reward"] == 1 for score in careless)
    assert 0.3 < sum(score["answer_reward"] for score in careless) / 500 < 0.5


def parquet(folder, name, nums, target):
    import pyarrow
    from pyarrow import parquet as files

    files.write_table(pyarrow.table({"nums": nums, "target": target}), folder / name)
    return str(folder)


def test_parquet_files(tmp_path):
    nums, target = [[3, 4, 2], [5, 6], [1, 2, 3, 4]] * 20, [14, 11, 10] * 20
    folder = parquet(
        tmp_path, "rows.parquet", [[n + i for n in ns] for i, ns in enumerate(nums)], target
    )
    train, test = (countdown.problems(split, folder) for split in ("train", "test"))
    # an eighth, since 128 would be more
    assert len(train) == 53
    targets = [problem.question.partition(" -> ")[2] for problem in test]
    assert targets == ["10", "14", "11", "10", "14", "11", "10"]
    assert as_problem([3, 4, 2], 14) in [*train, *test]
    parquet(tmp_path, "test-0.parquet", [[9, 9]], [18])
    (tmp_path / "rows.parquet").rename(tmp_path / "latest.parquet")
    both = {split: set(map(str, countdown.problems(split, folder))) for split in ("train", "test")}
    # one split is named, so none is by name
    assert not both["train"] & both["test"] and len(both["train"] | both["test"]) == 61
    (tmp_path / "latest.parquet").rename(tmp_path / "train-00000-of-00001.parquet")
    assert countdown.problems("test", folder) == [as_problem([9, 9], 18)]
    assert len(countdown.problems("train", folder)) == 60


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda f: None, "holds no .parquet file"),
        (lambda f: (f / "a.parquet").write_bytes(b"PAR1"), "a.parquet: cannot be read as Parquet"),
        (
            lambda f: parquet(f, "a.parquet", [[1, 2], []], [3, 4]),
            "a.parquet: row 2: nums must be whole numbers",
        ),
        (lambda f: parquet(f, "a.parquet", [["1"]], [3]), "row 1: nums must be"),
    ],
)
def test_files_that_are_wrong_are_named(write, message, tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match=message):
        countdown.problems("train", str(tmp_path))
