"""How a vLLM engine leaves its GPU's memory to a trainer and takes it again, and the proof that it
does.

vLLM's sleep mode keeps its memory in a pool of blocks, each with a tag such as "weights" or
"kv_cache". Sleep level 1 copies the blocks of weights to the host's memory; level 2 discards them,
with everything else that was allocated while the model was loaded: of that vLLM saves the model's
buffers alone. Two functions here save the rest, too. The functions that take a `worker` run in each
of an engine's workers, by `collective_rpc`."""

# vLLM is an extra, which a checkout may lack.
# pyright: reportMissingImports=false

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from alignment.sampling.sampler import WeightsDiscarded

# vLLM's tags of what it may wake apart (DEFERRABLE_TAGS in vllm/device_allocator/__init__.py)
WEIGHTS = "weights"
KEYS_AND_VALUES = "kv_cache"
# A number of which each byte is this is NaN, in every type of floating-point numbers.
NOT_A_NUMBER = 0xFF


class Span(NamedTuple):
    """Addresses from `start` on, up to `end`."""

    start: int
    end: int


class Blocks(NamedTuple):
    """The blocks of one tag in a worker's pool."""

    bytes: int
    awake: int  # Bytes of those that take memory of the GPU.


class Engine:
    """vLLM's `LLM`, and which part of its memory it has. Without vLLM's sleep mode it always has
    all."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.sleeps: bool = llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        self.asleep: set[str] = set()
        self.has_weights = True  # All of one version.
        self._discarded = False  # Whether the memory of weights that sleep has no copy.

    def sleep(self, keep_weights: bool) -> None:
        """Give the GPU's memory back. Weights are kept in the host's memory, or else discarded:
        then the engine draws nothing before it has got new ones. Raises RuntimeError if some memory
        stays taken."""
        if not self.sleeps:
            return
        self.has_weights = self.has_weights and keep_weights
        if WEIGHTS in self.asleep:
            return
        if not keep_weights:
            self.llm.collective_rpc(save_all_but_parameters)
        level = 1 if keep_weights else 2
        self.llm.sleep(level=level)
        self.asleep = {WEIGHTS, KEYS_AND_VALUES}
        self._discarded = not keep_weights
        for pool in self.llm.collective_rpc(blocks_by_tag):
            check_sleeping(pool)

    def wake(self, *tags: str) -> None:
        """Take the memory of `tags` again, if they sleep. Discarded weights are NaN until new ones
        have come."""
        woken = self.asleep.intersection(tags)
        if not woken:
            return
        self.llm.wake_up(tags=sorted(woken))
        self.asleep -= woken
        if WEIGHTS in woken and self._discarded:
            self.llm.collective_rpc(restore_all_but_parameters)
            self._discarded = False

    def begin_update(self) -> None:
        """Make room for new weights, without which nothing is drawn from here on."""
        self.has_weights = False
        self.wake(WEIGHTS)

    def end_update(self) -> None:
        self.has_weights = True

    def wake_to_sample(self) -> None:
        """Take all memory. Raises `WeightsDiscarded` if there are no whole weights to sample
        with."""
        if not self.has_weights:
            raise WeightsDiscarded(
                "the engine discarded its weights, and has not got all of the new ones since"
            )
        self.wake(WEIGHTS, KEYS_AND_VALUES)


def check_sleeping(pool: dict[str, Blocks]) -> None:
    """Raise RuntimeError where a worker's pool, by tag, has blocks that are awake, or lacks weights
    or keys and values: memory that is not in the pool is not given back."""
    for tag in (WEIGHTS, KEYS_AND_VALUES):
        if tag not in pool:
            raise RuntimeError(
                f"vLLM sleeps, but its pool holds no {tag}, so that memory is not given back"
            )
    kept = [
        f"{blocks.awake} of the {blocks.bytes} bytes of its {tag}"
        for tag, blocks in pool.items()
        if blocks.awake
    ]
    if kept:
        raise RuntimeError(f"vLLM sleeps, but keeps {', '.join(kept)} on a GPU")


# --- in a worker ----------------------------------------------------------------------------------


def blocks_by_tag(worker) -> dict[str, Blocks]:
    """The bytes of each tag in a worker's pool, and those of blocks that are not asleep. vLLM's
    allocator knows this of each block: the device's free memory would not do, since other processes
    and the driver change it."""
    pool: dict[str, Blocks] = {}
    for block in _allocator().pointer_to_data.values():
        size = block.handle[1]
        awake = 0 if block.is_asleep else size
        before = pool.get(block.tag, Blocks(0, 0))
        pool[block.tag] = Blocks(before.bytes + size, before.awake + awake)
    return pool


def save_all_but_parameters(worker) -> None:
    """Copy what the blocks of weights hold beside the model's parameters to the host's memory. It
    is more than the buffers that vLLM saves itself: the slopes of ALiBi, which are no buffers, and
    the sampler's state of requests, are allocated there, too."""
    worker.synchronize_device()
    spans = gaps(_weight_blocks(), _parameters(worker))
    worker.saved_spans = [(span, _copy_to_host(span)) for span in spans]


def restore_all_but_parameters(worker) -> None:
    """Copy back what was saved, and make NaN of the parameters, so that one which is not sent again
    cannot pass for a weight."""
    runtime = _runtime()
    for span, saved in worker.saved_spans:
        runtime.cudaMemcpy(span.start, saved.data_ptr(), saved.nbytes)
    worker.saved_spans = []
    for span in overlaps(_weight_blocks(), _parameters(worker)):
        runtime.cudaMemset(span.start, NOT_A_NUMBER, span.end - span.start)
    worker.synchronize_device()


def _allocator():
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def _runtime():
    """The CUDA runtime by which vLLM's allocator copies its blocks."""
    from vllm.device_allocator import cumem

    return cumem.libcudart


def _weight_blocks() -> list[Span]:
    blocks = _allocator().pointer_to_data.items()
    return sorted(
        Span(address, address + block.handle[1])
        for address, block in blocks
        if block.tag == WEIGHTS
    )


def _parameters(worker) -> list[Span]:
    """Where the model's parameters are, in order, those that share memory as one."""
    return merged(extent(parameter) for parameter in worker.get_model().parameters())


def _copy_to_host(span: Span) -> torch.Tensor:
    # Page-locked, which is several times as fast. torch keeps such memory for the next time.
    host = torch.empty(
        span.end - span.start, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
    )
    _runtime().cudaMemcpy(host.data_ptr(), span.start, host.nbytes)
    return host


# --- spans of addresses ---------------------------------------------------------------------------


def extent(tensor: torch.Tensor) -> Span:
    """The addresses from a tensor's first number to its last."""
    if not tensor.numel():
        return Span(tensor.data_ptr(), tensor.data_ptr())
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return Span(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same addresses as spans that are in order and do not touch."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        elif span.end > span.start:
            joined.append(span)
    return joined


def overlaps(blocks: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """What `blocks` and `parts` have in common. Each of the two is in order and does not overlap
    itself."""
    common: list[Span] = []
    for block in blocks:
        for part in parts:
            start = max(block.start, part.start)
            end = min(block.end, part.end)
            if end > start:
                common.append(Span(start, end))
    return common


def gaps(blocks: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """What of `blocks` is not in `parts`. Each of the two is in order and does not overlap
    itself."""
    uncovered: list[Span] = []
    for block in blocks:
        start = block.start
        for part in overlaps([block], parts):
            uncovered.append(Span(start, part.start))
            start = part.end
        uncovered.append(Span(start, block.end))
    return [span for span in uncovered if span.end > span.start]
