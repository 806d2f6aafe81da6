"""Does this machine, with your settings, compute what a plain model does, train what it samples,
and resume to the same bits?

uv run -m alignment.verify --preset tiny
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alignment.args import VerifyArgs, parse, preset_title
from alignment.builders.announcements import announce_start
from alignment.builders.checks import check_rl
from alignment.builders.devices import roles_of
from alignment.runs.run_folder import claim_run_folder
from alignment.sampling.sampler import engine_name
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.files import (
    check_writable_file,
    read_json,
    write_atomically,
    write_json,
)
from alignment.system.templates import fill_template
from alignment.system.terminal import make_console
from alignment.system.torchrun import PROCESSES, followed

if TYPE_CHECKING:
    from alignment.verification.check import Check

PAGE = "verification.html"
# how far a run is reproducible, the least first, where it is not to the bit
WORDS = ("statistical", "to rounding")


def report(checks: Iterable[Check], console: Console, part: str = "") -> list[dict]:
    """Measure and print one check after another, which are a `part` of all. Returns a record of
    each; one where a run would stop has failed. "passed" is None where there was nothing to
    fail."""
    records = []
    start = time.monotonic()
    for check in checks:
        measured, error = measured_by(check)
        end = time.monotonic()
        seconds = end - start
        start = end
        verdict = verdict_of(check, measured)
        figures = ""
        if not check.not_checked:
            figures = f"{measured:9.2g}"
            if math.isfinite(check.limit):
                figures += f" of at most {check.limit:6.2g}"
        line = f"{check.what:47} {figures:28} {seconds:7.1f} s  {verdict} {error} {check.note}"
        console.print(line.rstrip(), markup=False, soft_wrap=True)
        numbers: dict[str, float | None] = {
            "measured": measured,
            "limit": check.limit,
            "seconds": seconds,
        }
        for name, number in numbers.items():
            if number is not None and not math.isfinite(number):
                numbers[name] = None  # JSON has no infinity
        records.append(
            {
                "what": check.what,
                "part": part,
                **numbers,
                "passed": PASSED_BY_VERDICT.get(verdict),
                "verdict": verdict,
                "error": error,
                "note": check.note,
                "at_best": check.at_best,
                "of_results": check.of_results,
            }
        )
    return records


# Others say that nothing could fail.
PASSED_BY_VERDICT = {"passed": True, "FAILED": False}


def verdict_of(check: Check, measured: float) -> str:
    """The word for a check's outcome. What has no limit is measured, and fails only where a run
    would stop."""
    if check.not_checked:
        return f"not checked: {check.not_checked}"
    if not measured <= check.limit:  # Unlike measured > limit, this is true of NaN, too.
        return "FAILED"
    return "measured" if math.isinf(check.limit) else "passed"


def measured_by(check: Check) -> tuple[float, str]:
    """A check's quantity, NaN where a run would stop or nothing is measured, and the reason, or the
    names of what differs."""
    if check.not_checked:
        return math.nan, ""
    try:
        quantity = check.quantity()
    except RunStopped as stopped:
        return math.nan, str(stopped)
    if not isinstance(quantity, list):
        return float(quantity), ""
    if not quantity:
        return 0.0, ""
    return float(len(quantity)), f"other {', '.join(quantity)}"


def report_of_model(args: VerifyArgs, console: Console) -> list[dict]:
    """Measure and print all that needs the model of a run's warm start; returns the records."""
    from alignment.builders.prediction import with_fastest_kind
    from alignment.builders.run_plan import plan_run
    from alignment.builders.verified_data import checks_of_data
    from alignment.builders.verified_runs import run_checks, short_run_checks
    from alignment.builders.verified_updates import first_weights, training_checks
    from alignment.builders.warm_start import prepare_warm_start
    from alignment.verification.checks import promises_bits

    announce_start(args, console)
    base = prepare_warm_start(args, console)
    plan = plan_run(with_fastest_kind(args), base)
    records = report(checks_of_data(args, plan.base), console, "Data and rewards")
    records += report(training_checks(args, plan), console, "Policy, sampler and updates")
    if not PROCESSES:
        checks = short_run_checks(args, plan, first_weights(args, plan), console)
        records += report(checks, console, "A short run, from outside")
    if args.kill_after and not PROCESSES:
        roles = plan.roles
        devices = (*roles.trainer, *roles.sample, roles.eval)
        exact = promises_bits(devices, args.deterministic)
        records += report(
            run_checks(args, console, exact), console, "A run that is killed and resumed"
        )
    return records


def write_results(folder: Path, records: Sequence[dict], weights: str) -> str:
    """Write summary.json and verification.html, a self-contained page, which say what `weights`
    were judged. Returns how far the same command repeats its results: "bitwise", "to rounding", or
    in their distribution only ("statistical"); "not verified" where a check of results failed."""
    # a check that measured a difference allows its word at best; the weakest one counts
    limits = {record["at_best"] for record in records if record["measured"] and record["at_best"]}
    word = next((word for word in WORDS if word in limits), "bitwise")
    if any(record["passed"] is False for record in records if record["of_results"]):
        word = "not verified"
    summary = {"reproducibility": word, "weights": weights, "checks": records}
    write_json(folder / "summary.json", summary)
    template = Path(__file__).with_name("verification") / f"{PAGE}.j2"
    page = fill_template(template, **summary, **read_json(folder / "args.json"))
    write_atomically(folder / PAGE, page)
    return word


def lines_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What --json says of each line: its verdict is "passed", "failed", "measured" or "not
    checked"."""
    lines = []
    for record in records:
        verdict, _, reason = record["verdict"].lower().partition(": ")
        lines.append(
            {
                "name": record["what"],
                "verdict": verdict,
                "reason": record["error"] or reason,
                "value": record["measured"],
                "tolerance": record["limit"],
                "seconds": record["seconds"],
            }
        )
    return lines


def set_batch_invariant(args: VerifyArgs) -> None:
    """Have vLLM's engines, of this process and those that it starts, give the same bits whatever
    shares a batch. Raises `UserError` where they cannot."""
    if engine_name(args.sampler) != "vllm" or "cpu" in roles_of(args).sample:
        raise UserError(
            "--batch_invariant: only vLLM on a GPU has kernels that give the same bits whatever"
            " shares a batch"
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


def main() -> None:
    args = parse(VerifyArgs)
    if args.batch_invariant:
        set_batch_invariant(args)
    if followed(args.rank_timeout):
        return
    if args.json:
        check_writable_file(Path(args.json), "--json", "verification.json")
    check_rl(args)
    # These modules load torch, which bad arguments need not wait for.
    from alignment.builders.verified_data import checks_of_rewards
    from alignment.builders.verified_weights import judged_weights
    from alignment.verification.checks import checks_without_model

    console = make_console(args.quiet)
    records = report(checks_without_model(args.update_config), console, "Formulas")
    records += report(checks_of_rewards(args), console, "Rules")
    with judged_weights(args, console) as (judged, weights):
        records += report_of_model(judged, console)
    folder = claim_run_folder(
        args.output_dir,
        args.run_name,
        f"verify_{preset_title(args.preset)}",
        args.recorded_values,
        args.seeds,
        args.automatic,
    )
    word = write_results(folder, records, weights)
    console.print(f"reproducible: {word}; all of it: {folder / PAGE}", markup=False, soft_wrap=True)
    if args.json:
        results = {"reproducibility": word, "weights": weights, "lines": lines_of(records)}
        write_json(Path(args.json), results)
    failures = [record for record in records if record["passed"] is False]
    if failures:
        raise RunStopped(
            f"{len(failures)} of {len(records)} checks failed. docs/verify.md says what each of"
            " them means"
        )


if __name__ == "__main__":
    run_command(main)
