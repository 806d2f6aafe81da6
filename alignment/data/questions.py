"""Which problems ask the same question: a test split holds each question once, and training leaves
it to the test split."""

import hashlib
import random
from collections.abc import Callable, Container, Iterable

from alignment.core.records import Endless, Problem, Problems
from alignment.system.errors import UserError

Key = Callable[[Problem], str]  # problems with equal keys ask the same question
# one question in 8 that is made, not read from a file of one split, belongs to the test split
TEST_SHARE = 8
MOST_REDRAWS = 1000
HELD_OUT_OF_SFT = 0.1  # share of SFT's questions that it measures its accuracy on


def split_of(question: str) -> str:
    """The split, "train" or "test", to which a hash of a question's text gives it."""
    return "train" if hashlib.sha256(question.encode()).digest()[-1] % TEST_SHARE else "test"


def in_validation_split(key: str, share: float) -> bool:
    """Whether a hash of a question's key gives it to the validation split, which has about `share`
    of the questions."""
    return _is_in_share("validation", key, share)


def in_sft_share(key: str, share: float) -> bool:
    """Whether a hash of a question's key gives it to SFT, which gets about `share` of the training
    questions; RL trains on the others."""
    return _is_in_share("sft", key, share)


def is_held_out_of_sft(key: str, share: float) -> bool:
    """Whether SFT, which gets `share` of the training questions (0: all), measures its accuracy on
    a question instead of training on it. The hash is that of `in_sft_share`, so these are among its
    own."""
    return _is_in_share("sft", key, HELD_OUT_OF_SFT * (share or 1.0))


def _is_in_share(purpose: str, key: str, share: float) -> bool:
    """Whether a hash of a purpose and a key is in the first `share` of all hashes."""
    digest = hashlib.sha256(f"{purpose}\0{key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def question_text(problem: Problem) -> str:
    """The question, or the prompt of a problem without one; case and white space do not count."""
    return plain(problem.question) or plain(problem.prompt)


def plain(text: str) -> str:
    """A text in lower case, with single spaces."""
    return " ".join(text.casefold().split())


def distinct(problems: Iterable[Problem], key: Key, most: int | None = None) -> list[Problem]:
    """The first problem of each key, `most` of them at most."""
    by_key: dict[str, Problem] = {}
    for problem in problems:
        by_key.setdefault(key(problem), problem)
        if len(by_key) == most:
            break
    return list(by_key.values())


def number_shared(problems: Iterable[Problem], held_out: Iterable[Problem]) -> int:
    """How many problems, or an earlier turn of theirs, ask what a held-out one asks, by
    `question_text`."""
    questions = frozenset(map(question_text, held_out))
    number = 0
    for problem in problems:
        turns = [plain(text) for _, text in problem.turns]
        if not questions.isdisjoint((question_text(problem), *turns)):
            number += 1
    return number


def without(problems: Problems, keys: Container[str], key: Key) -> Problems:
    """The problems whose key is not in `keys`; `Endless` ones are redrawn. Raises `UserError` after
    `MOST_REDRAWS` in a row."""
    return only(problems, lambda problem: key(problem) not in keys, "ask what a test problem asks")


def only(problems: Problems, is_kept: Callable[[Problem], bool], fault: str) -> Problems:
    """The problems that are kept; `Endless` ones are redrawn. Raises `UserError` after
    `MOST_REDRAWS` in a row that are not, which have this `fault`."""
    if not isinstance(problems, Endless):
        return [problem for problem in problems if is_kept(problem)]

    def draw(index: int) -> Problem:
        rng = random.Random(f"redraw {index}")
        for _ in range(MOST_REDRAWS):
            problem = problems[index]
            if is_kept(problem):
                return problem
            index = rng.getrandbits(71)
        raise UserError(f"--task: {MOST_REDRAWS} training problems drawn in a row {fault}")

    return Endless(draw)
