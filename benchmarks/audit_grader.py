"""How do three graders differ on the completions of a run?

    uv run -m benchmarks.audit_grader --completions checkpoints/tiny_grpo_clip_seed0

Grades them again with ours, math-verify and the reference rule; prints the accuracy of each
evaluation as each grader reads it, and their disagreements. Where a person has labelled those, it
also prints each grader's false accepts and false rejects.
"""

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
    folder = path
    if (path / "completions").is_dir():
        folder = path / "completions"
    files = sorted(folder.glob("eval_*.jsonl")) + sorted(folder.glob("rollout_*.jsonl"))
    if not files:
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

    graders = dict(zip(GRADERS, (grade_detail, math_verify_detail, reference_verdict), strict=True))

    def grade(pair: Pair) -> dict:
        answer, truth = pair
        verdicts = {}
        reasons = {}
        for name, grader in graders.items():
            verdicts[name], reasons[name] = grader(answer, truth)
        return {"verdicts": verdicts, "reasons": reasons}

    counts = Counter(pairs)
    graded = []
    # each thread waits for a worker that runs math-verify
    with ThreadPoolExecutor(WORKERS.size) as threads:
        all_grades = threads.map(grade, counts)
        for ((answer, truth), count), grades in zip(counts.items(), all_grades, strict=True):
            graded.append({"answer": answer, "ground_truth": truth, "count": count, **grades})
            ended()
    return graded


@dataclass(frozen=True)
class ErrorRate:
    """How often a grader is wrong about pairs with one label."""

    errors: int
    pairs: int


@dataclass(frozen=True)
class ErrorRates:
    """How often a grader is wrong; a pair counts once."""

    false_accepts: ErrorRate
    """Of pairs that are labelled wrong."""
    false_rejects: ErrorRate
    """Of pairs that are labelled right."""


def error_rates(labelled: Sequence[Mapping]) -> dict[str, ErrorRates]:
    """Each grader's errors by its name."""
    rates = {}
    for grader in GRADERS:
        of_wrong = [row["verdicts"][grader] for row in labelled if not row["label"]]
        of_right = [row["verdicts"][grader] for row in labelled if row["label"]]
        rates[grader] = ErrorRates(
            false_accepts=ErrorRate(of_wrong.count(True), len(of_wrong)),
            false_rejects=ErrorRate(of_right.count(False), len(of_right)),
        )
    return rates


def read_labels(file: Path) -> dict[Pair, bool]:
    """The labels in a file of disagreements. Raises `UserError`, naming file and line, for a
    malformed line."""
    labels = {}
    for location, row in read_rows(file, "answer", "ground_truth"):
        label = row.get("label")
        if label not in (True, False, None):
            raise UserError(f'{location}: "label" must be true, false or null')
        if label is not None:
            labels[row["answer"], row["ground_truth"]] = bool(label)
    return labels


def audit(args: AuditArgs, console: Console) -> Path:
    """Print the audit, write the disagreements to a file without losing the labels already in it,
    and return the file."""
    from alignment.rewards.r1_zero import extract_answer

    files = completion_files(args.completions)
    answers: dict[Path, list[tuple[str | None, str]]] = {}
    for file in files:
        completions = read_completions(file)
        answers[file] = [(extract_answer(text), truth) for text, truth in completions]
    labels_file = _labels_file(args, files[0])
    if args.labels and not labels_file.is_file():
        raise UserError(f"--labels {args.labels}: there is no such file")
    if not any(answers.values()):
        raise UserError(f"--completions {args.completions}: the files there are empty")
    labels = {}
    if labels_file.exists():
        labels = read_labels(labels_file)

    pairs: list[Pair] = []
    for pairs_of_file in answers.values():
        pairs += [(answer, truth) for answer, truth in pairs_of_file if answer is not None]
    distinct = len(set(pairs))
    with count_parts(f"grading {len(pairs)} answers", distinct, console, "distinct one") as ended:
        graded = {(row["answer"], row["ground_truth"]): row for row in grade_all(pairs, ended)}

    disputed = []
    for pair, row in graded.items():
        if len(set(row["verdicts"].values())) > 1:
            disputed.append({**row, "label": labels.pop(pair, None)})
    disputed.sort(key=lambda row: -row["count"])
    # A label is a person's work: the file keeps it, even for a pair that is no longer disputed or
    # not in this audit.
    kept = []
    for (answer, truth), label in labels.items():
        kept.append({"answer": answer, "ground_truth": truth, "label": label})
    write_jsonl(labels_file, [*disputed, *kept])
    _print_accuracy(answers, graded, console)
    _print_disagreements(disputed, console)
    _print_rates([row for row in disputed if row["label"] is not None], console)
    note = "the three graders agree on every answer"
    if disputed:
        note = (
            f'{len(disputed)} disagreements: {labels_file}; set "label" to true or false there and'
            " run this again"
        )
    console.print(note, markup=False, soft_wrap=True)
    return labels_file


def _labels_file(args: AuditArgs, completions: Path) -> Path:
    """The file of disagreements: --labels, or that in the folder of the run whose file of
    completions this is."""
    if args.labels:
        return Path(args.labels)
    folder = completions.parent
    if folder.name == "completions":
        folder = folder.parent
    return folder / "grader_disagreements.jsonl"


def _print_accuracy(
    answers: Mapping[Path, list], graded: Mapping[Pair, Mapping], console: Console
) -> None:
    """Print each grader's accuracy for each evaluation, and for all rollouts together."""
    groups = {}
    others = []
    for file, pairs in answers.items():
        if file.stem.startswith("eval"):
            groups[file.stem] = pairs
        else:
            others += pairs
    if others and groups:
        groups["rollouts"] = others
    elif others:
        groups["completions"] = others
    rows = []
    for name, pairs in groups.items():
        row = [name, str(len(pairs))]
        for grader in GRADERS:
            accepted = 0
            for answer, truth in pairs:
                if answer is not None and graded[answer, truth]["verdicts"][grader]:
                    accepted += 1
            row.append(f"{accepted / max(1, len(pairs)):.4f}")
        rows.append(row)
    columns = ("completions", *GRADERS)
    title = "accuracy as each grader reads it"
    console.print(make_table(title, ("", *columns), rows, numbers=columns))


def _print_disagreements(rows: Sequence[Mapping], console: Console) -> None:
    """Print the most frequent disagreements."""
    cells = []
    for row in rows[:MAX_PRINTED]:
        answer = printable(row["answer"])[:60]
        truth = printable(row["ground_truth"])[:60]
        texts = [answer, truth, str(row["count"])]
        for grader in GRADERS:
            verdict = "wrong"
            if row["verdicts"][grader]:
                verdict = "right"
            texts.append(f"{verdict} ({row['reasons'][grader]})")
        # which the console would read as markup
        cells.append([text.replace("[", r"\[") for text in texts])
    if rows:
        title = f"disagreements, the most frequent {len(cells)} of {len(rows)}"
        console.print(make_table(title, ("answer", "ground truth", "times", *GRADERS), cells))


def _print_rates(labelled: Sequence[Mapping], console: Console) -> None:
    """Print each grader's errors on disagreements that a person has labelled."""
    rows = []
    for grader, rates in error_rates(labelled).items():
        accepts = _format_rate(rates.false_accepts)
        rows.append((grader, accepts, _format_rate(rates.false_rejects)))
    if labelled:
        columns = ("false accepts", "false rejects")
        title = f"errors on {len(labelled)} labelled disagreements"
        console.print(make_table(title, ("grader", *columns), rows, numbers=columns))


def _format_rate(rate: ErrorRate) -> str:
    if not rate.pairs:
        return "no such label"
    return f"{rate.errors} of {rate.pairs} ({rate.errors / rate.pairs:.0%})"


def main() -> None:
    audit(parse(AuditArgs), make_console())


if __name__ == "__main__":
    run_command(main)
