"""Supervised fine-tuning on worked solutions: the warm-up before reinforcement learning.

uv run -m alignment.sft
"""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console

from alignment.args import SFTArgs, parse
from alignment.core.records import Batch
from alignment.core.tokens import collate, pad_token_id
from alignment.core.train_step import sft_microbatch_train_step
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task, jsonl
from alignment.evaluate import print_evaluation
from alignment.evaluation.accuracy import Evaluation, eval_problems, eval_sampling, evaluate_vllm
from alignment.policy.loading import (
    compute_dtype,
    context_length,
    load_model,
    load_tokenizer,
    make_optimizer,
    policy_log_probs,
    resolve_model,
    roles_of,
    set_learning_rate,
)
from alignment.policy.memory import fit
from alignment.policy.packing import send
from alignment.policy.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.rewards.reward import evaluation_reward
from alignment.runs.checkpoint import save_model
from alignment.runs.run_folder import RunFolder, write_args
from alignment.sampling.sampler import encode_prompts, make_sampler, refuse_missing_engine
from alignment.system import signals
from alignment.system.errors import UserError, run_command
from alignment.system.files import atomic_folder
from alignment.system.terminal import make_console, progress_line

Example = tuple[tuple[int, ...], tuple[int, ...]]  # prompt ids, response ids


def train(args: SFTArgs, console: Console) -> Evaluation:
    """Fine-tune --model and save it whole to --sft_base; returns its evaluation on the test problems.

    Raises `UserError` where --sft_base exists already: nothing is ever overwritten.
    """
    target = Path(args.sft_base)
    if target.exists():
        raise UserError(f"--sft_base {target} exists already: delete it, or name another folder")
    refuse_missing_engine(args)
    task = find_task(args.task)
    rule = evaluation_reward(args.reward, task.rules)
    problems = eval_problems(task, args)
    demonstrations = {
        split: jsonl.demonstrations(args.demonstrations, split, args.seed)
        if args.demonstrations
        else task.demonstrations(split, args.dataset_path, args.seed)
        for split in ("train", "test")
    }
    torch.manual_seed(args.seed)
    roles = roles_of(args)
    base = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(base)
    model = load_model(base, roles.policy, torch.float32)
    template, context = args.prompt or task.prompt, context_length(model.config)
    problems = prompted(problems, template, tokenizer)
    examples = {}
    for split, shown in demonstrations.items():
        filled = iter(prompted([problem for problem, _ in shown if problem.question], template, tokenizer))
        asked = [next(filled) if problem.question else problem for problem, _ in shown]
        pairs = [(problem.prompt, response) for problem, (_, response) in zip(asked, shown, strict=True)]
        examples[split] = tokenise(pairs, tokenizer, context)
    encode_prompts(
        tokenizer, [problem.prompt for problem in problems], context, args.max_new_tokens
    )  # refuses before it trains
    with refused_if_made_meanwhile(target), atomic_folder(target) as building:
        write_args(building, args)
        run = RunFolder(building)
        longest = max(len(prompt) + len(response) for shown in examples.values() for prompt, response in shown)
        fitted = fit(model, args, longest, console, compute_dtype(args, roles.policy[0]))
        optimise(model, examples["train"], examples["test"], pad_token_id(tokenizer), fitted, run, console)
        run.close()
        save_model(building, model, tokenizer)
    sampler = make_sampler(args, str(target), tokenizer, roles.eval, roles, policy=model)
    try:
        with console.status("sampling held-out problems"):
            evaluation = evaluate_vllm(sampler, rule, problems, eval_sampling(task, args), task.rules)
    finally:
        sampler.close()
    run = RunFolder(target, args.num_steps)
    run.log_eval({"step": args.num_steps, **evaluation.record()})
    run.log_completions("eval", args.num_steps, evaluation.groups)
    run.log_summary(evaluation.record())
    run.close()
    return evaluation


class MadeMeanwhile(UserError):
    """Another command has written --sft_base while this one was training."""


@contextmanager
def refused_if_made_meanwhile(target: Path) -> Iterator[None]:
    """Raise `MadeMeanwhile` where the folder could not take its name since there is one by now."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and target.exists():
            raise MadeMeanwhile(f"--sft_base {target} was made by another command meanwhile; that one is kept") from None
        raise


def tokenise(pairs: Sequence[tuple[str, str]], tokenizer, context: int) -> list[Example]:
    """Token ids of (prompt, response) pairs, EOS after each response. Raises `UserError` for a pair beyond the context."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    responses = tokenizer([response for _, response in pairs], add_special_tokens=False)["input_ids"]
    examples = [(tuple(p), (*r, tokenizer.eos_token_id)) for p, r in zip(prompts, responses, strict=True)]
    for number, (prompt, response) in enumerate(examples):
        if len(prompt) + len(response) > context:
            raise UserError(
                f"demonstration {number} has {len(prompt) + len(response)} tokens, more than the model's context of"
                f" {context}. It begins: {pairs[number][0][:60]!r}"
            )
    return examples


def batches(examples: Sequence[Example], args: SFTArgs) -> Iterator[list[Example]]:
    """Endless batches, from one pass over the examples after another, each shuffled unless --curriculum keeps their order.

    Batches are not sorted by length, which would make each one's gradient that of one kind of example; it is the
    micro-batches inside them that are (`cut_by_tokens`).
    """
    for epoch in itertools.count():
        order = list(range(len(examples)))
        if not args.curriculum:
            random.Random(f"sft {args.seed} {epoch}").shuffle(order)
        for start in range(0, len(order), args.batch_size):
            yield [examples[i] for i in order[start : start + args.batch_size]]


def optimise(model, train_set, validation_set, pad: int, args: SFTArgs, run: RunFolder, console: Console) -> None:
    """Run --num_steps of AdamW on the mean negative log-likelihood of a batch's response tokens."""
    optimizer = make_optimizer(model, args.learning_rate, args.weight_decay)
    dtype = compute_dtype(args, str(model.get_input_embeddings().weight.device))
    stream = batches(train_set, args)
    words = ""
    with progress_line("SFT", args.num_steps, console) as progress:
        for step in range(1, args.num_steps + 1):
            set_learning_rate(optimizer, args.learning_rate * warmup_then_linear(step, args.warmup_steps, args.num_steps))
            model.train()
            loss = sum(backward(model, next(stream), pad, args.micro_batch_tokens, dtype))
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            signals.deliver_signals()  # where a library has swallowed the exception of a signal
            if step % args.eval_interval == 0 or step == args.num_steps:
                validation = validation_loss(model, validation_set, pad, args.micro_batch_tokens, dtype)
                record = {"loss": loss.item(), "grad_norm": grad_norm.item(), "validation_loss": validation}
                run.log_step({"step": step, **record, "learning_rate": optimizer.param_groups[0]["lr"]})
                words = f"validation loss {validation:.3f}"
            progress(step, words)


def warmup_then_linear(step: int, warmup_steps: int, num_steps: int) -> float:
    """Factor of the learning rate at a step (from 1): linear rise to 1, then linear fall to 0.1 at the last step."""
    if step <= warmup_steps:
        return step / warmup_steps
    return 1 - 0.9 * (step - warmup_steps) / max(1, num_steps - warmup_steps)


def backward(model, examples: Sequence[Example], pad: int, micro_batch_tokens: int, dtype) -> Iterator[torch.Tensor]:
    """Add the batch's gradient to the model, micro-batch by micro-batch; yields the parts of the mean loss."""
    tokens = sum(len(response) for _, response in examples)

    def step(rows: Sequence[int]) -> torch.Tensor:
        batch = batch_of(examples, rows, pad)
        log_probs = policy_log_probs(model, batch, dtype)["log_probs"]
        mask = send(batch.response_mask, log_probs.device)
        # The step function averages over this micro-batch's rows; the whole batch's tokens must be what divides.
        return sft_microbatch_train_step(log_probs, mask, 1, normalize_constant=tokens / len(rows))[0]

    yield from run_parallel(step, *cut_for_parallel(model, examples, micro_batch_tokens), model.parameters())


def validation_loss(model, examples: Sequence[Example], pad: int, micro_batch_tokens: int, dtype) -> float:
    """Mean negative log-likelihood, in nats a response token, of the first 256 examples."""
    model.eval()
    examples = examples[:256]

    @torch.no_grad()
    def log_likelihood(rows: Sequence[int]) -> float:
        return policy_log_probs(model, batch_of(examples, rows, pad), dtype)["log_probs"].sum().item()

    total = sum(run_parallel(log_likelihood, *cut_for_parallel(model, examples, micro_batch_tokens)))
    return -total / sum(len(response) for _, response in examples)


def batch_of(examples: Sequence[Example], rows: Sequence[int], pad: int) -> Batch:
    """Some of the examples, padded."""
    return collate([examples[i][0] for i in rows], [examples[i][1] for i in rows], pad)


def main() -> None:
    args = parse(SFTArgs)
    console = make_console()
    print_evaluation(train(args, console), console)
    console.print(f"model: {args.sft_base}", markup=False)


if __name__ == "__main__":
    run_command(main)
