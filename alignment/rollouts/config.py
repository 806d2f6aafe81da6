"""The settings of a step: which problems it asks, how it samples them, which version of the weights
samples, and how the rollout becomes updates of the optimiser."""

import dataclasses
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LossConfig
from alignment.core.records import Distribution, Endless, Problem, Problems, SamplingConfig
from alignment.core.text import prompt_token_ids, response_token_ids
from alignment.data.tasks.own_data import DataConfig
from alignment.system.errors import UserError

TrainOn = Literal["samples", "solutions"]
"""What updates learn from: the policy's samples, or worked solutions."""


@dataclass(frozen=True)
class RolloutConfig:
    """The problems of a step, how their responses are sampled, and which responses are trained
    on."""

    task: str
    reward: str
    reward_timeout: float = 60.0  # Seconds for one call of the user's reward function
    reward_settings: tuple[tuple[str, object], ...] = ()  # The reward's own settings, by name
    prompt: str = ""  # Prompt template; "": the task's own
    system_prompt: str = ""  # Of a chat: a text, or the file that has it
    few_shot: str = ""  # File of worked examples that are put before each question
    dataset_path: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    prompts_per_rollout: int = 32
    # Its `n` is the group size. `sampling_of_step` replaces its `stop` and `seed`.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sft_share: float = 0.0  # Share of the training questions that are SFT's; 0: none
    num_problems: int = 0  # Training problems, the first ones; 0: all
    max_prompt_tokens: int = 0  # Problems with longer prompts are left out; 0: none is
    max_solution_tokens: int = 0  # Those with longer worked solutions are left out; 0: none is
    # Times that other problems replace a step's groups of equal rewards (DAPO's dynamic sampling)
    max_refills: int = 0
    overlong_buffer: int = 0  # Tokens before the limit in which the reward falls (DAPO); 0: none
    skip_unfinished: bool = False  # Leave out responses cut off at the limit
    seed: int = 0
    data_seed: int = 0
    sampling_seed: int = 0
    pass_rates: str = ""  # File of measured pass rates; "": none
    pass_rate_band: str = "0-1"  # Those of the problems that are trained on
    stop: tuple[str, ...] = ()  # Strings that end a response, as --stop; (): the task's own
    train_on: TrainOn = "samples"

    def sampling_of_step(self, stop: tuple[str, ...], step: int, refill: int = 0) -> SamplingConfig:
        """The sampling settings of a step's completions, with a seed for this step and refill (0:
        the first sampling, before any refill)."""
        parts = ["rollout", self.sampling_seed, step]
        if refill:
            parts.append(refill)
        return dataclasses.replace(self.sampling, stop=stop, seed=derived_seed(*parts))


@dataclass(frozen=True)
class Schedule:
    """Which version of the weights samples each step. Version v is the weights after v steps.

    The step number alone decides the version, however fast sampler and trainer are, so a run with
    stale rollouts repeats exactly. At most `max_staleness` rollouts wait for the trainer, and at
    most as many versions of the weights wait for the sampler."""

    num_steps: int
    max_staleness: int = 0  # Steps that the sampler's weights may be behind
    sync_every: int = 1  # Steps between the versions that the sampler gets

    def version_for(self, step: int) -> int:
        """The version that samples a step (from 1): the oldest that `max_staleness` allows.

        The sampler gets only the versions that are multiples of `sync_every`."""
        oldest_allowed = step - 1 - self.max_staleness
        syncs = -(-oldest_allowed // self.sync_every)  # Ceiling division.
        return max(0, syncs * self.sync_every)


@dataclass(frozen=True)
class UpdateConfig:
    """The settings of the optimiser's updates on each rollout. Fields without a docstring are the
    command-line flags of the same names."""

    loss: LossConfig
    advantage: AdvantageConfig
    distribution: Distribution = field(default_factory=Distribution)
    """The distribution that was sampled, which the sampler's log-probs are of."""
    old_log_probs: Literal["ratio_one", "policy", "sampler"] = "ratio_one"
    """Where the old policy's log-probs, the denominator of the ratio, come from. With "policy" a
    forward pass before the first update computes them; with "sampler" they are those of the
    sampler. "ratio_one" computes none: the rollout has a single update, so old and current policy
    are the same and the ratio is 1, or the loss has no ratio."""
    epochs_per_rollout: int = 1
    train_mini_batch_size: int = 0
    updates_per_rollout: int = 1
    max_new_tokens: int = 256
    learning_rate: float = 2e-4
    warmup_steps: int = 5
    lr_schedule: str = "constant"
    entropy_target: float = 0.0
    entropy_delta: float = 0.005
    num_updates: int = 1
    """All updates of the run."""
    max_grad_norm: float = 1.0
    max_sampler_mismatch: float = 0.1
    seed: int = 0
    data_seed: int = 0
    teacher: str = ""
    teacher_weight: float = 1.0
    reference_reset_interval: int = 0
    max_refills: int = 0
    log_probs_of: Literal["sampled", "full"] = "sampled"
    train_on: TrainOn = "samples"

    @property
    def loss_distribution(self) -> Distribution:
        """The distribution that the loss takes all log-probs under: that which was sampled, or all
        of its softmax (--log_probs_of)."""
        if self.log_probs_of == "full":
            return Distribution(self.distribution.temperature)
        return self.distribution

    @property
    def norm_limit(self) -> float:
        """The norm that gradients are scaled down to; infinite where --max_grad_norm is 0."""
        return self.max_grad_norm or math.inf


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def with_short_solutions(problems: Problems, config: RolloutConfig, tokenizer) -> Problems:
    """The problems whose worked solution has at most `config.max_solution_tokens` tokens (0: any
    length): that of the row's column "solution", or else of its answer.

    Raises `UserError` where problems have no rows of their own, and where every solution is
    longer."""
    longest = config.max_solution_tokens
    if not longest:
        return problems
    place = f"--max_solution_tokens {longest}"
    if isinstance(problems, Endless):
        raise UserError(f"{place}: --task {config.task} makes its problems, without solutions")
    solutions = []
    for problem in problems:
        solution = problem.columns.get("solution")
        solution = solution or problem.columns.get(config.data.answer_column)
        if not isinstance(solution, str):
            raise UserError(f"{place}: {problem.id} of --task {config.task} has no solution")
        solutions.append(solution)
    short_problems = []
    taught = response_token_ids(tokenizer, solutions)
    for problem, ids in zip(problems, taught, strict=True):
        # The last of the ids is the end token.
        if len(ids) - 1 <= longest:
            short_problems.append(problem)
    if not short_problems:
        raise UserError(f"{place}: every solution is longer")
    return short_problems


def training_problems(
    problems: Problems, max_prompt_tokens: int, num_problems: int, tokenizer
) -> Problems:
    """The first `num_problems` problems (0: all) whose prompts have at most `max_prompt_tokens`
    tokens (0: any length). Prompts of `Endless` problems are not measured.

    Raises `UserError` if every prompt is longer."""
    if isinstance(problems, Endless):
        if not num_problems:
            return problems
        return [problems[index] for index in range(num_problems)]
    return with_short_prompts(problems, max_prompt_tokens, tokenizer)[: num_problems or None]


def with_short_prompts(
    problems: Sequence[Problem], max_prompt_tokens: int, tokenizer
) -> Sequence[Problem]:
    """The problems whose prompts have at most `max_prompt_tokens` tokens (0: all). Raises
    `UserError` if every prompt is longer."""
    if not max_prompt_tokens:
        return problems
    encoded = prompt_token_ids(tokenizer, [problem.prompt for problem in problems]).ids
    short_problems = []
    for problem, ids in zip(problems, encoded, strict=True):
        if len(ids) <= max_prompt_tokens:
            short_problems.append(problem)
    if not short_problems:
        raise UserError(f"--max_prompt_tokens {max_prompt_tokens}: every prompt is longer")
    return short_problems


# An index into `Endless` problems has a data seed of at most 31 bits and a place of 40.
_PLACE_BITS = 40
_INDEX_BITS = 31 + _PLACE_BITS


def problems_of_step(problems: Problems, number: int, data_seed: int, step: int) -> list[Problem]:
    """The `number` problems of a step (from 1).

    Passes over the training problems follow each other, each in an order of its own; steps take
    consecutive pieces of that sequence. `Endless` problems are taken by index: no two seeds share
    one."""
    places = range((step - 1) * number, step * number)
    if isinstance(problems, Endless):
        # The seed in the high bits, the place in the low 40.
        return [problems[(data_seed << _PLACE_BITS) | place] for place in places]
    size = len(problems)
    chosen = []
    for place in places:
        pass_number, place_in_pass = divmod(place, size)
        order = _order_of_pass(data_seed, pass_number, size)
        chosen.append(problems[order[place_in_pass]])
    return chosen


@functools.lru_cache(maxsize=2)
def _order_of_pass(seed: int, number: int, size: int) -> list[int]:
    """The order in which pass `number` goes over the problems."""
    return random.Random(f"order {seed} {number}").sample(range(size), size)


def refill_problems(
    problems: Problems, number: int, data_seed: int, step: int, refill: int
) -> list[Problem]:
    """The `number` problems that replace a step's groups of equal rewards.

    They are drawn at random from all problems, not taken from the sequence of `problems_of_step`,
    so the refills of one step do not change the problems of the next."""
    rng = random.Random(f"refill {data_seed} {step} {refill}")
    if isinstance(problems, Endless):
        return [problems[rng.getrandbits(_INDEX_BITS)] for _ in range(number)]
    return rng.sample(problems, min(number, len(problems)))
