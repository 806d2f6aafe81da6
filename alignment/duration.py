"""A run's seconds before it starts: the work of its shapes at a machine's rates, or at those that finished runs show."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from alignment.ablation.study import read_run
from alignment.args import RLArgs
from alignment.policy.memory import CACHE_BYTES
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import POLICIES, RANKED
from alignment.policy.speed import Hardware, decoding, forward, work
from alignment.prediction import Prediction, predict
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

Shares = Mapping[str, tuple[float, float]]
"""What arguments do not tell, from the least to the most: the mean share of the longest prompt that prompts take, and of the
longest response, and the share of responses with a gradient."""
UNKNOWN: Shares = {"prompt": (0.1, 1.0), "response": (0.25, 1.0), "trained": (0.5, 1.0)}
SPREAD = 1.5  # factor by which an estimate from a single run may be off
BESIDE = ("evaluation", "checkpoint")  # phases that are no part of a step


def work_of_phases(prediction: Prediction, machines: int, shares: Mapping[str, float], refills=0) -> dict[str, np.ndarray]:
    """Phase -> the work of the busiest device, of a step, which samples its groups 1 + `refills` times, an evaluation or a
    checkpoint."""
    run, step, shape, config, kind = prediction.run, prediction.step, prediction.shape, prediction.config, prediction.kind
    samplers, devices, updates = prediction.roles.sample, len(prediction.roles.policy), run.updates_per_rollout
    ranks, parts, stages = devices * machines, devices if kind == "sharded" else 1, devices if kind == "layer_split" else 1
    ranks = ranks if kind in RANKED else 1
    total, trained = sum(shape.parameters.values()), shape.trained(shape.parameters)
    prompt, most = shares["prompt"] * step.prompt, run.micro_batch_tokens or 4096
    prompts, drawn = (number / ranks for number in (run.prompts_per_rollout * prompt, run.rollout_size * shares["response"]))
    drawn, response = drawn * run.max_new_tokens, shares["response"] * run.max_new_tokens
    tokens, trained_share = prompts + drawn, shares["trained"] * run.epochs_per_rollout
    seen = (prompts * prompt / 2 + drawn * (prompt + response / 2)) / tokens

    def computed(share: float, pieces: int) -> np.ndarray:
        # Of several stages the first is idle while the last micro-batches pass the others (Huang et al. 2019, section 2).
        busy = np.array([(pieces + stages - 1) / (pieces * stages)] * 2 + [1] * 4)
        passed = forward(shape, config, step.itemsize, (share * tokens, seen, share * drawn), pieces)
        return busy * passed + work(link=4 * total * (1 - 1 / parts) * pieces)  # and what a rank gathers of others' parts

    pieces = updates * ceil(trained_share * tokens / updates / most)
    summed = 4 * trained * (1 - 1 / parts) * pieces if parts > 1 else 8 * trained * updates * (ranks > machines)
    hidden = 8 * config.hidden_size * tokens * (stages - 1) * run.epochs_per_rollout  # and its gradients
    # Backward computes gradients of inputs and of weights. Through memory pass autocast's casts, additions to gradients, and 40
    # bytes a parameter of the gradient's norm and AdamW.
    update = (2 if shape.adapters else 3) * computed(trained_share, pieces) + work(
        bytes=6 * total * pieces * (step.itemsize == 2) + (12 * pieces + 40 * updates) * trained / parts,
        launches=27 * len(shape.layers) * updates,
        link=hidden + summed + OPTIMIZERS[run.optimizer].host_bytes * trained * updates,
        network=8 * trained / parts * updates * (ranks > 1) * (machines > 1),
    )
    in_place = not step.vllm and samplers == prediction.roles.policy and step.itemsize == 4 and not run.lora_rank
    cache = 0 if step.vllm else CACHE_BYTES[samplers[0].partition(":")[0]]

    def sampled(phase: str, times: float) -> np.ndarray:
        asked, size, longest = step.sampled[phase]
        engines = machines * max(1, len(samplers) // run.sampler_tensor_parallel)
        rows = (times * asked / engines, size, prompt, shares["response"] * longest, longest)
        return decoding(shape, config, step.itemsize, rows, cache) / run.sampler_tensor_parallel

    return {
        "sampling": sampled("sampling", 1 + refills),
        **dict.fromkeys(sorted(step.passes), computed(1.0, ceil(tokens / most))),
        "update": update,
        "sync": (not in_place) * work(bytes=(4 + 3 * step.itemsize) * total, link=step.itemsize * total),
        "evaluation": sampled("evaluation", 1),
        "checkpoint": work(disk=4 * total + 8 * trained),
    }


class Calibration(NamedTuple):
    """What finished runs show."""

    samples: Sequence[tuple[str, np.ndarray, float]] = ()  # A phase, its work, and its median seconds.
    shares: Shares = UNKNOWN

    def ratios(self, phase: str, amounts: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """Seconds of some work at the rates, 0 or more, that fit all samples best (least squares of relative errors); and of the
        phase's samples, the logarithms of their seconds over that, and how near their size is."""
        rates = nnls(np.array([done / seconds for _, done, seconds in self.samples]), np.ones(len(self.samples)))[0]
        own = [sample for sample in self.samples if sample[0] == phase] or self.samples
        fitted, here = np.array([done @ rates for _, done, _ in own]), max(float(amounts @ rates), 1e-9)
        return here, np.log([seconds for *_, seconds in own] / fitted), (0.1 + abs(np.log(fitted / here))) ** -2

    def seconds(self, phase: str, amounts: np.ndarray) -> tuple[float, float]:
        """The least and the most seconds of a phase's work: what rates say, times what the phase took beyond that in the runs,
        those of nearest size above all."""
        here, beyond, near = self.ratios(phase, amounts)
        spread = max(1.15, np.exp(np.ptp(beyond))) if len(beyond) > 1 else SPREAD
        middle = here * np.exp(np.average(beyond, weights=near))
        return float(middle / spread), float(middle * spread)


def calibrate(folders: Sequence[str], itemsize: int) -> Calibration:
    """What finished runs of a machine show. Raises `UserError` for a folder that is no finished run's of two steps or more, or
    one's with products of numbers of another size than `itemsize` bytes."""
    samples, shares = [], []
    for path in map(Path, folders):
        run = read_run(path)
        if len(run.metrics) < 2 or not run.finished:
            raise UserError(f"--calibrate {path}: must be a finished run of train_rl, of two steps or more")
        steps = run.metrics[1:]  # the first one also warms up
        args = {key: tuple(v) if isinstance(v, list) else v for key, v in run.args.items() if hasattr(RLArgs, key)}
        args |= {"sft_base": str(path / "final"), "micro_batch_tokens": steps[0]["micro_batch_tokens"]}
        prediction = predict(RLArgs(**args))
        if prediction.step.itemsize != itemsize:
            raise UserError(f"--calibrate {path}: has products of another --dtype than what is planned")
        mean = {key: statistics.fmean(step[key] for step in steps) for key in ("response_length", "rows_with_gradient")}
        rows = read_jsonl(path / "completions" / f"rollout_{steps[-1]['step']:06d}.jsonl")
        prompt = statistics.fmean(len(row["prompt_ids"]) for row in rows) / prediction.step.prompt
        trained = mean["rows_with_gradient"] / steps[0]["responses"]
        shares.append({"prompt": prompt, "response": mean["response_length"] / args["max_new_tokens"], "trained": trained})
        names = {"sampling": "seconds_sample", "evaluation": "seconds"}
        for phase, done in work_of_phases(prediction, 1, shares[-1]).items():
            records, name = run.evals if phase == "evaluation" else steps, names.get(phase, f"seconds_{phase}")
            median = statistics.median(record.get(name, 0.0) for record in records)
            samples += [(phase, done, median)] * (median > 0.001)
    return Calibration(samples, {name: (min(s[name] for s in shares), max(s[name] for s in shares)) for name in UNKNOWN})


def duration(prediction: Prediction, hardware: Hardware, known: Calibration) -> dict | None:
    """Seconds, [least, most], of each phase ("phases"), a "step" and the whole "run"; sampled "tokens_per_second"; and
    "gpu_hours", of a machine without GPUs its hours. By `known`, else by the hardware's rates; None where nobody knows these."""
    run, rates, ends = prediction.run, hardware.rates(prediction.step.itemsize), []
    if rates is None:
        return None
    roles = prediction.roles
    gpus = hardware.machines * (hardware.gpus or len({*roles.policy, *roles.sample, roles.eval, roles.reference}))
    for end in (0, 1):
        shares = {name: span[end] for name, span in known.shares.items()}
        works = work_of_phases(prediction, hardware.machines, shares, end * run.max_refills)
        # At best all kinds of work overlap, at worst each waits for the others.
        phases = {phase: (max(done * rates[0]), sum(done * rates[1]))[end] for phase, done in works.items()}
        learnt = [phase for phase, done in works.items() if known.samples and phase != "checkpoint" and done.any()]
        phases |= {phase: known.seconds(phase, works[phase])[end] for phase in learnt}
        parts = phases["sampling"], sum(phases[phase] for phase in phases if phase not in ("sampling", *BESIDE))
        step = max(parts) if run.rollouts == "async" else sum(parts)
        times = run.num_steps, 1 + ceil(run.num_steps / run.eval_interval), ceil(run.num_steps / run.save_interval)
        whole = float(np.dot(times, [step, *(phases[phase] for phase in BESIDE)]))
        tokens = run.rollout_size * shares["response"] * run.max_new_tokens
        ends.append((*phases.values(), step, whole, tokens / step, whole * gpus / 3600))
    *of_phases, step, whole, tokens, hours = map(sorted, zip(*ends, strict=True))
    return {"phases": dict(zip(works, of_phases)), "step": step, "run": whole, "tokens_per_second": tokens, "gpu_hours": hours}


def span(values: Sequence[float]) -> str:
    """A range in words: 1.2 to 45."""
    return " to ".join(f"{value:.2g}" if value < 10 else f"{value:,.0f}" for value in values)


def in_words(spent: dict | None, price: float, known: Calibration) -> Iterator[str]:
    """Lines on a `duration`, what it costs, and how far the rates of finished runs were off by phase."""
    if spent is None:
        yield "seconds: unknown; name the machine, as in --hardware 8xA100-40GB"
        return
    wide = "from finished runs" if known.samples else "not calibrated, hence wide"
    listed = ", ".join(f"{phase} {span(seconds)}" for phase, seconds in spent["phases"].items() if seconds[1])
    yield f"seconds ({wide}): a step {span(spent['step'])}, and by phase: {listed}"
    hours, cost = (span([seconds / 3600 for seconds in spent["run"]]), span([price * hours for hours in spent["gpu_hours"]]))
    whole = f"{hours} hours, {span(spent['gpu_hours'])} GPU-hours" + f", {cost} dollars" * (price > 0)
    yield f"the whole run, with evaluations: {whole}; {span(spent['tokens_per_second'])} sampled tokens a second"
    off = {phase: np.exp(-known.ratios(phase, done)[1]) for phase, done, _ in known.samples}
    if off:
        listed = ", ".join(f"{phase} {span(sorted({ratios.min(), ratios.max()}))}" for phase, ratios in off.items())
        yield f"of the finished runs' seconds, the same rates for all phases would give: {listed}; each phase is corrected by that"


def ranked(run: RLArgs, hardware: Hardware, known: Calibration) -> list[tuple[dict, Prediction]]:
    """(`duration`, prediction) of every parallelism on every split of the GPUs between policy and sampler that fits, fastest
    first."""
    gpus, found = [f"cuda:{number}" for number in range(hardware.gpus or 0)], []
    for kind, engines in product(POLICIES, (0, 1, 2, 4, 8, len(gpus) - 1)):
        split = {"policy_devices": tuple(gpus[:-engines]), "sample_device": tuple(gpus[-engines:])} if engines > 0 else {}
        with suppress(UserError):
            other = replace(run, policy_parallelism=kind, policy_ranks=0, **split)
            prediction = predict(other, hardware.gpus, hardware.memory, hardware.machines)
            fits = all(prediction.excess(peak.device) <= 0 for peak in prediction.peaks)
            spent = duration(prediction, hardware, known)
            if fits and spent and (kind == "single") == (len(prediction.roles.policy) == 1):
                found.append((spent, prediction))
    return sorted(found, key=lambda pair: np.prod(pair[0]["step"]))
