"""The one way a user's mistake reaches the user: a single clear line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable


class UserError(Exception):
    """Something the user can put right. The message says what was wrong, where, and what to do."""


def door(main: Callable[[], None]) -> None:
    """Run a command's `main`. A `UserError` becomes one line on stderr and exit code 2, Ctrl-C exits with 130.

    So does what the file system refuses (no permission, no space, a file where a folder should be): its own message
    names the path.
    """
    try:
        main()
    except (UserError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
