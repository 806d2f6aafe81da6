"""The names of metrics that have changed, so that the logs of older runs are still read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.system.files import read_jsonl

OLD_NAMES = {
    "flat_groups": "frac_reward_zero_std",
    "fine": "overlong_penalty",
    "prompts_asked": "prompts_sampled",
    "reward_asked": "reward_sampled",
    "tokens_asked": "tokens_sampled",
}
"""The name of a metric in older runs -> its name now. Runs write the new name alone; a resumed run
writes its earlier steps again under it."""


def with_current_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metrics.jsonl, or a rollout's report, with each metric under its name now."""
    return {OLD_NAMES.get(name, name): value for name, value in record.items()}


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, of this version or an older one, under the names now; [] if
    there is no such file. Raises `UserError` for a damaged file, as `read_jsonl`."""
    return [with_current_names(record) for record in read_jsonl(file, require_steps=True)]
