"""Which kernels compute the work between a model's matrix products, and whether they compute what
the model's own code does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch

from alignment.core.tokens import collate
from alignment.model.huggingface import PreTrainedModel
from alignment.model.kernels import fuse_layers, use_fused_kernels
from alignment.model.loading import (
    autocast,
    devices_of,
    first_device,
    unchanged_where_it_fails,
    use_liger_kernel,
)
from alignment.model.log_probs import get_response_log_probs
from alignment.model.self_check import random_pieces
from alignment.model.shards import own_part
from alignment.system.errors import UserError
from alignment.system.terminal import say_once

TOLERANCE = 1e-3
"""Of log-probs, mean nats a token, and of gradients, relative: sums in another order make 1e-6 in
fp32; a part left out, tenths."""
ROUNDING = 2.0
"""In 16 bits, the error of kernels against the model's own code in fp32 may be so many times that
of the model's own code in 16 bits."""
LEAST_SHARE = 1e-3
"""Of the largest gradient's norm: the error of a smaller gradient is relative to so much."""


class CheckedModel(Protocol):
    """A model whose kernels are chosen, and what several processes that share it need for that."""

    model: PreTrainedModel
    dtype: torch.dtype
    """Of matrix products."""

    def run(self, forward: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
        """As `MicroBatchedModel.run`."""
        ...

    def sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors."""
        ...


def _compile_parts(model: PreTrainedModel) -> None:
    """Have functions that torch compiles compute a model's layers and log-probs."""
    fuse_layers(model)
    use_fused_kernels(model)


def _take_ligers(model: PreTrainedModel) -> None:
    """Have Liger's kernels compute a model's layers, and compiled ones its log-probs."""
    use_liger_kernel(model, "--kernels liger")
    use_fused_kernels(model)


KERNELS: dict[str, Callable[[PreTrainedModel], None]] = {
    "eager": lambda model: None,
    "liger": _take_ligers,
    "compiled": _compile_parts,
}
"""Value of --kernels -> what it changes in a model; by benchmarks/gpu_cost.md, which models a GPU,
each is faster than those before it."""


def use_kernels(checked: CheckedModel, name: str) -> str:
    """Have the kernels `name` of `KERNELS` compute a model; "auto": on a GPU the last of these that
    computes what the model's own code does, and on a CPU eager. Returns their name, which is that
    of all ranks. Raises `UserError` for other kernels than auto's where they fail, or compute
    something else: the model is as before."""
    if name == "auto":
        return _use_fastest(checked)
    if name != "eager":
        _use_checked(checked, name)
    return name


def _use_fastest(checked: CheckedModel) -> str:
    """`use_kernels` of "auto"."""
    devices = devices_of(checked.model)
    if devices[0].type != "cuda":
        return "eager"
    faster = [name for name in reversed(KERNELS) if name != "eager"]
    if len(devices) > 1 or find_spec("liger_kernel") is None:
        faster.remove("liger")
    for name in faster:
        try:
            _use_checked(checked, name)
        except UserError as refusal:
            say_once(f"--kernels auto: not {name} ({refusal})")
        else:
            return name
    return "eager"


def _use_checked(checked: CheckedModel, name: str) -> None:
    """Apply an entry of `KERNELS`. Raises `UserError` where it fails, or changes what the model
    computes: the model is as before."""
    dtypes = list(dict.fromkeys((torch.float32, checked.dtype)))
    own = [_responses(checked, dtype) for dtype in dtypes]
    if not own[0].is_finite(checked):
        return  # Damaged weights are the run's to notice.
    family = checked.model.config.model_type
    with unchanged_where_it_fails(checked.model):
        try:
            KERNELS[name](checked.model)
            fused = [_responses(checked, dtype) for dtype in dtypes]
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as failure:  # Of any kind: a compiler or a kernel that is not there.
            reason = (str(failure) or type(failure).__name__).splitlines()[0]
            raise UserError(
                f"--kernels {name}: {family}'s kernels fail: {reason}; choose --kernels eager"
            ) from failure
        for of_own, of_fused in zip(own, fused, strict=True):
            error = of_fused.distance(own[0], checked)
            # Not "above": an error that is no number is no better.
            if not error <= TOLERANCE + ROUNDING * of_own.distance(own[0], checked):
                raise UserError(
                    f"--kernels {name}: {family}'s log-probs or gradients differ by {error:.2g}"
                    " from those of the model's own code; choose --kernels eager"
                )


@dataclass(frozen=True)
class Responses:
    """What a model computes of a few random rows, which are the same on all ranks."""

    values: Sequence[torch.Tensor]
    """Log-probs and entropies."""
    gradients: Sequence[torch.Tensor]
    """Of a random sum of log-probs by the embeddings, and this rank's part of that by each weight
    of `trained_weights`."""

    def is_finite(self, checked: CheckedModel) -> bool:
        """Whether all are numbers, on all ranks."""
        tensors = [*self.values, *self.gradients]
        damaged = sum(not bool(tensor.isfinite().all()) for tensor in tensors)
        return float(checked.sum_over_ranks(torch.tensor(float(damaged)))) == 0

    def distance(self, other: "Responses", checked: CheckedModel) -> float:
        """The largest of: mean nats of log-probs and entropies, relative error of each gradient.
        The same on all ranks."""
        nats = []
        for own, its in zip(self.values, other.values, strict=True):
            nats.append((own - its).abs().mean().cpu())
        squares = []
        squares_of_errors = []
        for own, its in zip(self.gradients, other.gradients, strict=True):
            squares.append(its.square().sum().cpu())
            squares_of_errors.append((own - its).square().sum().cpu())
        mean_nats = checked.sum_over_ranks(torch.stack(nats)) / checked.sum_over_ranks(
            torch.ones(1)
        )
        norms = checked.sum_over_ranks(torch.stack(squares)).sqrt()
        errors = checked.sum_over_ranks(torch.stack(squares_of_errors)).sqrt()
        # A gradient that is 0 but for rounding has no digits to compare.
        scales = norms.clamp(min=max(LEAST_SHARE * float(norms.max()), 1e-30))
        # Not Python's `max`, which may leave out an error that is no number.
        return float(torch.cat([mean_nats, errors / scales]).max())


def trained_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The weights of a model's first and last layer and those outside of layers, as far as they are
    trained. Where there are several kinds of layers, these two are seldom of one kind."""
    numbers = []
    for name, _ in model.named_parameters():
        number = layer_number(name)
        if number is not None:
            numbers.append(number)
    counted = {None, min(numbers, default=None), max(numbers, default=None)}
    weights = []
    for name, parameter in model.named_parameters():
        if layer_number(name) in counted and parameter.requires_grad:
            weights.append(parameter)
    return weights


def layer_number(name: str) -> int | None:
    """The number of the layer that a weight's name has, which is its first number; None outside of
    layers."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return None


def _responses(checked: CheckedModel, dtype: torch.dtype) -> Responses:
    """A model's `Responses`, with products in `dtype`; its weights keep no gradient."""
    model = checked.model
    prompts = random_pieces(model, (5, 3))
    responses = random_pieces(model, (9, 6, 4))
    batch = collate([prompts[0], prompts[0], prompts[1]], responses, pad_token_id=0)
    embedded = []

    def keep(module, arguments, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    def forward(model: PreTrainedModel) -> torch.Tensor:
        outputs = get_response_log_probs(model, **vars(batch), return_token_entropy=True)
        return torch.stack([outputs["log_probs"], outputs["token_entropy"]])

    was_training = model.training
    hook = model.get_input_embeddings().register_forward_hook(keep)
    model.eval()
    try:
        with torch.enable_grad(), autocast(first_device(model), dtype):
            values_2BT = checked.run(forward)
        # Not unpacked: backward would make zeros of entropies' gradient, and copy all.
        log_probs_BT = values_2BT[0]
        entropies_BT = values_2BT[1]
        generator = torch.Generator().manual_seed(1)
        weights_BT = torch.randn(log_probs_BT.shape, generator=generator).to(log_probs_BT.device)
        # A sharded weight, which is put together from parts for a pass, gets a gradient here alone.
        (weights_BT * log_probs_BT).sum().backward()
        gradients = []
        for tensor in (*embedded, *trained_weights(model)):
            # An embedding that is no head's, too, has none: what it gives stands among the inputs.
            gradient = torch.zeros(()) if tensor.grad is None else tensor.grad
            gradients.append(own_part(gradient).float())
    finally:
        hook.remove()
        model.train(was_training)
        for parameter in model.parameters():
            parameter.grad = None
    values = [value.detach().float().cpu() for value in (log_probs_BT, entropies_BT)]
    return Responses(values, gradients)
