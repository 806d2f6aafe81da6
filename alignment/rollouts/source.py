"""One step's samples and scores: prompts to groups, with refills for groups of equal rewards, and groups to a batch."""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from alignment.core.advantages import AdvantageConfig, group_advantages, group_statistics, overlong_penalty
from alignment.core.records import Completion, Group, Problem, Rollout, SampledStep, Score
from alignment.core.tokens import collate
from alignment.data.prompts import prompted
from alignment.data.tasks import Task, find_task
from alignment.rewards.rules import Reward, find_reward, graded_ahead, grading_report
from alignment.rollouts.config import RolloutConfig, problems_of_step, refill_problems, training_problems
from alignment.sampling.sampler import Sampler
from alignment.system.clock import Clock


@dataclass(frozen=True)
class RolloutSource:
    """What a step's groups are sampled from, and scored by."""

    problems: Sequence[Problem]
    reward: Reward
    task: Task
    config: RolloutConfig

    def sample_step(self, step: int, sampler: Sampler) -> SampledStep:
        """Sample and score a step's groups with the weights that the sampler has."""
        clock, version = Clock(), sampler.policy_version

        def sample_and_score(problems: Sequence[Problem], refill: int) -> list[Group]:
            sampling = self.config.sampling_of_step(self.task.stop, step, refill)
            with clock("sample"), graded_ahead(self.reward.rule, problems) as on_response_end:
                completions = sampler.sample([problem.prompt for problem in problems], sampling, on_response_end)
            with clock("score"):
                return self.reward.score(problems, completions)

        groups, sampled = refilled_groups(self.problems, self.config, step, sample_and_score)
        check_version(groups, version)
        report = rollout_report(groups, self.config, self.task.rules)
        if self.config.max_refills:
            rewards = [score["reward"] for group in sampled for score in group.scores]
            report |= {"prompts_asked": len(sampled), "reward_asked": sum(rewards) / len(rewards)}
        return SampledStep(step, version, groups, report, clock.seconds)


def open_source(config: RolloutConfig, tokenizer) -> RolloutSource:
    """The source that a configuration names. Raises `UserError` where a name or a file is wrong, or no problem is left."""
    task = find_task(config.task, config.data)
    problems = prompted(task.training_problems(config.dataset_path), config.prompt or task.prompt, tokenizer)
    problems = training_problems(problems, config.max_prompt_tokens, config.num_problems, tokenizer)
    return RolloutSource(problems, find_reward(config.reward, task.rules, config.reward_timeout), task, config)


def refilled_groups(
    problems: Sequence[Problem], config: RolloutConfig, step: int, sample: Callable[[Sequence[Problem], int], Sequence[Group]]
) -> tuple[list[Group], list[Group]]:
    """The groups of a step, and all that were sampled for them. `sample(problems, refill)` samples and scores.

    Groups of equal rewards (zero variance) are replaced by groups of other prompts, up to `max_refills` times (dynamic sampling
    of DAPO, arXiv:2503.14476, section 3.2); the first of them fill the step up where too few informative ones come."""
    wanted = config.prompts_per_rollout
    groups = list(sample(problems_of_step(problems, wanted, config.data_seed, step), 0))
    sampled, informative = list(groups), [group for group in groups if is_informative(group, config)]
    for refill in range(1, config.max_refills + 1):
        if not (missing := max(0, wanted - len(informative))):
            break
        new = sample(refill_problems(problems, missing, config.data_seed, step, refill), refill)
        sampled += new
        informative += [group for group in new if is_informative(group, config)]
    zero_variance = [group for group in groups if not is_informative(group, config)]
    return (informative + zero_variance)[:wanted] if config.max_refills else groups, sampled


def is_informative(group: Group, config: RolloutConfig) -> bool:
    """Whether the rewards of a group, penalties included, differ among the responses that count."""
    scored = zip(group.completions, group.scores, strict=True)
    return len({score["reward"] + length_penalty(c, config) for c, score in scored if is_counted(c, score, config)}) > 1


def check_version(groups: Sequence[Group], policy_version: int) -> None:
    """Raise RuntimeError for a completion that another version of the weights has sampled."""
    stale = {completion.policy_version for group in groups for completion in group.completions} - {policy_version}
    if stale:
        raise RuntimeError(f"the sampler answered with policy version {sorted(stale)}, not with version {policy_version}")


def rollout_report(groups: Sequence[Group], config: RolloutConfig, rules: Sequence[str]) -> dict[str, float]:
    """Rewards by part and by rule, mean length, the share of finished responses, and the share of groups of equal rewards."""
    scores = [score for group in groups for score in group.scores]
    completions: list[Completion] = [completion for group in groups for completion in group.completions]
    statistics = group_statistics(torch.tensor([[score["reward"]] for score in scores]), config.sampling.n)
    penalties = [length_penalty(completion, config) for completion in completions] if config.overlong_buffer else []
    return {
        "reward": statistics["reward_mean"],
        "reward_std": statistics["reward_std"],
        "flat_groups": statistics["flat_groups"],
        "format_reward": sum(score["format_reward"] for score in scores) / len(scores),
        "answer_reward": sum(score["answer_reward"] for score in scores) / len(scores),
        "response_length": sum(len(c.token_ids) for c in completions) / len(completions),
        "finished": sum(c.finish_reason == "stop" for c in completions) / len(completions),
        "responses": len(scores),
        **({"fine": sum(penalties) / len(completions)} if penalties else {}),
        **grading_report(groups, rules),
    }


def collate_groups(groups: Sequence[Group], config: RolloutConfig, pad_token_id: int) -> Rollout:
    """All completions as one padded batch with their rewards, length penalties included, and without advantages."""
    completions = [completion for group in groups for completion in group.completions]
    scores = [score for group in groups for score in group.scores]
    batch = collate([c.prompt_ids for c in completions], [c.token_ids for c in completions], pad_token_id)
    rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    penalties_B1 = torch.tensor([length_penalty(completion, config) for completion in completions])[:, None]
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor([log_prob for c in completions for log_prob in c.log_probs])
    counted_B1 = torch.tensor([[is_counted(*pair, config)] for pair in zip(completions, scores, strict=True)])
    return Rollout(batch, rewards_B1 + penalties_B1, counted_B1, sampler_BT)


def with_advantages(rollout: Rollout, config: AdvantageConfig) -> Rollout:
    """The rollout with `advantages_B1`; groups of one response have none."""
    if config.group_size == 1:
        return rollout
    advantages_B1 = group_advantages(rollout.raw_rewards_B1, config, rollout.counted_B1)
    return dataclasses.replace(rollout, advantages_B1=advantages_B1)


def length_penalty(completion: Completion, config: RolloutConfig) -> float:
    """What is added to a completion's reward for its length, 0 or less."""
    return overlong_penalty(len(completion.token_ids), config.sampling.max_new_tokens, config.overlong_buffer)


def is_counted(completion: Completion, score: Score, config: RolloutConfig) -> bool:
    """Whether a response enters baselines and updates: one that a reward applies to and, with --skip_unfinished, that ended."""
    return "unscored" not in score and (not config.skip_unfinished or completion.finish_reason == "stop")
