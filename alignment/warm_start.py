"""Supervised fine-tuning from arguments: what `sft` runs, and what `train_rl` runs first where the warm start is not there."""

import dataclasses
import errno
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import torch
from rich.console import Console

from alignment.args import RLArgs, SFTArgs, as_command, configuration, refuse_missing_warm_start
from alignment.checks import SFTInputs, check_sft, resolve_model, roles_of
from alignment.core.records import Problem
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted
from alignment.evaluation.accuracy import Evaluation
from alignment.models import evaluation, make_policy, make_sampler
from alignment.policy.loading import context_length, load_config, load_tokenizer
from alignment.runs.run_folder import RunFolder, write_args
from alignment.sampling.sampler import encode_prompts
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder, manifested, write_json
from alignment.system.terminal import progress_line
from alignment.training.sft import SFTConfig, SFTData, fine_tune, tokenise


def run_sft(args: SFTArgs, inputs: SFTInputs, console: Console) -> Evaluation:
    """Fine-tune --model and save it whole to --sft_base; returns its evaluation on the test problems. Raises `UserError` where
    --sft_base appears during the training: nothing is ever overwritten."""
    target, task = Path(args.sft_base), inputs.task
    torch.manual_seed(args.seed)
    base = resolve_model(args.model, args.output_dir)
    tokenizer, context = load_tokenizer(base), context_length(load_config(base))
    template = args.prompt or task.prompt
    problems = prompted(inputs.problems, template, tokenizer)
    # Says that a test problem is too long before it trains.
    encode_prompts(tokenizer, [problem.prompt for problem in problems], context, args.max_new_tokens)
    policy = make_policy(args, base)
    demonstrations = (with_prompts(inputs.demonstrations[split], template, tokenizer) for split in ("train", "test"))
    train, validation = (tokenise(pairs, tokenizer, context) for pairs in demonstrations)
    data = SFTData(train, validation, pad_token_id(tokenizer))
    try:
        with atomic_folder(target) as building:
            write_args(building, dataclasses.asdict(args), {"all": args.seed})
            if message := policy.choose_micro_batch_tokens(data.longest):
                console.print(message)
            with closing(RunFolder(building)) as log, progress_line("SFT", args.num_steps, console) as progress:
                fine_tune(policy, data, configuration(SFTConfig, args), log.log_step, progress)
            with manifested(building):
                policy.save(building, tokenizer)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
            raise MadeMeanwhile(f"--sft_base {target} was made by another command meanwhile; that one is kept") from None
        raise
    del policy  # its weights and moments make room for the evaluation's engine
    sampler = make_sampler(args, str(target), roles_of(args).eval, tokenizer)
    with closing(sampler), console.status("sampling held-out problems"):
        result = evaluation(args, task, problems)(sampler)
    with closing(RunFolder(target, args.num_steps)) as log:
        log.log_eval({"step": args.num_steps, **result.record()}, result.groups)
    write_json(target / "summary.json", result.record())
    return result


def with_prompts(demonstrations: Sequence[tuple[Problem, str]], template: str, tokenizer) -> list[tuple[str, str]]:
    """(prompt, response) pairs; a demonstration without a question has its prompt already."""
    filled = iter(prompted([problem for problem, _ in demonstrations if problem.question], template, tokenizer))
    problems = [next(filled) if problem.question else problem for problem, _ in demonstrations]
    return [(problem.prompt, response) for problem, (_, response) in zip(problems, demonstrations, strict=True)]


class MadeMeanwhile(UserError):
    """Another command has written --sft_base while this one was training."""


def warm_start(args: RLArgs, console: Console) -> str:
    """The folder or hub name of the model that training starts from, made by SFT where the preset says so."""
    if not args.sft_base:
        return resolve_model(args.model, args.output_dir)
    refuse_missing_warm_start(args)
    if not Path(args.sft_base).exists():
        console.print(f"{args.sft_base} is not there yet: warming up by SFT, once", markup=False)
        # One warm start for every run, whatever seed and adapters the one that happens to come first has.
        try:
            sft_args = dataclasses.replace(as_command(SFTArgs, args), seed=RLArgs.seed, lora_rank=0)
            run_sft(sft_args, check_sft(sft_args), console)
        except MadeMeanwhile:
            console.print(f"another command has made {args.sft_base} meanwhile", markup=False)
    console.print(f"starting from {args.sft_base}", markup=False)
    return resolve_model(args.sft_base, args.output_dir, "--sft_base")
