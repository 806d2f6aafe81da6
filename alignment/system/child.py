"""The first code that runs in a child process of `processes.py`, which starts this file as

    child.py PARENT call MODULE:FUNCTION DESCRIPTOR  to call the function with a pipe's descriptor
    child.py PARENT run MODULE FLAG ...              to run the module as `python -m` does

PARENT is the process id of the parent."""

import os
import pkgutil
import runpy
import signal
import sys
import threading
import time


def end_with_parent(parent: int) -> None:
    """Wait until the process with the id `parent` ends, then kill this process group."""
    # A pipe from the parent would not tell: the parent's forks may hold it open.
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    parent, action, target, *arguments = sys.argv[1:]
    watch = threading.Thread(target=end_with_parent, args=(int(parent),), daemon=True)
    watch.start()  # before imports, which take long
    from alignment.system.garbage import collect_seldom

    collect_seldom()  # until what serves or trains has begun
    if action == "run":
        sys.path.insert(0, os.getcwd())  # as `python -m` does
        sys.argv = ["-m", *arguments]
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        # To end a job, job managers signal each of its processes. This one leaves its end to the
        # parent.
        for ignored_signal in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored_signal, signal.SIG_IGN)
        function = pkgutil.resolve_name(target)
        descriptor = int(arguments[0])
        function(descriptor)


if __name__ == "__main__":
    main()
