"""A run's memory and seconds before it starts: its devices, the peak bytes of each in each phase of
a step, from shapes alone, and the time of the shapes' work at a machine's rates, or at those that
finished runs show."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
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
from alignment.builders.checks import (
    EMBEDDED,
    check_model_path,
    resolve_model,
    roles_of,
    visible_gpus,
)
from alignment.builders.run_plan import PlannedMachines, engines_on_shared_gpu, plan_policy
from alignment.core.text import prompt_token_ids
from alignment.data.prompts import prompted
from alignment.data.tasks import TASKS
from alignment.model.activations import CACHE_BYTES
from alignment.model.loading import compute_dtype, load_config, load_tokenizer
from alignment.model.parallel_micro_batches import PARALLEL
from alignment.model.shape import ModelShape
from alignment.planning.measured_memory import SPARE
from alignment.planning.peak_meter import WHOLE, PeakMeter
from alignment.planning.peaks import DevicePeak, peak_bytes
from alignment.planning.placement import Roles
from alignment.planning.seconds import Hardware, decoding, forward, hardware_of, rates, work
from alignment.planning.step_shape import SampledRows, StepShape
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES, RANKED, Policy
from alignment.sampling.sampler import engine_name
from alignment.system.device_memory import total_bytes
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl
from alignment.system.torchrun import PROCESSES, PROCESSES_HERE

# configurations of models on the hub, so that it need not be asked
PUBLISHED = Path(__file__).parents[1] / "planning" / "published"
# tokens of the longest prompt of training, by SmolLM2's tokenizer; test problems
GSM8K = (
    320,
    1319,
)
# than test problems' longest prompt is the longest of training, at most: SVAMP's, which learns from
# other sets
LONGER = 1.25
# factors to be off by: of one run, at least of several, for an e-fold of size
ONE_RUN, SEVERAL_RUNS, OF_SIZE = (
    1.5,
    1.25,
    1.1,
)
SHORTEST = 0.1  # seconds; less than that is latency, and other processes, whatever was predicted
SMALLEST = 5e8  # bytes of a device's peak; less than that is libraries' own, whatever was predicted


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

    def capacity(self, device: str) -> int:
        """Bytes of a device. Ranks on a CPU share the host's memory."""
        return self.step.card * max(self.roles.policy.count(device), 1)

    @property
    def fits(self) -> bool | None:
        """Whether all devices hold what is on them; None where their memory is not known."""
        return all(self.excess(peak.device) <= 0 for peak in self.peaks) if self.peaks else None

    def excess(self, device: str) -> int:
        """Bytes that all on a device take beyond what it has, less `SPARE`; below 0: they fit."""
        return sum(peak.total for peak in self.peaks if peak.device == device) - int(
            (1 - SPARE) * self.capacity(device)
        )


def predict(
    args: RLArgs, num_gpus: int | None = None, memory: float = 0.0, machines: int = 1
) -> Prediction:
    """The prediction for a run on `machines` of `num_gpus` GPUs of `memory` bytes each (None and 0:
    this machine's). Raises `UserError` as `roles_of`, `plan_policy` and
    `ModelShape.from_config`."""
    roles = roles_of(args, num_gpus)
    if not memory and num_gpus in (None, 0):
        memory = min(map(total_bytes, roles.policy))
    model = args.sft_base if Path(args.sft_base or "-").exists() else args.model
    published = PUBLISHED / model.replace("/", "--")
    if model in EMBEDDED:
        base = resolve_model(model, args.output_dir)
    elif (published / "config.json").is_file():
        base = str(published)
    else:
        # that a folder's weights are whole is checked where they are loaded: it takes reading all
        # of them
        base = check_model_path(model, "--model") or model
    policy = plan_policy(args, roles, base, PlannedMachines(num_gpus, memory, machines))
    kind = policy.kind
    ranks = len(policy.devices) * (kind in RANKED and machines == 1)
    roles = replace(roles, policy=policy.devices)
    run = replace(args, policy_parallelism=kind, policy_ranks=ranks)
    config = load_config(base)
    shape = ModelShape.from_config(config, run.lora_rank, run.lora_targets)
    prompts = prompts_of(run.task, run.dataset_path, run.prompt, base)
    step = step_shape(
        run,
        roles,
        memory / policy.devices.count(policy.devices[0]),
        engine_name(run.sampler) == "vllm",
        machines,
        prompts,
    )
    return Prediction(
        run,
        shape,
        config,
        roles,
        kind,
        step,
        peak_bytes(shape, config, roles, step) if memory else [],
    )


def remedies(prediction: Prediction, *machine) -> list[tuple[str, int]]:
    """The flags that would each make a run fit that does not, or else pairs of them, and the bytes
    of the fullest device then; `machine` is what `predict` was told beside the run's arguments. []
    for a run that fits, or of unknown memory."""
    if prediction.fits in (True, None):
        return []
    run, vllm = prediction.run, prediction.step.vllm
    tokens = [2**power for power in range(13, 8, -1) if not 0 < run.micro_batch_tokens <= 2**power]
    groups: list[list[dict]] = [[{"micro_batch_tokens": number} for number in (*tokens, 0)]]
    groups += [[{"optimizer": name}] for name in OPTIMIZERS if name not in ("adamw", run.optimizer)]
    groups += [[{"lora_rank": 16}]] * (not run.lora_rank)
    groups += [[{"policy_parallelism": kind}] for kind in ("sharded", "layer_split")]
    groups += [[{"gpu_memory_utilization": share / 10} for share in (4, 3, 2, 1)]] * vllm
    for alternatives in (
        groups,
        [[one[-1] | other[-1]] for one, other in itertools.combinations(groups, 2)],
    ):
        fitting = (
            ((c, other) for c in group if (other := if_it_fits(run, c, *machine)))
            for group in alternatives
        )
        if found := [pair for group in fitting for pair in itertools.islice(group, 1)]:
            return [
                (" ".join(flags_of(change)), max(peak.total for peak in other.peaks))
                for change, other in found
            ]
    return []


def if_it_fits(run: RLArgs, change: Mapping[str, object], *machine) -> Prediction | None:
    """The prediction for a run with other arguments, unless it does not fit; another kind of policy
    gets all ranks."""
    with suppress(UserError):  # the flags clash, or need a package that is not here
        ranks = 0 if "policy_parallelism" in change else run.policy_ranks
        other = predict(replace(run, policy_ranks=ranks, **change), *machine)
        return other if other.fits in (True, None) else None
    return None


def expected_peaks(args: RLArgs, console: Console) -> Callable[[Policy], PeakMeter]:
    """What measures a run's peaks beside those predicted, if they can be. Prints a warning where
    they do not fit here."""

    def expected(tokens: int) -> list[DevicePeak]:
        return []

    with suppress(UserError):  # what is wrong is said where it is loaded
        prediction = predict(args, machines=PROCESSES // PROCESSES_HERE if PROCESSES_HERE else 1)
        expected = functools.cache(functools.partial(peaks_of_micro_batches, prediction))
        for device in dict.fromkeys(peak.device for peak in prediction.peaks):
            if (excess := prediction.excess(device)) > 0:
                missing = (
                    f"{device} will lack {excess / 1e9:.1f} of"
                    f" {prediction.capacity(device) / 1e9:.1f} GB"
                )
                console.print(
                    f"warning: {missing} (`alignment.plan` says which flags help)",
                    style="yellow",
                    soft_wrap=True,
                )
    return functools.partial(PeakMeter, expected=expected)


def peaks_of_micro_batches(prediction: Prediction, tokens: int) -> list[DevicePeak]:
    """The peaks where the largest micro-batch of an update has so many tokens; 0: as many as it may
    have. On a CPU always those: micro-batches side by side, and the margin that was fitted to their
    limit, leave no one micro-batch that decides."""
    if not tokens or not prediction.peaks or prediction.roles.policy[0] == "cpu":
        return prediction.peaks
    step = replace(prediction.step, largest_micro_batch=tokens)
    return peak_bytes(prediction.shape, prediction.config, prediction.roles, step)


@functools.cache
def prompts_of(task: str, dataset_path: str, prompt: str, base: str) -> tuple[int, int]:
    """(Tokens of the longest prompt, test problems), of the task, where its files and the tokenizer
    of the model `base` are on this machine, or else GSM8K's."""
    if task in TASKS and (Path(base) / "tokenizer.json").is_file():
        with suppress(UserError):  # the task's files are not here
            tested, tokenizer = TASKS[task].test_problems(dataset_path), load_tokenizer(base)
            prompts = [
                problem.prompt
                for problem in prompted(tested, prompt or TASKS[task].prompt, tokenizer)
            ]
            return int(LONGER * max(map(len, prompt_token_ids(tokenizer, prompts).ids))), len(
                tested
            )
    return GSM8K


def step_shape(
    args: RLArgs, roles: Roles, card: float, vllm: bool, machines: int = 1, prompts=GSM8K
) -> StepShape:
    """The `StepShape` of a run on devices of `card` bytes; `prompts` as from `prompts_of`."""
    prompt, problems = (
        args.max_prompt_tokens or prompts[0],
        min(args.max_problems or prompts[1], prompts[1]),
    )
    old_policy = (
        args.copies_old_policy
        and args.policy_parallelism not in RANKED
        and roles.policy != (roles.reference,)
    )
    rows = min(args.train_mini_batch_size or args.rollout_size, args.rollout_size)
    drawn = SampledRows(args.prompts_per_rollout, args.group_size, args.max_new_tokens)
    ranks = len(roles.policy) if args.policy_parallelism in RANKED else 1
    threads = torch.get_num_threads() // ranks if roles.policy[0] == "cpu" else 1
    return configuration(
        StepShape,
        args,
        card=int(card),
        prompt=prompt,
        vllm=vllm,
        parallel=max(1, min(threads, PARALLEL)),
        itemsize=4 if compute_dtype(args.dtype, roles.policy[0]) == "float32" else 2,
        update_tokens=-(-rows // args.group_size // (ranks * machines))
        * (prompt + args.group_size * args.max_new_tokens),
        sampled={
            "sampling": drawn,
            "evaluation": SampledRows(problems, 1, args.eval_max_new_tokens or args.max_new_tokens),
        },
        truncated=args.sampling_top_p < 1 or args.sampling_top_k > 0,
        passes=frozenset(
            ["old_log_probs"] * args.needs_old_policy + ["reference"] * (args.beta > 0)
        ),
        frozen=(args.beta > 0 and not args.lora_rank) + old_policy,
        engines=engines_on_shared_gpu(args, roles),
        sleeps=args.rollouts == "sync",
    )


class Known(NamedTuple):
    """What finished runs show; by default nothing."""

    fit: np.ndarray | None = None  # Seconds of a unit of each of `KINDS`, that fit all phases best.
    samples: Sequence[
        tuple[str, float, float]
    ] = ()  # A phase, its seconds by `fit`, and those measured over these.
    # Mean shares of the longest prompt and response, and of responses with a gradient, from the
    # least to the most.
    shares: Mapping[str, tuple[float, float]] = {
        "prompt": (0.1, 1.0),
        "response": (0.25, 1.0),
        "trained": (0.5, 1.0),
    }


def work_of_phases(
    prediction: Prediction, machines: int, shares: Mapping[str, float], refills=0
) -> dict[str, np.ndarray]:
    """Phase -> the busiest device's work: of a step, which samples groups 1 + `refills` times, an
    evaluation, a checkpoint."""
    run, step, shape, config, kind = (
        prediction.run,
        prediction.step,
        prediction.shape,
        prediction.config,
        prediction.kind,
    )
    devices, updates, samplers = (
        len(prediction.roles.policy),
        run.updates_per_rollout,
        prediction.roles.sample,
    )
    kinds = (RANKED, machines), (("sharded",), 1), (("layer_split",), 1)
    ranks, parts, stages = (devices * times if kind in of else 1 for of, times in kinds)
    total, trained = sum(shape.parameters.values()), shape.trained(shape.parameters)
    prompt, response, most = (
        shares["prompt"] * step.prompt,
        shares["response"] * run.max_new_tokens,
        run.micro_batch_tokens,
    )
    prompts, drawn = run.prompts_per_rollout * prompt / ranks, run.rollout_size * response / ranks
    tokens, seen = (
        prompts + drawn,
        (prompts * prompt / 2 + drawn * (prompt + response / 2)) / (prompts + drawn),
    )

    def computed(share: float, times: int) -> np.ndarray:
        # Of several stages the first is idle while the last micro-batches pass the others (Huang et
        # al. 2019, section 2).
        pieces = max(1, ceil(share * tokens / times / (most or 4096)))
        busy = np.array([(pieces + stages - 1) / (pieces * stages)] * 2 + [1] * 4)
        counts = (share * tokens / times, seen, share * drawn / times)
        passed = busy * forward(shape, config, step.itemsize, counts, pieces)
        # and others' parts
        return (
            times * (passed + work(link=4 * total * (1 - 1 / parts) * pieces)),
            times * pieces,
        )

    def sampled(phase: str, times: float) -> np.ndarray:
        asked, size, longest = step.sampled[phase]
        cache = 0 if step.vllm else CACHE_BYTES[samplers[0].partition(":")[0]]
        engines = machines * len(samplers) / run.sampler_tensor_parallel
        rows = (times * asked / engines, size, prompt, shares["response"] * longest, longest)
        return decoding(shape, config, step.itemsize, rows, cache) / run.sampler_tensor_parallel

    passed, pieces = computed(shares["trained"] * run.epochs_per_rollout, updates)
    summed = (
        4 * trained * (1 - 1 / parts) * pieces
        if parts > 1
        else 8 * trained * updates * (ranks > machines)
    )
    # Backward computes gradients of inputs and of weights. Through memory pass autocast's casts,
    # additions to gradients, and 40 bytes a parameter of the gradient's norm and AdamW.
    update = (2 if shape.adapters else 3) * passed + work(
        bytes=6 * total * pieces * (step.itemsize == 2)
        + (12 * pieces + 40 * updates) * trained / parts,
        launches=27 * len(shape.layers) * updates,
        link=8 * config.hidden_size * tokens * (stages - 1) * run.epochs_per_rollout
        + summed,  # hidden states, their gradients
        network=8 * trained / parts * updates * (ranks > 1) * (machines > 1),
    )
    return {
        "sampling": sampled("sampling", 1 + refills),
        **dict.fromkeys(sorted(step.passes), computed(1, 1)[0]),
        "update": update,
        "sync": work(bytes=(4 + 3 * step.itemsize) * total, link=step.itemsize * total),
        "evaluation": sampled("evaluation", 1),
        "checkpoint": work(disk=4 * total + 8 * trained),
    }


def calibrate(folders: Sequence[str], itemsize: int) -> Known:
    """What finished runs of a machine show, if there are any. Raises `UserError` for a folder that
    is no finished run's of two steps or more, or one's with products of numbers of another size
    than `itemsize` bytes."""
    if not folders:
        return Known()
    measured, shares = [], []
    for path in map(Path, folders):
        run = read_run(path)
        steps = run.metrics[1:] if run.finished else ()  # the first one also warms up
        of_rl = any("rows_with_gradient" in step for step in steps)
        if not of_rl or not (
            rows := read_jsonl(path / "completions" / f"rollout_{steps[-1]['step']:06d}.jsonl")
        ):
            needed = "a finished run of train_rl, of two steps or more, with its completions"
            raise UserError(f"--calibrate {path}: must be {needed}")
        args = {
            key: tuple(v) if isinstance(v, list) else v
            for key, v in run.args.items()
            if hasattr(RLArgs, key)
        }
        args |= {
            "sft_base": str(path / "final"),
            "micro_batch_tokens": steps[0]["micro_batch_tokens"],
        }
        prediction = predict(RLArgs(**args))
        if prediction.step.itemsize != itemsize:
            raise UserError(
                f"--calibrate {path}: has products of another --dtype than what is planned"
            )
        prompt, response = (
            fmean(len(row["prompt_ids"]) for row in rows),
            fmean(s["response_length"] for s in steps),
        )
        trained = fmean(step["rows_with_gradient"] / step["responses"] for step in steps)
        shares.append((prompt / prediction.step.prompt, response / args["max_new_tokens"], trained))
        works = work_of_phases(prediction, 1, dict(zip(Known().shares, shares[-1], strict=True)))
        measured += [
            (phase, done, taken)
            for phase, done in works.items()
            if (taken := phase_seconds(phase, run)) > 0.001
        ]
    # here, because a run that starts needs its memory only, and loading scipy takes a second
    from scipy.optimize import (
        nnls,
    )

    fit = nnls(np.array([done / seconds for _, done, seconds in measured]), np.ones(len(measured)))[
        0
    ]
    sizes = [max(float(done @ fit), 1e-9) for _, done, _ in measured]
    samples = [
        (phase, size, seconds / size)
        for (phase, _, seconds), size in zip(measured, sizes, strict=True)
    ]
    of_shares = zip(Known().shares, zip(*shares, strict=True), strict=True)
    return Known(fit, samples, {name: (min(of), max(of)) for name, of in of_shares})


def phase_seconds(phase: str, run: Run) -> float:
    """The median seconds that a phase took of a run's step, but for its first, or of an evaluation;
    0.0: none is logged."""
    records = run.evals if phase == "evaluation" else run.metrics[1:]
    name = {"sampling": "seconds_sample", "evaluation": "seconds"}.get(phase, f"seconds_{phase}")
    return median(record.get(name, 0.0) for record in records)


def seconds_of(
    phase: str, done: np.ndarray, per_unit: np.ndarray, known: Known
) -> tuple[float, float]:
    """The least and the most seconds of a phase's work. By finished runs that had it: at `fit`,
    times what it took beyond that, in runs of nearest size above all. Else at best all kinds of
    work overlap, and at worst each waits for the others."""
    near = np.array([sample[1:] for sample in known.samples if sample[0] == phase])
    if not len(near):
        return float(max(done * per_unit[0])), float(sum(done * per_unit[1]))
    (sizes, beyond), size = near.T, max(float(done @ known.fit), 1e-9)
    distances = abs(np.log(sizes / size))
    spread = max(SEVERAL_RUNS, max(beyond) / min(beyond)) if len(near) > 1 else ONE_RUN
    spread *= float(OF_SIZE ** min(distances))
    middle = size * float(np.exp(np.average(np.log(beyond), weights=(0.1 + distances) ** -2)))
    return middle / spread, middle * spread


def duration(prediction: Prediction, hardware: Hardware, known: Known) -> dict:
    """Seconds, [least, most], of each phase ("phases") and of a "step"; sampled
    "tokens_per_second"; the run's "hours", its "gpu_hours", of a machine without GPUs the same, and
    of these "evaluations_gpu_hours"."""
    run, roles, per_unit, ends = (
        prediction.run,
        prediction.roles,
        rates(hardware, prediction.step.itemsize),
        [],
    )
    gpus = hardware.machines * (
        hardware.gpus or len({*roles.policy, *roles.sample, roles.eval, roles.reference})
    )
    evaluations, checkpoints = (
        1 + ceil(run.num_steps / run.eval_interval),
        ceil(run.num_steps / run.save_interval),
    )
    for end in (0, 1):
        shares = {name: span[end] for name, span in known.shares.items()}
        works = work_of_phases(prediction, hardware.machines, shares, end * run.max_refills)
        phases = {
            phase: seconds_of(phase, done, per_unit, known)[end] for phase, done in works.items()
        }
        evaluated, saved = evaluations * phases["evaluation"], checkpoints * phases["checkpoint"]
        parts = (
            phases["sampling"],
            sum(phases.values())
            - sum(phases[of] for of in ("sampling", "evaluation", "checkpoint")),
        )
        step = max(parts) if run.rollouts == "async" else sum(parts)
        whole, sampled = (
            run.num_steps * step + evaluated + saved,
            run.rollout_size * shares["response"] * run.max_new_tokens,
        )
        hours = {
            "hours": whole / 3600,
            "gpu_hours": gpus * whole / 3600,
            "evaluations_gpu_hours": gpus * evaluated / 3600,
        }
        ends.append(phases | {"step": step, "tokens_per_second": sampled / step, **hours})
    spans = {name: sorted(end[name] for end in ends) for name in ends[0]}
    return {"phases": {phase: spans.pop(phase) for phase in works}, **spans}


def beside_plan(rl: RLArgs) -> tuple[dict, dict]:
    """(Measured and predicted peak bytes of the trainer by device, measured seconds and predicted
    range by phase) of a run."""
    path, predicted = (
        Path(rl.output_dir) / rl.run_name,
        duration(predict(rl), hardware_of(""), Known())["phases"],
    )
    by_device = read_json(path / "summary.json")["peak_bytes"]
    # What all processes of a GPU hold includes those of others.
    own = {device: of for device, of in by_device.items() if not device.endswith(WHOLE)}
    predicted_at_all = [
        device for device, of in own.items() if any(both[1] for both in of.values())
    ]
    peaks = {device: largest_of(own[device]) for device in predicted_at_all}
    run, at_least = read_run(path), lambda seconds: max(seconds, SHORTEST)
    seconds = {
        phase: (at_least(phase_seconds(phase, run)), [*map(at_least, ends)])
        for phase, ends in predicted.items()
    }
    return peaks, seconds


def largest_of(phases: Mapping[str, Sequence[int | None]]) -> tuple[float, float]:
    """The largest measured and the largest predicted bytes of a device's phases, `SMALLEST` at
    least."""
    measured, predicted = zip(*phases.values(), strict=True)
    return max(SMALLEST, *measured), max(SMALLEST, *(size or 0 for size in predicted))


def span(values: Sequence[float]) -> str:
    """A range in words: 1.2 to 45."""
    return " to ".join(f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)


def ranked(run: RLArgs, hardware: Hardware, known: Known) -> list[tuple[dict, Prediction]]:
    """(`duration`, prediction) of each parallelism on splits of the GPUs between policy and sampler
    that fit, fastest first."""
    number, found = visible_gpus() if hardware.gpus is None else hardware.gpus, {}
    gpus, kinds = (
        tuple(f"cuda:{gpu}" for gpu in range(number)),
        RANKED if hardware.machines > 1 else POLICIES,
    )
    for kind, engines in itertools.product(
        kinds, {0, 1, 2, 4, 8, number - 1} & {*range(max(1, number))}
    ):
        split = (
            {"policy_devices": gpus[:-engines], "sample_device": gpus[-engines:]} if engines else {}
        )
        prediction = if_it_fits(run, {"policy_parallelism": kind, **split}, *hardware[:3])
        if prediction and (kind == "single") == (len(prediction.roles.policy) == 1):
            found[kind, prediction.roles] = duration(prediction, hardware, known), prediction
    return sorted(found.values(), key=lambda pair: np.prod(pair[0]["hours"]))
