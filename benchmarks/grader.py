"""Our grader beside math-verify and the published reference rule, on the same pairs in one run:
right, and how fast.

uv run -m benchmarks.grader                                    # the labelled pairs of
tests/rewards/grading uv run -m benchmarks.grader --gsm8k dataset/gsm8k --golds 500  # and GSM8K's
answers in 20 spellings each
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import tyro
from rich.console import Console
from rich.table import Table

from alignment.data.tasks.published import problems
from alignment.rewards.grading import cascade
from alignment.rewards.grading.cascade import grade
from benchmarks.reference_grader import reference_verdict

PAIRS = Path(__file__).parents[1] / "tests" / "rewards" / "grading" / "pairs.jsonl"


class Pair(NamedTuple):
    answer: str
    truth: str
    equal: bool


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


def math_verify(answer: str, truth: str) -> bool:
    """As its documentation uses it, with its own time limits."""
    from math_verify import parse, verify

    return verify(parse(f"${truth}$"), parse(f"${answer}$"))


GRADERS: dict[str, Callable[[str, str], bool]] = {
    "ours": grade,
    "ours, fast=True": lambda answer, truth: grade(answer, truth, fast=True),
    "math-verify": math_verify,
    "reference rule": lambda answer, truth: reference_verdict(answer, truth)[0],
}


def forget() -> None:
    """Empty the grader's caches."""
    for cached in (
        cascade._decide,
        cascade.normalise_answer,
        cascade._ask_math_verify_cached,
    ):
        cached.cache_clear()


def compare(title: str, pairs: Sequence[Pair], console: Console) -> None:
    """Print accuracy, recall, false accepts and the time a pair takes, for each grader."""
    equal = sum(pair.equal for pair in pairs)
    table = Table(title=f"{title}: {len(pairs)} pairs, {equal} of them equal")
    for heading in (
        "grader",
        "accuracy",
        "recall",
        "false accepts",
        "median ms",
        "p99 ms",
        "max ms",
        "pairs/s",
    ):
        table.add_column(heading, justify="left" if heading == "grader" else "right")
    for name, grader in GRADERS.items():
        grader("x+1", "1+x")  # what is loaded on first use
        forget()
        verdicts, seconds = [], []
        for pair in pairs:
            start = time.perf_counter()
            verdicts.append(bool(grader(pair.answer, pair.truth)))
            seconds.append(time.perf_counter() - start)
        right = sum(verdict == pair.equal for verdict, pair in zip(verdicts, pairs, strict=True))
        found = sum(verdict and pair.equal for verdict, pair in zip(verdicts, pairs, strict=True))
        false = sum(
            verdict and not pair.equal for verdict, pair in zip(verdicts, pairs, strict=True)
        )
        slow = sorted(seconds)[int(0.99 * len(seconds))]
        table.add_row(
            name,
            f"{right / len(pairs):.2%}",
            f"{found / max(1, equal):.2%}",
            f"{false} of {len(pairs) - equal}",
            *(f"{1000 * value:.3f}" for value in (statistics.median(seconds), slow, max(seconds))),
            f"{len(pairs) / sum(seconds):,.0f}",
        )
    console.print(table)


def main(gsm8k: str = "", golds: int = 500) -> None:
    console = Console(width=120)
    rows = [json.loads(line) for line in PAIRS.read_text("utf-8").splitlines()]
    labelled = [Pair(row["answer"], row["ground_truth"], row["equal"]) for row in rows]
    random.Random(0).shuffle(labelled)
    compare("labelled pairs", labelled, console)
    if not gsm8k:
        return
    truths = [
        problem.ground_truth
        for split in ("train", "test")
        for problem in problems("gsm8k", split, gsm8k)
    ]
    compare(
        "GSM8K, every answer against itself",
        [Pair(truth, truth, True) for truth in truths],
        console,
    )
    drawn = random.Random(0).sample(truths, min(golds, len(truths)))
    pairs = [Pair(text, truth, True) for truth in drawn for text in spellings(truth)]
    pairs += [
        Pair(text, truth, False)
        for truth in drawn
        for text in spellings(str(int(truth.replace(",", "")) + 1))
    ]
    random.Random(1).shuffle(pairs)
    compare(f"{len(drawn)} GSM8K answers in 20 spellings, and so their successors", pairs, console)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
