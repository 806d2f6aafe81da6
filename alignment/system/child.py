"""The first code that runs in a child process of `processes.py`, which starts this file by its
path: child.py PARENT call MODULE:FUNCTION DESCRIPTOR, or child.py PARENT run MODULE FLAG ..."""

import os
import pkgutil
import runpy
import signal
import sys
import threading
import time


def end_with_parent(parent: int) -> None:
    """Kill this process group as soon as the process `parent` has ended."""
    # The end of file on a pipe is no sign: forks of the parent may hold the pipe open.
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    parent, action, target, *arguments = sys.argv[1:]
    watch = threading.Thread(target=end_with_parent, args=(int(parent),), daemon=True)
    watch.start()  # before imports, which take long
    if action == "run":
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        sys.argv = ["-m", *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # Job managers signal every process of a job; the parent ends this one.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        pkgutil.resolve_name(target)(int(arguments[0]))


if __name__ == "__main__":
    main()
