"""A run's memory and seconds before it starts: its devices, the peak bytes of each in each phase of
a step, from shapes alone, and the time of the shapes' work at a machine's rates, or at those that
finished runs show."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console

from alignment.ablation.study import Run, read_run
from alignment.args import RLArgs, configuration, flags_of
from alignment.builders.base_models import EMBEDDED, check_model_path, resolve_model
from alignment.builders.devices import visible_gpus
from alignment.builders.evaluations import evaluation_tokens
from alignment.builders.run_plan import (
    THIS_MACHINE,
    PlannedMachines,
    RunPlan,
    counted_kernels,
    engines_on_shared_gpu,
    keeps_old_policy,
    own_processes,
    plan_run,
    shares_sampler,
)
from alignment.config.flag import defaults_of_flags
from alignment.core.text import prompt_token_ids
from alignment.data.prompts import read_system_prompt
from alignment.data.tasks import TASKS, Task
from alignment.data.tasks.own_data import read_examples
from alignment.evaluation import benchmarks
from alignment.model.loading import compute_dtype, load_config, load_tokenizer
from alignment.model.parallel_micro_batches import PARALLEL
from alignment.model.shape import ModelShape
from alignment.planning.measured_memory import SPARE
from alignment.planning.passes import HOST_COUNTS, ComputedModel, counts_on_card
from alignment.planning.peak_meter import WHOLE
from alignment.planning.peaks import DevicePeak, peak_bytes
from alignment.planning.phase_work import Engines, PolicySplit, Schedule, Shares, StepWork
from alignment.planning.phases import MicroBatches
from alignment.planning.placement import Roles
from alignment.planning.seconds import Hardware, Rates, hardware_of, rates
from alignment.planning.step_shape import SampledRows, StepShape
from alignment.planning.work import UnitSeconds, Work
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import AUTO, POLICIES, policy_kind
from alignment.sampling.sampler import engine_name
from alignment.system.device_memory import total_bytes
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE

# The number of machines on which torchrun has started this run.
MACHINES = max(1, PROCESSES // max(1, PROCESSES_HERE))

# configurations of models on the hub, so that it need not be asked
PUBLISHED = Path(__file__).parents[1] / "planning" / "published"


class Prompts(NamedTuple):
    """The prompts of a task."""

    longest: int  # Tokens of the longest prompt of training.
    test_problems: int


GSM8K = Prompts(longest=320, test_problems=1319)
"""Tokens of the longest prompt, and test problems, where a task's files are not on the machine.

Source: GSM8K's, by SmolLM2's tokenizer. Shown wrong by: the longest `prompt_ids` of a run's
completions. Read by: `prompts_of`, `step_shape`."""

LONGER = 1.25
"""Times the longest prompt of the test problems that the longest of training has at most.

Source: SVAMP's, which learns from other sets. Shown wrong by: the longest `prompt_ids` of a run's
completions. Read by: `prompts_of`."""

# --- how far seconds may be off, either way, by factors -------------------------------------------

ONE_RUN = 1.5
"""Factor by which what one finished run tells may be off.

Source: chosen, as the three below, on the runs of docs/plan_measured.md#seconds, of which 28 of 29
figures lie in their ranges. Shown wrong by: `benchmarks.step_time`. Read by: `seconds_of`."""

SEVERAL_RUNS = 1.25
"""Factor by which what several runs tell may be off, at least.

Source: chosen on the same runs. Shown wrong by: `benchmarks.step_time`. Read by: `seconds_of`."""

OF_SIZE = 1.1
"""Factor for each e-fold of size that the nearest run is off.

Source: chosen on the same runs. Shown wrong by: `benchmarks.step_time`. Read by: `seconds_of`."""

NEAREST_SIZE = 0.1
"""E-folds of size below which all runs are near: a run weighs (this + its distance)^-2.

Source: chosen on the same runs. Shown wrong by: `benchmarks.step_time`. Read by: `seconds_of`."""

# --- below which nothing is compared --------------------------------------------------------------

SHORTEST_MEASURED = 0.001
"""Seconds of a phase, below which it tells no rates.

Assumption: a choice. Shown wrong by: a run of such phases whose rates fit others. Read by:
`read_finished_run`."""

SHORTEST = 0.1
"""Seconds of a phase: less is latency, and other processes, whatever was predicted.

Assumption: a choice. Shown wrong by: the spread of such seconds over repeated runs. Read by:
`beside_plan`."""

SMALLEST = 5e8
"""Bytes of a device's peak: less is libraries' own, whatever was predicted.

Assumption: a choice. Shown wrong by: what torch allocates on a GPU before a model is loaded. Read
by: `largest_of`."""


@dataclass(frozen=True)
class Prediction:
    """What is known of a run from its arguments and its model's configuration."""

    run: RLArgs  # With the kind of policy, and for one machine its number of ranks.
    shape: ModelShape
    config: Any  # The model's.
    roles: Roles  # `policy` has an entry for each rank.
    kind: str  # Of policy: a key of `POLICIES`.
    step: StepShape
    # Of the ranks or devices of the policy, in order, then of others; none without `step.card`.
    peaks: list[DevicePeak]
    host: int | None  # Bytes of the host's memory; None: not known.

    @property
    def micro_batches(self) -> list[MicroBatches]:
        """Of each device of the policy, as the memory allows; none where it is not known."""
        return [peak.micro_batches for peak in self.peaks if peak.micro_batches]

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens that a micro-batch may have on each device; 0: not known."""
        return min((each.most for each in self.micro_batches), default=0)

    def capacity(self, device: str) -> int | None:
        """Bytes of a device; None: not known. Ranks on a CPU share the host's memory."""
        if device == "cpu" and self.roles.policy[0] != "cpu":
            return self.host
        return self.step.card * max(self.roles.policy.count(device), 1)

    @property
    def fits(self) -> bool | None:
        """Whether all devices whose memory is known hold what is on them; None: it is of none."""
        if not self.peaks:
            return None
        return all((self.excess(peak.device) or 0) <= 0 for peak in self.peaks)

    def excess(self, device: str) -> int | None:
        """Bytes that all on a device take beyond what it has, less `SPARE`; below 0: they fit;
        None: its memory is not known."""
        capacity = self.capacity(device)
        if capacity is None:
            return None
        taken = sum(peak.total for peak in self.peaks if peak.device == device)
        return taken - int((1 - SPARE) * capacity)


def planned_machines(hardware: Hardware) -> PlannedMachines:
    """The machines of --hardware as a run is planned for them."""
    return PlannedMachines(hardware.gpus, hardware.memory, hardware.machines, hardware.card)


def predict(args: RLArgs, machines: PlannedMachines = THIS_MACHINE) -> Prediction:
    """The prediction for a run on such machines. Raises `UserError` as `plan_run` and
    `predict_plan`."""
    if machines.gpus == 0 and not machines.memory:
        machines = replace(machines, memory=total_bytes("cpu"))
    args = with_fastest_kind(args, machines)
    model = args.model
    if args.sft_base and Path(args.sft_base).exists():
        model = args.sft_base
    base = described_model(model, args.output_dir, "--model")
    return predict_plan(args, plan_run(args, base, machines), machines)


def described_model(name: str, output_dir: str, flag: str) -> str:
    """A folder or hub name that has the configuration of a model, if not its weights."""
    published = PUBLISHED / name.replace("/", "--")
    if name in EMBEDDED:
        return resolve_model(name, output_dir, flag)
    if (published / "config.json").is_file():
        return str(published)
    # that a folder's weights are whole is checked where they are loaded: it takes reading all of
    # them
    return check_model_path(name, flag) or name


def predict_plan(args: RLArgs, plan: RunPlan, machines: PlannedMachines) -> Prediction:
    """The prediction for a run that is planned for such machines. Raises `UserError` as
    `ModelShape.from_config`."""
    memory = machines.memory
    if machines.gpus is None and not memory:
        memory = min(map(total_bytes, plan.roles.policy))
    policy = plan.policy
    roles = replace(plan.roles, policy=policy.devices)
    ranks = 0
    if policy_kind(policy.kind).ranked and machines.number == 1:
        ranks = len(policy.devices)
    run = replace(args, policy_parallelism=policy.kind, policy_ranks=ranks)
    config = load_config(plan.base)
    shape = ModelShape.from_config(config, run.lora_rank, run.lora_targets)
    task = run.task_in_format
    options = PromptFlags(run.system_prompt, run.few_shot)
    prompts = prompts_of(task, run.dataset_path, options, plan.base)
    step = step_shape(
        run,
        roles,
        memory / policy.devices.count(policy.devices[0]),
        engine_name(run.sampler) == "vllm",
        machines.number,
        prompts,
    )
    step = replace(step, teacher_model=teacher_of(args, step.itemsize))
    peaks = peak_bytes(shape, config, roles, step) if memory else []
    host = total_bytes("cpu") if machines.gpus is None else None
    return Prediction(run, shape, config, roles, policy.kind, step, peaks, host)


def teacher_of(args: RLArgs, itemsize: int) -> ComputedModel | None:
    """The model of --teacher, with products of numbers of `itemsize` bytes; None without. Raises
    `UserError` where there is none of that name."""
    if not args.teacher:
        return None
    config = load_config(described_model(args.teacher, args.output_dir, "--teacher"))
    return ComputedModel(ModelShape.from_config(config), config, itemsize)


Change = dict[str, Any]
"""Arguments of a run -> other values."""


class Remedy(NamedTuple):
    """Flags that make a run fit."""

    flags: str
    size: int  # Bytes of the fullest device then.


def remedies(prediction: Prediction, machines: PlannedMachines) -> list[Remedy]:
    """The flags that would each make a run fit on its machines that does not, or else pairs of
    them. [] for a run that fits, or of unknown memory."""
    if prediction.fits in (True, None):
        return []
    alternatives = changes_that_save(prediction)
    pairs = itertools.combinations(alternatives, 2)
    # of each of a pair the change that saves the most
    both = [[one[-1] | other[-1]] for one, other in pairs]
    for choices in (alternatives, both):
        fitting = []
        for changes in choices:
            remedy = first_that_fits(prediction.run, changes, machines)
            if remedy:
                fitting.append(remedy)
        if fitting:
            return fitting
    return []


def changes_that_save(prediction: Prediction) -> list[list[Change]]:
    """The changes of a flag that take less memory, for each flag from the least to the most."""
    run = prediction.run
    smaller_micro_batches: list[Change] = []
    for tokens in (8192, 4096, 2048, 1024, 512):
        if run.micro_batch_tokens == 0 or tokens < run.micro_batch_tokens:
            smaller_micro_batches.append({"micro_batch_tokens": tokens})
    # 0 lets layers be computed twice
    smaller_micro_batches.append({"micro_batch_tokens": 0})
    changes = [smaller_micro_batches]
    if not run.gradient_checkpointing:
        changes.append([{"gradient_checkpointing": True}])
    optimizers = [name for name in OPTIMIZERS if name not in ("adamw", run.optimizer)]
    changes += [[{"optimizer": name}] for name in optimizers]
    if not run.lora_rank:
        changes.append([{"lora_rank": 16}])
    dividing = [name for name, kind in POLICIES.items() if kind.divides_weights]
    dividing.sort(key=lambda name: not POLICIES[name].ranked)
    changes += [[{"policy_parallelism": name}] for name in dividing]
    if prediction.step.vllm:
        changes.append([{"gpu_memory_utilization": tenths / 10} for tenths in (4, 3, 2, 1)])
    return changes


def first_that_fits(
    run: RLArgs, changes: Sequence[Change], machines: PlannedMachines
) -> Remedy | None:
    """The first of some changes with which a run fits; None: with none of them."""
    for change in changes:
        other = predict_if_it_fits(run, change, machines)
        if other:
            size = max(peak.total for peak in other.peaks)
            return Remedy(" ".join(flags_of(change)), size)
    return None


def predict_if_it_fits(run: RLArgs, change: Change, machines: PlannedMachines) -> Prediction | None:
    """The prediction for a run with other arguments; None where it does not fit, or cannot be.
    Another kind of policy gets all ranks."""
    ranks = run.policy_ranks
    if "policy_parallelism" in change:
        ranks = 0
    with suppress(UserError):  # the flags clash, or need a package that is not here
        other = predict(replace(run, policy_ranks=ranks, **change), machines)
        if other.fits in (True, None):
            return other
    return None


def warn_of_short_memory(args: RLArgs, console: Console) -> None:
    """Print a warning where a run does not fit on this machine, if that can be predicted.

    It needs no warm start, so that the warning comes before the hours that one may take."""
    with suppress(UserError):  # what is wrong is said where it is loaded
        prediction = predict(args, PlannedMachines(number=MACHINES))
        for device in dict.fromkeys(peak.device for peak in prediction.peaks):
            capacity = prediction.capacity(device)
            excess = prediction.excess(device)
            if capacity is None or excess is None or excess <= 0:
                continue
            missing = f"{device} will lack {excess / 1e9:.1f} of {capacity / 1e9:.1f} GB"
            console.print(
                f"warning: {missing} (`alignment.plan` says which flags help)",
                style="yellow",
                soft_wrap=True,
            )


def expected_peaks(args: RLArgs, plan: RunPlan) -> Callable[[int], list[DevicePeak]]:
    """A function of the most tokens that a micro-batch has (0: as many as it may have), which
    predicts a run's peaks by its plan; it returns [] where they cannot be predicted."""
    try:
        prediction = predict_plan(args, plan, PlannedMachines(number=MACHINES))
    except UserError:  # what is wrong is said where it is loaded
        return lambda tokens: []
    return functools.cache(functools.partial(peaks_of_micro_batches, prediction))


def peaks_of_micro_batches(prediction: Prediction, tokens: int) -> list[DevicePeak]:
    """The peaks where the largest micro-batch of an update has so many tokens; 0: as many as it may
    have. On a CPU always those: micro-batches side by side, and the margin that was fitted to their
    limit, leave no one micro-batch that decides."""
    if not tokens or not prediction.peaks or prediction.roles.policy[0] == "cpu":
        return prediction.peaks
    step = replace(prediction.step, largest_micro_batch=tokens)
    return peak_bytes(prediction.shape, prediction.config, prediction.roles, step)


class PromptFlags(NamedTuple):
    """The flags that lengthen every prompt."""

    system_prompt: str = ""
    few_shot: str = ""


@functools.cache
def prompts_of(task: Task, dataset_path: str, options: PromptFlags, base: str) -> Prompts:
    """The prompts of the task, where its files and the tokenizer of the model `base` are on this
    machine, or else GSM8K's."""
    if task.name not in TASKS or not (Path(base) / "tokenizer.json").is_file():
        return GSM8K
    with suppress(UserError):  # the task's files are not here
        problems = task.test_problems(dataset_path)
        tokenizer = load_tokenizer(base)
        with_prompts = task.with_prompts(
            problems,
            tokenizer,
            read_system_prompt(options.system_prompt),
            read_examples(options.few_shot),
        )
        prompts = [problem.prompt for problem in with_prompts]
        longest = max(map(len, prompt_token_ids(tokenizer, prompts).ids))
        return Prompts(int(LONGER * longest), len(problems))
    return GSM8K


def step_shape(
    args: RLArgs,
    roles: Roles,
    card: float,
    vllm: bool,
    machines: int = 1,
    prompts: tuple[int, int] = GSM8K,
) -> StepShape:
    """The `StepShape` of a run on devices of `card` bytes; `prompts` as from `prompts_of`."""
    longest_prompt, test_problems = prompts
    prompt = args.max_prompt_tokens or longest_prompt
    problems = evaluated_problems(args, test_problems)
    passes = set()
    if args.needs_old_policy:
        passes.add("old_log_probs")
    if args.beta > 0:
        passes.add("reference")
    frozen_passes = set()
    if keeps_old_policy(args, roles, args.policy_parallelism):
        frozen_passes.add("old_log_probs")
    if args.keeps_reference:
        frozen_passes.add("reference")
    rows = min(args.train_mini_batch_size or args.rollout_size, args.rollout_size)
    ranks = len(roles.policy) if policy_kind(args.policy_parallelism).ranked else 1
    groups_of_rank = -(-rows // args.group_size // (ranks * machines))
    threads = torch.get_num_threads() // ranks if roles.policy[0] == "cpu" else 1
    dtype = compute_dtype(args.dtype, roles.policy[0])
    return configuration(
        StepShape,
        args,
        card=int(card),
        prompt=prompt,
        vllm=vllm,
        parallel=max(1, min(threads, PARALLEL)),
        itemsize=4 if dtype == "float32" else 2,
        update_tokens=groups_of_rank * (prompt + args.group_size * args.max_new_tokens),
        sampled={
            "sampling": SampledRows(args.prompts_per_rollout, args.group_size, args.max_new_tokens),
            "evaluation": evaluated_rows(args, problems),
        },
        truncated=args.sampling_top_p < 1 or args.sampling_top_k > 0,
        passes=frozenset(passes),
        frozen_passes=frozenset(frozen_passes),
        engines=engines_on_shared_gpu(args, roles),
        sleeps=args.rollouts == "sync",
        draws_rollouts=args.train_on == "samples",
        kernels=counted_kernels(args, roles),
        own_processes=own_processes(args, vllm),
        prepares_updates=args.selection is not None or args.entropy_target > 0,
    )


def evaluated_problems(args: RLArgs, test_problems: int) -> int:
    """How many of a task's test problems an evaluation asks."""
    held_out = round(args.evaluated_share * test_problems)
    return min(args.max_problems or held_out, held_out)


def evaluated_rows(args: RLArgs, problems: int) -> SampledRows:
    """What an evaluation samples on `problems` of --task, and on --eval_tasks, whose test problems
    are as many where it is not known. A greedy response beside n samples counts as an n-th of
    them."""
    of_task = problems
    for name in args.eval_tasks:
        number = of_task
        if name in benchmarks.ENTRIES:
            number = evaluated_problems(args, benchmarks.ENTRIES[name]["problems"])
        problems += number
    samples = args.eval_samples
    greedy = ceil(problems / samples) if args.eval_greedy else 0
    is_truncated = args.evaluation_top_p < 1 or args.evaluation_top_k > 0
    return SampledRows(
        problems + greedy,
        samples,
        evaluation_tokens(args),
        truncated=is_truncated and args.evaluation_temperature > 0,
    )


class PhaseSample(NamedTuple):
    """What a phase of a finished run took."""

    phase: str
    seconds: float  # By `Known.fit`.
    ratio: float  # Of the measured seconds to these.


LEAST_SHARES = Shares(prompt=0.1, response=0.25, trained=0.5)
"""Shares that a run has on average at least, of what it may have.

Assumption: a wide end of a range. Shown wrong by: the prompts and completions of a run, and
`response_length` and `rows_with_gradient` in its metrics.jsonl: in four steps of the tiny preset
prompts are 1.0 of the longest, responses .90 of --max_new_tokens, and .34 of the responses have a
gradient, less than is assumed here, or all of them with --beta. `calibrate` takes those of finished
runs. Read by: `Known`."""

MOST_SHARES = Shares(prompt=1.0, response=1.0, trained=1.0)
"""Shares that a run has on average at most.

Source: no prompt is longer than the longest, and so on. Shown wrong by: nothing. Read by:
`Known`."""


class Known(NamedTuple):
    """What finished runs show; by default nothing."""

    fit: UnitSeconds | None = None  # Which fits all phases of all runs best.
    samples: Sequence[PhaseSample] = ()
    least: Shares = LEAST_SHARES
    most: Shares = MOST_SHARES


class Range(NamedTuple):
    """The ends of a range."""

    least: float
    most: float


@dataclass(frozen=True)
class Duration:
    """What a run takes."""

    phases: dict[str, Range]  # Seconds of each phase.
    step: Range  # Seconds.
    tokens_per_second: Range  # Sampled ones.
    hours: Range  # Of the whole run, with evaluations and checkpoints.
    gpu_hours: Range  # The same of all GPUs; of a machine without, its hours.
    evaluations_gpu_hours: Range  # Of these, the evaluations'.


def work_of_phases(
    prediction: Prediction, machines: int, shares: Shares, refills: int = 0
) -> dict[str, Work]:
    """Phase -> the busiest device's work: of a step, which samples groups 1 + `refills` times, an
    evaluation, a checkpoint."""
    run = prediction.run
    step = prediction.step
    roles = prediction.roles
    schedule = Schedule(
        prompts=run.prompts_per_rollout,
        responses=run.rollout_size,
        max_new_tokens=run.max_new_tokens,
        updates=run.updates_per_rollout,
        epochs=run.epochs_per_rollout,
        micro_batch_tokens=run.micro_batch_tokens or prediction.micro_batch_tokens,
        recomputed_mlps=max((each.recomputed_mlps for each in prediction.micro_batches), default=0),
        recomputed=any(each.recomputed for each in prediction.micro_batches),
        refills=refills,
    )
    counts = HOST_COUNTS
    if roles.policy[0] != "cpu":
        counts = counts_on_card(step.kernels, step.itemsize)
    work = StepWork(
        ComputedModel(prediction.shape, prediction.config, step.itemsize, counts),
        step,
        PolicySplit.of_kind(prediction.kind, len(roles.policy), machines),
        schedule,
        engines_of_phases(run, roles, machines),
        shares,
    )
    return work.by_phase()


def engines_of_phases(run: RLArgs, roles: Roles, machines: int) -> dict[str, Engines]:
    """Phase -> the engines that sample in it. An evaluation without the sampler of the rollouts has
    one engine, on this machine."""
    tensor_parallel = run.sampler_tensor_parallel if len(roles.sample) > 1 else 1
    rollouts = Engines(roles.sample, tensor_parallel, machines)
    evaluation = rollouts if shares_sampler(run, roles) else Engines((roles.eval,))
    return {"sampling": rollouts, "evaluation": evaluation}


class MeasuredWork(NamedTuple):
    """A phase of a finished run: what it was, and how long it took."""

    phase: str
    work: Work
    seconds: float


class FinishedRun(NamedTuple):
    """What one finished run shows."""

    shares: Shares
    phases: list[MeasuredWork]


def calibrate(
    folders: Sequence[str], itemsize: int, machines: PlannedMachines = THIS_MACHINE
) -> Known:
    """What finished runs on one of such machines show, if there are any. Raises `UserError` for a
    folder that is no finished run's of two steps or more, or one's with products of numbers of
    another size than `itemsize` bytes."""
    if not folders:
        return Known()
    runs = []
    measured: list[MeasuredWork] = []
    for folder in folders:
        run = read_finished_run(Path(folder), itemsize, machines)
        runs.append(run)
        measured += run.phases
    fit = fit_unit_seconds(measured)
    samples = []
    for phase, work, seconds in measured:
        fitted = seconds_by_fit(work, fit)
        samples.append(PhaseSample(phase, fitted, seconds / fitted))
    by_name = [*zip(*(run.shares for run in runs), strict=True)]
    return Known(
        fit,
        samples,
        least=Shares(*(min(shares) for shares in by_name)),
        most=Shares(*(max(shares) for shares in by_name)),
    )


def read_finished_run(path: Path, itemsize: int, machines: PlannedMachines) -> FinishedRun:
    """What the folder of a run that is finished on one of such machines shows. Raises `UserError`
    as `calibrate` does."""
    run = read_run(path)
    # the first step also warms up
    steps: Sequence[Mapping[str, Any]] = run.metrics[1:] if run.finished else []
    rows: Sequence[Mapping[str, Any]] = []
    if any("rows_with_gradient" in step for step in steps):
        rows = read_jsonl(path / "completions" / f"rollout_{steps[-1]['step']:06d}.jsonl")
    if not rows:
        needed = "a finished run of train_rl, of two steps or more, with its completions"
        raise UserError(f"--calibrate {path}: must be {needed}")
    args = arguments_of(run, path, steps[0]["micro_batch_tokens"])
    prediction = predict(args, replace(machines, number=1))
    if prediction.step.itemsize != itemsize:
        raise UserError(f"--calibrate {path}: has products of another --dtype than what is planned")
    prompt = fmean(len(row["prompt_ids"]) for row in rows)
    response = fmean(step["response_length"] for step in steps)
    shares = Shares(
        prompt / prediction.step.prompt,
        response / args.max_new_tokens,
        fmean(step["rows_with_gradient"] / step["responses"] for step in steps),
    )
    phases = []
    for phase, work in work_of_phases(prediction, 1, shares).items():
        seconds = phase_seconds(phase, run)
        if seconds > SHORTEST_MEASURED:
            phases.append(MeasuredWork(phase, work, seconds))
    return FinishedRun(shares, phases)


def arguments_of(run: Run, path: Path, micro_batch_tokens: int) -> RLArgs:
    """A finished run's arguments, with the folder of its own weights and the micro-batches that it
    chose. Flags that this version has not are left out."""
    args = defaults_of_flags(RLArgs)
    for name, value in run.args.items():
        if name in args:
            args[name] = tuple(value) if isinstance(value, list) else value
    args["sft_base"] = str(path / "final")
    args["micro_batch_tokens"] = micro_batch_tokens
    return RLArgs(**args)


def fit_unit_seconds(measured: Sequence[MeasuredWork]) -> UnitSeconds:
    """The seconds of a unit of each kind of work, none below 0, whose sums are nearest to what all
    phases took, by relative squares."""
    # here, because a run that starts needs its memory only, and loading scipy takes a second
    from scipy.optimize import nnls

    relative = np.array([np.array(phase.work.amounts) / phase.seconds for phase in measured])
    solution, _ = nnls(relative, np.ones(len(measured)))
    return UnitSeconds(*(float(seconds) for seconds in solution))


def seconds_by_fit(work: Work, fit: UnitSeconds) -> float:
    """Seconds of work at fitted rates, a nanosecond at least."""
    return max(float(np.array(work.amounts, float) @ np.array(fit.amounts)), 1e-9)


def phase_seconds(phase: str, run: Run) -> float:
    """The median seconds that a phase took of a run's step, but for its first, or of an evaluation;
    0.0: none is logged."""
    if phase == "evaluation":
        return median(map(seconds_of_evaluation, run.evals)) if run.evals else 0.0
    records = run.metrics[1:]
    name = {"sampling": "seconds_sample"}.get(phase, f"seconds_{phase}")
    return median(record.get(name, 0.0) for record in records)


def seconds_of_evaluation(record: Mapping[str, Any]) -> float:
    """The seconds of an evaluation on all its tasks, and of greedy responses."""
    return sum(value for key, value in record.items() if key.rpartition("/")[2] == "seconds")


def seconds_of(phase: str, work: Work, at_rates: Rates | None, known: Known) -> Range:
    """The least and the most seconds of a phase's work. By finished runs that had it: at `fit`,
    times what it took beyond that, in runs of nearest size above all. Else those of the machine's
    rates."""
    samples = [sample for sample in known.samples if sample.phase == phase]
    if not samples or known.fit is None:
        assert at_rates is not None  # known only where runs tell more
        return Range(at_rates.least(work), at_rates.most(work))
    fitted = seconds_by_fit(work, known.fit)
    sizes = np.array([sample.seconds for sample in samples])
    ratios = np.array([sample.ratio for sample in samples])
    distances = abs(np.log(sizes / fitted))
    spread = ONE_RUN
    if len(samples) > 1:
        spread = max(SEVERAL_RUNS, max(ratios) / min(ratios))
    spread *= float(OF_SIZE ** min(distances))
    weights = (NEAREST_SIZE + distances) ** -2
    middle = fitted * float(np.exp(np.average(np.log(ratios), weights=weights)))
    return Range(middle / spread, middle * spread)


class RunSeconds(NamedTuple):
    """One end of a run's range: seconds of its phases, of a step, of all evaluations, and of all;
    sampled tokens of a step."""

    phases: dict[str, float]
    step: float
    evaluations: float
    run: float
    sampled: float


def duration(prediction: Prediction, hardware: Hardware, known: Known) -> Duration:
    """What the run takes on such machines."""
    roles = prediction.roles
    at_rates = rates(hardware, prediction.step.itemsize)
    devices = len({*roles.trainer, *roles.sample, roles.eval})
    gpus = hardware.machines * (hardware.gpus or devices)

    def run_at(end: int, shares: Shares, refills: int) -> RunSeconds:
        works = work_of_phases(prediction, hardware.machines, shares, refills)
        phases = {}
        for phase, work in works.items():
            phases[phase] = seconds_of(phase, work, at_rates, known)[end]
        return run_seconds(prediction.run, phases, shares)

    ends = (
        run_at(0, known.least, 0),
        run_at(1, known.most, prediction.run.max_refills),
    )

    def range_of(values: Iterable[float]) -> Range:
        return Range(*sorted(values))

    phases = {}
    for name in ends[0].phases:
        phases[name] = range_of(end.phases[name] for end in ends)
    return Duration(
        phases=phases,
        step=range_of(end.step for end in ends),
        tokens_per_second=range_of(end.sampled / end.step for end in ends),
        hours=range_of(end.run / 3600 for end in ends),
        gpu_hours=range_of(gpus * end.run / 3600 for end in ends),
        evaluations_gpu_hours=range_of(gpus * end.evaluations / 3600 for end in ends),
    )


def run_seconds(run: RLArgs, phases: dict[str, float], shares: Shares) -> RunSeconds:
    """A run's seconds from those of its phases. An evaluation comes before the first step, and one
    after every `eval_interval` steps. With --rollouts async a step takes the longer of sampling and
    of all else, which go on side by side."""
    evaluations = (1 + ceil(run.num_steps / run.eval_interval)) * phases["evaluation"]
    checkpoints = ceil(run.num_steps / run.save_interval) * phases["checkpoint"]
    sampling = phases.get("sampling", 0.0)  # Worked solutions are not sampled.
    of_no_training = sampling + phases["evaluation"] + phases["checkpoint"]
    training = sum(phases.values()) - of_no_training
    step = max(sampling, training) if run.rollouts == "async" else sampling + training
    sampled = 0.0
    if "sampling" in phases:
        sampled = run.rollout_size * shares.response * run.max_new_tokens
    return RunSeconds(
        phases=phases,
        step=step,
        evaluations=evaluations,
        run=run.num_steps * step + evaluations + checkpoints,
        sampled=sampled,
    )


class MeasuredAndPredicted(NamedTuple):
    """Peaks of the trainer by device, and seconds by phase, of a run."""

    peaks: dict[str, tuple[float, float]]  # Bytes, measured and predicted.
    seconds: dict[str, tuple[float, tuple[float, float]]]  # Measured, and the predicted range.


def beside_plan(rl: RLArgs) -> MeasuredAndPredicted:
    """What a run took beside what was predicted for it."""
    path = Path(rl.output_dir) / rl.run_name
    predicted = duration(predict(rl), hardware_of(""), Known()).phases
    peaks = {}
    for device, phases in read_json(path / "summary.json")["peak_bytes"].items():
        # What all processes of a GPU hold includes those of others.
        is_own = not device.endswith(WHOLE)
        is_predicted = any(prediction for _, prediction in phases.values())
        if is_own and is_predicted:
            peaks[device] = largest_of(phases)
    run = read_run(path)
    seconds = {}
    for phase, ends in predicted.items():
        measured = max(phase_seconds(phase, run), SHORTEST)
        least, most = ends
        seconds[phase] = (measured, (max(least, SHORTEST), max(most, SHORTEST)))
    return MeasuredAndPredicted(peaks, seconds)


def largest_of(phases: Mapping[str, Sequence[int | None]]) -> tuple[float, float]:
    """The largest measured and the largest predicted bytes of a device's phases, `SMALLEST` at
    least."""
    measured, predicted = zip(*phases.values(), strict=True)
    return max(SMALLEST, *measured), max(SMALLEST, *(size or 0 for size in predicted))


def span(values: Sequence[float]) -> str:
    """A range in words: 1.2 to 45."""
    numbers = []
    for value in values:
        numbers.append(f"{value:.2g}" if value < 10 else f"{value:,.0f}")
    return " to ".join(numbers)


def with_fastest_kind(args: RLArgs, machines: PlannedMachines | None = None) -> RLArgs:
    """The arguments with the kind of policy that --policy_parallelism auto is on these machines, or
    on those of this run: the one that takes the least time for a step, by the middle of its range,
    of those that fit. They stay as they are where another kind is named, and where none is known to
    fit."""
    if args.policy_parallelism != AUTO:
        return args
    by_kind = steps_of_kinds(args, machines or PlannedMachines(number=MACHINES))
    middles = {kind: np.prod(step) for kind, step in by_kind.items() if step is not None}
    if not middles:
        return args
    return replace(args, policy_parallelism=min(middles, key=lambda kind: middles[kind]))


def steps_of_kinds(args: RLArgs, machines: PlannedMachines) -> dict[str, Range | None]:
    """Kind of policy -> the seconds that a step takes with it, by the plan; None where it does not
    fit. Kinds that do not suit the run's devices and processes are left out."""
    hardware = Hardware(machines.gpus, machines.memory, machines.number, machines.card)
    steps: dict[str, Range | None] = {}
    for name, kind in POLICIES.items():
        needs_ranks = args.use_liger_kernel or args.kernels == "liger"
        if needs_ranks and kind.stages(2) > 1:
            continue
        with suppress(UserError):
            prediction = predict(replace(args, policy_parallelism=name), machines)
            if kind.one_device == (len(prediction.roles.policy) == 1):
                steps[name] = None
                if prediction.fits:
                    steps[name] = duration(prediction, hardware, Known()).step
    return steps


def kinds_by_plan(
    args: RLArgs, kind: str, devices: Sequence[str], machines: PlannedMachines | None = None
) -> str:
    """A line on the kind of policy that a run takes on several devices, of these machines or of
    those of this run, and on what each kind would take by the plan."""
    parts = []
    for name, step in steps_of_kinds(args, machines or PlannedMachines(number=MACHINES)).items():
        seconds = "does not fit" if step is None else f"{span(step)} s a step"
        parts.append(f"{name} {seconds}")
    return f"policy: {kind} on {' '.join(devices)}; by the plan: {', '.join(parts)}"


def ranked(run: RLArgs, hardware: Hardware, known: Known) -> list[tuple[Duration, Prediction]]:
    """(`duration`, prediction) of each parallelism on splits of the GPUs between policy and sampler
    that fit, fastest first."""
    number = visible_gpus() if hardware.gpus is None else hardware.gpus
    gpus = tuple(f"cuda:{gpu}" for gpu in range(number))
    kinds = []
    for name, kind in POLICIES.items():
        if kind.ranked or hardware.machines == 1:  # One process does not span machines.
            kinds.append(name)
    # 0: the roles share GPUs, as by default
    numbers_of_engines = {0, 1, 2, 4, 8, number - 1} & {*range(max(1, number))}
    by_placement = {}
    for kind, engines in itertools.product(kinds, numbers_of_engines):
        change: dict[str, Any] = {"policy_parallelism": kind}
        if engines:
            change |= {"policy_devices": gpus[:-engines], "sample_device": gpus[-engines:]}
        prediction = predict_if_it_fits(run, change, planned_machines(hardware))
        if prediction is None:
            continue
        is_alone = len(prediction.roles.policy) == 1
        if is_alone == POLICIES[kind].one_device:
            spent = duration(prediction, hardware, known)
            by_placement[kind, prediction.roles] = (spent, prediction)
    return sorted(by_placement.values(), key=lambda pair: np.prod(pair[0].hours))
