"""Worked solutions in the place of samples (--train_on solutions): supervised fine-tuning as a run
that has the problems, steps and evaluations of RL, so that a sweep compares the two. The reward
weighs a solution as it weighs a sample: one that is wrong teaches nothing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from alignment.core.records import Completion, Endless, Problem, Problems, SamplingConfig
from alignment.core.text import prompt_token_ids, response_token_ids
from alignment.data.prompts import read_system_prompt
from alignment.data.questions import in_sft_share
from alignment.data.tasks import Task
from alignment.data.tasks.own_data import Demonstration, read_examples
from alignment.rollouts.config import RolloutConfig
from alignment.sampling.sampler import Completions, OnResponseEnd
from alignment.system.errors import UserError
from alignment.system.terminal import say_once


def worked_solutions(task: Task, config: RolloutConfig, tokenizer) -> list[Demonstration]:
    """The task's training problems, with their prompts, and the responses that SFT would teach;
    without test questions and without SFT's share. Longer ones than `max_new_tokens` are left out,
    since RL could not sample them, and counted in a line.

    Raises `UserError` where none is left."""
    # Those of one seed, so that all seeds of an arm learn from the same solutions.
    pairs = task.demonstrations("train", config.dataset_path, 0)
    kept = task.untested(pairs, config.dataset_path)
    if config.sft_share:
        kept = [pair for pair in kept if not in_sft_share(task.key(pair[0]), config.sft_share)]
    taught = task.as_taught(
        task.in_boxes(kept),
        tokenizer,
        read_system_prompt(config.system_prompt),
        read_examples(config.few_shot),
    )
    most = config.sampling.max_new_tokens
    token_ids = response_token_ids(tokenizer, [response for _, response in taught])
    worked = [pair for pair, ids in zip(taught, token_ids, strict=True) if len(ids) <= most]
    left_out = len(kept) - len(worked)
    line = f"--train_on solutions: {left_out} of {len(kept)} worked solutions of --task {task.name}"
    if not worked:
        raise UserError(f"{line} have at most --max_new_tokens {most}; none is left to train on")
    if left_out:
        say_once(f"{line} have more tokens than --max_new_tokens {most} and are left out")
    return worked


def solved_problems(problems: Problems, worked: Sequence[Demonstration]) -> Sequence[Problem]:
    """The problems that have a worked solution; of `Endless` ones those of the solutions."""
    if isinstance(problems, Endless):
        return [problem for problem, _ in worked]
    prompts = {problem.prompt for problem, _ in worked}
    return [problem for problem in problems if problem.prompt in prompts]


class SolutionSampler:
    """A `Sampler` whose completion of a prompt is its worked solution, whatever the weights. The
    solution is certain, so its log-probs are 0. `responses` are the solutions by prompt."""

    def __init__(self, responses: Mapping[str, str], tokenizer):
        self.responses = responses
        self.tokenizer = tokenizer
        self.policy_version = 0
        self.restarts = 0

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        responses = [self.responses[prompt] for prompt in prompts]
        prompt_ids = prompt_token_ids(self.tokenizer, prompts).ids
        response_ids = response_token_ids(self.tokenizer, responses)
        completions: Completions = []
        for number, response in enumerate(responses):
            ids = response_ids[number]
            completion = Completion(
                tuple(prompt_ids[number]),
                ids,
                (0.0,) * len(ids),
                response,
                "stop",
                self.policy_version,
            )
            completions.append([completion] * sampling.n)
        return completions

    def load_weights(self, named_tensors: Iterable[tuple[str, Any]], version: int) -> None:
        self.policy_version = version

    def close(self) -> None:
        pass
