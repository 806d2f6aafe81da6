"""Reinforcement learning on verifiable rewards: sample, score, normalise, collate, step, sync, and again.

uv run -m alignment.train_rl --loss_type grpo_clip
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from alignment import interrupts, sft
from alignment.args import RLArgs, SFTArgs, as_command, command_line, parse, refuse_missing_warm_start
from alignment.async_rollouts import AsyncRollouts
from alignment.checkpoint import (
    checkpoint_folder,
    drop_old_checkpoints,
    full_disk_is_an_os_error,
    last_whole_step,
    load_optimizer,
    load_rollouts,
    put_aside,
    save_checkpoint,
    save_model,
)
from alignment.errors import RunStopped, UserError, door
from alignment.evaluate import eval_problems, eval_sampling, evaluate_vllm
from alignment.files import atomic_folder, held, read_json, read_jsonl, write_atomically
from alignment.grpo import USES_OLD_POLICY
from alignment.interrupts import Interrupted
from alignment.memory import fit
from alignment.models import (
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
from alignment.policy_update import OldPolicy, Seen, needs_old_policy, open_reference, rows_with_gradient, update
from alignment.prompts import prompted
from alignment.records import Endless
from alignment.rewards import evaluation_reward, find_reward
from alignment.rollouts import (
    Drawn,
    InlineRollouts,
    Rollout,
    collate_groups,
    derived_seed,
    make_rollout,
    mismatch,
    per_response,
    refuse_too_old,
    sampler_mismatch,
    training_source,
)
from alignment.samplers import encode_prompts, make_rollout_sampler, make_sampler, refuse_missing_engine
from alignment.tasks import find_task
from alignment.tokens import pad_token_id, take_rows
from alignment.tracking import (
    RunFolder,
    claim_run_folder,
    plot_learning_curve,
    printable,
    progress_line,
    refuse_taken_name,
    resumed_run_name,
    write_args,
)
from alignment.watch import Watch, concerns, refuse_lost_cause, slowness


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
            closing.enter_context(held(path))
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
            closing.enter_context(held(path))
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
                    gate = Gate(rollout, args, step - 1 - drawn.policy_version)
                    updates, first_pass_BT, bad = update(policy, optimizer, rollout, fitted, step, dtype, gate.check)
                interrupts.hold()
                with meanwhile(partial(rollouts.load_weights, policy.named_parameters(), step), clock("sync")):
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
                run.log_step(watched(watch, {**record, **clock.report(rollout, drawn, updates)}, console))
                interrupts.release()
                progress(step, f"reward {record['reward']:.2f}, format {record['format_reward']:.2f}")
                refuse_lost_cause(watch.last, args)
                evaluate_if_due(step)
                if step % args.save_interval == 0 or step == args.num_steps:
                    save(step)
        with atomic_folder(path / "final") as building:
            save_model(building, policy, tokenizer)
        report(path, args, console)
    return path


# --- before the loop ----------------------------------------------------------------------------------------------


def resume(path: Path, args: RLArgs, console: Console) -> int:
    """The steps that a run which is to go on has done. Raises `UserError` where it cannot go on as asked."""
    before = read_json(path / "args.json").get("args")
    if not isinstance(before, dict):
        raise UserError(f"--resume: {path / 'args.json'} is damaged, so it cannot be told how the run was started")
    free = {"resume", "run_name", "num_steps", "save_interval", "keep_checkpoints", "sampler_timeout", "max_bad_steps"}
    free |= {"max_grader_failures"}
    now = json.loads(json.dumps(dataclasses.asdict(args)))
    changed = [
        f"--{key} was {before.get(key)!r}, now {value!r}"
        for key, value in now.items()
        if before.get(key) != value and key not in free
    ]
    if changed:
        raise UserError(f"--resume: {path} was started with other arguments: {'; '.join(changed)}")
    finished = read_json(path / "summary.json").get("steps", 0) if (path / "summary.json").exists() else 0
    done, damaged = (finished, []) if finished >= args.num_steps else last_whole_step(path)
    if finished >= args.num_steps or done > args.num_steps:
        raise UserError(f"--resume: {path} has already done {done} of --num_steps {args.num_steps}")
    for wrong in damaged:
        console.print(f"{wrong}; it is put aside, and step {done} is gone on from", style="red", markup=False, soft_wrap=True)
    put_aside(path, after=done)
    # What a shorter run ended with; its model is still there as its last checkpoint.
    (path / "summary.json").unlink(missing_ok=True)
    shutil.rmtree(path / "final", ignore_errors=True)
    return done


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


# --- around the loop ------------------------------------------------------------------------------------------------


@contextmanager
def saved_when_stopped(
    path: Path, args: RLArgs, steps_done: Callable[[], int], save: Callable[[int], None], console: Console
) -> Iterator[None]:
    """Save what is done when a signal or a lost cause ends the loop, and say how to go on."""
    try:
        yield
    except (Interrupted, RunStopped) as stop:
        step = steps_done()
        try:
            if interrupts.is_held():  # the weights are between two steps: the last checkpoint stands
                step, _ = last_whole_step(path)
            elif step and not checkpoint_folder(path, step).exists():
                save(step)
        except RunStopped:  # a sampler that is lost has taken with it what older weights had drawn
            step, _ = last_whole_step(path)
        again = command_line(dataclasses.replace(args, run_name=path.name, resume=True))
        command = f"uv run -m alignment.train_rl {shlex.join(again)}"
        console.print(f"stopped after step {step} ({stop}); go on with: {command}", markup=False, soft_wrap=True)
        raise
    except OSError as error:
        kept = "it had no checkpoint yet"
        with suppress(UserError, OSError):
            step, _ = last_whole_step(path)
            kept = f"its checkpoint of step {step} is whole" if step else kept
        raise RunStopped(f"{error}. The run {path} has stopped; {kept}: go on with --resume when that is mended") from None


def save_bad_batches(path: Path, rollout: Rollout, step: int, bad: Sequence[Sequence[int]]) -> None:
    """Keep the mini-batches that had no finite loss or gradient, as tensors, in bad_batches/."""
    for number, rows in enumerate(bad, start=1):
        batch = take_rows(rollout.batch, rows)
        tensors = {"input_ids": batch.input_ids, "labels": batch.labels, "response_mask": batch.response_mask}
        width = batch.labels.shape[1]
        for key in ("raw_rewards_B1", "advantages_B1", "sampler_log_probs_BT", "old_log_probs_BT"):
            if (tensor := getattr(rollout, key)) is not None:
                tensors[key] = tensor[list(rows), :width].contiguous()
        file = path / "bad_batches" / f"step_{step:06d}_{number}.safetensors"
        file.parent.mkdir(exist_ok=True)
        with full_disk_is_an_os_error(file):
            save_file(tensors, file)


def watched(watch: Watch, record: dict, console: Console) -> dict:
    """The record with the names of what is going wrong, each of which is printed when it begins."""
    before, slow = watch.last[-1]["warnings"] if watch.last else [], slowness(watch.last, record)
    found = concerns(watch.first, [*watch.last, record], watch.args)
    said = [found[name] for name in sorted(found.keys() - set(before))]
    if record["bad_updates"]:
        said.append(f"{record['bad_updates']} updates were left out, since their loss or gradient is not finite")
    if slow:
        said.append(slow)
    for what in said:
        console.print(f"warning, step {record['step']}: {what}", style="yellow", markup=False, soft_wrap=True)
    whole = {**record, "warnings": sorted(found)}
    watch.add(whole)
    return whole


class Gate:
    """Compares, before a step's weights first change, what its update has computed with what its sampler said."""

    def __init__(self, rollout: Rollout, args: RLArgs, steps_old: int):
        self.rollout, self.args, self.steps_old = rollout, args, steps_old
        self.found: dict[str, float | None] = {"sampler_mismatch": None, "sampler_mismatch_max": None}
        self.passed, self.moved = False, False

    def check(self, seen: Seen) -> None:
        """Raises `RunStopped` as `mismatch`, for the first mini-batch that has a gradient: where there was one without,
        momentum has moved the weights a little. From then on a signal waits: until the step is logged, its weights are between
        two steps."""
        if not self.passed and seen:
            self.found = mismatch(seen, self.rollout, self.args, self.steps_old + self.moved)
            self.passed = True
        self.moved = True
        interrupts.hold()


@contextmanager
def meanwhile(work: Callable[[], None], waiting: AbstractContextManager) -> Iterator[None]:
    """Do `work` in a thread beside the block, and wait for its end after it, within `waiting`. Raises what either raises, the
    block's error where both do."""
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        yield
        with waiting:
            working.result()


class Clock:
    """Seconds of each phase of a step."""

    def __init__(self):
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.perf_counter() - self.start

    def report(self, rollout: Rollout, drawn: Drawn, updates: dict[str, float | None]) -> dict[str, float]:
        """Seconds by phase, and tokens a second: those sampled, and those, prompts included, that updates computed."""
        sampled = sum(rollout.lengths)
        return {
            **{f"seconds_{phase}": seconds for phase, seconds in self.seconds.items()},
            "seconds": self.elapsed(),
            "tokens_per_second_sample": sampled / drawn.seconds["sample"],
            "tokens_per_second_update": updates["update_tokens"] / self.seconds["update"],
        }


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
    console.print(f"of these seconds: {', '.join(f'{name} {share:.1%}' for name, share in phase_shares(metrics))}")
    first, last = (read_jsonl(path / "completions" / f"eval_{e['step']:06d}.jsonl") for e in (before, after))
    pairs = list(zip(first, last, strict=True))
    changed = next((pair for pair in pairs if pair[0]["score"]["reward"] != pair[1]["score"]["reward"]), pairs[0])
    console.print(f"the first problem whose outcome changed: {printable(changed[0]['question'])}", markup=False)
    for label, record in zip(("before", "after"), changed, strict=True):
        console.print(f"  {label}: <think>{printable(record['text'])}", markup=False, highlight=False)
    console.print(f"learning curve: {path / 'learning_curve.png'}\nmodel: {path / 'final'}", markup=False)
    # Last, because a run with a summary counts as finished.
    summary = {
        "before": before,
        "after": after,
        "steps": len(metrics),
        "seconds": sum(m["seconds"] for m in metrics),
        "warnings": Counter(name for m in metrics for name in m["warnings"]),  # in how many steps each
        **{key: sum(m[key] for m in metrics) for key in ("bad_updates", "grading_failed", "restarts")},
    }
    write_atomically(path / "summary.json", json.dumps(summary, indent=2) + "\n")


def phase_shares(metrics: Sequence[Mapping[str, float]]) -> list[tuple[str, float]]:
    """Each phase's share of the steps' time, the largest first; what no phase claims is "other" (logging, books)."""
    total = sum(record["seconds"] for record in metrics)
    names = {key for record in metrics for key in record if key.startswith("seconds_")}
    spent = {name.removeprefix("seconds_"): sum(record.get(name, 0.0) for record in metrics) for name in names}
    spent["other"] = total - sum(spent.values())
    return sorted(((name, seconds / total) for name, seconds in spent.items()), key=lambda pair: -pair[1])


def _with_interval(record: dict) -> str:
    low, high = record["avg_all_rewards_ci"]
    return f"{record['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    args = parse(RLArgs)
    console = Console()
    train(args, console)


if __name__ == "__main__":
    door(main)
