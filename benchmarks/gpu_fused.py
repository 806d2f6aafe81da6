"""Stand-ins for fused kernels in a traced pass: they compute nothing and are counted by a table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from alignment.model.huggingface import PreTrainedModel
from benchmarks.gpu_trace import FUSED, Kernel, Trace, bytes_of


@dataclass(frozen=True)
class FusedKernel:
    """A fused function, whose forward pass reads its inputs and writes its outputs once. Its
    backward pass reads the outputs' gradients and, if `keeps_inputs`, the inputs, and writes the
    inputs' gradients."""

    forward_launches: int
    backward_launches: int
    keeps_inputs: bool


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
