"""What the numbers of a run say is going wrong, while it can still be stopped."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from rich.console import Console

from alignment.args import RLArgs
from alignment.system.errors import RunStopped

Record = Mapping[str, object]

WINDOW = 3  # steps that are averaged, so that one odd rollout is no warning
GRADER_WINDOW = 20  # steps
SLOW = 5  # times the median


class Watch:
    """The first and the latest steps of a run: all that its warnings are about, however long it is."""

    def __init__(self, steps: Iterable[Record], args: RLArgs):
        self.args = args
        self.first: list[Record] = []
        self.last: list[Record] = []
        for record in steps:
            self.add(record)

    def add(self, record: Record) -> None:
        """Take note of the next step."""
        if len(self.first) < WINDOW:
            self.first.append(record)
        self.last = [*self.last, record][-max(GRADER_WINDOW, self.args.max_bad_steps) :]

    @property
    def step(self) -> int:
        """The last step, 0 before there is one."""
        return self.last[-1]["step"] if self.last else 0


def health_warnings(first: Sequence[Record], steps: Sequence[Record], args: RLArgs) -> dict[str, str]:
    """What is going wrong at the last of the latest steps: a name for each, and the numbers that say so.

    `first` are the first steps of the run, `WINDOW` at most.
    """
    if not steps or steps[-1]["step"] < 2 * WINDOW:
        return {}
    found = {}
    entropy, entropy_before = _mean(steps[-WINDOW:], "entropy"), _mean(first, "entropy")
    if entropy is not None and entropy_before and entropy < 0.1 * entropy_before:
        found["entropy_collapse"] = f"entropy is {entropy:.3g} nats a token, it began at {entropy_before:.3g}"
    flat = _mean(steps[-WINDOW:], "flat_groups")
    if flat is not None and flat > 0.95:
        found["equal_rewards"] = f"in {flat:.0%} of the groups all rewards are equal, which teaches nothing"
    if all(record["updates"] == 0 == record["bad_updates"] for record in steps[-WINDOW:]):
        found["nothing_trained"] = f"in {WINDOW} steps no response was left to train on (--skip_unfinished)"
    length, length_before = _mean(steps[-WINDOW:], "response_length"), _mean(first, "response_length")
    finished = _mean(steps[-WINDOW:], "finished")
    if None not in (length, length_before, finished) and length > 2 * length_before and finished < 0.8:
        found["runaway_length"] = (
            f"responses have {length:.0f} tokens, they began with {length_before:.0f}, and {1 - finished:.0%} do not end within"
            f" --max_new_tokens {args.max_new_tokens}"
        )
    return found


def slowness(steps: Sequence[Record], record: Record) -> str | None:
    """Why a step took so much longer than the latest ones, as far as can be told: where the time went, and who else ran."""
    usual = median(each["seconds"] for each in steps) if len(steps) >= 2 * WINDOW else math.inf
    if record["seconds"] <= SLOW * usual:
        return None
    phases = {key.removeprefix("seconds_"): value for key, value in record.items() if key.startswith("seconds_")}
    longest = max(phases, key=phases.get)
    return (
        f"it took {record['seconds']:.3g} s, the latest steps {usual:.3g} s; {phases[longest]:.3g} s of it in {longest}; "
        f"{os.getloadavg()[0]:.1f} processes at work on {os.cpu_count()} cores in the last minute"
    )


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def stop_if_hopeless(steps: Sequence[Record], args: RLArgs) -> None:
    """Raise `RunStopped` where --max_bad_steps in a row made no update, or more gradings failed than --max_grader_failures."""
    last = steps[-args.max_bad_steps :]
    if len(last) == args.max_bad_steps and all(record["updates"] == 0 < record["bad_updates"] for record in last):
        raise RunStopped(
            f"{len(last)} steps in a row had no finite loss and gradient (--max_bad_steps); their batches are in bad_batches/:"
            " look at their rewards and log-probs, and start a run from its last checkpoint (--sft_base) with a lower"
            " --learning_rate"
        )
    recent = steps[-GRADER_WINDOW:]
    failed, graded = (sum(record[key] for record in recent) for key in ("grading_failed", "responses"))
    allowed = args.max_grader_failures * GRADER_WINDOW * graded / len(recent)  # of whole 20 steps, from the first step on
    if failed > allowed:
        raise RunStopped(
            f"grading failed on {failed} of {graded} answers (time or memory ran out), more than --max_grader_failures"
            f" {args.max_grader_failures} allows; their rewards of 0 would be taken for wrong answers. See their"
            " completions, and --reward"
        )


def log_warnings(watch: Watch, record: dict, console: Console) -> dict:
    """The record with the names of what is going wrong, each of which is printed when it begins."""
    before, slow = watch.last[-1]["warnings"] if watch.last else [], slowness(watch.last, record)
    found = health_warnings(watch.first, [*watch.last, record], watch.args)
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
