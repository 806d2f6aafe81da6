"""Supervised fine-tuning: its data, its training, and the warm start that a run begins with."""

import dataclasses
import errno
import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path

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
from alignment.builders.checks import (
    check_sft,
    resolve_model,
    roles_of,
)
from alignment.builders.evaluations import evaluation
from alignment.builders.policies import make_policy
from alignment.builders.samplers import make_sampler
from alignment.core.records import Problem
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted, trained_response, without_repeated_tag
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import Evaluation
from alignment.model.loading import (
    check_token_ids,
    load_config,
    load_tokenizer,
)
from alignment.model.saving import check_saving
from alignment.runs.run import (
    RunConfig,
    open_run,
    refuse_other_arguments,
)
from alignment.runs.run_folder import TRAINER, RunFolder, resumed_run_name
from alignment.sampling.sampler import (
    encode_prompts,
)
from alignment.system.errors import UserError
from alignment.system.files import (
    atomic_folder,
    lock_run_folder,
    read_jsonl,
    write_json,
    write_manifest,
)
from alignment.system.signals import deferrable_signals
from alignment.system.terminal import count_parts, say_once
from alignment.training.sft import Example, SFTConfig, SFTData, fine_tune, tokenise


def run_sft(
    args: SFTArgs, demonstrations: Mapping[str, Sequence[tuple[Problem, str]]], console: Console
) -> Evaluation:
    """Fine-tune --model on `check_sft`'s demonstrations (`train_sft`); returns the evaluation on
    the test problems."""
    torch.manual_seed(args.seed)
    base = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    problems, evaluate = evaluation(args, tokenizer)
    encode_problems(problems, base, tokenizer, args.max_new_tokens)  # refuses long ones now
    splits = (
        encode_demonstrations(args, demonstrations[split], base, tokenizer)
        for split in ("train", "test")
    )
    target = train_sft(args, SFTData(*splits, pad_token_id(tokenizer)), base, tokenizer, console)
    sampler = make_sampler(args, str(target), (roles_of(args).eval,), tokenizer, console=console)
    with (
        closing(sampler),
        count_parts("sampling held-out problems", len(problems), console, "response") as ended,
    ):
        result = evaluate(sampler, ended, keep=True)
    with closing(RunFolder(target, args.num_steps, args.trackers)) as log:
        log.log_eval({"step": args.num_steps, **result.record}, result.groups)
    if "left_out" not in result.record:
        write_json(target / "summary.json", result.record)
    return result


def sft_run_config(args: SFTArgs, data: SFTData) -> RunConfig:
    """A new run's folder beside --sft_base, or an unfinished one of the same arguments and `data`
    that no process has."""
    target, digest = (
        Path(args.sft_base),
        hashlib.sha256(repr((data.train, data.validation)).encode()).hexdigest(),
    )
    config = configuration(
        RunConfig,
        args,
        command="sft",
        output_dir=str(target.parent),
        default_name=f"{target.name}_unfinished",
        run_name=args.run_name if args.resume else "",
        defaults={},
        arguments={**dataclasses.asdict(args), "sha256_of_the_tokens": digest},
        seeds={"all": args.seed},
        keep_checkpoints=1,
        max_bad_steps=0,
        max_grader_failures=0.0,
        # The learning rate depends on the number of steps.
        changeable=CHANGEABLE_ON_RESUME - {"num_steps"},
        setting=REPRODUCIBILITY_SETTING,
    )
    with suppress(UserError):
        folder = target.parent / resumed_run_name(
            config.output_dir, config.run_name, config.default_name
        )
        with lock_run_folder(folder):
            refuse_other_arguments(folder, config)
        return dataclasses.replace(config, resume=True)
    return config


def train_sft(args: SFTArgs, data: SFTData, base: str, tokenizer, console: Console) -> Path:
    """Fine-tune the model of the folder `base` in a run's folder, save it to --sft_base, and return
    that; the policy makes room for an evaluation's engine. Raises `UserError` where --sft_base
    appears meanwhile: nothing is ever overwritten."""
    target = Path(args.sft_base)
    with open_run(sft_run_config(args, data), console) as run:
        start, previous = base if args.lora_rank else str(run.checkpoint or base), 0
        policy = make_policy(args, start, run.checkpoint, dropout=True)
        if run.checkpoint:
            console.print(
                f"going on after step {run.last_step}, in {run.path}", markup=False, soft_wrap=True
            )
            policy.load_optimizer(run.checkpoint / TRAINER)
            previous = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"]
        longest = max(
            len(prompt) + len(response) for prompt, response in (*data.train, *data.validation)
        )
        if message := policy.choose_micro_batch_tokens(longest, previous):
            console.print(message)
        run.start(policy, tokenizer)
        fine_tune(
            policy,
            data,
            configuration(SFTConfig, args),
            run.finish_sft_step,
            run.last_step,
            run.sft_step,
        )
        try:
            with atomic_folder(target) as building:
                # arguments, metrics, the run in trackers
                for file in (
                    *run.path.glob("*.jsonl"),
                    *run.path.glob("*.json"),
                ):
                    shutil.copy(file, building)
                with write_manifest(building):
                    policy.save(building, tokenizer)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
                raise MadeMeanwhile(
                    f"--sft_base {target} was made by another command meanwhile; that one is kept"
                ) from None
            raise
        finally:
            if target.exists() and run.path != target:
                shutil.rmtree(run.path, ignore_errors=True)
    return target


def examples(
    args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]], tokenizer, context: int
) -> list[Example]:
    """The demonstrations' prompts and responses as token ids. A tag that ends a prompt and begins
    its response is trained once, which is said."""
    problems, responses = zip(*demonstrations, strict=True)
    problems = prompted(problems, args.prompt or find_task(args.task, args.data).prompt, tokenizer)
    pairs = []
    repeated = 0
    for problem, response in zip(problems, responses, strict=True):
        trained = trained_response(problem, response, tokenizer)
        repeated += without_repeated_tag(problem.prompt, response) != response
        pairs.append((problem.prompt, trained))
    if repeated:
        number = f"{repeated} of {len(pairs)} demonstrations"
        repetition = "begin with the tag that their prompt ends with"
        say_once(f"{number} {repetition}: it is not trained again")
    return tokenise(pairs, tokenizer, context)


def encode_demonstrations(
    args: SFTArgs, demonstrations: Sequence[tuple[Problem, str]], base: str, tokenizer
) -> list[Example]:
    """The `examples` for the model `base`. Raises `UserError`, naming the demonstration, for a
    token without an embedding."""
    config = load_config(base)
    encoded = examples(args, demonstrations, tokenizer, config.max_position_embeddings)
    places = [problem.id for problem, _ in demonstrations]
    whole = [prompt + response for prompt, response in encoded]
    check_token_ids(tokenizer, config.vocab_size, zip(places, whole, strict=True))
    return encoded


def encode_problems(
    problems: Sequence[Problem], base: str, tokenizer, max_new_tokens: int
) -> list[list[int]]:
    """Token ids of the problems' prompts. Raises `UserError` as `encode_prompts` for the context of
    the model `base`, and, naming the problem, for a token without an embedding."""
    config = load_config(base)
    prompts = [problem.prompt for problem in problems]
    encoded = encode_prompts(tokenizer, prompts, config.max_position_embeddings, max_new_tokens)
    check_token_ids(
        tokenizer,
        config.vocab_size,
        zip([problem.id for problem in problems], encoded, strict=True),
    )
    return encoded


class MadeMeanwhile(UserError):
    """Another command has written --sft_base while this one was training."""


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or hub name of the model that training starts from, made by SFT where the preset
    says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if not Path(args.sft_base).exists():
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once", markup=False)
        try:  # one warm start for every run, whatever seed and adapters the first one has
            sft_args = dataclasses.replace(
                as_command(SFTArgs, args), seed=RLArgs.seed, lora_rank=0, run_name=""
            )
            with deferrable_signals():
                run_sft(sft_args, check_sft(sft_args), console)
        except MadeMeanwhile:
            console.print(f"another command has made {args.sft_base} meanwhile", markup=False)
    console.print(f"starting from {args.sft_base}", markup=False)
    return resolve_model(args.sft_base, args.output_dir, "--sft_base")
