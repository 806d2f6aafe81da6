"""Rules and parts of rewards. A rule says how good a response is, from the response and the ground
truth alone; evaluations report a rule. A part is a function that a run may add up with weights:
ours, the user's own, or TRL's. A negative control is a part that has nothing to teach about
answers. The reward of a run is a rule, a control, or a weighted sum of parts."""

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from alignment.core.records import Completion, Group, Problem, Score
from alignment.rewards.countdown import countdown_reward_fn
from alignment.rewards.grading.cascade import grade
from alignment.rewards.r1_zero import r1_zero_reward_fn, r1_zero_strict_reward_fn
from alignment.rewards.users import users_function
from alignment.system.errors import RunStopped, UserError
from alignment.system.registry import find

RewardFn = Callable[[str, str], Score]  # (response, ground truth) -> score.
GRADING_THREADS = 8  # each may wait for a worker process that runs math-verify

RULES = {
    "r1_zero": r1_zero_reward_fn,
    "r1_zero_strict": r1_zero_strict_reward_fn,
    "countdown": countdown_reward_fn,
}


def find_rule(name: str, seconds: float | None = None) -> RewardFn:
    """The rule `name` of `RULES`, or the user's package.module:function, whose calls take up to
    `seconds`; else `UserError`."""
    return find("--reward", name, RULES, lambda _: users_function(name, seconds).score)


def evaluation_rule(reward: str, rules: Sequence[str]) -> str:
    """The name of the rule that evaluates a run trained on `reward`: that rule, if it is one of the
    task's; else its first."""
    return reward if reward in rules else rules[0]


def random_reward(response: str, ground_truth: str) -> float:
    """0 or 1, by a hash of response and ground truth, so that a run can be repeated; of few
    problems it could be learnt."""
    return float(
        hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0]
        & 1
    )


PartFn = Callable[[Sequence[Problem], Sequence[Completion], Sequence[Score]], list[float | None]]
"""(problems, completions, their scores by the task's rule) -> rewards; None where the part does not
apply to a completion."""

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
STEPS = re.compile(
    r"Step \d+:|^\s*\d+\.\s|^\s*[-*]\s|\b(?:First|Second|Third|Next|Then|Finally),", re.MULTILINE
)
WHOLE = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+|/\d+)?")


def whole_turn(problem: Problem, response: str) -> str:
    """The response, after the opening tag where the prompt ends with it."""
    return f"<think>{response}" if problem.prompt.rstrip().endswith("<think>") else response


def signed_accuracy(response: str, ground_truth: str) -> float:
    """1 where the last number of the response is the answer, -1 otherwise."""
    numbers = NUMBER.findall(response)
    return 1.0 if numbers and grade(numbers[-1], ground_truth) else -1.0


def language_consistency(problem: Problem, response: str) -> float:
    """Share of the response's words in the script of the question, or of the prompt if the question
    has no words; 1 for a response without words (DeepSeek-AI 2025, arXiv:2501.12948, section
    2.3.2). The script stands for the language: it counts words of Latin, Cyrillic and so on, and
    single characters of Chinese, but not tags and LaTeX commands."""
    expected, used = _scripts(problem.question) or _scripts(problem.prompt), _scripts(response)
    return used[expected.most_common(1)[0][0]] / used.total() if expected and used else 1.0


def _scripts(text: str) -> Counter[str]:
    """The number of words in each script."""
    scripts: Counter[str] = Counter()
    for word in re.findall(r"[^\W\d_]+", re.sub(r"</?\w+>|\\[A-Za-z]+", " ", text)):
        letters = [unicodedata.name(letter, "OTHER").split()[0] for letter in word]
        ideographs = [script for script in letters if script in ("CJK", "HIRAGANA", "KATAKANA")]
        scripts.update(ideographs or letters[:1])
    if scripts["HIRAGANA"] or scripts["KATAKANA"]:  # Japanese, whatever the share of each
        scripts["JAPANESE"] = sum(
            scripts.pop(script, 0) for script in ("CJK", "HIRAGANA", "KATAKANA")
        )
    return +scripts


def of_each(function: Callable[[Problem, str, Score], float]) -> PartFn:
    """The part made of a function of a problem, a response to it, and its score."""

    def texts(completions):
        return [completion.text for completion in completions]

    return lambda problems, drawn, scores: list(map(function, problems, texts(drawn), scores))


PARTS: Mapping[str, PartFn] = {
    "format": of_each(lambda problem, text, score: score["format_reward"]),
    "accuracy": of_each(lambda problem, text, score: score["answer_reward"]),
    # A quarter for each of the four tags that occurs exactly once.
    "tag_count": of_each(
        lambda problem, text, _: (
            sum(whole_turn(problem, text).count(tag) == 1 for tag in TAGS) / len(TAGS)
        )
    ),
    # A third for each mark of a step (a number, a dash, "First," and the like), 1 from three on.
    "reasoning_steps": of_each(
        lambda problem, text, _: min(1.0, len(STEPS.findall(whole_turn(problem, text))) / 3)
    ),
    # 1.25 for one thought and one answer in their tags and nothing else, -1 otherwise.
    "signed_format": of_each(
        lambda problem, text, _: 1.25 if WHOLE.fullmatch(whole_turn(problem, text)) else -1.0
    ),
    "signed_accuracy": of_each(
        lambda problem, text, _: signed_accuracy(text, problem.ground_truth)
    ),
    "language_consistency": of_each(lambda problem, text, _: language_consistency(problem, text)),
}
UNFIT = {
    (
        "signed_accuracy",
        "countdown",
    ): "it looks for a number that is the answer, which Countdown's are not; use accuracy"
}
"""A part and a rule that cannot go together -> the reason."""
CONTROLS: Mapping[str, PartFn] = {
    "random": of_each(lambda problem, text, _: random_reward(text, problem.ground_truth)),
    "format_only": PARTS["format"],
    "inverted": of_each(
        lambda problem, text, score: score["format_reward"] * (1 - score["answer_reward"])
    ),
}


@dataclass(frozen=True)
class Reward:
    """A rule, and the parts (name, weight, part) whose weighted sum is the reward; without parts it
    is the rule's own."""

    rule: RewardFn
    parts: tuple[tuple[str, float, PartFn], ...] = ()

    def score(
        self, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
    ) -> list[Group]:
        """Each problem with its completions and their scores, which hold "part_<name>" of parts
        that apply, or "unscored"."""
        groups = score_groups(problems, completions, self.rule)
        if not self.parts:
            return groups
        repeated = [group.problem for group in groups for _ in group.completions]
        drawn = [completion for group in groups for completion in group.completions]
        scores = [score for group in groups for score in group.scores]
        values = [part(repeated, drawn, scores) for _, _, part in self.parts]
        rows = []
        for score, of_row in zip(scores, zip(*values, strict=True), strict=True):
            applied = [
                (name, weight, value)
                for (name, weight, _), value in zip(self.parts, of_row, strict=True)
                if value is not None
            ]
            parts = {f"part_{name}": value for name, _, value in applied} or {"unscored": 1.0}
            rows.append(
                {
                    **score,
                    "reward": sum((weight * value for _, weight, value in applied), 0.0),
                    **parts,
                }
            )
        left = iter(rows)
        return [
            Group(group.problem, group.completions, tuple(next(left) for _ in group.scores))
            for group in groups
        ]


def find_reward(name: str, rules: Sequence[str], seconds: float | None = None) -> Reward:
    """The reward that --reward names, for a task with these rules: one of them, or `part[:weight]`,
    several with commas. A part is one of `PARTS` or `CONTROLS`, a rule, or the user's own
    package.module:function, whose calls may take `seconds`. Raises `UserError` for any other name,
    a rule that is not the task's, and a part that cannot go with its rules."""
    if name in rules:
        return Reward(find_rule(name, seconds))
    if name in RULES:
        raise UserError(
            f"--reward {name}: it does not fit this --task, which is graded by {' or '.join(rules)}"
        )
    rule = find_rule(rules[0], seconds)
    weights = named_parts(name)
    parts = tuple(
        (part.replace(":", "."), weight, _find_part(part, rules, seconds))
        for part, weight in weights
    )
    if len({part for part, _, _ in parts}) < len(parts):
        raise UserError(f"--reward {name}: a part is named twice")
    return Reward(rule, parts)


def refuse_unknown_reward(name: str) -> None:
    """Raise `UserError`, with the nearest name, where --reward names a part or rule that is in no
    table. A function of the user's own, package.module:function, is not imported yet."""
    table = {**RULES, **CONTROLS, **PARTS}
    for part, _ in named_parts(name):
        if ":" not in part:
            find("--reward", part, table)


def check_reward_name(name: str, rules: Sequence[str], seconds: float | None = None) -> None:
    """Raise `UserError` where --reward names what there is not, or a function that cannot be
    imported. A rule or part that does not fit a task with these `rules` will do: evaluations grade
    by the task's own."""
    if name in (*rules, *RULES):
        return
    for part, _ in named_parts(name):
        _find_part(part, (), seconds)


def named_parts(reward: str) -> list[tuple[str, float]]:
    """The parts that --reward names, with their weights."""
    return [_name_and_weight(item.strip()) for item in reward.split(",")]


def _name_and_weight(item: str) -> tuple[str, float]:
    """`part:weight` taken apart; the weight is 1 where none is given."""
    name, _, last = item.rpartition(":")
    with suppress(ValueError):
        if name and math.isfinite(weight := float(last)):
            return name, weight
    if name in (*RULES, *CONTROLS, *PARTS):
        raise UserError(f"--reward {item}: the weight {last!r} is no number")
    return item, 1.0


def _find_part(name: str, rules: Sequence[str], seconds: float | None) -> PartFn:
    def paid_by(rule):
        return of_each(lambda problem, text, _: rule(text, problem.ground_truth)["reward"])

    by_rule = {key: paid_by(rule) for key, rule in RULES.items()}
    if unfit := [UNFIT[name, rule] for rule in rules if (name, rule) in UNFIT]:
        raise UserError(f"--reward {name}: {unfit[0]}")
    return find(
        "--reward",
        name,
        {**by_rule, **CONTROLS, **PARTS},
        lambda _: users_function(name, seconds).rewards,
    )


def try_reward(reward: Reward, problem: Problem) -> None:
    """Score two made-up responses to a problem. Raises `UserError` where a function of the user's
    own cannot score them."""
    texts = (
        "I do not know.",
        f"It is {problem.ground_truth}. </think> <answer> {problem.ground_truth} </answer>",
    )
    try:
        reward.score(
            [problem], [[Completion((0,), (0,), (0.0,), text, "stop", 0) for text in texts]]
        )
    except RunStopped as stopped:
        raise UserError(
            f"{stopped}. This was a made-up response; docs/extending.md says how a reward is called"
        ) from None


def score_groups(
    problems: Sequence[Problem], completions: Sequence[Sequence[Completion]], reward_fn: RewardFn
) -> list[Group]:
    """Each problem with its completions and their scores by one function."""
    groups = list(zip(problems, completions, strict=True))
    with graded_ahead(reward_fn, problems) as grading:
        futures = [
            grading(i, completion.text)
            for i, (_, drawn) in enumerate(groups)
            for completion in drawn
        ]
        scores = (future.result() for future in futures)
        return [
            Group(problem, tuple(drawn), tuple(next(scores) for _ in drawn))
            for problem, drawn in groups
        ]


@contextmanager
def graded_ahead(
    rule: RewardFn, problems: Sequence[Problem]
) -> Iterator[Callable[[int, str], Future[Score]]]:
    """Yields a function that has a response to a problem, by its number, graded in a thread;
    scoring then finds it cached."""
    threads = ThreadPoolExecutor(GRADING_THREADS)
    try:
        yield lambda number, text: threads.submit(rule, text, problems[number].ground_truth)
    finally:
        # an interrupted command does not wait for the rest
        threads.shutdown(wait=False, cancel_futures=True)


def grading_report(groups: Sequence[Group], rules: Sequence[str]) -> dict[str, float]:
    """Mean reward under each of a task's rules (verdicts are cached), mean of each part, and number
    of failed gradings."""
    pairs = [
        (completion.text, group.problem.ground_truth)
        for group in groups
        for completion in group.completions
    ]
    scores = [score for group in groups for score in group.scores]
    parts = dict.fromkeys(name for score in scores for name in score if name.startswith("part_"))
    rewards = {
        f"reward_{name.replace(':', '.')}": [find_rule(name)(*pair)["reward"] for pair in pairs]
        for name in rules
    }
    rewards |= {name: [score[name] for score in scores if name in score] for name in parts}
    means = {name: sum(values) / len(values) for name, values in rewards.items()}
    return {**means, "grading_failed": sum("grading_failed" in score for score in scores)}
