"""The errors that a command reports to its user as one line with an exit code."""

import io
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from alignment.system.garbage import collect_as_usual, collect_seldom
from alignment.system.signals import Interrupted, deliver_signals, interruptible, received_signal

# What torch says where the host's memory runs out.
HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"


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
    libraries = (f"{PACKAGE}/", sys.prefix, sys.base_prefix, "<")
    our_code_has_begun = False
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        our_code_has_begun = our_code_has_begun or file.startswith(f"{PACKAGE}/")
        is_users = _is_named(frame) or not file.startswith(libraries)
        if our_code_has_begun and is_users:
            place = f"{file}:{line}"
    return place


def _is_named(frame: FrameType) -> bool:
    """Whether a frame is of a package that a flag has named, which may be installed where libraries
    are."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in USERS_PACKAGES


def in_one_line(error: BaseException) -> str:
    """The error's class, the beginning of its message, and where in the user's own code it was
    raised, if there."""
    place = place_in_users_code(error)
    one_line = " ".join(str(error).split())
    text = f"{type(error).__name__}: {one_line[:1000]}"
    if isinstance(error, SystemExit):
        text = f"it has called sys.exit({error})"
    if place:
        text += f" ({place})"
    return text


def failure_of_users_code(error: BaseException) -> UsersCodeFailed | None:
    """What to raise in place of an error that code which a flag names has raised; None of any other
    error, and of memory that runs out, which may not again."""
    if is_out_of_memory(error):
        return None
    if not any(_is_named(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return None
    return UsersCodeFailed(in_one_line(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is Python's of memory, or torch's. Torch is not imported for its own, which
    are known by the name of a device's, and by the words of the host's, a plain RuntimeError."""
    is_devices = type(error).__name__ == "OutOfMemoryError"
    is_hosts = isinstance(error, RuntimeError) and HOST_MEMORY in str(error)
    return isinstance(error, MemoryError) or is_devices or is_hosts


def os_error(error: BaseException) -> BaseException:
    """The operating system's error behind a library's, such as "Connection refused"; `error` itself
    where there is none."""
    innermost = error
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            innermost = cause
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        else:
            cause = cause.__cause__ or cause.__context__
    return innermost


def in_words(error: BaseException) -> str:
    """The error's message; of the operating system's errors that name a path, the path and what is
    wrong with it."""
    path = getattr(error, "filename", None)
    fault = getattr(error, "strerror", None)
    if path and fault:
        return f"{path}: {fault.lower()}"
    return str(error)


def error_for_user(error: BaseException) -> UserError | None:
    """What a user is told of an error: itself if it is a `UserError`; one that says what an OSError
    (such as a full disk, which is the user's to correct), memory that runs out or the user's own
    code has raised, its sys.exit included; None for a fault of ours."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        return UserError(in_words(error))
    if is_out_of_memory(error):
        words = str(error) or "memory ran out"
        if HOST_MEMORY in words:  # what comes before is a line of torch's code
            words = words[words.index(HOST_MEMORY) :]
        two_sentences = ". ".join(words.split(". ")[:2])
        return RunStopped(f"{two_sentences}: docs/devices.md says what to do when memory is short")
    return failure_of_users_code(error)


def signal_behind(error: BaseException) -> Interrupted | None:
    """The signal that has ended a command by `error`, if one has. A library may have made another
    exception of a signal's."""
    if isinstance(error, Interrupted):
        return error
    if isinstance(error, UserError | OSError | SystemExit):
        return None
    return received_signal()


def run_command(main: Callable[[], None]) -> None:
    """Run a command's `main`. What `error_for_user` has words for becomes one line on stderr, with
    exit code 2, or 1 for `RunStopped`; Ctrl-C exits with 130, SIGTERM with 143, and what has not
    been said on the terminal is a line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # also where it is a pipe or a file
    collect_seldom()  # until a model is loaded
    try:
        with interruptible():
            main()
            deliver_signals()  # in case `main` caught the exception of a signal
    except (Interrupted, SystemExit, Exception) as error:
        stop = signal_behind(error)
        if stop is not None:
            if not stop.is_reported:
                print(f"interrupted by {stop}", file=sys.stderr)
            elif sys.stderr.isatty() and not sys.stdout.isatty():
                # Who watches the terminal has not seen the line that went into a file.
                remedy = "the last line of the output says how to go on"
                print(f"interrupted by {stop}; {remedy}", file=sys.stderr)
            sys.exit(128 + stop.signum)
        mistake = error_for_user(error)
        if mistake is None:
            raise
        one_line = " ".join(str(mistake).split())
        print(f"error: {one_line}", file=sys.stderr)
        sys.exit(mistake.code)
    finally:
        collect_as_usual()
