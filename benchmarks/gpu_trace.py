"""The operators that a pass would start on a GPU, counted on a machine that has none.

Tensors of floating point are fake (`FakeTensorMode`): they have a shape, a type and a device, and
no data. They are on a numbered CPU, which torch's engine accepts in a backward pass where it would
ask a driver about a fake GPU, and they say of themselves that they are on a GPU, so that the
product takes the paths that it takes there. Token ids and masks of the host stay real, since the
host reads them.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoModelForCausalLM, PretrainedConfig

from alignment.model import flash_attention, log_probs, parallel_micro_batches
from alignment.model.huggingface import PreTrainedModel
from alignment.model.packing import ATTENTION

CARD = torch.device("cpu:1")
"""The device that stands for a GPU."""

# Classes of kernels; each reaches a share of its own of what the card can do.
PRODUCTS = "products"
FLASH_FORWARD = "flash attention, forward"
FLASH_BACKWARD = "flash attention, backward"
EFFICIENT_FORWARD = "efficient attention, forward"
EFFICIENT_BACKWARD = "efficient attention, backward"
ELEMENTWISE = "elementwise"
STRIDED = "elementwise, mixed types or strides"
REDUCTIONS = "reductions"
GATHERS = "gathers"
INDEX_ADD = "index_add"
COPIES = "copies and casts"
FUSED = "fused"
READ = "the host waits"
"""No kernel: the host reads a result, for which it waits."""
CLASSES = (
    PRODUCTS,
    FLASH_FORWARD,
    FLASH_BACKWARD,
    EFFICIENT_FORWARD,
    EFFICIENT_BACKWARD,
    ELEMENTWISE,
    STRIDED,
    REDUCTIONS,
    GATHERS,
    INDEX_ADD,
    COPIES,
    FUSED,
)


@dataclass(frozen=True)
class Kernel:
    """One operator's work on the card."""

    name: str
    kind: str
    """One of `CLASSES`, or `READ`."""
    operations: float = 0.0
    """Multiplications and additions of matrix products."""
    bytes: float = 0.0
    """Read and written."""
    launches: int = 1


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes that a kernel moves to read or write a tensor once; what is expanded counts once."""
    numbers = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            numbers *= size
    return numbers * tensor.itemsize


@dataclass(frozen=True)
class Call:
    """One call of an operator of `aten`."""

    name: str
    """Without `aten::` and overload."""
    arguments: Mapping[str, Any]
    """By their names in the operator's schema."""
    read: tuple[torch.Tensor, ...]
    written: tuple[torch.Tensor, ...]
    sources: Mapping[torch.Tensor, torch.Tensor]
    """Of whole numbers on the card, those of the host that they are copies of."""

    def numbers(self, name: str) -> torch.Tensor:
        """The whole numbers of an argument that is a copy of the host's."""
        return self.sources[self.arguments[name]]

    def kernel(self, kind: str, **work: float) -> Kernel:
        """A kernel that reads what the call reads, and writes what it writes, once, unless `work`
        says otherwise."""
        moved = sum(map(bytes_of, self.read)) + sum(map(bytes_of, self.written))
        return Kernel(self.name, kind, **{"bytes": moved, **work})  # pyright: ignore

    def pass_over(self, name: str, kind: str, times: float) -> Kernel:
        """A kernel that reads or writes the first tensor so many times."""
        return Kernel(f"{self.name}: {name}", kind, bytes=times * bytes_of(self.read[0]))


Count = Callable[[Call], Sequence[Kernel]]


# --- what each operator does ----------------------------------------------------------------------


def count_product(call: Call) -> Sequence[Kernel]:
    """A product [n, k] x [k, m], a batch of them, or one that is added to a third matrix: 2 n k m
    operations."""
    matrices = [tensor for tensor in call.read if tensor.ndim >= 2]
    left, right = matrices[-2:]
    return [call.kernel(PRODUCTS, operations=2.0 * left.numel() * right.shape[-1])]


def count_elementwise(call: Call) -> Sequence[Kernel]:
    """One kernel; torch's fast one is for tensors of one type that lie alike in memory."""
    tensors = [tensor for tensor in (*call.read, *call.written) if tensor.ndim > 0]
    shapes = {tensor.shape for tensor in tensors}
    strides = {tensor.stride() for tensor in tensors}
    types = {tensor.dtype for tensor in tensors}
    is_alike = len(shapes) == 1 and len(strides) == 1 and len(types) == 1
    kind = STRIDED
    if is_alike and all(tensor.is_contiguous() for tensor in tensors):
        kind = ELEMENTWISE
    return [call.kernel(kind)]


def count_reduction(call: Call) -> Sequence[Kernel]:
    return [call.kernel(REDUCTIONS)]


def count_copy(call: Call) -> Sequence[Kernel]:
    return [call.kernel(COPIES)]


def count_fill(call: Call) -> Sequence[Kernel]:
    """What is filled is written, not read."""
    return [call.kernel(COPIES, bytes=sum(map(bytes_of, call.written)))]


def count_gather(call: Call) -> Sequence[Kernel]:
    """Reads as much as it writes, and the places."""
    places = [tensor for tensor in call.read[1:] if not tensor.is_floating_point()]
    moved = 2 * sum(map(bytes_of, call.written)) + sum(map(bytes_of, places))
    return [call.kernel(GATHERS, bytes=moved)]


def count_index_add(call: Call) -> Sequence[Kernel]:
    """Reads what is added and its places; reads and writes these places of the sum."""
    total, places, added = call.read
    moved = bytes_of(places) + bytes_of(added) + 2 * added.numel() * total.itemsize
    return [call.kernel(INDEX_ADD, bytes=moved)]


def count_scatter(call: Call) -> Sequence[Kernel]:
    """As `count_index_add`, of single numbers in place; elsewhere after a copy of the whole."""
    total, places, added = call.read
    moved = bytes_of(places) + bytes_of(added) + 2 * added.numel() * total.itemsize
    scatter = call.kernel(GATHERS, bytes=moved)
    if call.name.endswith("_"):
        return [scatter]
    return [call.pass_over("copy", COPIES, 2), scatter]


def count_embedding_backward(call: Call) -> Sequence[Kernel]:
    """Zeros for each token's vector, then sums of sorted ids."""
    zeros = sum(map(bytes_of, call.written))
    gradient = bytes_of(call.read[0])
    return [
        Kernel(f"{call.name}: zeros", COPIES, bytes=zeros),
        Kernel(f"{call.name}: sort and sum", GATHERS, bytes=2 * gradient, launches=12),
    ]


def count_part_backward(call: Call) -> Sequence[Kernel]:
    """Zeros, into which a slice's gradient is copied."""
    return [
        Kernel(f"{call.name}: zeros", COPIES, bytes=sum(map(bytes_of, call.written))),
        Kernel(f"{call.name}: copy", COPIES, bytes=2 * bytes_of(call.read[0])),
    ]


def count_log_sum_exp(call: Call) -> Sequence[Kernel]:
    """Torch takes the highest, subtracts it, exponentiates in place, sums, and takes the
    logarithm."""
    rows = [Kernel(f"{call.name}: of rows", ELEMENTWISE, bytes=2 * bytes_of(call.written[0]))] * 4
    return [
        call.pass_over("amax", REDUCTIONS, 1),
        call.pass_over("sub", STRIDED, 2),
        call.pass_over("exp_", ELEMENTWISE, 2),
        call.pass_over("sum", REDUCTIONS, 1),
        *rows,
    ]


def attention_products(q: torch.Tensor, keys: int, causal: bool) -> float:
    """Operations of queries [rows, heads, Q, D] by so many keys each, and of weights by values; of
    a causal rule half."""
    operations = 4.0 * q.numel() * keys
    if causal:
        return operations / 2
    return operations


def count_efficient_attention(call: Call) -> Sequence[Kernel]:
    q, k, *_ = call.read
    causal = call.arguments["is_causal"]
    operations = attention_products(q, k.shape[2], causal)
    return [call.kernel(EFFICIENT_FORWARD, operations=operations)]


def count_efficient_attention_backward(call: Call) -> Sequence[Kernel]:
    """Five products where forward has two; and dO . O of each query first."""
    _, q, k, *_ = call.read
    causal = call.arguments["is_causal"]
    operations = 2.5 * attention_products(q, k.shape[2], causal)
    return [
        call.kernel(EFFICIENT_BACKWARD, operations=operations),
        Kernel(f"{call.name}: delta", STRIDED, bytes=2 * bytes_of(q)),
        Kernel(f"{call.name}: its sum", REDUCTIONS, bytes=bytes_of(q)),
        Kernel(f"{call.name}: workspace", COPIES, bytes=4.0 * q.numel()),
    ]


def flash_products(call: Call) -> float:
    """Operations of the runs of a call of the flash kernel, each of whose queries see a run of
    keys, in a causal call half of it."""
    q = call.arguments["query"]
    pairs = call.numbers("cum_seq_q").diff() * call.numbers("cum_seq_k").diff()
    operations = 4.0 * q.shape[1] * q.shape[2] * float(pairs.sum())
    if call.arguments["is_causal"]:
        return operations / 2
    return operations


def count_flash(call: Call) -> Sequence[Kernel]:
    return [call.kernel(FLASH_FORWARD, operations=flash_products(call))]


def count_flash_backward(call: Call) -> Sequence[Kernel]:
    """Five products where forward has two. The main kernel's helpers are in the time that was
    measured of it: dO . O, with zeros for an fp32 sum of the queries' gradients; the cast of that
    sum; and where heads of queries share keys, sums over these heads, of keys and of values."""
    q = call.arguments["query"]
    k = call.arguments["key"]
    launches = 3
    helpers = 2.0 * bytes_of(q) + 2 * 4.0 * q.numel() + bytes_of(q)
    if q.shape[1] != k.shape[1]:
        launches += 2
        helpers += 2 * 2.0 * bytes_of(k) * q.shape[1] / k.shape[1]
    moved = call.kernel(FLASH_BACKWARD).bytes + helpers
    operations = 2.5 * flash_products(call)
    return [Kernel(call.name, FLASH_BACKWARD, operations, moved, launches)]


COUNTS: dict[str, Count] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm", "addmm_", "baddbmm_"), count_product),
    **dict.fromkeys(("copy_", "_to_copy", "clone", "cat", "constant_pad_nd"), count_copy),
    **dict.fromkeys(
        (
            "fill_",
            "zero_",
            "zeros",
            "ones",
            "full",
            "zeros_like",
            "ones_like",
            "full_like",
            "new_zeros",
            "new_ones",
            "new_full",
            "arange",
        ),
        count_fill,
    ),
    **dict.fromkeys(
        ("sum", "mean", "amax", "max", "min", "any", "all", "_softmax", "_log_softmax", "cumsum"),
        count_reduction,
    ),
    **dict.fromkeys(("index_select", "gather", "embedding", "index"), count_gather),
    "index_add_": count_index_add,
    "index_copy": count_scatter,
    "scatter_add_": count_scatter,
    "embedding_dense_backward": count_embedding_backward,
    "slice_backward": count_part_backward,
    "select_backward": count_part_backward,
    "logsumexp": count_log_sum_exp,
    "_flash_attention_forward": count_flash,
    "_flash_attention_backward": count_flash_backward,
    "_scaled_dot_product_efficient_attention": count_efficient_attention,
    "_scaled_dot_product_efficient_attention_backward": count_efficient_attention_backward,
}
"""Operator -> its kernels. Every other one is a single elementwise kernel."""

NO_KERNEL = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "lift_fresh",
}
"""Operators beside views that start nothing."""
FACTORIES = (torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.ones)
"""Operators that make tensors of floating point from nothing, unless they are told another type."""

READS = {"_to_copy", "copy_", "_local_scalar_dense"}
"""Operators by which the host reads what is on the card."""


# --- the card that is none ------------------------------------------------------------------------


def is_on_card(tensor: torch.Tensor) -> bool:
    """What `tensor.is_cuda` says within a `traced_card`."""
    return tensor.device == CARD


class CardMemory:
    """Bytes of the tensors on the card, of those that live at a time."""

    def __init__(self):
        self.live: Counter[str] = Counter()
        """What made tensors -> their bytes."""
        self.peak: Counter[str] = Counter()
        """The same at the instant of most bytes."""
        self._storages: dict[int, weakref.ref] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Count a tensor that `name` made, as long as it lives; a view has its base's bytes."""
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._storages:
            return
        label = f"{name}, {str(tensor.dtype).removeprefix('torch.')}"
        size = storage.nbytes()

        def forget(reference: weakref.ref) -> None:
            del self._storages[number]
            self.live[label] -= size

        self._storages[number] = weakref.ref(storage, forget)
        self.live[label] += size

    def note_peak(self) -> None:
        """Keep what lives, if it has more bytes than ever."""
        if self.live.total() > self.peak.total():
            self.peak = Counter(self.live)


class Trace(TorchDispatchMode):
    """Makes tensors of floating point fake, wherever they are, and every tensor on `CARD`; keeps
    the kernels of each operator that has one there, and the bytes of what lives."""

    def __init__(self, fake_mode: FakeTensorMode):
        super().__init__()
        self.fake_mode = fake_mode
        self.kernels: list[Kernel] = []
        self.memory = CardMemory()
        self.is_paused = False
        self.sources = WeakIdKeyDictionary()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A block whose operators are not counted."""
        before = self.is_paused
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        takes_fakes = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        dtype = kwargs.get("dtype") or torch.float32
        makes_floats = function.overloadpacket in FACTORIES and dtype.is_floating_point
        if not (takes_fakes or makes_floats or CARD in leaves):
            return function(*args, **kwargs)
        with self.fake_mode:
            result = function(*args, **kwargs)
        if tensors and not takes_fakes:
            # Whole numbers, or a mask, go from the host to the card.
            self.sources[result] = args[0]
        self._count(function, args, kwargs, result)
        self._hold(function, result)
        return result

    def _hold(self, function, result) -> None:
        """Count the memory of an operator's results. What a fused function makes on its way is not
        in the card's memory."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and is_on_card(tensor):
                self.memory.add(function._schema.name.partition("::")[2], tensor)
        if not self.is_paused:
            self.memory.note_peak()

    def _count(self, function, args, kwargs, result) -> None:
        """Keep the kernels of an operator on the card."""
        name = function._schema.name.partition("::")[2]
        if self.is_paused or function.is_view or name in NO_KERNEL:
            return
        call = make_call(function, name, args, kwargs, result, self.sources)
        is_result = any(is_on_card(tensor) for tensor in call.written)
        reads = name in READS and any(is_on_card(tensor) for tensor in call.read)
        if reads and not is_result:
            self.kernels.append(Kernel(name, READ, launches=0))
        elif is_result:
            count = COUNTS.get(name, count_elementwise)
            self.kernels += count(call)


def make_call(function, name: str, args, kwargs, result, sources) -> Call:
    """What an operator reads and writes. An argument named `out` and the target of a copy are
    written alone."""
    arguments = {}
    read = []
    written = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for place, argument in enumerate(function._schema.arguments):
        value = kwargs.get(argument.name, argument.default_value)
        if place < len(args):
            value = args[place]
        arguments[argument.name] = value
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_target = is_written and (argument.kwarg_only or name in ("copy_", "fill_", "zero_"))
        if not is_target:
            read += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return Call(name, arguments, tuple(read), tuple(written), sources)


def tensor_on_card(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.tensor`, which itself forgets the number of a CPU."""

    def tensor(data, *, device=None, **options) -> torch.Tensor:
        made = make(data, **options)
        if device is None:
            return made
        if made.is_floating_point():
            return torch.empty(made.shape, dtype=made.dtype, device=device)
        return made.to(device)

    return tensor


@contextmanager
def traced_card(flash: bool = True) -> Iterator[Trace]:
    """A block in which tensors are fake, and operators on `CARD` are counted. Micro-batches follow
    one another there, and logits come in the pieces of a GPU, which has no `LOGITS_IN_CACHE`.
    `flash`: whether the self-check accepts flash kernels, which computes nothing there."""
    trace = Trace(FakeTensorMode(allow_non_fake_inputs=True))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(parallel_micro_batches, "PARALLEL", 1))
        stack.enter_context(mock.patch.object(log_probs, "LOGITS_IN_CACHE", {}))
        # A property of the class, since modes of functions do not reach a backward pass.
        is_cuda = mock.patch.object(torch.Tensor, "is_cuda", property(is_on_card), create=True)
        stack.enter_context(is_cuda)
        stack.enter_context(mock.patch.object(torch, "tensor", tensor_on_card(torch.tensor)))
        check = mock.patch.object(flash_attention, "passes_check", lambda *heads: flash)
        stack.enter_context(check)
        stack.enter_context(trace)
        yield trace


def fake_model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of a shape, on the card; call it in a `traced_card`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=torch.float32
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=CARD)
            setattr(module, name, torch.nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=CARD))
    if config.tie_word_embeddings:
        model.get_output_embeddings().weight = model.get_input_embeddings().weight
    return model
