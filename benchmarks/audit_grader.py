"""Audit the grading of a run: grade its completions again with three graders and list their
disagreements.

uv run -m benchmarks.audit_grader --completions checkpoints/tiny_grpo_clip_seed0"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from alignment.args import parse
from alignment.data.rows import read_rows
from alignment.system.errors import UserError, run_command
from alignment.system.files import write_jsonl
from alignment.system.terminal import count_parts, make_console, make_table, printable

GRADERS = ("ours", "math-verify", "reference")
MAX_PRINTED = 20  # disagreements; the file lists all

Pair = tuple[str, str]  # answer and ground truth


@dataclass(frozen=True)
class AuditArgs:
    """Grade logged completions with our grader, math-verify and the reference rule, and show their
    disagreements."""

    completions: str  # A run's folder, its completions folder, or one file of completions.
    labels: str = ""
    """File of disagreements in which a person has set "label"; empty: grader_disagreements.jsonl in
    the run's folder."""


def completion_files(location: str) -> list[Path]:
    """The completion files of a run, evaluations first. Raises `UserError` if there are none."""
    path = Path(location)
    if path.is_file():
        return [path]
    folder = path / "completions" if (path / "completions").is_dir() else path
    if not (files := sorted(folder.glob("eval_*.jsonl")) + sorted(folder.glob("rollout_*.jsonl"))):
        raise UserError(
            f"--completions {location}: no eval_*.jsonl or rollout_*.jsonl there; name a run's"
            " folder"
        )
    return files


def read_completions(file: Path) -> list[Pair]:
    """The (response, ground truth) of each line. Raises `UserError`, naming file and line, for a
    line without them."""
    return [
        (row["text"], row["ground_truth"]) for _, row in read_rows(file, "text", "ground_truth")
    ]


def math_verify_detail(answer: str, truth: str) -> tuple[bool, str]:
    """math-verify's verdict on the unchanged texts and its reading of the answer."""
    from alignment.rewards.grading.cascade import (
        MAX_CHARS,
        SECONDS,
        WORKERS,
        CallFailed,
        math_verify_reading,
    )

    if max(len(answer), len(truth)) > MAX_CHARS:
        return False, "too long to ask"
    try:
        reading = f"{math_verify_reading.__module__}:{math_verify_reading.__name__}"
        return tuple(WORKERS.submit(reading, (answer, truth), SECONDS).result())
    except CallFailed as failure:
        return False, str(failure)


def grade_all(pairs: Sequence[Pair], ended: Callable[[], None] = lambda: None) -> list[dict]:
    """Each distinct pair, after which `ended` is called: how often it occurs, and verdict and
    reason of each of `GRADERS`."""
    from alignment.rewards.grading.cascade import WORKERS, grade_detail
    from benchmarks.reference_grader import reference_verdict

    graders = (grade_detail, math_verify_detail, reference_verdict)
    counts, graded = Counter(pairs), []
    with ThreadPoolExecutor(
        WORKERS.size
    ) as threads:  # each waits for a worker that runs math-verify
        all_grades = threads.map(lambda pair: [grader(*pair) for grader in graders], counts)
        for (pair, count), grades in zip(counts.items(), all_grades, strict=True):
            verdicts, reasons = (
                dict(zip(GRADERS, column, strict=True)) for column in zip(*grades, strict=True)
            )
            facts = {"count": count, "verdicts": verdicts, "reasons": reasons}
            graded.append({"answer": pair[0], "ground_truth": pair[1], **facts})
            ended()
    return graded


def error_rates(labelled: Sequence[Mapping]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Each grader's false accepts of pairs labelled wrong, (3, 10), and false rejects of right
    ones; a pair counts once."""
    rates = {}
    for grader in GRADERS:
        n = Counter((row["verdicts"][grader], row["label"]) for row in labelled)
        rates[grader] = tuple(
            (n[not label, label], n[True, label] + n[False, label]) for label in (False, True)
        )
    return rates


def read_labels(file: Path) -> dict[Pair, bool]:
    """The labels in a file of disagreements. Raises `UserError`, naming file and line, for a
    malformed line."""
    labels = {}
    for location, row in read_rows(file, "answer", "ground_truth"):
        if (label := row.get("label")) not in (True, False, None):
            raise UserError(f'{location}: "label" must be true, false or null')
        if label is not None:
            labels[row["answer"], row["ground_truth"]] = bool(label)
    return labels


def audit(args: AuditArgs, console: Console) -> Path:
    """Print the audit, write the disagreements to a file without losing the labels already in it,
    and return the file."""
    from alignment.rewards.r1_zero import extract_answer

    files = completion_files(args.completions)
    answers = {
        file: [(extract_answer(text), truth) for text, truth in read_completions(file)]
        for file in files
    }
    run_folder = (
        files[0].parent.parent if files[0].parent.name == "completions" else files[0].parent
    )
    labels_file = Path(args.labels) if args.labels else run_folder / "grader_disagreements.jsonl"
    if args.labels and not labels_file.is_file():
        raise UserError(f"--labels {args.labels}: there is no such file")
    if not any(answers.values()):
        raise UserError(f"--completions {args.completions}: the files there are empty")
    labels = read_labels(labels_file) if labels_file.exists() else {}
    pairs = [
        (answer, truth) for file in files for answer, truth in answers[file] if answer is not None
    ]
    with count_parts(
        f"grading {len(pairs)} answers", len(set(pairs)), console, "distinct one"
    ) as ended:
        graded = {(row["answer"], row["ground_truth"]): row for row in grade_all(pairs, ended)}
    disputed = (
        (pair, row) for pair, row in graded.items() if len(set(row["verdicts"].values())) > 1
    )
    rows = sorted(
        ({**row, "label": labels.pop(pair, None)} for pair, row in disputed),
        key=lambda row: -row["count"],
    )
    # A label is a person's work: the file keeps it, even for a pair that is no longer disputed or
    # not in this audit.
    kept = [
        {"answer": answer, "ground_truth": truth, "label": label}
        for (answer, truth), label in labels.items()
    ]
    write_jsonl(labels_file, [*rows, *kept])
    _print_accuracy(answers, graded, console)
    _print_disagreements(rows, console)
    _print_rates([row for row in rows if row["label"] is not None], console)
    note = (
        f'{len(rows)} disagreements: {labels_file}; set "label" to true or false there and run this'
        " again"
    )
    console.print(
        note if rows else "the three graders agree on every answer", markup=False, soft_wrap=True
    )
    return labels_file


def _print_accuracy(
    answers: Mapping[Path, list], graded: Mapping[Pair, Mapping], console: Console
) -> None:
    """Print each grader's accuracy for each evaluation, and for all rollouts together."""
    groups = {file.stem: pairs for file, pairs in answers.items() if file.stem.startswith("eval")}
    others = [pair for file, pairs in answers.items() if file.stem not in groups for pair in pairs]
    groups |= {"rollouts" if groups else "completions": others} if others else {}
    rows = []
    for name, pairs in groups.items():
        accepted = [
            sum(pair[0] is not None and graded[pair]["verdicts"][grader] for pair in pairs)
            for grader in GRADERS
        ]
        rows.append(
            (name, str(len(pairs)), *(f"{count / max(1, len(pairs)):.4f}" for count in accepted))
        )
    columns = ("completions", *GRADERS)
    console.print(
        make_table("accuracy as each grader reads it", ("", *columns), rows, numbers=columns)
    )


def _print_disagreements(rows: Sequence[Mapping], console: Console) -> None:
    cells = []
    for row in rows[:MAX_PRINTED]:
        verdicts = (
            f"{'right' if row['verdicts'][grader] else 'wrong'} ({row['reasons'][grader]})"
            for grader in GRADERS
        )
        texts = (
            printable(row["answer"])[:60],
            printable(row["ground_truth"])[:60],
            str(row["count"]),
            *verdicts,
        )
        cells.append([text.replace("[", r"\[") for text in texts])
    if rows:
        title = f"disagreements, the most frequent {len(cells)} of {len(rows)}"
        console.print(make_table(title, ("answer", "ground truth", "times", *GRADERS), cells))


def _print_rates(labelled: Sequence[Mapping], console: Console) -> None:
    columns, rows = ("false accepts", "false rejects"), []
    for grader, rates in error_rates(labelled).items():
        rows.append(
            (
                grader,
                *(
                    f"{n} of {total} ({n / total:.0%})" if total else "no such label"
                    for n, total in rates
                ),
            )
        )
    if labelled:
        title = f"errors on {len(labelled)} labelled disagreements"
        console.print(make_table(title, ("grader", *columns), rows, numbers=columns))


def main() -> None:
    audit(parse(AuditArgs), make_console())


if __name__ == "__main__":
    run_command(main)
