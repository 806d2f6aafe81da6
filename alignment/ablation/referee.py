"""Which questions of a referee a study answers, and with what: seeds, tuning, baselines,
contamination, compute, held-out questions, hashes. Everything is read from the runs' records."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np

from alignment.ablation.design import is_control
from alignment.ablation.statistics import Comparison
from alignment.ablation.study import AMOUNTS, Record, Run, Study, amounts_of, read_measure
from alignment.ablation.verdicts import arms_together, budget
from alignment.runs.summary import accuracy_with_interval, best_audit
from alignment.system.files import read_json
from alignment.system.terminal import counted

Status = Literal["yes", "partly", "no"]
HASH_CHARACTERS = 16  # of a SHA-256 that a report shows
EQUAL_COMPUTE = 0.01  # share by which arms' sampled tokens may differ to be called equal


@dataclass(frozen=True)
class Answer:
    """A referee's question, whether the study answers it, and the answer."""

    question: str
    status: Status
    words: str


def referee_answers(study: Study, comparisons: Sequence[Comparison]) -> list[Answer]:
    """The answers of a study with runs, whose verdicts are `comparisons`."""
    return [
        _seeds(study, comparisons),
        _tuning(study),
        _baseline(study),
        _base_format(study),
        _contamination(study),
        _compute(study),
        _held_out(study),
        _hashes(study),
    ]


def _seeds(study: Study, comparisons: Sequence[Comparison]) -> Answer:
    question = "Are there enough seeds, and are all of them shown?"
    numbers = sorted({len(runs) for runs in study.arms.values() if runs})
    span = counted(numbers[-1], "seed")
    if numbers[0] < numbers[-1]:
        span = f"{numbers[0]} to {span}"
    words = f"{span} an arm, each in the table of arms"
    if numbers[0] < 2:
        return Answer(question, "no", f"{words}; one seed shows no difference")
    if study.missing:
        words += f"; {_missing_words(study)} did not finish, and are in no verdict"
    winners = [comparison for comparison in comparisons if comparison.kind == "greater"]
    exact = sum(comparison.exact for comparison in winners)
    if not winners:
        return Answer(question, "partly", f"{words}; no difference was shown")
    words = f"{words}; {exact} of {len(winners)} differences need no model of a run's noise"
    is_whole = exact == len(winners) and not study.missing
    return Answer(question, "yes" if is_whole else "partly", words)


def _missing_words(study: Study) -> str:
    """How many of a sweep's runs did not finish."""
    every_run = len(study.missing) + len(study.runs)
    return f"{len(study.missing)} of {counted(every_run, 'run')}"


def _tuning(study: Study) -> Answer:
    question = "Was every arm tuned alike, the baseline too?"
    tuning = study.tuning
    if tuning is None:
        words = "all arms have the values of the command; a sweep with --tune lets each choose"
        return Answer(question, "no", words)
    first = next(iter(tuning.choices.values()))
    words = (
        f"each arm chose among {len(first.candidates)} values of {' and '.join(tuning.names)}, by"
        f" {counted(len(tuning.seeds), 'seed')} and {counted(tuning.questions, 'question')} of no"
        " verdict"
    )
    reasons = tuning.edge_warnings()
    for arm, choice in tuning.choices.items():
        for candidate in choice.candidates:
            if candidate.failed:
                reasons.append(f"{arm}: runs with {candidate.words} did not finish")
    if reasons:
        return Answer(question, "partly", f"{words}; {'; '.join(reasons)}")
    return Answer(question, "yes", words)


def _baseline(study: Study) -> Answer:
    question = "What comes by itself, without the true reward?"
    controls = [arm for arm, runs in study.arms.items() if runs and is_control(arm)]
    if controls:
        return Answer(question, "yes", f"control arms: {', '.join(controls)}")
    words = "each arm's accuracy before training is shown; --controls adds arms of false rewards"
    return Answer(question, "partly", words)


def _base_format(study: Study) -> Answer:
    question = "What can the base model do in its best format, before any training?"
    audited = []
    for output_dir, model, task in _base_models(study):
        audit = best_audit(output_dir, model, task)
        if audit:
            audited.append(audit)
    if audited:
        return Answer(question, "yes", "; ".join(dict.fromkeys(audited)))
    return Answer(question, "no", "`evaluate --audit_base` asks it in each of four formats")


def _contamination(study: Study) -> Answer:
    question = "Were test questions seen before?"
    words = "no training problem asks a test question, by its text"
    probed = []
    for output_dir, model, task in _base_models(study):
        for file in sorted(output_dir.glob("*/partial_prompts.json"), reverse=True):
            record = read_json(file)
            for row in record["evaluations"]:
                if (row["model"], row["task"]) == (model, task):
                    probed.append(
                        f"{model} continued the first {record['share']:.0%} of {row['problems']}"
                        f" word for word in {accuracy_with_interval(row)}"
                    )
    if probed:
        return Answer(question, "yes", f"{words}; {'; '.join(dict.fromkeys(probed))}")
    reason = "what the model had read before is not tested: `evaluate --partial_prompts 0.6` does"
    return Answer(question, "partly", f"{words}; {reason}")


def _base_models(study: Study) -> list[tuple[Path, str, str]]:
    """(folder, model, task) of the runs, once each: the folder is one that holds evaluations, that
    of the run or that of its sweep."""
    found: dict[tuple[Path, str, str], None] = {}
    for run in study.runs:
        for folder in (run.path.parent, run.path.parent.parent):
            found[folder, str(run.args.get("model")), str(run.args.get("task"))] = None
    return list(found)


def _compute(study: Study) -> Answer:
    question = "Did the arms take equal compute, and how much in all?"
    tokens = []
    updates = []
    minutes = []
    together = arms_together(study)
    arms_with_runs = {arm: runs for arm, runs in study.arms.items() if runs}
    # At equal amounts controls are compared in a table of their own.
    of_question = {arm: runs for arm, runs in arms_with_runs.items() if not is_control(arm)}
    shown = arms_with_runs if study.match == "steps" else of_question or arms_with_runs
    for arm, runs in shown.items():
        most = budget(study, together[arm])
        compared = [_compared_amounts(run, study.match, most) for run in runs.values()]
        tokens.append(fmean(amounts["tokens"] for amounts in compared))
        minutes.append(fmean(amounts["seconds"] / 60 for amounts in compared))
        updates.append(fmean(amounts["updates"] for amounts in compared))
    amounts = amounts_of(study.runs)
    words = f"{_amount_words(amounts)} for verdicts"
    if study.tuning is not None:
        words += f", and {_amount_words(study.tuning.amounts)} for tuning"
    has_equal_updates = _are_equal(updates)
    if study.match in ("tokens", "seconds"):
        words = f"compared at equal {study.match}; {words}"
        if study.match == "seconds" or has_equal_updates:
            return Answer(question, "yes", words)
    elif _are_equal(tokens) and has_equal_updates:
        return Answer(question, "yes", f"all arms sampled as many tokens; {words}")
    span = (
        f"{min(tokens):,.0f} to {max(tokens):,.0f} sampled tokens, {min(updates):,.0f} to"
        f" {max(updates):,.0f} updates and {min(minutes):.3g} to {max(minutes):.3g} minutes of"
        " steps a run, by arm"
    )
    if study.match != "steps":
        span += ", up to where they are compared"
    return Answer(question, "partly", f"{span}; {words}")


def _are_equal(amounts: Sequence[float]) -> bool:
    """Whether the arms' amounts differ by a share of `EQUAL_COMPUTE` at most."""
    return max(amounts) - min(amounts) <= EQUAL_COMPUTE * max(amounts)


def _count_updates(run: Run, record: Record) -> float:
    """The optimiser's steps of a step; 1 in older versions, which did not record them."""
    return record.get("updates", 1)


def _compared_amounts(run: Run, match: str, most: float) -> dict[str, float]:
    """The sampled tokens, seconds and updates that a run had taken where it is compared: when it
    had taken `most` of what `match` names, or at its end."""
    cumulated = {}
    for name, count in {**AMOUNTS, "updates": _count_updates}.items():
        amounts = [0.0, *(count(run, record) for record in run.metrics)]
        cumulated[name] = list(itertools.accumulate(amounts))
    compared = {}
    for name in ("tokens", "seconds", "updates"):
        compared[name] = float(np.interp(most, cumulated[match], cumulated[name]))
    return compared


def _amount_words(amounts: Mapping[str, float]) -> str:
    """What runs took, in words."""
    minutes = amounts["seconds"] / 60
    time = f"{minutes:.1f} minutes" if minutes < 60 else f"{minutes / 60:,.1f} hours"
    number = counted(round(amounts["runs"]), "run")
    runs = f"{number} with {amounts['tokens']:,.0f} sampled tokens"
    return f"{runs} in {time} of steps"


def _held_out(study: Study) -> Answer:
    question = "Are the questions held out, also from every choice?"
    numbers = sorted({len(run.scores.questions) for run in study.runs})
    span = " to ".join(f"{number:,}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    kind, _ = read_measure(study.measure)
    if kind == "entropy":
        return Answer(question, "no", "entropy is of the responses that runs train on")
    words = f"{span} questions that no run trains on, {_asked_words(study.match, kind)}"
    is_chosen = kind == "best"
    if study.tuning is not None:
        words += f"; tuning chose by {study.tuning.questions} others"
        return Answer(question, "partly" if is_chosen else "yes", words)
    words += "; whether settings were chosen by their results is not recorded (--tune has others)"
    return Answer(question, "partly", words)


def _asked_words(match: str, kind: str) -> str:
    """Which evaluations of a run verdicts on a kind of measure are on."""
    if kind == "best":
        return "in each run's best evaluation, chosen for each half of them by the other"
    if kind == "tokens_to":
        return "in all evaluations of every run"
    if kind == "area":
        until = "" if match == "steps" else f" up to equal {match}"
        return f"in all evaluations of every run{until}"
    if match == "steps":
        return "after the last step of every run"
    return f"at equal {match} of every run, between evaluations"


def _hashes(study: Study) -> Answer:
    question = "Can it be checked that the design and the data are those?"
    commits = {run.versions.get("code", "unknown") for run in study.runs}
    words = f"SHA-256 of the design {design_hash(study)}, of the questions {data_hash(study.runs)}"
    is_known = all(commit != "unknown" and "dirty" not in commit for commit in commits)
    if study.command and is_known and len(commits) == 1:
        return Answer(question, "yes", f"{words}; code {min(commits)}")
    reason = "the code of the runs is not one commit"
    if not study.command:
        reason = "the runs were made apart, not by one design"
    return Answer(question, "partly", f"{words}; {reason}")


def design_hash(study: Study) -> str:
    """The beginning of the SHA-256 of what was decided before: of a sweep its arms with all their
    arguments, its seeds, the measure, the chance of a false verdict, the margin of a tie, what is
    held equal, and what was tuned. Neither a run that is missing nor a resumed one changes it. Of
    runs that were made apart it has what varies."""
    facts = dict(study.design)
    if not facts:
        facts = {"arms": study.varied, "alpha": study.alpha, "tie": study.tie}
    facts |= {"measure": study.measure, "match": study.match}
    text = json.dumps(facts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARACTERS]


def data_hash(runs: Iterable[Run]) -> str:
    """The beginning of the SHA-256 of the texts of all evaluation questions, sorted."""
    texts: set[str] = set()
    for run in runs:
        texts.update(run.scores.texts)
    joined = "\0".join(sorted(texts))
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()[:HASH_CHARACTERS]
