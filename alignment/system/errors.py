"""The errors that a command reports to its user as one line with an exit code."""

import sys
from collections.abc import Callable

from alignment.system.signals import Interrupted, deliver_signals, interruptible, received_signal


class UserError(Exception):
    """A mistake that the user can correct. The message names the mistake, its place and the remedy."""

    code = 2


class RunStopped(UserError):
    """A run that cannot continue although its arguments are right. The message gives the reason and what is saved."""

    code = 1


def os_error(error: BaseException) -> BaseException:
    """The operating system's error behind a library's, such as "Connection refused"; `error` itself where there is none."""
    cause, found = error, error
    while cause is not None:
        if isinstance(cause, OSError):
            found = cause
        cause = cause.exceptions[0] if isinstance(cause, BaseExceptionGroup) else cause.__cause__ or cause.__context__
    return found


def in_words(error: BaseException) -> str:
    """The error's message; of the operating system's errors that name a path, the path and what is wrong with it."""
    path, fault = getattr(error, "filename", None), getattr(error, "strerror", None)
    return f"{path}: {fault.lower()}" if path and fault else str(error)


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. `UserError` and OSError become one line on stderr and exit code 2, `RunStopped` exit code 1;
    Ctrl-C exits with 130, SIGTERM with 143. An OSError (such as a full disk) is the user's to correct: it names the path."""
    try:
        with interruptible():
            main()
            deliver_signals()  # in case `main` caught the exception of a signal
    except (UserError, OSError) as error:
        print(f"error: {' '.join(in_words(error).split())}", file=sys.stderr)
        sys.exit(error.code if isinstance(error, UserError) else 2)
    except (Interrupted, Exception) as error:
        stop = error if isinstance(error, Interrupted) else received_signal()  # a library may make another of it
        if stop is None:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is not imported for it
                raise
            said = ". ".join(str(error).split(". ")[:2])
            print(f"error: {said}: docs/devices.md says what to do when memory is short", file=sys.stderr)
            sys.exit(1)
        print(f"interrupted by {stop}", file=sys.stderr)
        sys.exit(128 + stop.signum)
