"""Does this machine, with your settings, compute what a plain model does, train what it samples,
and resume to the same bits?

uv run -m alignment.verify --preset tiny
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alignment.args import RLArgs, VerifyArgs, command_line, configuration, parse
from alignment.builders.checks import check_rl
from alignment.builders.devices import roles_of
from alignment.config.settings import replaced
from alignment.runs.run_folder import (
    TRAINER,
    checkpoint_folder,
    claim_run_folder,
    last_whole_step,
    load_rollouts,
)
from alignment.runs.state import read_state
from alignment.sampling.sampler import engine_name
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.files import read_json, read_jsonl, write_atomically, write_json
from alignment.system.manifests import sha256
from alignment.system.processes import end_command, last_line, start_command
from alignment.system.templates import fill_template
from alignment.system.terminal import make_console
from alignment.system.torchrun import PROCESSES, followed

if TYPE_CHECKING:
    from alignment.builders.run_plan import RunPlan
    from alignment.verification.checks import Check

# the plain computation is slow, hence few responses of a prompt, and few tokens of each
MOST_SAMPLES = 4
MOST_TOKENS = 64
MICRO_BATCH = 256  # tokens, so that an update has several micro-batches
PAGE = "verification.html"
# how far a run is reproducible, the least first, where it is not to the bit
WORDS = ("statistical", "to rounding")
# prefixes of the names of what differs from run to run
TIMINGS = ("seconds", "tokens_per_second", "peak_bytes")


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each part of a finished run that a repetition must reproduce: no timings, no dates
    of files, and tensors by their names, because the order of entries in the head of a file of
    tensors is by chance."""
    from safetensors.numpy import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    last_step, _ = last_whole_step(run)
    trainer = checkpoint_folder(run, last_step) / TRAINER
    optimizer: list[tuple[str, str]] = []
    for file in sorted(trainer.glob("*.safetensors")):
        for name, array in sorted(load_file(file).items()):
            # numpy's stubs hide the buffer that its arrays are
            digest = hashlib.sha256(array).hexdigest()  # pyright: ignore[reportArgumentType]
            optimizer.append((name, digest))

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    scalars: dict[str, list[tuple[int, float]]] = {}
    for tag in sorted(events.Tags()["scalars"]):
        scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]

    parts = {
        "weights": _digest_files((run / "final").rglob("*.safetensors")),
        "optimizer": optimizer,
        "metrics": [_without_timings(record) for record in read_jsonl(run / "metrics.jsonl")],
        "evaluations": [_without_timings(record) for record in read_jsonl(run / "evals.jsonl")],
        "completions": _digest_files((run / "completions").iterdir()),
        "bad batches": _digest_files((run / "bad_batches").glob("*")),
        "TensorBoard": _without_timings(scalars),
    }
    return {
        part: hashlib.sha256(json.dumps(content).encode()).hexdigest()
        for part, content in parts.items()
    }


def _digest_files(files: Iterable[Path]) -> list[tuple[str, str]]:
    """The files' names, in order, each with its SHA-256."""
    return [(file.name, sha256(file)) for file in sorted(files)]


def _without_timings(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record's values but times and memory, which no repetition has again. A tracker's tag has
    a group before its name."""
    return {
        key: value
        for key, value in record.items()
        if not key.rpartition("/")[2].startswith(TIMINGS)
    }


def run_checks(args: VerifyArgs, console: Console, exact: bool) -> Iterator[Check]:
    """Train 2k steps straight; then k, kill, resume, k. Yields three kinds of checks: the resumed
    run goes on from the killed one's state; both runs end alike, which is promised where devices
    are `exact`; and the straight run takes the memory and seconds that `plan` predicts. Deletes all
    runs."""
    from alignment.builders.prediction import beside_plan
    from alignment.verification.checks import Check, checks_of_plan

    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".verify_", dir=args.output_dir) as folder:
        rl = configuration(
            RLArgs,
            args,
            run_name="straight",
            num_steps=2 * args.kill_after,
            save_interval=args.kill_after,
            preview=0,
            output_dir=folder,
            trackers=RLArgs.trackers,  # the events of TensorBoard are compared
        )
        straight = Path(folder) / rl.run_name
        resumed = Path(folder) / "killed"

        def parts_of_start() -> list[str]:
            return train_and_resume(rl, resumed, console)

        def parts_of_end() -> list[str]:
            return differing_parts(straight, resumed)

        yield Check("resumed: other parts of the next step's start", 0.0, parts_of_start)
        # the check above has run by now; it leaves no summary where a run has failed
        if (resumed / "summary.json").exists():
            limit = 0.0 if exact else math.inf
            yield Check(
                "killed, resumed: parts with other bits", limit, parts_of_end, "statistical"
            )
            yield from checks_of_plan(*beside_plan(rl))


def train_and_resume(rl: RLArgs, killed: Path, console: Console) -> list[str]:
    """Train a run; then another, `killed`, which is killed in the step after its first checkpoint,
    and resumed. Returns the parts of what that step's update began with before the kill that are
    others after it."""
    k = rl.save_interval
    again = dataclasses.replace(rl, run_name=killed.name, log_state=True)

    def has_begun_next_step() -> bool:
        return read_state(killed, k + 1) is not None

    with console.status(
        f"training {2 * k} steps straight; then {k} to be killed, and the other {k}"
    ):
        _run(rl)
        _run(again, killed_when=has_begun_next_step)
        before = read_state(killed, k + 1)
        rollouts = load_rollouts(checkpoint_folder(killed, k))
        _run(dataclasses.replace(again, resume=True))
    after = read_state(killed, k + 1)
    if before is None or after is None:
        raise RunStopped(f"the run wrote no state of step {k + 1}")
    sampled_before = any(sampled.step == k + 1 for sampled in rollouts)
    return other_state(before, after, sampled_before)


def other_state(
    before: Mapping[str, object], after: Mapping[str, object], sampled_before: bool
) -> list[str]:
    """The parts of a step's state that differ. None may, on any device, but for completions, which
    the step samples anew unless they were `sampled_before` the checkpoint, which then holds them.
    """
    parts = [part for part in before if part != "completions" or sampled_before]
    return [part for part in parts if before[part] != after[part]]


def differing_parts(straight: Path, resumed: Path) -> list[str]:
    """The parts of two finished runs' `digests` that differ."""
    expected = digests(straight)
    reached = digests(resumed)
    return [part for part in expected if expected[part] != reached[part]]


def _run(args: RLArgs, killed_when: Callable[[], bool] | None = None) -> None:
    """Run `train_rl` to its end, or kill it once `killed_when` says so. Raises `RunStopped` where
    it ends otherwise."""
    log = (Path(args.output_dir) / f"{args.run_name}.log").resolve()
    process = start_command("alignment.train_rl", command_line(args), log)
    try:
        while process.poll() is None and not (killed_when and killed_when()):
            time.sleep(0.01)
        code = process.returncode
    finally:
        end_command(process)
    if code:
        raise RunStopped(f"a run ended with exit code {code}: {last_line(log)}")
    if killed_when and code is not None:
        raise RunStopped("the run ended before it could be killed; take a larger --kill_after")


def training_checks(args: VerifyArgs, plan: RunPlan) -> Iterator[Check]:
    """Yields the checks of policy and sampler, on the plan's devices, with the responses to its
    first prompts."""
    from alignment.builders.policies import make_policy
    from alignment.builders.run_plan import plan_engine
    from alignment.builders.samplers import make_sampler
    from alignment.model.loading import load_tokenizer, make_deterministic
    from alignment.policy.policy import PolicyConfig
    from alignment.rollouts.source import open_source
    from alignment.verification.checks import LIMITS, Check, Verified, plain_policy, promises_bits

    if args.deterministic:
        make_deterministic()
    args = dataclasses.replace(
        args,
        group_size=min(args.group_size, MOST_SAMPLES),
        max_new_tokens=min(args.max_new_tokens, MOST_TOKENS),
        overlong_buffer=0,
        skip_unfinished=False,
        micro_batch_tokens=MICRO_BATCH,
    )
    base = plan.base
    tokenizer = load_tokenizer(base)
    source = open_source(args.rollout_config, tokenizer)
    devices = plan.roles.sample
    policy = make_policy(args, plan.policy, base)
    exact = promises_bits((*policy.devices, *devices), args.deterministic)
    plain = plain_policy(
        configuration(PolicyConfig, args, model_path=base, devices=("cpu",), dtype="float32")
    )
    nats = LIMITS[policy.dtype][0]
    engine = engine_name(args.sampler)
    engines = [engine]
    if args.sampler == "auto" and engine != "transformers":
        engines.append("transformers")
    for name in engines:
        args_of_engine = replaced(args, sampler=name)
        engine_plan = plan_engine(args_of_engine, plan.roles, base, devices)
        with closing(make_sampler(engine_plan, tokenizer, policy)) as sampler:
            verified = Verified(
                policy, sampler, plain, source, args.update_config, exact, args.batch_invariant
            )
            another = Check(f"after updates, {name}: nats from policy", nats, verified.synced)
            if name == engine:
                yield from verified.checks()
            else:
                yield another
            if args.lora_rank:
                policy.use_adapters("random")
                what = f"random adapters, {name}: nats from policy"
                yield dataclasses.replace(another, what=what)
                policy.use_adapters("trained")


def report(checks: Iterable[Check], console: Console) -> list[dict]:
    """Measure and print one check after another. Returns a record of each; one where a run would
    stop has failed."""
    records = []
    start = time.monotonic()
    for check in checks:
        measured, error = measured_by(check)
        end = time.monotonic()
        seconds = end - start
        start = end
        passed = measured <= check.limit
        verdict = verdict_of(passed, check.limit)
        line = f"{check.what:47} {measured:9.2g} of at most {check.limit:6.2g} {seconds:7.1f} s"
        console.print(f"{line}  {verdict} {error}".rstrip(), markup=False, soft_wrap=True)
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
                **numbers,
                "passed": passed,
                "error": error,
                "at_best": check.at_best,
                "of_results": check.of_results,
            }
        )
    return records


def verdict_of(passed: bool, limit: float) -> str:
    """The word for a check's outcome; a result without a limit is shown, not promised."""
    if not passed:
        return "FAILED"
    return "not promised" if math.isinf(limit) else "passed"


def measured_by(check: Check) -> tuple[float, str]:
    """A check's quantity, NaN where a run would stop, and the reason, or the names of what
    differs."""
    try:
        quantity = check.quantity()
    except RunStopped as stopped:
        return math.nan, str(stopped)
    if not isinstance(quantity, list):
        return float(quantity), ""
    if not quantity:
        return 0.0, ""
    return float(len(quantity)), f"other {', '.join(quantity)}"


def write_results(folder: Path, records: Sequence[dict]) -> str:
    """Write summary.json and verification.html, a self-contained page. Returns how far the same
    command repeats its results: "bitwise", "to rounding", or in their distribution only
    ("statistical"); "not verified" where a check of results failed."""
    # a check that measured a difference allows its word at best; the weakest one counts
    limits = {record["at_best"] for record in records if record["measured"] and record["at_best"]}
    word = next((word for word in WORDS if word in limits), "bitwise")
    if not all(record["passed"] for record in records if record["of_results"]):
        word = "not verified"
    summary = {"reproducibility": word, "checks": records}
    write_json(folder / "summary.json", summary)
    template = Path(__file__).with_name("verification") / f"{PAGE}.j2"
    page = fill_template(template, **summary, **read_json(folder / "args.json"))
    write_atomically(folder / PAGE, page)
    return word


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
    check_rl(args)
    from alignment.builders.run_plan import plan_run
    from alignment.builders.warm_start import prepare_warm_start
    from alignment.verification.checks import checks_without_model, promises_bits

    console = make_console()
    records = report(checks_without_model(args.update_config), console)
    plan = plan_run(args, prepare_warm_start(args, console))
    records += report(training_checks(args, plan), console)
    if args.kill_after and not PROCESSES:
        roles = plan.roles
        devices = (*roles.trainer, *roles.sample, roles.eval)
        exact = promises_bits(devices, args.deterministic)
        records += report(run_checks(args, console, exact), console)
    folder = claim_run_folder(
        args.output_dir,
        args.run_name,
        f"verify_{args.preset}",
        args.recorded_values,
        args.seeds,
        args.automatic,
    )
    word = write_results(folder, records)
    console.print(f"reproducible: {word}; all of it: {folder / PAGE}", markup=False, soft_wrap=True)
    failures = [record for record in records if not record["passed"]]
    if failures:
        raise RunStopped(
            f"{len(failures)} of {len(records)} checks failed. docs/verify.md says what each of"
            " them means"
        )


if __name__ == "__main__":
    run_command(main)
