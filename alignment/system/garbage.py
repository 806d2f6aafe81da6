"""How often Python looks for garbage: for objects that refer to each other and that nothing else
refers to.

A process begins by importing, and what that makes stays until the end. To look through all of it
again and again takes a sixth of a start.
"""

import gc

USUAL = gc.get_threshold()
# So many new container objects before it looks through the youngest, where Python waits for 700.
SELDOM = (50_000, *USUAL[1:])


def collect_seldom() -> None:
    """For a process of ours that starts: until `collect_as_usual`."""
    gc.set_threshold(*SELDOM)


def collect_as_usual() -> None:
    """For a process that has imported what it needs. It changes nothing in a program of the
    user's own, where `collect_seldom` was not called."""
    if gc.get_threshold() == SELDOM:
        gc.set_threshold(*USUAL)
