"""The errors that a command reports to its user as one line with an exit code."""

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from alignment.system.signals import Interrupted, deliver_signals, interruptible, received_signal


class UserError(Exception):
    """A mistake that the user can correct. The message names the mistake, its place and the
    remedy."""

    code = 2


class RunStopped(UserError):
    """A run that cannot continue although its arguments are right. The message gives the reason and
    what is saved."""

    code = 1


class UsersCodeFailed(RunStopped):
    """Code of the user's own, which a flag names, has failed while a run was under way: another
    attempt would fail alike."""

    code = 2


PACKAGE = Path(__file__).parents[1]
# Top-level names of modules that flags have named (`registry.import_object`).
USERS_PACKAGES: set[str] = set()


def place_in_users_code(error: BaseException) -> str:
    """FILE:LINE of the innermost line of the user's own code that our code has called; empty where
    the error came from none."""
    frames = list(traceback.walk_tb(error.__traceback__))
    ours = [frame.f_code.co_filename.startswith(f"{PACKAGE}/") for frame, _ in frames]
    called = frames[ours.index(True) :] if True in ours else []
    libraries = (f"{PACKAGE}/", sys.prefix, sys.base_prefix, "<")
    own = [
        each
        for each in called
        if _is_named(each) or not each[0].f_code.co_filename.startswith(libraries)
    ]
    return f"{own[-1][0].f_code.co_filename}:{own[-1][1]}" if own else ""


def _is_named(frame_and_line: tuple) -> bool:
    """Whether a frame is of a package that a flag has named, which may be installed where libraries
    are."""
    return frame_and_line[0].f_globals.get("__name__", "").partition(".")[0] in USERS_PACKAGES


def in_one_line(error: BaseException) -> str:
    """The error's class, the beginning of its message, and where in the user's own code it was
    raised, if there."""
    place = place_in_users_code(error)
    said = f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}"
    if isinstance(error, SystemExit):
        said = f"it has called sys.exit({error})"
    return said + (f" ({place})" if place else "")


def failure_of_users_code(error: BaseException) -> UsersCodeFailed | None:
    """What to raise in place of an error that code which a flag names has raised; None of any other
    error, and of memory that runs out, which may not again."""
    ran_out = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    named = any(map(_is_named, traceback.walk_tb(error.__traceback__)))
    return UsersCodeFailed(in_one_line(error)) if named and not ran_out else None


def os_error(error: BaseException) -> BaseException:
    """The operating system's error behind a library's, such as "Connection refused"; `error` itself
    where there is none."""
    cause, found = error, error
    while cause is not None:
        if isinstance(cause, OSError):
            found = cause
        cause = (
            cause.exceptions[0]
            if isinstance(cause, BaseExceptionGroup)
            else cause.__cause__ or cause.__context__
        )
    return found


def in_words(error: BaseException) -> str:
    """The error's message; of the operating system's errors that name a path, the path and what is
    wrong with it."""
    path, fault = getattr(error, "filename", None), getattr(error, "strerror", None)
    return f"{path}: {fault.lower()}" if path and fault else str(error)


def exit_for_users_code(error: BaseException) -> None:
    """Print one line and exit where code of the user's own has raised `error`; else do nothing."""
    failure = failure_of_users_code(error)
    if failure is not None:
        print(f"error: {failure}", file=sys.stderr)
        sys.exit(failure.code)


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. `UserError` and OSError become one line on stderr and exit code 2,
    `RunStopped` exit code 1; Ctrl-C exits with 130, SIGTERM with 143. An OSError (such as a full
    disk) is the user's to correct: it names the path. So is an error that code of the user's own
    raises, and its sys.exit: it names the line."""
    try:
        with interruptible():
            main()
            deliver_signals()  # in case `main` caught the exception of a signal
    except (UserError, OSError) as error:
        print(f"error: {' '.join(in_words(error).split())}", file=sys.stderr)
        sys.exit(error.code if isinstance(error, UserError) else 2)
    except SystemExit as error:
        exit_for_users_code(error)
        raise
    except (Interrupted, Exception) as error:
        # a library may make another of it
        stop = error if isinstance(error, Interrupted) else received_signal()
        # torch's, which is not imported for it
        if stop is None and type(error).__name__ == "OutOfMemoryError":
            said = ". ".join(str(error).split(". ")[:2])
            print(
                f"error: {said}: docs/devices.md says what to do when memory is short",
                file=sys.stderr,
            )
            sys.exit(1)
        if stop is None:
            exit_for_users_code(error)
            raise
        print(f"interrupted by {stop}", file=sys.stderr)
        sys.exit(128 + stop.signum)
