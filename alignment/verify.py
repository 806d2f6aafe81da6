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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alignment.args import (
    RLArgs,
    SFTArgs,
    VerifyArgs,
    as_command,
    command_line,
    configuration,
    parse,
    preset_title,
)
from alignment.builders.checks import check_rl
from alignment.builders.devices import roles_of
from alignment.config.settings import flag_values, replaced
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
    from alignment.core.records import Problems
    from alignment.policy.policy import Policy
    from alignment.rollouts.config import UpdateConfig
    from alignment.rollouts.source import RolloutSource
    from alignment.sampling.sampler import Sampler
    from alignment.training.update import References
    from alignment.verification.check import Check
    from alignment.verification.two_rollouts import Chosen, TwoRollouts, UpdateSetting
    from alignment.verification.whole_update import PlainModel

# the plain computation is slow, hence few responses of a prompt, and few tokens of each
MOST_SAMPLES = 4
MOST_TOKENS = 64
MOST_DEMONSTRATIONS = 64
MICRO_BATCH = 256  # tokens, so that an update has several micro-batches
LEAST_DECAY = 0.5  # of weights, so that it is a part of a step that shows
# Of the host's memory for a parameter: weights before and after, gradient, two moments and what
# they become, in float64.
BYTES_IN_FLOAT64 = 56
FREE_SHARE = 0.7
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


def with_short_samples(args: VerifyArgs) -> VerifyArgs:
    """A run's arguments with few and short samples, a weight decay that shows, and a penalty for
    every length where the run has one for some."""
    max_new_tokens = min(args.max_new_tokens, MOST_TOKENS)
    return dataclasses.replace(
        args,
        group_size=min(args.group_size, MOST_SAMPLES),
        max_new_tokens=max_new_tokens,
        overlong_buffer=max_new_tokens if args.overlong_buffer else 0,
        skip_unfinished=False,
        micro_batch_tokens=MICRO_BATCH,
        weight_decay=max(args.weight_decay, LEAST_DECAY),
    )


def training_checks(args: VerifyArgs, plan: RunPlan) -> Iterator[Check]:
    """Yields the checks of policy and sampler, on the plan's devices, with the responses to its
    first prompts."""
    import torch

    from alignment.builders.policies import make_policy
    from alignment.builders.run_plan import plan_engine
    from alignment.builders.samplers import make_sampler
    from alignment.model.loading import load_tokenizer, make_deterministic
    from alignment.rollouts.source import open_source
    from alignment.verification.checks import NATS, Check, Verified, promises_bits
    from alignment.verification.sampling import SampledAnswers
    from alignment.verification.whole_update import PlainModel

    if args.deterministic:
        make_deterministic()
    args = with_short_samples(args)
    base = plan.base
    tokenizer = load_tokenizer(base)
    source = open_source(args.rollout_config, tokenizer)
    devices = plan.roles.sample
    is_too_large = not fits_in_float64(base)
    if is_too_large:
        yield from checks_of_cut_family(args, base)
    policy = make_policy(args, plan.policy, base)
    exact = promises_bits((*policy.devices, *devices), args.deterministic)
    plain = PlainModel(base, torch.float32 if is_too_large else torch.float64)
    nats = NATS[policy.dtype]
    engine = engine_name(args.sampler)
    engines = [engine]
    if args.sampler == "auto" and engine != "transformers":
        engines.append("transformers")
    for name in engines:
        args_of_engine = replaced(args, sampler=name)
        engine_plan = plan_engine(args_of_engine, plan.roles, base, devices)
        with closing(make_sampler(engine_plan, tokenizer, policy)) as sampler:
            updates = None
            if not is_too_large:
                updates = plan_updates(args, plan, VerifiedParts(policy, sampler, plain, source))
            config = args.update_config
            verified = Verified(
                policy, sampler, plain, source, config, exact, args.batch_invariant, updates
            )
            another = Check(f"after updates, {name}: nats from policy", nats, verified.synced)
            if name == engine:
                # Single log-probs may be ten times as far off as they are on average.
                yield from SampledAnswers(
                    sampler, source, plain.model, tokenizer, slack=10 * nats
                ).checks()
                yield from verified.checks()
            else:
                yield another
            if args.lora_rank:
                policy.use_adapters("random")
                what = f"random adapters, {name}: nats from policy"
                yield dataclasses.replace(another, what=what)
                policy.use_adapters("trained")


def checks_of_cut_family(args: VerifyArgs, whole: str) -> Iterator[Check]:
    """The checks of updates by a policy and a sampler of the first two layers of a model."""
    from alignment.builders.run_plan import plan_run
    from alignment.model.loading import load_tokenizer
    from alignment.verification.whole_update import cut_family

    with tempfile.TemporaryDirectory(prefix="verify_") as folder:
        cut_family(whole, Path(folder))
        load_tokenizer(whole).save_pretrained(folder)
        yield from checks_of_small_model(args, plan_run(args, folder))


def checks_of_small_model(args: VerifyArgs, plan: RunPlan) -> Iterator[Check]:
    """The checks of updates, by a policy and a sampler of the plan's base, of two layers."""
    from alignment.builders.policies import make_policy
    from alignment.builders.run_plan import plan_engine
    from alignment.builders.samplers import make_sampler
    from alignment.model.loading import load_tokenizer
    from alignment.rollouts.source import open_source
    from alignment.system.device_memory import release_memory
    from alignment.verification.whole_update import PlainModel

    tokenizer = load_tokenizer(plan.base)
    source = open_source(args.rollout_config, tokenizer)
    engine_plan = plan_engine(args, plan.roles, plan.base, plan.roles.sample)
    policy = make_policy(args, plan.policy, plan.base)
    with closing(make_sampler(engine_plan, tokenizer, policy)) as sampler:
        parts = VerifiedParts(policy, sampler, PlainModel(plan.base), source)
        for check in plan_updates(args, plan, parts).checks():
            yield dataclasses.replace(check, note=f"{check.note} (2 layers: too large in float64)")
    del policy, parts
    release_memory()


def fits_in_float64(base: str) -> bool:
    """Whether the host has memory for the updates of a model in float64, by the papers."""
    from alignment.model.loading import load_config
    from alignment.model.shape import ModelShape
    from alignment.system.device_memory import free_bytes

    parameters = sum(ModelShape.from_config(load_config(base)).parameters.values())
    return parameters * BYTES_IN_FLOAT64 < FREE_SHARE * free_bytes("cpu")


@dataclass(frozen=True)
class VerifiedParts:
    """What the checks of updates run, and transformers' own model of the weights it starts from."""

    policy: Policy
    sampler: Sampler
    plain: PlainModel
    source: RolloutSource


def plan_updates(args: VerifyArgs, plan: RunPlan, parts: VerifiedParts) -> TwoRollouts:
    """The updates that are compared with the papers', by a run's own arguments but for what
    `update_setting` sets."""
    from alignment.builders.training import find_teacher
    from alignment.model.loading import load_tokenizer
    from alignment.verification.two_rollouts import TwoRollouts, update_limits
    from alignment.verification.whole_update import PlainModel

    teacher = None
    not_checked = ""
    if args.teacher:
        folder = find_teacher(args, plan.base)
        if fits_in_float64(folder):
            teacher = PlainModel(folder)
        else:
            not_checked = "the host has no memory for --teacher in float64"
    return TwoRollouts(
        parts.policy,
        parts.sampler,
        parts.plain,
        parts.source,
        load_tokenizer(plan.base),
        make_setting=partial(update_setting, args),
        open_references=partial(open_references, args, plan, parts.policy),
        limits=update_limits(parts.policy.dtype, args.optimizer),
        has_one_update=args.updates_per_rollout == 1,
        teacher=teacher,
        not_checked=not_checked,
    )


def update_setting(args: RLArgs, chosen: Chosen) -> UpdateSetting:
    """The setting of the updates that are checked. What the sampler's log-probs are is another
    check's concern, so they stop no update."""
    from alignment.verification.two_rollouts import PROMPTS, UpdateSetting

    changes: dict[str, Any] = {
        "prompts_per_rollout": PROMPTS,
        "train_mini_batch_size": 2 * args.group_size if chosen.several else 0,
        "epochs_per_rollout": 2 if chosen.several else 1,
        "learning_rate": chosen.learning_rate,
        "max_refills": 0,
    }
    if args.max_grad_norm:
        changes["max_grad_norm"] = min(args.max_grad_norm, chosen.largest_norm)
    if args.token_selection == "clip_cov":
        changes["selected_share"] = 1.0  # All that are eligible, instead of some by chance.
    own = dataclasses.replace(args, **changes)
    config = dataclasses.replace(own.update_config, max_sampler_mismatch=math.inf)
    flags = flag_values(own) | {"loss": own.loss_type}
    return UpdateSetting(flags, config, own.rollout_config, chosen.largest_norm)


def open_references(
    args: RLArgs, plan: RunPlan, policy: Policy, config: UpdateConfig
) -> References:
    """The sources of old, reference and teacher log-probs, as a run has them that samples between
    its updates."""
    import torch

    from alignment.builders.policies import ranks_of
    from alignment.builders.training import find_teacher
    from alignment.model.frozen import FrozenModel
    from alignment.system.clock import Clock
    from alignment.training.update import LogProbSource, References

    dtype = getattr(torch, plan.policy.dtype)
    device = plan.roles.reference
    old_policy = None
    if plan.keeps_old_policy and config.old_log_probs == "policy" and ranks_of(policy) is None:
        old_policy = FrozenModel(plan.base, device, dtype)
    reference = None
    if args.beta and args.lora_rank:

        def base_log_probs(batch, distribution, micro_batch_tokens):
            return policy.base_log_probs(batch, distribution)

        reference = LogProbSource(base_log_probs)
    elif args.beta:
        reference = LogProbSource(FrozenModel(plan.base, device, dtype).log_probs)
    teacher = None
    if args.teacher:
        folder = find_teacher(args, plan.base)
        model = FrozenModel(folder, plan.roles.teacher, dtype)
        teacher = LogProbSource(model.log_probs)
    return References(config, old_policy, reference, Clock(), teacher)


def checks_of_rewards(args: VerifyArgs) -> Iterator[Check]:
    """The checks of the rules that ship, those of this run first."""
    from alignment.rewards.rules import RULES, named_parts, resolved_reward
    from alignment.verification.graded_answers import checks_of_rules

    reward = resolved_reward(args.reward, args.task_in_format.rules)
    names = [name for name, _ in named_parts(reward)]
    yield from checks_of_rules(RULES, (*names, args.evaluation_rule))


def checks_of_data(args: VerifyArgs, base: str) -> Iterator[Check]:
    """The checks of what is trained and evaluated, as the model of the folder `base` reads it."""
    from alignment.builders.evaluations import prepare_evaluations
    from alignment.model.loading import load_tokenizer
    from alignment.rollouts.source import open_source
    from alignment.verification.splits import RunData

    task = args.task_in_format
    tokenizer = load_tokenizer(base)
    config = args.rollout_config

    def training_problems() -> Problems:
        return open_source(config, tokenizer).problems

    data = RunData(
        task.problems("train", args.dataset_path),
        task.test_split(args.dataset_path),
        prepare_evaluations(args, tokenizer)[""].problems,
        training_problems(),
        config,
        training_problems,
    )
    yield from data.checks()
    if args.sft_base:
        yield from checks_of_demonstrations(args, base)


def checks_of_demonstrations(args: VerifyArgs, base: str) -> Iterator[Check]:
    """The checks of the worked solutions that a warm start is trained on."""
    from alignment.builders.checks import read_demonstrations
    from alignment.builders.warm_start import tokenise_demonstrations
    from alignment.core.tokens import pad_token_id
    from alignment.data.prompts import read_system_prompt
    from alignment.data.tasks import answer_in_box
    from alignment.data.tasks.own_data import read_examples
    from alignment.model.loading import load_config, load_tokenizer
    from alignment.verification.sft_labels import Demonstrations
    from alignment.verification.splits import number_of_test_questions

    task = args.task_in_format
    sft_args = as_command(SFTArgs, args)
    tokenizer = load_tokenizer(base)
    taught = task.untested(read_demonstrations(sft_args, task, "train"), args.dataset_path)
    shown = taught[:: max(1, len(taught) // MOST_DEMONSTRATIONS)]
    responses = [response for _, response in shown]
    if task.wants_box:
        responses = list(map(answer_in_box, responses))
    prompted = task.with_prompts(
        [problem for problem, _ in shown],
        tokenizer,
        read_system_prompt(args.system_prompt),
        read_examples(args.few_shot),
    )
    context = load_config(base).max_position_embeddings
    yield from Demonstrations(
        tokenise_demonstrations(sft_args, shown, tokenizer, context),
        responses,
        [problem.prompt for problem in prompted],
        number_of_test_questions(
            [problem for problem, _ in taught], task.test_split(args.dataset_path)
        ),
        tokenizer,
        pad_token_id(tokenizer),
    ).checks()


def report(checks: Iterable[Check], console: Console) -> list[dict]:
    """Measure and print one check after another. Returns a record of each; one where a run would
    stop has failed. "passed" is None where there was nothing to fail."""
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


def write_results(folder: Path, records: Sequence[dict]) -> str:
    """Write summary.json and verification.html, a self-contained page. Returns how far the same
    command repeats its results: "bitwise", "to rounding", or in their distribution only
    ("statistical"); "not verified" where a check of results failed."""
    # a check that measured a difference allows its word at best; the weakest one counts
    limits = {record["at_best"] for record in records if record["measured"] and record["at_best"]}
    word = next((word for word in WORDS if word in limits), "bitwise")
    if any(record["passed"] is False for record in records if record["of_results"]):
        word = "not verified"
    summary = {"reproducibility": word, "checks": records}
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


def check_json_file(name: str) -> None:
    """Raise `UserError` where --json names a file that cannot be written."""
    file = Path(name)
    if not file.parent.is_dir() or file.is_dir():
        raise UserError(
            f"--json {name}: name a file in a folder that exists, such as verification.json"
        )


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
        check_json_file(args.json)
    check_rl(args)
    from alignment.builders.prediction import with_fastest_kind
    from alignment.builders.run_plan import plan_run
    from alignment.builders.warm_start import prepare_warm_start
    from alignment.verification.checks import checks_without_model, promises_bits

    console = make_console(args.quiet)
    records = report(checks_without_model(args.update_config), console)
    records += report(checks_of_rewards(args), console)
    base = prepare_warm_start(args, console)
    plan = plan_run(with_fastest_kind(args), base)
    records += report(checks_of_data(args, plan.base), console)
    records += report(training_checks(args, plan), console)
    if args.kill_after and not PROCESSES:
        roles = plan.roles
        devices = (*roles.trainer, *roles.sample, roles.eval)
        exact = promises_bits(devices, args.deterministic)
        records += report(run_checks(args, console, exact), console)
    folder = claim_run_folder(
        args.output_dir,
        args.run_name,
        f"verify_{preset_title(args.preset)}",
        args.recorded_values,
        args.seeds,
        args.automatic,
    )
    word = write_results(folder, records)
    console.print(f"reproducible: {word}; all of it: {folder / PAGE}", markup=False, soft_wrap=True)
    if args.json:
        write_json(Path(args.json), {"reproducibility": word, "lines": lines_of(records)})
    failures = [record for record in records if record["passed"] is False]
    if failures:
        raise RunStopped(
            f"{len(failures)} of {len(records)} checks failed. docs/verify.md says what each of"
            " them means"
        )


if __name__ == "__main__":
    run_command(main)
