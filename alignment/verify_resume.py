"""Is resume exact, with your settings on your machine? Train 2k steps straight; k, kill, resume, k; and compare.

uv run -m alignment.verify_resume --preset tiny
"""

import dataclasses
import hashlib
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from alignment.args import RLArgs, VerifyResumeArgs, command_line, configuration, parse, refuse_missing_warm_start
from alignment.system.errors import RunStopped, run_command
from alignment.system.files import read_jsonl
from alignment.system.processes import end_command, last_line, start_command
from alignment.system.terminal import make_console, make_table

TIMINGS = ("seconds", "tokens_per_second")  # prefixes of the names of measured times


def digests(run: Path) -> dict[str, str]:
    """SHA-256 of each part of a finished run that a repetition must reproduce: no timings, no dates of files."""
    from alignment.runs.checkpoint import TRAINER, checkpoint_folder, last_whole_step

    step, _ = last_whole_step(run)
    return {
        "weights": _hash(file.read_bytes() for file in sorted((run / "final").rglob("*.safetensors"))),
        "optimizer": _hash(_tensors(file) for file in sorted((checkpoint_folder(run, step) / TRAINER).glob("*.safetensors"))),
        "metrics": _hash(_untimed(record) for record in read_jsonl(run / "metrics.jsonl")),
        "evaluations": _hash(_untimed(record) for record in read_jsonl(run / "evals.jsonl")),
        "completions": _hash(
            part for file in sorted((run / "completions").iterdir()) for part in (file.name.encode(), file.read_bytes())
        ),
        "bad batches": _hash(file.read_bytes() for file in sorted((run / "bad_batches").glob("*"))),
        "TensorBoard": _hash(_scalars(run / "tensorboard")),
    }


def _hash(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()


def _tensors(file: Path) -> bytes:
    """The names and numbers of a file's tensors; the order of entries in the head of such a file is by chance."""
    from safetensors.numpy import load_file

    return b"".join(name.encode() + array.tobytes() for name, array in sorted(load_file(file).items()))


def _untimed(record: dict) -> bytes:
    return json.dumps({key: value for key, value in record.items() if not key.startswith(TIMINGS)}).encode()


def _scalars(folder: Path) -> Iterable[bytes]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    for tag in sorted(events.Tags()["scalars"]):
        if not tag.rpartition("/")[2].startswith(TIMINGS):
            yield json.dumps([tag, [(event.step, event.value) for event in events.Scalars(tag)]]).encode()


def verify(args: VerifyResumeArgs, console: Console) -> bool:
    """Train both runs, print their digests, delete them, and return whether the digests are the same."""
    refuse_missing_warm_start(args)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    k = args.kill_after
    with tempfile.TemporaryDirectory(prefix=".verify_resume_", dir=args.output_dir) as folder:
        rl = configuration(RLArgs, args, num_steps=2 * k, save_interval=k, run_name="straight", output_dir=folder)
        with console.status(f"training {2 * k} steps straight"):
            _run(rl)
        rl = dataclasses.replace(rl, run_name="killed")
        with console.status(f"training {k} steps, to be killed"):
            _run(rl, kill_in_step=k + 1)
        with console.status(f"training the other {k} steps"):
            _run(dataclasses.replace(rl, resume=True))
        straight, killed = (digests(Path(folder) / name) for name in ("straight", "killed"))
    rows = [
        (name, digest[:16], killed[name][:16], "same" if digest == killed[name] else "[red]differs[/red]")
        for name, digest in straight.items()
    ]
    title = f"{2 * k} steps straight, and {k} + kill + {k}"
    console.print(make_table(title, ("SHA-256 of", "straight", "killed and resumed", ""), rows))
    return straight == killed


def _run(args: RLArgs, kill_in_step: int | None = None) -> None:
    from alignment.runs.checkpoint import checkpoint_folder

    run = Path(args.output_dir) / args.run_name
    log = run.with_suffix(".log").resolve()
    process = start_command("alignment.train_rl", command_line(args), log)
    try:
        while kill_in_step and process.poll() is None:
            if checkpoint_folder(run, kill_in_step - 1).exists():
                return
            time.sleep(0.01)
        process.wait()
    finally:
        end_command(process)
    if kill_in_step:
        raise RunStopped("the run ended before it could be killed; take a larger --kill_after")
    if process.returncode:
        raise RunStopped(f"a run ended with exit code {process.returncode}: {last_line(log)}")


def main() -> None:
    args = parse(VerifyResumeArgs)
    if not verify(args, make_console()):
        raise RunStopped("the resumed run is not the undisturbed one. On GPUs see --deterministic, and docs/faults.md on vLLM")


if __name__ == "__main__":
    run_command(main)
