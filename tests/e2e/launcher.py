"""Runs commands in forks of a process that has imported everything, and kills them wherever it is told to.

It reads requests as JSON lines: {"argv": [...], "log": file} and, to be killed, "phase" and "nth": the command sends itself
SIGKILL, or "signal", at the nth call that is made in that phase; or "count": a file to write the number of calls in each phase
to; "workers": start a grading worker too; "pause": seconds before each step.
It answers with {"pid": ...}, and with {"pid": ..., "status": ...} when that has ended.
"""

import dataclasses
import functools
import json
import os
import signal
import sys
import time

import matplotlib.pyplot  # noqa: F401  what a run imports late, imported once for all forks
import torch.utils.tensorboard  # noqa: F401

from alignment import train_rl
from alignment.errors import door
from alignment.grading import workers
from alignment.tasks import TASKS

# What a run is in the middle of, by the functions on the stack, innermost first.
PHASES = {
    "save_checkpoint": "checkpoint",
    "drop_old_checkpoints": "checkpoint",
    "save_model": "final",
    "evaluate_if_due": "evaluation",
    "update": "update",
    "sample": "sampling",
    "score_groups": "scoring",
    "load_weights": "weight sync",
    "log_step": "logging",
    "log_completions": "logging",
    "RunFolder": "start",
    "claim_run_folder": "start",
    "resume": "start",
    "report": "report",
}
# Seconds of every start, and nothing that a kill could harm: made once, for all forks.
TASKS["arithmetic"] = dataclasses.replace(TASKS["arithmetic"], problems=functools.cache(TASKS["arithmetic"].problems))
train_rl.encode_prompts = train_rl.plot_learning_curve = lambda *arguments: None

FILE_CALLS = {"open", "write", "mkdir", "rename", "fsync", "close", "serialize_file", "save"}
OURS = os.path.dirname(train_rl.__file__)


def phase_of(frame) -> str | None:
    while frame is not None:
        if frame.f_code.co_name in PHASES:
            return PHASES[frame.f_code.co_name]
        frame = frame.f_back
    return None


def run(request: dict) -> None:
    counts: dict[str, int] = {}

    ours: dict[object, bool] = {}  # by code object: looked up at every call that Python makes

    def on_call(frame, event, argument) -> None:
        if event not in ("call", "c_call"):
            return
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(OURS)
        # Saving is done by libraries; elsewhere our own code's calls are points enough.
        if not ours[code] and (event == "call" or getattr(argument, "__name__", "") not in FILE_CALLS):
            return
        phase = phase_of(frame)
        if phase is None:
            return
        counts[phase] = counts.get(phase, 0) + 1
        if phase == request.get("phase") and counts[phase] == request["nth"]:
            os.kill(os.getpid(), request.get("signal", signal.SIGKILL))

    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["alignment.train_rl", *request["argv"]]
    if request.get("workers"):
        workers.pool().warm_up()
    if pause := request.get("pause"):  # before each step, for who wants to see the steps go by
        ask = train_rl.problems_of_step
        train_rl.problems_of_step = lambda *arguments: time.sleep(pause) or ask(*arguments)
    if "phase" in request or "count" in request:
        sys.setprofile(on_call)
    try:
        door(train_rl.main)
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


def main() -> None:
    for split in ("train", "test"):
        TASKS["arithmetic"].problems(split, "")
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
