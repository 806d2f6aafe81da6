"""The R1-Zero rewards and the grader under them. The code is in `alignment.rewards`; this module
only names it."""

from alignment.rewards.grading.cascade import Verdict, grade, grade_detail, grade_many
from alignment.rewards.r1_zero import extract_answer, r1_zero_reward_fn, r1_zero_strict_reward_fn

__all__ = [
    "Verdict",
    "extract_answer",
    "grade",
    "grade_detail",
    "grade_many",
    "r1_zero_reward_fn",
    "r1_zero_strict_reward_fn",
]
