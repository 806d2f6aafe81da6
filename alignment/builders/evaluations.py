"""From arguments to the evaluation of a sampler on the test problems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.args import Args, RLArgs
from alignment.core.records import Problem, SamplingConfig, Score
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import Evaluation, evaluate_vllm
from alignment.rewards.rules import find_rule
from alignment.sampling.sampler import OnResponseEnd, Sampler, StoppableSampler


@dataclass(frozen=True)
class PreparedEvaluation:
    """All that an evaluation needs but a sampler."""

    problems: Sequence[Problem]  # The test problems with their prompts.
    rule: Callable[[str, str], Score]  # Grades a response against the problem's truth.
    sampling: SamplingConfig
    rules: Sequence[str]  # Names of the rules whose rewards are reported as well.

    def evaluate(
        self, sampler: Sampler | StoppableSampler, on_response_end: OnResponseEnd = None
    ) -> Evaluation:
        """Sample and grade answers to all problems, or, of a `StoppableSampler` that a signal
        stops, to the first ones. Calls `on_response_end` with each response."""
        drawn_by: Any = sampler  # `evaluate_vllm` calls no method but `sample`.
        return evaluate_vllm(
            drawn_by, self.rule, self.problems, self.sampling, self.rules, on_response_end
        )


def prepare_evaluation(args: Args, tokenizer, n: int = 1) -> PreparedEvaluation:
    """The evaluation by `n` samples of each test problem, graded by the task's rule."""
    task = find_task(args.task, args.data)
    problems = task.test_problems(args.dataset_path, args.max_problems)
    return PreparedEvaluation(
        problems=prompted(problems, args.prompt or task.prompt, tokenizer),
        rule=find_rule(args.evaluation_rule, args.reward_timeout),
        sampling=eval_sampling(args, n),
        rules=task.rules,
    )


def eval_sampling(args: Args, n: int = 1) -> SamplingConfig:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by
    their models alone."""
    return SamplingConfig(
        n,
        args.sampling_temperature,
        args.sampling_top_p,
        args.sampling_top_k,
        evaluation_tokens(args),
        find_task(args.task, args.data).stop,
        args.seed,
    )


def evaluation_tokens(args: Args) -> int:
    """Tokens of the longest response that an evaluation samples."""
    if isinstance(args, RLArgs) and args.eval_max_new_tokens:
        return args.eval_max_new_tokens
    return args.max_new_tokens
