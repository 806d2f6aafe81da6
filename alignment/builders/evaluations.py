"""From arguments to the evaluation of a sampler on the test problems."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignment.args import Args, EvaluateArgs, RLArgs, SFTArgs
from alignment.builders.held_out import held_out_arguments
from alignment.core.records import Distribution, Problem, SamplingConfig, Score
from alignment.data.prompts import read_system_prompt
from alignment.data.tasks import Task, answer_in_box
from alignment.data.tasks.own_data import read_demonstrations, read_examples
from alignment.evaluation.accuracy import Evaluation, evaluate_vllm
from alignment.evaluation.partial_prompts import (
    LEAST_WORDS,
    continues_question,
    partial_problems,
)
from alignment.rewards.rules import find_evaluation_rule
from alignment.rollouts.config import with_short_prompts
from alignment.runs.health import all_cut_off
from alignment.sampling.sampler import OnResponseEnd, Sampler, StoppableSampler
from alignment.system.errors import UserError
from alignment.system.terminal import say_once


@dataclass(frozen=True)
class PreparedEvaluation:
    """All that an evaluation needs but a sampler."""

    problems: Sequence[Problem]  # The test problems with their prompts.
    rule: Callable[[str, str], Score]  # Grades a response against the problem's truth.
    sampling: SamplingConfig
    rules: Sequence[str]  # Names of the rules whose rewards are reported as well.
    limit_flag: str = "--max_new_tokens"  # The flag that limits its responses.

    @property
    def responses(self) -> int:
        """The number of responses that are sampled."""
        return len(self.problems) * self.sampling.n

    @property
    def distribution(self) -> Distribution:
        """The distribution that the responses' log-probs are of. Those of greedy responses are the
        model's own, since every greedy token has probability 1."""
        if self.sampling.temperature == 0:
            return Distribution()
        return self.sampling.distribution

    def evaluate(
        self, sampler: Sampler | StoppableSampler, on_response_end: OnResponseEnd = None
    ) -> Evaluation:
        """Sample and grade answers to all problems, or, of a `StoppableSampler` that a signal
        stops, to the first ones. Calls `on_response_end` with each response. Says where the limit
        of tokens has cut off all of them."""
        drawn_by: Any = sampler  # `evaluate_vllm` calls no method but `sample`.
        evaluation = evaluate_vllm(
            drawn_by, self.rule, self.problems, self.sampling, self.rules, on_response_end
        )
        if evaluation.record["finished"] == 0:
            responses = len(evaluation.groups) * self.sampling.n
            limit = self.sampling.max_new_tokens
            fault = all_cut_off(responses, "evaluation", self.limit_flag, limit)
            say_once(f"warning: {fault}")
        return evaluation


def prepare_evaluation(
    args: Args, tokenizer, n: int = 1, other_rules: Sequence[str] = ()
) -> PreparedEvaluation:
    """The evaluation by `n` samples of each test problem, graded by the task's rule. Rewards under
    `other_rules` are reported beside those under the task's."""
    task = args.task_in_format
    problems = _held_out_problems(args, task)
    if isinstance(args, EvaluateArgs) and args.partial_prompts:
        return _partial_evaluation(args, problems, tokenizer)
    examples = read_examples(args.few_shot)
    warn_of_shown_tests(args, task)
    if isinstance(args, EvaluateArgs) and args.examples:
        examples = worked_examples(task, args)
    problems = task.with_prompts(
        problems, tokenizer, read_system_prompt(args.system_prompt), examples
    )
    return PreparedEvaluation(
        problems=_problems_asked(args, problems, tokenizer),
        rule=find_evaluation_rule(args.evaluation_rule, args.reward_timeout, args.eval_rule),
        sampling=eval_sampling(args, n),
        rules=tuple(dict.fromkeys((*task.rules, *other_rules))),
        limit_flag=flag_of_limit(args),
    )


def _partial_evaluation(
    args: EvaluateArgs, problems: Sequence[Problem], tokenizer
) -> PreparedEvaluation:
    """The evaluation of --partial_prompts, by as many tokens as the longest rest has and a quarter
    more, since another tokenisation of the same words may be longer. Raises `UserError` where every
    question is too short."""
    partial = partial_problems(problems, args.partial_prompts)
    if not partial:
        raise UserError(
            f"--partial_prompts {args.partial_prompts}: no question of --task {args.task} leaves"
            f" {LEAST_WORDS} words to continue"
        )
    lengths = [len(tokenizer.encode(problem.ground_truth)) for problem in partial]
    sampling = SamplingConfig(1, 0.0, max_new_tokens=max(lengths) * 5 // 4 + 1)
    return PreparedEvaluation(partial, continues_question, sampling, rules=())


def _held_out_problems(args: Args, task: Task) -> list[Problem]:
    """The distinct questions of the task that an evaluation asks: of RL by its --eval_split. Raises
    `UserError` where that has none."""
    if not isinstance(args, RLArgs):
        return task.test_problems(args.dataset_path, args.max_problems)
    problems = task.test_problems(
        args.dataset_path, args.max_problems, args.eval_split, args.validation_share
    )
    if not problems:
        raise UserError(
            f"--validation_share {args.validation_share} --eval_split {args.eval_split}: --task"
            f" {task.name} has no such question"
        )
    return problems


def _problems_asked(args: Args, problems: Sequence[Problem], tokenizer) -> Sequence[Problem]:
    """The problems whose prompts --max_prompt_tokens allows; prints how many are left out."""
    if not isinstance(args, RLArgs | SFTArgs | EvaluateArgs):
        return problems
    short_problems = with_short_prompts(problems, args.max_prompt_tokens, tokenizer)
    number = len(problems) - len(short_problems)
    if number:
        say_once(
            f"--max_prompt_tokens {args.max_prompt_tokens}: {number} of {len(problems)} test"
            f" problems of --task {args.task} have longer prompts and are not asked"
        )
    return short_problems


def prepare_evaluations(args: RLArgs | SFTArgs, tokenizer) -> dict[str, PreparedEvaluation]:
    """The evaluations of a command that trains, by the prefix of their metrics
    (`held_out_arguments`)."""
    evaluations = {}
    for prefix, evaluation_args in held_out_arguments(args).items():
        samples = evaluation_args.eval_samples
        evaluations[prefix] = prepare_evaluation(evaluation_args, tokenizer, samples)
    return evaluations


def functions_of_others(
    evaluations: Mapping[str, PreparedEvaluation],
) -> dict[str, Callable[[Sampler], Evaluation]]:
    """By prefix, what makes each evaluation but the one on --task by its samples."""
    return {prefix: other.evaluate for prefix, other in evaluations.items() if prefix}


def warn_of_shown_tests(args: Args, task: Task) -> None:
    """Say how many examples of --few_shot ask a test question, with its answer in each prompt;
    --examples takes none."""
    if not args.few_shot:
        return
    shown = read_demonstrations(args.few_shot)
    number = len(shown) - len(task.untested(shown, args.dataset_path))
    if number:
        say_once(
            f"warning: --few_shot {args.few_shot}: {number} of {len(shown)} examples ask a test"
            f" question of --task {args.task}, so its accuracy is not of unseen questions"
        )


def worked_examples(task: Task, args: EvaluateArgs) -> list[tuple[str, str]]:
    """--examples (question, response) pairs of the training split, none of which asks a test
    question. Raises `UserError` where the task has fewer."""
    demonstrations = task.demonstrations("train", args.dataset_path, args.seed)
    pairs = []
    for problem, response in task.untested(demonstrations, args.dataset_path)[: args.examples]:
        if task.wants_box:
            response = f" {answer_in_box(response)}"
        pairs.append((problem.question, response))
    if len(pairs) < args.examples:
        raise UserError(
            f"--examples {args.examples}: --task {args.task} has {len(pairs)} worked solutions to"
            " show; choose fewer"
        )
    return pairs


def eval_sampling(args: Args, n: int = 1) -> SamplingConfig:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by
    their models alone."""
    return SamplingConfig(
        n,
        args.evaluation_temperature,
        args.evaluation_top_p,
        args.evaluation_top_k,
        evaluation_tokens(args),
        args.task_in_format.stop,
        args.seed,
    )


def flag_of_limit(args: Args) -> str:
    """The flag that `evaluation_tokens` is the value of."""
    if isinstance(args, RLArgs) and args.eval_max_new_tokens:
        return "--eval_max_new_tokens"
    return "--max_new_tokens"


def evaluation_tokens(args: Args) -> int:
    """Tokens of the longest response that an evaluation samples."""
    if isinstance(args, RLArgs) and args.eval_max_new_tokens:
        return args.eval_max_new_tokens
    return args.max_new_tokens
