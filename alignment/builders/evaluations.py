"""From arguments to the evaluation of a sampler on the test problems."""

from collections.abc import Callable, Sequence

from alignment.args import (
    Args,
)
from alignment.builders.samplers import stoppable
from alignment.core.records import Problem, SamplingConfig
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import Evaluation, evaluate_vllm
from alignment.rewards.rules import find_rule
from alignment.sampling.sampler import (
    OnResponseEnd,
    Sampler,
)


def eval_sampling(args: Args, n: int = 1) -> SamplingConfig:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by
    their models alone."""
    sampling = (args.sampling_temperature, args.sampling_top_p, args.sampling_top_k)
    longest = getattr(args, "eval_max_new_tokens", 0) or args.max_new_tokens
    return SamplingConfig(n, *sampling, longest, find_task(args.task, args.data).stop, args.seed)


def evaluation(
    args: Args, tokenizer, n: int = 1
) -> tuple[Sequence[Problem], Callable[..., Evaluation]]:
    """The test problems with their prompts, and the evaluation of a sampler by `n` samples of each,
    graded by its rules. It takes a function to call with each response, and whether a signal shall
    keep what was sampled (`StoppableSampler`)."""
    task, sampling = find_task(args.task, args.data), eval_sampling(args, n)
    rule = find_rule(args.evaluation_rule, args.reward_timeout)
    problems = prompted(
        task.test_problems(args.dataset_path, args.max_problems),
        args.prompt or task.prompt,
        tokenizer,
    )

    def evaluate(sampler: Sampler, ended: OnResponseEnd = None, keep: bool = False) -> Evaluation:
        drawn_by = stoppable(args, sampler) if keep else sampler
        return evaluate_vllm(drawn_by, rule, problems, sampling, task.rules, ended)

    return problems, evaluate
