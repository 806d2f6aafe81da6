"""Stand-ins for fused kernels in a traced pass: they compute nothing and are counted by a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from alignment.model import kernels
from alignment.model.huggingface import PreTrainedModel
from benchmarks.gpu_trace import CARD, FUSED, Kernel, Trace, bytes_of


@dataclass(frozen=True)
class FusedKernel:
    """A fused function, whose forward pass reads its inputs and writes its outputs once. Its
    backward pass reads the outputs' gradients and, if `keeps_inputs`, the inputs, and writes the
    inputs' gradients."""

    forward_launches: int
    backward_launches: int
    keeps_inputs: bool


@dataclass(frozen=True)
class CompiledFunction:
    """A function that is compiled. Its forward pass reads all its inputs so many times and writes
    its outputs once; its backward pass reads the outputs' gradients and, if `keeps_inputs`, the
    inputs, so many times, and writes the inputs' gradients."""

    launches: int = 1
    passes: int = 1
    backward_launches: int = 1
    backward_passes: int = 1
    keeps_inputs: bool = True
    written: int = 0
    """How many of its first arguments it writes in place."""


RMS_NORM = "Liger RMSNorm"
ROTARY = "Liger rotary"
SWIGLU = "Liger SwiGLU"

TABLE = {
    # The weight's gradient is summed over the processors' partial sums by a second kernel.
    RMS_NORM: FusedKernel(forward_launches=1, backward_launches=2, keeps_inputs=True),
    # Queries and keys are turned in place; back again by the same kernel.
    ROTARY: FusedKernel(forward_launches=1, backward_launches=1, keeps_inputs=False),
    # The MLP's product of the activated gate and the up projection.
    SWIGLU: FusedKernel(forward_launches=1, backward_launches=1, keeps_inputs=True),
}
"""Fused function -> its kernels, from Liger 0.8's sources (Hsu et al. 2024, arXiv:2410.10989)."""

COMPILED = {
    # A kernel for the gradient of what is normed; a second pass for the weight's, whose columns are
    # summed in two kernels.
    "cast_norm": CompiledFunction(backward_launches=3, backward_passes=2),
    # Queries and keys are of two sizes: a kernel each.
    "cast_rotation": CompiledFunction(launches=2, backward_launches=2, keeps_inputs=False),
    "gated": CompiledFunction(),
    # Output and log-sum-exp are of two sizes: a kernel each.
    "join": CompiledFunction(launches=2, written=2),
    # Reads the gradient, gate and up; writes the product and two gradients. It has no gradient.
    "gated_gradients": CompiledFunction(),
    # Passes for the highest logit, and for the two sums. Its kernels, most of them of single
    # numbers a row, are as many as the compiler makes of it for CPUs.
    "label_scores": CompiledFunction(launches=10, passes=2),
    "logit_gradient": CompiledFunction(),
}
"""Function of `alignment.model.kernels` -> the kernels that torch's compiler makes of it. No GPU
has run them: the launches are what sizes and sums allow, and a row of a norm counts as read once,
though the compiler reads it again, from the cache, where it is longer than 1,024 numbers."""


class FusedCall(torch.autograd.Function):
    """(trace, name, number of outputs, inputs) -> outputs as large as the first inputs."""

    @staticmethod
    def forward(ctx, trace, name, outputs, *inputs):
        entry = TABLE[name]
        results = tuple(torch.empty_like(tensor) for tensor in inputs[:outputs])
        moved = sum(map(bytes_of, inputs)) + sum(map(bytes_of, results))
        trace.kernels.append(Kernel(name, FUSED, bytes=moved, launches=entry.forward_launches))
        ctx.save_for_backward(*inputs)
        ctx.trace = trace
        ctx.name = name
        return results

    @staticmethod
    def backward(ctx, *gradients):
        entry = TABLE[ctx.name]
        inputs = ctx.saved_tensors
        by_inputs = []
        for tensor, wanted in zip(inputs, ctx.needs_input_grad[3:], strict=True):
            by_inputs.append(torch.empty_like(tensor) if wanted else None)
        moved = sum(map(bytes_of, gradients))
        moved += sum(bytes_of(gradient) for gradient in by_inputs if gradient is not None)
        if entry.keeps_inputs:
            moved += sum(map(bytes_of, inputs))
        kernel = Kernel(f"{ctx.name}, backward", FUSED, bytes=moved)
        ctx.trace.kernels += [kernel] * entry.backward_launches
        return None, None, None, *by_inputs


def add_kernels(trace: Trace, name: str, moved: float, launches: int) -> None:
    """Count the kernels of a fused function, which move so many bytes in all."""
    trace.kernels += [Kernel(name, FUSED, bytes=moved / launches)] * launches


class CompiledCall(torch.autograd.Function):
    """(trace, function, its arguments' structure, all tensors of them) -> its outputs."""

    @staticmethod
    def forward(ctx, trace, function, structure, *tensors):
        entry = COMPILED[function.__name__]
        with trace.paused():
            result = structure.call(function, tensors)
        outputs = tree_leaves(result)
        read = entry.passes * sum(map(bytes_of, tensors))
        written = [tensor for tensor in outputs if isinstance(tensor, torch.Tensor)]
        written += tensors[: entry.written]
        moved = read + sum(map(bytes_of, written))
        add_kernels(trace, function.__name__, moved, entry.launches)
        # The card does not hold what backward needs no more than the size of.
        ctx.sizes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if entry.keeps_inputs:
            ctx.save_for_backward(*tensors)
        ctx.trace = trace
        ctx.function = function
        ctx.structure = structure
        return result

    @staticmethod
    def backward(ctx, *gradients):
        entry = COMPILED[ctx.function.__name__]
        tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        with ctx.trace.paused(), torch.enable_grad():
            if not tensors:
                tensors = [
                    torch.empty(shape, dtype=dtype, device=CARD) for shape, dtype in ctx.sizes
                ]
            copies = [
                tensor.detach().requires_grad_(is_wanted)
                for tensor, is_wanted in zip(tensors, wanted, strict=True)
            ]
            outputs = tree_leaves(ctx.structure.call(ctx.function, copies))
            inputs = [copy for copy in copies if copy.requires_grad]
            of_inputs = iter(torch.autograd.grad(outputs, inputs, gradients))
        by_tensors = [next(of_inputs) if is_wanted else None for is_wanted in wanted]
        read = sum(map(bytes_of, gradients))
        if entry.keeps_inputs:
            read += sum(map(bytes_of, tensors))
        written = sum(bytes_of(gradient) for gradient in by_tensors if gradient is not None)
        moved = entry.backward_passes * read + written
        add_kernels(ctx.trace, f"{ctx.function.__name__}, backward", moved, entry.backward_launches)
        return None, None, None, *by_tensors


TENSOR = object()
"""Stands for a tensor in a `Structure`."""


@dataclass(frozen=True)
class Structure:
    """The arguments of a call without their tensors: those among them, in whose places `TENSOR`
    stands, and the weights of modules."""

    leaves: Sequence[Any]
    spec: TreeSpec
    options: Mapping[str, Any]

    @classmethod
    def of(
        cls, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Structure, list[torch.Tensor]]:
        """The structure of positional arguments, and their tensors in order."""
        leaves, spec = tree_flatten(tuple(arguments))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        rest = [TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        structure = cls(rest, spec, options)
        for module in structure.modules:
            tensors += module.parameters()
        return structure, tensors

    @property
    def modules(self) -> list[torch.nn.Module]:
        """The modules among the arguments."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.nn.Module)]

    def call(self, function: Callable, tensors: Sequence[torch.Tensor]):
        """What the function returns of these tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if leaf is TENSOR else leaf for leaf in self.leaves]
        arguments = tree_unflatten(leaves, self.spec)
        with ExitStack() as stack:
            for module in self.modules:
                weights = {name: next(rest) for name, _ in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, weights))
            return function(*arguments, **self.options)


@contextmanager
def compiled_functions(trace: Trace, uncompiled: Sequence[str] = ()) -> Iterator[None]:
    """A block in which functions that would be compiled are counted by `COMPILED`, but those of
    the names `uncompiled`, each of whose operators is a kernel of its own."""

    def compiled(function: Callable) -> Callable:
        if function.__name__ in uncompiled:
            return function

        def call(*arguments, **options):
            structure, tensors = Structure.of(arguments, options)
            return CompiledCall.apply(trace, function, structure, *tensors)

        return call

    with (
        mock.patch.object(kernels, "compiled", compiled),
        mock.patch.dict(kernels.FUSED, clear=True),
    ):
        yield


@contextmanager
def liger_kernels(model: PreTrainedModel, trace: Trace) -> Iterator[None]:
    """A block in which norms, rotary embeddings and MLPs of a Qwen2 or Llama model are counted as
    Liger's kernels."""

    def fused(name: str, outputs: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return FusedCall.apply(trace, name, outputs, *inputs)

    def rotate(q, k, cos, sin, *rest, **options):
        return fused(ROTARY, 2, q, k, cos, sin)

    def norm_of(module: torch.nn.Module) -> Callable:
        return lambda hidden: fused(RMS_NORM, 1, hidden, module.weight)[0]

    def mlp_of(module: torch.nn.Module) -> Callable:
        def mlp(hidden):
            product = fused(SWIGLU, 1, module.gate_proj(hidden), module.up_proj(hidden))[0]
            return module.down_proj(product)

        return mlp

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = norm_of(module)
        elif kind.endswith("MLP"):
            module.forward = mlp_of(module)
    code = sys.modules[type(model.get_decoder()).__module__]
    with mock.patch.object(code, "apply_rotary_pos_emb", rotate):
        yield
