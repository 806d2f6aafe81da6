"""Small rollouts of the tiny model for the tests of rollouts and of training."""

import dataclasses

from alignment.args import RLArgs, from_preset
from alignment.core.records import Group, Problem, Rollout, SamplingConfig
from alignment.data.tasks import arithmetic
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rewards.rules import score_groups
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.system.clock import Clock
from alignment.training.update import References

ARGS = from_preset(
    RLArgs, "tiny", prompts_per_rollout=4, group_size=4, train_mini_batch_size=0, learning_rate=1e-2
)


def open_tiny(folder, micro_batch_tokens: int = 0) -> SingleDevicePolicy:
    """The tiny model of a folder as a policy on the CPU."""
    return SingleDevicePolicy(
        PolicyConfig(str(folder), ("cpu",), "float32", micro_batch_tokens=micro_batch_tokens)
    )


def parity_reward(text: str, ground_truth: str) -> dict[str, float]:
    """A reward that differs within a group, so that an untrained model has something to learn from.
    An untrained model's responses often have one length, so all their letters count."""
    return {"reward": float(sum(map(ord, text)) % 2), "format_reward": 1.0, "answer_reward": 0.0}


def rollout_of(groups: list[Group], args: RLArgs, pad: int = 1) -> Rollout:
    """The rollout of some groups, with advantages."""
    return with_advantages(
        collate_groups(groups, args.rollout_config, pad), args.update_config.advantage
    )


def problems_of(args: RLArgs, step: int = 1) -> list[Problem]:
    """The problems of a step of the arithmetic task."""
    return problems_of_step(arithmetic.problems("train"), args.prompts_per_rollout, args.seed, step)


def sample_rollout(sampler, **distribution) -> Rollout:
    """Four prompts with four responses each, scored by `parity_reward`."""
    problems = problems_of(ARGS)
    sampling = SamplingConfig(n=4, max_new_tokens=12, seed=1, **distribution)
    completions = sampler.sample([problem.prompt for problem in problems], sampling)
    return rollout_of(score_groups(problems, completions, parity_reward), ARGS)


def with_old_log_probs(rollout: Rollout, policy, args: RLArgs, old_policy=None) -> Rollout:
    """The rollout with the old policy's log-probs, from a pass before the first update."""
    config = dataclasses.replace(args.update_config, old_log_probs="policy")
    return References(config, old_policy, None, Clock()).annotate(rollout, policy, 1)
