"""From arguments and a run folder to all that `train_rl` needs."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console

from alignment.args import (
    RLArgs,
)
from alignment.builders.checks import roles_of
from alignment.builders.evaluations import evaluation
from alignment.builders.policies import make_policy
from alignment.builders.samplers import Engines
from alignment.builders.warm_start import encode_problems, warm_start
from alignment.core.records import Endless, Group, Problem, SampledStep
from alignment.core.tokens import pad_token_id
from alignment.evaluation.accuracy import Evaluator
from alignment.model.dropout import random_settings
from alignment.model.frozen import FrozenModel, ReferenceProcess
from alignment.model.loading import compute_dtype, load_tokenizer, make_deterministic
from alignment.model.saving import check_saving
from alignment.planning.peak_meter import PeakMeter
from alignment.policy.policy import Policy
from alignment.rollouts.source import (
    AheadRollouts,
    RolloutSource,
    SyncRollouts,
    collate_groups,
    open_source,
)
from alignment.runs.run import (
    Run,
)
from alignment.runs.run_folder import TRAINER, load_rollouts
from alignment.sampling.arrival import prove_adapters_arrive
from alignment.system.files import (
    read_jsonl,
)
from alignment.training.update import References, sampler_mismatch

PROBED = 8  # test problems that samplers answer with random adapters


def build(
    args: RLArgs, run: Run, measure_memory: Callable[[Policy], PeakMeter]
) -> tuple[Policy, SyncRollouts, References, Evaluator, int]:
    """The objects of the loop, and the padding token's id. `run.start` creates the folder last: a
    mistake leaves none. `measure_memory` makes what measures the policy's memory."""
    with run.clock("warm_start"):
        base = str(run.checkpoint or warm_start(args, run.console))
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    if args.deterministic:
        make_deterministic()
    engines = Engines(args, run, base, load_tokenizer(base))
    problems, evaluate = evaluation(args, tokenizer)
    source = open_source(args.rollout_config, tokenizer)
    longest = longest_row(args, source, problems, base, tokenizer)
    # to which adapters are added
    start = warm_start(args, run.console) if run.checkpoint and args.lora_rank else base
    policy = make_policy(args, start, run.checkpoint)
    if run.checkpoint:
        policy.load_optimizer(run.checkpoint / TRAINER)
    threads, devices = torch.get_num_threads(), ", ".join(dict.fromkeys(policy.devices))
    place = devices.replace("cpu", f"{threads} CPU thread{'s' * (threads > 1)}")
    run.console.print(
        f"Computing in {str(policy.dtype).removeprefix('torch.')} on {place}", soft_wrap=True
    )
    say_what_is_off(policy, run.console)
    references = make_references(args, run, base, policy)
    engines.use_policy(policy)
    eval_sampler = engines.open("evaluation")
    previous = (
        read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"] if run.last_step else 0
    )
    if message := policy.choose_micro_batch_tokens(longest, previous):
        run.console.print(message)
    sampler = eval_sampler if engines.shared else engines.open("rollouts")
    pad_id = pad_token_id(tokenizer)

    def check(groups: Sequence[Group]) -> None:
        """Compare the log-probs of an evaluation's own sampler with the trainer's."""
        rollout = collate_groups(groups, args.rollout_config, pad_id)
        sampler_mismatch(policy, rollout, args.sampling.distribution, args.max_sampler_mismatch)

    def request_reference(sampled: SampledStep) -> None:
        """Have a reference model in another process begin with a rollout as soon as it is
        sampled."""
        batch = collate_groups(sampled.groups, args.rollout_config, pad_id).batch
        references.request(sampled.step, batch, policy.micro_batch_tokens)

    if args.lora_rank:
        prompts = [problem.prompt for problem in problems[:PROBED]]
        for each in dict.fromkeys((eval_sampler, sampler)):
            run.console.print(
                prove_adapters_arrive(each, policy, prompts, args.sampling, pad_id), soft_wrap=True
            )
    rollouts = SyncRollouts(source, sampler, run.clock)
    if not engines.between_updates:
        sampled = load_rollouts(run.checkpoint) if run.checkpoint else []
        rollouts = AheadRollouts(
            source, sampler, args.schedule, run.clock, sampled, request_reference
        )
        run.closing.callback(rollouts.close)
    evaluator = Evaluator(
        evaluate, args.eval_interval, eval_sampler, run, policy, None if engines.shared else check
    )
    run.start(policy, tokenizer, rollouts, measure_memory(policy))
    return policy, rollouts, references, evaluator, pad_id


def say_what_is_off(policy: Policy, console: Console) -> None:
    """Print which settings of the model's config RL leaves out: a policy computes in evaluation
    mode, as its sampler does."""
    if settings := ", ".join(
        f"{name} {value:g}" for name, value in random_settings(policy.config).items()
    ):
        reason = "with it log-probs would not be the sampler's"
        console.print(
            f"RL computes without the dropout of the model's config ({settings}): {reason}",
            soft_wrap=True,
        )


def longest_row(
    args: RLArgs, source: RolloutSource, problems: Sequence[Problem], base: str, tokenizer
) -> int:
    """Maximum tokens of a prompt and its response in an update. Raises `UserError` as
    `encode_problems`."""
    known = problems if isinstance(source.problems, Endless) else [*source.problems, *problems]
    longest_response = max(args.max_new_tokens, args.eval_max_new_tokens)
    return (
        max(map(len, encode_problems(known, base, tokenizer, longest_response)))
        + args.max_new_tokens
    )


def make_references(args: RLArgs, run: Run, base: str, policy: Policy) -> References:
    """The sources of old and reference log-probs. The reference model is the model that the run
    started from."""
    config, roles, old_policy = args.update_config, roles_of(args), None
    dtype = getattr(torch, compute_dtype(args.dtype, roles.policy[0]))
    # which share a pass
    if (
        args.copies_old_policy
        and roles.policy != (roles.reference,)
        and not hasattr(policy, "ranks")
    ):
        old_policy = FrozenModel(base, roles.reference, dtype)
    if args.loss.uses_ratio and config.old_log_probs == "ratio_one":
        run.console.print(
            "On-policy (one update per rollout): old log-probs are not needed, clipping has no"
            " effect"
        )
    references = partial(References, config, old_policy, clock=run.clock)
    if not args.beta:
        return references(None)
    if args.lora_rank:
        return references(lambda batch, distribution, _: policy.base_log_probs(batch, distribution))
    start = warm_start(args, run.console) if run.last_step else base
    if args.rollouts == "sync":
        return references(FrozenModel(start, roles.reference, dtype).log_probs)
    process = ReferenceProcess(
        start, roles.reference, dtype, args.deterministic, args.sampler_timeout
    )
    return references(run.open(process).log_probs, in_background=True)
