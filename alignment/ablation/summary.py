"""The verdicts of a study as a record, and as they are printed. It loads scipy, but no
matplotlib."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from alignment.ablation import verdicts
from alignment.ablation.design import is_control
from alignment.ablation.statistics import Comparison
from alignment.ablation.study import Study
from alignment.ablation.tuning import Tuning
from alignment.ablation.verdicts import decide, decide_factors
from alignment.system.terminal import counted, make_table


@dataclass(frozen=True)
class Verdicts:
    """The verdicts of a study. It prints as `alignment.report` does."""

    tables: Mapping[str, tuple[Comparison, ...]]
    """By title: a table for each varied argument of a full grid, else one of the pairs of arms."""
    caution: str
    """What verdicts "in runs like these" leave open; empty where every verdict is firm."""
    warnings: tuple[str, ...]
    """What the design cannot tell, and versions in which runs differ."""
    basis: str
    """With another `match` than steps, what the verdicts are on; else empty."""
    unfinished: tuple[str, ...]
    """Names of runs that are in no verdict because they have not finished."""
    assumption: str = ""
    """What verdicts assume that the exact test of seeds' signs does not support; empty where it
    supports all."""
    choices: str = ""
    """Which verdicts are of the values that tuned arms took, and not of their best ones."""

    @property
    def comparisons(self) -> list[Comparison]:
        """Those of all tables."""
        comparisons: list[Comparison] = []
        for table in self.tables.values():
            comparisons += table
        return comparisons

    def __str__(self) -> str:
        text = io.StringIO()
        # without `force_jupyter` a notebook would show it, and the text would be empty
        console = Console(
            file=text, emoji=False, force_jupyter=False, force_terminal=False, width=120
        )
        print_verdicts(self, console)
        return text.getvalue().rstrip()


def verdicts_of(study: Study) -> Verdicts:
    """The verdicts of a study: decided comparisons first, each kind by size."""
    outcome = verdicts.outcome(study)
    tables: dict[str, tuple[Comparison, ...]] = {}
    for name, comparisons in decide_factors(study).items():
        tables[f"{outcome.title}: {name}, averaged over all else"] = tuple(ranked(comparisons))
    if not tables:
        for name, comparisons in verdicts.named_tables(decide(study)).items():
            title = outcome.title
            if name == verdicts.WITH_CONTROL:
                title = f"{outcome.title}: {name}"
            tables[title] = tuple(ranked(comparisons))
    every_comparison: list[Comparison] = []
    for comparisons in tables.values():
        every_comparison += comparisons
    basis = ""
    if study.match != "steps" or study.measure != "accuracy":
        basis = outcome.description
    warnings = study.warnings
    if censored := verdicts.censored_words(study):
        warnings = (*warnings, censored)
    return Verdicts(
        tables,
        caution(every_comparison),
        tuple(warnings),
        basis,
        study.missing,
        assumption(every_comparison),
        choice_caution(study, every_comparison),
    )


def print_verdicts(of_study: Verdicts, console: Console) -> None:
    """Print the tables, and what is to be known of them."""
    columns = ("", "difference", "95 % interval", "seeds", "verdict")
    for title, comparisons in of_study.tables.items():
        console.print(make_table(title, columns, [_cells(c) for c in comparisons]))
    if of_study.caution:
        console.print(of_study.caution, markup=False, soft_wrap=True)
    if of_study.assumption:
        console.print(of_study.assumption, markup=False, soft_wrap=True)
    if of_study.choices:
        console.print(of_study.choices, markup=False, soft_wrap=True)
    for warning in of_study.warnings:
        console.print(f"warning: {warning}", style="yellow", markup=False, soft_wrap=True)
    if of_study.basis:
        console.print(f"verdicts are on {of_study.basis}", soft_wrap=True)
    for name in of_study.unfinished:
        console.print(f"unfinished: {name}", style="red", markup=False)


def _cells(comparison: Comparison) -> tuple[str, ...]:
    """A comparison's row of the printed table."""
    return (
        f"{comparison.a} - {comparison.b}",
        f"{comparison.difference:+.3f}",
        interval_words(comparison),
        str(comparison.seeds),
        comparison.verdict,
    )


def interval_words(comparison: Comparison, form: str = "%+.3f .. %+.3f") -> str:
    """The interval of a difference in the `form` of its two ends; where no two seeds are shared,
    that there is none."""
    if math.isnan(comparison.low):
        return "none: one seed" if comparison.seeds == 1 else "none: no shared seed"
    return form % (comparison.low, comparison.high)


def detectable_words(comparison: Comparison) -> str:
    """The smallest difference of accuracies that the comparison would find; "none" where that is
    larger than any two accuracies can have, or not known."""
    if math.isnan(comparison.detectable) or comparison.detectable > 1:
        return "none"
    return f"{comparison.detectable:.3f}"


def ranked(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The decided comparisons first, each kind by the size of the difference."""

    def rank(comparison: Comparison) -> tuple[bool, float]:
        # without a shared seed the difference is NaN, which has no order
        size = abs(comparison.difference) if comparison.seeds else 0
        return comparison.kind == "undecided", -size

    return sorted(comparisons, key=rank)


def caution(comparisons: Sequence[Comparison]) -> str:
    """What verdicts "in runs like these" leave open, by the one that has seen least of its arms; ""
    where every verdict is firm."""
    infirm = [c for c in comparisons if c.kind != "undecided" and not c.firm]
    if not infirm:
        return ""
    least_seen = max(infirm, key=lambda comparison: comparison.unseen_share)
    seeds = least_seen.seeds
    share = least_seen.unseen_share
    shift = max(comparison.hidden for comparison in infirm)
    size = f"up to {shift:.2g}" if math.isfinite(shift) else "any amount"
    return (
        f"in runs like these: {seeds} seeds cannot exclude that up to {share:.0%} of an arm's runs"
        f" end elsewhere (they learn or they do not), which could shift a difference by {size}; a"
        " verdict without these words allows for that"
    )


IF_NOISE = "if a run is its mean plus noise"


def assumption(comparisons: Sequence[Comparison]) -> str:
    """What verdicts assume that the exact test of seeds' signs does not support, and about how many
    seeds would do without; "" where it supports all of them, and where there are none."""
    winners = [c for c in comparisons if c.kind == "greater" and not c.exact]
    parts = []
    if winners:
        seeds = max(comparison.exact_seeds or 0 for comparison in winners)
        parts.append(
            f"{counted(len(winners), 'difference')}, which the signs of so few seeds cannot show;"
            f" without that about {seeds} seeds would do"
        )
    margins = sum(comparison.kind == "tie" or comparison.is_small for comparison in comparisons)
    if margins:
        parts.append(
            f"{counted(margins, 'difference')} below the margin, which no number of seeds shows"
            " without that"
        )
    if not parts:
        return ""
    return f"{IF_NOISE}: {'; '.join(parts)}"


def survives_choice(comparison: Comparison, lost: Mapping[str, float], tie: float) -> bool:
    """Whether a verdict stands of any values of the grids that the arms tuned, where none has lost
    more accuracy by its choice than `lost` says. For the mean of several arms the largest loss
    counts."""
    low = comparison.low - _lost_by(comparison.b, lost)
    high = comparison.high + _lost_by(comparison.a, lost)
    is_within_margin = low > -tie and high < tie
    if comparison.kind == "greater":
        return (low > 0 or high < 0) and (is_within_margin or not comparison.is_small)
    return comparison.kind == "undecided" or is_within_margin


def _lost_by(side: str, lost: Mapping[str, float]) -> float:
    """The most that a side of a comparison may have lost by its choice: a control makes none, and
    of the arms of an argument's value the largest loss counts."""
    if is_control(side):
        return 0.0
    return lost.get(side, max(lost.values()))


def choice_caution(
    study: Study, comparisons: Sequence[Comparison], of_areas: Sequence[Comparison] = ()
) -> str:
    """Which verdicts are of the values that arms took by tuning, and not of their best ones: of the
    comparisons on the study's measure, and of those of the areas under its learning curves. "" for
    a study without tuning, and where all verdicts stand of those too."""
    if study.tuning is None:
        return ""
    words = []
    for measure, several in ((study.measure, comparisons), ("area", of_areas)):
        of_measure = _choice_caution(study, study.tuning, several, measure)
        if of_measure:
            words.append(of_measure)
    return ". Also ".join(words)


def _choice_caution(
    study: Study, tuning: Tuning, comparisons: Sequence[Comparison], measure: str
) -> str:
    """`choice_caution` of the comparisons on one measure."""
    lost = tuning.most_lost(study.alpha)
    decided = [comparison for comparison in comparisons if comparison.kind != "undecided"]
    place = "after all steps" if study.match == "steps" else f"at equal {study.match}"
    has_one_measure = _without_samples(tuning.measure) == _without_samples(measure)
    if decided and not (has_one_measure and study.match == "steps"):
        return (
            f"of the values taken: all verdicts on {measure}. Arms chose by {tuning.measure} after"
            f" all steps, and what that choice costs in {measure} {place} is not known"
        )
    of_values = [c for c in decided if not survives_choice(c, lost, study.tie)]
    if not of_values:
        return ""
    verdicts_in_words = "; ".join(comparison.verdict for comparison in of_values)
    concerned: set[str] = set()
    for comparison in of_values:
        concerned.update(comparison.arms)
    lost = {arm: amount for arm, amount in lost.items() if arm in concerned}
    known = [amount for amount in lost.values() if math.isfinite(amount)]
    on_measure = "" if measure == study.measure else f" on {measure}"
    words = f"of the values taken{on_measure}: {verdicts_in_words}."
    if max(known, default=0.0) > 0:
        words += (
            f" By {counted(len(tuning.seeds), 'seed')} and"
            f" {counted(tuning.questions, 'question')} an arm may have lost up to"
            f" {max(known):.2g} by its choice, and with a better one this could be otherwise."
        )
    unknown = [arm for arm, amount in lost.items() if math.isinf(amount)]
    if unknown:
        words += (
            f" Runs of {' and '.join(unknown)} with other values did not finish, so that nothing is"
            " known of these."
        )
    return words.removesuffix(".")


def _without_samples(measure: str) -> str:
    """The measure, whatever number of samples it is a mean over: accuracy for avg@N."""
    return "accuracy" if measure.startswith("avg@") else measure
