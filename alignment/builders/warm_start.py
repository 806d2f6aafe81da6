"""Supervised fine-tuning: its data, its training, and the warm start that a run begins with."""

import dataclasses
import errno
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from alignment.args import (
    CHANGEABLE_ON_RESUME,
    REPRODUCIBILITY_SETTING,
    RLArgs,
    SFTArgs,
    as_command,
    configuration,
    refuse_missing_warm_start,
)
from alignment.builders.announcements import needs_warm_start
from alignment.builders.base_models import resolve_model
from alignment.builders.checks import check_sft
from alignment.builders.evaluations import PreparedEvaluation, prepare_evaluations
from alignment.builders.policies import make_policy
from alignment.builders.run_plan import SFTPlan, plan_sft
from alignment.builders.samplers import make_sampler, stoppable
from alignment.config.flag import defaults_of_flags
from alignment.core.records import Problem
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import read_system_prompt, without_repeated_tag
from alignment.data.tasks.own_data import Demonstration, read_examples
from alignment.evaluation.accuracy import Evaluation, joined_record
from alignment.model.loading import check_token_ids, load_config, load_tokenizer
from alignment.model.saving import check_saving
from alignment.policy.policy import Policy
from alignment.runs.run import Run, RunConfig, open_run, refuse_other_arguments
from alignment.runs.run_folder import (
    TRAINER,
    RunFolder,
    checkpoint_folder,
    records_up_to,
    resumed_run_name,
)
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import Sampler, encode_prompts
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder, read_jsonl, write_json
from alignment.system.locks import lock_run_folder
from alignment.system.manifests import MANIFEST, find_damage, write_manifest
from alignment.system.signals import deferrable_signals, received_signal
from alignment.system.terminal import count_parts, say_once
from alignment.training.sft import (
    Example,
    SFTConfig,
    SFTData,
    best_step,
    fine_tune,
    is_patience_over,
    tokenise,
)

HELD_OUT_ACCURACY = "held_out_accuracy"  # in a record of metrics.jsonl, with --patience


def run_sft(
    args: SFTArgs, demonstrations: Mapping[str, Sequence[Demonstration]], console: Console
) -> dict[str, Evaluation]:
    """Fine-tune --model on `check_sft`'s demonstrations (`train_sft`); returns the evaluations by
    the prefix of their metrics, "" for that on the test problems of --task."""
    torch.manual_seed(args.seed)
    base = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    evaluations = prepare_evaluations(args, tokenizer)
    for evaluation in evaluations.values():
        # Refuses a prompt that is too long before the training rather than after it.
        encode_problems(evaluation.problems, base, tokenizer, args.max_new_tokens)
    data = SFTData(
        train=encode_demonstrations(args, demonstrations["train"], base, tokenizer),
        validation=encode_demonstrations(args, demonstrations["test"], base, tokenizer),
        pad_token_id=pad_token_id(tokenizer),
    )
    plan = plan_sft(args, base)
    held_out = held_out_evaluation(args, evaluations[""], tokenizer)
    if held_out is not None:
        encode_problems(held_out.problems, base, tokenizer, args.max_new_tokens)
    parts = SFTParts(args, plan, data, base, tokenizer, held_out)
    target = train_sft(parts, console)
    sampler = make_sampler(plan.evaluation, tokenizer, console=console)
    device = plan.evaluation.config.device
    number = sum(evaluation.responses for evaluation in evaluations.values())
    with (
        closing(sampler),
        count_parts("sampling held-out problems", number, console, "response") as ended,
    ):
        others: dict[str, Evaluation] = {}
        for prefix, evaluation in evaluations.items():
            if others and received_signal():
                break  # What has been evaluated is kept.
            others[prefix] = evaluation.evaluate(stoppable(sampler, device), ended)
    results = dict(others)
    first = others.pop("")
    record = joined_record(first, others)
    groups = {prefix: other.groups for prefix, other in others.items()}
    step = args.num_steps
    if args.patience:
        step = best_step(measured_accuracies(target, args.num_steps))
    with closing(RunFolder(target, args.num_steps, args.trackers)) as log:
        log.log_eval({"step": step, **record}, first.groups, groups)
    has_left_out = any("left_out" in result.record for result in results.values())
    if len(results) == len(evaluations) and not has_left_out:  # No signal has cut it short.
        write_json(target / "summary.json", record)
    return results


def sft_run_config(args: SFTArgs, data: SFTData) -> RunConfig:
    """The configuration of an SFT run, whose folder is beside --sft_base.

    It resumes an unfinished run of the same arguments and `data`, if there is one that no other
    process has locked; else it starts a new one."""
    target = Path(args.sft_base)
    digest = hashlib.sha256(repr((data.train, data.validation)).encode()).hexdigest()
    run_name = args.run_name if args.resume else ""
    fixed = {"num_steps"}  # The learning rate depends on it.
    if args.patience:
        fixed.add("eval_interval")  # So does the end.
    config = configuration(
        RunConfig,
        args,
        command="sft",
        output_dir=str(target.parent),
        default_name=f"{target.name}_unfinished",
        run_name=run_name,
        defaults=defaults_of_flags(SFTArgs) | {"reward": args.default_reward},
        arguments={**args.recorded_values, "sha256_of_the_tokens": digest},
        seeds={"all": args.seed},
        keep_checkpoints=1,
        max_bad_steps=0,
        max_grader_failures=0.0,
        changeable=CHANGEABLE_ON_RESUME - fixed,
        setting=REPRODUCIBILITY_SETTING,
    )
    with suppress(UserError):  # No such run, a locked one, or one of other arguments: start anew.
        name = resumed_run_name(config.output_dir, config.run_name, config.default_name)
        folder = target.parent / name
        with lock_run_folder(folder):
            refuse_other_arguments(folder, config)
        return dataclasses.replace(config, resume=True)
    return config


@dataclass(frozen=True)
class SFTParts:
    """What an SFT run is made of. With --patience `held_out` is what it measures its accuracy by,
    without it None."""

    args: SFTArgs
    plan: SFTPlan
    data: SFTData
    base: str
    tokenizer: Any
    held_out: PreparedEvaluation | None


def held_out_evaluation(
    args: SFTArgs, evaluation: PreparedEvaluation, tokenizer
) -> PreparedEvaluation | None:
    """The evaluation of --patience: one sample of each held-out training problem, drawn and graded
    as those of the test problems. None without --patience."""
    if not args.patience:
        return None
    task = args.task_in_format
    problems = task.with_prompts(
        task.held_out_of_sft(args.dataset_path, args.sft_share),
        tokenizer,
        read_system_prompt(args.system_prompt),
        read_examples(args.few_shot),
    )
    sampling = dataclasses.replace(evaluation.sampling, n=1)
    return dataclasses.replace(evaluation, problems=problems, sampling=sampling, rules=())


@dataclass(frozen=True)
class AccuracyWatch:
    """Logs the steps of an SFT run, and with --patience measures its accuracy and ends it.
    `accuracies` has what was measured, by step."""

    run: Run
    parts: SFTParts
    policy: Policy
    sampler: Sampler | None
    accuracies: dict[int, float]

    def finish_step(self, record: dict[str, Any], words: str) -> bool:
        """Log a step; returns whether it is the last one."""
        held_out = self.parts.held_out
        if held_out is None or self.sampler is None or "validation_loss" not in record:
            self.run.finish_sft_step(record, words)
            return False
        step = record["step"]
        load_proven(self.sampler, self.policy.weights(), step)
        accuracy = held_out.evaluate(self.sampler).record["avg_all_rewards"]
        self.accuracies[step] = accuracy
        self.run.best_step = best_step(self.accuracies)
        self.run.finish_sft_step(
            {**record, HELD_OUT_ACCURACY: accuracy}, f"{words}, held-out accuracy {accuracy:.3f}"
        )
        return self.is_over

    @property
    def is_over(self) -> bool:
        """Whether the accuracy has not risen for --patience measurements."""
        return is_patience_over(self.accuracies, self.parts.args.patience)


def measured_accuracies(run: Path, last_step: int) -> dict[int, float]:
    """The accuracies of --patience that an SFT run's metrics.jsonl has, by step, up to one."""
    records = records_up_to(run / "metrics.jsonl", last_step)
    return {
        record["step"]: record[HELD_OUT_ACCURACY]
        for record in records
        if HELD_OUT_ACCURACY in record
    }


def train_sft(parts: SFTParts, console: Console) -> Path:
    """Train the model of the folder `base`, save it to --sft_base, and return that folder. The
    policy is freed on return, so that the engine of an evaluation finds room.

    Raises `WarmStartExists` where another command writes --sft_base first: nothing is ever
    overwritten."""
    args = parts.args
    data = parts.data
    target = Path(args.sft_base)
    with open_run(sft_run_config(args, data), console) as run:
        start = parts.base
        if run.checkpoint and not args.lora_rank:
            start = str(run.checkpoint)
        policy = make_policy(args, parts.plan.policy, start, run.checkpoint, dropout=True)
        previous_tokens = 0
        accuracies: dict[int, float] = {}
        if run.checkpoint:
            policy.load_optimizer(run.checkpoint / TRAINER)
            previous_tokens = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"]
            accuracies = measured_accuracies(run.path, run.last_step)
            run.best_step = best_step(accuracies) if accuracies else 0
        every_example = (*data.train, *data.validation)
        longest = max(len(prompt) + len(response) for prompt, response in every_example)
        message = policy.choose_micro_batch_tokens(longest, previous_tokens)
        if message:
            console.print(message)
        sampler = None
        if parts.held_out is not None:
            sampler = run.open(make_sampler(parts.plan.held_out, parts.tokenizer, policy))
        run.start(policy, parts.tokenizer)
        watch = AccuracyWatch(run, parts, policy, sampler, accuracies)
        if not watch.is_over:
            fine_tune(
                policy,
                data,
                configuration(SFTConfig, args),
                watch.finish_step,
                run.last_step,
                run.sft_step,
            )
        try:
            save_sft(target, watch)
        finally:
            # Whoever made --sft_base, nobody will resume this run.
            if target.exists() and run.path != target:
                shutil.rmtree(run.path, ignore_errors=True)
    return target


def save_sft(target: Path, watch: AccuracyWatch) -> None:
    """Write the trained model, after the last step or with --patience that of the best checkpoint,
    with the JSON and JSONL files of its run, to the folder `target`. Raises `WarmStartExists` if
    that exists already, and `UserError` where the checkpoint is damaged."""
    run = watch.run
    checkpoint = None
    if run.best_step not in (0, run.last_step):
        checkpoint = checkpoint_folder(run.path, run.best_step)
        damage = find_damage(checkpoint)
        if damage:
            raise UserError(f"{checkpoint}, of the best accuracy, is damaged: {damage}; train anew")
        run.console.print(
            f"held-out accuracy {watch.accuracies[run.best_step]:.3f} after step {run.best_step} is"
            f" the best of {len(watch.accuracies)}: its weights are kept",
            soft_wrap=True,
        )
    try:
        with atomic_folder(target) as building:
            for file in (*run.path.glob("*.jsonl"), *run.path.glob("*.json")):
                shutil.copy(file, building)
            with write_manifest(building):
                if checkpoint is None:
                    watch.policy.save(building, watch.parts.tokenizer)
                else:
                    others = shutil.ignore_patterns(TRAINER, MANIFEST)
                    shutil.copytree(checkpoint, building, ignore=others, dirs_exist_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
            raise WarmStartExists(
                f"--sft_base {target} was made by another command meanwhile; that one is kept"
            ) from None
        raise


def tokenise_demonstrations(
    args: SFTArgs, demonstrations: Sequence[Demonstration], tokenizer, context: int
) -> list[Example]:
    """The demonstrations' prompts and responses as token ids.

    Where a response begins with the tag that its prompt ends with, the response loses it; the
    number of such demonstrations is printed. Raises `UserError` for a demonstration of more tokens
    than the `context`."""
    task = args.task_in_format
    if not args.demonstrations:  # whose responses are the user's own
        demonstrations = task.in_boxes(demonstrations)
    taught = task.as_taught(
        demonstrations,
        tokenizer,
        read_system_prompt(args.system_prompt),
        read_examples(args.few_shot),
    )
    repeated = 0
    for (problem, _), (_, response) in zip(taught, demonstrations, strict=True):
        repeated += without_repeated_tag(problem.prompt, response) != response
    if repeated:
        say_once(
            f"{repeated} of {len(taught)} demonstrations begin with the tag that their prompt ends"
            " with: it is not trained again"
        )
    pairs = [(problem.prompt, response) for problem, response in taught]
    return tokenise(pairs, tokenizer, context)


def encode_demonstrations(
    args: SFTArgs, demonstrations: Sequence[Demonstration], base: str, tokenizer
) -> list[Example]:
    """The demonstrations as token ids (`tokenise_demonstrations`), checked against the model
    `base`. Raises `UserError`, naming the demonstration, for one that exceeds the model's context
    or has a token without an embedding."""
    config = load_config(base)
    encoded = tokenise_demonstrations(
        args, demonstrations, tokenizer, config.max_position_embeddings
    )
    ids = [problem.id for problem, _ in demonstrations]
    token_ids = [prompt + response for prompt, response in encoded]
    check_token_ids(tokenizer, config.vocab_size, zip(ids, token_ids, strict=True))
    return encoded


def encode_problems(
    problems: Sequence[Problem], base: str, tokenizer, max_new_tokens: int
) -> list[list[int]]:
    """Token ids of the problems' prompts, checked against the model `base`. Raises `UserError` for
    a prompt that leaves no room for `max_new_tokens` in the model's context (`encode_prompts`), and
    for a token without an embedding, naming the problem."""
    config = load_config(base)
    prompts = [problem.prompt for problem in problems]
    ids = [problem.id for problem in problems]
    encoded = encode_prompts(
        tokenizer, prompts, config.max_position_embeddings, max_new_tokens, ids
    )
    check_token_ids(tokenizer, config.vocab_size, zip(ids, encoded, strict=True))
    return encoded


class WarmStartExists(UserError):
    """Another command has written --sft_base while this one was training."""


def warm_start_args(args: RLArgs) -> SFTArgs:
    """The arguments of the SFT that makes a run's --sft_base. One warm start serves every run,
    whatever seed and adapters the first one has."""
    return dataclasses.replace(
        as_command(SFTArgs, args), seed=RLArgs.seed, lora_rank=0, run_name=""
    )


def prepare_warm_start(args: RLArgs, console: Console) -> str:
    """The folder or hub name of the model that training starts from: --model, or --sft_base, which
    SFT makes if it does not exist yet (`announce_start` says so)."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if needs_warm_start(args):
        sft_args = warm_start_args(args)
        try:
            with deferrable_signals():
                run_sft(sft_args, check_sft(sft_args), console)
        except WarmStartExists:
            console.print(f"another command has made {args.sft_base} meanwhile", markup=False)
        console.print(f"starting from {args.sft_base}", markup=False, soft_wrap=True)
    return resolve_model(args.sft_base, args.output_dir, "--sft_base")
