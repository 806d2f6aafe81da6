"""Are the numbers that a run reports those of its own completions and of the papers' updates?

A figure is what metrics.jsonl or evals.jsonl says under a name. Nothing here calls what computes
them."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from alignment.verification.papers import PaperPart, paper_kl, paper_part_loss, paper_weight
from alignment.verification.papers import Token as PaperToken
from alignment.verification.whole_update import (
    UpdateFigures,
    paper_length_reward,
    takes_samplers_log_probs,
)

Row = Mapping[str, Any]
"""A line of a file of completions."""
Rules = Mapping[str, Callable[[str, str], Mapping[str, float]]]
ROUNDING = 1e-6  # by which figures of a record may differ from those of its answers
NOTHING = 1e-12  # of an advantage that is 0 but for rounding
QUANTILE = 1.96  # of the standard normal distribution, of a 95 % interval
Z_SQUARED = QUANTILE**2


@dataclass(frozen=True)
class Tolerance:
    """How far a figure may be from the papers': so much, or such a share of theirs."""

    absolute: float
    relative: float

    def allows(self, measured: float | None, expected: float) -> bool:
        if measured is None:
            return False
        return math.isclose(
            measured, expected, rel_tol=self.relative, abs_tol=self.absolute
        )  # False of NaN, too.


# Float32: divergences of 1e-6 nats are rounding. In 16 bits, and where 8-bit moments leave most of
# a step open, log-probs are only known to a tenth of a nat.
EXACT = Tolerance(absolute=2e-6, relative=0.02)
ROUGH = Tolerance(absolute=0.1, relative=0.5)
# The share by which the sampler's log-probs may make a token's weight another one than the papers':
# a tenth of the 0.001 nats that log-probs in float32 may be off.
DRIFT = 1e-4


def tolerance_of(dtype: torch.dtype, optimizer: str) -> Tolerance:
    """How far figures of updates may be from the papers', by the type of matrix products and
    --optimizer."""
    is_exact = dtype == torch.float32 and optimizer != "adamw_8bit"
    return EXACT if is_exact else ROUGH


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def in_groups(rows: Sequence[Row], size: int) -> list[Sequence[Row]]:
    """The rows of each group."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def figures_of_rows(rows: Sequence[Row], setting: Mapping[str, Any]) -> dict[str, float]:
    """What a step's record says of its completions."""
    rewards = [row["score"]["reward"] for row in rows]
    spread = [max(group) - min(group) for group in _rewards_of_groups(rows, setting["group_size"])]
    figures = {
        "reward": mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "frac_reward_zero_std": mean([float(width == 0) for width in spread]),
        "format_reward": mean([row["score"]["format_reward"] for row in rows]),
        "answer_reward": mean([row["score"]["answer_reward"] for row in rows]),
        "response_length": mean([len(row["token_ids"]) for row in rows]),
        "finished": mean([float(row["finish_reason"] == "stop") for row in rows]),
        "responses": len(rows),
    }
    if setting["overlong_buffer"]:
        penalties = [paper_length_reward(len(row["token_ids"]), setting) for row in rows]
        figures["overlong_penalty"] = mean(penalties)
    for name in rows[0]["score"]:
        if name.startswith("part_"):
            scores = [row["score"][name] for row in rows if name in row["score"]]
            figures[name] = mean(scores)
    return figures


def mean_mismatch(rows: Sequence[Row]) -> float:
    """The mean distance, in nats a token, of the trainer's log-probs of some rows from those by
    which they were sampled."""
    distances: list[float] = []
    for row in rows:
        pairs = zip(row["trainer_log_probs"], row["log_probs"], strict=True)
        distances += [abs(of_trainer - of_sampler) for of_trainer, of_sampler in pairs]
    return mean(distances)


def _rewards_of_groups(rows: Sequence[Row], size: int) -> list[list[float]]:
    rewards = []
    for group in in_groups(rows, size):
        rewards.append([row["score"]["reward"] for row in group])
    return rewards


def figures_of_rules(
    rows: Sequence[Row], record: Row, rules: Rules, graded_text: Callable[[str, Row], str]
) -> dict[str, float]:
    """The mean reward of some rows under each rule that ships and that the record names."""
    figures = {}
    for name, rule in rules.items():
        if f"reward_{name}" in record:
            scores = [rule(graded_text(name, row), row["ground_truth"])["reward"] for row in rows]
            figures[f"reward_{name}"] = mean(scores)
    return figures


@dataclass(frozen=True)
class StepFigures:
    """The updates of one step, as the papers make them, and what is reported of them."""

    updates: Sequence[UpdateFigures]
    setting: Mapping[str, Any]
    next_coefficient: float
    teacher_kl: float | None
    is_near_edge: bool

    def computed(self, update: UpdateFigures) -> list[tuple[int, PaperPart]]:
        """The rows of an update that may have a gradient, with their parts of the loss: those
        with an advantage, or a reward where that weighs the loss; all where something else than
        these gives a gradient."""
        setting = self.setting
        gives_all = (
            setting["beta"]
            or setting["teacher"]
            or setting["entropy_coefficient"]
            or setting["entropy_target"]
            or setting["token_selection"] == "kl_cov"
        )
        chosen = []
        for row, part in update.parts.items():
            weights: Sequence[float] = part.advantages
            if setting["loss"] == "no_baseline":
                weights = [part.reward]
            if gives_all or any(abs(weight) > NOTHING for weight in weights):
                chosen.append((row, part))
        return chosen

    def expected(self) -> dict[str, float]:
        """The figures of the step's updates."""
        figures: dict[str, float] = {
            "updates": len(self.updates),
            "learning_rate": self.updates[-1].rate,
            "grad_norm": mean([update.norm for update in self.updates]),
            "loss": mean([self._loss(update) for update in self.updates]),
        }
        rows = {row for update in self.updates for row, _ in self.computed(update)}
        figures["rows_with_gradient"] = len(rows)
        setting = self.setting
        if setting["entropy_coefficient"] or setting["entropy_target"]:
            figures["entropy_coefficient"] = self.updates[-1].entropy_coefficient
            figures["entropy_coefficient_next"] = self.next_coefficient
        if self.teacher_kl is not None:
            figures["teacher_kl"] = self.teacher_kl
        for name, values in self._by_token().items():
            if values:
                figures[name] = max(values) if name == "ratio_max" else mean(values)
        return figures

    def _loss(self, update: UpdateFigures) -> float:
        """An update's loss."""
        total = 0.0
        for _, part in self.computed(update):
            total += paper_part_loss(part, range(len(part.selected))).real
        return total

    def _by_token(self) -> dict[str, list[float]]:
        """The values at each token that an update computed, of figures that are means of them."""
        names = ("entropy", "sampling_entropy", "kl", "correction_mean", "selected_fraction")
        values: dict[str, list[float]] = {name: [] for name in names}
        ratios: list[float] = []
        for update in self.updates:
            for row, part in self.computed(update):
                values["entropy"] += [value.real for value in part.log_probs[4]]
                values["sampling_entropy"] += update.truncated_entropies[row]
                values["selected_fraction"] += map(float, part.selected)
                ratios += _ratios(part)
                for token, response in _tokens(part):
                    values["kl"].append(paper_kl(self.setting, token).real)
                    weight = paper_weight(self.setting, response, token)
                    values["correction_mean"].append(weight)
        return values | {"ratio_mean": ratios, "ratio_max": list(ratios)} | self._clipped()

    def _clipped(self) -> dict[str, list[float]]:
        """Whether PPO's minimum takes the bound, of each token; nothing where another loss has a
        bound of its own, or rounding decides."""
        setting = self.setting
        if setting["loss"] != "grpo_clip" or setting["dual_clip"] or self.is_near_edge:
            return {}
        high = setting["cliprange_high"]
        upper = 1 + (setting["cliprange"] if high is None else high)
        lower = 1 - setting["cliprange"]
        clipped = []
        for update in self.updates:
            for _, part in self.computed(update):
                for ratio, advantage in zip(_ratios(part), part.advantages, strict=True):
                    is_above = advantage > NOTHING and ratio > upper
                    is_below = advantage < -NOTHING and ratio < lower
                    clipped.append(float(is_above or is_below))
        return {"clip_fraction": clipped}

    def faults(self, record: Row, tolerance: Tolerance) -> list[str]:
        """The names of figures of a step's record that are others. A record has those alone that
        its arguments have a use for."""
        faults = []
        of_loss = Tolerance(tolerance.absolute + self._drift_of_loss(), tolerance.relative)
        for name, expected in self.expected().items():
            is_exact = name in ("updates", "rows_with_gradient", "learning_rate")
            allowed = Tolerance(ROUNDING, ROUNDING) if is_exact else tolerance
            if name == "loss":
                allowed = of_loss
            if name in record and not allowed.allows(record[name], expected):
                faults.append(name)
        return faults

    def _drift_of_loss(self) -> float:
        """By how much a step's loss may be off where the sampler's log-probs weigh its tokens:
        after some updates the sampler had other weights, by rounding, than the papers' are. A
        weighted sum of advantages is off by so much also where these cancel each other."""
        setting = self.setting
        if setting["sampler_correction"] == "none" and not takes_samplers_log_probs(setting):
            return 0.0
        sizes: list[float] = []
        for update in self.updates:
            for part in update.parts.values():
                sizes += map(abs, part.advantages)
        return DRIFT * mean(sizes)


def _ratios(part: PaperPart) -> list[float]:
    """The ratio to the old policy at each token, or GSPO's of the response."""
    policy, old, *_ = part.log_probs
    differences = [(new - before).real for new, before in zip(policy, old, strict=True)]
    if part.setting["loss"] == "gspo":
        differences = [mean(differences)] * len(differences)
    return list(map(math.exp, differences))


@dataclass(frozen=True)
class _WholeResponse:
    """What `paper_weight` needs of a response."""

    old: complex
    sampler: complex
    length: int


def _tokens(part: PaperPart) -> Iterator[tuple[PaperToken, Any]]:
    """Each token of a part, with its response."""
    policy, old, reference, sampler, entropies = part.log_probs
    response = _WholeResponse(sum(old), sum(sampler), len(policy))
    for position in range(len(policy)):
        values = (policy[position], old[position], reference[position], sampler[position])
        yield PaperToken(*values, entropies[position]), response


def effective_number(scores: Sequence[Sequence[float]]) -> float:
    """So many independent scores of 0 or 1 would have a mean of the variance that the mean over
    problems has (Kish 1965, design effect): at most all, and the problems where these are alike."""
    means = [mean(of_problem) for of_problem in scores]
    if len(set(means)) == 1:
        return float(len(means))
    centre = mean(means)
    of_mean = statistics.variance(means) / len(means)
    return min(centre * (1 - centre) / of_mean, float(sum(map(len, scores))))


def wilson_interval(scores: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Wilson's 95 % interval (Wilson 1927) of a mean of scores in [0, 1], of their
    `effective_number`."""
    centre = mean([mean(of_problem) for of_problem in scores])
    number = effective_number(scores)
    denominator = 1 + Z_SQUARED / number
    middle = centre + Z_SQUARED / (2 * number)
    spread = QUANTILE * math.sqrt(
        centre * (1 - centre) / number + Z_SQUARED / (4 * number * number)
    )
    low = (middle - spread) / denominator
    high = (middle + spread) / denominator
    return max(0.0, low), min(1.0, high)


def share_of_choices(groups: Sequence[Sequence[float]], number: int) -> float:
    """The mean over problems of the share of choices of so many samples of which one has the
    reward 1 (Chen et al. 2021, arXiv:2107.03374, by counting)."""
    shares = []
    for rewards in groups:
        choices = list(itertools.combinations([reward == 1 for reward in rewards], number))
        shares.append(sum(map(any, choices)) / len(choices))
    return mean(shares)


PARTS_OF_SCORES = {
    "avg_all_rewards": "reward",
    "avg_answer_rewards": "answer_reward",
    "avg_format_rewards": "format_reward",
}


def faults_of_evaluation(record: Row, groups: Sequence[Sequence[Row]]) -> list[str]:
    """The names of figures of an evaluation's record that are not those of its completions."""
    expected: dict[str, float] = {}
    for name, part in PARTS_OF_SCORES.items():
        scores = [[row["score"][part] for row in group] for group in groups]
        low, high = wilson_interval(scores)
        expected[name] = mean([mean(of_problem) for of_problem in scores])
        expected[f"{name}_ci.0"] = low
        expected[f"{name}_ci.1"] = high
    rewards = [[row["score"]["reward"] for row in group] for group in groups]
    for name in record:
        if name.startswith("pass@"):
            expected[name] = share_of_choices(rewards, int(name.removeprefix("pass@")))
    rows = list(itertools.chain.from_iterable(groups))
    expected["response_length"] = mean([len(row["token_ids"]) for row in rows])
    expected["finished"] = mean([float(row["finish_reason"] == "stop") for row in rows])
    expected["problems"] = len(groups)
    if "vote" in rows[0]["score"]:
        name = f"maj@{len(groups[0])}"
        expected[name] = mean([share_of_leaders(group) for group in groups])
    faults = [name for name, value in expected.items() if not is_near(_figure(record, name), value)]
    if record["categories"] != Counter(map(category_of, rows)):
        faults.append("categories")
    return faults


def share_of_leaders(group: Sequence[Row]) -> float:
    """Of the answers of a group that are the most frequent ones, by the votes of its scores, the
    share that is right."""
    votes = Counter(row["score"]["vote"] for row in group if row["score"]["vote"] >= 0)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {vote for vote, number in votes.items() if number == most}
    right = {row["score"]["vote"] for row in group if row["score"]["reward"] == 1}
    return len(leaders & right) / len(leaders)


def category_of(row: Row) -> str:
    """What evals.jsonl counts a response as."""
    if row["score"]["format_reward"] == 0:
        return "neither"
    return "format only" if row["score"]["answer_reward"] == 0 else "format and answer"


def _figure(record: Row, name: str) -> float:
    """A figure of a record; NAME.0 is the first number of a list."""
    name, _, place = name.partition(".")
    value = record.get(name, math.nan)
    return value[int(place)] if place else value


def is_near(value: float, expected: float) -> bool:
    """Whether two figures are the same but for rounding."""
    return math.isclose(value, expected, rel_tol=ROUNDING, abs_tol=ROUNDING)
