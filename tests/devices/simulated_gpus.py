"""GPUs without GPUs: tensors of the CPU that count as tensors of "cuda:N", with real values,
gradients and kernels.

Within `simulated_gpus(number)` every storage has a claimed device. Python code reads it from
`tensor.device` and moves tensors by `tensor.to(...)`; a kernel whose tensors claim different
devices raises `DeviceMismatch` where the kernel of a GPU would raise, in forward and in backward
passes. Below Python all tensors are ordinary ones of the CPU, so that autograd, gloo and FSDP2
compute as they do anywhere, while FSDP2 treats a mesh of "cuda" as it treats one of GPUs: it moves
a wrapped module's inputs.

Two modes of torch do this: one of functions for what Python asks of a device, one of kernels
(`aten`) for what reaches a device. Modes belong to a thread, so every thread that starts within
enters them. Another process sees the GPUs if it starts with the folder `site` beside this file on
its PYTHONPATH, and with their number in the variable SIMULATED_GPUS.
"""

import contextlib
import importlib
import os
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from alignment.model.flash_attention import passes_check
from tests.devices.flash_kernels import flash_backward, flash_forward

aten = torch.ops.aten
CPU = torch.device("cpu")
GIGABYTE = 2**30
ROOT = Path(__file__).parents[2]

# Kernels that copy from one device to another, and one that asks whether that can be.
COPIES = {
    "aten::copy_",
    "aten::_to_copy",
    "aten::_copy_from",
    "aten::_has_compatible_shallow_copy_type",
}
# Kernels whose indices may be on the CPU where what they index is on a GPU; not the other way
# round.
INDEXED = {
    "aten::index",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::_unsafe_index",
}
# Kernels beside the elementwise ones that take a number as a tensor of the CPU.
TAKE_NUMBERS = {"aten::fill_", "aten::masked_fill", "aten::masked_fill_"}


class DeviceMismatch(RuntimeError):
    """Tensors of different devices have met in one kernel."""


class Claims:
    """The claimed device of each storage, and so of every tensor that shares it; without a claim
    the CPU."""

    def __init__(self, number: int):
        self.number = number
        self.current = 0
        self._device_of_storage = WeakIdKeyDictionary()

    def device(self, text: str | int | torch.device | None) -> torch.device | None:
        """The device that a caller names, with its index; None for none."""
        if text is None:
            return None
        device = torch.device("cuda", text) if isinstance(text, int) else torch.device(text)
        if device.type != "cuda":
            return device
        index = self.current if device.index is None else device.index
        if index >= self.number:
            raise RuntimeError(
                f"CUDA error: invalid device ordinal {index} of {self.number} simulated GPUs"
            )
        return torch.device("cuda", index)

    def of(self, tensor: torch.Tensor) -> torch.device:
        """The device that a tensor counts as one of."""
        if isinstance(tensor, DTensor):
            return self.of(tensor._local_tensor)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
            inner = getattr(tensor, "elem", None)  # of a collective that has not ended
            return CPU if inner is None else self.of(inner)
        real = torch._C.TensorBase.device.__get__(tensor)
        if real.type != "cpu":
            return real
        return self._device_of_storage.get(tensor.untyped_storage(), CPU)

    def claim(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Have a tensor, and all that share its storage, count as one of a device."""
        if isinstance(tensor, DTensor):
            self.claim(tensor._local_tensor, device)
            return tensor
        storage = tensor.untyped_storage()
        if device.type == "cuda":
            self._device_of_storage[storage] = device
        else:
            self._device_of_storage.pop(storage, None)
        return tensor


class Move(torch.autograd.Function):
    """A copy of a tensor on another device, whose gradient goes back to the tensor's own."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, claims: Claims, device: torch.device):
        ctx.claims = claims
        ctx.source = claims.of(tensor)
        return claims.claim(tensor.clone(), device)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return ctx.claims.claim(gradient.clone(), ctx.source), None, None


class Functions(TorchFunctionMode):
    """Answers what Python code asks of tensors' devices, and makes tensors on claimed devices."""

    def __init__(self, claims: Claims):
        super().__init__()
        self.claims = claims
        tensor = torch.Tensor
        self.stand_ins: dict[Callable, Callable] = {
            tensor.device.__get__: claims.of,
            tensor.is_cuda.__get__: lambda tensor: claims.of(tensor).type == "cuda",
            tensor.is_cpu.__get__: lambda tensor: claims.of(tensor).type == "cpu",
            tensor.get_device: self._index,
            tensor.to: self._to,
            tensor.cuda: lambda tensor, device="cuda", *_, **__: self._move(
                tensor, claims.device(device or "cuda")
            ),
            tensor.cpu: lambda tensor, *_, **__: self._move(tensor, CPU),
            tensor.pin_memory: lambda tensor, *_: tensor,
            tensor.is_pinned: lambda tensor, *_: False,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            torch.as_tensor: self._as_tensor,
            torch.mm: self._product,
            torch.histc: self._histogram,
        }
        self.like_their_tensor = {tensor.new_tensor, tensor.__deepcopy__}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function in self.stand_ins:
            return self.stand_ins[function](*args, **kwargs)
        device = self.claims.device(kwargs.get("device"))
        if device is None:
            result = function(*args, **kwargs)
            if function in self.like_their_tensor:
                self.claims.claim(result, self.claims.of(args[0]))
            return result
        if device.type not in ("cuda", "cpu"):
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if device.type == "cuda" and generator is not None:
            raise DeviceMismatch(f"{function} makes a tensor on {device} by a generator of the CPU")
        result = function(*args, **{**kwargs, "device": "cpu"})
        for made in tree_leaves(result):
            self.claims.claim(made, device)
        return result

    def _index(self, tensor: torch.Tensor) -> int:
        device = self.claims.of(tensor)
        return -1 if device.index is None else device.index

    def _move(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.claims.of(tensor) == device:
            return tensor
        if isinstance(tensor, DTensor):
            # its mesh stays the one that it had
            return self.claims.claim(tensor.detach().clone(), device)
        if device.type == "meta":
            return torch._C.TensorBase.to(tensor, device)
        return Move.apply(tensor, self.claims, device)

    def _to(self, tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """`Tensor.to` by (device, dtype), (dtype) or (other); whether copies wait for the host
        plays no part here."""
        device = kwargs.get("device")
        dtype = kwargs.get("dtype")
        for argument in args:
            if isinstance(argument, torch.Tensor):
                device = self.claims.of(argument)
                dtype = argument.dtype
            elif isinstance(argument, torch.dtype):
                dtype = argument
            elif isinstance(argument, str | torch.device) or type(argument) is int:
                device = argument
        cast = tensor if dtype is None else torch._C.TensorBase.to(tensor, dtype)
        return cast if device is None else self._move(cast, self.claims.device(device))

    def _as_tensor(self, data, dtype=None, device=None) -> torch.Tensor:
        if not isinstance(data, torch.Tensor):
            made = torch.as_tensor(data, dtype=dtype)
            return made if device is None else self.claims.claim(made, self.claims.device(device))
        return self._to(
            data,
            *([] if device is None else [device]),
            **({} if dtype is None else {"dtype": dtype}),
        )

    def _numpy(self, tensor: torch.Tensor, *args, **kwargs):
        if self.claims.of(tensor).type == "cuda":
            raise TypeError(f"can't convert {self.claims.of(tensor)} device type tensor to numpy")
        return torch._C.TensorBase.numpy(tensor, *args, **kwargs)

    def _histogram(self, tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """A histogram of whole numbers, which only GPUs count."""
        return torch.histc(tensor.float(), *args, **kwargs).to(tensor.dtype)

    def _product(self, left: torch.Tensor, right: torch.Tensor, *, out_dtype=None) -> torch.Tensor:
        """A matrix product whose sums are kept in `out_dtype`, which only GPUs have."""
        if out_dtype is None:
            return torch.mm(left, right)
        return torch.mm(left.to(out_dtype), right.to(out_dtype))


class Kernels(TorchDispatchMode):
    """Sees every kernel, hands claims on from its inputs to its outputs, and raises
    `DeviceMismatch`."""

    def __init__(self, claims: Claims):
        super().__init__()
        self.claims = claims
        self.stand_ins = {
            aten._scaled_dot_product_efficient_attention.default: efficient_attention,
            aten._scaled_dot_product_efficient_attention_backward.default: (
                efficient_attention_backward
            ),
            aten._flash_attention_forward.default: flash_forward,
            aten._flash_attention_backward.default: flash_backward,
        }

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # by which torch plans distributed tensors
        if any(issubclass(kind, FakeTensor) for kind in types):
            return function(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            # for a wrapper, such as a distributed tensor, whose own kernels come here next
            return NotImplemented
        name = function._schema.name
        tensors = _tensors(args) + _tensors(kwargs.values())
        if name.startswith(("aten::_foreach", "aten::_fused")):
            devices = self._check_lists(name, args)
        else:
            devices = [self._check(function, tensors, args, kwargs)]
        known = {id(tensor.untyped_storage()) for tensor in tensors}
        result = self.stand_ins.get(function, function)(*args, **kwargs)
        outputs = _tensors([result])
        if len(devices) == 1:
            devices = devices * len(outputs)
        for output, device in zip(outputs, devices, strict=False):
            is_new = id(output.untyped_storage()) not in known
            if is_new and torch._C.TensorBase.device.__get__(output).type == "cpu":
                self.claims.claim(output, device)
        return result

    def _check(self, function, tensors: list[torch.Tensor], args, kwargs) -> torch.device:
        """The one device of a kernel's tensors. Raises `DeviceMismatch` where there are several."""
        name = function._schema.name
        if not tensors:
            return CPU
        first = self.claims.of(tensors[0])
        if name in COPIES:
            return first
        if name in INDEXED:
            for index in _tensors(args[1]):
                if self.claims.of(index) not in (CPU, first):
                    raise DeviceMismatch(
                        f"{name}: indices should be either on cpu or on {first}, not"
                        f" {self.claims.of(index)}"
                    )
            tensors = [tensors[0], *_tensors(args[2:3])]
        if name.startswith("aten::_scaled_dot_product_efficient_attention_backward"):
            tensors = tensors[:-2]  # without the seeds of dropout
        devices = set(map(self.claims.of, tensors))
        if len(devices) > 1 and (
            torch.Tag.pointwise in function.tags or name in TAKE_NUMBERS | INDEXED
        ):
            # numbers may be on the CPU
            tensors = [t for t in tensors if t.dim() > 0 or self.claims.of(t).type == "cuda"]
            devices = set(map(self.claims.of, tensors))
        if len(devices) > 1:
            shapes = ", ".join(
                f"{list(tensor.shape)} on {self.claims.of(tensor)}" for tensor in tensors
            )
            raise DeviceMismatch(
                f"{name}: expected all tensors to be on the same device, but got {shapes}"
            )
        (device,) = devices
        if device.type == "cuda" and any(
            isinstance(argument, torch.Generator) for argument in (*args, *kwargs.values())
        ):
            raise DeviceMismatch(f"{name} draws on {device} by a generator of the CPU")
        return device

    def _check_lists(self, name: str, args) -> list[torch.device]:
        """The device of each place in the lists of a kernel that takes lists of tensors."""
        lists = [_tensors(argument) for argument in args if isinstance(argument, list | tuple)]
        lists = [tensors for tensors in lists if tensors]
        shared = [argument for argument in args if isinstance(argument, torch.Tensor)]
        found = []
        for place in range(len(lists[0])):
            tensors = [tensors[place] for tensors in lists if place < len(tensors)] + shared
            devices = set(map(self.claims.of, tensors))
            if len(devices) > 1:
                raise DeviceMismatch(
                    f"{name}: place {place} of its lists is on {sorted(map(str, devices))}"
                )
            found.append(devices.pop())
        return found


def _tensors(values: Iterable) -> list[torch.Tensor]:
    """The tensors among a kernel's arguments or results, which are in lists at most."""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _scores(q, k, is_causal: bool, scale: float) -> torch.Tensor:
    scores = (q.float() @ k.float().transpose(-1, -2)) * scale
    if is_causal:
        unseen = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def efficient_attention(
    q, k, v, bias, compute_log_sum, dropout=0.0, is_causal=False, *, scale=None
):
    """What the GPU kernel of this name returns: output, log-sum-exp padded to a multiple of 32
    queries, two seeds."""
    scores = _scores(q, k, is_causal, q.shape[-1] ** -0.5 if scale is None else scale)
    log_sum = scores.logsumexp(-1)
    out = (scores - log_sum[..., None]).exp() @ v.float()
    padded = torch.nn.functional.pad(log_sum, (0, -q.shape[2] % 32), value=torch.inf)
    seeds = torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)
    return out.to(q.dtype), padded, *seeds


def efficient_attention_backward(
    gradient,
    q,
    k,
    v,
    bias,
    out,
    log_sum,
    seed,
    offset,
    dropout,
    wanted,
    is_causal=False,
    *,
    scale=None,
):
    """What the GPU kernel of this name returns: gradients by q, k, v and the bias."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (_scores(q, k, is_causal, scale) - log_sum[..., : q.shape[2], None]).exp()
    to_v = weights.transpose(-1, -2) @ gradient.float()
    delta = (gradient.float() * out.float()).sum(-1, keepdim=True)
    to_scores = weights * (gradient.float() @ v.float().transpose(-1, -2) - delta) * scale
    to_q, to_k = to_scores @ k.float(), to_scores.transpose(-1, -2) @ q.float()
    return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), torch.zeros(0)


class Stream:
    """A stream or an event of a GPU: all work here is done at once."""

    def __init__(self, device=None, *args, **kwargs):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def record(self, *streams):
        return self

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def __getattr__(self, name):
        if name in ("wait_stream", "wait_event", "synchronize", "wait", "record_event"):
            return lambda *arguments: self
        raise AttributeError(name)


@contextlib.contextmanager
def simulated_gpus(number: int) -> Iterator[Claims]:
    """Have this thread's torch see so many GPUs, of 8 GiB each, and check where tensors are."""
    # torch's compiler has a table of torch's functions, which it makes when something first imports
    # it, PEFT for one: here, before any of these functions is replaced.
    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    claims = Claims(number)
    properties = types.SimpleNamespace(
        name="simulated GPU",
        total_memory=8 * GIGABYTE,
        major=9,
        minor=0,
        multi_processor_count=1,
        uuid="0",
    )

    def set_device(device):
        claims.current = claims.device(device).index or 0

    def nothing(*args, **kwargs):
        return None

    class CurrentDevice:
        """`torch.cuda.device`."""

        def __init__(self, device):
            self.device = claims.device(device)

        def __enter__(self):
            self.before = claims.current
            set_device(self.device)

        def __exit__(self, *error):
            claims.current = self.before

    constants = {
        "is_available": True,
        "device_count": number,
        "is_initialized": True,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (8 * GIGABYTE, 8 * GIGABYTE),
        "get_device_capability": (9, 0),
        "get_device_name": "simulated GPU",
        "get_device_properties": properties,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": [],
    }
    quiet = (
        "init",
        "_lazy_init",
        "synchronize",
        "empty_cache",
        "reset_peak_memory_stats",
        "manual_seed",
        "ipc_collect",
    )
    quiet += ("manual_seed_all", "set_rng_state", "set_rng_state_all")
    replaced = {
        name: lambda *args, _value=value, **kwargs: _value for name, value in constants.items()
    }
    replaced |= dict.fromkeys(quiet, nothing)
    replaced |= {
        "Stream": Stream,
        "Event": Stream,
        "stream": lambda stream: Stream(),
        "device": CurrentDevice,
    }
    replaced |= {"current_stream": Stream, "default_stream": Stream, "set_device": set_device}
    replaced |= {"current_device": lambda: claims.current}

    own_wrapper = torch._C.TensorBase._make_wrapper_subclass
    own_autocast = torch.amp.autocast_mode.autocast.__init__
    own_process_group = torch.distributed.init_process_group
    own_run_backward = torch.autograd._engine_run_backward
    own_enabled, own_dtype = torch.is_autocast_enabled, torch.get_autocast_dtype

    def on_the_cpu(device_type: str) -> str:
        return "cpu" if device_type == "cuda" else device_type

    def make_wrapper(cls, *args, **kwargs):
        """A wrapper's own device is below Python, so that it is the CPU."""
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return own_wrapper(cls, *args, **kwargs)

    def autocast(self, device_type: str, *args, **kwargs):
        own_autocast(self, on_the_cpu(device_type), *args, **kwargs)

    own_thread = threading.Thread.run
    own_exists = Path.exists

    def run_thread(thread):
        with Functions(claims), Kernels(claims):
            own_thread(thread)

    def exists(path, *args, **kwargs):
        """The file by which a machine with GPUs is known is there."""
        return str(path) == "/dev/nvidiactl" or own_exists(path, *args, **kwargs)

    def run_backward(*args, **kwargs):
        """Backward passes run Python code too, of hooks and functions of our own, for which the
        mode of functions is on."""
        stack = torch.overrides._get_current_function_mode_stack()
        is_on = any(isinstance(mode, Functions) for mode in stack)
        with contextlib.nullcontext() if is_on else Functions(claims):
            return own_run_backward(*args, **kwargs)

    def grouped(lists, with_indices: bool = False):
        """Lists of tensors cut into those of one device and type, as torch's optimisers and
        clipping want them."""
        groups = {}
        for place, first in enumerate(lists[0]):
            own, places = groups.setdefault(
                (claims.of(first), first.dtype), ([[] for _ in lists], [])
            )
            places.append(place)
            for into, tensors in zip(own, lists, strict=True):
                if tensors:
                    into.append(tensors[place])
        return groups

    def init_process_group(backend=None, *args, **kwargs):
        """Groups of gloo: below Python all tensors are of the CPU."""
        own_process_group("gloo", *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **replaced))
        accelerator = {
            name: replaced[name]
            for name in ("is_available", "device_count", "current_stream", "synchronize")
        }
        accelerator |= {
            "current_device_index": replaced["current_device"],
            "set_device_index": set_device,
        }
        accelerator |= {"current_accelerator": lambda *_, **__: torch.device("cuda")}
        stack.enter_context(mock.patch.multiple(torch.accelerator, **accelerator))
        patched = (
            (torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)),
            (torch.Tensor, "record_stream", lambda tensor, stream: None),
            (torch.amp.autocast_mode.autocast, "__init__", autocast),
            (threading.Thread, "run", run_thread),
            (Path, "exists", exists),
            (torch.autograd, "_engine_run_backward", run_backward),
            (torch.nn.utils.clip_grad, "_group_tensors_by_device_and_dtype", grouped),
            (sys.modules["torch.optim.optimizer"], "_group_tensors_by_device_and_dtype", grouped),
            (torch.distributed, "init_process_group", init_process_group),
            (torch, "is_autocast_enabled", lambda kind="cpu": own_enabled(on_the_cpu(kind))),
            (torch, "get_autocast_dtype", lambda kind: own_dtype(on_the_cpu(kind))),
        )
        for place, name, value in patched:
            stack.enter_context(mock.patch.object(place, name, value))
        # What a check has said of these devices is not of a real one.
        passes_check.cache_clear()
        stack.callback(passes_check.cache_clear)
        stack.enter_context(Functions(claims))
        stack.enter_context(Kernels(claims))
        yield claims


def environment(number: int, root: Path = ROOT) -> dict[str, str]:
    """Variables of a process that shall see so many GPUs, as its children shall; `root` holds the
    package."""
    paths = [str(Path(__file__).with_name("site")), str(root)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SIMULATED_GPUS": str(number)}
