r"""The audit of a base model: its accuracy under each format of prompt and answer.

A base model that is asked in a format which it does not know scores little, and a run that begins
from that score gains by teaching the format ("Incorrect Baseline Evaluations Call into Question
Recent LLM-RL Claims", Chandak, Goel and Prabhu 2025; Liu et al. 2025, arXiv:2503.20783, section
2.2). The best of these accuracies is the one to improve on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alignment.system.files import write_atomically, write_json

FILE = "audit_base.json"  # read by the summary of a run
STOPPED = "Stopped before every format had all problems: the best one may be another.\n"


@dataclass(frozen=True)
class AuditedFormat:
    """The flags of one evaluation of the audit."""

    name: str
    prompt: str
    reward: str
    examples: int = 0


AUDITED_FORMATS = (
    AuditedFormat("bare question", "question", "flexible"),
    AuditedFormat("chat and boxed", "chat", "boxed"),
    AuditedFormat("r1_zero", "r1_zero", "r1_zero"),
    AuditedFormat("few-shot", "question_answer", "boxed", examples=4),
)
HEADINGS = (
    "format",
    "prompt",
    "rule",
    "problems",
    "accuracy",
    "95 % interval",
    "flexible",
    "format rate",
    "finished",
    "tokens",
)


def best_first(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The evaluations of an audit, the most accurate first; ties stay in their order."""
    return sorted(rows, key=lambda row: row["avg_all_rewards"], reverse=True)


def audit_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The evaluations of one model on one task, best first, as a Markdown table.

    A row has "format", "prompt" and "rule" beside what `evaluate_vllm` records."""
    lines = [HEADINGS, tuple("---" for _ in HEADINGS)]
    for row in best_first(rows):
        low, high = row["avg_all_rewards_ci"]
        lines.append(
            (
                row["format"],
                f"`{row['prompt']}`",
                f"`{row['rule']}`",
                problems_in_words(row),
                f"{row['avg_all_rewards']:.3f}",
                f"{low:.3f} .. {high:.3f}",
                f"{row['reward_flexible']:.3f}",
                f"{row['avg_format_rewards']:.2f}",
                f"{row['finished']:.2f}",
                f"{row['response_length']:.0f}",
            )
        )
    widths = []
    for column in zip(*lines, strict=True):
        widths.append(max(len(cell) for cell in column))
    text = ""
    for cells in lines:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        text += f"| {' | '.join(padded)} |\n"
    return text


def problems_in_words(row: Mapping[str, Any]) -> str:
    """The number of problems of an evaluation, and of how many, where it was stopped: 8 of 20."""
    number = row["problems"]
    left_out = row.get("left_out", 0)
    return f"{number} of {number + left_out}" if left_out else str(number)


def audit_title(rows: Sequence[Mapping[str, Any]]) -> str:
    """What the table of `audit_table` is of."""
    first = rows[0]
    return f"{first['model']} on {first['task']}, best format first"


def write_audit(folder: Path, rows: Sequence[Mapping[str, Any]], is_complete: bool = True) -> str:
    """Write audit_base.json and audit_base.md to `folder`, and return the latter's text: a table
    for each model and task.

    Without audit_base.json, from which runs and reports take the best format, where formats or
    problems are lacking: the best of some may not be that of all."""
    tables: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        tables.setdefault((row["model"], row["task"]), []).append(row)
    parts = [f"{audit_title(table)}\n\n{audit_table(table)}" for table in tables.values()]
    if not is_complete:
        parts.insert(0, STOPPED)
    text = "\n".join(parts)
    write_atomically(folder / "audit_base.md", text)
    if is_complete:
        write_json(folder / FILE, {"evaluations": best_first(rows)})
    return text
