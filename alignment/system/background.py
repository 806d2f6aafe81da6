"""TODO."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def run_in_background(work: Callable[[], None], waiting: AbstractContextManager) -> Iterator[None]:
    """Do `work` in a thread beside the block, and wait for its end after it, within `waiting`. Raises what either raises, the
    block's error where both do."""
    with ThreadPoolExecutor(1) as thread:
        working = thread.submit(work)
        yield
        with waiting:
            working.result()
