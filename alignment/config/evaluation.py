"""Evaluations on the test problems."""

from dataclasses import dataclass

from alignment.config.flag import flag


@dataclass(frozen=True)
class EvaluationFlags:
    """How many test problems an evaluation takes."""

    max_problems: int = flag(512, group="evaluation", at_least=0, zero="all")
    """Distinct questions in an evaluation; 0: all of the test split."""


@dataclass(frozen=True)
class RLEvaluationFlags:
    """When RL evaluates."""

    eval_interval: int = flag(20, group="evaluation", above=0, bookkeeping=True, changeable=True)
    """Steps between evaluations on the test problems; they also run at the very start and end."""
    eval_max_new_tokens: int = flag(0, group="evaluation", at_least=0, zero="as in training")
    """Longest response in them; 0: --max_new_tokens."""
