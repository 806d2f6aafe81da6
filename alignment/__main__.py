"""The console command: `alignment train_rl ...` is `python -m alignment.train_rl ...`."""

import os
import runpy
import signal
import sys
from pathlib import Path

from alignment.system.nearest import did_you_mean
from alignment.system.versions import version_line


def command_names() -> list[str]:
    """The modules beside this one that are run, sorted."""
    names = []
    for file in Path(__file__).parent.glob("[!_]*.py"):
        # importing them all would load torch
        if "\n    run_command(main)" in file.read_text(encoding="utf-8"):
            names.append(file.stem)
    return sorted(names)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the command imports, as with `python -m`
    names = command_names()
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(
            "usage: alignment COMMAND [flags], or alignment COMMAND --help. Commands:"
            f" {', '.join(names)}"
        )
        return
    if words[0] == "--version":
        print(version_line())
        return
    command = words[0]
    if command not in names:
        near = did_you_mean(command, names)
        print(
            f"error: {command}: there is no such command; choose one of {', '.join(names)}{near}",
            file=sys.stderr,
        )
        sys.exit(2)
    del sys.argv[0]
    if not sys.flags.safe_path:
        # As `python -m` has it: modules of the working folder, such as a reward of the user's own,
        # in the place of those beside the console script.
        sys.path[0] = os.getcwd()
    runpy.run_module(f"alignment.{command}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
