"""A run's folder: arguments, metrics, evaluations, completions; and its checkpoints, Hugging Face
folders with the trainer's state beside the weights, whole or absent. All randomness of a run is a
function of its seed and the step number, so a resumed run repeats the undisturbed one from step,
weights, optimiser, and rollouts that older weights sampled ahead."""

import errno
import html
import itertools
import json
import os
import platform
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from alignment.core.args_file import AUTO
from alignment.core.records import Completion, Group, Problem, Rollout, SampledStep, Score
from alignment.core.schedules import last_reset
from alignment.core.state_tree import join_tensors, split_tensors
from alignment.runs.metric_names import with_current_names
from alignment.runs.state import STATE
from alignment.runs.trackers import Trackers
from alignment.system import files
from alignment.system.command import current_command
from alignment.system.errors import RunStopped, UserError
from alignment.system.manifests import find_damage, write_manifest
from alignment.system.nearest import did_you_mean_path
from alignment.system.terminal import printable
from alignment.system.versions import versions

Record = Mapping[str, Any]
"""A line of a log: the figures of one step, or of one evaluation, by name."""
# Log file -> prefix of its numbers in trackers.
LOGS = {
    "metrics.jsonl": "",
    "evals.jsonl": "eval/",
}
# Log file -> the kind of the files with the completions of its steps.
COMPLETIONS_OF_LOG = {
    "metrics.jsonl": "rollout",
    "evals.jsonl": "eval",
}
SHOWN_COMPLETIONS = 3
"""Completions of a step that trackers get as text."""
# The folder of the trainer's state in a checkpoint. It is none of the top folder's files, since
# loaders take every *.safetensors file there for weights.
TRAINER = "trainer"
ROLLOUTS = Path(TRAINER) / "rollouts.jsonl"
# The state of the estimator of advantages: JSON, and its tensors.
ADVANTAGE_STATE = Path(TRAINER) / "advantage" / "state.json"
ADVANTAGE_TENSORS = ADVANTAGE_STATE.with_name("tensors.safetensors")
MOST_BYTES = 150  # Of a folder's name that is made here; file systems take 255, with suffixes.
# What kinds of arguments a run has.


# The tensors of a `Rollout` that are saved of a mini-batch without a finite loss or gradient.
SAVED_OF_BAD_BATCHES = (
    "raw_rewards_B1",
    "advantages_B1",
    "sampler_log_probs_BT",
    "old_log_probs_BT",
)


class RunFolder:
    """The files of a run, under `checkpoints/<run_name>/`."""

    def __init__(self, path: Path, last_step: int = 0, trackers: Sequence[str] = ()):
        """Open the folder and continue after `last_step`. Records of later steps, which an
        interrupted run wrote, are deleted, because the run repeats these steps. `trackers` get the
        other records that they lack."""
        self.path = path
        files.remove_unfinished(path)
        (path / "completions").mkdir(parents=True, exist_ok=True)
        kept = {log: records_up_to(path / log, last_step) for log in LOGS}
        kept["metrics.jsonl"] = [with_current_names(record) for record in kept["metrics.jsonl"]]
        # Step -> accuracy of the evaluation after it.
        self.evaluated = {
            record["step"]: record.get("avg_all_rewards", 0.0) for record in kept["evals.jsonl"]
        }
        for file in (path / "completions").glob("*_*.jsonl"):
            number = file.stem.rpartition("_")[2]
            if number.isdigit() and int(number) > last_step:
                file.unlink()
        if (path / STATE).exists():
            files.write_jsonl(path / STATE, records_up_to(path / STATE, last_step))
        self._trackers = Trackers(path, trackers, path.name)
        for log, records in kept.items():
            files.write_jsonl(path / log, records)
            for record in records:
                self._track(log, record)

    def log_step(self, record: Record) -> None:
        """Append one object to metrics.jsonl, and send it to the trackers."""
        self._append("metrics.jsonl", record)

    def log_eval(
        self,
        record: Record,
        groups: Sequence[Group],
        others: Mapping[str, Sequence[Group]] = MappingProxyType({}),
    ) -> None:
        """Write an evaluation's completions, also those of `others` by the prefix of their metrics,
        and append one object to evals.jsonl, and send it to the trackers."""
        self.log_completions("eval", record["step"], groups)
        for prefix, groups_of_other in others.items():
            kind = f"eval_{plain_name(prefix.replace('/', '_'))}"
            self.log_completions(kind, record["step"], groups_of_other)
        self._append("evals.jsonl", record)
        self.evaluated[record["step"]] = record.get("avg_all_rewards", 0.0)

    def log_state(self, record: Record) -> None:
        """Append one object to state.jsonl."""
        self._write(STATE, record)

    def log_completions(
        self, kind: str, step: int, groups: Sequence[Group], log_probs: Iterable | None = None
    ) -> None:
        """Write completions/<kind>_<step>.jsonl: a completion a line, its score, and the trainer's
        `log_probs` if given."""
        records: list[dict[str, Any]] = []
        for group in groups:
            problem = group.problem
            for completion, score in zip(group.completions, group.scores, strict=True):
                records.append(
                    {
                        "problem": problem.id,
                        "question": problem.question,
                        "ground_truth": problem.ground_truth,
                        **vars(completion),  # `asdict` would copy each number
                        "score": score,
                    }
                )
        if log_probs is not None:
            for record, own_log_probs in zip(records, log_probs, strict=True):
                record["trainer_log_probs"] = own_log_probs
        files.write_jsonl(self.path / "completions" / f"{kind}_{step:06d}.jsonl", records)

    def save_bad_batches(self, rollout: Rollout, step: int, bad: Sequence[Sequence[int]]) -> None:
        """Write the mini-batches `bad` (row numbers), whose loss or gradient was not finite, as
        tensors to bad_batches/."""
        from safetensors.torch import save_file  # imported here, because both modules load torch

        from alignment.core.tokens import take_rows

        for number, rows in enumerate(bad, start=1):
            batch = take_rows(rollout.batch, rows)
            width = batch.labels.shape[1]
            tensors = {name: tensor.contiguous() for name, tensor in vars(batch).items()}
            for key in SAVED_OF_BAD_BATCHES:
                tensor = getattr(rollout, key)
                if tensor is not None:
                    tensors[key] = tensor[list(rows), :width].contiguous()
            file = self.path / "bad_batches" / f"step_{step:06d}_{number}.safetensors"
            file.parent.mkdir(exist_ok=True)
            with files.guard_library_write(file):
                save_file(tensors, file)

    def flush(self) -> None:
        """Force the logs onto the disk, so that a checkpoint never survives a crash without the log
        of its steps."""
        for name in LOGS:
            files.flush(self.path / name)

    def close(self) -> None:
        """Close the trackers."""
        self._trackers.close()

    def _append(self, name: str, record: Record) -> None:
        self._write(name, record)
        self._track(name, record)

    def _write(self, name: str, record: Record) -> None:
        file = self.path / name
        with files.add_path_to_errors(file), file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(record) + "\n")

    def _track(self, log: str, record: Record) -> None:
        """Send the numbers of a record to the trackers, and the first completions of an evaluation
        or of a step of RL."""
        prefix = LOGS[log]
        numbers = {}
        for key, value in record.items():
            if key != "step" and isinstance(value, int | float):
                numbers[prefix + key] = value
        file = f"{COMPLETIONS_OF_LOG[log]}_{record['step']:06d}.jsonl"
        sample = sample_as_html(self.path / "completions" / file)
        self._trackers.log(log, record["step"], numbers, sample)


def sample_as_html(file: Path) -> str:
    """The first `SHOWN_COMPLETIONS` of a file of completions, each with its rewards, as HTML; empty
    where there is no such file."""
    if not file.is_file():
        return ""
    with file.open(encoding="utf-8") as lines:
        completions = [json.loads(line) for line in itertools.islice(lines, SHOWN_COMPLETIONS)]
    texts: list[str] = []
    question = None
    for completion in completions:
        if completion["question"] != question:
            question = completion["question"]
            texts.append(question)
        rewards = ", ".join(f"{name} {value:g}" for name, value in completion["score"].items())
        texts.append(f"[{rewards}]\n{completion['text']}")
    text = "\n\n".join(texts)
    return f"<pre>{html.escape(printable(text))}</pre>"


def records_up_to(file: Path, step: int) -> list[dict]:
    """The records of a log that are of no later step."""
    records = files.read_jsonl(file, require_steps=True)
    return [record for record in records if record["step"] <= step]


def refuse_taken_name(output_dir: str, run_name: str, remedy: str = "name another") -> None:
    """Raise `UserError` if --run_name belongs to an existing run."""
    if run_name and _is_taken(Path(output_dir) / run_name):
        raise taken_name(output_dir, run_name, remedy)


def taken_name(output_dir: str, run_name: str, remedy: str = "name another") -> UserError:
    """The error where --run_name belongs to an existing run."""
    return UserError(f"--run_name {run_name}: it exists in {output_dir}; {remedy}")


def _is_taken(path: Path) -> bool:
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"{path} is in the way of the run's folder")
    return path.is_dir() and any(path.iterdir())


def plain_name(text: str) -> str:
    """A text as the name of one folder: what is neither a letter, a digit nor one of . _ = + -
    becomes "-", and a colon "."; at most 150 bytes, without a dot or dash in front. A plain name
    stays as it is."""
    # "file:/a/b.csv" becomes "file-a-b.csv", "hf:owner/name:main" "hf.owner-name.main".
    dashed = re.sub(r"[.:]*[^\w.:=+-][^\w=+-]*", "-", text).replace(":", ".")
    short = dashed.lstrip(".-").encode()[:MOST_BYTES].decode(errors="ignore")
    return short or "run"


def numbered_names(name: str) -> Iterator[str]:
    """Yield the name, then NAME-2, NAME-3, and so on without end."""
    yield name
    for number in itertools.count(2):
        yield f"{name}-{number}"


def claim_run_folder(
    output_dir: str,
    run_name: str,
    default: str,
    arguments: Record,
    seeds: Mapping[str, int],
    automatic: Sequence[str] = (),
) -> Path:
    """Make a folder named `run_name`, or `default` as a `plain_name` with the first free number,
    that has an args.json (`write_args`). Two commands never get the same folder. Raises `UserError`
    where `run_name` is taken."""
    if run_name:
        path = Path(output_dir) / run_name
        if not make_run_folder(path, arguments, seeds, automatic):
            raise taken_name(output_dir, run_name)
        return path
    for name in numbered_names(plain_name(default)):
        path = Path(output_dir) / name
        if make_run_folder(path, arguments, seeds, automatic):
            break
    return path


def make_run_folder(
    path: Path, arguments: Record, seeds: Mapping[str, int], automatic: Sequence[str] = ()
) -> bool:
    """Make a folder that has an args.json. Returns False where another run has that folder."""
    if _is_taken(path):
        return False
    try:
        with files.atomic_folder(path) as building:
            write_args(building, arguments, seeds, automatic)
    except OSError as error:
        # Another command may have made it in between. A link to nowhere above it gives the same
        # number.
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and path.exists():
            return False
        raise
    return True


def write_args(
    folder: Path, arguments: Record, seeds: Mapping[str, int], automatic: Sequence[str] = ()
) -> None:
    """Write args.json: the resolved arguments, the names of the flags that were "auto", the seeds,
    the command, `versions()`, and which machine it is."""
    record = {
        "args": dict(arguments),
        AUTO: list(automatic),
        "seeds": dict(seeds),
        "command": list(current_command().words),
        "versions": versions(),
        "machine": f"{platform.node()}: {platform.platform()}, {os.cpu_count()} processors",
    }
    files.write_json(folder / "args.json", record)


def reproducibility(run: Path, setting: Iterable[str]) -> str:
    """What the newest `verify`, in a folder beside a run's or beside its sweep's, showed of the
    run's setting, versions and machine: "bitwise", "to rounding" or "statistical"; "not verified"
    where there is none, or it failed."""
    setting = sorted(setting)
    own_setting = setting_of(files.read_json(run / "args.json"), setting)
    folders: list[Path] = []
    for above in (run.parent, run.parent.parent):
        for page in above.glob("*/verification.html"):
            folder = page.parent
            if not (folder / "args.json").exists():  # a copy for a paper
                continue
            if setting_of(files.read_json(folder / "args.json"), setting) == own_setting:
                folders.append(folder)
    if not folders:
        return "not verified"
    newest = max(folders, key=os.path.getmtime)
    return files.read_json(newest / "summary.json")["reproducibility"]


def setting_of(record: Record, setting: Iterable[str]) -> tuple:
    """What two runs must share for a verification of one to hold for the other: versions, machine,
    and the arguments that `setting` names."""
    arguments = [record["args"].get(name) for name in setting]
    return record["versions"], record.get("machine"), *arguments


def resumed_run_name(output_dir: str, run_name: str, default: str) -> str:
    """`run_name`, or the newest run with the `default` name, as a `plain_name`. Raises `UserError`
    where there is no such run."""
    output = Path(output_dir)
    default = plain_name(default)
    if run_name:
        names = [run_name]
    else:
        suffixes = [path.name.removeprefix(f"{default}-") for path in output.glob(f"{default}-*")]
        numbers = sorted((suffix for suffix in suffixes if suffix.isdigit()), key=int)
        names = [default, *(f"{default}-{number}" for number in numbers)]
    existing = [name for name in names if (output / name / "args.json").exists()]
    if not existing:
        missing = output / names[0]
        raise UserError(f"--resume: there is no run {missing}{did_you_mean_path(missing)}")
    return existing[-1]


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run / f"step_{step:06d}"


def last_whole_step(run: Path, reset_interval: int = 0) -> tuple[int, list[str]]:
    """The newest whole checkpoint's step, or 0, and what is wrong with newer ones. With resets of
    the reference, the checkpoint of the last one must be whole, too. Raises `UserError` where all
    are damaged."""
    damages: list[str] = []
    for step in sorted(_steps(run), reverse=True):
        folder = checkpoint_folder(run, step)
        damage = find_damage(folder)
        reset = last_reset(step, reset_interval)
        if damage is None and 0 < reset < step:
            reference_damage = find_damage(checkpoint_folder(run, reset))
            if reference_damage:
                damage = f"the checkpoint of its reference, of step {reset}: {reference_damage}"
        if damage is None:
            return step, damages
        damages.append(f"{folder} is damaged: {damage}")
    if damages:
        raise UserError(
            f"no checkpoint is whole: {'; '.join(damages)}. Start a new run, or delete these"
            " folders"
        )
    return 0, []


def refuse_lost_checkpoints(run: Path) -> None:
    """Raise `UserError` where a run that has no checkpoint has had one: to begin it anew would
    delete what it has trained and sampled."""
    records = files.read_jsonl(run / "metrics.jsonl", require_steps=True)
    steps = max((record["step"] for record in records), default=0)
    # The step whose checkpoint is the first is logged before it is saved.
    first_saved = files.read_json(run / "args.json")["args"]["save_interval"]
    if steps <= first_saved and not (run / "summary.json").exists():
        return
    further = ""
    if (run / "final").exists():
        further = f", train its model further in another run (--sft_base {run}/final)"
    raise UserError(
        f"--resume: {run} has done {steps} steps, but its checkpoints are gone ({run}/step_*), and"
        " beginning anew would delete what it has trained and sampled. Put a checkpoint"
        f" back{further}, or start a new one under another --run_name"
    )


def put_aside(run: Path, after: int) -> None:
    """Rename the checkpoints after a step, which are damaged, so that they are neither used nor in
    the way."""
    for step in _steps(run):
        if step <= after:
            continue
        folder = checkpoint_folder(run, step)
        for name in numbered_names(f"damaged_{folder.name}"):
            target = folder.with_name(name)
            if not target.exists():
                folder.rename(target)
                break


def save_checkpoint(
    folder: Path,
    policy,
    tokenizer,
    sampled_ahead: Sequence[SampledStep] = (),
    advantage_state: object = None,
) -> None:
    """Write policy, optimiser, tokenizer, rollouts sampled ahead and the state of the estimator of
    advantages to `folder`, which appears once all is on the disk."""
    with files.atomic_folder(folder) as building, write_manifest(building):
        policy.save(building, tokenizer)
        (building / TRAINER).mkdir()
        policy.save_optimizer(building / TRAINER)
        if sampled_ahead:
            files.write_jsonl(building / ROLLOUTS, map(asdict, sampled_ahead))
        if advantage_state is not None:
            _save_advantage_state(building, advantage_state)


def _save_advantage_state(folder: Path, state: object) -> None:
    """Write the state of the estimator of advantages to a checkpoint. Raises `RunStopped` for one
    that it cannot hold."""
    from safetensors.torch import save_file  # imported here, because it loads torch

    tensors: dict[str, Any] = {}
    try:
        tree = split_tensors(state, tensors)
    except TypeError as error:
        raise RunStopped(f"--advantage: {error}") from None
    (folder / ADVANTAGE_STATE).parent.mkdir()
    files.write_json(folder / ADVANTAGE_STATE, {"state": tree})
    if tensors:
        file = folder / ADVANTAGE_TENSORS
        with files.guard_library_write(file):
            save_file(tensors, file)


def load_advantage_state(folder: Path) -> Any:
    """The state of the estimator of advantages in a whole checkpoint; None where it has none."""
    if not (folder / ADVANTAGE_STATE).exists():
        return None
    tensors: dict[str, Any] = {}
    if (folder / ADVANTAGE_TENSORS).exists():
        from safetensors.torch import load_file

        tensors = load_file(folder / ADVANTAGE_TENSORS)
    return join_tensors(files.read_json(folder / ADVANTAGE_STATE)["state"], tensors)


def load_rollouts(folder: Path) -> list[SampledStep]:
    """The rollouts that a whole checkpoint's run had sampled ahead."""
    steps: list[SampledStep] = []
    for record in files.read_jsonl(folder / ROLLOUTS):
        record.pop("restarts", None)  # of older checkpoints
        record["groups"] = [_group(**group) for group in record["groups"]]
        record["report"] = with_current_names(record["report"])
        ids_of_older = record.pop("asked", ())  # the name in older checkpoints
        record["problem_ids"] = tuple(record.get("problem_ids", ids_of_older))
        steps.append(SampledStep(**record))
    return steps


def _group(problem: dict, completions: list[dict], scores: list[Score]) -> Group:
    return Group(
        Problem(**problem),
        tuple(_completion(**fields) for fields in completions),
        tuple(scores),
    )


def _completion(
    prompt_ids: list[int], token_ids: list[int], log_probs: list[float], **others: Any
) -> Completion:
    """A completion of its fields as JSON has them, which knows no tuples."""
    return Completion(tuple(prompt_ids), tuple(token_ids), tuple(log_probs), **others)


def drop_old_checkpoints(
    run: Path, keep: int, spared: Collection[int] = (), reset_interval: int = 0
) -> None:
    """Delete all checkpoints but the newest `keep`, those of the steps `spared`, and those that
    have the weights of these ones' reference; 0 keeps all."""
    if keep == 0:
        return
    steps = sorted(_steps(run))
    kept = {*steps[-keep:], *spared}
    kept |= {last_reset(step, reset_interval) for step in kept}
    for step in steps:
        if step not in kept:
            shutil.rmtree(checkpoint_folder(run, step))


def _steps(run: Path) -> list[int]:
    """The steps of a run's checkpoints, whole or not, in no order."""
    names = [path.name for path in run.glob("step_*")]
    matches = [re.fullmatch(r"step_(\d{6,})", name) for name in names]
    return [int(match[1]) for match in matches if match]
