"""Evaluations during training: when one is due, and what is written of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alignment.core.records import Group, Problem, SamplingConfig, Score
from alignment.evaluation.accuracy import evaluate_vllm
from alignment.sampling.sampler import Sampler


@dataclass(frozen=True)
class EvaluationConfig:
    """What is evaluated: the problems with their prompts, how they are sampled, and the rules they are graded by."""

    problems: Sequence[Problem]
    sampling: SamplingConfig
    reward_fn: Callable[[str, str], Score]
    rules: Sequence[str]
    interval: int
    """Steps between evaluations; they also run before the first step and after the last."""
    num_steps: int


class Evaluator:
    """Evaluates a run's policy. `check` compares the sampler's log-probs with the trainer's, where the sampler is not the one
    that each rollout is compared with already."""

    def __init__(
        self, config: EvaluationConfig, sampler: Sampler, run, policy, check: Callable[[Sequence[Group]], object] | None
    ):
        self.config, self.sampler, self.run, self.policy, self.check = config, sampler, run, policy, check

    def run_if_due(self, step: int) -> None:
        """Evaluate after `step` steps, unless that is logged already: a run may stop between a step and its evaluation."""
        off_interval = step % self.config.interval and step < self.config.num_steps
        if step in self.run.folder.evaluated or off_interval:
            return
        if self.sampler.policy_version != step:
            self.sampler.load_weights(self.policy.weights(), step)
        evaluation = evaluate_vllm(
            self.sampler, self.config.reward_fn, self.config.problems, self.config.sampling, self.config.rules
        )
        if self.check is not None:
            self.check(evaluation.groups)
        self.run.folder.log_completions("eval", step, evaluation.groups)
        self.run.folder.log_eval({"step": step, **evaluation.record()})
