"""Sample many answers a problem and keep the good ones, as data for SFT (DeepSeek-AI 2025,
arXiv:2501.12948, section 2.3.3).

uv run -m alignment.rejection_sample --model checkpoints/tiny_grpo_clip_seed0/final --output
kept.jsonl"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console

from alignment.args import RejectionArgs, parse
from alignment.builders.base_models import check_model_path, check_tokenizer_files, resolve_model
from alignment.builders.checks import check, check_output, check_rules
from alignment.builders.data_checks import check_training_split
from alignment.builders.devices import roles_of
from alignment.core.records import Completion, Endless, Group, Problem
from alignment.data.pass_rates import pass_rate_rows
from alignment.data.prompts import read_system_prompt
from alignment.data.tasks.own_data import read_examples
from alignment.rewards.rules import find_rule, language_consistency, score_groups
from alignment.rollouts.config import training_problems, with_short_prompts
from alignment.runs.run_folder import numbered_names
from alignment.system.errors import UserError, run_command
from alignment.system.files import write_atomically, write_jsonl
from alignment.system.signals import received_signal
from alignment.system.terminal import count_parts, make_console, make_table

REASONS = (
    "unfinished",
    "wrong",
    "badly formatted",
    "unreadable",
    "in several languages",
    "said already",
    "not the best",
)
LONGEST_PARAGRAPH = 2000  # characters


def main() -> None:
    args = parse(RejectionArgs)
    console = make_console(args.quiet)
    output = Path(args.output)
    if not args.output:
        raise UserError("--output: name the file to write, such as --output kept.jsonl")
    written_files = [output]
    if args.num_samples > 1:
        written_files.append(rates_file(output))
    for file in written_files:
        if file.exists():
            raise UserError(f"--output {file} exists already: delete it, or name another file")
    task = check(args)
    check_output(output.parent, output.name)
    roles_of(args)  # Devices that cannot be are refused before a model loads.
    check_model_path(args.model, "--model")
    check_tokenizer_files(task, args.model)
    check_rules(args, task, check_training_split(task, args.dataset_path))
    groups = sample_groups(args, console)
    rows, rejected = select(groups, args.keep, args.min_consistency)
    answers = len(groups) * args.num_samples
    if received_signal():
        # the name of a finished one is what a pipeline waits for
        output = stopped_file(output)
        print(f"stopped by a signal: these are the first {len(groups)} problems", file=sys.stderr)
    if not rows:
        reasons = ", ".join(f"{number} {reason}" for reason, number in rejected.most_common())
        raise UserError(f"nothing was kept of {answers} answers: {reasons}; nothing is written")
    output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    if args.num_samples > 1:
        write_jsonl(rates_file(output), pass_rate_rows(groups, args.task, args.model))
    title = f"{len(groups)} problems x {args.num_samples} answers of {args.model}"
    counts = [("kept", str(len(rows)))]
    counts += [(f"rejected: {reason}", str(rejected[reason])) for reason in REASONS]
    console.print(make_table(title, ("", "answers"), counts, numbers=("answers",)))
    solved = len({row["id"] for row in rows})
    console.print(
        f"{output}: {len(rows)} answers to {solved} of {len(groups)} problems",
        markup=False,
        soft_wrap=True,
    )
    if args.num_samples > 1:
        console.print(f"pass rates: {rates_file(output)}", markup=False, soft_wrap=True)


def rates_file(output: Path) -> Path:
    """The file of all problems' pass rates, beside that of the kept answers."""
    return output.with_name(f"{output.stem}.pass_rates.jsonl")


def stopped_file(output: Path) -> Path:
    """The file for the answers of a command that a signal stops before it has those for `output`:
    OUTPUT.stopped, or where an earlier one has left that, OUTPUT-2.stopped, and so on."""
    for name in numbered_names(output.name):
        file = output.with_name(f"{name}.stopped")
        if not file.exists() and not rates_file(file).exists():
            break
    return file


def sample_groups(args: RejectionArgs, console: Console) -> list[Group]:
    """Scored answers to the first training problems, a group a problem. Where a signal arrives,
    those of the first of these problems."""
    from alignment.builders.evaluations import eval_sampling
    from alignment.builders.run_plan import plan_sampling
    from alignment.builders.samplers import make_sampler, stoppable
    from alignment.builders.warm_start import encode_problems
    from alignment.model.loading import load_tokenizer
    from alignment.sampling.sampler import engine_name

    task = args.task_in_format
    path = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(path)
    chosen = training_problems(
        task.training_problems(args.dataset_path), 0, args.num_problems, tokenizer
    )
    assert not isinstance(chosen, Endless)  # --num_problems is at least 1
    chosen = task.with_prompts(
        chosen,
        tokenizer,
        read_system_prompt(args.system_prompt),
        read_examples(args.few_shot),
    )
    chosen = with_short_prompts(chosen, args.max_prompt_tokens, tokenizer)
    prompts = [problem.prompt for problem in chosen]
    # refuses long ones, before a model loads
    encode_problems(chosen, path, tokenizer, args.max_new_tokens)
    engine = plan_sampling(args, path)
    sampler = make_sampler(engine, tokenizer, console=console)
    status = (
        f"sampling {len(chosen)} problems x {args.num_samples} with {engine_name(args.sampler)}"
    )
    with (
        closing(sampler),
        count_parts(status, len(chosen) * args.num_samples, console, "response") as ended,
    ):
        completions = stoppable(sampler, engine.config.device).sample(
            prompts, eval_sampling(args, args.num_samples), ended
        )
        answered = chosen[: len(completions)] if received_signal() else chosen
        rule = find_rule(args.evaluation_rule, args.reward_timeout)
        return score_groups(answered, completions, rule)


def select(
    groups: Sequence[Group], keep: str, min_consistency: float
) -> tuple[list[dict], Counter[str]]:
    """The rows of the kept answers, and the number of rejected answers by reason."""
    rows: list[dict] = []
    rejected: Counter[str] = Counter()
    for group in groups:
        passed: list[str] = []
        passed_words: list[list[str]] = []
        for completion, score in zip(group.completions, group.scores, strict=True):
            words = completion.text.split()
            reason = rejection_reason(completion, score, group.problem, min_consistency)
            if reason is None and words in passed_words:
                reason = "said already"
            if reason is not None:
                rejected[reason] += 1
                continue
            passed.append(completion.text)
            passed_words.append(words)
        if keep == "best" and passed:
            rejected["not the best"] += len(passed) - 1
            passed = [min(passed, key=len)]
        shared = {
            "id": group.problem.id,
            "question": group.problem.question,
            "ground_truth": group.problem.ground_truth,
        }
        rows += [{**shared, "response": text} for text in passed]
    return rows, rejected


def rejection_reason(
    completion: Completion, score: dict[str, float], problem: Problem, min_consistency: float
) -> str | None:
    """The first of `REASONS` that rejects an answer by itself, None where none does."""
    if completion.finish_reason != "stop":
        return "unfinished"
    if not score["answer_reward"]:
        return "wrong"
    if score["format_reward"] < 1:
        return "badly formatted"
    if not is_readable(completion.text):
        return "unreadable"
    if language_consistency(problem, completion.text) < min_consistency:
        return "in several languages"
    return None


def is_readable(text: str) -> bool:
    """Whether a text is printable, without code blocks and without very long paragraphs."""
    if "\ufffd" in text or "```" in text:
        return False
    if not all(letter.isprintable() or letter in "\n\t" for letter in text):
        return False
    paragraphs = re.split(r"\n\s*\n", text)
    return max(len(paragraph) for paragraph in paragraphs) <= LONGEST_PARAGRAPH


if __name__ == "__main__":
    run_command(main)
