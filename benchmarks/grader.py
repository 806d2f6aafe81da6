"""How often is our grader right, and how fast, beside math-verify and the published reference rule?

    uv run -m benchmarks.grader
    uv run -m benchmarks.grader --gsm8k dataset/gsm8k --golds 500

Accuracy, recall, false accepts, and milliseconds a pair, of each grader on the same pairs in one
process: the labelled ones of tests/rewards/grading, and with --gsm8k each of GSM8K's answers
against itself, and a sample of them in 20 spellings each, as their own and as their predecessor's.
Our grader's caches are emptied first.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from rich.console import Console

from alignment.data.tasks.published import problems
from alignment.rewards.grading import cascade
from alignment.rewards.grading.cascade import grade
from alignment.system.terminal import make_table
from benchmarks.measuring import ROOT
from benchmarks.reference_grader import reference_verdict

PAIRS = ROOT / "tests" / "rewards" / "grading" / "pairs.jsonl"
NUMBERS = (
    "accuracy",
    "recall",
    "false accepts",
    "median ms",
    "p99 ms",
    "max ms",
    "pairs/s",
)


@dataclass(frozen=True)
class Pair:
    answer: str
    truth: str
    equal: bool
    """Whether a person calls the answer right."""


# --- pairs ----------------------------------------------------------------------------------------


def read_pairs(file: Path) -> list[Pair]:
    """The labelled pairs of a file, in random order."""
    pairs = []
    for line in file.read_text("utf-8").splitlines():
        row = json.loads(line)
        pairs.append(Pair(row["answer"], row["ground_truth"], row["equal"]))
    random.Random(0).shuffle(pairs)
    return pairs


def gsm8k_answers(folder: str) -> list[str]:
    """Every answer of GSM8K."""
    answers = []
    for split in ("train", "test"):
        answers += [problem.ground_truth for problem in problems("gsm8k", split, folder)]
    return answers


def pairs_in_spellings(truths: Sequence[str]) -> list[Pair]:
    """Each whole number in 20 spellings, and as wrong answers the next one in as many; in random
    order."""
    pairs = []
    for truth in truths:
        pairs += [Pair(text, truth, True) for text in spellings(truth)]
    for truth in truths:
        successor = str(int(truth.replace(",", "")) + 1)
        pairs += [Pair(text, truth, False) for text in spellings(successor)]
    random.Random(1).shuffle(pairs)
    return pairs


def spellings(gold: str) -> list[str]:
    """Twenty ways to write a whole number."""
    n = int(gold.replace(",", ""))
    grouped = f"{n:,}"
    return [
        str(n),
        grouped,
        grouped.replace(",", "{,}"),
        grouped.replace(",", r"\,"),
        f"{n}.",
        f"{n}.00",
        f"${n}$",
        rf"\({n}\)",
        f"${grouped}",
        rf"\${n}",
        f"{n} dollars",
        rf"{n}\text{{ miles}}",
        rf"\boxed{{{n}}}",
        rf"\text{{{n}}}",
        f"**{n}**",
        f"x = {n}",
        f"The answer is {n}.",
        rf"\frac{{{2 * n}}}{{2}}",
        f"{n}e0",
        str(n).replace("-", "−") + r" \text{ eggs}",
    ]


# --- graders --------------------------------------------------------------------------------------


def math_verify(answer: str, truth: str) -> bool:
    """As its documentation uses it, with its own time limits."""
    from math_verify import parse, verify

    return verify(parse(f"${truth}$"), parse(f"${answer}$"))


def reference_rule(answer: str, truth: str) -> bool:
    accepts, _ = reference_verdict(answer, truth)
    return accepts


GRADERS: dict[str, Callable[[str, str], bool]] = {
    "ours": grade,
    "ours, fast=True": partial(grade, fast=True),
    "math-verify": math_verify,
    "reference rule": reference_rule,
}


def empty_caches() -> None:
    """Have our grader forget what it has graded."""
    for function in (
        cascade._decide,
        cascade.normalise_answer,
        cascade._ask_math_verify_cached,
    ):
        function.cache_clear()


@dataclass(frozen=True)
class Graded:
    """What a grader made of a pair."""

    pair: Pair
    accepts: bool
    seconds: float


def grade_pairs(grader: Callable[[str, str], bool], pairs: Sequence[Pair]) -> list[Graded]:
    grader("x+1", "1+x")  # what is loaded on first use
    empty_caches()
    graded = []
    for pair in pairs:
        start = time.perf_counter()
        accepts = bool(grader(pair.answer, pair.truth))
        graded.append(Graded(pair, accepts, time.perf_counter() - start))
    return graded


def format_row(name: str, graded: Sequence[Graded]) -> list[str]:
    """The row of a grader."""
    equal = sum(result.pair.equal for result in graded)
    correct = sum(result.accepts == result.pair.equal for result in graded)
    true_accepts = sum(result.accepts and result.pair.equal for result in graded)
    false_accepts = sum(result.accepts and not result.pair.equal for result in graded)
    seconds = sorted(result.seconds for result in graded)
    percentile_99 = seconds[int(0.99 * len(seconds))]
    times = (statistics.median(seconds), percentile_99, seconds[-1])
    return [
        name,
        f"{correct / len(graded):.2%}",
        f"{true_accepts / max(1, equal):.2%}",
        f"{false_accepts} of {len(graded) - equal}",
        *(f"{1000 * value:.3f}" for value in times),
        f"{len(graded) / sum(seconds):,.0f}",
    ]


# --- command --------------------------------------------------------------------------------------


def compare(title: str, pairs: Sequence[Pair], console: Console) -> None:
    """Print a row for each grader."""
    rows = [format_row(name, grade_pairs(grader, pairs)) for name, grader in GRADERS.items()]
    equal = sum(pair.equal for pair in pairs)
    title = f"{title}: {len(pairs)} pairs, {equal} of them equal"
    console.print(make_table(title, ("grader", *NUMBERS), rows, numbers=NUMBERS))


def main(gsm8k: str = "", golds: int = 500) -> None:
    """Print a table for each set of pairs.

    Args:
        gsm8k: GSM8K's folder, for its pairs.
        golds: Answers of GSM8K that are spelled in 20 ways.
    """
    console = Console(width=120)
    compare("labelled pairs", read_pairs(PAIRS), console)
    if not gsm8k:
        return
    truths = gsm8k_answers(gsm8k)
    themselves = [Pair(truth, truth, True) for truth in truths]
    compare("GSM8K, every answer against itself", themselves, console)
    drawn = random.Random(0).sample(truths, min(golds, len(truths)))
    title = f"{len(drawn)} GSM8K answers in 20 spellings, and so their successors"
    compare(title, pairs_in_spellings(drawn), console)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
