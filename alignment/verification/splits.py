"""Is the test split what is evaluated, and never what is trained?

Judges the problems that a run's own parts give, by the rows of both splits as the task reads them.
Two questions are the same where they are but for case and white space."""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alignment.core.records import Endless, Problem, Problems
from alignment.rollouts.config import RolloutConfig, problems_of_step, refill_problems
from alignment.verification.check import Check

STEPS = 50  # of which the problems are compared, where these have no end
PASSES = 2  # of other ones
RESUMED_AT = (1, 7, 20)  # steps after which a run is resumed
# Two orders by chance of so many problems are the same once in 13! = 6 * 10^9 times.
SHUFFLED = 13
# By how many standard deviations a share by chance may be off.
MOST_DEVIATIONS = 6
ARITHMETIC = re.compile(r"What is (\d+(?: [-+*] \d+)*)\?")
COUNTDOWN = re.compile(r"(\d+(?: \d+)*) -> (-?\d+)")


def words_of(text: str) -> str:
    """A text but for case and white space."""
    return " ".join(text.split()).casefold()


def question_of(problem: Problem) -> str:
    """What a problem asks: its prompt, where it has no question."""
    return words_of(problem.question) or words_of(problem.prompt)


def number_of_test_questions(problems: Iterable[Problem], held_out: Iterable[Problem]) -> int:
    """How many problems, or a turn of theirs, ask what a held-out one asks."""
    questions = set(map(question_of, held_out))
    number = 0
    for problem in problems:
        texts = {question_of(problem), *(words_of(text) for _, text in problem.turns)}
        number += not questions.isdisjoint(texts)
    return number


@dataclass(frozen=True)
class RunData:
    """The problems of a run."""

    train_rows: Problems
    """The training split, as the task reads it."""
    test_rows: Sequence[Problem]
    evaluated: Sequence[Problem]
    """What the run's evaluations ask."""
    trained: Problems
    """What its rollouts ask."""
    config: RolloutConfig
    open_anew: Callable[[], Problems]
    """Makes `trained` once more, as a resumed run does."""

    def checks(self) -> Iterator[Check]:
        """Every check of what is trained and evaluated."""
        yield Check("data: evaluated beside the test split", 0.0, self.evaluated_elsewhere)
        yield Check("data: test questions that are trained", 0.0, self.trained_test_questions)
        yield Check(
            "data: trained beside the training split",
            0.0,
            self.trained_elsewhere,
            not_checked=self._reason("they are made without end"),
        )
        yield Check("data: problems that a pass repeats or skips", 0.0, self.repeated_or_skipped)
        yield Check("data: steps of other problems after resume", 0.0, self.other_steps)
        yield Check("data: orders that are not by chance", 0.0, self.fixed_orders)
        yield Check("data: wrong truths of sums and Countdown", 0.0, self.wrong_truths)

    def _reason(self, words: str) -> str:
        """Why a line that needs a list of training problems is not checked."""
        return words if isinstance(self.train_rows, Endless) else ""

    def evaluated_elsewhere(self) -> int:
        """How many evaluated problems are no row of the test split: id, question and truth."""
        rows = set(map(identity, self.test_rows))
        return sum(identity(problem) not in rows for problem in self.evaluated)

    def trained_test_questions(self) -> int:
        """How many trained problems, or a turn of theirs, ask a question of the test split, or have
        the id of a test problem where no id is in both splits."""
        held_out = [*self.test_rows, *self.evaluated]
        ids: set[str] = set()
        if not isinstance(self.train_rows, Endless):
            ids = {problem.id for problem in held_out}
            if not ids.isdisjoint(problem.id for problem in self.train_rows):
                ids = set()
        problems = self.asked_in_training()
        with_ids = sum(problem.id in ids for problem in problems)
        return max(with_ids, number_of_test_questions(problems, held_out))

    def trained_elsewhere(self) -> int:
        """How many trained problems are no row of the training split: id, question and truth."""
        assert not isinstance(self.train_rows, Endless)
        rows = set(map(identity, self.train_rows))
        return sum(identity(problem) not in rows for problem in self.asked_in_training())

    def asked_in_training(self) -> Iterable[Problem]:
        """All problems to train on; of endless ones those of the first steps."""
        if not isinstance(self.trained, Endless):
            return self.trained
        problems: list[Problem] = []
        for step in range(1, STEPS + 1):
            problems += self.of_step(self.trained, step)
        return problems

    def of_step(self, problems: Problems, step: int) -> list[Problem]:
        """The problems of a step."""
        config = self.config
        return problems_of_step(problems, config.prompts_per_rollout, config.data_seed, step)

    def repeated_or_skipped(self) -> int:
        """How many training problems the first passes leave out, because they repeat others; of
        endless ones, how many steps ask what the step before does."""
        if isinstance(self.trained, Endless):
            asked = [self.of_step(self.trained, step) for step in range(1, STEPS + 1)]
            pairs = zip(asked[1:], asked, strict=False)
            return sum(problems == before for problems, before in pairs)
        size = len(self.trained)
        steps = math.ceil(PASSES * size / self.config.prompts_per_rollout)
        problems: list[Problem] = []
        for step in range(1, steps + 1):
            problems += self.of_step(self.trained, step)
        left_out = 0
        # A step may take the last problems of a pass and the first of the next one.
        for start in range(0, PASSES * size, size):
            of_pass = Counter(problems[start : start + size])
            left_out += (Counter(self.trained) - of_pass).total()
        return left_out

    def fixed_orders(self) -> list[str]:
        """Which orders of problems are the same that must not be: that of the split and the first
        pass's, those of two passes, those of two values of --data_seed, and those of refills. None
        of these asks a problem twice."""
        problems = self.trained
        size = STEPS
        if not isinstance(problems, Endless):
            size = len(problems)
        if size < SHUFFLED:
            return []
        seed = self.config.data_seed
        first = problems_of_step(problems, size, seed, 1)
        faults = []
        if not isinstance(problems, Endless) and first == list(problems):
            faults.append("that of the split in the first pass")
        if first == problems_of_step(problems, size, seed, 2):
            faults.append("that of the first pass in the second")
        if first == problems_of_step(problems, size, seed + 1, 1):
            faults.append("that of another --data_seed")
        refills = [
            refill_problems(problems, SHUFFLED, seed + more, step, refill)
            for more, step, refill in itertools.product((0, 1), (1, 2), (1, 2))
        ]
        asked = {tuple(problem.id for problem in of_refill) for of_refill in refills}
        if len(asked) < len(refills):
            faults.append("that of another refill")
        if not isinstance(problems, Endless):
            # Rows of a file may be equal.
            spare = Counter(problems)
            if any(Counter(of_refill) - spare for of_refill in refills):
                faults.append("a problem twice in a refill")
        return faults

    def wrong_truths(self) -> int:
        """How many problems have another truth than that of their question."""
        wrong = 0
        for problem in itertools.chain(self.asked_in_training(), self.evaluated):
            truth = truth_of(problem)
            wrong += truth is not None and problem.ground_truth != truth
        return wrong

    def other_steps(self) -> int:
        """How many steps of a resumed run ask other problems than they do in a run without a
        break."""
        anew = self.open_anew()
        steps = [done + 1 for done in RESUMED_AT]
        return sum(self.of_step(anew, step) != self.of_step(self.trained, step) for step in steps)


def truth_of(problem: Problem) -> str | None:
    """The truth of a problem by the words of its question: of "What is 2 + 3 * 4?" the sum's value,
    of Countdown's "1 8 8 -> 17" the target and the numbers; None of any other. A problem of a
    user's own that looks like Countdown's has no "=" in its truth."""
    asked = ARITHMETIC.fullmatch(problem.question)
    if asked is not None:
        return str(value_of_sum(asked[1]))
    asked = COUNTDOWN.fullmatch(problem.question)
    if asked is not None and " = " in problem.ground_truth:
        numbers, target = asked.groups()
        return f"{target} = {numbers}"
    return None


@dataclass(frozen=True)
class ValidationSplit:
    """The two parts of a test split with a --validation_share, and the problems, of one of them,
    that evaluations ask."""

    share: float
    validation: Sequence[Problem]
    test: Sequence[Problem]
    rows: Sequence[Problem]
    """The whole split."""
    evaluated: Sequence[Problem]
    is_validation: bool
    """Whether evaluations ask the validation split."""

    def faults(self) -> list[str]:
        """What is wrong with the parts: each question is in one of them, a share of about the
        right size is for validation, and evaluations ask the part that --eval_split names."""
        validation = set(map(question_of, self.validation))
        test = set(map(question_of, self.test))
        whole = set(map(question_of, self.rows))
        faults = []
        if validation & test or validation | test != whole:
            faults.append(f"{len(validation & test)} questions in both")
        expected = self.share * len(whole)
        deviation = math.sqrt(len(whole) * self.share * (1 - self.share))
        if abs(len(validation) - expected) > MOST_DEVIATIONS * deviation + 1:
            faults.append(f"{len(validation)} of {len(whole)} questions for validation")
        asked = set(map(question_of, self.evaluated))
        if not asked <= (validation if self.is_validation else test):
            faults.append("evaluations of the other part")
        return faults


def asked_elsewhere(
    evaluated: Mapping[str, Sequence[Problem]], rows: Mapping[str, Sequence[Problem]]
) -> list[str]:
    """The held-out tasks of which an evaluation asks a problem that is no row of its test split, or
    none: id, question and truth."""
    names = []
    for name, of_split in rows.items():
        asked = set(map(identity, evaluated[name]))
        if not asked or not asked <= set(map(identity, of_split)):
            names.append(name)
    return names


def value_of_sum(text: str) -> int:
    """The value of a sum of products, such as "2 + 3 * 4 - 1"."""
    total = 0
    for sign, product in re.findall(r"([-+]) (\d+(?: \* \d+)*)", f"+ {text}"):
        value = math.prod(map(int, product.split(" * ")))
        total += value if sign == "+" else -value
    return total


def identity(problem: Problem) -> tuple[str, str, str]:
    """What a problem is recognised by, whatever its prompt."""
    return problem.id, words_of(problem.question), problem.ground_truth
