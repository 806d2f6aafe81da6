"""Runs commands in forks of a process that has imported everything, and kills them wherever it is
told to.

It reads requests as JSON lines: {"argv": [...], "log": file} and, to be killed, "phase" and "nth":
the command sends itself SIGKILL, or "signal", at the nth call that is made in that phase; or
"count": a file to write the number of calls in each phase to; "workers": start a grading worker
too; "file_limit": bytes that a file may have; "pause": seconds before each step; "path": a folder
to import from. It answers with {"pid": ...}, and with {"pid": ..., "status": ...} when that has
ended.
"""

import contextlib
import dataclasses
import functools
import gc
import io
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  what a run imports late, imported once for all forks
import torch.utils.tensorboard  # noqa: F401

from alignment import train_rl
from alignment.builders import evaluations, training, warm_start
from alignment.data.embedded import build_tiny
from alignment.data.tasks import TASKS
from alignment.rewards.grading.cascade import WORKERS
from alignment.rewards.rules import Reward
from alignment.rollouts.source import RolloutSource
from alignment.runs import run as runs
from alignment.runs import run_folder, summary
from alignment.runs.run_folder import RunFolder
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import run_command
from alignment.training import update as updates

# What a run is in the middle of, by the functions it is in; of two, the inner one says.
PHASES = {
    (run_folder, "save_checkpoint"): "checkpoint",
    (run_folder, "drop_old_checkpoints"): "checkpoint",
    (runs.Run, "finish"): "final",
    (evaluations, "evaluate_vllm"): "evaluation",
    (updates, "update"): "update",
    (TransformersSampler, "sample"): "sampling",
    (Reward, "score"): "scoring",
    (TransformersSampler, "load_weights"): "weight sync",
    (RunFolder, "log_step"): "logging",
    (RunFolder, "log_eval"): "logging",
    (RunFolder, "log_completions"): "logging",
    (RunFolder, "__init__"): "start",
    (run_folder, "claim_run_folder"): "start",
    (runs.Run, "resume"): "start",
    (runs, "write_summary"): "report",
}
# Seconds of every start, and nothing that a kill could harm: made once, for all forks.
TASKS["arithmetic"] = dataclasses.replace(
    TASKS["arithmetic"], problems=functools.cache(TASKS["arithmetic"].problems)
)
summary.plot_learning_curve = lambda *arguments: None
for module in (training, warm_start):
    module.encode_problems = lambda *arguments: [[0] * 40]  # all of them fit

FILE_CALLS = {"open", "write", "mkdir", "rename", "fsync", "close", "serialize_file", "save"}
OURS = os.path.dirname(train_rl.__file__)


class Inside(threading.local):
    """The phases that a thread is in, the inner one last."""

    def __init__(self):
        self.phases: list[str | None] = [None]


def at_every_call(wanted: Container[str], then: Callable[[str], None]) -> None:
    """From here on call `then` with the phase at each call that is made in a phase that is
    wanted."""
    inside = Inside()
    ours: dict[object, bool] = {}  # by code object: looked up at every call that Python makes

    def on_call(frame, event, argument) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(OURS)
        # Saving is done by libraries; elsewhere our own code's calls are points enough.
        if ours[code] or (event == "c_call" and getattr(argument, "__name__", "") in FILE_CALLS):
            then(inside.phases[-1])

    def follow() -> None:
        sys.setprofile(on_call if inside.phases[-1] in wanted else None)

    def following(function: Callable, phase: str) -> Callable:
        @functools.wraps(function)
        def call(*arguments, **named):
            inside.phases.append(phase)
            follow()
            try:
                return function(*arguments, **named)
            finally:
                inside.phases.pop()
                follow()

        return call

    for (owner, name), phase in PHASES.items():
        setattr(owner, name, following(getattr(owner, name), phase))


def run(request: dict) -> None:
    counts: Counter[str] = Counter()

    def on_call(phase: str) -> None:
        counts[phase] += 1
        if phase == request.get("phase") and counts[phase] == request["nth"]:
            os.kill(os.getpid(), request.get("signal", signal.SIGKILL))

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["alignment.train_rl", *request["argv"]]
    if folder := request.get("path"):
        sys.path.insert(0, folder)
    if limit := request.get("file_limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if request.get("workers"):
        WORKERS.warm_up()
    if pause := request.get("pause"):  # before each step, for who wants to see the steps go by
        sample_step = RolloutSource.sample_step
        RolloutSource.sample_step = lambda *arguments: time.sleep(pause) or sample_step(*arguments)
    if "phase" in request or "count" in request:
        at_every_call([request["phase"]] if "phase" in request else set(PHASES.values()), on_call)
    try:
        run_command(train_rl.main)
    except SystemExit as stop:
        code = stop.code or 0
    else:
        code = 0
    finally:
        sys.setprofile(None)
        if "count" in request:
            with open(request["count"], "w") as file:
                json.dump(counts, file)
    sys.stdout.flush()
    os._exit(code)


def run_once(flags: list[str]) -> None:
    """A run in this process: what a run loads late and einx compiles, every fork then has."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        build_tiny(Path(folder))
        sys.argv = [
            "alignment.train_rl",
            *flags,
            "--sft_base",
            folder,
            "--output_dir",
            f"{folder}/output",
        ]
        train_rl.main()


def main() -> None:
    for split in ("train", "test"):
        TASKS["arithmetic"].problems(split, "")
    run_once(sys.argv[1:])
    # No fork looks through all that is imported for garbage, and so copies it.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(request)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"pid": pid, "status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main()
