"""What a run is trained on: a rule, a control, or a weighted sum of parts, the user's own functions among them."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from alignment.core.records import Completion, Group, Problem, Score
from alignment.rewards.countdown import countdown_reward_fn
from alignment.rewards.parts import PARTS, Part
from alignment.rewards.r1_zero import r1_zero_reward_fn, r1_zero_strict_reward_fn
from alignment.system.errors import RunStopped, UserError

RewardFn = Callable[[str, str], Score]

RULES: Mapping[str, RewardFn] = {
    "r1_zero": r1_zero_reward_fn,
    "r1_zero_strict": r1_zero_strict_reward_fn,
    "countdown": countdown_reward_fn,
}
"""Rules that tell how good a response is; evaluations are by one of them."""


def random_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """A coin for each response to each problem, thrown by a hash, so that a run can be repeated.

    The same response to the same problem always gets the same coin, so with few enough problems the coins could be learnt.
    """
    return float(hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1)


def format_only_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """The format's part of the rule, whatever the answer."""
    return rule(response, ground_truth)["format_reward"]


def inverted_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """1 for a well-formed wrong answer."""
    score = rule(response, ground_truth)
    return score["format_reward"] * (1 - score["answer_reward"])


CONTROLS: Mapping[str, Callable[[RewardFn, str, str], float]] = {
    "random": random_reward,
    "format_only": format_only_reward,
    "inverted": inverted_reward,
}
"""Rewards that have nothing to teach about answers: negative controls."""

GRADERS_AT_WORK = 8  # threads, each of which may wait for a worker process that asks math-verify


@dataclass(frozen=True)
class Reward:
    """A rule that says how good a response is, and the weighted parts that make the reward; without parts, the rule's own."""

    rule: RewardFn
    parts: tuple[tuple[str, float, Part], ...] = ()

    def score(self, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Each problem with its completions and their scores; with parts, "part_<name>" is in each score too."""
        groups = score_groups(problems, completions, self.rule)
        if not self.parts:
            return groups
        asked = [group.problem for group in groups for _ in group.completions]
        texts = [completion.text for group in groups for completion in group.completions]
        judged = [score for group in groups for score in group.scores]
        found = {name: part(asked, texts, judged) for name, _, part in self.parts}
        rows = iter(
            {
                **score,
                "reward": sum(weight * found[name][row] for name, weight, _ in self.parts),
                **{f"part_{name}": values[row] for name, values in found.items()},
            }
            for row, score in enumerate(judged)
        )
        return [Group(group.problem, group.completions, tuple(next(rows) for _ in group.scores)) for group in groups]


def find_reward(name: str, rules: Sequence[str]) -> Reward:
    """The reward that --reward names, for a task with these rules: a rule, or `part[:weight]`, several with commas.

    A part is one of `PARTS` or `CONTROLS`, a rule, or a function of the user's, package.module:function. Raises `UserError`
    for any other name, and for a rule that is not the task's.
    """
    if name in RULES:
        if name not in rules:
            raise UserError(f"--reward {name}: it does not fit this --task, which is graded by {' or '.join(rules)}")
        return Reward(RULES[name])
    rule = RULES[rules[0]]
    if "countdown" in rules and "signed_accuracy" in [item.strip().partition(":")[0] for item in name.split(",")]:
        raise UserError(
            "--reward signed_accuracy: it looks for a number that is the answer, which Countdown's are not; use accuracy"
        )
    parts = []
    for item in name.split(","):
        head, _, last = item.strip().rpartition(":")
        if head in (*RULES, *CONTROLS, *PARTS) and _as_weight(last) is None:
            raise UserError(f"--reward {item.strip()}: the weight {last!r} is no number")
        weight = _as_weight(last) if head else None
        part = head if weight is not None else item.strip()
        parts.append((part.replace(":", "."), 1.0 if weight is None else weight, _find_part(part, rule)))
    names = [part for part, _, _ in parts]
    if len(set(names)) < len(names):
        raise UserError(f"--reward {name}: a part is named twice")
    return Reward(rule, tuple(parts))


def evaluation_reward(name: str, rules: Sequence[str]) -> RewardFn:
    """The rule that a run trained on `name` is evaluated by: its own, and the task's first for everything else."""
    return RULES[name if name in rules else rules[0]]


def _as_weight(text: str) -> float | None:
    try:
        weight = float(text)
    except ValueError:
        return None
    return weight if math.isfinite(weight) else None


def _find_part(name: str, rule: RewardFn) -> Part:
    if name in PARTS:
        return PARTS[name]
    if name in CONTROLS:
        return lambda problems, texts, scores: [
            CONTROLS[name](rule, text, problem.ground_truth) for problem, text in zip(problems, texts, strict=True)
        ]
    if name in RULES:
        return _by_pairs(name, RULES[name])
    module, _, function = name.rpartition(":")
    if not module:
        known = ", ".join([*RULES, *CONTROLS, *PARTS])
        raise UserError(
            f"--reward {name}: there is no such reward; choose of {known}, or name a function as package.module:function"
        )
    try:
        found = getattr(importlib.import_module(module), function)
        takes = inspect.signature(found).parameters
    except (Exception, SystemExit) as error:  # whatever the user's module raises, and what is no function
        raise UserError(f"--reward {name}: cannot be imported ({type(error).__name__}: {error})") from None
    return _of_trl(name, found, takes) if "completions" in takes else _by_pairs(name, found)


def _by_pairs(name: str, function: Callable) -> Part:
    """A part from a function of a response and its ground truth, which returns a number or a score."""

    def part(problems: Sequence[Problem], texts: Sequence[str], scores: Sequence[Score]) -> list[float]:
        def reward(text: str, ground_truth: str) -> object:
            found = function(text, ground_truth)
            return found["reward"] if isinstance(found, Mapping) else found

        found = _called(name, lambda: [reward(text, p.ground_truth) for p, text in zip(problems, texts, strict=True)])
        return _numbers(name, found, len(texts))

    return part


def _of_trl(name: str, function: Callable, takes: Mapping[str, inspect.Parameter]) -> Part:
    """A part from a function as TRL calls them: f(prompts=..., completions=..., **columns) -> list of numbers or None."""
    all_of_them = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())

    def part(problems: Sequence[Problem], texts: Sequence[str], scores: Sequence[Score]) -> list[float]:
        columns = {
            "prompts": [problem.prompt for problem in problems],
            "completions": list(texts),
            "question": [problem.question for problem in problems],
            "ground_truth": [problem.ground_truth for problem in problems],
            "answer": [problem.ground_truth for problem in problems],
            "id": [problem.id for problem in problems],
        }
        given = {key: values for key, values in columns.items() if all_of_them or key in takes}
        return _numbers(name, _called(name, lambda: function(**given)), len(texts))

    return part


def _called(name: str, call: Callable[[], Iterable]) -> list:
    try:
        return list(call())
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunStopped(f"--reward {name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})") from None


def _numbers(name: str, values: Sequence[object], wanted: int) -> list[float]:
    """The values as numbers, None as 0. Raises `RunStopped` for another count, and for what is no finite number."""
    if len(values) != wanted:
        raise RunStopped(f"--reward {name}: gave {len(values)} rewards for {wanted} completions")
    found = []
    for value in values:
        try:
            found.append(0.0 if value is None else float(value))
        except (TypeError, ValueError):
            found.append(math.nan)
        if not math.isfinite(found[-1]):
            raise RunStopped(f"--reward {name}: gave {value!r}, which is no number")
    return found


def score_groups(problems: Sequence[Problem], completions: Sequence[Sequence[Completion]], reward_fn: RewardFn) -> list[Group]:
    """Each problem with its completions and their scores by one function."""
    texts = [
        (completion.text, problem.ground_truth)
        for problem, drawn in zip(problems, completions, strict=True)
        for completion in drawn
    ]
    threads = ThreadPoolExecutor(GRADERS_AT_WORK)
    try:
        scores = threads.map(lambda pair: reward_fn(*pair), texts)
        return [
            Group(problem, tuple(drawn), tuple(next(scores) for _ in drawn))
            for problem, drawn in zip(problems, completions, strict=True)
        ]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # whoever is interrupted does not wait for the rest


@contextmanager
def graded_ahead(rule: RewardFn, problems: Sequence[Problem]) -> Iterator[Callable[[int, str], object]]:
    """Gives a function of a problem's number and a response that has the rule look at it meanwhile: what takes long is cached,
    so whoever scores the rollout then finds it decided."""
    threads = ThreadPoolExecutor(GRADERS_AT_WORK)
    try:
        yield lambda number, text: threads.submit(rule, text, problems[number].ground_truth)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def grading_report(groups: Sequence[Group], rules: Sequence[str]) -> dict[str, float]:
    """The mean reward under each rule of the task, so that what the rule itself decides can be seen, the mean of each part, and
    how many gradings failed.

    Verdicts are cached, so this costs little beside the scoring before it.
    """
    pairs = [(completion.text, group.problem.ground_truth) for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    parts = [name for name in scores[0] if name.startswith("part_")]
    return {
        **{f"reward_{name}": sum(RULES[name](*pair)["reward"] for pair in pairs) / len(pairs) for name in rules},
        **{name: sum(score[name] for score in scores) / len(scores) for name in parts},
        "grading_failed": sum("grading_failed" in score for score in scores),
    }
