"""What --preview prints: prompts, gold answers and their rewards, or the tokens that SFT trains.
Only a tokenizer is loaded."""

from collections.abc import Sequence
from pathlib import Path

from alignment.args import EvaluateArgs, RLArgs, SFTArgs
from alignment.builders.base_models import resolve_model
from alignment.builders.evaluations import prepare_evaluation
from alignment.builders.warm_start import encode_demonstrations, encode_problems
from alignment.core.records import Completion, Endless, Problem
from alignment.core.text import ResponseReader, response_token_ids
from alignment.data.prompts import chosen_prompt
from alignment.data.row_warnings import is_placeholder, why_unmeetable
from alignment.data.tasks import Task
from alignment.model.loading import load_end_ids, load_tokenizer
from alignment.rewards.rules import Reward, RewardFn, find_rule, graded_text
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import open_source
from alignment.system.terminal import printable

# Responses that hold an answer {}, one for each format in which rules look for it.
SHAPES = {
    "in tags": " </think> <answer> {} </answer>",
    "in a box": r" \boxed{{{}}}",
    "bare": " {}",
}


def preview_run(args: RLArgs) -> None:
    """Print the first prompts of a training run, as its warm start reads them where there is one.
    Raises `UserError` for prompts that the run would refuse."""
    model = args.model
    if args.sft_base and Path(args.sft_base).exists():
        model = args.sft_base
    preview_problems(args, model)


def preview_problems(args: RLArgs | EvaluateArgs, model: str) -> None:
    """Print a run's first prompts, or the first test problems, each with the rewards of responses
    that hold its gold answer. Rules see these as text that a model has sampled token by token.
    Raises `UserError` for prompts that the run would refuse."""
    base = resolve_model(model, args.output_dir)
    tokenizer = load_tokenizer(base)
    responses = ResponseReader(tokenizer, load_end_ids(base, tokenizer))
    task = args.task_in_format
    if isinstance(args, RLArgs):
        source = open_source(args.rollout_config, tokenizer)
        every_problem = source.problems
        problems = problems_of_step(every_problem, args.preview, args.seeds["data"], 1)
        reward = source.reward
    else:
        every_problem = prepare_evaluation(args, tokenizer).problems
        problems = every_problem[: args.preview]
        reward = Reward(find_rule(args.evaluation_rule, args.reward_timeout))
    print_format(task, args, tokenizer)
    encoded = encode_problems(problems, base, tokenizer, args.max_new_tokens)
    for problem, ids in zip(problems, encoded, strict=True):
        print(
            f"{problem.id}: the prompt, {len(ids)} tokens:",
            printable(tokenizer.decode(ids)),
            sep="\n",
        )
        print("the gold answer:", printable(problem.ground_truth))
        if is_placeholder(problem.ground_truth):
            print(
                "  warning: it says that there is none, and a response that says so is paid: leave"
                " the row out"
            )
        if reason := why_unmeetable(problem.ground_truth):
            print(f"  warning: it is {reason}: no response can meet it")
        gold = in_shapes(task.right_answer(problem))
        empty = in_shapes("")
        texts = []
        for token_ids in response_token_ids(tokenizer, gold + empty):
            texts.append(responses.text(token_ids, task.stop))
        completions = []
        for text in texts:
            completions.append(
                Completion(
                    prompt_ids=(),
                    token_ids=(),
                    log_probs=(),
                    text=text,
                    finish_reason="stop",
                    policy_version=0,
                )
            )
        [group] = reward.score([problem], [completions])
        number = len(gold)
        print_rewards(texts[:number], group.scores[:number], group.scores[number:])
    if not isinstance(every_problem, Endless):
        print_paid(every_problem, reward.rule, task)


def in_shapes(answer: str) -> list[str]:
    """A made-up response with the answer in each of `SHAPES`."""
    return [shape.format(answer) for shape in SHAPES.values()]


def print_paid(problems: Sequence[Problem], rule: RewardFn, task: Task) -> None:
    """Print how many of all gold answers the rule pays, and the first that it does not."""
    unpaid = []
    for problem in problems:
        responses = in_shapes(task.right_answer(problem))
        texts = (graded_text(rule, problem, response) for response in responses)
        if not any(rule(text, problem.ground_truth)["reward"] > 0 for text in texts):
            unpaid.append(problem.id)
    paid = len(problems) - len(unpaid)
    line = f"of all {len(problems)} gold answers, not only those shown, the rule pays {paid} in one"
    first = f"; the first that it does not pay is that of {unpaid[0]}" if unpaid else ""
    print(f"{line} of these formats{first}")


def print_format(task: Task, args: RLArgs | EvaluateArgs, tokenizer) -> None:
    """Print which prompt, rule and stop strings --task, --prompt and --reward come to."""
    prompt = chosen_prompt(task.prompt, tokenizer, task.wants_box)
    stop = ", ".join(map(repr, task.stop)) or "no string"
    print(f"--prompt {prompt}, graded by the rule {args.evaluation_rule}; {stop} ends a response")
    print(
        f"each gold answer is scored in made-up responses of {len(SHAPES)} formats:"
        f" {', '.join(SHAPES)}; one that is paid is enough"
    )


def print_rewards(
    gold_texts: Sequence[str],
    gold_scores: Sequence[dict[str, float]],
    empty_scores: Sequence[dict[str, float]],
) -> None:
    """Print the rewards of responses that hold the gold answer, and a warning where none gets more
    than the same response without it."""
    for shape, text, score in zip(SHAPES, gold_texts, gold_scores, strict=True):
        print(
            f"  {shape}: '{printable(text, line_breaks=False)}' gets",
            ", ".join(f"{name} {value:g}" for name, value in score.items()),
        )
    pairs = zip(gold_scores, empty_scores, strict=True)
    if not any(gold["reward"] > empty["reward"] for gold, empty in pairs):
        print(
            "  warning: none is paid more than without the answer: is this --reward, column or"
            " --answer_pattern right?"
        )


def preview_demonstrations(args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]]) -> None:
    """Print the first demonstrations, their prompts and their trained tokens apart."""
    model = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(model)
    first = demonstrations[: args.preview]
    for prompt, response in encode_demonstrations(args, first, model, tokenizer):
        print(
            f"the prompt, {len(prompt)} tokens, not trained:",
            printable(tokenizer.decode(prompt)),
            sep="\n",
        )
        print(
            f"the response, {len(response)} tokens, all trained:",
            printable(tokenizer.decode(response)),
            sep="\n",
        )
