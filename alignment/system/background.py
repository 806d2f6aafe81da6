"""Work in a thread beside a block of code."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager


@contextmanager
def run_in_background(work: Callable[[], None], waiting: AbstractContextManager) -> Iterator[None]:
    """Run `work` in a thread beside the block; after the block, wait for its end inside the context `waiting`. Raises the
    error of either, that of the block if both fail."""
    with ThreadPoolExecutor(1) as thread:
        result = thread.submit(work)
        yield
        with waiting:
            result.result()
