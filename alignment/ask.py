"""Ask models a question, and read what they answer.

uv run -m alignment.ask --models tiny checkpoints/tiny_sft --question "What is 3 + 4?" --gold 7
uv run -m alignment.ask --model checkpoints/tiny_grpo_clip_seed0
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alignment.args import AskArgs, parse
from alignment.builders.base_models import (
    check_model_path,
    check_tokenizer_files,
    has_chat_template,
    is_trained_here,
    resolve_model,
)
from alignment.builders.checks import check, check_rules
from alignment.builders.devices import roles_of
from alignment.core.records import Completion, Problem, Score
from alignment.data.prompts import CHAT, read_system_prompt
from alignment.data.tasks.own_data import read_examples
from alignment.rewards.rules import find_rule, score_groups
from alignment.system.errors import UserError, run_command
from alignment.system.terminal import make_console, printable, say_once

if TYPE_CHECKING:  # since it loads torch
    from alignment.sampling.sampler import Sampler


def main() -> None:
    args = parse(AskArgs)
    check_question(args)
    console = make_console()
    questions = typed_questions() if not args.question else iter([args.question])
    with ExitStack() as opened:
        respondents = open_respondents(args, console, opened)
        for question in questions:
            for name, respondent in respondents.items():
                console.rule(printable(name, line_breaks=False), align="left")
                try:
                    respondent.answer(question)
                except UserError as error:
                    if args.question:
                        raise
                    print(f"error: {error}", file=sys.stderr)


def check_question(args: AskArgs) -> None:
    """Raise `UserError` for arguments that cannot be."""
    check(args)
    roles_of(args)  # Devices that cannot be are refused before a model loads.
    # What is wrong with the last one is said before the first one loads.
    for model in args.all_models:
        check_model_path(model, "--models" if args.models else "--model")
    for model in args.all_models:
        own_args = in_format_of(model, args, has_chat_template(model) is True)
        task = own_args.task_in_format
        check_tokenizer_files(task, model)
        resolve_model(model, args.output_dir)
        if args.gold:
            check_rules(own_args, task, [Problem("question", args.question, "", args.gold)])


def in_format_of(model: str, args: AskArgs, has_template: bool) -> AskArgs:
    """The arguments with the prompt that a model is asked by: without --prompt, the model's own
    chat template where it has one and was not trained here; that is said."""
    if args.prompt or not has_template or is_trained_here(model):
        return args
    say_once(f"{model} is asked in its own chat template; --prompt r1_zero asks as the task does")
    return replace(args, prompt=CHAT)


def typed_questions() -> Iterator[str]:
    """The lines of the standard input, until an empty one or the end."""
    is_typed = sys.stdin.isatty()
    while True:
        if is_typed:
            print("question (empty to end): ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


@dataclass(frozen=True)
class Respondent:
    """A model that answers questions."""

    args: AskArgs
    path: str
    """The model's folder."""
    tokenizer: Any
    sampler: Sampler

    def answer(self, question: str) -> None:
        """Print the model's answers to a question, and their rewards where there is a gold one.
        Raises `UserError` for a question that does not fit in the model's context."""
        from alignment.builders.evaluations import eval_sampling
        from alignment.builders.warm_start import encode_problems

        args = self.args
        problem = Problem("question", question, "", args.gold)
        system_prompt = read_system_prompt(args.system_prompt)
        examples = read_examples(args.few_shot)
        problems = args.task_in_format.with_prompts(
            [problem], self.tokenizer, system_prompt, examples
        )
        encode_problems(problems, self.path, self.tokenizer, args.max_new_tokens)
        sampling = eval_sampling(args, args.num_samples)
        completions = self.sampler.sample([problems[0].prompt], sampling)
        scores: list[Score | None] = [None] * args.num_samples
        if args.gold:
            rule = find_rule(args.evaluation_rule, args.reward_timeout)
            [group] = score_groups(problems, completions, rule)
            scores = list(group.scores)
        for completion, score in zip(completions[0], scores, strict=True):
            print_answer(completion, score)


def print_answer(completion: Completion, score: Score | None) -> None:
    """Print a response, how it ended and its rewards."""
    ending = "cut at --max_new_tokens" if completion.finish_reason == "length" else "ended"
    facts = [f"{len(completion.token_ids)} tokens, {ending}"]
    if score is not None:
        facts += [f"{name} {value:g}" for name, value in score.items()]
    print(printable(completion.text.strip()))
    print(f"[{', '.join(facts)}]", flush=True)


def open_respondents(
    args: AskArgs, console: Console, opened: ExitStack
) -> Mapping[str, Respondent]:
    """The models by name, each with a sampler that `opened` closes."""
    from alignment.builders.run_plan import plan_evaluation
    from alignment.builders.samplers import make_sampler
    from alignment.model.loading import load_tokenizer

    respondents = {}
    for model in args.all_models:
        path = resolve_model(model, args.output_dir)
        tokenizer = load_tokenizer(path)
        engine = plan_evaluation(args, path)
        sampler = opened.enter_context(closing(make_sampler(engine, tokenizer, console=console)))
        own_args = in_format_of(model, args, bool(getattr(tokenizer, "chat_template", None)))
        respondents[model] = Respondent(own_args, path, tokenizer, sampler)
    return respondents


if __name__ == "__main__":
    run_command(main)
