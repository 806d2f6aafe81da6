"""What a step's rollout is sampled from, how, and by which version of the weights; and how it
becomes updates."""

import dataclasses
import functools
import random
from dataclasses import dataclass, field
from typing import Literal

from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LossConfig
from alignment.core.records import Distribution, Endless, Problem, Problems, SamplingConfig
from alignment.core.text import prompt_token_ids
from alignment.data.tasks.own_data import DataConfig
from alignment.system.errors import UserError


@dataclass(frozen=True)
class RolloutConfig:
    """The prompts of a step, how many responses each gets, and which responses count."""

    task: str
    reward: str
    reward_timeout: float = 60.0  # Seconds of a call of a function of the user's own
    prompt: str = ""  # Prompt template; empty: the task's own
    dataset_path: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    prompts_per_rollout: int = 32
    # `n` is the group size; a step sets `stop` and `seed`
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    num_problems: int = 0
    max_prompt_tokens: int = 0
    max_refills: int = 0
    overlong_buffer: int = 0
    skip_unfinished: bool = False
    seed: int = 0
    data_seed: int = 0
    sampling_seed: int = 0

    def sampling_of_step(self, stop: tuple[str, ...], step: int, refill: int = 0) -> SamplingConfig:
        """How a step's completions are drawn, or those of its `refill`-th refill."""
        parts = ["rollout", self.sampling_seed, step]
        if refill:
            parts.append(refill)
        return dataclasses.replace(self.sampling, stop=stop, seed=derived_seed(*parts))


@dataclass(frozen=True)
class Schedule:
    """Which version of the weights samples which step, where version v is what v steps have made: a
    rule, not a matter of speed, so stale rollouts repeat exactly. At most `max_staleness` rollouts,
    and versions, wait for the other side."""

    num_steps: int
    max_staleness: int = 0  # Steps that the sampler's weights may be behind
    sync_every: int = 1  # Steps between the versions that the sampler gets

    def version_for(self, step: int) -> int:
        """The version that samples a step: the oldest that `max_staleness` allows, of those that
        the sampler gets."""
        oldest = step - 1 - self.max_staleness
        syncs = -(-oldest // self.sync_every)  # rounded up
        return max(0, syncs * self.sync_every)


@dataclass(frozen=True)
class UpdateConfig:
    """The optimiser updates made on each rollout. The fields are those of the flags of the same
    names, except the two that say more."""

    loss: LossConfig
    advantage: AdvantageConfig
    distribution: Distribution = field(default_factory=Distribution)
    """The distribution that all log-probs are taken under."""
    old_log_probs: Literal["ratio_one", "policy", "sampler"] = "ratio_one"
    """"ratio_one" where the old policy is the policy itself (one update a rollout) or plays no
    part, "policy" where a pass before the first update computes them, "sampler" where the sampler's
    own replace them."""
    epochs_per_rollout: int = 1
    train_mini_batch_size: int = 0
    updates_per_rollout: int = 1
    max_new_tokens: int = 256
    learning_rate: float = 2e-4
    warmup_steps: int = 5
    max_grad_norm: float = 1.0
    max_sampler_mismatch: float = 0.1
    seed: int = 0
    data_seed: int = 0


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def training_problems(
    problems: Problems, max_prompt_tokens: int, num_problems: int, tokenizer
) -> Problems:
    """The first `num_problems` (0: all) with prompts of at most `max_prompt_tokens` (0: any).

    Raises `UserError` if there is none."""
    if isinstance(problems, Endless):
        if not num_problems:
            return problems
        return [problems[index] for index in range(num_problems)]
    if max_prompt_tokens:
        encoded = prompt_token_ids(tokenizer, [problem.prompt for problem in problems]).ids
        lengths = map(len, encoded)
        problems = [
            problem
            for problem, length in zip(problems, lengths, strict=True)
            if length <= max_prompt_tokens
        ]
        if not problems:
            raise UserError(f"--max_prompt_tokens {max_prompt_tokens}: every prompt is longer")
    return problems[: num_problems or None]


def problems_of_step(problems: Problems, number: int, data_seed: int, step: int) -> list[Problem]:
    """The `number` problems of a step (from 1): consecutive pieces of endless shuffled passes over
    the training problems."""
    places = range((step - 1) * number, step * number)
    if isinstance(problems, Endless):
        return [problems[data_seed << 40 | place] for place in places]
    size = len(problems)
    chosen = []
    for place in places:
        order = _order_of_pass(data_seed, place // size, size)
        chosen.append(problems[order[place % size]])
    return chosen


@functools.lru_cache(maxsize=2)
def _order_of_pass(seed: int, number: int, size: int) -> list[int]:
    """The order in which pass `number` goes over the problems."""
    return random.Random(f"order {seed} {number}").sample(range(size), size)


def refill_problems(
    problems: Problems, number: int, data_seed: int, step: int, refill: int
) -> list[Problem]:
    """Problems that replace a step's groups of equal rewards: drawn anew, so that a step depends on
    its number alone."""
    rng = random.Random(f"refill {data_seed} {step} {refill}")
    if isinstance(problems, Endless):
        return [problems[rng.getrandbits(71)] for _ in range(number)]
    return rng.sample(problems, min(number, len(problems)))
