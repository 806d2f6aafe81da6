"""A run's seconds before it starts, by phase and in all: the work of its shapes at a machine's rates, or at those that finished
runs show."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from alignment.ablation.study import read_run
from alignment.args import RLArgs
from alignment.checks import visible_gpus
from alignment.policy.hardware import Hardware
from alignment.policy.memory import CACHE_BYTES
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES, RANKED
from alignment.policy.speed import forward, sampling, work
from alignment.prediction import TEST_PROBLEMS, Prediction, predict
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

Shares = Mapping[str, tuple[float, float]]
"""What arguments do not tell, from the least to the most: the mean share of the longest prompt that prompts take, and of the
longest response, and the share of responses with a gradient."""
UNKNOWN: Shares = {"prompt": (0.1, 1.0), "response": (0.25, 1.0), "trained": (0.5, 1.0)}
SPREAD = 1.5  # factor by which an estimate from a single run may be off
Sample = tuple[str, np.ndarray, float]
"""A phase of a finished run, its work, and its median seconds."""


def work_of_phases(
    prediction: Prediction, machines: int, shares: Mapping[str, float], refills: float = 0
) -> dict[str, np.ndarray]:
    """Phase -> the work of the busiest device. A checkpoint and an evaluation are each one's, not a step's. `refills`: how many
    times the groups of a step are sampled again."""
    run, step, roles, shape, config = (getattr(prediction, name) for name in ("run", "step", "roles", "shape", "config"))
    ranked, devices, kind = prediction.kind in RANKED, len(roles.policy), prediction.kind
    ranks, parts, stages = (
        devices * machines if ranked else 1,
        devices if kind == "sharded" else 1,
        devices if kind == "layer_split" else 1,
    )
    total, trained, updates = sum(shape.parameters.values()), shape.trained(shape.parameters), run.updates_per_rollout
    prompt, response, most = (
        shares["prompt"] * step.prompt,
        shares["response"] * run.max_new_tokens,
        run.micro_batch_tokens or 4096,
    )
    prompts, drawn = run.prompts_per_rollout * prompt / ranks, run.rollout_size * response / ranks
    tokens, passes = prompts + drawn, ("old_log_probs",) * run.needs_old_policy + ("reference",) * (run.beta > 0)
    seen = (prompts * prompt / 2 + drawn * (prompt + response / 2)) / tokens
    gathered = 4 * total * (1 - 1 / parts)  # bytes that a rank gathers from others for each piece

    def computed(share: float, pieces: int) -> np.ndarray:
        # Of several stages the first is idle while the last micro-batches pass the others (Huang et al. 2019, section 2).
        busy = np.array([(pieces + stages - 1) / (pieces * stages)] * 2 + [1] * 4)
        counts = (share * tokens, seen, share * drawn)
        return busy * forward(shape, config, step.itemsize, counts, pieces) + work(link=gathered * pieces)

    share = shares["trained"] * run.epochs_per_rollout
    pieces = updates * ceil(share * tokens / updates / most)
    casts, hidden = (
        6 * total * pieces * (step.itemsize == 2),
        8 * config.hidden_size * tokens * (stages - 1) * run.epochs_per_rollout,
    )
    summed = 4 * trained * (1 - 1 / parts) * pieces if parts > 1 else 8 * trained * updates * (ranks > machines)
    # Backward computes the gradients of inputs and of weights; the gradient's norm and AdamW read and write 40 bytes a parameter.
    update = (2 if shape.adapters else 3) * computed(share, pieces) + work(
        bytes=casts + (12 * pieces + 40 * updates) * trained / parts, launches=27 * len(shape.layers) * updates,
        link=hidden + summed + OPTIMIZERS[run.optimizer].host_bytes * trained * updates,
        network=8 * trained / parts * updates * (ranked and machines > 1),
    )  # fmt: skip
    engines = machines * max(1, len(roles.sample) // run.sampler_tensor_parallel)
    cache = 0 if step.vllm else CACHE_BYTES[roles.sample[0].partition(":")[0]]
    in_place = not step.vllm and roles.sample == roles.policy and step.itemsize == 4 and not run.lora_rank
    longest = run.eval_max_new_tokens or run.max_new_tokens

    def sampled(prompts: float, size: int, longest: int) -> np.ndarray:
        rows = (prompts / engines, size, prompt, shares["response"] * longest, longest)
        return sampling(shape, config, step.itemsize, rows, cache) / run.sampler_tensor_parallel

    return {
        "sampling": sampled(run.prompts_per_rollout * (1 + refills), run.group_size, run.max_new_tokens),
        **dict.fromkeys(passes, computed(1.0, ceil(tokens / most))),
        "update": update,
        "sync": (not in_place) * work(bytes=(4 + 3 * step.itemsize) * total, link=step.itemsize * total),
        "evaluation": sampled(run.max_problems or TEST_PROBLEMS, 1, longest),
        "checkpoint": work(disk=4 * total + 8 * trained),
    }


def estimate(samples: Sequence[Sample], phase: str, amounts: np.ndarray) -> tuple[float, float]:
    """The least and the most seconds of a phase's work by finished runs: at the rates, 0 or more, that fit all samples best (least
    squares of relative errors), times what the phase took beyond these, where samples of nearest size count most."""
    rates = nnls(np.array([done / seconds for _, done, seconds in samples]), np.ones(len(samples)))[0]
    near = [(done @ rates, seconds) for of, done, seconds in samples if of == phase] or [(d @ rates, s) for _, d, s in samples]
    fitted, measured = np.array(near).T
    beyond, distances = np.log(measured / fitted), np.abs(np.log(fitted / (amounts @ rates)))
    middle = amounts @ rates * np.exp(np.average(beyond, weights=(0.1 + distances) ** -2))
    spread = max(1.15, np.exp(np.ptp(beyond))) if len(near) > 1 else SPREAD
    return float(middle / spread), float(middle * spread)


def calibrate(folders: Sequence[str]) -> tuple[list[Sample], Shares]:
    """What finished runs show of this machine, and of prompts and responses. Raises `UserError` for a folder that is no finished
    run's, or of less than two steps."""
    samples, shares = [], []
    for path in map(Path, folders):
        run = read_run(path)
        if len(run.metrics) < 2 or not run.finished:
            raise UserError(f"--calibrate {path}: must be a finished run of train_rl, of two steps or more")
        args = {key: tuple(v) if isinstance(v, list) else v for key, v in run.args.items() if hasattr(RLArgs, key)}
        prediction = predict(
            RLArgs(**{**args, "sft_base": str(path / "final"), "micro_batch_tokens": run.metrics[-1]["micro_batch_tokens"]})
        )
        steps = run.metrics[1:]  # the first one also warms up
        mean = lambda key: statistics.fmean(step[key] for step in steps)
        rows = read_jsonl(path / "completions" / f"rollout_{steps[-1]['step']:06d}.jsonl")
        shares.append({
            "prompt": statistics.fmean(len(row["prompt_ids"]) for row in rows) / prediction.step.prompt,
            "response": mean("response_length") / prediction.run.max_new_tokens,
            "trained": mean("rows_with_gradient") / mean("responses"),
        })  # fmt: skip
        seconds = {"sampling": "seconds_sample", "evaluation": "seconds"}
        for phase, done in work_of_phases(prediction, 1, shares[-1]).items():
            logged = run.evals if phase == "evaluation" else steps
            taken = statistics.median(record.get(seconds.get(phase, f"seconds_{phase}"), 0.0) for record in logged)
            samples += [(phase, done, taken)] * (taken > 0.001)
    return samples, {name: (min(s[name] for s in shares), max(s[name] for s in shares)) for name in UNKNOWN}


def duration(prediction: Prediction, hardware: Hardware, calibration: tuple[list[Sample], Shares] | None = None) -> dict | None:
    """Seconds, [least, most], of each phase ("phases"), a "step" and the whole "run", and sampled "tokens_per_second": from short
    responses of which half have a gradient to the longest; by a calibration where it goes. None where nobody knows the rates."""
    run, rates = prediction.run, hardware.rates(prediction.step.itemsize)
    if rates is None:
        return None
    (samples, shares), both = calibration or ([], UNKNOWN), []
    for end in (0, 1):
        known = {name: of[end] for name, of in shares.items()}
        works = work_of_phases(prediction, hardware.machines, known, end * run.max_refills)
        by_rates = {phase: (max(done * rates[0]), sum(done * rates[1]))[end] for phase, done in works.items()}
        phases = by_rates | {
            p: estimate(samples, p, d)[end] for p, d in works.items() if samples and p != "checkpoint" and any(d)
        }
        parts = phases["sampling"], sum(phases[p] for p in phases if p not in ("sampling", "evaluation", "checkpoint"))
        step = max(parts) if run.rollouts == "async" else sum(parts)
        evaluations, checkpoints = 1 + ceil(run.num_steps / run.eval_interval), ceil(run.num_steps / run.save_interval)
        whole = run.num_steps * step + evaluations * phases["evaluation"] + checkpoints * phases["checkpoint"]
        tokens = run.rollout_size * known["response"] * run.max_new_tokens
        both.append((phases, step, whole, tokens / step))
    (least, *low), (most, *high) = both
    ranges = zip(("step", "run", "tokens_per_second"), map(sorted, zip(low, high, strict=True)), strict=True)
    return {"phases": {phase: [least[phase], most[phase]] for phase in least if most[phase]}, **dict(ranges)}


def span(values: Sequence[float]) -> str:
    """A range in words: 1.2 to 4.5."""
    return " to ".join(f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)


def gpu_hours(seconds: Sequence[float], hardware: Hardware) -> list[float]:
    """Hours of a run, times its GPUs; of a machine without any, times 1."""
    gpus = visible_gpus() if hardware.gpus is None else hardware.gpus
    return [max(gpus, 1) * hardware.machines * each / 3600 for each in seconds]


def in_words(spent: dict | None, hardware: Hardware, price: float, calibration: tuple | None) -> Iterator[str]:
    """Lines on the seconds of `duration`, hours, money, and how far a calibration's rates alone were off."""
    if spent is None:
        yield "seconds: name the cards, as --hardware 8xA100-40GB, or calibrate"
        return
    kind = "calibrated" if calibration else "not calibrated, so wide"
    listed = ", ".join(f"{phase} {span(seconds)}" for phase, seconds in spent["phases"].items())
    yield f"seconds ({kind}), of a step {span(spent['step'])}: {listed} (an evaluation and a checkpoint are no part of a step)"
    hours = gpu_hours(spent["run"], hardware)
    dollars = f", ${span([price * each for each in hours])}" if price else ""
    yield f"sampled tokens a second: {span(spent['tokens_per_second'])}; the whole run, evaluations included: {span([s / 3600 for s in spent['run']])} hours, {span(hours)} GPU-hours{dollars}"
    for phase in dict.fromkeys(phase for phase, *_ in calibration[0]) if calibration else ():
        yield f"{phase}: ..."


def ranked(run: RLArgs, hardware: Hardware, calibration: tuple | None) -> list[tuple[Prediction, dict]]:
    """(Prediction, its `duration`) of every parallelism on every split of the GPUs between policy and sampler that fits, the
    fastest first."""
    gpus, found = [f"cuda:{i}" for i in range(visible_gpus() if hardware.gpus is None else hardware.gpus)], []
    engines = [2**i for i in range(8) if 2**i < len(gpus)] + [len(gpus) - 1] * (len(gpus) > 2)
    splits = [{}, *({"policy_devices": tuple(gpus[:-k]), "sample_device": tuple(gpus[-k:])} for k in dict.fromkeys(engines))]
    for kind, split in product(POLICIES, splits):
        with suppress(UserError):
            arguments = {"policy_parallelism": kind, "policy_ranks": 0, **split}
            prediction = predict(replace(run, **arguments), hardware.gpus, hardware.memory, hardware.machines)
            fits = all(prediction.excess(peak.device) <= 0 for peak in prediction.peaks)
            if (
                fits
                and (len(prediction.roles.policy) == 1) == (kind == "single")
                and (spent := duration(prediction, hardware, calibration))
            ):
                found.append((prediction, spent))
    return sorted(found, key=lambda pair: np.prod(pair[1]["step"]))
