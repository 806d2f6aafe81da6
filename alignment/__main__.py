"""The console command: `alignment train_rl ...` is `python -m alignment.train_rl ...`."""

import runpy
import signal
import sys
from pathlib import Path

from alignment.system.errors import UserError, run_command
from alignment.system.registry import did_you_mean


def command_names() -> list[str]:
    """The modules beside this one that are run."""
    files = Path(__file__).parent.glob("[!_]*.py")
    return sorted(file.stem for file in files if "\n    run_command(main)" in file.read_text(encoding="utf-8"))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the command imports, as with `python -m`
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(
            f"usage: alignment COMMAND [flags]; alignment COMMAND --help lists its flags. Commands: {', '.join(command_names())}"
        )
        return
    if words[0] not in command_names():
        run_command(refuse)
    del sys.argv[0]
    runpy.run_module(f"alignment.{words[0]}", run_name="__main__", alter_sys=True)


def refuse() -> None:
    near = did_you_mean(sys.argv[1], command_names())
    raise UserError(f"{sys.argv[1]}: there is no such command; choose one of {', '.join(command_names())}{near}")


if __name__ == "__main__":
    main()
