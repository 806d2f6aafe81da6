"""From arguments and a run folder to all that `train_rl` needs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from rich.console import Console

from alignment.args import RLArgs
from alignment.builders.announcements import needs_warm_start
from alignment.builders.base_models import resolve_model
from alignment.builders.data_checks import trained_test_questions
from alignment.builders.evaluations import (
    PreparedEvaluation,
    functions_of_others,
    prepare_evaluations,
)
from alignment.builders.policies import make_policy, ranks_of
from alignment.builders.prediction import (
    expected_peaks,
    kinds_by_plan,
    warn_of_short_memory,
    with_fastest_kind,
)
from alignment.builders.run_plan import RunPlan, plan_run
from alignment.builders.samplers import Engines
from alignment.builders.warm_start import encode_problems, prepare_warm_start
from alignment.core.records import Endless, Group, Problems, SampledStep
from alignment.core.tokens import pad_token_id
from alignment.data.pass_rates import rows_with_rates
from alignment.evaluation.accuracy import Evaluation, Evaluator
from alignment.model.dropout import random_settings
from alignment.model.frozen import FrozenModel, ReferenceProcess
from alignment.model.loading import load_config, load_tokenizer, make_deterministic
from alignment.model.saving import check_saving
from alignment.model.vocabulary import Vocabulary, refuse_other_vocabulary
from alignment.planning.peak_meter import PeakMeter
from alignment.policy.policy import Policy
from alignment.rollouts.config import UpdateConfig
from alignment.rollouts.source import (
    AheadRollouts,
    RolloutSource,
    SyncRollouts,
    collate_groups,
    open_source,
)
from alignment.runs.run import Run
from alignment.runs.run_folder import TRAINER, checkpoint_folder, load_rollouts
from alignment.runs.summary import accuracy_with_interval
from alignment.sampling.arrival import prove_adapters_arrive
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import Sampler
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl, write_jsonl
from alignment.training.preparation import resumed_config
from alignment.training.update import LogProbSource, References, sampler_mismatch

PROBED = 8  # test problems that samplers answer with random adapters


@dataclass(frozen=True)
class RunParts:
    """What the loop of a run works with."""

    policy: Policy
    rollouts: SyncRollouts
    references: References
    evaluator: Evaluator
    update_config: UpdateConfig
    pad_token_id: int


def announced_plan(args: RLArgs, base: str, console: Console) -> RunPlan:
    """The run's plan. Prints the kind of policy on several devices, and what others would take."""
    plan = plan_run(with_fastest_kind(args), base)
    if len(plan.roles.policy) > 1:
        console.print(kinds_by_plan(args, plan.policy.kind, plan.policy.devices), soft_wrap=True)
    return plan


def build(args: RLArgs, run: Run) -> RunParts:
    """Load and open all that the loop works with. Warns where memory is short.

    `run.start` creates the run's folder at the very end, so an error before leaves no folder."""
    warn_of_short_memory(args, run.console)
    with run.clock("warm_start"):
        base = str(run.checkpoint or first_model(args, run.console))
    tokenizer = load_tokenizer(base)
    check_saving(base, tokenizer)
    if args.deterministic:
        make_deterministic()
    plan = announced_plan(args, base, run.console)
    engines = Engines(plan, run, load_tokenizer(base))
    evaluations = prepare_evaluations(args, tokenizer)
    evaluation = evaluations[""]
    source = open_source(args.rollout_config, tokenizer)
    longest = longest_row(plan, source, evaluations, tokenizer)
    policy = make_policy_of_run(args, run, plan)
    references = make_references(args, run, plan, policy)
    engines.use_policy(policy)
    eval_sampler = engines.open("evaluation")
    choose_micro_batch_tokens(policy, longest, run)
    sampler = eval_sampler
    if not plan.shares_sampler:
        sampler = engines.open("rollouts")
    pad_id = pad_token_id(tokenizer)

    def check_log_probs(groups: Sequence[Group]) -> None:
        """Compare the log-probs of the evaluation's sampler with the trainer's."""
        rollout = collate_groups(groups, args.rollout_config, pad_id)
        sampler_mismatch(policy, rollout, evaluation.distribution, args.max_sampler_mismatch)

    def request_reference(sampled: SampledStep) -> None:
        """Let a reference model in another process begin on a rollout that has just been
        sampled."""
        batch = collate_groups(sampled.groups, args.rollout_config, pad_id).batch
        references.request(sampled.step, batch, policy.micro_batch_tokens)

    if args.lora_rank:
        prompts = [problem.prompt for problem in evaluation.problems[:PROBED]]
        for each_sampler in dict.fromkeys((eval_sampler, sampler)):
            proof = prove_adapters_arrive(each_sampler, policy, prompts, args.sampling, pad_id)
            run.console.print(proof, soft_wrap=True)
    rollouts = open_rollouts(plan, run, source, sampler, request_reference)
    # Each update compares the sampler of its rollouts. Only one that never draws rollouts needs the
    # check after an evaluation, before which it goes to sleep.
    draws_rollouts = plan.shares_sampler and args.train_on == "samples"
    check = None if draws_rollouts else check_log_probs
    others = functions_of_others(evaluations)
    evaluate = announced_evaluation(evaluation, run)
    evaluator = Evaluator(evaluate, args.eval_interval, eval_sampler, run, policy, check, others)
    peak_meter = PeakMeter(policy, expected_peaks(args, plan))
    run.start(policy, tokenizer, rollouts, peak_meter)
    fault = trained_test_questions(source.problems, evaluation.problems)
    if fault:
        run.warn("trained_test_questions", fault)
    if args.pass_rates:
        write_training_problems(args.pass_rates, run, source.problems)
    update_config = resumed_config(args.update_config, run.last_record)
    return RunParts(policy, rollouts, references, evaluator, update_config, pad_id)


def first_model(args: RLArgs, console: Console) -> str:
    """The model that a new run starts from, as `prepare_warm_start`. A prompt that the run cannot
    ask raises `UserError` before a warm start is made, which takes minutes."""
    if needs_warm_start(args):
        check_prompts(args)
    return prepare_warm_start(args, console)


def check_prompts(args: RLArgs) -> None:
    """Raise `UserError`, as `longest_row`, for a prompt that the run cannot ask by the tokenizer of
    --model."""
    base = resolve_model(args.model, args.output_dir)
    tokenizer = load_tokenizer(base)
    plan = plan_run(with_fastest_kind(args), base)
    source = open_source(args.rollout_config, tokenizer)
    longest_row(plan, source, prepare_evaluations(args, tokenizer), tokenizer)


def announced_evaluation(
    evaluation: PreparedEvaluation, run: Run
) -> Callable[[Sampler], Evaluation]:
    """The evaluation's function, which prints that it begins, and then the accuracy."""

    def evaluate(sampler: Sampler) -> Evaluation:
        when = f"after step {run.last_step}" if run.last_step else "before step 1"
        number = len(evaluation.problems)
        run.console.print(f"evaluating {number} problems {when}", markup=False)
        result = evaluation.evaluate(sampler)
        accuracy = accuracy_with_interval(result.record)
        run.console.print(f"accuracy {when}: {accuracy}", markup=False, highlight=False)
        return result

    return evaluate


def choose_micro_batch_tokens(policy: Policy, longest: int, run: Run) -> None:
    """Choose the tokens that are computed at once, where the longest row has so many; a resumed run
    keeps its number. Prints what the policy says of it."""
    previous_tokens = 0
    if run.last_step:
        previous_tokens = read_jsonl(run.path / "metrics.jsonl")[-1]["micro_batch_tokens"]
    message = policy.choose_micro_batch_tokens(longest, previous_tokens)
    if message:
        run.console.print(message)


def write_training_problems(pass_rates: str, run: Run, problems: Problems) -> None:
    """Write the problems that are trained on, and their rates in the file `pass_rates`, to the
    run's folder."""
    # Problems whose rate is measured are a list.
    if not isinstance(problems, Endless):
        rows = rows_with_rates(problems, pass_rates)
        write_jsonl(run.path / "training_problems.jsonl", rows)


def make_policy_of_run(args: RLArgs, run: Run, plan: RunPlan) -> Policy:
    """The policy of a run; on resume, with the optimiser's state of the checkpoint. Prints the
    dtype and the devices that it computes with."""
    start = plan.base
    if run.checkpoint and args.lora_rank:
        # The base model again, to which the checkpoint's adapters are added.
        start = prepare_warm_start(args, run.console)
    policy = make_policy(args, plan.policy, start, run.checkpoint)
    if args.reference_reset_optimizer and not hasattr(policy, "reset_optimizer"):
        raise UserError(
            "--reference_reset_optimizer: the class of --policy_parallelism has no method"
            " reset_optimizer"
        )
    # A checkpoint is saved before a reset forgets the optimiser's state.
    is_forgotten = args.reference_reset_optimizer and run.last_reset == run.last_step
    if run.checkpoint and not is_forgotten:
        policy.load_optimizer(run.checkpoint / TRAINER)
    threads = torch.get_num_threads()
    noun = "CPU threads" if threads > 1 else "CPU thread"
    devices = ", ".join(dict.fromkeys(policy.devices)).replace("cpu", f"{threads} {noun}")
    dtype = str(policy.dtype).removeprefix("torch.")
    run.console.print(f"Computing in {dtype} on {devices}", soft_wrap=True)
    print_left_out_settings(policy, run.console)
    return policy


def print_left_out_settings(policy: Policy, console: Console) -> None:
    """Print which dropouts of the model's config RL ignores, if any: the policy computes in
    evaluation mode, as its sampler does."""
    settings = [f"{name} {value:g}" for name, value in random_settings(policy.config).items()]
    if settings:
        reason = "with it log-probs would not be the sampler's"
        console.print(
            "RL computes without the dropout of the model's config"
            f" ({', '.join(settings)}): {reason}",
            soft_wrap=True,
        )


def longest_row(
    plan: RunPlan,
    source: RolloutSource,
    evaluations: Mapping[str, PreparedEvaluation],
    tokenizer,
) -> int:
    """Tokens of the longest row that an update may get: the longest prompt, of the training or the
    test problems, and the longest trained response. Raises `UserError` as `encode_problems`, also
    for a prompt of another held-out task."""
    test_problems = evaluations[""].problems
    for prefix, other in evaluations.items():
        if prefix:
            encode_problems(other.problems, plan.base, tokenizer, plan.longest_response)
    every_problem = test_problems
    # Endless problems cannot all be measured; the test problems stand for them.
    if not isinstance(source.problems, Endless):
        every_problem = [*source.problems, *test_problems]
    prompts = encode_problems(every_problem, plan.base, tokenizer, plan.longest_response)
    return max(map(len, prompts)) + plan.response_tokens


def open_rollouts(
    plan: RunPlan,
    run: Run,
    source: RolloutSource,
    sampler: Sampler,
    on_sampled: Callable[[SampledStep], None],
) -> SyncRollouts:
    """The rollouts of a run: sampled between the updates or, ahead of them, by a thread that calls
    `on_sampled` with each; with --train_on solutions, by the worked solutions."""
    if source.solutions is not None:
        source.solutions.load_weights((), run.last_step)
        return SyncRollouts(source, source.solutions, run.clock)
    if plan.samples_between_updates:
        return SyncRollouts(source, sampler, run.clock)
    pool = cast(SamplerPool, sampler)  # As `open_sampler` opens engines outside this process.
    sampled = load_rollouts(run.checkpoint) if run.checkpoint else []
    rollouts = AheadRollouts(source, pool, plan.schedule, run.clock, sampled, on_sampled)
    run.closing.callback(rollouts.close)
    return rollouts


def make_references(args: RLArgs, run: Run, plan: RunPlan, policy: Policy) -> References:
    """The sources of old and reference log-probs. The reference model has the weights that the run
    started from before any step; with adapters it is the policy without them."""
    config = args.update_config
    teacher = make_teacher(args, run, plan)
    old_policy = open_old_policy(plan, policy)
    if args.loss.uses_ratio and config.old_log_probs == "ratio_one":
        run.console.print(
            "On-policy (one update per rollout): old log-probs are not needed, clipping has no"
            " effect"
        )
    reference = make_reference(args, run, plan, policy)
    return References(config, old_policy, reference, run.clock, teacher, run.last_reset)


def open_old_policy(plan: RunPlan, policy: Policy) -> FrozenModel | None:
    """A copy of the policy on the reference's device, by the same kernels; None where the policy
    computes old log-probs itself."""
    # The plan knows neither whether a policy class of the user's own has ranks, nor which kernels
    # --kernels auto is. Liger's are those of one GPU.
    kernels = getattr(policy, "kernels", "eager")
    if not plan.keeps_old_policy or ranks_of(policy) is not None or kernels == "liger":
        return None
    dtype = getattr(torch, plan.policy.dtype)
    return FrozenModel(plan.base, plan.roles.reference, dtype, kernels)


def make_reference(args: RLArgs, run: Run, plan: RunPlan, policy: Policy) -> LogProbSource | None:
    """The source of the log-probs of a KL penalty; None without one. Its model has the weights of
    the last reset's checkpoint, if there was one. Each reset is printed, and with
    --reference_reset_optimizer forgets the optimiser's moments, as in ProRL."""
    if not args.beta:
        return None
    if not args.keeps_reference:

        def base_log_probs(batch, distribution, micro_batch_tokens):
            return policy.base_log_probs(batch, distribution)

        return LogProbSource(base_log_probs)
    start = plan.base
    if run.last_reset:
        start = str(checkpoint_folder(run.path, run.last_reset))
    elif run.last_step:
        start = prepare_warm_start(args, run.console)
    if not run.last_reset:  # else a checkpoint of this run
        run.keep_frozen("reference model", start)
    source = open_frozen(args, run, plan, start, plan.roles.reference)
    reload = source.reload
    assert reload is not None

    def reset(checkpoint: str) -> None:
        reload(checkpoint)
        if args.reference_reset_optimizer:
            policy.reset_optimizer()
        run.console.print(
            f"The reference of --beta has the policy's weights of step {run.last_step} now",
            soft_wrap=True,
        )

    return replace(source, reload=reset)


def make_teacher(args: RLArgs, run: Run, plan: RunPlan) -> LogProbSource | None:
    """The source of the log-probs of --teacher; None without. Raises `UserError` as
    `find_teacher`."""
    if not args.teacher:
        return None
    folder = find_teacher(args, plan.base)
    run.keep_frozen("teacher", folder)
    return open_frozen(args, run, plan, folder, plan.roles.teacher, name="teacher")


def find_teacher(args: RLArgs, base: str) -> str:
    """The folder or hub name of --teacher. Raises `UserError` where there is none, or its
    vocabulary is not that of the policy `base`."""
    folder = resolve_model(args.teacher, args.output_dir, "--teacher")
    policys = Vocabulary(load_tokenizer(base).get_vocab(), load_config(base).vocab_size)
    teachers = Vocabulary(load_tokenizer(folder).get_vocab(), load_config(folder).vocab_size)
    refuse_other_vocabulary(args.teacher, teachers, policys)
    return folder


def open_frozen(
    args: RLArgs, run: Run, plan: RunPlan, folder: str, device: str, name: str = "reference model"
) -> LogProbSource:
    """The source of a frozen model's log-probs; in a process of its own where rollouts are sampled
    beside the updates, so that it computes beside them too."""
    dtype: torch.dtype = getattr(torch, plan.policy.dtype)
    if plan.samples_between_updates:
        model = FrozenModel(folder, device, dtype)
        return LogProbSource(model.log_probs, reload=model.reload)
    process = run.open(
        ReferenceProcess(folder, device, dtype, args.deterministic, args.sampler_timeout, name)
    )
    return LogProbSource(process.log_probs, in_background=True, reload=process.reload)
