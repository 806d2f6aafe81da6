"""The reward of a run, and the scoring of sampled groups: a rule, a control, or a weighted sum of parts."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from alignment.core.records import Completion, Group, Problem, Score
from alignment.rewards.rules import CONTROLS, PARTS, RULES, Part, RewardFn, find_rule, part_of_function
from alignment.system.errors import UserError
from alignment.system.registry import find

GRADING_THREADS = 8  # each may wait for a worker process that runs math-verify


@dataclass(frozen=True)
class Reward:
    """A rule, and the parts (name, weight, part) whose weighted sum is the reward; without parts it is the rule's own."""

    rule: RewardFn
    parts: tuple[tuple[str, float, Part], ...] = ()

    def score(self, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]) -> list[Group]:
        """Each problem with its completions and their scores; with parts, "part_<name>" is in each score too."""
        groups = score_groups(problems, completions, self.rule)
        if not self.parts:
            return groups
        repeated = [group.problem for group in groups for _ in group.completions]
        texts = [completion.text for group in groups for completion in group.completions]
        scores = [score for group in groups for score in group.scores]
        values = {name: part.rewards(repeated, texts, scores) for name, _, part in self.parts}
        rows = []
        for row, score in enumerate(scores):
            reward = sum(weight * values[name][row] for name, weight, _ in self.parts)
            rows.append({**score, "reward": reward, **{f"part_{name}": rewards[row] for name, rewards in values.items()}})
        left = iter(rows)
        return [Group(group.problem, group.completions, tuple(next(left) for _ in group.scores)) for group in groups]


def find_reward(name: str, rules: Sequence[str]) -> Reward:
    """The reward that --reward names, for a task with these rules: one of them, or `part[:weight]`, several with commas. A part
    is one of `PARTS` or `CONTROLS`, a rule, or a function of the user's own, package.module:function. Raises `UserError` for
    any other name, for a rule that is not the task's, and for a part that cannot go with the task's rules."""
    if name in rules:
        return Reward(find_rule(name))
    if name in RULES:
        raise UserError(f"--reward {name}: it does not fit this --task, which is graded by {' or '.join(rules)}")
    rule = find_rule(rules[0])
    weights = [_name_and_weight(item.strip()) for item in name.split(",")]
    parts = tuple((part.replace(":", "."), weight, _find_part(part, rules)) for part, weight in weights)
    if len({part for part, _, _ in parts}) < len(parts):
        raise UserError(f"--reward {name}: a part is named twice")
    return Reward(rule, parts)


def _name_and_weight(item: str) -> tuple[str, float]:
    """`part:weight` taken apart; the weight is 1 where none is given."""
    name, _, last = item.rpartition(":")
    try:
        weight = float(last)
    except ValueError:
        weight = math.nan
    if name and math.isfinite(weight):
        return name, weight
    if name in (*RULES, *CONTROLS, *PARTS):
        raise UserError(f"--reward {item}: the weight {last!r} is no number")
    return item, 1.0


def _find_part(name: str, rules: Sequence[str]) -> Part:
    table = {**{key: part_of_function(key, function) for key, function in RULES.items()}, **CONTROLS, **PARTS}
    part = find("--reward", name, table, partial(part_of_function, name), choose="choose of")
    for key in rules:
        if key in part.unfit:
            raise UserError(f"--reward {name}: {part.unfit[key]}")
    return part


def score_groups(problems: Sequence[Problem], completions: Sequence[Sequence[Completion]], reward_fn: RewardFn) -> list[Group]:
    """Each problem with its completions and their scores by one function."""
    groups = list(zip(problems, completions, strict=True))
    with graded_ahead(reward_fn, problems) as grading:
        futures = [grading(i, completion.text) for i, (_, drawn) in enumerate(groups) for completion in drawn]
        scores = (future.result() for future in futures)
        return [Group(problem, tuple(drawn), tuple(next(scores) for _ in drawn)) for problem, drawn in groups]


@contextmanager
def graded_ahead(rule: RewardFn, problems: Sequence[Problem]) -> Iterator[Callable[[int, str], Future[Score]]]:
    """Gives a function of a problem's number and a response, which grades that response in a thread: its future score. The
    grader caches slow verdicts, so scoring the rollout afterwards is fast."""
    threads = ThreadPoolExecutor(GRADING_THREADS)
    try:
        yield lambda number, text: threads.submit(rule, text, problems[number].ground_truth)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)  # an interrupted command does not wait for the rest


def grading_report(groups: Sequence[Group], rules: Sequence[str]) -> dict[str, float]:
    """The mean reward under each rule of the task, the mean of each part, and the number of gradings that failed. Verdicts are
    cached, so this costs little after the scoring."""
    pairs = [(completion.text, group.problem.ground_truth) for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    by_rule = {name.replace(":", "."): [find_rule(name)(*pair)["reward"] for pair in pairs] for name in rules}
    return {
        **{f"reward_{name}": sum(rewards) / len(rewards) for name, rewards in by_rule.items()},
        **{name: sum(score[name] for score in scores) / len(scores) for name in scores[0] if name.startswith("part_")},
        "grading_failed": sum("grading_failed" in score for score in scores),
    }
