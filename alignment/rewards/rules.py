"""Rules: how good a response is, from the response and the ground truth alone. Evaluations report a rule, never a part.

Beside them, the negative controls: rewards that have nothing to teach about answers.
"""

import hashlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from alignment.core.records import Score
from alignment.rewards.countdown import countdown_reward_fn
from alignment.rewards.r1_zero import r1_zero_reward_fn, r1_zero_strict_reward_fn
from alignment.system.errors import RunStopped
from alignment.system.registry import find

Result = TypeVar("Result")
RewardFn = Callable[[str, str], Score]  # (response, ground truth) -> score.

RULES: Mapping[str, RewardFn] = {
    "r1_zero": r1_zero_reward_fn,
    "r1_zero_strict": r1_zero_strict_reward_fn,
    "countdown": countdown_reward_fn,
}


def find_rule(name: str) -> RewardFn:
    """The rule `name` of `RULES`, or the user's own function of a response and its ground truth, as package.module:function.
    Raises `UserError` for any other name. A function of the user's own raises `RunStopped` if it returns no score."""
    rule = find("--reward", name, RULES)
    return rule if name in RULES else partial(_call_users_rule, name, rule)


def evaluation_rule(reward: str, rules: Sequence[str]) -> str:
    """The name of the rule that evaluates a run trained on `reward`: that rule, if it is one of the task's; else its first."""
    return reward if reward in rules else rules[0]


def _call_users_rule(name: str, rule: RewardFn, response: str, ground_truth: str) -> Score:
    score = call_user_function(name, lambda: rule(response, ground_truth))
    if not isinstance(score, Mapping) or not {"reward", "format_reward", "answer_reward"} <= set(score):
        raise RunStopped(f"--reward {name}: gave {score!r}; a rule gives reward, format_reward and answer_reward")
    return dict(score)


def call_user_function(name: str, call: Callable[[], Result]) -> Result:
    """What `call` returns. Raises `RunStopped`, naming file and line, for whatever the user's code raises."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise RunStopped(f"--reward {name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})") from None


def random_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """0 or 1, as a hash of the response and the ground truth decides, so that a run can be repeated. The same response to the
    same problem always gets the same reward, so with few enough problems it could be learnt."""
    return float(hashlib.sha256(f"{ground_truth}\0{response}".encode("utf-8", "surrogatepass")).digest()[0] & 1)


def inverted_reward(rule: RewardFn, response: str, ground_truth: str) -> float:
    """1 for a well-formed wrong answer."""
    score = rule(response, ground_truth)
    return score["format_reward"] * (1 - score["answer_reward"])


CONTROLS: Mapping[str, Callable[[RewardFn, str, str], float]] = {
    "random": random_reward,
    "format_only": lambda rule, response, ground_truth: rule(response, ground_truth)["format_reward"],
    "inverted": inverted_reward,
}
