"""The rollouts of a run: prompts are sampled and scored as groups, groups of equal rewards are
refilled, and groups become a batch.

`SyncRollouts` samples each step between the updates, with the latest weights. `AheadRollouts` has a
thread sample and score later steps while the trainer is busy with earlier ones."""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from alignment.core.advantages import (
    AdvantageConfig,
    advantage_inputs,
    compute_advantages,
    group_statistics,
    overlong_penalty,
)
from alignment.core.records import (
    Completion,
    Group,
    Problem,
    Problems,
    Rollout,
    SampledStep,
    SamplingConfig,
    Score,
    flatten_completions,
    flatten_scores,
)
from alignment.core.tokens import collate
from alignment.data.pass_rates import banded
from alignment.data.prompts import read_system_prompt
from alignment.data.tasks import Task, find_task
from alignment.data.tasks.own_data import read_examples
from alignment.policy.policy import Policy
from alignment.rewards.rules import Reward, find_reward, graded_ahead, grading_report
from alignment.rollouts.config import (
    RolloutConfig,
    Schedule,
    derived_seed,
    problems_of_step,
    refill_problems,
    training_problems,
    with_short_solutions,
)
from alignment.rollouts.solutions import SolutionSampler, solved_problems, worked_solutions
from alignment.sampling.arrival import load_proven
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import Sampler, put_to_sleep
from alignment.system.clock import Clock, run_in_background
from alignment.system.errors import RunStopped, UserError, failure_of_users_code
from alignment.system.processes import GRACE_SECONDS


class _Request(NamedTuple):
    """What `sample_step` had a sampler draw: completions of these problems, in this way."""

    problems: Sequence[Problem]
    sampling: SamplingConfig


@dataclass(frozen=True)
class RolloutSource:
    """What a step's groups are sampled from, and scored by."""

    problems: Problems
    reward: Reward
    task: Task
    config: RolloutConfig
    solutions: SolutionSampler | None = None  # What samples, with --train_on solutions.

    def sample_step(self, step: int, sampler: Sampler) -> SampledStep:
        """Sample and score a step's groups with the weights that the sampler has."""
        clock = Clock()
        version = sampler.policy_version
        requests: list[_Request] = []

        def sample_and_score(problems: Sequence[Problem], refill: int) -> list[Group]:
            sampling = self.config.sampling_of_step(self.task.stop, step, refill)
            requests.append(_Request(problems, sampling))
            prompts = [problem.prompt for problem in problems]
            with clock("sample"), graded_ahead(self.reward.rule, problems) as on_response_end:
                completions = sampler.sample(prompts, sampling, on_response_end)
            with clock("score"):
                return self.reward.score(problems, completions)

        groups, sampled = refilled_groups(self.problems, self.config, step, sample_and_score)
        check_version(groups, version)
        report = rollout_report(groups, self.config, self.task.rules)
        if self.config.max_refills:
            report |= sampled_report(sampled)
        first = requests[0]
        return SampledStep(
            step,
            version,
            groups,
            report,
            clock.seconds,
            problem_ids=tuple(problem.id for problem in first.problems),
            seed=first.sampling.seed,
            warnings=length_warning(sampled, first.sampling.max_new_tokens),
        )


def open_source(config: RolloutConfig, tokenizer) -> RolloutSource:
    """The source that a configuration names. Raises `UserError` where a name or a file is wrong, or
    no training problem is left, for example after `max_prompt_tokens`."""
    task = find_task(config.task, config.data).in_format(config.prompt, config.reward)
    task = task.with_stop(config.stop)
    kept = banded(
        task.training_problems(config.dataset_path, config.sft_share),
        config.pass_rates,
        config.pass_rate_band,
    )
    problems = task.with_prompts(
        with_short_solutions(kept, config, tokenizer),
        tokenizer,
        read_system_prompt(config.system_prompt),
        read_examples(config.few_shot),
    )
    solutions = None
    if config.train_on == "solutions":
        worked = worked_solutions(task, config, tokenizer)
        problems = solved_problems(problems, worked)
        responses = {problem.prompt: response for problem, response in worked}
        solutions = SolutionSampler(responses, tokenizer)
    problems = training_problems(problems, config.max_prompt_tokens, config.num_problems, tokenizer)
    reward = find_reward(config.reward, task.rules, config.reward_timeout, config.reward_settings)
    return RolloutSource(problems, reward, task, config, solutions)


def refilled_groups(
    problems: Problems,
    config: RolloutConfig,
    step: int,
    sample: Callable[[Sequence[Problem], int], Sequence[Group]],
) -> tuple[list[Group], list[Group]]:
    """The groups of a step, and all that were sampled for them.

    `sample(problems, refill)` samples and scores; refill 0 is the step's first request. Groups of
    equal rewards (zero variance) are replaced by groups of other prompts, in up to `max_refills`
    refills (dynamic sampling of DAPO, arXiv:2503.14476, section 3.2). Where these bring too few
    informative groups, the first groups of equal rewards fill the step up."""
    number = config.prompts_per_rollout
    sampled = list(sample(problems_of_step(problems, number, config.data_seed, step), 0))
    groups = sampled
    for refill in range(1, config.max_refills + 1):
        missing = number - sum(is_informative(group, config) for group in sampled)
        if missing > 0:
            others = refill_problems(problems, missing, config.data_seed, step, refill)
            sampled = [*sampled, *sample(others, refill)]
        # Informative groups first; `sorted` is stable, so each kind stays in the order of sampling.
        groups = sorted(sampled, key=lambda group: not is_informative(group, config))[:number]
    return groups, sampled


def is_informative(group: Group, config: RolloutConfig) -> bool:
    """Whether the rewards of a group, penalties included, differ among the responses that count."""
    rewards = set()
    for completion, score in zip(group.completions, group.scores, strict=True):
        if is_counted(completion, score, config):
            rewards.add(score["reward"] + length_penalty(completion, config))
    return len(rewards) > 1


def check_version(groups: Sequence[Group], policy_version: int) -> None:
    """Raise RuntimeError for a completion sampled by other weights than `policy_version`."""
    versions = {completion.policy_version for completion in flatten_completions(groups)}
    stale = versions - {policy_version}
    if stale:
        raise RuntimeError(
            f"the sampler answered with policy version {sorted(stale)}, not with version"
            f" {policy_version}"
        )


def length_warning(groups: Sequence[Group], max_new_tokens: int) -> dict[str, str]:
    """The warning "cut_short", where responses that are said to be cut off are shorter than the
    longest one may be, or some are longer."""
    wrong = 0
    completions = flatten_completions(groups)
    for completion in completions:
        length = len(completion.token_ids)
        is_cut = completion.finish_reason == "length"
        wrong += length > max_new_tokens or (is_cut and length < max_new_tokens)
    if not wrong:
        return {}
    return {
        "cut_short": (
            f"{wrong} of {len(completions)} responses are longer than --max_new_tokens"
            f" {max_new_tokens}, or were cut off before: does the sampler have another limit?"
        )
    }


def rollout_report(
    groups: Sequence[Group], config: RolloutConfig, rules: Sequence[str]
) -> dict[str, float]:
    """What is logged of a step's groups: mean rewards by part and by rule, mean length, and the
    shares of finished responses and of groups of equal rewards ("frac_reward_zero_std")."""
    scores = flatten_scores(groups)
    completions = flatten_completions(groups)
    rewards_B1 = torch.tensor([[score["reward"]] for score in scores])
    statistics = group_statistics(rewards_B1, config.sampling.n)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / len(completions)

    report = {
        "reward": statistics["reward_mean"],
        "reward_std": statistics["reward_std"],
        "frac_reward_zero_std": statistics["frac_reward_zero_std"],
        "format_reward": mean(score["format_reward"] for score in scores),
        "answer_reward": mean(score["answer_reward"] for score in scores),
        "response_length": mean(len(completion.token_ids) for completion in completions),
        "finished": mean(completion.finish_reason == "stop" for completion in completions),
        "responses": len(scores),
    }
    if config.overlong_buffer:
        penalties = (length_penalty(completion, config) for completion in completions)
        report["overlong_penalty"] = mean(penalties)
    return report | grading_report(groups, rules)


def sampled_report(sampled: Sequence[Group]) -> dict[str, float]:
    """What is logged of all groups that were sampled for a step, those that refills replaced
    included."""
    scores = flatten_scores(sampled)
    completions = flatten_completions(sampled)
    return {
        "prompts_sampled": len(sampled),
        "responses_sampled": len(scores),
        "reward_sampled": sum(score["reward"] for score in scores) / len(scores),
        "tokens_sampled": sum(len(completion.token_ids) for completion in completions),
        # A group whose gradings all fail has equal rewards, so that a refill replaces it.
        "grading_failed": sum("grading_failed" in score for score in scores),
    }


def collate_groups(groups: Sequence[Group], config: RolloutConfig, pad_token_id: int) -> Rollout:
    """All completions as one padded batch, with rewards that include length penalties, but without
    advantages yet."""
    completions = flatten_completions(groups)
    scores = flatten_scores(groups)
    prompt_ids = [completion.prompt_ids for completion in completions]
    response_ids = [completion.token_ids for completion in completions]
    batch = collate(prompt_ids, response_ids, pad_token_id)
    rewards_B1 = torch.tensor([[score["reward"]] for score in scores], dtype=torch.float32)
    penalties_B1 = torch.tensor(
        [[length_penalty(completion, config)] for completion in completions]
    )
    log_probs = itertools.chain.from_iterable(completion.log_probs for completion in completions)
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor(list(log_probs))
    counted = []
    for completion, score in zip(completions, scores, strict=True):
        counted.append([is_counted(completion, score, config)])
    counted_B1 = torch.tensor(counted)
    key = find_task(config.task, config.data).key
    problems: list[str] = []
    for group in groups:
        problems += [key(group.problem)] * len(group.completions)
    return Rollout(
        batch,
        rewards_B1 + penalties_B1,
        counted_B1,
        sampler_BT,
        problems=tuple(problems),
    )


def with_advantages(
    rollout: Rollout, config: AdvantageConfig, state: object = None, step: int = 1
) -> Rollout:
    """The rollout with `advantages_B1`, by an estimator that has `state` of the steps before, and
    the `advantage_state` after it; unchanged where groups are smaller than the estimator needs, as
    those of one response, which has no advantage over others."""
    if config.group_size < config.smallest_group:
        return rollout
    rewards_B1 = rollout.raw_rewards_B1
    inputs = advantage_inputs(
        rewards_B1, rollout.counted_B1, config, rollout.lengths, rollout.problems, step
    )
    advantages_PG, next_state = compute_advantages(inputs, state)
    return dataclasses.replace(
        rollout,
        advantages_B1=advantages_PG.reshape(-1, 1).to(rewards_B1.dtype),
        advantage_state=next_state,
    )


def length_penalty(completion: Completion, config: RolloutConfig) -> float:
    """What is added to a completion's reward for its length, 0 or less."""
    return overlong_penalty(
        len(completion.token_ids), config.sampling.max_new_tokens, config.overlong_buffer
    )


def is_counted(completion: Completion, score: Score, config: RolloutConfig) -> bool:
    """Whether a response enters baselines and updates: it must have a score and, with
    --skip_unfinished, have ended before the length limit."""
    ended = completion.finish_reason == "stop" or not config.skip_unfinished
    return ended and "unscored" not in score


class SyncRollouts:
    """Rollouts that are sampled when the loop asks for them, while the trainer waits."""

    def __init__(self, source: RolloutSource, sampler: Sampler, clock: Clock):
        self.source = source
        self.sampler = sampler
        self.clock = clock

    def next(self, step: int) -> SampledStep:
        """The sampled and scored groups of a step. Afterwards a sampler that shares a GPU sleeps
        and drops its weights, since the update makes new ones."""
        # A sampler or reward of the user's own may draw from torch's global generator.
        torch.manual_seed(derived_seed(self.source.config.seed, step))
        self.clock.begin("sampling")
        sampled = self.source.sample_step(step, self.sampler)
        put_to_sleep(self.sampler, keep_weights=False)
        check_staleness(sampled, 0)
        self.clock.seconds |= sampled.seconds
        return sampled

    @contextmanager
    def syncing(self, policy: Policy, step: int) -> Iterator[None]:
        """While the block runs, give the sampler the policy's weights after `step` steps, in a
        thread. It stays awake with them."""
        self.clock.begin("sync")
        with run_in_background(lambda: self._give_weights(policy, step), self.clock("sync")):
            yield

    def _give_weights(self, policy: Policy, version: int) -> None:
        """Replace the sampler's weights by the policy's."""
        load_proven(self.sampler, policy.weights(), version)

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """The rollouts of later steps that are sampled already, with weights older than those of
        `step`."""
        return []


def check_staleness(sampled: SampledStep, most: int) -> None:
    """Raise RuntimeError for a rollout that was sampled with weights more than `most` steps behind
    those it trains, or with later ones."""
    if not 0 <= sampled.step - 1 - sampled.policy_version <= most:
        raise RuntimeError(
            f"step {sampled.step} got a rollout by version {sampled.policy_version};"
            f" --max_staleness is {most}"
        )


class AheadRollouts(SyncRollouts):
    """Rollouts that a thread samples ahead of the updates, each with the version of the weights
    that the `Schedule` says.

    The first step is the one after the version that the sampler holds. `sampled` are the rollouts
    of the first steps where a checkpoint has them; `on_sampled` is called with each new one. The
    engines of `pool` are in other processes, so `close` can end them while they draw. If the thread
    fails, `next` raises its error in place of the missing rollout."""

    def __init__(
        self,
        source: RolloutSource,
        pool: SamplerPool,
        schedule: Schedule,
        clock: Clock,
        sampled: Sequence[SampledStep] = (),
        on_sampled: Callable[[SampledStep], None] = lambda sampled: None,
    ):
        super().__init__(source, pool, clock)
        self._dtype = pool.dtype
        self._schedule = schedule
        self._on_sampled = on_sampled
        self._steps = range(pool.policy_version + 1 + len(sampled), schedule.num_steps + 1)
        steps = [*(rollout.step for rollout in sampled), *self._steps]
        self._sampled: dict[int, Future[SampledStep]] = {step: Future() for step in steps}
        for rollout in sampled:
            self._sampled[rollout.step].set_result(rollout)
        # Version of the weights -> their copy in the host's memory, which the thread waits for.
        self._weights: dict[int, Future] = {
            schedule.version_for(step): Future() for step in self._steps
        }
        self._thread = threading.Thread(target=self._sample_ahead, daemon=True)
        self._thread.start()

    def next(self, step: int) -> SampledStep:
        """See `SyncRollouts.next`. Waits for the thread, and keeps the rollout until its step is
        done (`syncing`)."""
        self.clock.begin("wait")
        sampled = self._sampled[step].result()
        check_staleness(sampled, self._schedule.max_staleness)
        self.clock.seconds |= {"wait": self.clock.elapsed()}
        staleness = step - 1 - sampled.policy_version
        return dataclasses.replace(sampled, report=sampled.report | {"staleness": staleness})

    def _give_weights(self, policy: Policy, version: int) -> None:
        """Copy the weights for the thread, if it will sample a later step with them. This does not
        wait for the sampler."""
        del self._sampled[version]  # Step `version` has made these weights, so it is done.
        if version in self._weights:
            copies = []
            for name, tensor in policy.weights():
                cast = tensor.detach().to(self._dtype)
                copies.append((name, cast.to("cpu", copy=True)))
            self._weights[version].set_result(copies)

    def sampled_ahead(self, step: int) -> Sequence[SampledStep]:
        """See `SyncRollouts.sampled_ahead`. A checkpoint must hold these rollouts, because a
        resumed run has no weights older than `step`. Waits for those that are under way."""
        sampled = []
        for later in range(step + 1, self._steps.stop):
            if self._schedule.version_for(later) < step:
                sampled.append(self._sampled[later].result())
        return sampled

    def close(self) -> None:
        """End the engines, and with them the thread."""
        for weights in list(self._weights.values()):  # The thread may remove some at this moment.
            weights.cancel()
        self.sampler.close()
        self._thread.join(GRACE_SECONDS)

    def _sample_ahead(self) -> None:
        """Sample rollout after rollout, each with its version of the weights. An error ends the
        thread, and becomes the error of that rollout and of all later ones."""
        for step in self._steps:
            try:
                version = self._schedule.version_for(step)
                if self.sampler.policy_version < version:
                    load_proven(self.sampler, self._weights[version].result(), version)
                    del self._weights[version]
                sampled = self.source.sample_step(step, self.sampler)
                self._on_sampled(sampled)
                self._sampled[step].set_result(sampled)
            # A task of the user's own may call sys.exit.
            except (Exception, SystemExit) as error:
                reason = f"sampling ahead failed: {type(error).__name__}: {error}"
                stop: BaseException = error
                if not isinstance(error, UserError):
                    stop = failure_of_users_code(error) or RunStopped(reason)
                for later in range(step, self._steps.stop):
                    self._sampled[later].set_exception(stop)
                return
