"""TODO."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

from alignment.args import RLArgs
from alignment.core.records import Endless, Problem
from alignment.system.errors import UserError


def training_problems(problems: Sequence[Problem], args: RLArgs, tokenizer) -> Sequence[Problem]:
    """Those that --max_prompt_tokens and --num_problems leave. Raises `UserError` where these are none."""
    if isinstance(problems, Endless):
        return [problems[i] for i in range(args.num_problems)] if args.num_problems else problems
    if args.max_prompt_tokens:
        encoded = tokenizer([problem.prompt for problem in problems])["input_ids"]
        problems = [p for p, ids in zip(problems, encoded, strict=True) if len(ids) <= args.max_prompt_tokens]
        if not problems:
            raise UserError(f"--max_prompt_tokens {args.max_prompt_tokens}: every prompt is longer")
    return problems[: args.num_problems or None]


def problems_of_step(problems: Sequence[Problem], args: RLArgs, step: int) -> list[Problem]:
    """The prompts of a step (from 1): consecutive pieces of endless shuffled passes over the training problems."""
    first = (step - 1) * args.prompts_per_rollout
    places = range(first, first + args.prompts_per_rollout)
    if isinstance(problems, Endless):
        return [problems[args.seeds["data"] << 40 | place] for place in places]
    size = len(problems)
    return [problems[_order(args.seeds["data"], place // size, size)[place % size]] for place in places]


@functools.lru_cache(maxsize=2)
def _order(seed: int, number: int, size: int) -> list[int]:
    """The order of a pass over the problems."""
    return random.Random(f"order {seed} {number}").sample(range(size), size)


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def refill_problems(problems: Sequence[Problem], args: RLArgs, step: int, refill: int, number: int) -> list[Problem]:
    """Prompts that take the place of a step's groups without signal: drawn anew, so that a step depends on its number alone."""
    rng = random.Random(f"refill {args.seeds['data']} {step} {refill}")
    if isinstance(problems, Endless):
        return [problems[rng.getrandbits(71)] for _ in range(number)]
    return rng.sample(problems, min(number, len(problems)))
