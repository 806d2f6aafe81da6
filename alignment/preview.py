"""What --preview prints: prompts, gold answers and their rewards, or the tokens that SFT trains.
Only a tokenizer is loaded."""

from collections.abc import Sequence
from pathlib import Path

from alignment.args import EvaluateArgs, RLArgs, SFTArgs
from alignment.builders.checks import resolve_model
from alignment.builders.evaluations import prepare_evaluation
from alignment.builders.warm_start import encode_demonstrations, encode_problems
from alignment.core.records import Completion, Problem
from alignment.core.text import ResponseReader, response_token_ids
from alignment.data.row_warnings import is_placeholder
from alignment.data.tasks import find_task
from alignment.model.loading import load_end_ids, load_tokenizer
from alignment.rewards.rules import Reward, find_rule
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import open_source
from alignment.system.terminal import printable


def preview_run(args: RLArgs) -> None:
    """Print the first prompts of a training run, as its warm start reads them where there is one.
    Raises `UserError` for prompts that the run would refuse."""
    has_warm_start = bool(args.sft_base) and Path(args.sft_base).exists()
    preview_problems(args, args.sft_base if has_warm_start else args.model)


def preview_problems(args: RLArgs | EvaluateArgs, model: str) -> None:
    """Print a run's first prompts, or the first test problems, each with the rewards of responses
    that hold its gold answer, as rules see these once a model has said them token by token. Raises
    `UserError` for prompts that the run would refuse."""
    # in which a response may hold it
    shapes = (
        " </think> <answer> {} </answer>",
        r" \boxed{{{}}}",
        " {}",
    )
    base = resolve_model(model, args.output_dir)
    tokenizer = load_tokenizer(base)
    responses, stop = (
        ResponseReader(tokenizer, load_end_ids(base, tokenizer)),
        find_task(args.task, args.data).stop,
    )
    if isinstance(args, RLArgs):
        source = open_source(args.rollout_config, tokenizer)
        problems, reward = (
            problems_of_step(source.problems, args.preview, args.seeds["data"], 1),
            source.reward,
        )
    else:
        problems = prepare_evaluation(args, tokenizer).problems[: args.preview]
        reward = Reward(find_rule(args.evaluation_rule, args.reward_timeout))
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
        said = [shape.format(answer) for shape in shapes for answer in (problem.ground_truth, "")]
        texts = [
            responses.text(token_ids, stop) for token_ids in response_token_ids(tokenizer, said)
        ]
        [group] = reward.score(
            [problem], [[Completion((), (), (), text, "stop", 0) for text in texts]]
        )
        for text, score in zip(texts[::2], group.scores[::2], strict=True):
            print(
                f"  '{printable(text, line_breaks=False)}' gets",
                ", ".join(f"{name} {value:g}" for name, value in score.items()),
            )
        if not any(
            gold["reward"] > empty["reward"]
            for gold, empty in zip(group.scores[::2], group.scores[1::2], strict=True)
        ):
            print(
                "  warning: none is paid more than without the answer: is this --reward, column or"
                " --answer_pattern right?"
            )


def preview_demonstrations(args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]]) -> None:
    """Print the first demonstrations, their prompts and their trained tokens apart."""
    model = resolve_model(args.model, args.output_dir)
    tokenizer, shown = load_tokenizer(model), demonstrations[: args.preview]
    for prompt, response in encode_demonstrations(args, shown, model, tokenizer):
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
