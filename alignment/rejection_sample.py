"""Sample many answers a problem and keep the good ones, as data for SFT (DeepSeek-AI 2025, arXiv:2501.12948, section 2.3.3).

uv run -m alignment.rejection_sample --model checkpoints/tiny_grpo_clip_seed0/final --output kept.jsonl
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table

from alignment.args import Args, parse
from alignment.core.records import Completion, Endless, Group, Problem, SamplingConfig
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.data.tasks.jsonl import read_demonstrations
from alignment.policy.loading import load_tokenizer, resolve_model, roles_of, sampler_kind
from alignment.rewards.parts import language_consistency
from alignment.rewards.reward import evaluation_reward, score_groups
from alignment.sampling.sampler import make_sampler, refuse_missing_engine
from alignment.system.errors import UserError, run_command
from alignment.system.files import write_atomically
from alignment.system.terminal import make_console

REASONS = ("unfinished", "wrong", "badly formatted", "unreadable", "in several languages", "said already", "not the best")
LONGEST_PARAGRAPH = 2000  # characters


@dataclass(frozen=True)
class RejectionArgs(Args):
    """Sample answers to training problems, keep those that are right, readable and in one language, and write them as JSONL."""

    output: str = ""
    """File to write, one kept answer a line; `sft --demonstrations` reads it."""
    num_problems: int = 512
    """Training problems to ask, the first ones."""
    num_samples: int = 8
    """Answers sampled for each."""
    keep: Literal["best", "all"] = "all"
    """Of the answers to a problem that pass: the shortest, or all."""
    min_consistency: float = 0.95
    """Share of an answer's words that must be in its question's language."""
    few_shot: str = ""
    """JSONL file of worked examples that are put before each question; empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_problems < 1 or self.num_samples < 1:
            raise UserError(f"--num_problems {self.num_problems} --num_samples {self.num_samples}: both must be at least 1")
        if not 0 <= self.min_consistency <= 1:
            raise UserError(f"--min_consistency {self.min_consistency}: must be from 0 to 1")


def reason_against(completion: Completion, score: dict[str, float], problem: Problem, min_consistency: float) -> str | None:
    """The first of `REASONS` for which an answer is rejected, None where there is none."""
    if completion.finish_reason != "stop":
        return "unfinished"
    if not score["answer_reward"]:
        return "wrong"
    if score["format_reward"] < 1:
        return "badly formatted"
    text = completion.text
    paragraphs = re.split(r"\n\s*\n", text)
    printable = all(letter.isprintable() or letter in "\n\t" for letter in text) and "\ufffd" not in text
    if not printable or "```" in text or max(map(len, paragraphs)) > LONGEST_PARAGRAPH:
        return "unreadable"
    return "in several languages" if language_consistency(problem, text) < min_consistency else None


def select(groups: Sequence[Group], keep: str, min_consistency: float) -> tuple[list[dict], Counter[str]]:
    """The rows that are kept, and how many answers were rejected for which reason."""
    rows, against = [], Counter()
    for group in groups:
        passed: list[str] = []
        for completion, score in zip(group.completions, group.scores, strict=True):
            reason = reason_against(completion, score, group.problem, min_consistency)
            if reason is None and completion.text.split() in [text.split() for text in passed]:
                reason = "said already"
            if reason is None:
                passed.append(completion.text)
            else:
                against[reason] += 1
        if keep == "best" and passed:
            against["not the best"] += len(passed) - 1
            passed = [min(passed, key=len)]
        about = {"id": group.problem.id, "question": group.problem.question, "ground_truth": group.problem.ground_truth}
        rows += [{**about, "response": text} for text in passed]
    return rows, against


def with_examples(problems: Sequence[Problem], file: str, template: str, tokenizer) -> list[Problem]:
    """The problems with worked examples before their prompts. Raises `UserError` where examples have no question."""
    shown = read_demonstrations(Path(file))
    if not shown or not all(problem.question for problem, _ in shown):
        raise UserError(f'--few_shot {file}: every example needs a "question" and a "response", and there must be one')
    asked = prompted([problem for problem, _ in shown], template, tokenizer)
    before = "".join(f"{problem.prompt}{response}\n\n" for problem, (_, response) in zip(asked, shown, strict=True))
    return [dataclasses.replace(problem, prompt=before + problem.prompt) for problem in problems]


def main() -> None:
    args = parse(RejectionArgs)
    console = make_console()
    output = Path(args.output)
    if not args.output:
        raise UserError("--output: name the file to write, such as --output kept.jsonl")
    if output.exists():
        raise UserError(f"--output {output} exists already: delete it, or name another file")
    refuse_missing_engine(args)
    task, roles = find_task(args.task), roles_of(args)
    rule = evaluation_reward(args.reward, task.rules)
    problems = task.problems("train", args.dataset_path)
    number = args.num_problems if isinstance(problems, Endless) else min(args.num_problems, len(problems))
    path = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(path)
    template = args.prompt or task.prompt
    asked = prompted([problems[i] for i in range(number)], template, tokenizer)
    if args.few_shot:
        asked = with_examples(asked, args.few_shot, template, tokenizer)
    sampler = make_sampler(args, path, tokenizer, roles.sample, roles)
    how = SamplingConfig(
        n=args.num_samples,
        temperature=args.sampling_temperature,
        top_p=args.sampling_top_p,
        top_k=args.sampling_top_k,
        max_new_tokens=args.max_new_tokens,
        stop=task.stop,
        seed=args.seed,
    )
    try:
        with console.status(f"sampling {number} problems x {args.num_samples} with {sampler_kind(args)}"):
            groups = score_groups(asked, sampler.sample([problem.prompt for problem in asked], how), rule)
    finally:
        sampler.close()
    rows, against = select(groups, args.keep, args.min_consistency)
    if not rows:
        raise UserError(f"nothing was kept of {number * args.num_samples} answers: {dict(against)}; nothing is written")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    table = Table(title=f"{number} problems x {args.num_samples} answers of {args.model}")
    table.add_column("")
    table.add_column("answers", justify="right")
    table.add_row("kept", str(len(rows)))
    for reason in REASONS:
        table.add_row(f"rejected: {reason}", str(against[reason]))
    console.print(table)
    answered = len({row["id"] for row in rows})
    console.print(f"{output}: {len(rows)} answers to {answered} of {number} problems", markup=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
