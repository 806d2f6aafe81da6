"""Reinforcement learning on verifiable rewards: sample, score, normalise, collate, step, sync, and again.

uv run -m alignment.train_rl --loss_type grpo_clip
"""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from alignment import sft
from alignment.args import RLArgs, SFTArgs, as_command, parse, refuse_missing_warm_start
from alignment.core.losses import USES_OLD_POLICY
from alignment.core.records import Endless
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import eval_problems, eval_sampling, evaluate_vllm
from alignment.policy.loading import (
    compute_dtype,
    context_length,
    load_config,
    load_model,
    load_tokenizer,
    make_deterministic,
    make_optimizer,
    resolve_model,
    roles_of,
)
from alignment.policy.memory import fit
from alignment.rewards.reward import evaluation_reward, find_reward
from alignment.rollouts.ahead import AsyncRollouts
from alignment.rollouts.batches import collate_groups, make_rollout, per_response
from alignment.rollouts.collect import InlineRollouts, refuse_too_old, training_source
from alignment.rollouts.prompts import derived_seed
from alignment.runs.checkpoint import (
    checkpoint_folder,
    drop_old_checkpoints,
    load_optimizer,
    load_rollouts,
    save_checkpoint,
    save_model,
)
from alignment.runs.clock import Clock
from alignment.runs.open_run import resume, save_bad_batches, saved_when_stopped
from alignment.runs.run_folder import RunFolder, claim_run_folder, refuse_taken_name, resumed_run_name, write_args
from alignment.runs.summary import report
from alignment.sampling.sampler import encode_prompts, make_rollout_sampler, make_sampler, refuse_missing_engine
from alignment.system import signals
from alignment.system.background import run_in_background
from alignment.system.errors import run_command
from alignment.system.files import atomic_folder, lock_run_folder, read_jsonl
from alignment.system.terminal import make_console, progress_line
from alignment.training.health import Watch, log_warnings, stop_if_hopeless
from alignment.training.mismatch import SamplerMismatchCheck, sampler_mismatch
from alignment.training.references import OldPolicy, needs_old_policy, open_reference, rows_with_gradient
from alignment.training.update import update


def train(args: RLArgs, console: Console) -> Path:
    """Run the whole of it; returns the run's folder. Raises `UserError` before any model loads where that can be known."""
    refuse_missing_engine(args)
    task = find_task(args.task)
    held_out, rule = eval_problems(task, args), evaluation_reward(args.reward, task.rules)
    task.problems("train", args.dataset_path), find_reward(args.reward, task.rules)  # what is wrong with them is said first
    roles = roles_of(args)
    name = f"{args.preset}_{args.loss_type}_seed{args.seed}"
    with contextlib.ExitStack() as closing:
        path, done = None, 0
        if args.resume:
            path = Path(args.output_dir) / resumed_run_name(args, name)
            closing.enter_context(lock_run_folder(path))
            done = resume(path, args, console)
        else:
            refuse_taken_name(args)
        base = str(checkpoint_folder(path, done)) if done else warm_start(args, console)
        tokenizer, context = load_tokenizer(base), context_length(load_config(base))
        source, held_out = training_source(args, tokenizer), prompted(held_out, args.prompt or task.prompt, tokenizer)
        longest = max(args.max_new_tokens, args.eval_max_new_tokens)
        known = held_out if isinstance(source.problems, Endless) else [*source.problems, *held_out]
        encoded = encode_prompts(tokenizer, [problem.prompt for problem in known], context, longest)  # all of them fit
        make_deterministic(args)
        policy = load_model(base, roles.policy, torch.float32)
        optimizer = make_optimizer(policy, args.learning_rate, args.weight_decay, args.optimizer)
        if done:
            load_optimizer(checkpoint_folder(path, done), optimizer)
        dtype = compute_dtype(args, roles.policy[0])
        console.print(f"matrix products in {dtype} (--dtype), {torch.get_num_threads()} threads (OMP_NUM_THREADS)")
        old_policy = OldPolicy(policy, base, roles, dtype) if needs_old_policy(args) else None
        if args.loss_type in USES_OLD_POLICY and old_policy is None and not args.trusts_sampler:
            console.print("one update a rollout: the ratio to the old policy is 1 by construction, its forward pass is skipped")
        start = warm_start(args, console) if done and args.beta else base
        reference = open_reference(args, start, roles, dtype, closing)
        eval_sampler = make_sampler(args, base, tokenizer, roles.eval, roles, policy, policy_version=done)
        closing.callback(eval_sampler.close)
        rows = max(map(len, encoded)) + args.max_new_tokens
        before = read_jsonl(path / "metrics.jsonl")[-1]["micro_batch_tokens"] if done else 0
        fitted = fit(policy, args, rows, console, dtype, optimizer, before)
        if args.rollouts == "async":
            rollouts = AsyncRollouts(fitted, base, done, load_rollouts(Path(base)) if done else [], dtype, reference)
            closing.callback(rollouts.close)
        else:
            sampler = eval_sampler
            if roles.sample != roles.eval or args.sampler_url:
                sampler = make_rollout_sampler(args, base, tokenizer, roles, policy.named_parameters, policy, done)
                closing.callback(sampler.close)
            rollouts = InlineRollouts(source, sampler)
        if path is None:
            path = claim_run_folder(args, name)
            closing.enter_context(lock_run_folder(path))
        else:
            write_args(path, args)
        run = RunFolder(path, done)
        closing.callback(run.close)

        def evaluate_if_due(step: int) -> None:
            """A run may have been stopped between a step and its evaluation, so what counts is whether there is one."""
            if step in run.evaluated or (step % args.eval_interval and step < args.num_steps):
                return
            if eval_sampler.policy_version != step:
                eval_sampler.load_weights(policy.named_parameters(), step)
            how = eval_sampling(task, args, max_new_tokens=args.eval_max_new_tokens)
            evaluation = evaluate_vllm(eval_sampler, rule, held_out, how, task.rules)
            if eval_sampler is not rollouts.sampler:
                sampler_mismatch(policy, collate_groups(evaluation.groups, pad_token_id(tokenizer)), args, dtype)
            run.log_completions("eval", step, evaluation.groups)
            run.log_eval({"step": step, **evaluation.record()})

        def save(step: int) -> None:
            run.flush()
            save_checkpoint(checkpoint_folder(path, step), policy, tokenizer, optimizer, rollouts.ahead(step))
            drop_old_checkpoints(path, args.keep_checkpoints, spared=done)  # from which a lost sampler may be started again

        counted, watch = 0, Watch(read_jsonl(path / "metrics.jsonl"), args)
        with (
            progress_line("RL", args.num_steps, console) as progress,
            saved_when_stopped(path, args, lambda: watch.step, save, console),
        ):
            evaluate_if_due(done)
            for step in range(done + 1, args.num_steps + 1):
                clock = Clock()
                drawn = rollouts.next(step)
                refuse_too_old(drawn, args.staleness)
                clock.seconds |= drawn.seconds if args.rollouts == "sync" else {"wait": clock.elapsed()}
                torch.manual_seed(derived_seed(args.seed, step))
                rollout = make_rollout(drawn.groups, args, pad_token_id(tokenizer))
                if args.trusts_sampler:
                    rollout = dataclasses.replace(rollout, old_log_probs_BT=rollout.sampler_log_probs_BT)
                if old_policy is not None:
                    with clock("old_log_probs"):
                        rollout = old_policy.annotate(rollout, fitted)
                if reference is not None:
                    with clock("reference"):
                        rollout = reference.annotate(rollout, fitted, f"step-{step}")
                with clock("update"):
                    gate = SamplerMismatchCheck(rollout, args, step - 1 - drawn.policy_version)
                    updates, first_pass_BT, bad = update(policy, optimizer, rollout, fitted, step, dtype, gate.check)
                signals.defer_signals()
                with run_in_background(partial(rollouts.load_weights, policy.named_parameters(), step), clock("sync")):
                    trainer_BT = first_pass_BT if old_policy is None else rollout.old_log_probs_BT
                    computed = rows_with_gradient(rollout, args)
                    run.log_completions("rollout", step, drawn.groups, per_response(trainer_BT, rollout, computed))
                    save_bad_batches(path, rollout, step, bad)
                restarts = sum(each.restarts for each in {rollouts.sampler or rollouts, eval_sampler, reference} - {None})
                record = {
                    "step": step,
                    "micro_batch_tokens": fitted.micro_batch_tokens,
                    **updates,
                    **drawn.report,
                    **gate.found,
                    "restarts": restarts - counted,
                }
                record |= {"staleness": gate.steps_old} if args.rollouts == "async" else {}
                counted = restarts
                run.log_step(log_warnings(watch, {**record, **clock.report(rollout, drawn, updates)}, console))
                signals.deliver_signals()
                progress(step, f"reward {record['reward']:.2f}, format {record['format_reward']:.2f}")
                stop_if_hopeless(watch.last, args)
                evaluate_if_due(step)
                if step % args.save_interval == 0 or step == args.num_steps:
                    save(step)
        with atomic_folder(path / "final") as building:
            save_model(building, policy, tokenizer)
        report(path, args, console)
    return path


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or name of the model that training starts from, made by SFT where the preset says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if not Path(args.sft_base).exists():
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once", markup=False)
        # One warm start for every run, whatever the seed of the one that happens to come first.
        try:
            sft.train(dataclasses.replace(as_command(SFTArgs, args), seed=RLArgs.seed), console)
        except sft.MadeMeanwhile:
            console.print(f"another command has made {args.sft_base} meanwhile", markup=False)
    console.print(f"starting from {args.sft_base}", markup=False)
    return resolve_model(args.sft_base, args.output_dir, "--sft_base")


def main() -> None:
    args = parse(RLArgs)
    console = make_console()
    train(args, console)


if __name__ == "__main__":
    run_command(main)
