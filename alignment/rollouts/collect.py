"""From sampled and scored completions to a rollout that can be trained on, and the checks on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from alignment.args import RLArgs
from alignment.core.advantages import group_statistics
from alignment.core.records import Completion, Group, Problem, SamplingConfig
from alignment.core.rollout import SampledStep
from alignment.data.prompts import prompted
from alignment.data.tasks import Task, find_task
from alignment.rewards.reward import Reward, find_reward, graded_ahead, grading_report
from alignment.rollouts.batches import _counts, overlong_fine
from alignment.rollouts.prompts import derived_seed, problems_of_step, refill_problems, training_problems
from alignment.sampling.sampler import Sampler


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


@dataclass(frozen=True)
class Source:
    """What a step's groups are drawn from, and scored by."""

    problems: Sequence[Problem]
    reward: Reward
    task: Task
    args: RLArgs

    def draw(self, step: int, sampler: Sampler) -> SampledStep:
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
        return SampledStep(step, version, groups, report, seconds)


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

    def next(self, step: int) -> SampledStep:
        """The rollout of a step."""
        return self.source.draw(step, self.sampler)

    def ahead(self, step: int) -> list[SampledStep]:
        """The rollouts after a step that are drawn already: none."""
        return []


def rollout_sampling(stop: tuple[str, ...], args: RLArgs, step: int, refill: int = 0) -> SamplingConfig:
    """How a step's rollout is drawn."""
    return SamplingConfig(
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


def refuse_too_old(drawn: SampledStep, staleness: int) -> None:
    """Raise RuntimeError for a step's rollout by weights that are more steps behind than they may be."""
    if not 0 <= drawn.step - 1 - drawn.policy_version <= staleness:
        raise RuntimeError(f"step {drawn.step} got a rollout by version {drawn.policy_version}; --max_staleness is {staleness}")


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
