"""Micro-batches computed side by side on a CPU's cores, whose gradients are added in the same order
in every run."""

import functools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch

from alignment.core.tokens import Row, cut_by_tokens, packed_tokens, rows_by_prompt
from alignment.model.dropout import draws_at_random
from alignment.model.huggingface import PreTrainedModel
from alignment.model.packing import ATTENTION

# micro-batches at once, each with logits and a gradient of the output head of its own; two cores
# were measured
PARALLEL = 2


def cut_for_parallel(
    model: PreTrainedModel, rows: Sequence[Row], most_tokens: int
) -> tuple[list[list[int]], int]:
    """Micro-batches as row numbers, and how many of them are computed at once, with `most_tokens`
    in all of these together. One at a time where torch has a single thread, where several would
    tear the rows of a prompt apart, or where `may_run_in_parallel` says no. A batch that would fit
    in one micro-batch is cut nevertheless, into equal parts."""
    parallel = min(PARALLEL, torch.get_num_threads()) if may_run_in_parallel(model) else 1
    largest = 0  # Tokens of the largest group of rows of one prompt.
    for numbers in rows_by_prompt(rows).values():
        group = [rows[number] for number in numbers]
        largest = max(largest, packed_tokens(group))
    if parallel == 1 or most_tokens < parallel * largest:
        return cut_by_tokens(rows, most_tokens), 1
    even = -(-packed_tokens(rows) // parallel) + largest // 2
    return cut_by_tokens(rows, min(most_tokens // parallel, even)), parallel


def may_run_in_parallel(model: PreTrainedModel) -> bool:
    """Whether two forward passes of a model at once cannot disturb each other. They would on
    devices that order their work themselves, in torch's compiler, and with another attention than
    ours, which is swapped for a pass (`attention_by_layout`). So would modules that hold state:
    dropout draws from one generator, some rotary embeddings follow a pass's longest row."""
    eager_on_cpu = not getattr(model, "is_compiled", False) and all(
        p.device.type == "cpu" for p in model.parameters()
    )
    # dicts where layers differ
    rotary = " ".join(str(getattr(module, "rope_type", "")) for module in model.modules())
    return (
        eager_on_cpu
        and model.config._attn_implementation == ATTENTION
        and not draws_at_random(model)
        and not re.search("dynamic|longrope", rotary)
    )


def run_parallel(
    work: Callable,
    pieces: Sequence,
    parallel: int,
    parameters: Iterable[torch.nn.Parameter] = (),
    stop: Callable = lambda: None,
) -> Iterator:
    """`work` of each piece, in the order of the pieces, `parallel` of them at once in threads that
    share torch's threads. Threads that multiply their own matrices keep the cores busy; those that
    share every product wait for one another after each (benchmarks/README.md). `work` adds to
    gradients of `parameters`, in its thread's own gradient mode and autocast. `stop` is called
    where a piece fails or a signal comes: the other threads' work is waited for."""
    if parallel == 1:
        yield from map(work, pieces)
        return
    threads = torch.get_num_threads()
    order = OrderedAccumulation(parameters)
    try:
        with ThreadPoolExecutor(parallel) as pool:
            for start in range(0, len(pieces), parallel):
                block = pieces[start : start + parallel]
                workers = len(block)
                order.begin(workers)
                try:
                    running = []
                    for worker, piece in enumerate(block):
                        own_threads = share_of_threads(threads, worker, workers)
                        running.append(pool.submit(order.run, worker, own_threads, work, piece))
                    for ended in wait(running, return_when=FIRST_EXCEPTION).done:
                        ended.result()  # raises a worker's error
                except BaseException:
                    # of a worker, or a signal's: the pool would wait for workers that may wait for
                    # it
                    order.stop()
                    stop()
                    raise
                torch.set_num_threads(threads)
                yield from (ended.result() for ended in running)
    finally:
        torch.set_num_threads(threads)
        order.close()


def share_of_threads(threads: int, worker: int, workers: int) -> int:
    """The number of torch's threads that one of several workers gets: as even as may be, and at
    least 1."""
    share, spare = divmod(threads, workers)
    if worker < spare:
        share += 1
    return max(1, share)


class OrderedAccumulation:
    """Orders workers' additions to a gradient: each one's first, in their order, then the second (a
    tied head has two)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.local = threading.local()
        self.changed = threading.Condition()
        self.hooks = []
        self.begin(1)
        for number, parameter in enumerate(p for p in parameters if p.requires_grad):
            self.hooks.append(
                parameter.register_hook(functools.partial(self._wait_for_turn, number))
            )
            self.hooks.append(
                parameter.register_post_accumulate_grad_hook(
                    functools.partial(self._count_addition, number)
                )
            )

    def begin(self, workers: int) -> None:
        """Start a new block of pieces."""
        self.additions: Counter[tuple[int, int]] = Counter()  # of each worker to each parameter
        self.running = set(range(workers))

    def stop(self) -> None:
        """End every worker at its next gradient."""
        with self.changed:
            self.running.clear()
            self.changed.notify_all()

    def run(self, worker: int, threads: int, work: Callable, piece: Sequence[int]):
        """A piece's work, in this thread as worker number `worker`."""
        self.local.worker = worker
        try:
            # without which torch's first operation in a thread takes another thread's number over
            torch.get_num_threads()
            torch.set_num_threads(threads)
            return work(piece)
        finally:
            # a worker that fails, or that has nothing to add to some parameter, must not hold up
            # the others
            with self.changed:
                self.running.discard(worker)
                self.changed.notify_all()

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _wait_for_turn(self, number: int, gradient: torch.Tensor) -> None:
        worker = self.local.worker

        def turn(other):
            return (self.additions[other, number], other)

        with self.changed:
            self.changed.wait_for(lambda: min(self.running, key=turn, default=worker) == worker)
            if worker not in self.running:
                raise RuntimeError("stopped, since another worker has failed or a signal has come")

    def _count_addition(self, number: int, parameter: torch.nn.Parameter) -> None:
        with self.changed:
            self.additions[self.local.worker, number] += 1
            self.changed.notify_all()
