"""Sleep mode of a vLLM engine that shares its GPU with a trainer: the engine frees its GPU memory
for the trainer, takes it again to sample, and raises an error if some of it was not freed.

In sleep mode vLLM allocates its GPU memory in blocks, each with a tag: "weights" or "kv_cache".
Sleep level 1 copies the blocks of weights to the host's memory. Level 2 discards them, and with
them everything else that was allocated while the model was loaded; vLLM itself saves only the
model's buffers. `save_all_but_parameters` and `restore_all_but_parameters` save the rest.

vLLM's `collective_rpc` runs the functions that take a `worker` in each of the engine's workers."""

# vLLM is an extra, which a checkout may lack.
# pyright: reportMissingImports=false

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from alignment.sampling.sampler import WeightsDiscarded

# vLLM's tags of what it may wake apart (DEFERRABLE_TAGS in vllm/device_allocator/__init__.py)
WEIGHTS = "weights"
KEYS_AND_VALUES = "kv_cache"
# Memory filled with this byte reads as NaN in every floating-point type.
NAN_BYTE = 0xFF


class Span(NamedTuple):
    """The addresses from `start` to `end`, without `end`."""

    start: int
    end: int


class Blocks(NamedTuple):
    """The size of one tag's blocks in a worker."""

    bytes: int
    awake: int  # bytes of the blocks that are on the GPU now


class Engine:
    """vLLM's `LLM`, and which of its memory is asleep: not on the GPU. Without vLLM's sleep mode
    nothing ever sleeps."""

    def __init__(self, llm: Any):
        self.llm = llm
        self.sleeps: bool = llm.llm_engine.vllm_config.model_config.enable_sleep_mode
        self.asleep: set[str] = set()
        # False from the time the weights are discarded, or begin to be replaced, until all of the
        # new ones have arrived.
        self.has_weights = True
        # Whether the weights fell asleep at level 2, so that waking them restores no values.
        self._discarded = False

    def sleep(self, keep_weights: bool) -> None:
        """Free the GPU's memory. The weights are copied to the host's memory, or with
        `keep_weights` false discarded; the engine cannot sample then until it has new ones. Raises
        RuntimeError if some memory is not freed."""
        if not self.sleeps:
            return
        # Also if the weights sleep already, with a copy: the caller says it is out of date.
        if not keep_weights:
            self.has_weights = False
        if WEIGHTS in self.asleep:
            return
        if not keep_weights:
            self.llm.collective_rpc(save_all_but_parameters)
        level = 1 if keep_weights else 2
        self.llm.sleep(level=level)
        self.asleep = {WEIGHTS, KEYS_AND_VALUES}
        self._discarded = not keep_weights
        for blocks_of_worker in self.llm.collective_rpc(blocks_by_tag):
            check_sleeping(blocks_of_worker)

    def wake(self, *tags: str) -> None:
        """Take the memory of those of `tags` that sleep. Discarded weights are NaN until new ones
        arrive."""
        woken = self.asleep.intersection(tags)
        if not woken:
            return
        self.llm.wake_up(tags=sorted(woken))
        self.asleep -= woken
        if WEIGHTS in woken and self._discarded:
            self.llm.collective_rpc(restore_all_but_parameters)
            self._discarded = False

    def begin_update(self) -> None:
        """Take the memory for new weights. The engine cannot sample until `end_update`."""
        self.has_weights = False
        self.wake(WEIGHTS)

    def end_update(self) -> None:
        self.has_weights = True

    def wake_to_sample(self) -> None:
        """Take all memory. Raises `WeightsDiscarded` if the engine has no complete weights."""
        if not self.has_weights:
            raise WeightsDiscarded(
                "the engine discarded its weights, and has not got all of the new ones since"
            )
        self.wake(WEIGHTS, KEYS_AND_VALUES)


def check_sleeping(pool: dict[str, Blocks]) -> None:
    """Raise RuntimeError if a worker, whose blocks `pool` has by tag, has some that are awake. Also
    raises it if there are no blocks of weights or of the KV cache: then vLLM has allocated that
    memory elsewhere, and sleep does not free it."""
    for tag in (WEIGHTS, KEYS_AND_VALUES):
        if tag not in pool:
            raise RuntimeError(
                f"vLLM sleeps, but its pool holds no {tag}, so that memory is not given back"
            )
    kept = []
    for tag, blocks in pool.items():
        if blocks.awake:
            kept.append(f"{blocks.awake} of the {blocks.bytes} bytes of its {tag}")
    if kept:
        raise RuntimeError(f"vLLM sleeps, but keeps {', '.join(kept)} on a GPU")


# --- in a worker ----------------------------------------------------------------------------------


def blocks_by_tag(worker) -> dict[str, Blocks]:
    """The size of a worker's blocks, by tag, from the records of vLLM's allocator. The device's
    free memory would not tell: other processes and the driver change it, too."""
    pool: dict[str, Blocks] = {}
    for block in _allocator().pointer_to_data.values():
        size = _size(block)
        awake = 0 if block.is_asleep else size
        before = pool.get(block.tag, Blocks(0, 0))
        pool[block.tag] = Blocks(before.bytes + size, before.awake + awake)
    return pool


def save_all_but_parameters(worker) -> None:
    """Copy everything in the blocks of weights that is not a parameter to the host's memory. It
    includes tensors that are not buffers, which vLLM does not save: the slopes of ALiBi, and the
    sampler's state of the running requests."""
    worker.synchronize_device()
    spans = gaps(_weight_spans(), _parameter_spans(worker))
    worker.saved_spans = [(span, _copy_to_host(span)) for span in spans]


def restore_all_but_parameters(worker) -> None:
    """Copy back what was saved, and fill the parameters with NaN, so that a parameter that the
    trainer fails to send is noticed."""
    runtime = _runtime()
    for span, saved in worker.saved_spans:
        runtime.cudaMemcpy(span.start, saved.data_ptr(), saved.nbytes)
    worker.saved_spans = []
    for span in overlaps(_weight_spans(), _parameter_spans(worker)):
        runtime.cudaMemset(span.start, NAN_BYTE, span.end - span.start)
    worker.synchronize_device()


def _allocator():
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()


def _runtime():
    """The CUDA runtime by which vLLM's allocator copies its blocks."""
    from vllm.device_allocator import cumem

    return cumem.libcudart


def _size(block: Any) -> int:
    """The bytes of one of the allocator's blocks, whose handle is (device, size, ...)."""
    return block.handle[1]


def _weight_spans() -> list[Span]:
    """The addresses of the blocks of weights, in order."""
    spans = []
    for address, block in _allocator().pointer_to_data.items():
        if block.tag == WEIGHTS:
            spans.append(Span(address, address + _size(block)))
    return sorted(spans)


def _parameter_spans(worker) -> list[Span]:
    """The addresses of the model's parameters, in order. Tied parameters count once."""
    return merged(extent(parameter) for parameter in worker.get_model().parameters())


def _copy_to_host(span: Span) -> torch.Tensor:
    # Copies to page-locked memory are several times as fast, and torch reuses that memory.
    host = torch.empty(
        span.end - span.start, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
    )
    _runtime().cudaMemcpy(host.data_ptr(), span.start, host.nbytes)
    return host


# --- spans of addresses ---------------------------------------------------------------------------


def extent(tensor: torch.Tensor) -> Span:
    """The addresses from a tensor's first element to its last."""
    if not tensor.numel():
        return Span(tensor.data_ptr(), tensor.data_ptr())
    last = 0  # The place of the last element, in elements.
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        last += (size - 1) * stride
    return Span(tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size())


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same addresses, as spans in order of which no two overlap or touch."""
    joined: list[Span] = []
    for span in sorted(spans):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        elif span.end > span.start:
            joined.append(span)
    return joined


def overlaps(blocks: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """The addresses in both `blocks` and `parts`. Each list is in order, and no two of its spans
    overlap."""
    common: list[Span] = []
    for block in blocks:
        for part in parts:
            start = max(block.start, part.start)
            end = min(block.end, part.end)
            if end > start:
                common.append(Span(start, end))
    return common


def gaps(blocks: Sequence[Span], parts: Sequence[Span]) -> list[Span]:
    """The addresses in `blocks` but not in `parts`. Each list is in order, and no two of its spans
    overlap."""
    uncovered: list[Span] = []
    for block in blocks:
        start = block.start
        for part in overlaps([block], parts):
            uncovered.append(Span(start, part.start))
            start = part.end
        uncovered.append(Span(start, block.end))
    return [span for span in uncovered if span.end > span.start]
