"""The runs that `verify` starts as a user would: a short one whose samples the papers train again,
and one that is killed and resumed beside one that is not."""

import dataclasses
import hashlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from rich.console import Console
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alignment.args import RLArgs, VerifyArgs, command_line, configuration
from alignment.builders.prediction import beside_plan
from alignment.builders.run_plan import RunPlan
from alignment.builders.training import find_teacher
from alignment.builders.verified_updates import fits_in_float64, with_short_samples
from alignment.config.settings import flag_values
from alignment.core.records import Rollout
from alignment.model.loading import load_tokenizer
from alignment.rewards.rules import RULES
from alignment.runs.run_folder import (
    LOGS,
    TRAINER,
    checkpoint_folder,
    last_whole_step,
    load_rollouts,
)
from alignment.runs.state import read_state
from alignment.system.errors import RunStopped
from alignment.system.files import read_jsonl
from alignment.system.manifests import sha256
from alignment.system.processes import end_command, last_line, start_command
from alignment.training.invariants import INVARIANTS
from alignment.training.update import mini_batches
from alignment.verification.check import Check
from alignment.verification.checks import NATS, checks_of_plan
from alignment.verification.whole_run import TrainedRun
from alignment.verification.whole_update import PlainModel, Weights

# prefixes of the names of what differs from run to run
TIMINGS = ("seconds", "tokens_per_second", "peak_bytes")
SHORT_RUN = 3  # steps
PROMPTS = 3
EVALUATED = 12  # problems, so that their answers say much of the temperature
LEAST_RATE = 1e-4  # of a short run, so that new weights show in its samples
MOST_MISMATCH = 1e9  # of a short run in nats, so that it is judged here


def short_run(args: VerifyArgs, plan: RunPlan, folder: str) -> RLArgs:
    """The arguments of a run of few steps of few and short samples, by a run's own arguments: with
    rewards by chance, where the reward is one that ships, since those that are all equal teach
    nothing; and with a learning rate that shows."""
    short = with_short_samples(args)
    changes: dict[str, Any] = {
        "sft_base": plan.base,
        "run_name": "short",
        "output_dir": folder,
        "num_steps": SHORT_RUN,
        "prompts_per_rollout": PROMPTS,
        "num_problems": PROMPTS,  # So that an estimator's state of a problem counts.
        "skip_unfinished": args.skip_unfinished,
        "train_mini_batch_size": min(args.train_mini_batch_size, 2 * short.group_size),
        "learning_rate": max(args.learning_rate, LEAST_RATE),
        "warmup_steps": min(args.warmup_steps, SHORT_RUN),
        "max_sampler_mismatch": MOST_MISMATCH,
        "save_interval": 1,
        "eval_interval": SHORT_RUN,
        "max_problems": EVALUATED,
        "eval_samples": min(args.eval_samples, short.group_size),
        "eval_tasks": (),
        "eval_greedy": args.eval_temperature != 0,
        "preview": 0,
        "trackers": (),
    }
    if args.token_selection == "clip_cov":
        changes["selected_share"] = 1.0  # All that are eligible, instead of some by chance.
    if args.eval_max_new_tokens:
        changes["eval_max_new_tokens"] = min(args.eval_max_new_tokens, short.max_new_tokens)
    return configuration(RLArgs, short, **changes, **rewards_by_chance(args))


def rewards_by_chance(args: VerifyArgs) -> dict[str, Any]:
    """The arguments by which a run is paid by chance, where its reward is one that ships: an
    untrained model's rewards are all 0, which trains nothing."""
    if args.reward in ("auto", *RULES) and "random" not in args.task_in_format.rules:
        return {"reward": "random", "prompt": args.task_in_format.prompt}
    return {}


def short_run_checks(
    args: VerifyArgs, plan: RunPlan, start: Weights, console: Console
) -> Iterator[Check]:
    """The checks of a short run by `train_rl`, which is deleted. `start` is what is trained,
    before the first step."""
    what = f"run of {SHORT_RUN} steps"
    if not fits_in_float64(plan.base):
        reason = "the host has no memory for the model in float64"
        yield Check(what, math.inf, lambda: 0.0, not_checked=reason)
        return
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify_", dir=args.output_dir) as folder:
        rl = short_run(args, plan, folder)
        try:
            with console.status(f"training {SHORT_RUN} steps"):
                _run(rl)
        except RunStopped as stopped:
            reason = str(stopped)

            def fail() -> float:
                raise RunStopped(reason)

            yield Check(what, 0.0, fail)
            return
        teacher = None
        if args.teacher:
            teacher = PlainModel(find_teacher(args, plan.base))
        dtype = getattr(torch, plan.policy.dtype)

        def cut_rows(step: int, lengths: Sequence[int], trained: Sequence[int]) -> list[list[int]]:
            rows = SimpleNamespace(lengths=lengths, trained_rows=trained)
            return mini_batches(cast(Rollout, rows), rl.update_config, step)

        yield from TrainedRun(
            Path(folder) / rl.run_name,
            PlainModel(plan.base),
            start,
            flag_values(rl) | {"loss": rl.loss_type},
            cut_rows,
            rl.task_in_format.test_split(rl.dataset_path),
            RULES,
            rl.evaluation_rule,
            load_tokenizer(plan.base),
            rl.task_in_format.stop,
            NATS[dtype],
            dtype,
            teacher,
        ).checks((*INVARIANTS, "cut_short"))


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each part of a finished run that a repetition must reproduce: no timings, no dates
    of files, and tensors by their names, because the order of entries in the head of a file of
    tensors is by chance."""
    last_step, _ = last_whole_step(run)
    trainer = checkpoint_folder(run, last_step) / TRAINER
    optimizer: list[tuple[str, str]] = []
    for file in sorted(trainer.glob("*.safetensors")):
        for name, array in sorted(load_file(file).items()):
            # numpy's stubs hide the buffer that its arrays are
            digest = hashlib.sha256(array).hexdigest()  # pyright: ignore[reportArgumentType]
            optimizer.append((name, digest))

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    scalars: dict[str, list[tuple[int, float]]] = {}
    for tag in sorted(events.Tags()["scalars"]):
        scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]

    parts = {
        "weights": _digest_files((run / "final").rglob("*.safetensors")),
        "optimizer": optimizer,
        "metrics": [_without_timings(record) for record in read_jsonl(run / "metrics.jsonl")],
        "evaluations": [_without_timings(record) for record in read_jsonl(run / "evals.jsonl")],
        "completions": _digest_files((run / "completions").iterdir()),
        "bad batches": _digest_files((run / "bad_batches").glob("*")),
        "TensorBoard": _without_timings(scalars),
    }
    return {
        part: hashlib.sha256(json.dumps(content).encode()).hexdigest()
        for part, content in parts.items()
    }


def _digest_files(files: Iterable[Path]) -> list[tuple[str, str]]:
    """The files' names, in order, each with its SHA-256."""
    return [(file.name, sha256(file)) for file in sorted(files)]


def _without_timings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's values but times and memory, which no repetition has again. A tracker's tag has
    a group before its name."""
    return {
        key: value
        for key, value in record.items()
        if not key.rpartition("/")[2].startswith(TIMINGS)
    }


def run_checks(args: VerifyArgs, console: Console, exact: bool) -> Iterator[Check]:
    """Train 2k steps straight; then k, kill, resume, k. Yields three kinds of checks: the resumed
    run goes on from the killed one's state; both runs end alike, which is promised where devices
    are `exact`; and the straight run takes the memory and seconds that `plan` predicts. Deletes all
    runs."""
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify_", dir=args.output_dir) as folder:
        rl = configuration(
            RLArgs,
            args,
            run_name="straight",
            num_steps=2 * args.kill_after,
            save_interval=args.kill_after,
            preview=0,
            output_dir=folder,
            trackers=RLArgs.trackers,  # the events of TensorBoard are compared
            **rewards_by_chance(args),
        )
        straight = Path(folder) / rl.run_name
        resumed = Path(folder) / "killed"

        def parts_of_start() -> list[str]:
            return train_and_resume(rl, resumed, console)

        def parts_of_end() -> list[str]:
            return differing_parts(straight, resumed)

        yield Check("resumed: other parts of the next step's start", 0.0, parts_of_start)
        # the check above has run by now; it leaves no summary where a run has failed
        if (resumed / "summary.json").exists():
            limit = 0.0 if exact else math.inf
            yield Check(
                "killed, resumed: parts with other bits", limit, parts_of_end, "statistical"
            )
            yield from checks_of_plan(*beside_plan(rl))


def train_and_resume(rl: RLArgs, killed: Path, console: Console) -> list[str]:
    """Train a run; then another, `killed`, which is killed in the step after its first checkpoint,
    and resumed. Returns the parts of what that step's update began with before the kill that are
    others after it."""
    k = rl.save_interval
    again = dataclasses.replace(rl, run_name=killed.name, log_state=True)

    def has_begun_next_step() -> bool:
        return read_state(killed, k + 1) is not None

    with console.status(
        f"training {2 * k} steps straight; then {k} to be killed, and the other {k}"
    ):
        _run(rl)
        _run(again, killed_when=has_begun_next_step)
        log_as_killed_later(Path(rl.output_dir) / rl.run_name, killed, k + 1)
        before = read_state(killed, k + 1)
        rollouts = load_rollouts(checkpoint_folder(killed, k))
        _run(dataclasses.replace(again, resume=True))
    after = read_state(killed, k + 1)
    if before is None or after is None:
        raise RunStopped(f"the run wrote no state of step {k + 1}")
    sampled_before = any(sampled.step == k + 1 for sampled in rollouts)
    return other_state(before, after, sampled_before)


def log_as_killed_later(straight: Path, killed: Path, step: int) -> None:
    """Write to a killed run's folder what another run of the same arguments has logged of a step,
    where it lacks that: the kill might have come after the step, and before its checkpoint."""
    for name in LOGS:
        steps = {record["step"] for record in read_jsonl(killed / name)}
        if step in steps:
            continue
        records = [record for record in read_jsonl(straight / name) if record["step"] == step]
        with (killed / name).open("a") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
    for file in (straight / "completions").glob(f"*_{step:06d}.jsonl"):
        shutil.copy(file, killed / "completions")


def other_state(
    before: Mapping[str, object], after: Mapping[str, object], sampled_before: bool
) -> list[str]:
    """The parts of a step's state that differ. None may, on any device, but for completions, which
    the step samples anew unless they were `sampled_before` the checkpoint, which then holds them.
    """
    parts = [part for part in before if part != "completions" or sampled_before]
    return [part for part in parts if before[part] != after[part]]


def differing_parts(straight: Path, resumed: Path) -> list[str]:
    """The parts of two finished runs' `digests` that differ."""
    expected = digests(straight)
    reached = digests(resumed)
    return [part for part in expected if expected[part] != reached[part]]


def _run(args: RLArgs, killed_when: Callable[[], bool] | None = None) -> None:
    """Run `train_rl` to its end, or kill it once `killed_when` says so. Raises `RunStopped` where
    it ends otherwise."""
    log = (Path(args.output_dir) / f"{args.run_name}.log").resolve()
    process = start_command("alignment.train_rl", command_line(args), log)
    try:
        while process.poll() is None and not (killed_when and killed_when()):
            time.sleep(0.01)
        code = process.returncode
    finally:
        end_command(process)
    if code:
        raise RunStopped(f"a run ended with exit code {code}: {last_line(log)}")
    if killed_when and code is not None:
        raise RunStopped("the run ended before it could be killed; take a larger --kill_after")
