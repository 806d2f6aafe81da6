"""From sampled and scored completions to a rollout that can be trained on, and the checks on the way."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from alignment.args import RLArgs
from alignment.errors import RunStopped, UserError
from alignment.grpo import group_statistics, normalize_group_rewards, overlong_penalty
from alignment.models import policy_log_probs
from alignment.prompts import prompted
from alignment.records import Batch, Completion, Endless, Group, Problem, Sampling
from alignment.rewards import Reward, find_reward, graded_ahead, grading_report
from alignment.samplers import Sampler
from alignment.tasks import Task, find_task
from alignment.tokens import collate, take_rows

MISMATCH_SAMPLE = 16  # completions of a rollout on which sampler and trainer are compared
STALE_MISMATCH = 0.5  # nats a token that weights some steps old may differ; far less would be a long way for one update


@dataclass(frozen=True)
class Rollout:
    """One step's responses, ready to train on: B rows in a padded batch and a number or a row of numbers for each.
    `trained_rows` are those that updates are made from.
    """

    batch: Batch
    raw_rewards_B1: torch.Tensor
    advantages_B1: torch.Tensor | None
    sampler_log_probs_BT: torch.Tensor
    trained_rows: tuple[int, ...]
    old_log_probs_BT: torch.Tensor | None = None
    reference_log_probs_BT: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return self.batch.response_mask.sum(dim=1).tolist()


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


def draw_groups(
    problems: Sequence[Problem],
    args: RLArgs,
    step: int,
    draw: Callable[[Sequence[Problem], int], Sequence[Group]],
) -> tuple[list[Group], list[Group]]:
    """The groups of a step, and all that were drawn for them. `draw(problems, refill)` samples and scores.

    Groups of equal rewards are replaced by those of other prompts, --max_refills times (dynamic sampling of DAPO,
    arXiv:2503.14476, section 3.2); what is lacking then is made up by the first of them.
    """
    groups = list(draw(problems_of_step(problems, args, step), 0))
    telling, silent = _with_signal(groups, args)
    asked = list(groups)
    for refill in range(1, args.max_refills + 1):
        if not silent or len(telling) >= args.prompts_per_rollout:
            break
        drawn = draw(refill_problems(problems, args, step, refill, args.prompts_per_rollout - len(telling)), refill)
        asked += drawn
        telling += _with_signal(drawn, args)[0]
    return (telling + silent)[: args.prompts_per_rollout] if args.max_refills else groups, asked


def _with_signal(groups: Sequence[Group], args: RLArgs) -> tuple[list[Group], list[Group]]:
    """The groups whose rewards differ, fines included, among the responses that count; and the others."""
    telling: list[Group] = []
    silent: list[Group] = []
    for group in groups:
        rewards = {
            score["reward"] + overlong_fine(len(completion.token_ids), args)
            for completion, score in zip(group.completions, group.scores, strict=True)
            if _counts(completion, args)
        }
        (telling if len(rewards) > 1 else silent).append(group)
    return telling, silent


def overlong_fine(length: int, args: RLArgs) -> float:
    """What is added to the reward of a response of so many tokens, 0 or less."""
    return overlong_penalty(length, args.max_new_tokens, args.overlong_buffer)


def _counts(completion: Completion, args: RLArgs) -> bool:
    return not args.skip_unfinished or completion.finish_reason == "stop"


@dataclass(frozen=True)
class Drawn:
    """What one step is made from: its groups, the version of the weights that sampled them, and what that took."""

    step: int
    policy_version: int
    groups: list[Group]
    report: dict[str, float]
    """What `rollout_report` says, by whoever has graded it."""
    seconds: dict[str, float]
    restarts: int = 0
    """Engines that were lost since the rollout before, where nobody else counts them."""


@dataclass(frozen=True)
class Source:
    """What a step's groups are drawn from, and scored by."""

    problems: Sequence[Problem]
    reward: Reward
    task: Task
    args: RLArgs

    def draw(self, step: int, sampler: Sampler) -> Drawn:
        """Sample and score a step's groups with the weights that the sampler has."""
        seconds, version = {"sample": 0.0, "score": 0.0}, sampler.policy_version

        def draw(asked: Sequence[Problem], refill: int) -> list[Group]:
            start = time.perf_counter()
            how = rollout_sampling(self.task.stop, self.args, step, refill)
            with graded_ahead(self.reward.rule, asked) as ended:
                completions = sampler.sample([problem.prompt for problem in asked], how, ended)
            refuse_stale(completions, version)
            sampled = time.perf_counter()
            groups = self.reward.score(asked, completions)
            seconds["sample"] += sampled - start
            seconds["score"] += time.perf_counter() - sampled
            return groups

        torch.manual_seed(derived_seed(self.args.seed, step))
        groups, asked = draw_groups(self.problems, self.args, step, draw)
        report = rollout_report(groups, self.args, self.task.rules)
        if self.args.max_refills:
            rewards = [score["reward"] for group in asked for score in group.scores]
            report |= {"prompts_asked": len(asked), "reward_asked": sum(rewards) / len(rewards)}
        return Drawn(step, version, groups, report, seconds)


def training_source(args: RLArgs, tokenizer) -> Source:
    """The source that the arguments name. Raises `UserError` where a name or a file is wrong, or no problem is left."""
    task = find_task(args.task)
    problems = prompted(task.problems("train", args.dataset_path), args.prompt or task.prompt, tokenizer)
    return Source(training_problems(problems, args, tokenizer), find_reward(args.reward, task.rules), task, args)


class InlineRollouts:
    """Rollouts that are drawn between the updates, by a sampler that has each step's weights."""

    def __init__(self, source: Source, sampler: Sampler):
        self.source, self.sampler = source, sampler
        self.load_weights = sampler.load_weights

    @property
    def restarts(self) -> int:
        """Engines that were lost so far."""
        return self.sampler.restarts

    def next(self, step: int) -> Drawn:
        """The rollout of a step."""
        return self.source.draw(step, self.sampler)

    def ahead(self, step: int) -> list[Drawn]:
        """The rollouts after a step that are drawn already: none."""
        return []


def rollout_sampling(stop: tuple[str, ...], args: RLArgs, step: int, refill: int = 0) -> Sampling:
    """How a step's rollout is drawn."""
    return Sampling(
        n=args.group_size,
        temperature=args.sampling_temperature,
        top_p=args.sampling_top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=args.max_new_tokens,
        stop=stop,
        seed=derived_seed("rollout", args.seeds["sampling"], step, *([refill] if refill else [])),
    )


def distribution(args: RLArgs) -> dict[str, float]:
    """What log-probs are taken under: the distribution that was sampled from, for the ratio and all else."""
    return {"temperature": args.sampling_temperature, "top_p": args.sampling_top_p, "top_k": args.sampling_top_k}


def refuse_stale(completions: Sequence[Sequence[Completion]], policy_version: int) -> None:
    """Raise RuntimeError for a completion that another version of the weights has sampled."""
    stale = {c.policy_version for drawn in completions for c in drawn} - {policy_version}
    if stale:
        raise RuntimeError(f"the sampler answered with policy version {sorted(stale)} where {policy_version} was asked for")


def refuse_too_old(drawn: Drawn, staleness: int) -> None:
    """Raise RuntimeError for a step's rollout by weights that are more steps behind than they may be."""
    if not 0 <= drawn.step - 1 - drawn.policy_version <= staleness:
        raise RuntimeError(f"step {drawn.step} got a rollout by version {drawn.policy_version}; --max_staleness is {staleness}")


def make_rollout(groups: Sequence[Group], args: RLArgs, pad: int) -> Rollout:
    """Collate the completions, fine those that are too long, and normalise rewards within each group."""
    rollout = collate_groups(groups, pad)
    fines = [overlong_fine(length, args) for length in rollout.lengths]
    raw_B1 = rollout.raw_rewards_B1 + torch.tensor(fines)[:, None]
    drawn = [completion for group in groups for completion in group.completions]
    counted_B1 = torch.tensor([[_counts(completion, args)] for completion in drawn])
    advantages_B1 = None
    if args.group_size > 1:
        advantages_B1 = normalize_group_rewards(
            raw_B1, args.group_size, args.advantage_eps, args.normalize_by_std, args.baseline, args.std_of, counted_B1
        )
    rows = tuple(counted_B1.squeeze(1).nonzero().squeeze(1).tolist())
    return dataclasses.replace(rollout, raw_rewards_B1=raw_B1, advantages_B1=advantages_B1, trained_rows=rows)


def collate_groups(groups: Sequence[Group], pad: int) -> Rollout:
    """The completions as one batch, without advantages."""
    drawn = [completion for group in groups for completion in group.completions]
    batch = collate([c.prompt_ids for c in drawn], [c.token_ids for c in drawn], pad)
    raw_B1 = torch.tensor([[score["reward"]] for group in groups for score in group.scores], dtype=torch.float32)
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor([log_prob for c in drawn for log_prob in c.log_probs])
    return Rollout(batch, raw_B1, None, sampler_BT, tuple(range(len(drawn))))


@torch.no_grad()
def sampler_mismatch(policy, rollout: Rollout, args: RLArgs, dtype: torch.dtype) -> dict[str, float]:
    """`mismatch` on completions spread over a rollout, by a forward pass over them."""
    number = len(rollout.lengths)
    # The step is not a whole number of groups: each sample number gets its turn.
    rows = range(0, number, number // MISMATCH_SAMPLE + 1)
    trainer_BT = policy_log_probs(policy, take_rows(rollout.batch, rows), dtype, **distribution(args))["log_probs"]
    return mismatch([(list(rows), trainer_BT)], rollout, args)


def mismatch(
    trainer: Sequence[tuple[Sequence[int], torch.Tensor]], rollout: Rollout, args: RLArgs, steps_old: int = 0
) -> dict[str, float]:
    """Mean and largest difference, in nats a token, between the sampler's log-probs and the trainer's, given as rows of the
    rollout with their log-probs.

    To be measured before the weights change, under the distribution that was sampled from. Raises `RunStopped` where the mean
    exceeds --max_sampler_mismatch: the gradient would be of another policy than the one that was sampled. Of a sampler whose
    weights are some steps old more is borne: what they have changed is in it.
    """
    differences = []
    for rows, trainer_BT in trainer:
        width = trainer_BT.shape[1]
        mask = rollout.batch.response_mask[rows, :width]
        differences.append((trainer_BT.cpu() - rollout.sampler_log_probs_BT[rows, :width])[mask].abs())
    difference = torch.cat(differences)
    mean, largest = difference.mean().item(), difference.max().item()
    limit = max(args.max_sampler_mismatch, STALE_MISMATCH) if steps_old else args.max_sampler_mismatch
    if not mean <= limit:
        allowed = f"the {limit} that stale weights may be" if steps_old else f"--max_sampler_mismatch {limit}"
        raise RunStopped(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest {largest:.4g}), more than"
            f" {allowed}. Likely causes: weights that did not reach the sampler, a prefix cache that outlived them, another"
            " dtype (see --dtype), or other temperature or top-p handling"
            f"{', or a --learning_rate too high for --max_staleness' * (steps_old > 0)}. Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}


def rollout_report(groups: Sequence[Group], args: RLArgs, rules: Sequence[str]) -> dict[str, float]:
    """Reward parts, length and finished share of the rollout, and the share of groups that teach nothing."""
    scores = [score for group in groups for score in group.scores]
    drawn = [completion for group in groups for completion in group.completions]
    statistics = group_statistics(torch.tensor([[score["reward"]] for score in scores]), args.group_size)
    return {
        "reward": statistics["reward_mean"],
        "reward_std": statistics["reward_std"],
        "flat_groups": statistics["flat_groups"],
        "format_reward": sum(score["format_reward"] for score in scores) / len(scores),
        "answer_reward": sum(score["answer_reward"] for score in scores) / len(scores),
        "response_length": sum(len(c.token_ids) for c in drawn) / len(drawn),
        "finished": sum(c.finish_reason == "stop" for c in drawn) / len(drawn),
        "responses": len(scores),
        **({"fine": sum(overlong_fine(len(c.token_ids), args) for c in drawn) / len(drawn)} if args.overlong_buffer else {}),
        **grading_report(groups, rules),
    }


def per_response(values_BT: torch.Tensor, rollout: Rollout, rows: Iterable[int]) -> Iterable[list[float]]:
    """Each row's values at its response tokens; none for those that are not among `rows`."""
    chosen = set(rows)
    every = enumerate(zip(values_BT, rollout.batch.response_mask, strict=True))
    return (values[mask].tolist() if row in chosen else [] for row, (values, mask) in every)
