"""Evaluations on the test problems."""

from dataclasses import dataclass

from alignment.config.flag import flag
from alignment.data.tasks import EvalSplit


@dataclass(frozen=True)
class EvaluationFlags:
    """Which test problems an evaluation takes, and how it samples and grades answers to them."""

    max_problems: int = flag(512, group="evaluation", at_least=0, zero="all")
    """Distinct questions in an evaluation; 0: all of the test split."""
    eval_temperature: float | None = flag(None, group="evaluation", at_least=0, zero="greedy")
    """Softmax temperature of evaluation samples; 0 is greedy. By default --sampling_temperature."""
    eval_top_p: float | None = flag(None, group="evaluation", above=0, at_most=1)
    """Nucleus of evaluation samples; by default --sampling_top_p."""
    eval_rule: str = flag("", group="evaluation")
    """Rule that grades evaluations: one of the task's, or your own as package.module:function;
    empty: --reward where that is one of the task's, else the task's first."""
    eval_greedy: bool = flag(False, group="evaluation", bookkeeping=True)
    """Evaluate one greedy response a problem, too, beside the samples."""
    eval_top_k: int | None = flag(None, group="evaluation", at_least=0, zero="all")
    """Likeliest tokens that evaluation samples are drawn from, before the nucleus; 0: all. By
    default --sampling_top_k."""


@dataclass(frozen=True)
class PromptLengthFlags:
    """Which problems are asked, by the length of their prompts. RL has the flag among
    `TrainingDataFlags`."""

    max_prompt_tokens: int = flag(0, group="data", at_least=0, zero="any length")
    """Longest prompt, in tokens; problems with longer ones are not asked. 0: any length."""


@dataclass(frozen=True)
class TrainingEvaluationFlags:
    """What a command that trains evaluates."""

    eval_samples: int = flag(1, group="evaluation", at_least=1)
    """Samples a problem in evaluations; above 1 adds pass@k and maj@k."""
    eval_tasks: tuple[str, ...] = flag((), group="evaluation", swept=False)
    """Tasks to evaluate on beside --task: benchmarks as evaluate's, tasks, file:FILE, hf:NAME."""


@dataclass(frozen=True)
class RLEvaluationFlags:
    """When RL evaluates."""

    eval_interval: int = flag(20, group="evaluation", above=0, bookkeeping=True, changeable=True)
    """Steps between evaluations on the test problems; they also run at the very start and end."""
    eval_max_new_tokens: int = flag(0, group="evaluation", at_least=0, zero="as in training")
    """Longest response in them; 0: --max_new_tokens."""
    target_accuracy: float = flag(
        0.0, group="evaluation", at_least=0, at_most=1, zero="none", swept=False, changeable=True
    )
    """End training after the first evaluation with at least this accuracy; 0: after --num_steps."""
    validation_share: float = flag(
        0.0, group="evaluation", at_least=0, below=1, zero="none", swept=False
    )
    """Share of the test questions that are set apart, by a hash, to choose settings on: only
    --eval_split validation asks them."""
    eval_split: EvalSplit = flag("test", group="evaluation", swept=False)
    """Held-out questions that evaluations ask: the test split, or the --validation_share of it."""

    @property
    def evaluated_share(self) -> float:
        """The share of the test questions that evaluations may ask."""
        if self.eval_split == "validation":
            return self.validation_share
        return 1 - self.validation_share
