"""The rules, the problems and the worked solutions that `verify` checks, as a run reads them."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import alignment.data.prompts
from alignment.args import SFTArgs, VerifyArgs, as_command, configuration
from alignment.builders.checks import check_sft_share, read_demonstrations
from alignment.builders.evaluations import PreparedEvaluation, prepare_evaluations
from alignment.builders.held_out import OWN_ROWS, task_arguments
from alignment.builders.warm_start import tokenise_demonstrations
from alignment.config.settings import flag_values
from alignment.core.records import Endless, Group, Problem, Problems
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import chosen_prompt, read_system_prompt
from alignment.data.tasks import answer_in_box
from alignment.data.tasks.own_data import Demonstration, read_examples
from alignment.evaluation.accuracy import figures, paired_difference, summarise
from alignment.model.loading import load_config, load_tokenizer
from alignment.rewards.rules import (
    CONTROLS,
    PARTS,
    RULES,
    CosineLength,
    graded_text,
    named_parts,
    resolved_reward,
)
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import open_source
from alignment.training.sft import SFTConfig
from alignment.verification.asked import AskedQuestions
from alignment.verification.check import Check
from alignment.verification.graded_answers import check_of_parts, checks_of_rules
from alignment.verification.made_up_evaluation import MadeUpEvaluation
from alignment.verification.scored_groups import PROBLEMS, ScoredGroups
from alignment.verification.sft_labels import Demonstrations
from alignment.verification.splits import (
    RunData,
    ValidationSplit,
    asked_elsewhere,
    number_of_test_questions,
)
from alignment.verification.whole_warm_start import EXAMPLES, WarmStart

MOST_DEMONSTRATIONS = 64
MOST_PROMPTS = 512  # of each split, that are compared with the template


def checks_of_rewards(args: VerifyArgs) -> Iterator[Check]:
    """The checks of the rules that ship, those of this run first, and of what is reported of
    answers."""
    reward = resolved_reward(args.reward, args.task_in_format.rules)
    names = [name for name, _ in named_parts(reward)]
    yield from checks_of_rules(RULES, (*names, args.evaluation_rule))
    cosine = partial(PARTS["cosine_length"], settings=CosineLength(longest=256))
    yield check_of_parts({**CONTROLS, **PARTS, "cosine_length": cosine})
    yield from MadeUpEvaluation(figures, paired_difference, summarised).checks()


def summarised(groups: Sequence[Group]) -> tuple[Mapping[str, Any], Sequence[Group]]:
    """An evaluation's record of some groups, graded by r1_zero, and the groups that it keeps."""
    evaluation = summarise(groups, seconds=0.0)
    return evaluation.record, evaluation.groups


def checks_of_data(args: VerifyArgs, base: str) -> Iterator[Check]:
    """The checks of what is trained and evaluated, as the model of the folder `base` reads it."""
    task = args.task_in_format
    tokenizer = load_tokenizer(base)
    config = args.rollout_config

    def training_problems() -> Problems:
        return open_source(config, tokenizer).problems

    evaluations = prepare_evaluations(args, tokenizer)
    data = RunData(
        task.problems("train", args.dataset_path),
        task.test_split(args.dataset_path),
        evaluations[""].problems,
        training_problems(),
        config,
        training_problems,
    )
    yield from data.checks()
    yield from checks_of_splits(args, data, evaluations)
    source = open_source(config, tokenizer)
    rows = [*data.test_rows]
    if not isinstance(data.train_rows, Endless):
        rows += data.train_rows
    yield from AskedQuestions(
        first_problems(source.problems),
        first_problems(data.evaluated),
        rows,
        chosen_prompt(task.prompt, tokenizer, task.wants_box),
        Path(alignment.data.prompts.__file__).parent,
        source.task.stop,
        read_examples(args.few_shot),
        tokenizer,
        flag_values(args),
    ).checks()
    first = problems_of_step(source.problems, PROBLEMS, config.data_seed, step=1)
    parts = named_parts(resolved_reward(args.reward, task.rules))
    yield from ScoredGroups(source.reward, first, parts).checks()
    if args.sft_base:
        yield from demonstrations_of(args, base).checks()
    if args.sft_base and args.sft_share:
        yield Check(
            "warm start: questions that RL asks again",
            0.0,
            lambda: number_of_test_questions(
                first_problems(source.problems),
                [problem for problem, _ in taught_solutions(args)],
            ),
        )


def checks_of_splits(
    args: VerifyArgs, data: RunData, evaluations: Mapping[str, PreparedEvaluation]
) -> Iterator[Check]:
    """The checks of what --validation_share and --eval_tasks evaluate, where they are given."""
    task = args.task_in_format
    share = args.validation_share
    if share:
        split = ValidationSplit(
            share,
            task.test_problems(args.dataset_path, 0, "validation", share),
            task.test_problems(args.dataset_path, 0, "test", share),
            data.test_rows,
            data.evaluated,
            args.eval_split == "validation",
        )
        yield Check("data: evaluated beside --eval_split", 0.0, split.faults)
    others = task_arguments(args, args.eval_tasks)
    if others:
        asked: dict[str, Sequence[Problem]] = {}
        rows: dict[str, Sequence[Problem]] = {}
        for name, other in others.items():
            asked[name] = evaluations[name.replace(":", ".")].problems
            rows[name] = other.task_in_format.test_split(other.dataset_path)
        what = "data: other tasks evaluated beside their test splits"
        yield Check(what, 0.0, partial(asked_elsewhere, asked, rows))


def first_problems(problems: Problems) -> Sequence[Problem]:
    """The first of some problems."""
    if isinstance(problems, Endless):
        return [problems[index] for index in range(MOST_PROMPTS)]
    return list(islice(problems, MOST_PROMPTS))


def demonstrations_of(args: VerifyArgs, base: str) -> Demonstrations:
    """Some of the worked solutions that a warm start is trained on."""
    task = args.task_in_format
    sft_args = as_command(SFTArgs, args)
    tokenizer = load_tokenizer(base)
    taught = taught_solutions(args)
    shown = taught[:: max(1, len(taught) // MOST_DEMONSTRATIONS)]
    responses = [response for _, response in shown]
    if task.wants_box:
        responses = list(map(answer_in_box, responses))
    prompted = task.with_prompts(
        [problem for problem, _ in shown],
        tokenizer,
        read_system_prompt(args.system_prompt),
        read_examples(args.few_shot),
    )
    context = load_config(base).max_position_embeddings
    paid: list[bool] = []
    if args.evaluation_rule in RULES and not args.task.startswith(OWN_ROWS):
        rule = RULES[args.evaluation_rule]
        for problem, response in zip(prompted, responses, strict=True):
            score = rule(graded_text(rule, problem, response), problem.ground_truth)
            paid.append(score["reward"] > 0)
    return Demonstrations(
        tokenise_demonstrations(sft_args, shown, tokenizer, context),
        responses,
        [problem.prompt for problem in prompted],
        number_of_test_questions(
            [problem for problem, _ in taught], task.test_split(args.dataset_path)
        ),
        tokenizer,
        pad_token_id(tokenizer),
        paid,
    )


def taught_solutions(args: VerifyArgs) -> Sequence[Demonstration]:
    """All worked solutions that a warm start is trained on."""
    task = args.task_in_format
    sft_args = as_command(SFTArgs, args)
    untested = task.untested(read_demonstrations(sft_args, task, "train"), args.dataset_path)
    return check_sft_share(sft_args, task, untested)


def warm_start_of(args: VerifyArgs, base: str) -> WarmStart | None:
    """The shortest of some worked solutions, and how a warm start is trained on them; None without
    one."""
    if not args.sft_base:
        return None
    shown = demonstrations_of(args, base)
    shortest = sorted(shown.examples, key=lambda example: len(example[0]) + len(example[1]))
    config = configuration(SFTConfig, as_command(SFTArgs, args))
    return WarmStart(shortest[:EXAMPLES], shown.pad_id, config)
