"""Warns when a run's metrics show that something is going wrong, and stops a run that cannot
recover."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from types import MappingProxyType

from alignment.runs.run_folder import Record
from alignment.system.errors import RunStopped

WINDOW = 3  # Steps that warnings average over, so that one odd rollout causes none.
GRADER_WINDOW = 20  # Steps over which failed gradings are counted.
# A sampler mismatch that exceeds the median of earlier steps by more than this factor is a warning.
MISMATCH_JUMP = 3
# In nats a token; a smaller median counts as this. Even a sound run has some mismatch: sampler and
# trainer are compared at the first mini-batch with a gradient, and mini-batches before it have
# moved the weights by the optimiser's momentum.
MISMATCH_FLOOR = 0.005


class Health:
    """Watches the metrics of a run. It keeps only its first and its latest steps, which suffice for
    all warnings. `steps` are those that a resumed run has made before. `compares_rewards`: whether
    advantages are rewards less those of a group, so that groups of equal rewards teach nothing."""

    def __init__(
        self,
        steps: Sequence[Record],
        max_new_tokens: int,
        max_bad_steps: int,
        max_grader_failures: float,
        compares_rewards: bool,
    ):
        self.max_new_tokens = max_new_tokens
        self.max_bad_steps = max_bad_steps
        self.max_grader_failures = max_grader_failures
        self.compares_rewards = compares_rewards
        self.latest_count = max(GRADER_WINDOW, max_bad_steps)
        self.first = steps[:WINDOW]
        self.latest = steps[-self.latest_count :]

    def judge(
        self, record: Record, of_update: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[list[str], Record]:
        """Judge and keep the record of the next step, of which the update has warnings of its own,
        name -> message. Returns the messages to print, and the record with the names of its
        warnings added. A warning has a message where the step before did not have the same
        warning."""
        names_before: set[str] = set()
        if self.latest:
            names_before = set(self.latest[-1]["warnings"])
        steps = [*self.latest, record]
        warnings = health_warnings(self.first, steps, self.max_new_tokens, self.compares_rewards)
        warnings |= of_update
        messages = [warnings[name] for name in sorted(warnings.keys() - names_before)]
        if record["bad_updates"]:
            messages.append(
                f"{record['bad_updates']} updates were left out, since their loss or gradient is"
                " not finite"
            )
        record = {**record, "warnings": sorted(warnings)}
        self.first = [*self.first, record][:WINDOW]
        self.latest = [*self.latest, record][-self.latest_count :]
        return messages, record

    def stop_if_hopeless(self) -> None:
        """Raise `RunStopped` after --max_bad_steps without an update, or more failed gradings than
        --max_grader_failures."""
        last = self.latest[-self.max_bad_steps :]
        all_are_bad = all(record["updates"] == 0 and record["bad_updates"] > 0 for record in last)
        if len(last) == self.max_bad_steps and all_are_bad:
            raise RunStopped(
                f"{len(last)} steps in a row had no finite loss and gradient (--max_bad_steps):"
                " look at their batches in bad_batches/, and start from the last checkpoint"
                " (--sft_base) with a lower --learning_rate"
            )
        recent = self.latest[-GRADER_WINDOW:]
        failed = sum(record["grading_failed"] for record in recent)
        graded = sum(record.get("responses_sampled", record["responses"]) for record in recent)
        # The flag is a share of the answers of a full window of steps. The first steps do not fill
        # one, and are taken to have as many answers as it would: one early failure must not stop
        # the run.
        allowed = self.max_grader_failures * GRADER_WINDOW * graded / len(recent)
        if failed > allowed:
            raise RunStopped(
                f"grading failed on {failed} of {graded} answers (a limit of work, time or memory"
                " was met), which then count as wrong: more than --max_grader_failures"
                f" {self.max_grader_failures} allows. See their completions, and --reward"
            )


def all_cut_off(responses: int, where: str, flag: str, limit: int) -> str:
    """What is said where none of so many responses has ended by itself."""
    return f"all {responses} responses of the {where} were cut off at {flag} {limit}"


def health_warnings(
    first: Sequence[Record], steps: Sequence[Record], max_new_tokens: int, compares_rewards: bool
) -> dict[str, str]:
    """The warnings at the last of `steps`: name -> message. `first` are the first `WINDOW` steps of
    the run, with which entropy and length are compared; `compares_rewards` is `Health`'s."""
    warnings: dict[str, str] = {}
    if steps and steps[-1].get("finished") == 0:
        warnings["all_cut_off"] = all_cut_off(
            steps[-1]["responses"], "step", "--max_new_tokens", max_new_tokens
        )
    # The first and the latest `WINDOW` steps must be different ones.
    if not steps or steps[-1]["step"] < 2 * WINDOW:
        return warnings
    recent = steps[-WINDOW:]
    entropy = _mean(recent, "entropy")
    entropy_before = _mean(first, "entropy")
    if entropy_before and entropy < 0.1 * entropy_before:
        warnings["entropy_collapse"] = (
            f"entropy is {entropy:.3g} nats a token, it began at {entropy_before:.3g}"
        )
    equal = _mean(recent, "frac_reward_zero_std")
    if compares_rewards and equal > 0.95:
        warnings["equal_rewards"] = (
            f"in {equal:.0%} of the groups all rewards are equal, which teaches nothing"
        )
    mismatch = _mean(steps[-1:], "sampler_mismatch")
    earlier = _values(steps[:-1], "sampler_mismatch")
    has_history = len(earlier) >= 2 * WINDOW
    if has_history and mismatch > MISMATCH_JUMP * max(median(earlier), MISMATCH_FLOOR):
        warnings["sampler_drift"] = (
            f"the sampler's log-probs are {mismatch:.3g} nats a token from the trainer's,"
            f" {median(earlier):.3g} in the latest steps: do its weights arrive?"
        )
    if all(record["updates"] == 0 and record["bad_updates"] == 0 for record in recent):
        warnings["nothing_trained"] = (
            f"in {WINDOW} steps no response was left to train on (--skip_unfinished)"
        )
    length = _mean(recent, "response_length")
    length_before = _mean(first, "response_length")
    finished = _mean(recent, "finished")
    if length > 2 * length_before and finished < 0.8:
        warnings["runaway_length"] = (
            f"responses have {length:.0f} tokens, they began with {length_before:.0f}, and"
            f" {1 - finished:.0%} do not end within --max_new_tokens {max_new_tokens}"
        )
    return warnings


def _values(records: Sequence[Record], key: str) -> list[float]:
    """The values of `key`, of those records that have it."""
    return [record[key] for record in records if record.get(key) is not None]


def _mean(records: Sequence[Record], key: str) -> float:
    """The mean over the records that have a value; NaN if none has one. Every comparison with NaN
    is false, so no warning follows."""
    values = _values(records, key)
    if not values:
        return math.nan
    return sum(values) / len(values)
