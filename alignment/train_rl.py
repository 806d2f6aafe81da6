"""Reinforcement learning on verifiable rewards: sample, score, collate, normalise, update, sync,
repeat.

uv run -m alignment.train_rl --loss_type grpo_clip"""

from pathlib import Path

from rich.console import Console

from alignment.args import RLArgs, parse
from alignment.builders.checks import check_rl, resumed_if_restarted, run_config
from alignment.runs.run import open_run
from alignment.system.errors import run_command
from alignment.system.terminal import make_console
from alignment.system.torchrun import followed


def train(args: RLArgs, console: Console) -> Path:
    """Train, and return the run's folder. Raises `UserError` for mistakes, if possible before a
    model loads."""
    rollout_config, update_config = args.rollout_config, args.update_config
    with open_run(
        run_config(args), console
    ) as run:  # locks and resumes the folder; saves a checkpoint when stopped
        # Imported here, because these modules load torch: `check_rl` and `open_run` report mistakes
        # first.
        from alignment.builders.prediction import expected_peaks
        from alignment.builders.training import build
        from alignment.rollouts.source import collate_groups, with_advantages
        from alignment.training.update import update

        run.measure_memory = expected_peaks(args, console)  # warns where memory is short
        policy, rollouts, references, evaluator, pad_id = build(args, run)
        evaluator.run_if_due(run.step)
        for step in run.steps():
            sampled = rollouts.next(step)  # sample and score
            run.log_state(sampled)  # with --log_state
            rollout = collate_groups(sampled.groups, rollout_config, pad_id)
            rollout = with_advantages(rollout, update_config.advantage)  # reward - baseline, / std
            # old and reference log-probs, if the loss needs them
            rollout = references.annotate(rollout, policy, step)
            with run.clock("update"):  # gradient of the loss, clipped, and optimiser steps
                result = update(
                    policy,
                    rollout,
                    update_config,
                    step,
                    steps_old=step - 1 - sampled.policy_version,
                )
            # the sampler takes the new weights while the step is logged
            with rollouts.syncing(policy, step):
                run.log_completions(sampled, rollout, result)
            run.log_step(sampled, rollout, result)
            evaluator.run_if_due(step)
            run.save_if_due()
        run.finish(f"sampled at T={args.sampling_temperature:g}")
    return run.path


def main() -> None:
    args = resumed_if_restarted(parse(RLArgs))
    if followed(args.rank_timeout):
        return
    check_rl(args)
    if args.preview:
        from alignment.preview import preview_problems

        return preview_problems(
            args, args.sft_base if Path(args.sft_base or "-").exists() else args.model
        )
    train(args, make_console())


if __name__ == "__main__":
    run_command(main)
