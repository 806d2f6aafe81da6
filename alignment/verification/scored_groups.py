"""Is each response of a step paid by its own problem's truth, and by the weights of --reward?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from alignment.core.records import Completion, Problem
from alignment.rewards.rules import OF_GROUPS, Reward
from alignment.verification.check import Check

PROBLEMS = 4
MAJORITY = "majority_vote"
# A response with an answer, as each of the rules that ship wants it.
RIGHT = "<think> so </think> <answer> {} </answer>"
# An answer that all of these rules find.
VOTE = r"<think> so </think> <answer> \boxed{{{}}} </answer>"
VOTES = ((2, 1, 1, 1, 2), (2, 1, 1, 2, 3), (1, 2, 3, 3, 4))
FORMS = (RIGHT, r"so \boxed{{{}}}", "The answer is {}.", "<answer> {}")


@dataclass(frozen=True)
class ScoredGroups:
    """A run's reward, and some problems that it is for. `parts` are the names and weights that
    --reward gives, of which none is a function of the user's."""

    reward: Reward
    problems: Sequence[Problem]
    parts: Sequence[tuple[str, float]]

    def checks(self) -> Iterator[Check]:
        """The check of what a step's groups are paid."""
        reason = ""
        if any(":" in name for name, _ in self.parts):
            reason = "your own reward"
        if any(name in OF_GROUPS for name, _ in self.parts):
            reason = "a response is paid by the others to its problem"
        what = "rewards: responses that are paid wrongly"
        yield Check(what, 0.0, self.wrong, not_checked=reason)
        if any(name == MAJORITY for name, _ in self.parts):
            yield Check("rewards: votes that are counted wrongly", 0.0, self.wrong_votes)

    def wrong(self) -> int:
        """How many responses of a step get another score than each has when it is alone, or a
        reward that is not the weighted sum of its parts; and how many groups get another's
        problem."""
        problems = list(self.problems[:PROBLEMS])
        answers = [problem.ground_truth for problem in problems]
        completions: list[list[Completion]] = []
        for number in range(len(problems)):
            texts = [form.format(answers[number]) for form in FORMS]
            texts.append(RIGHT.format(answers[(number + 1) % len(answers)]))
            completions.append([as_completion(text) for text in texts])
        wrong = 0
        groups = self.reward.score(problems, completions)
        for problem, group in zip(problems, groups, strict=True):
            wrong += group.problem != problem
            for completion, score in zip(group.completions, group.scores, strict=True):
                (alone,) = self.reward.score([problem], [[completion]])
                wrong += score != alone.scores[0] or not self._is_sum(score)
        return wrong

    def wrong_votes(self) -> int:
        """How many responses of made-up groups are paid otherwise than by whether their answer is
        the most frequent one, of equally frequent ones the first, of their own group."""
        problems = list(self.problems[: len(VOTES)])
        votes = VOTES[: len(problems)]
        completions = []
        for answers in votes:
            completions.append([as_completion(VOTE.format(answer)) for answer in answers])
        wrong = 0
        groups = self.reward.score(problems, completions)
        for answers, group in zip(votes, groups, strict=True):
            most = max(map(answers.count, answers))
            winner = next(answer for answer in answers if answers.count(answer) == most)
            for answer, score in zip(answers, group.scores, strict=True):
                wrong += score[f"part_{MAJORITY}"] != float(answer == winner)
        return wrong

    def _is_sum(self, score: dict[str, float]) -> bool:
        """Whether a reward is the weighted sum of its parts, where it has any that apply."""
        total = 0.0
        applied = 0
        for name, weight in self.parts:
            part = score.get(f"part_{name}")
            if part is not None:
                total += weight * part
                applied += 1
        return not applied or math.isclose(score["reward"], total, abs_tol=1e-9)


def as_completion(text: str) -> Completion:
    """A response of this text. Rules see nothing else of it; some parts its length."""
    return Completion((0,), tuple(range(len(text))), (0.0,) * len(text), text, "stop", 0)
