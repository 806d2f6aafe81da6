"""The one way a user's mistake reaches the user: a single clear line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from alignment.system.signals import Interrupted, deliver_signals, interruptible


class UserError(Exception):
    """Something the user can put right. The message says what was wrong, where, and what to do."""

    code = 2


class RunStopped(UserError):
    """A run that cannot go on, through no mistake in its arguments. The message says why, and what is kept."""

    code = 1


def os_error(error: BaseException) -> BaseException:
    """The operating system's error behind a library's, such as "Connection refused"; `error` itself where there is none."""
    cause, found = error, error
    while cause is not None:
        if isinstance(cause, OSError):
            found = cause
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return found


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. A `UserError` becomes one line on stderr and exit code 2 (`RunStopped`: 1); Ctrl-C exits with
    130, SIGTERM with 143.

    So does what the file system refuses (no permission, no space, a file where a folder should be): its own message
    names the path.
    """
    try:
        with interruptible():
            main()
            deliver_signals()  # where something has swallowed the exception of a signal
    except (UserError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.code if isinstance(error, UserError) else 2)
    except Interrupted as stop:
        print(f"interrupted by {stop}", file=sys.stderr)
        sys.exit(128 + stop.signum)
