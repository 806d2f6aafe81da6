"""Builds the objects of the `train_rl` loop from its arguments. Only commands and builders know the arguments object."""

from collections.abc import Sequence

import torch

from alignment.args import RLArgs, configuration
from alignment.checks import engines_on_shared_gpu, roles_of
from alignment.core.records import Endless, Group, Problem
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.evaluation.accuracy import Evaluator
from alignment.models import evaluation, make_policy, make_sampler, sampler_config
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import compute_dtype, context_length, load_config, load_tokenizer, make_deterministic
from alignment.policy.policy import Policy
from alignment.policy.reference_client import ReferenceProcess, RemoteReference
from alignment.policy.reference_protocol import ServedModel, reference_token
from alignment.rollouts.ahead import AheadConfig, AheadRollouts
from alignment.rollouts.batches import collate_groups
from alignment.rollouts.source import RolloutSource, open_source
from alignment.rollouts.sync import Rollouts, SyncRollouts
from alignment.runs.checkpoint import TRAINER, load_rollouts
from alignment.runs.run import Run
from alignment.sampling.arrival import prove_adapters_arrive
from alignment.sampling.restarts import open_sampler
from alignment.sampling.sampler import SAMPLERS, Sampler, SamplerConfig, encode_prompts, engine_name, find_engine
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl
from alignment.system.terminal import printable
from alignment.training.mismatch import sampler_mismatch
from alignment.training.references import LocalReference, Reference, References
from alignment.warm_start import warm_start

PROBED = 8  # test problems that samplers are asked with random adapters


def build(args: RLArgs, run: Run) -> tuple[Policy, Rollouts, References, Evaluator, int]:
    """The objects of the loop, and the padding token's id. `run.start` creates the folder last: a mistake leaves no folder.
    Raises `UserError` for mistakes, if possible before a model loads."""
    base = str(run.checkpoint or warm_start(args, run.console))
    tokenizer, task = load_tokenizer(base), find_task(args.task)
    problems = task.test_problems(args.dataset_path, args.max_problems)
    problems = prompted(problems, args.prompt or task.prompt, tokenizer)
    source = open_source(args.rollout_config, tokenizer)
    longest = longest_row(args, source, problems, base, tokenizer)
    if args.deterministic:
        make_deterministic()
    start = warm_start(args, run.console) if run.checkpoint and args.lora_rank else base  # to which adapters are added
    policy = make_policy(args, start, run.checkpoint)
    if run.checkpoint:
        policy.load_optimizer(run.checkpoint / TRAINER)
    run.console.print(f"matrix products in {policy.dtype} (--dtype), {torch.get_num_threads()} threads (OMP_NUM_THREADS)")
    references = make_references(args, run, base, policy)
    eval_sampler = make_eval_sampler(args, run, base, tokenizer, policy)
    previous = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"] if run.step else 0
    if message := policy.choose_micro_batch_tokens(longest, previous):
        run.console.print(message)
    if args.rollouts == "async":
        rollouts = make_rollouts_ahead(args, run, base, policy, references)
    else:
        rollouts = make_rollouts(args, run, base, source, policy, eval_sampler)
    pad_id, shared = pad_token_id(tokenizer), getattr(rollouts, "sampler", None) is eval_sampler

    def check(groups: Sequence[Group]) -> None:
        """Compare the log-probs of an evaluation's own sampler with the trainer's."""
        rollout = collate_groups(groups, args.rollout_config, pad_id)
        sampler_mismatch(policy, rollout, args.sampling.distribution, args.max_sampler_mismatch)

    if args.lora_rank:
        prompts = [problem.prompt for problem in problems[:PROBED]]
        for sampler in dict.fromkeys((eval_sampler, getattr(rollouts, "sampler", eval_sampler))):
            run.console.print(prove_adapters_arrive(sampler, policy, prompts, args.sampling, pad_id), soft_wrap=True)
    checks = None if shared else check
    evaluator = Evaluator(evaluation(args, task, problems), args.eval_interval, eval_sampler, run, policy, checks)
    processes = (rollouts, references) if shared else (rollouts, references, eval_sampler)
    run.start(policy, tokenizer, rollouts, restarts=lambda: sum(process.restarts for process in processes))
    return policy, rollouts, references, evaluator, pad_id


def longest_row(args: RLArgs, source: RolloutSource, problems: Sequence[Problem], base: str, tokenizer) -> int:
    """Maximum tokens of a prompt and its response in an update. Raises `UserError` for a prompt beyond the context."""
    known = problems if isinstance(source.problems, Endless) else [*source.problems, *problems]
    longest_response = max(args.max_new_tokens, args.eval_max_new_tokens)
    prompts = [problem.prompt for problem in known]
    encoded = encode_prompts(tokenizer, prompts, context_length(load_config(base)), longest_response)
    return max(map(len, encoded)) + args.max_new_tokens


def make_references(args: RLArgs, run: Run, base: str, policy: Policy) -> References:
    """The sources of old and reference log-probs. The reference model is the model that the run started from."""
    config, roles, old_policy = args.update_config, roles_of(args), None
    itself = hasattr(policy, "ranks") or args.lora_rank  # ranks share a pass, and adapters need no copy of the weights
    if config.old_log_probs == "policy" and roles.policy != (roles.reference,) and not itself:
        dtype = getattr(torch, compute_dtype(args.dtype, roles.policy[0]))
        old_policy = FrozenModel(base, roles.reference, dtype)
    if args.loss.uses_ratio and config.old_log_probs == "ratio_one":
        run.console.print("one update a rollout: the ratio to the old policy is 1 by construction, its forward pass is skipped")
    reference = None
    if args.beta and args.lora_rank and not args.reference_url:
        reference = LocalReference(lambda batch, distribution, _: policy.base_log_probs(batch, distribution))
    elif args.beta:
        reference = make_reference(args, run, warm_start(args, run.console) if run.step else base)
    return References(config, old_policy, reference, run.clock)


def make_reference(args: RLArgs, run: Run, model_path: str) -> Reference:
    """The reference model `model_path`: at --reference_url, in this process (--rollouts sync), or in a process of its own.
    Raises `UserError` if --reference_url serves another model."""
    roles, vocabulary = roles_of(args), load_config(model_path).vocab_size
    name = compute_dtype(args.dtype, roles.policy[0])
    dtype = getattr(torch, name)
    if args.reference_url:
        remote = RemoteReference(args.reference_url, reference_token(), vocabulary, args.sampler_timeout)
        if FrozenModel(model_path, "cpu", dtype).weights_digest() != remote.info["weights"]:
            raise UserError(
                f"--reference_url {remote.url}: its model {printable(remote.info['model'])} has other weights, or another dtype"
                f" than {dtype}, than {model_path}, from which training starts: serve that one"
            )
        return remote
    if args.rollouts == "sync":
        return LocalReference(FrozenModel(model_path, roles.reference, dtype).log_probs)
    served = ServedModel(model_path, roles.reference, name, max_pending=args.staleness + 4, deterministic=args.deterministic)
    process = ReferenceProcess(served, vocabulary, args.sampler_timeout)
    run.closing.callback(process.close)
    return process


def make_eval_sampler(args: RLArgs, run: Run, base: str, tokenizer, policy: Policy) -> Sampler:
    """The evaluation's sampler, which rollouts between the updates use, too, if they have the same device."""
    roles = roles_of(args)
    facts = {"policy_version": run.step, "engines": engines_on_shared_gpu(args, roles)}
    sampler = make_sampler(args, base, roles.eval, tokenizer, policy, **facts)
    run.closing.callback(sampler.close)
    return sampler


def make_rollouts(
    args: RLArgs, run: Run, base: str, source: RolloutSource, policy: Policy, eval_sampler: Sampler
) -> SyncRollouts:
    """Rollouts sampled between the updates (--rollouts sync), by the evaluation's sampler if both have the same device."""
    roles = roles_of(args)
    if roles.sample == roles.eval and not args.sampler_url:
        return SyncRollouts(source, eval_sampler, run.clock)
    engine = SAMPLERS["vllm_server"] if args.sampler_url else find_engine(args.sampler)
    sampler = open_sampler(engine, rollout_sampler_config(args, run, base), load_tokenizer(base), policy)
    run.closing.callback(sampler.close)
    return SyncRollouts(source, sampler, run.clock)


def make_rollouts_ahead(args: RLArgs, run: Run, base: str, policy: Policy, references: References) -> AheadRollouts:
    """Rollouts that another process samples ahead (--rollouts async)."""
    reference = references.reference
    config = configuration(
        AheadConfig, args, rollouts=args.rollout_config, sampler=rollout_sampler_config(args, run, base),
        engine="vllm_server" if args.sampler_url else engine_name(args.sampler), micro_batch_tokens=policy.micro_batch_tokens,
        reference=(reference.url, reference.token) if hasattr(reference, "url") else None,
    )  # fmt: skip
    rollouts = AheadRollouts(config, load_rollouts(run.checkpoint) if run.checkpoint else [], run.clock)
    run.closing.callback(rollouts.close)
    return rollouts


def rollout_sampler_config(args: RLArgs, run: Run, base: str) -> SamplerConfig:
    roles = roles_of(args)
    options = {"policy_version": run.step, "url": args.sampler_url, "weights_folder": args.output_dir}
    return sampler_config(args, base, roles.sample, engines_on_shared_gpu(args, roles), **options)
