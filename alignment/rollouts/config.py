"""What a step's rollout is sampled from, how, and with which version of the weights; and which prompts a step trains on."""

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from alignment.core.records import Endless, Problem, SamplingConfig
from alignment.data.tasks.own_data import DataConfig
from alignment.system.errors import UserError


@dataclass(frozen=True)
class RolloutConfig:
    """The prompts of a step, how many responses each gets, and which responses count."""

    task: str
    reward: str
    prompt: str = ""  # Prompt template; empty: the task's own
    dataset_path: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    prompts_per_rollout: int = 32
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """`n` is the group size; `stop` and `seed` are those of the task and of the step."""
    num_problems: int = 0
    max_prompt_tokens: int = 0
    max_refills: int = 0
    overlong_buffer: int = 0
    skip_unfinished: bool = False
    seed: int = 0
    data_seed: int = 0
    sampling_seed: int = 0

    @property
    def group_size(self) -> int:
        """Responses of each prompt."""
        return self.sampling.n

    def sampling_of_step(self, stop: tuple[str, ...], step: int, refill: int = 0) -> SamplingConfig:
        """How a step's completions are drawn, or those of its `refill`-th refill."""
        seed = derived_seed("rollout", self.sampling_seed, step, *([refill] if refill else []))
        return dataclasses.replace(self.sampling, stop=stop, seed=seed)


@dataclass(frozen=True)
class Schedule:
    """Which version of the weights samples which step. Version v is what v steps have made."""

    num_steps: int
    max_staleness: int = 0  # Steps that the sampler's weights may be behind
    sync_every: int = 1  # Steps between the versions that the sampler gets

    def version_for(self, step: int) -> int:
        """The version that samples a step: the oldest that `max_staleness` allows, of those that the sampler gets."""
        return max(0, -(-(step - 1 - self.max_staleness) // self.sync_every) * self.sync_every)

    def steps_after(self, step: int) -> range:
        """The steps whose rollouts may be drawn with the weights that `step` steps have made, or with older ones."""
        return range(step + 1, min(step + self.max_staleness + 1, self.num_steps) + 1)


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def training_problems(problems: Sequence[Problem], max_prompt_tokens: int, num_problems: int, tokenizer) -> Sequence[Problem]:
    """The first `num_problems` (0: all) problems whose prompts have at most `max_prompt_tokens` tokens (0: any length). Raises
    `UserError` where every prompt is longer."""
    if isinstance(problems, Endless):
        return [problems[i] for i in range(num_problems)] if num_problems else problems
    if max_prompt_tokens:
        encoded = tokenizer([problem.prompt for problem in problems])["input_ids"]
        problems = [p for p, ids in zip(problems, encoded, strict=True) if len(ids) <= max_prompt_tokens]
        if not problems:
            raise UserError(f"--max_prompt_tokens {max_prompt_tokens}: every prompt is longer")
    return problems[: num_problems or None]


def problems_of_step(problems: Sequence[Problem], number: int, data_seed: int, step: int) -> list[Problem]:
    """The `number` problems of a step (from 1): consecutive pieces of endless shuffled passes over the training problems."""
    first = (step - 1) * number
    places = range(first, first + number)
    if isinstance(problems, Endless):
        return [problems[data_seed << 40 | place] for place in places]
    size = len(problems)
    return [problems[_order(data_seed, place // size, size)[place % size]] for place in places]


@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, size: int) -> list[int]:
    """The order of pass `number` over the problems."""
    return random.Random(f"order {seed} {number}").sample(range(size), size)


def refill_problems(problems: Sequence[Problem], number: int, data_seed: int, step: int, refill: int) -> list[Problem]:
    """Problems that replace a step's groups of equal rewards: drawn anew, so that a step depends on its number alone."""
    rng = random.Random(f"refill {data_seed} {step} {refill}")
    if isinstance(problems, Endless):
        return [problems[rng.getrandbits(71)] for _ in range(number)]
    return rng.sample(problems, min(number, len(problems)))
