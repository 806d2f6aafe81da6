"""A run's seconds before it starts, by phase and in all: the work of its shapes, at a machine's rates or at those that finished
runs show."""

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from alignment.args import RLArgs, configuration
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.policy.hardware import Hardware, Range
from alignment.policy.loading import load_tokenizer
from alignment.policy.memory import CACHE_BYTES
from alignment.policy.speed import Load, seconds, work_of_phases
from alignment.prediction import PROMPT_TOKENS, TEST_PROBLEMS, Prediction, predict
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

KINDS = ("operations", "bytes", "launches", "link")  # of work, whose rates finished runs show
LOGGED = {"sampling": "sample", "old_log_probs": "old_log_probs", "reference": "reference", "update": "update", "sync": "sync"}
UNKNOWN = {"response": (0.25, 1.0), "trained": (0.5, 1.0)}  # shares of the longest response, and of responses with a gradient
ONE_RUN = 1.5  # factor by which a prediction from a single run may be off


@dataclass(frozen=True)
class Sample:
    """A phase of a finished run: its work on a device, and its median seconds."""

    run: str
    phase: str
    work: Counter
    seconds: float


@dataclass(frozen=True)
class Calibration:
    """What finished runs show of this machine, and of responses: shares as in UNKNOWN, from the least to the most."""

    samples: Sequence[Sample]
    shares: dict[str, Range]

    def __post_init__(self):
        parts = np.array([[sample.work[kind] / sample.seconds for kind in KINDS] for sample in self.samples])
        object.__setattr__(self, "rates", dict(zip(KINDS, nnls(parts, np.ones(len(parts)))[0], strict=True)))

    def estimate(self, phase: str, work: Counter) -> float:
        """Seconds of work of a phase: at the rates that fit all samples best (least squares of relative errors, no rate below
        0), times what the phase's own samples took beyond that; those of nearest size count most."""
        at_rates = lambda work: sum(self.rates[kind] * work[kind] for kind in KINDS)
        near = [sample for sample in self.samples if sample.phase == phase] or self.samples
        distances = [abs(math.log(at_rates(sample.work) / at_rates(work))) for sample in near]
        factors = [math.log(sample.seconds / at_rates(sample.work)) for sample in near]
        return at_rates(work) * math.exp(np.average(factors, weights=[1 / (0.1 + distance) ** 2 for distance in distances]))

    def errors(self) -> dict[tuple[str, str], float]:
        """(Run, phase) -> estimated over measured seconds, where the other runs alone were known; {} of a single run."""
        errors = {}
        for sample in self.samples:
            others = [other for other in self.samples if other.run != sample.run]
            if others:
                errors[sample.run, sample.phase] = (
                    Calibration(others, self.shares).estimate(sample.phase, sample.work) / sample.seconds
                )
        return errors
