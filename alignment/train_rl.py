"""Reinforcement learning on verifiable rewards: sample, score, normalise, collate, step, sync, and again.

uv run -m alignment.train_rl --loss_type grpo_clip
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from alignment import sft
from alignment.args import RLArgs, SFTArgs, as_command, parse, refuse_missing_warm_start
from alignment.checkpoint import (
    checkpoint_folder,
    drop_old_checkpoints,
    last_step,
    load_optimizer,
    save_checkpoint,
    save_model,
)
from alignment.errors import UserError, door
from alignment.evaluate import eval_problems, eval_sampling, evaluate_vllm
from alignment.files import atomic_folder, write_atomically
from alignment.grpo import USES_OLD_POLICY
from alignment.models import (
    compute_dtype,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    make_optimizer,
    resolve_model,
    roles_of,
)
from alignment.policy_update import OldPolicy, needs_old_policy, update
from alignment.rewards import REWARDS, evaluation_reward, score_groups
from alignment.rollouts import (
    Rollout,
    collate_groups,
    derived_seed,
    make_rollout,
    per_response,
    problems_of_step,
    refuse_stale,
    rollout_report,
    rollout_sampling,
    sampler_mismatch,
)
from alignment.samplers import encode_prompts, make_sampler
from alignment.tasks import find_task
from alignment.tokens import pad_token_id, row_lengths
from alignment.tracking import (
    RunFolder,
    claim_run_folder,
    plot_learning_curve,
    printable,
    read_jsonl,
    refuse_taken_name,
    resumed_run_name,
)


def train(args: RLArgs, console: Console) -> Path:
    """Run the whole of it; returns the run's folder. Raises `UserError` before any model loads where that can be known."""
    task = find_task(args.task)
    problems, held_out = task.problems("train", args.dataset_path), eval_problems(task, args)
    roles = roles_of(args)
    name = f"{args.preset}_{args.loss_type}_seed{args.seed}"
    path, done = resumed_run(args, name) if args.resume else (None, 0)
    if path is None:
        refuse_taken_name(args)
    base = str(checkpoint_folder(path, done)) if done else warm_start(args, console)
    tokenizer, context = load_tokenizer(base), context_length(load_config(base))
    encode_prompts(tokenizer, [p.prompt for p in (*problems, *held_out)], context, args.max_new_tokens)  # all of them fit
    policy = load_model(base, roles.policy, torch.float32)
    optimizer = make_optimizer(policy, args.learning_rate, args.weight_decay)
    if done:
        load_optimizer(checkpoint_folder(path, done), optimizer)
    dtype = compute_dtype(args, roles.policy[0])
    old_policy = OldPolicy(policy, base, roles, dtype) if needs_old_policy(args) else None
    if args.loss_type in USES_OLD_POLICY and old_policy is None:
        console.print("one update a rollout: the ratio to the old policy is 1 by construction, its forward pass is skipped")
    sampler = make_sampler(args, base, tokenizer, roles.sample, roles, policy)
    eval_sampler = sampler if roles.eval == roles.sample else make_sampler(args, base, tokenizer, roles.eval, roles, policy)
    path = path or claim_run_folder(args, name)
    run = RunFolder(path, done or None)
    run.log_args(args)

    def evaluate(step: int) -> None:
        if eval_sampler is not sampler:
            eval_sampler.load_weights(policy.named_parameters(), step)
        evaluation = evaluate_vllm(eval_sampler, evaluation_reward(args.reward), held_out, eval_sampling(task, args))
        if eval_sampler is not sampler:
            sampler_mismatch(policy, collate_groups(evaluation.groups, pad_token_id(tokenizer)), args, dtype)
        run.log_completions("eval", step, evaluation.groups)
        run.log_eval({"step": step, **evaluation.record()})

    try:
        sampler.load_weights(policy.named_parameters(), done)
        with progress_line(args, console) as progress:
            if not done:
                evaluate(0)
            for step in range(done + 1, args.num_steps + 1):
                clock = Clock()
                torch.manual_seed(derived_seed(args.seed, step))
                asked = problems_of_step(problems, args, step)
                with clock("sample"):
                    completions = sampler.sample([problem.prompt for problem in asked], rollout_sampling(task.stop, args, step))
                refuse_stale(completions, policy_version=step - 1)
                with clock("score"):
                    groups = score_groups(asked, completions, REWARDS[args.reward])
                rollout = make_rollout(groups, args, pad_token_id(tokenizer))
                with clock("gate"):
                    mismatch = sampler_mismatch(policy, rollout, args, dtype)
                if old_policy is not None:
                    with clock("old_log_probs"):
                        rollout = old_policy.annotate(rollout, args)
                with clock("update"):
                    report, first_pass_BT = update(policy, optimizer, rollout, args, step, dtype)
                with clock("sync"):
                    sampler.load_weights(policy.named_parameters(), step)
                record = {"step": step, **report, **rollout_report(groups, args), **mismatch, **clock.report(rollout)}
                trainer_BT = first_pass_BT if old_policy is None else rollout.old_log_probs_BT
                run.log_completions("rollout", step, groups, per_response(trainer_BT, rollout.batch.response_mask))
                run.log_step(record)
                progress(record)
                if step % args.eval_interval == 0 or step == args.num_steps:
                    evaluate(step)
                if step % args.save_interval == 0 or step == args.num_steps:
                    save_checkpoint(checkpoint_folder(path, step), policy, tokenizer, optimizer)
                    drop_old_checkpoints(path, args.keep_checkpoints)
        with atomic_folder(path / "final") as building:
            save_model(building, policy, tokenizer)
    finally:
        sampler.close()
        eval_sampler.close()
        run.close()
    return path


# --- before the loop ----------------------------------------------------------------------------------------------


def resumed_run(args: RLArgs, default: str) -> tuple[Path, int]:
    """The folder of the run to resume and the steps it has done. Raises `UserError` where it cannot go on as asked."""
    path = Path(args.output_dir) / resumed_run_name(args, default)
    try:
        before = json.loads((path / "args.json").read_text())["args"]
    except (ValueError, KeyError):
        raise UserError(f"--resume: {path / 'args.json'} is damaged, so it cannot be told how the run was started") from None
    free = {"resume", "run_name", "num_steps", "save_interval", "keep_checkpoints"}
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    changed = [
        f"--{key} was {before.get(key)!r}, now {value!r}"
        for key, value in now.items()
        if before.get(key) != value and key not in free
    ]
    if changed:
        raise UserError(f"--resume: {path} was started with other arguments: {'; '.join(changed)}")
    done = last_step(path)
    if done > args.num_steps or (done == args.num_steps and (path / "summary.json").exists()):
        raise UserError(f"--resume: {path} has already done {done} of --num_steps {args.num_steps}")
    # What a shorter run ended with; its model is still there as its last checkpoint.
    (path / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(path / "final", ignore_errors=True)
    return path, done


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or name of the model that training starts from, made by SFT where the preset says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if not Path(args.sft_base).exists():
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once", markup=False)
        # One warm start for every run, whatever the seed of the one that happens to come first.
        sft.train(dataclasses.replace(as_command(SFTArgs, args), seed=RLArgs.seed), console)
    console.print(f"starting from {args.sft_base}", markup=False)
    return resolve_model(args.sft_base, args.output_dir)


# --- around the loop ------------------------------------------------------------------------------------------------


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self):
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = time.perf_counter() - start

    def report(self, rollout: Rollout) -> dict[str, float]:
        """Seconds by phase, and tokens a second: those sampled, and those, prompts included, that an update went over."""
        sampled, trained = sum(rollout.lengths), sum(row_lengths(rollout.batch))
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()},
            "seconds": time.perf_counter() - self.start,
            "tokens_per_second_sample": sampled / self.seconds["sample"],
            "tokens_per_second_update": trained / self.seconds["update"],
        }


@contextmanager
def progress_line(args: RLArgs, console: Console):
    """A line with the reward and the time left; gives the function that moves it on."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("RL", total=args.num_steps)

        def advance(record: dict) -> None:
            words = f"RL, reward {record['reward']:.2f}, format {record['format_reward']:.2f}"
            progress.update(bar, completed=record["step"], description=words)

        yield advance


def report(path: Path, args: RLArgs, console: Console) -> None:
    """Draw the learning curve, write summary.json, and print the run's before and after."""
    evals, metrics = read_jsonl(path / "evals.jsonl"), read_jsonl(path / "metrics.jsonl")
    before, after = evals[0], evals[-1]
    plot_learning_curve(path / "learning_curve.png", metrics, evals, path.name)
    table = Table(title=f"{path.name}: {after['problems']} held-out problems, sampled at T={args.sampling_temperature:g}")
    for heading in ("", "before", "after"):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_row("accuracy", *(_with_interval(e) for e in (before, after)))
    table.add_row("format rate", *(f"{e['avg_format_rewards']:.3f}" for e in (before, after)))
    table.add_row("mean length (tokens)", *(f"{e['response_length']:.1f}" for e in (before, after)))
    table.add_row("seconds of RL", "", f"{sum(m['seconds'] for m in metrics):.0f}")
    console.print(table)
    first, last = (read_jsonl(path / "completions" / f"eval_{e['step']:06d}.jsonl") for e in (before, after))
    pairs = list(zip(first, last, strict=True))
    changed = next((pair for pair in pairs if pair[0]["score"]["reward"] != pair[1]["score"]["reward"]), pairs[0])
    console.print(f"the first problem whose outcome changed: {printable(changed[0]['question'])}", markup=False)
    for label, record in zip(("before", "after"), changed, strict=True):
        console.print(f"  {label}: <think>{printable(record['text'])}", markup=False, highlight=False)
    console.print(f"learning curve: {path / 'learning_curve.png'}\nmodel: {path / 'final'}", markup=False)
    # Last, because a run with a summary counts as finished.
    summary = {"before": before, "after": after, "steps": len(metrics), "seconds": sum(m["seconds"] for m in metrics)}
    write_atomically(path / "summary.json", json.dumps(summary, indent=2) + "\n")


def _with_interval(record: dict) -> str:
    low, high = record["avg_all_rewards_ci"]
    return f"{record['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    args = parse(RLArgs)
    console = Console()
    report(train(args, console), args, console)


if __name__ == "__main__":
    door(main)
