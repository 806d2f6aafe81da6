"""What the numbers of a run say is going wrong, while it can still be stopped."""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from alignment.system.errors import RunStopped

Record = Mapping[str, object]

WINDOW = 3  # steps that are averaged, so that one odd rollout is no warning
GRADER_WINDOW = 20  # steps
SUDDEN = 3  # times the median
# nats a token: a mini-batch without a gradient moves the weights by its momentum before the
# comparison
MOMENTUM = 0.005


class Health:
    """The first and latest steps of a run, all that warnings need, and the flags `max_bad_steps`
    and `max_grader_failures`."""

    def __init__(
        self,
        steps: Sequence[Record],
        max_new_tokens: int,
        max_bad_steps: int,
        max_grader_failures: float,
    ):
        self.max_new_tokens, self.max_bad_steps, self.max_grader_failures = (
            max_new_tokens,
            max_bad_steps,
            max_grader_failures,
        )
        self.kept = max(GRADER_WINDOW, max_bad_steps)
        self.first, self.latest = steps[:WINDOW], steps[-self.kept :]

    def judge(self, record: Record) -> tuple[list[str], dict]:
        """Note the next step. Returns messages to print, of warnings that begin, and the record
        with its warnings' names."""
        before = self.latest[-1]["warnings"] if self.latest else []
        warnings = health_warnings(self.first, [*self.latest, record], self.max_new_tokens)
        messages = [warnings[name] for name in sorted(warnings.keys() - set(before))]
        if record["bad_updates"]:
            messages.append(
                f"{record['bad_updates']} updates were left out, since their loss or gradient is"
                " not finite"
            )
        record = {**record, "warnings": sorted(warnings)}
        self.first = [*self.first, record][:WINDOW]
        self.latest = [*self.latest, record][-self.kept :]
        return messages, record

    def stop_if_hopeless(self) -> None:
        """Raise `RunStopped` after --max_bad_steps without an update, or more failed gradings than
        --max_grader_failures."""
        last = self.latest[-self.max_bad_steps :]
        if len(last) == self.max_bad_steps and all(
            record["updates"] == 0 < record["bad_updates"] for record in last
        ):
            fault = f"{len(last)} steps in a row had no finite loss and gradient (--max_bad_steps)"
            remedy = "start from the last checkpoint (--sft_base) with a lower --learning_rate"
            raise RunStopped(f"{fault}: look at their batches in bad_batches/, and {remedy}")
        recent = self.latest[-GRADER_WINDOW:]
        failed, graded = (
            sum(record[key] for record in recent) for key in ("grading_failed", "responses")
        )
        # of a whole window, from the first step on
        allowed = self.max_grader_failures * GRADER_WINDOW * graded / len(recent)
        if failed > allowed:
            reason = "a limit of work, time or memory was met"
            fault = (
                f"grading failed on {failed} of {graded} answers ({reason}), which then count as"
                " wrong"
            )
            limit = f"more than --max_grader_failures {self.max_grader_failures} allows"
            raise RunStopped(f"{fault}: {limit}. See their completions, and --reward")


def health_warnings(
    first: Sequence[Record], steps: Sequence[Record], max_new_tokens: int
) -> dict[str, str]:
    """What is going wrong at the last of `steps`, by name, with the numbers that say so. `first`:
    the run's first `WINDOW`."""
    if not steps or steps[-1]["step"] < 2 * WINDOW:
        return {}
    warnings = {}
    entropy, entropy_before = _mean(steps[-WINDOW:], "entropy"), _mean(first, "entropy")
    if entropy_before and entropy < 0.1 * entropy_before:
        warnings["entropy_collapse"] = (
            f"entropy is {entropy:.3g} nats a token, it began at {entropy_before:.3g}"
        )
    if (flat := _mean(steps[-WINDOW:], "flat_groups")) > 0.95:
        warnings["equal_rewards"] = (
            f"in {flat:.0%} of the groups all rewards are equal, which teaches nothing"
        )
    mismatch = _mean(steps[-1:], "sampler_mismatch")
    usual = [
        record["sampler_mismatch"]
        for record in steps[:-1]
        if record.get("sampler_mismatch") is not None
    ]
    if len(usual) >= 2 * WINDOW and mismatch > SUDDEN * max(median(usual), MOMENTUM):
        far = (
            f"{mismatch:.3g} nats a token from the trainer's, {median(usual):.3g} in the latest"
            " steps"
        )
        warnings["sampler_drift"] = f"the sampler's log-probs are {far}: do its weights arrive?"
    if all(record["updates"] == 0 == record["bad_updates"] for record in steps[-WINDOW:]):
        warnings["nothing_trained"] = (
            f"in {WINDOW} steps no response was left to train on (--skip_unfinished)"
        )
    length, length_before = (
        _mean(steps[-WINDOW:], "response_length"),
        _mean(first, "response_length"),
    )
    finished = _mean(steps[-WINDOW:], "finished")
    if length > 2 * length_before and finished < 0.8:
        grown = f"responses have {length:.0f} tokens, they began with {length_before:.0f}"
        warnings["runaway_length"] = (
            f"{grown}, and {1 - finished:.0%} do not end within --max_new_tokens {max_new_tokens}"
        )
    return warnings


def _mean(records: Sequence[Record], key: str) -> float:
    """The mean over the records that have a value; NaN, which no comparison holds of, where none
    has."""
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else math.nan
