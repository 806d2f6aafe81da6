"""Audit the grading of a run: grade its completions again with three graders and list where they disagree.

uv run -m alignment.audit_grader --completions checkpoints/tiny_grpo_clip_seed0
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from alignment.rewards.grading.ask_math_verify import math_verify_many
from alignment.rewards.grading.cascade import grade_many
from alignment.rewards.grading.reference import reference_verdict
from alignment.rewards.r1_zero import extract_answer
from alignment.system.errors import UserError, run_command
from alignment.system.files import write_atomically
from alignment.system.terminal import make_console, printable

GRADERS = ("ours", "math-verify", "reference")
SHOWN = 20  # disagreements printed; the file holds all

Pair = tuple[str, str]


@dataclass(frozen=True)
class AuditArgs:
    """Grade logged completions with our grader, math-verify and the reference rule, and show where they disagree."""

    completions: str
    """A run's folder, its completions folder, or one file of completions."""
    labels: str = ""
    """The file of disagreements in which a person has set "label"; empty: grader_disagreements.jsonl in the run's folder."""


@dataclass(frozen=True)
class Graded:
    """One answer with its ground truth: how often it was given, what each grader says of it, and the reason."""

    answer: str
    ground_truth: str
    count: int
    verdicts: Mapping[str, bool]
    reasons: Mapping[str, str]

    @property
    def disputed(self) -> bool:
        return len(set(self.verdicts.values())) > 1


@dataclass(frozen=True)
class Rates:
    """A grader's errors on labelled disagreements; a rate is None where no label allows for that error."""

    false_accepts: int
    wrong: int
    false_rejects: int
    right: int


def completion_files(place: str) -> list[Path]:
    """The files of completions of a run, evaluations first. Raises `UserError` where there are none."""
    path = Path(place)
    if path.is_file():
        return [path]
    folder = path / "completions" if (path / "completions").is_dir() else path
    files = sorted(folder.glob("eval_*.jsonl")) + sorted(folder.glob("rollout_*.jsonl"))
    if not files:
        raise UserError(f"--completions {place}: no eval_*.jsonl or rollout_*.jsonl there; name a run's folder")
    return files


def read_completions(file: Path) -> list[tuple[str, str]]:
    """(response, ground truth) of each line. Raises `UserError`, naming file and line, for a line that has not got them."""
    found = []
    for number, line in lines_of(file):
        try:
            record = json.loads(line)
            text, truth = record["text"], record["ground_truth"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f'{file}:{number}: not a completion; a line needs "text" and "ground_truth"') from None
        if not (isinstance(text, str) and isinstance(truth, str)):
            raise UserError(f'{file}:{number}: "text" and "ground_truth" must be text')
        found.append((text, truth))
    return found


def lines_of(file: Path) -> list[tuple[int, str]]:
    """The numbered lines that are not blank. Raises `UserError` where the file is not text."""
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def grade_all(pairs: Sequence[Pair]) -> list[Graded]:
    """Each distinct pair with the three graders' verdicts."""
    counts = Counter(pairs)
    distinct = list(counts)
    ours = grade_many([answer for answer, _ in distinct], [truth for _, truth in distinct])
    peers = math_verify_many(distinct)
    graded = []
    for pair, mine, peer in zip(distinct, ours, peers, strict=True):
        outcomes = {"ours": (mine.equal, mine.stage), "math-verify": peer, "reference": reference_verdict(*pair)}
        verdicts = {grader: equal for grader, (equal, _) in outcomes.items()}
        reasons = {grader: reason for grader, (_, reason) in outcomes.items()}
        graded.append(Graded(*pair, counts[pair], verdicts, reasons))
    return graded


def error_rates(labelled: Sequence[Mapping]) -> dict[str, Rates]:
    """Each grader's false accepts and false rejects among labelled disagreements, every distinct one counted once."""
    return {
        grader: Rates(
            false_accepts=sum(row["verdicts"][grader] and not row["label"] for row in labelled),
            wrong=sum(not row["label"] for row in labelled),
            false_rejects=sum(not row["verdicts"][grader] and row["label"] for row in labelled),
            right=sum(row["label"] for row in labelled),
        )
        for grader in GRADERS
    }


def read_labels(file: Path) -> dict[Pair, bool]:
    """The labels a person has set, by answer and ground truth. Raises `UserError`, naming the line, for anything else."""
    labels = {}
    for number, line in lines_of(file):
        try:
            row = json.loads(line)
            pair, label = (row["answer"], row["ground_truth"]), row.get("label")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f'{file}:{number}: needs "answer", "ground_truth" and "label"') from None
        if not all(isinstance(text, str) for text in pair):
            raise UserError(f'{file}:{number}: "answer" and "ground_truth" must be text')
        if label not in (True, False, None):
            raise UserError(f'{file}:{number}: "label" must be true, false or null')
        if label is not None:
            labels[pair] = bool(label)
    return labels


def audit(args: AuditArgs, console: Console) -> Path:
    """Print the audit and write its disagreements; returns that file. Labels set in it before are kept."""
    files = completion_files(args.completions)
    responses = {file: read_completions(file) for file in files}
    answers = {file: [(extract_answer(text), truth) for text, truth in found] for file, found in responses.items()}
    run = files[0].parent.parent if files[0].parent.name == "completions" else files[0].parent
    target = Path(args.labels) if args.labels else run / "grader_disagreements.jsonl"
    if args.labels and not target.is_file():
        raise UserError(f"--labels {args.labels}: there is no such file")
    if not any(responses.values()):
        raise UserError(f"--completions {args.completions}: the files there are empty")
    labels = read_labels(target) if target.exists() else {}
    pairs = [(answer, truth) for found in answers.values() for answer, truth in found if answer is not None]
    with console.status(f"grading {len(pairs)} answers, {len(set(pairs))} of them distinct"):
        graded = grade_all(pairs)
    rows = [
        {**dataclasses.asdict(one), "label": labels.get((one.answer, one.ground_truth))}
        for one in sorted(graded, key=lambda one: -one.count)
        if one.disputed
    ]
    # A label is a person's work: it stays, though its answer be agreed on by now or not among those of this audit.
    listed = {(row["answer"], row["ground_truth"]) for row in rows}
    kept = [{"answer": a, "ground_truth": t, "label": label} for (a, t), label in labels.items() if (a, t) not in listed]
    write_atomically(target, "".join(json.dumps(row) + "\n" for row in [*rows, *kept]))
    _print_accuracy(answers, {(one.answer, one.ground_truth): one.verdicts for one in graded}, console)
    _print_disagreements(rows, console)
    _print_rates([row for row in rows if row["label"] is not None], console)
    if rows:
        note = f'{len(rows)} disagreements: {target}; set "label" to true or false there and run this again'
        console.print(note, markup=False, soft_wrap=True)
    else:
        console.print("the three graders agree on every answer")
    return target


def _print_accuracy(answers: Mapping[Path, list], verdicts: Mapping[Pair, Mapping[str, bool]], console: Console) -> None:
    """How the accuracy of each evaluation, and of all rollouts together, would have read under each grader."""
    groups = {file.stem: found for file, found in answers.items() if file.stem.startswith("eval")}
    others = [pair for file, found in answers.items() if file.stem not in groups for pair in found]
    groups |= {"rollouts" if groups else "completions": others} if others else {}
    table = Table(title="accuracy as each grader reads it")
    for heading in ("", "completions", *GRADERS):
        table.add_column(heading, justify="right" if heading else "left")
    for name, found in groups.items():
        shares = [
            sum(pair[0] is not None and verdicts[pair][grader] for pair in found) / max(1, len(found)) for grader in GRADERS
        ]
        table.add_row(name, str(len(found)), *(f"{share:.4f}" for share in shares))
    console.print(table)


def _print_disagreements(rows: Sequence[Mapping], console: Console) -> None:
    if not rows:
        return
    table = Table(title=f"disagreements, the most frequent {min(SHOWN, len(rows))} of {len(rows)}")
    for heading in ("answer", "ground truth", "times", *GRADERS):
        table.add_column(heading)
    for row in rows[:SHOWN]:
        said = (f"{'right' if row['verdicts'][grader] else 'wrong'} ({row['reasons'][grader]})" for grader in GRADERS)
        cells = (printable(row["answer"])[:60], printable(row["ground_truth"])[:60], str(row["count"]), *said)
        table.add_row(*(cell.replace("[", r"\[") for cell in cells))
    console.print(table)


def _print_rates(labelled: Sequence[Mapping], console: Console) -> None:
    if not labelled:
        return
    table = Table(title=f"errors on {len(labelled)} labelled disagreements")
    for heading in ("grader", "false accepts", "false rejects"):
        table.add_column(heading, justify="left" if heading == "grader" else "right")
    for grader, rates in error_rates(labelled).items():
        cells = ((rates.false_accepts, rates.wrong), (rates.false_rejects, rates.right))
        table.add_row(grader, *(f"{errors} of {of} ({errors / of:.0%})" if of else "no such label" for errors, of in cells))
    console.print(table)


def main() -> None:
    audit(tyro.cli(AuditArgs, use_underscores=True), make_console())


if __name__ == "__main__":
    run_command(main)
