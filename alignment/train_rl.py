"""Reinforcement learning on verifiable rewards: `uv run -m alignment.train_rl`."""

from pathlib import Path

from rich.console import Console

from alignment.args import RLArgs, parse
from alignment.builders.announcements import open_rl_run
from alignment.builders.checks import check_rl, resumed_if_restarted
from alignment.system.errors import run_command
from alignment.system.terminal import make_console
from alignment.system.torchrun import followed


def train(args: RLArgs, console: Console) -> Path:
    """Train and return the run's folder. Raises `UserError`, if possible before a model loads."""
    with open_rl_run(args, console) as run:  # locks and resumes; saves when stopped
        from alignment.builders.training import build  # these modules load torch
        from alignment.rollouts.source import collate_groups, with_advantages
        from alignment.training.update import update

        parts = build(args, run)
        policy = parts.policy
        config = parts.update_config
        parts.evaluator.run_if_due(run.last_step)
        for step in run.steps():
            with run.step(step) as defer_signals:
                sampled = parts.rollouts.next(step)  # sample and score
                run.log_state(sampled)  # with --log_state
                rollout = collate_groups(sampled.groups, args.rollout_config, parts.pad_token_id)
                rollout = with_advantages(rollout, config.advantage, run.advantage_state, step)
                rollout = parts.references.annotate(rollout, policy, step)  # their log-probs
                with run.clock("update"):  # gradient of the loss, clipped, and optimiser steps
                    result = update(policy, rollout, config, step, sampled.staleness, defer_signals)
                config = result.config  # --entropy_target adapts it
                defer_signals()  # until the step is logged, also where nothing was updated
                run.advantage_state = rollout.advantage_state
                with parts.rollouts.syncing(policy, step):  # the sampler takes the weights
                    run.log_completions(sampled, rollout, result)
                run.log_step(sampled, rollout, result)
            parts.evaluator.run_if_due(step)
            run.save_if_due(parts.references.reset)  # --reference_reset_interval
        run.finish(args.evaluation_rule)
    return run.path


def main() -> None:
    args = resumed_if_restarted(parse(RLArgs))
    if followed(args.rank_timeout):
        return
    check_rl(args)
    if args.preview:
        from alignment.preview import preview_run

        return preview_run(args)
    train(args, make_console(args.quiet))


if __name__ == "__main__":
    run_command(main)
