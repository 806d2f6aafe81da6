"""Micro-batches side by side on a CPU's cores, whose gradients are added in an order that is the same in every run."""

from __future__ import annotations

import functools
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from alignment.core.tokens import Row, cut_by_tokens, packed_tokens
from alignment.policy.packing import ATTENTION

PARALLEL = 2  # each has logits and a gradient of the output head of its own; not measured on more than two cores

Piece = TypeVar("Piece")
Found = TypeVar("Found")


def cut_for_parallel(model: PreTrainedModel, rows: Sequence[Row], most_tokens: int) -> tuple[list[list[int]], int]:
    """Micro-batches (row numbers), and how many are computed at once, with `most_tokens` in all of those.

    That is one where torch has not two threads, or where the rows of a prompt would have to be torn apart for more, or where
    lanes would get in each other's way: on devices that order their work themselves, in models with dropout, which draws from
    one generator, with rotary embeddings whose frequencies follow the longest sequence of a pass, and in those loaded with
    another attention than ours, which is exchanged for a pass (`attention_by_layout`).
    A batch that would fit in one micro-batch is cut nevertheless, so that lanes have equal parts.
    """
    apart = (
        all(parameter.device.type == "cpu" for parameter in model.parameters())
        and model.config._attn_implementation == ATTENTION
        and not any(_holds_state(module) for module in model.modules())
    )
    lanes = min(PARALLEL, torch.get_num_threads()) if apart else 1
    if lanes == 1:
        return cut_by_tokens(rows, most_tokens), 1
    prompt_groups: dict[tuple[int, ...], list[Row]] = defaultdict(list)
    for row in rows:
        prompt_groups[row[0]].append(row)
    largest = max(map(packed_tokens, prompt_groups.values()), default=0)
    if most_tokens < lanes * largest:
        return cut_by_tokens(rows, most_tokens), 1
    even = -(-packed_tokens(rows) // lanes) + largest // 2
    return cut_by_tokens(rows, min(most_tokens // lanes, even)), lanes


def _holds_state(module: torch.nn.Module) -> bool:
    draws = isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0
    rotary = str(getattr(module, "rope_type", ""))  # of a model with several kinds of layers a dict
    return draws or "dynamic" in rotary or "longrope" in rotary


def run_parallel(
    work: Callable[[Piece], Found], pieces: Sequence[Piece], lanes: int, parameters: Iterable[torch.nn.Parameter] = ()
) -> Iterator[Found]:
    """`work` of each piece, in their order, on `lanes` threads at once, which share torch's threads among them.

    Lanes that multiply matrices by themselves keep the cores at work; threads that share every product wait for one another
    after each (benchmarks/README.md). `parameters` are those to whose gradients `work` adds. Gradient mode and autocast are
    a thread's own, so `work` sets what it needs of them.
    """
    if lanes == 1:
        yield from map(work, pieces)
        return
    threads = torch.get_num_threads()
    turns = OrderedAccumulation(parameters)
    try:
        with ThreadPoolExecutor(lanes) as pool:
            for start in range(0, len(pieces), lanes):
                block = pieces[start : start + lanes]
                turns.begin(len(block))
                if len(block) == 1:
                    yield turns.take(0, threads, work, block[0])
                    continue
                shares = [max(1, threads // lanes + (lane < threads % lanes)) for lane in range(lanes)]
                try:
                    found = list(pool.map(turns.take, range(lanes), shares, itertools.repeat(work), block))
                except BaseException:  # of a lane, or a signal's: the pool would wait for lanes that may wait for it
                    turns.stop()
                    raise
                torch.set_num_threads(threads)
                yield from found
    finally:
        torch.set_num_threads(threads)
        turns.close()


class OrderedAccumulation:
    """Holds each lane back before it adds to a gradient, until those before it have: the first additions of all lanes, in the
    lanes' order, then the second ones (a tied output head has two)."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]):
        self.own = threading.local()
        self.changed = threading.Condition()
        self.begin(1)
        self.hooks = []
        for number, parameter in enumerate(each for each in parameters if each.requires_grad):
            self.hooks.append(parameter.register_hook(functools.partial(self._wait, number)))
            self.hooks.append(parameter.register_post_accumulate_grad_hook(functools.partial(self._added, number)))

    def begin(self, lanes: int) -> None:
        """A new block of pieces."""
        self.additions = [Counter() for _ in range(lanes)]
        self.finished = [False] * lanes
        self.stopped = False

    def stop(self) -> None:
        """End every lane at its next gradient."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def take(self, lane: int, threads: int, work: Callable[[Piece], Found], piece: Piece) -> Found:
        """A piece's work, in this thread as a lane."""
        self.own.lane = lane
        try:
            torch.set_num_threads(threads)
            return work(piece)
        finally:  # a lane that fails, or that has nothing to add to some parameter, must not hold up the others
            with self.changed:
                self.finished[lane] = True
                self.changed.notify_all()

    def close(self) -> None:
        """Leave the parameters as they were."""
        for hook in self.hooks:
            hook.remove()

    def _wait(self, number: int, gradient: torch.Tensor) -> None:
        lane = self.own.lane
        before = self.additions[lane][number]

        def others_have_added() -> bool:
            needed = ((other, before + (other < lane)) for other in range(len(self.additions)) if other != lane)
            return all(self.finished[other] or self.additions[other][number] >= times for other, times in needed)

        with self.changed:
            self.changed.wait_for(lambda: self.stopped or others_have_added())
            if self.stopped:
                raise RuntimeError("stopped, since another lane has failed or a signal has come")

    def _added(self, number: int, parameter: torch.nn.Parameter) -> None:
        with self.changed:
            self.additions[self.own.lane][number] += 1
            self.changed.notify_all()
