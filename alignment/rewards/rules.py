"""Rules and parts of rewards.

A rule says how good a response is, from the response and the ground truth alone; evaluations report
a rule. A part is a function that a run may add up with weights: ours, the user's own, or TRL's. A
negative control is a part that has nothing to teach about answers. The reward of a run is a rule, a
control, or a weighted sum of parts.
"""

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

from alignment.core.flag import flag
from alignment.core.records import Completion, Group, Problem, Score
from alignment.rewards.boxed import (
    boxed_final_answer,
    boxed_reward_fn,
    flexible_answer,
    flexible_reward_fn,
)
from alignment.rewards.countdown import countdown_answer, countdown_reward_fn
from alignment.rewards.grading.cascade import grade
from alignment.rewards.judge import JudgeSettings, find_judge, judge_name
from alignment.rewards.language import share_in_language
from alignment.rewards.published import (
    correct_in_text,
    grpo_zero_answer,
    grpo_zero_format,
    open_r1_format,
    open_r1_reasoning_steps,
    open_r1_tag_count,
    simple_grpo_correct,
    simple_grpo_format,
    soft_format,
    strict_format,
)
from alignment.rewards.r1_zero import (
    extract_answer,
    r1_zero_reward_fn,
    r1_zero_strict_reward_fn,
    strict_answer,
)
from alignment.rewards.tags import tagged_answer, think_answer_reward_fn
from alignment.rewards.users import Settings, fields_among, settings_class, users_function
from alignment.system.errors import RunStopped, UserError
from alignment.system.registry import find, import_object

RewardFn = Callable[[str, str], Score]  # (response, ground truth) -> score.
AUTO = "auto"
"""The value of --reward that leaves the choice to the task and its prompt (`resolved_reward`)."""
DEFAULT_RULE = "r1_zero"
"""The rule that `AUTO` stands for where the task has it."""
GRADING_THREADS = 8  # each may wait for a worker process that runs math-verify

RULES = {
    "r1_zero": r1_zero_reward_fn,
    "r1_zero_strict": r1_zero_strict_reward_fn,
    "think_answer": think_answer_reward_fn,
    "countdown": countdown_reward_fn,
    "boxed": boxed_reward_fn,
    "flexible": flexible_reward_fn,
}
# Rules that leave thoughts out. They must see the tag with which a prompt opens one.
_RULES_OF_TURNS = (boxed_reward_fn, flexible_reward_fn)
# A rule of ours -> the answer that it grades, as text. What a user's rule grades is not known.
_EXTRACTORS: Mapping[RewardFn, Callable[[str], str | None]] = {
    r1_zero_reward_fn: extract_answer,
    r1_zero_strict_reward_fn: strict_answer,
    think_answer_reward_fn: tagged_answer,
    countdown_reward_fn: countdown_answer,
    boxed_reward_fn: boxed_final_answer,
    flexible_reward_fn: flexible_answer,
}


def find_rule(
    name: str, seconds: float | None = None, settings: Settings = (), flag: str = "--reward"
) -> RewardFn:
    """The rule `name` of `RULES`, or the user's package.module:function.

    A call of the user's function may take `seconds`; `settings` are its own ones, and `flag` is the
    one that errors name. Raises `UserError` where there is neither.
    """

    def wrap(_: object) -> RewardFn:
        return users_function(name, seconds, settings, flag).score

    return find(flag, name, RULES, wrap)


def find_evaluation_rule(name: str, seconds: float | None = None, eval_rule: str = "") -> RewardFn:
    """The rule `name`, as `find_rule` has it, for evaluations: the user's own one raises
    `UsersCodeFailed` at a score outside of [0, 1].

    Errors name the flag --eval_rule where that names the rule."""
    if name in RULES:
        return RULES[name]
    flag = "--eval_rule" if name == eval_rule else "--reward"
    return users_function(name, seconds, flag=flag).share


def settings_of_reward(name: str) -> list[type | None]:
    """The classes of settings that the parts of a reward have of their own (`settings_class`)."""
    classes = []
    for part, _ in named_parts(name):
        function = {**RULES, **CONTROLS, **PARTS}.get(part)
        judge = judge_name(part)
        if judge is not None:
            function = find_judge(judge)
        elif function is None and ":" in part:
            function = cast(Callable, import_object("--reward", part))
        classes.append(None if function is None else settings_class(function))
    return classes


def resolved_reward(name: str, rules: Sequence[str]) -> str:
    """The reward that --reward names for a task with these rules: of "auto" the rule r1_zero, if
    the task has it, else the first of its rules."""
    if name != AUTO:
        return name
    return DEFAULT_RULE if DEFAULT_RULE in rules else rules[0]


def evaluation_rule(reward: str, rules: Sequence[str]) -> str:
    """The name of the rule that evaluates a run trained on `reward`.

    That is the reward itself, if it is one of the task's rules; else the first of these.
    """
    resolved = resolved_reward(reward, rules)
    return resolved if resolved in rules else rules[0]


def graded_text(rule: RewardFn, problem: Problem, response: str) -> str:
    """What a rule sees of a response: for those that leave thoughts out, with the tag by which the
    prompt has opened one."""
    if rule in _RULES_OF_TURNS:
        return whole_turn(problem, response)
    return response


def has_votes(rule: RewardFn) -> bool:
    """Whether it is known which part of a response a rule grades: only for ours."""
    return rule in _EXTRACTORS


def extracted_answer(rule: RewardFn, problem: Problem, response: str) -> str | None:
    """The answer of a response that a rule which `has_votes` grades; None where it has none."""
    return _EXTRACTORS[rule](graded_text(rule, problem, response))


def random_reward(response: str, ground_truth: str) -> float:
    """0 or 1, by a hash of response and ground truth, so that a run can be repeated.

    Where a run has few problems, the hash could be learnt.
    """
    text = f"{ground_truth}\0{response}"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return float(digest[0] & 1)


# (problems, completions, their scores by the task's rule) -> rewards; None where the part does not
# apply to a completion.
PartFn = Callable[[Sequence[Problem], Sequence[Completion], Sequence[Score]], list[float | None]]
# The same, perhaps with a parameter `settings` of the part's own.
PartWithSettings = Callable[..., list[float | None]]

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
STEPS = re.compile(
    r"Step \d+:|^\s*\d+\.\s|^\s*[-*]\s|\b(?:First|Second|Third|Next|Then|Finally),", re.MULTILINE
)
# One thought and one answer in their tags, and nothing else.
TURN = re.compile(
    r"\s*<think>(?:(?!</?think>).)*</think>\s*<answer>(?:(?!</?answer>).)*</answer>\s*", re.DOTALL
)
NUMBER = re.compile(r"[-\u2212]?\d[\d,]*(?:\.\d+|/\d+)?")


def whole_turn(problem: Problem, response: str) -> str:
    """The response, after the opening tag where the prompt ends with it."""
    return f"<think>{response}" if problem.prompt.rstrip().endswith("<think>") else response


def signed_accuracy(response: str, ground_truth: str) -> float:
    """1 where the last number of the response is the answer, -1 otherwise."""
    numbers = NUMBER.findall(response)
    is_right = bool(numbers) and grade(numbers[-1], ground_truth)
    return 1.0 if is_right else -1.0


def language_consistency(problem: Problem, response: str) -> float:
    """Share of the words of the reasoning in the language of the question
    (`share_in_language`)."""
    return share_in_language(problem.question, problem.prompt, response)


def tag_count(problem: Problem, response: str) -> float:
    """A quarter for each of the four tags that occurs exactly once."""
    turn = whole_turn(problem, response)
    single_tags = [tag for tag in TAGS if turn.count(tag) == 1]
    return len(single_tags) / len(TAGS)


def reasoning_steps(problem: Problem, response: str) -> float:
    """A third for each mark of a step: a number, a dash, "First," and the like; 1 from three on."""
    steps = STEPS.findall(whole_turn(problem, response))
    return min(1.0, len(steps) / 3)


def signed_format(problem: Problem, response: str) -> float:
    """1.25 for one thought and one answer in their tags and nothing else, -1 otherwise."""
    return 1.25 if TURN.fullmatch(whole_turn(problem, response)) else -1.0


@dataclass(frozen=True)
class CosineLength:
    """The rewards of short and long responses, right and wrong."""

    longest: int | None = flag(None, above=0, follows="max_new_tokens")
    """cosine_length: tokens of the longest response; by default --max_new_tokens."""
    right_short: float = flag(2.0)
    """cosine_length: reward of a right response of no length."""
    right_long: float = flag(1.0)
    """cosine_length: reward of a right response of almost the longest length."""
    wrong_short: float = flag(-10.0)
    """cosine_length: reward of a wrong response of no length."""
    wrong_long: float = flag(0.0)
    """cosine_length: reward of a wrong response of almost the longest length."""
    cut_off: float = flag(-10.0)
    """cosine_length: reward of a response that is cut off or has the longest length."""


def cosine_length(
    problems: Sequence[Problem],
    completions: Sequence[Completion],
    scores: Sequence[Score],
    settings: CosineLength,
) -> list[float | None]:
    """A reward of correctness and length (Yeo et al. 2025, arXiv:2502.03373, section 4.2 and
    appendix C.1, eq. 1).

    From its value at length 0 it goes to that at `longest` along half a cosine, for right responses
    and for wrong ones, each with values of its own; a response that is cut off gets `cut_off`. A
    response is right where the task's rule says so ("answer_reward"). The defaults are those of
    the authors' script of section 4.2 (demystify-long-cot); TRL's are 1, 0.5, -1 and -0.5, and none
    for a response that is cut off."""
    rewards: list[float | None] = []
    for completion, score in zip(completions, scores, strict=True):
        rewards.append(_cosine_of_length(completion, score, settings))
    return rewards


def _cosine_of_length(completion: Completion, score: Score, settings: CosineLength) -> float:
    assert settings.longest is not None, "arguments give --max_new_tokens in its place"
    length = len(completion.token_ids)
    if completion.finish_reason == "length" or length >= settings.longest:
        return settings.cut_off
    short = settings.wrong_short
    long = settings.wrong_long
    if score["answer_reward"] > 0:
        short = settings.right_short
        long = settings.right_long
    return long + (short - long) * (1 + math.cos(math.pi * length / settings.longest)) / 2


def make_part(function: Callable[[Problem, str, Score], float]) -> PartFn:
    """The part made of a function of a problem, a response to it, and its score."""

    def rewards(
        problems: Sequence[Problem], completions: Sequence[Completion], scores: Sequence[Score]
    ) -> list[float | None]:
        texts = [completion.text for completion in completions]
        return list(map(function, problems, texts, scores))

    return rewards


def make_text_part(function: Callable[[Problem, str], float]) -> PartFn:
    """The part made of a function of a problem and a response to it."""
    return make_part(lambda problem, text, score: function(problem, text))


def make_turn_part(function: Callable[[str], float]) -> PartFn:
    """The part made of a function of a whole turn (`whole_turn`)."""
    return make_part(lambda problem, text, score: function(whole_turn(problem, text)))


def make_graded_turn_part(function: Callable[[str, str], float]) -> PartFn:
    """The part made of a function of a whole turn and the ground truth."""

    def reward(problem: Problem, text: str, score: Score) -> float:
        return function(whole_turn(problem, text), problem.ground_truth)

    return make_part(reward)


def make_rule_part(rule: RewardFn) -> PartFn:
    """The part that is a rule's reward."""

    def reward(problem: Problem, text: str, score: Score) -> float:
        return rule(graded_text(rule, problem, text), problem.ground_truth)["reward"]

    return make_part(reward)


def make_vote_part(rule: RewardFn) -> PartFn:
    """The part that is 1 for the answer, as `rule` finds it, that most responses to a problem gave,
    of equally frequent ones the first, and 0 for others and for none: a control that never sees the
    ground truth (Zuo et al. 2025, arXiv:2504.16084)."""

    def rewards(
        problems: Sequence[Problem], completions: Sequence[Completion], scores: Sequence[Score]
    ) -> list[float | None]:
        answers = []
        votes: dict[str, Counter[str]] = {}
        for problem, completion in zip(problems, completions, strict=True):
            answer = extracted_answer(rule, problem, completion.text)
            answers.append(answer)
            if answer is not None:
                votes.setdefault(problem.id, Counter())[answer] += 1
        values: list[float | None] = []
        for problem, answer in zip(problems, answers, strict=True):
            is_majority = answer is not None and votes[problem.id].most_common(1)[0][0] == answer
            values.append(float(is_majority))
        return values

    return rewards


# A name that --reward takes -> the part.
PARTS: Mapping[str, PartWithSettings] = {
    "format": make_part(lambda problem, text, score: score["format_reward"]),
    "accuracy": make_part(lambda problem, text, score: score["answer_reward"]),
    "tag_count": make_text_part(tag_count),
    "reasoning_steps": make_text_part(reasoning_steps),
    "signed_format": make_text_part(signed_format),
    "signed_accuracy": make_text_part(
        lambda problem, text: signed_accuracy(text, problem.ground_truth)
    ),
    "language_consistency": make_text_part(language_consistency),
    "cosine_length": cosine_length,
    "open_r1_format": make_turn_part(open_r1_format),
    "open_r1_tag_count": make_turn_part(open_r1_tag_count),
    "open_r1_reasoning_steps": make_turn_part(open_r1_reasoning_steps),
    "simple_grpo_format": make_turn_part(simple_grpo_format),
    "simple_grpo_correct": make_graded_turn_part(simple_grpo_correct),
    "grpo_zero_format": make_turn_part(grpo_zero_format),
    "grpo_zero_answer": make_graded_turn_part(grpo_zero_answer),
    "soft_format": make_turn_part(soft_format),
    "strict_format": make_turn_part(strict_format),
    "correct_in_text": make_graded_turn_part(correct_in_text),
    # `_find_part` makes it for the task's rule
    "majority_vote": make_vote_part(r1_zero_reward_fn),
}
# Parts that pay a response by the others to its problem.
OF_GROUPS = frozenset({"majority_vote"})
# A part and a rule that cannot go together -> the reason.
_WANTS_NUMBER = "it looks for a number that is the answer, which Countdown's are not; use accuracy"
_WANTS_TAGS = "it looks for tags, and the prompt asks for a box; use format"
_WANTS_COUNTDOWN = "it evaluates an expression of Countdown's numbers; use accuracy"
UNFIT = {
    ("signed_accuracy", "countdown"): _WANTS_NUMBER,
    ("simple_grpo_correct", "countdown"): _WANTS_NUMBER,
    ("correct_in_text", "countdown"): _WANTS_NUMBER,
    ("tag_count", "boxed"): "it counts tags, and the prompt asks for a box; use format",
    ("signed_format", "boxed"): _WANTS_TAGS,
    ("open_r1_format", "boxed"): _WANTS_TAGS,
    ("open_r1_tag_count", "boxed"): _WANTS_TAGS,
    ("simple_grpo_format", "boxed"): _WANTS_TAGS,
    ("soft_format", "boxed"): _WANTS_TAGS,
    ("strict_format", "boxed"): _WANTS_TAGS,
    ("grpo_zero_answer", "r1_zero"): _WANTS_COUNTDOWN,
    ("grpo_zero_answer", "think_answer"): _WANTS_COUNTDOWN,
    ("grpo_zero_answer", "boxed"): _WANTS_COUNTDOWN,
    ("grpo_zero_answer", "flexible"): _WANTS_COUNTDOWN,
}
# Negative controls: a policy that improves under one of them has not learnt to answer.
CONTROLS: Mapping[str, PartWithSettings] = {
    "random": make_text_part(lambda problem, text: random_reward(text, problem.ground_truth)),
    "format_only": PARTS["format"],
    "inverted": make_part(
        lambda problem, text, score: score["format_reward"] * (1 - score["answer_reward"])
    ),
}


class WeightedPart(NamedTuple):
    """A part of a reward; `name` is that of its metric, "part_<name>"."""

    name: str
    weight: float
    function: PartFn


@dataclass(frozen=True)
class Reward:
    """A rule, and the parts whose weighted sum is the reward; without parts it is the rule's
    own."""

    rule: RewardFn
    parts: tuple[WeightedPart, ...] = ()

    def score(
        self, problems: Sequence[Problem], completions: Sequence[Sequence[Completion]]
    ) -> list[Group]:
        """Each problem with its completions and their scores.

        Scores hold "part_<name>" of each part that applies; "unscored" where none does.
        """
        groups = score_groups(problems, completions, self.rule)
        if not self.parts:
            return groups
        repeated: list[Problem] = []
        responses: list[Completion] = []
        scores: list[Score] = []
        for group in groups:
            repeated += [group.problem] * len(group.completions)
            responses += group.completions
            scores += group.scores
        rewards = [part.function(repeated, responses, scores) for part in self.parts]
        rewards_of_responses = zip(*rewards, strict=True)
        weighed = map(self._weigh, scores, rewards_of_responses)
        return [_with_scores(group, weighed) for group in groups]

    def _weigh(self, score: Score, rewards: Sequence[float | None]) -> Score:
        """The rule's score with a reward that is the weighted sum of the parts that apply."""
        terms: list[float] = []
        metrics: Score = {}
        for part, value in zip(self.parts, rewards, strict=True):
            if value is not None:
                terms.append(part.weight * value)
                metrics[f"part_{part.name}"] = value
        if not metrics:
            metrics["unscored"] = 1.0
        return {**score, "reward": sum(terms, 0.0), **metrics}


def _with_scores(group: Group, scores: Iterator[Score]) -> Group:
    """The group with the next scores, as many as it has completions."""
    own_scores = tuple(itertools.islice(scores, len(group.completions)))
    return Group(group.problem, group.completions, own_scores)


def find_reward(
    name: str, rules: Sequence[str], seconds: float | None = None, settings: Settings = ()
) -> Reward:
    """The reward that --reward names, for a task with these rules.

    That is one of the rules ("auto": `resolved_reward`), or `part[:weight]`, several with commas. A
    part is one of `PARTS` or `CONTROLS`, a rule, or the user's own package.module:function, whose
    calls may take `seconds`. `settings` are the rule's or the parts' own ones, by name; those not
    among them have their defaults.
    Raises `UserError` for any other name, a rule that is not the task's, and a part that cannot go
    with its rules.
    """
    name = resolved_reward(name, rules)
    if name in rules:
        return Reward(find_rule(name, seconds, settings))
    if name in RULES:
        raise UserError(
            f"--reward {name}: it does not fit this --task, which is graded by {' or '.join(rules)}"
        )
    rule = find_rule(rules[0], seconds)
    parts = []
    for part, weight in named_parts(name):
        function = _find_part(part, rules, seconds, settings)
        judge = judge_name(part)
        metric = part.replace(":", ".") if judge is None else judge.metric
        parts.append(WeightedPart(metric, weight, function))
    if len({part.name for part in parts}) < len(parts):
        raise UserError(f"--reward {name}: a part is named twice")
    return Reward(rule, tuple(parts))


def refuse_unknown_reward(name: str) -> None:
    """Raise `UserError`, with the nearest name, where --reward names what is in no table.

    A function of the user's own, package.module:function, is not imported yet.
    """
    if name == AUTO:
        return
    table = {AUTO: AUTO, **RULES, **CONTROLS, **PARTS}
    for part, _ in named_parts(name):
        if ":" not in part:
            find("--reward", part, table)


def check_reward_name(name: str, rules: Sequence[str], seconds: float | None = None) -> None:
    """Raise `UserError` where --reward names what there is not, or a function that cannot be
    imported.

    A rule or part that does not fit a task with these `rules` will do: evaluations grade by the
    task's own.
    """
    if name in (AUTO, *rules, *RULES):
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
        weight = float(last)
        if name and math.isfinite(weight):
            return name, weight
    if name in (*RULES, *CONTROLS, *PARTS):
        raise UserError(f"--reward {item}: the weight {last!r} is no number")
    return item, 1.0


def _find_part(
    name: str, rules: Sequence[str], seconds: float | None, settings: Settings = ()
) -> PartFn:
    for rule in rules:
        if (name, rule) in UNFIT:
            raise UserError(f"--reward {name}: {UNFIT[name, rule]}")
    judge = judge_name(name)
    if judge is not None:
        fields: dict[str, Any] = fields_among(JudgeSettings, settings)
        return partial(find_judge(judge), settings=JudgeSettings(**fields))
    rules_as_parts = {key: make_rule_part(rule) for key, rule in RULES.items()}
    table = {**rules_as_parts, **CONTROLS, **PARTS}
    if rules and name == "majority_vote":
        if rules[0] not in RULES:
            raise UserError(
                f"--reward majority_vote: the task is graded by {rules[0]}, a function of your own,"
                " and which answers it would count is not known; it goes with"
                f" {', '.join(RULES)}"
            )
        table[name] = make_vote_part(RULES[rules[0]])
    part: Callable = find(
        "--reward", name, table, lambda _: users_function(name, seconds, settings).rewards
    )
    cls = settings_class(part)
    if cls is None:
        return part
    return partial(part, settings=cls(**fields_among(cls, settings)))


def try_reward(reward: Reward, problem: Problem) -> None:
    """Score two made-up responses to a problem, but not by judges, whose models load later.

    Raises `UserError` where a function of the user's own cannot score them.
    """
    texts = (
        "I do not know.",
        f"It is {problem.ground_truth}. </think> <answer> {problem.ground_truth} </answer>",
    )
    completions = [Completion((0,), (0,), (0.0,), text, "stop", 0) for text in texts]
    parts = tuple(part for part in reward.parts if not part.name.startswith("judge."))
    try:
        Reward(reward.rule, parts).score([problem], [completions])
    except RunStopped as stopped:
        raise UserError(
            f"{stopped}. This was a made-up response; docs/extending_rewards.md says how a reward"
            " is called"
        ) from None


def score_groups(
    problems: Sequence[Problem], completions: Sequence[Sequence[Completion]], reward_fn: RewardFn
) -> list[Group]:
    """Each problem with its completions and their scores by one function."""
    pairs = list(zip(problems, completions, strict=True))
    groups = []
    with graded_ahead(reward_fn, problems) as start_grading:
        futures: list[Future[Score]] = []
        for number, (_, responses) in enumerate(pairs):
            futures += [start_grading(number, response.text) for response in responses]
        scores = (future.result() for future in futures)
        for problem, responses in pairs:
            own_scores = tuple(itertools.islice(scores, len(responses)))
            groups.append(Group(problem, tuple(responses), own_scores))
    return groups


@contextmanager
def graded_ahead(
    rule: RewardFn, problems: Sequence[Problem]
) -> Iterator[Callable[[int, str], Future[Score]]]:
    """Yields a function that starts to grade a response, to the problem of a number, in a thread.

    Scoring then finds the verdict cached.
    """
    threads = ThreadPoolExecutor(GRADING_THREADS)

    def start_grading(number: int, response: str) -> Future[Score]:
        problem = problems[number]
        text = graded_text(rule, problem, response)
        return threads.submit(rule, text, problem.ground_truth)

    try:
        yield start_grading
    finally:
        # An interrupted command does not wait for the rest.
        threads.shutdown(wait=False, cancel_futures=True)


def grading_report(groups: Sequence[Group], rules: Sequence[str]) -> dict[str, float]:
    """Mean reward under each of a task's rules, mean of each part, and number of failed gradings.

    Verdicts are cached.
    """
    scores: list[Score] = []
    responses: list[tuple[Problem, str]] = []
    for group in groups:
        scores += group.scores
        responses += [(group.problem, completion.text) for completion in group.completions]
    means: dict[str, float] = {}
    for name in rules:
        rule = find_rule(name)
        rewards = []
        for problem, text in responses:
            score = rule(graded_text(rule, problem, text), problem.ground_truth)
            rewards.append(score["reward"])
        means[f"reward_{name.replace(':', '.')}"] = sum(rewards) / len(rewards)
    for name in _names_of_parts(scores):
        rewards = [score[name] for score in scores if name in score]
        means[name] = sum(rewards) / len(rewards)
    failed = [score for score in scores if "grading_failed" in score]
    return {**means, "grading_failed": len(failed)}


def _names_of_parts(scores: Sequence[Score]) -> list[str]:
    """The metrics of parts in scores, in order of appearance."""
    names: dict[str, None] = {}
    for score in scores:
        names |= dict.fromkeys(name for name in score if name.startswith("part_"))
    return list(names)
