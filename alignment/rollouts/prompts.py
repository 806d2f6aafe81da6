"""Which prompts a step trains on."""

import functools
import random
from collections.abc import Sequence

from alignment.core.records import Endless, Problem
from alignment.system.errors import UserError


def training_problems(problems: Sequence[Problem], max_prompt_tokens: int, num_problems: int, tokenizer) -> Sequence[Problem]:
    """The first `num_problems` (0: all) problems whose prompts have at most `max_prompt_tokens` tokens (0: any length).

    Raises `UserError` where every prompt is longer.
    """
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
