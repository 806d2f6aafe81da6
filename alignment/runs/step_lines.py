"""What is printed of a step of RL: its rewards, and two lines of its numbers, each within 100
columns."""

from collections.abc import Iterable, Mapping
from typing import Any

# Field of metrics.jsonl -> how it is printed. Fields that a run does not have are left out.
_NUMBERS = {
    "loss": "loss {:.4f}",
    "reward_std": "reward std {:.2f}",
    "response_length": "{:.0f} tokens",
    "kl": "KL {:.4f}",
    "clip_fraction": "clipped {:.3f}",
    "grad_norm": "gradient {:.3g}",
    "learning_rate": "rate {:.2g}",
}
WIDTH = 100


def step_lines(record: Mapping[str, Any]) -> tuple[str, str]:
    """The numbers of a record of metrics.jsonl, and its seconds by phase, the longest first."""
    numbers = []
    for field, form in _NUMBERS.items():
        value = record.get(field)
        if value is not None:
            numbers.append(form.format(value))
    phases = []
    for field, seconds in record.items():
        if field.startswith("seconds_"):
            phases.append((seconds, field.removeprefix("seconds_").replace("_", " ")))
    spent = [f"{name} {seconds:.2f}" for seconds, name in sorted(phases, reverse=True)]
    return _joined("", numbers), _joined(f"{record['seconds']:.2f} s: ", spent)


def step_words(record: Mapping[str, Any]) -> str:
    """The mean rewards of a record of metrics.jsonl; of a reward of parts, each part's too."""
    words = [f"reward {record['reward']:.2f}", f"format {record['format_reward']:.2f}"]
    for field, value in record.items():
        name = field.removeprefix("part_")
        # The format of a sum is the reward's own, which stands there already.
        if name not in (field, "format"):
            words.append(f"{name} {value:.2f}")
    return ", ".join(words)


def _joined(beginning: str, items: Iterable[str]) -> str:
    """The items with commas between, indented; those that do not fit in the line are left out."""
    line = f"  {beginning}"
    for item in items:
        separator = "" if line.endswith(("  ", ": ")) else ", "
        if len(line) + len(separator) + len(item) > WIDTH:
            break
        line += separator + item
    return line
