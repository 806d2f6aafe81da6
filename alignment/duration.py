"""A run's seconds before it starts, by phase and in all: the work of its shapes, at a machine's rates or at those that finished
runs show."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from alignment.ablation.study import read_run
from alignment.args import RLArgs, configuration
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.policy.hardware import Hardware, Range
from alignment.policy.loading import load_tokenizer
from alignment.policy.memory import CACHE_BYTES, MAX_ACTIVATION_BYTES, tokens_that_fit
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.speed import Load, Work, seconds, work_of_phases
from alignment.prediction import TEST_PROBLEMS, Prediction, predict
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl

KINDS = ("operations", "bytes", "launches", "link")  # of work, whose rates finished runs show
UNKNOWN = {"response": (0.25, 1.0), "trained": (0.5, 1.0)}  # shares, as in `Load`, without a finished run
UNSURE = 1.5  # factor by which a prediction from one run may be off


@dataclass(frozen=True)
class Sample:
    """A phase of a finished run: its work, and its median seconds."""

    run: str
    phase: str
    work: Work
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What finished runs show of this machine, and of responses, as UNKNOWN."""

    samples: Sequence[Sample]
    shares: dict[str, Range]

    @cached_property
    def rates(self) -> np.ndarray:
        """Seconds of a unit of each of KINDS, 0 or more: least squares of relative errors."""
        parts = [[sample.work[kind] / sample.seconds for kind in KINDS] for sample in self.samples]
        return nnls(np.array(parts), np.ones(len(parts)))[0]

    def estimate(self, phase: str, work: Work) -> float:
        """Seconds of a phase: its work at `rates`, times what the phase took beyond that in the runs, of which those of nearest
        size count most."""
        at_rates = lambda work: float(self.rates @ [work[kind] for kind in KINDS]) or 1e-9
        near = [sample for sample in self.samples if sample.phase == phase] or self.samples
        beyond = [math.log(sample.seconds / at_rates(sample.work)) for sample in near]
        weights = [(0.1 + abs(math.log(at_rates(sample.work) / at_rates(work)))) ** -2 for sample in near]
        return at_rates(work) * math.exp(np.average(beyond, weights=weights))

    def errors(self) -> dict[tuple[str, str], float]:
        """(Run, phase) -> estimated over measured seconds, where only the other runs are known; none of a single run."""
        others = {run: [s for s in self.samples if s.run != run] for run in dict.fromkeys(s.run for s in self.samples)}
        known = {run: Calibration(samples, self.shares) for run, samples in others.items() if samples}
        return {(s.run, s.phase): known[s.run].estimate(s.phase, s.work) / s.seconds for s in self.samples if s.run in known}

    def spread(self, phase: str) -> float:
        """The factor by which an estimate may be off: the worst of `errors` of the phase."""
        off = [math.exp(abs(math.log(ratio))) for (_, of), ratio in self.errors().items() if of == phase]
        return max(off, default=UNSURE)


def calibrate(folders: Sequence[str]) -> Calibration:
    """What finished runs of this machine show. Raises `UserError` for a folder that is no run's, or of less than two steps."""
    samples, shares = [], {name: [] for name in UNKNOWN}
    for folder in folders:
        run = read_run(Path(folder))
        if len(run.metrics) < 2 or not (run.path / "final").exists():
            raise UserError(f"--calibrate {folder}: must be a finished run of train_rl, of two steps or more")
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in run.args.items()}
        args = RLArgs(**{name: v for name, v in given.items() if name in RLArgs.__dataclass_fields__})
        prediction = predict(dataclasses.replace(args, sft_base=str(run.path / "final")))
        steps = run.metrics[1:]  # the first one also warms up
        mean = {key: statistics.fmean(step[key] for step in steps) for key in ("response_length", "rows_with_gradient")}
        found = {"response": mean["response_length"] / args.max_new_tokens}
        found["trained"] = mean["rows_with_gradient"] / steps[0]["responses"]
        rows = read_jsonl(run.path / "completions" / f"rollout_{steps[-1]['step']:06d}.jsonl")
        facts = {"prompt": statistics.fmean(len(row["prompt_ids"]) for row in rows)}
        facts["micro_batch_tokens"] = steps[0]["micro_batch_tokens"]
        load = load_of(prediction, **found, **facts)
        work = work_of_phases(prediction.shape, prediction.config, load)
        of_eval = load_of(prediction, **facts, trained=1.0, response=run.evals[-1]["response_length"] / load.eval_max_new_tokens)
        work["evaluation"] = work_of_phases(prediction.shape, prediction.config, of_eval)["evaluation"]
        logged = {phase: [step.get(f"seconds_{phase.removesuffix('ing').replace('l', 'l')}", 0) for step in steps] for phase in work}
        logged |= {"sampling": [step.get("seconds_sample", 0) for step in steps], "evaluation": [e["seconds"] for e in run.evals]}
        medians = {phase: statistics.median(of) for phase, of in logged.items() if of}
        samples += [Sample(run.path.name, phase, work[phase], s) for phase, s in medians.items() if s > 1e-3]
        for name, share in found.items():
            shares[name].append(share)
    return Calibration(samples, {name: (min(of), max(of)) for name, of in shares.items()})


def load_of(prediction: Prediction, machines: int = 1, **known) -> Load:
    """What a step computes. `known` are the fields of `Load` that arguments do not tell: mean lengths and shares."""
    run, roles, step = prediction.run, prediction.roles, prediction.step
    passes = ("old_log_probs",) * run.needs_old_policy + ("reference",) * (run.beta > 0)
    facts = {
        "step": step, "devices": len(roles.policy), "machines": machines, "passes": passes,
        "engines": max(1, len(roles.sample) // run.sampler_tensor_parallel) * machines,
        "in_place": not step.vllm and roles.sample == roles.policy and step.itemsize == 4 and not run.lora_rank,
        "problems": run.max_problems or TEST_PROBLEMS, "eval_max_new_tokens": run.eval_max_new_tokens or run.max_new_tokens,
        "cache_bytes": CACHE_BYTES[roles.sample[0].partition(":")[0]], "micro_batch_tokens": run.micro_batch_tokens or 4096,
    }  # fmt: skip
    return configuration(Load, run, **{**facts, **known})
