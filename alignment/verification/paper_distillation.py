"""On-policy distillation as its papers write it, one token at a time, in Python's own numbers,
without any of the code that trains. Log-probs of responses are lists [B][t], without padding."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alignment.verification.papers import paper_denominator, paper_surrogate

Values = Sequence[Sequence[float]]  # [B][t]


@dataclass(frozen=True)
class SampledByStudent:
    """The log-probs of a step's responses, which the student has sampled."""

    policy: Values  # The student's present weights'.
    old: Values  # Those of the weights that sampled.
    teacher: Values


def paper_token_advantages(
    advantages: Sequence[float], responses: SampledByStudent, weight: float
) -> list[list[float]]:
    """The advantage of each token: that of its response, less `weight` times the reverse KL
    estimate log pi_student - log pi_teacher at this token alone (Lu & Thinking Machines Lab 2025,
    "On-Policy Distillation"; the discount of later tokens is 0)."""
    of_tokens = []
    for advantage, old, teacher in zip(advantages, responses.old, responses.teacher, strict=True):
        of_tokens.append(paper_token_advantages_of_row(advantage, old, teacher, weight))
    return of_tokens


def paper_token_advantages_of_row(
    advantage: float, old: Sequence[float], teacher: Sequence[float], weight: float
) -> list[float]:
    """`paper_token_advantages` of one response."""
    pairs = zip(old, teacher, strict=True)
    return [advantage - weight * (before - wanted) for before, wanted in pairs]


def paper_distillation_derivatives(
    setting: Mapping, advantages: Sequence[float], responses: SampledByStudent
) -> list[list[float]]:
    """The derivatives of a step's loss by the policy's log-prob of each token. The loss of a token
    is PPO's surrogate (arXiv:1707.06347, eq. 7) of its own advantage; where that is clipped its
    derivative is 0, elsewhere -ratio * advantage, over the denominator."""
    of_tokens = paper_token_advantages(advantages, responses, setting["teacher_weight"])
    lengths = [len(row) for row in responses.policy]
    derivatives = []
    for index, length in enumerate(lengths):
        denominator = paper_denominator(setting, length, lengths)
        rows = (responses.policy[index], responses.old[index], of_tokens[index])
        row = []
        for policy, old, advantage in zip(*rows, strict=True):
            ratio = math.exp(policy - old)
            is_clipped = paper_surrogate(setting, ratio, advantage).real < ratio * advantage
            row.append(0.0 if is_clipped else -ratio * advantage / denominator)
        derivatives.append(row)
    return derivatives
