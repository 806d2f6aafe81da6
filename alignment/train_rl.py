"""Reinforcement learning on verifiable rewards: sample, score, normalise, collate, step, sync, and again.

uv run -m alignment.train_rl --loss_type grpo_clip
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from alignment import sft
from alignment.args import RLArgs, SFTArgs, as_command, parse
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
from alignment.grpo import (
    USES_OLD_POLICY,
    group_statistics,
    grpo_microbatch_train_step,
    loss_denominator,
    normalize_group_rewards,
)
from alignment.models import (
    compute_dtype,
    load_model,
    load_tokenizer,
    make_optimizer,
    policy_log_probs,
    resolve_model,
    roles_of,
    set_learning_rate,
)
from alignment.placement import Roles
from alignment.records import Batch, Completion, Group, Problem, Sampling
from alignment.rewards import score_groups
from alignment.samplers import make_sampler
from alignment.tasks import find_task
from alignment.tokens import collate, cut_by_tokens, pad_token_id, take_rows
from alignment.tracking import RunFolder, new_run_name, plot_learning_curve, read_jsonl, resumed_run_name

MISMATCH_SAMPLE = 32  # completions of a rollout on which sampler and trainer are compared


@dataclass(frozen=True)
class Rollout:
    """One step's responses, ready to train on: B rows in a padded batch and a number or a row of numbers for each."""

    batch: Batch
    raw_rewards_B1: torch.Tensor
    advantages_B1: torch.Tensor | None
    sampler_log_probs_BT: torch.Tensor
    old_log_probs_BT: torch.Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Response tokens of each row."""
        return self.batch.response_mask.sum(dim=1).tolist()


def train(args: RLArgs, console: Console) -> Path:
    """Run the whole of it; returns the run's folder. Raises `UserError` before any model loads where that can be known."""
    task = find_task(args.task)
    problems, held_out = task.problems("train", args.dataset_path), eval_problems(task, args)
    roles = roles_of(args)
    path, done = open_run(args)
    base = str(checkpoint_folder(path, done)) if done else warm_start(args, console)
    tokenizer = load_tokenizer(base)
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
    run = RunFolder(path, done)
    run.log_args(args)

    def evaluate(step: int) -> None:
        if eval_sampler is not sampler:
            eval_sampler.load_weights(policy.named_parameters(), step)
        evaluation = evaluate_vllm(eval_sampler, task.reward_fn, held_out, eval_sampling(task, args))
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
                    groups = score_groups(asked, completions, task.reward_fn)
                rollout = make_rollout(groups, args, pad_token_id(tokenizer))
                with clock("gate"):
                    mismatch = sampler_mismatch(policy, rollout, args, dtype)
                if old_policy is not None:
                    with clock("old_log_probs"):
                        rollout = old_policy.annotate(rollout, args)
                with clock("update"):
                    report, trainer_log_probs_BT = update(policy, optimizer, rollout, args, step, dtype)
                with clock("sync"):
                    sampler.load_weights(policy.named_parameters(), step)
                record = {"step": step, **report, **rollout_report(groups, args), **mismatch, **clock.report(rollout)}
                run.log_completions("rollout", step, groups, per_response(trainer_log_probs_BT, rollout.batch.response_mask))
                run.log_step(record)
                progress(record)
                if step % args.eval_interval == 0 or step == args.num_steps:
                    evaluate(step)
                if step % args.save_interval == 0 and step < args.num_steps:
                    save_checkpoint(checkpoint_folder(path, step), policy, tokenizer, optimizer)
                    drop_old_checkpoints(path, args.keep_checkpoints)
        save_checkpoint(checkpoint_folder(path, args.num_steps), policy, tokenizer, optimizer)
        drop_old_checkpoints(path, args.keep_checkpoints)
        with atomic_folder(path / "final") as building:
            save_model(building, policy, tokenizer)
    finally:
        sampler.close()
        eval_sampler.close()
        run.close()
    return path


# --- before the loop ----------------------------------------------------------------------------------------------


def open_run(args: RLArgs) -> tuple[Path, int]:
    """The run's folder and the step to go on from. Raises `UserError` for a run that cannot be resumed as asked."""
    default = f"{args.preset}_{args.loss_type}_seed{args.seed}"
    if not args.resume:
        return Path(args.output_dir) / new_run_name(args, default), 0
    path = Path(args.output_dir) / resumed_run_name(args, default)
    before = json.loads((path / "args.json").read_text())["args"]
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
    if done >= args.num_steps:
        raise UserError(f"--resume: {path} has already done {done} of --num_steps {args.num_steps}")
    return path, done


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or name of the model that training starts from, made by SFT where the preset says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    if not Path(args.sft_base).exists():
        if not args.auto_sft:
            raise UserError(
                f"--sft_base {args.sft_base} does not exist: make it with `uv run -m alignment.sft --preset {args.preset}`,"
                " or start from --model with --sft_base ''"
            )
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once")
        sft.train(as_command(SFTArgs, args), console)
    console.print(f"starting from {args.sft_base}")
    return resolve_model(args.sft_base, args.output_dir)


def needs_old_policy(args: RLArgs) -> bool:
    """Whether old log-probs can differ from the policy's own: the loss has a ratio, and a rollout has several updates."""
    return args.loss_type in USES_OLD_POLICY and args.updates_per_rollout > 1


class OldPolicy:
    """The policy as it was when the rollout was sampled, on the reference device.

    Where that device is the policy's own, the policy itself serves: it is asked before its first update.
    """

    def __init__(self, policy, base: str, roles: Roles, dtype: torch.dtype):
        self.policy = policy
        self.dtype = dtype
        shared = roles.policy == (roles.reference,)
        self.model = policy if shared else load_model(base, (roles.reference,), torch.float32)

    @torch.no_grad()
    def annotate(self, rollout: Rollout, args: RLArgs) -> Rollout:
        """The rollout with `old_log_probs_BT`, from weights taken over from the policy just now."""
        if self.model is not self.policy:
            for (_, own), (_, new) in zip(self.model.named_parameters(), self.policy.named_parameters(), strict=True):
                own.copy_(new, non_blocking=True)
        old_BT = torch.zeros(rollout.batch.labels.shape)
        for rows in cut_by_tokens(row_lengths(rollout.batch), args.micro_batch_tokens):
            part = take_rows(rollout.batch, rows)
            found = policy_log_probs(self.model, part, self.dtype, temperature=args.sampling_temperature)["log_probs"]
            old_BT[rows, : found.shape[1]] = found.cpu()
        return dataclasses.replace(rollout, old_log_probs_BT=old_BT)


# --- one step -------------------------------------------------------------------------------------------------------


def problems_of_step(problems: Sequence[Problem], args: RLArgs, step: int) -> list[Problem]:
    """The prompts of a step (from 1): consecutive pieces of endless shuffled passes over the training problems."""
    first = (step - 1) * args.prompts_per_rollout
    places = range(first, first + args.prompts_per_rollout)
    passes = {place // len(problems) for place in places}
    orders = {n: random.Random(f"order {args.seed} {n}").sample(range(len(problems)), len(problems)) for n in passes}
    return [problems[orders[place // len(problems)][place % len(problems)]] for place in places]


def derived_seed(*parts: int | str) -> int:
    """A seed that depends on all parts and on nothing else."""
    return random.Random(" ".join(map(str, parts))).getrandbits(31)


def rollout_sampling(stop: tuple[str, ...], args: RLArgs, step: int) -> Sampling:
    """How a step's rollout is drawn."""
    return Sampling(
        n=args.group_size,
        temperature=args.sampling_temperature,
        top_p=args.sampling_top_p,
        max_new_tokens=args.max_new_tokens,
        stop=stop,
        seed=derived_seed("rollout", args.seed, step),
    )


def refuse_stale(completions: Sequence[Sequence[Completion]], policy_version: int) -> None:
    """Raise RuntimeError for a completion that another version of the weights has sampled."""
    stale = {c.policy_version for drawn in completions for c in drawn} - {policy_version}
    if stale:
        raise RuntimeError(f"the sampler answered with policy version {sorted(stale)}, the trainer is at {policy_version}")


def make_rollout(groups: Sequence[Group], args: RLArgs, pad: int) -> Rollout:
    """Collate the completions, and normalise their rewards where the loss uses advantages."""
    drawn = [completion for group in groups for completion in group.completions]
    batch = collate([c.prompt_ids for c in drawn], [c.token_ids for c in drawn], pad)
    raw_B1 = torch.tensor([[score["reward"]] for group in groups for score in group.scores], dtype=torch.float32)
    sampler_BT = torch.zeros(batch.labels.shape)
    sampler_BT[batch.response_mask] = torch.tensor([log_prob for c in drawn for log_prob in c.log_probs])
    advantages_B1 = None
    if args.group_size > 1:
        advantages_B1 = normalize_group_rewards(raw_B1, args.group_size, args.advantage_eps, args.normalize_by_std)
    return Rollout(batch, raw_B1, advantages_B1, sampler_BT)


@torch.no_grad()
def sampler_mismatch(policy, rollout: Rollout, args: RLArgs, dtype: torch.dtype) -> dict[str, float]:
    """Mean and largest difference, in nats a token, between the sampler's log-probs and the trainer's.

    Measured before the update, on completions spread over the rollout, under the distribution that was sampled from.
    Raises `UserError` where the mean exceeds --max_sampler_mismatch: the gradient would be of another policy than the
    one that was sampled.
    """
    spread = range(0, len(rollout.lengths), max(1, len(rollout.lengths) // MISMATCH_SAMPLE))
    batch = take_rows(rollout.batch, spread)
    how = {"temperature": args.sampling_temperature, "top_p": args.sampling_top_p}
    trainer_BT = policy_log_probs(policy, batch, dtype, **how)["log_probs"].cpu()
    sampler_BT = rollout.sampler_log_probs_BT[list(spread), : trainer_BT.shape[1]]
    difference = (trainer_BT - sampler_BT)[batch.response_mask].abs()
    mean, largest = difference.mean().item(), difference.max().item()
    if not mean <= args.max_sampler_mismatch:
        raise UserError(
            f"the sampler's log-probs are {mean:.4g} nats a token from the trainer's (largest {largest:.4g}), more than"
            f" --max_sampler_mismatch {args.max_sampler_mismatch}. Likely causes: weights that did not reach the sampler,"
            " a prefix cache that outlived them, another dtype (see --dtype), or other temperature or top-p handling."
            " Nothing was trained on these samples"
        )
    return {"sampler_mismatch": mean, "sampler_mismatch_max": largest}


def update(
    policy, optimizer: torch.optim.Optimizer, rollout: Rollout, args: RLArgs, step: int, dtype: torch.dtype
) -> tuple[dict[str, float], torch.Tensor]:
    """All optimiser updates of one rollout. Returns their report, and the log-probs [B, T] that the first pass saw.

    Nothing in here waits for a device until the report at the end, so that on a split policy one micro-batch's late
    layers run beside the next one's early layers.
    """
    policy.train()
    lengths, totals, norms = rollout.lengths, [], []
    seen: list[tuple[Sequence[int], torch.Tensor]] = []
    size = args.train_mini_batch_size or len(lengths)
    for epoch in range(args.epochs_per_rollout):
        order = random.Random(f"update {args.seed} {step} {epoch}").sample(range(len(lengths)), len(lengths))
        for mini_batch in (order[start : start + size] for start in range(0, len(order), size)):
            denominator = loss_denominator(args.loss_normalization, [lengths[row] for row in mini_batch], args.max_new_tokens)
            for rows, log_probs, sums in backward(policy, rollout, mini_batch, denominator, args, dtype):
                totals.append(sums)
                seen.append((rows, log_probs))
            set_learning_rate(optimizer, learning_rate(args, (step - 1) * args.updates_per_rollout + len(norms) + 1))
            norms.append(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    first_pass_BT = torch.zeros(rollout.batch.labels.shape)
    for rows, log_probs in reversed(seen):
        first_pass_BT[rows, : log_probs.shape[1]] = log_probs.cpu()
    return update_report(totals, norms, optimizer.param_groups[0]["lr"]), first_pass_BT


def backward(
    policy, rollout: Rollout, mini_batch: Sequence[int], denominator: float, args: RLArgs, dtype: torch.dtype
) -> Iterator[tuple[Sequence[int], torch.Tensor, dict[str, torch.Tensor]]]:
    """Add one mini-batch's gradient to the policy; yields each micro-batch's rows, log-probs and sums."""
    lengths = row_lengths(rollout.batch)
    for picked in cut_by_tokens([lengths[row] for row in mini_batch], args.micro_batch_tokens):
        rows = [mini_batch[i] for i in picked]
        part = take_rows(rollout.batch, rows)
        found = policy_log_probs(policy, part, dtype, return_token_entropy=True, temperature=args.sampling_temperature)
        log_probs, width = found["log_probs"], part.labels.shape[1]

        there = functools.partial(_take, rows, width, log_probs.device)
        mask = part.response_mask.to(log_probs.device, non_blocking=True)
        loss, sums = grpo_microbatch_train_step(
            log_probs,
            mask,
            gradient_accumulation_steps=1,
            loss_type=args.loss_type,
            raw_rewards=there(rollout.raw_rewards_B1),
            advantages=there(rollout.advantages_B1),
            # Without old log-probs there is one update a rollout: the old policy is this one, and the ratio is 1.
            old_log_probs=log_probs.detach() if rollout.old_log_probs_BT is None else there(rollout.old_log_probs_BT),
            cliprange=args.cliprange,
            loss_normalization=args.loss_normalization,
            denominator=denominator,
        )
        yield rows, log_probs.detach(), {"loss": loss, "entropy_sum": found["token_entropy"].sum(), **sums}


def _take(rows: Sequence[int], width: int, device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Some rows of a tensor [B, 1] or [B, T], cut to `width`, on their way to `device`."""
    return None if tensor is None else tensor[rows, :width].to(device, non_blocking=True)


def learning_rate(args: RLArgs, update_number: int) -> float:
    """Linear rise over --warmup_steps updates (from 1), constant after."""
    return args.learning_rate * min(1.0, update_number / max(1, args.warmup_steps))


def update_report(totals: Sequence[dict[str, torch.Tensor]], norms: Sequence[torch.Tensor], rate: float) -> dict[str, float]:
    """Losses averaged over updates; entropy, ratio and clip fraction over response tokens."""
    tokens = sum(sums["response_tokens"].item() for sums in totals)

    def total(key: str) -> float:
        return sum(sums[key].item() for sums in totals)

    report = {
        "loss": total("loss") / len(norms),
        "entropy": total("entropy_sum") / tokens,
        "grad_norm": sum(norm.item() for norm in norms) / len(norms),
        "learning_rate": rate,
        "updates": len(norms),
    }
    if "ratio_sum" in totals[0]:
        report["clip_fraction"] = total("clipped_tokens") / tokens
        report["ratio_mean"] = total("ratio_sum") / tokens
        report["ratio_max"] = max(sums["ratio_max"].item() for sums in totals)
    return report


def rollout_report(groups: Sequence[Group], args: RLArgs) -> dict[str, float]:
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
    }


def row_lengths(batch: Batch) -> list[int]:
    """Tokens of each row, prompt and response together, less the one that is only ever a label."""
    last = batch.response_mask.int().cumsum(dim=1).argmax(dim=1)
    return (last + 1).tolist()


def per_response(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> Iterable[list[float]]:
    """Each row's values at its response tokens."""
    return (row[mask].tolist() for row, mask in zip(values_BT, mask_BT, strict=True))


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


# --- what the user sees -----------------------------------------------------------------------------------------------


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
    summary = {"before": before, "after": after, "steps": len(metrics), "seconds": sum(m["seconds"] for m in metrics)}
    write_atomically(path / "summary.json", json.dumps(summary, indent=2) + "\n")
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
    console.print(f"the first problem whose outcome changed, {escape(changed[0]['problem'])}:")
    for label, record in zip(("before", "after"), changed, strict=True):
        console.print(f"  {label}: <think>{escape(record['text'])}", highlight=False)
    console.print(f"learning curve: {path / 'learning_curve.png'}\nmodel: {path / 'final'}")


def _with_interval(record: dict) -> str:
    low, high = record["avg_all_rewards_ci"]
    return f"{record['avg_all_rewards']:.3f} ({low:.3f} .. {high:.3f})"


def main() -> None:
    args = parse(RLArgs)
    console = Console()
    report(train(args, console), args, console)


if __name__ == "__main__":
    door(main)
