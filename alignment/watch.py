"""What the numbers of a run say is going wrong, while it can still be stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alignment.args import RLArgs
from alignment.errors import RunStopped

Record = Mapping[str, object]

WINDOW = 3  # steps that are averaged, so that one odd rollout is no warning
GRADER_WINDOW = 20  # steps


def concerns(steps: Sequence[Record], args: RLArgs) -> dict[str, str]:
    """What is going wrong at the last of the steps so far: a name for each, and the numbers that say so."""
    if len(steps) < 2 * WINDOW:
        return {}
    found = {}
    entropy, entropy_before = _mean(steps[-WINDOW:], "entropy"), _mean(steps[:WINDOW], "entropy")
    if entropy is not None and entropy_before and entropy < 0.1 * entropy_before:
        found["entropy_collapse"] = f"entropy is {entropy:.3g} nats a token, it began at {entropy_before:.3g}"
    flat = _mean(steps[-WINDOW:], "flat_groups")
    if flat is not None and flat > 0.95:
        found["equal_rewards"] = f"in {flat:.0%} of the groups all rewards are equal, which teaches nothing"
    length, length_before = _mean(steps[-WINDOW:], "response_length"), _mean(steps[:WINDOW], "response_length")
    finished = _mean(steps[-WINDOW:], "finished")
    if None not in (length, length_before, finished) and length > 2 * length_before and finished < 0.8:
        found["runaway_length"] = (
            f"responses have {length:.0f} tokens, they began with {length_before:.0f}, and {1 - finished:.0%} do not end within"
            f" --max_new_tokens {args.max_new_tokens}"
        )
    return found


def _mean(records: Sequence[Record], key: str) -> float | None:
    values = [record[key] for record in records if record.get(key) is not None]
    return sum(values) / len(values) if values else None


def refuse_lost_cause(steps: Sequence[Record], args: RLArgs) -> None:
    """Raise `RunStopped` where --max_bad_steps in a row made no update, or more gradings failed than --max_grader_failures."""
    last = steps[-args.max_bad_steps :]
    if len(last) == args.max_bad_steps and all(record["updates"] == 0 for record in last):
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
