"""Which kernels compute the work between a model's matrix products, and whether they compute what
the model's own code does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

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

Run = Callable[[Callable[[PreTrainedModel], torch.Tensor]], torch.Tensor]
"""Calls a function of the model, as `MicroBatchedModel.run`."""


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


def use_kernels(model: PreTrainedModel, name: str, dtype: torch.dtype, run: Run) -> str:
    """Have the kernels `name` of `KERNELS` compute a model whose products are in `dtype`; "auto":
    on a GPU the last of these that computes what the model's own code does, and on a CPU eager.
    Returns their name. Raises `UserError` for other kernels than auto's where they fail, or compute
    something else: the model is as before."""
    if name == "auto":
        return _use_fastest(model, dtype, run)
    if name != "eager":
        _use_checked(model, name, dtype, run)
    return name


def _use_fastest(model: PreTrainedModel, dtype: torch.dtype, run: Run) -> str:
    """`use_kernels` of "auto"."""
    devices = devices_of(model)
    if devices[0].type != "cuda":
        return "eager"
    faster = [name for name in reversed(KERNELS) if name != "eager"]
    if len(devices) > 1 or find_spec("liger_kernel") is None:
        faster.remove("liger")
    for name in faster:
        try:
            _use_checked(model, name, dtype, run)
        except UserError as refusal:
            say_once(f"--kernels auto: not {name} ({refusal})")
        else:
            return name
    return "eager"


def _use_checked(model: PreTrainedModel, name: str, dtype: torch.dtype, run: Run) -> None:
    """Apply an entry of `KERNELS`. Raises `UserError` where it fails, or changes what the model
    computes: the model is as before."""
    dtypes = list(dict.fromkeys((torch.float32, dtype)))
    own = [_responses(model, each, run) for each in dtypes]
    if not own[0].is_finite:
        return  # Damaged weights are the run's to notice.
    family = model.config.model_type
    with unchanged_where_it_fails(model):
        try:
            KERNELS[name](model)
            fused = [_responses(model, each, run) for each in dtypes]
        except (torch.OutOfMemoryError, UserError):
            raise
        except Exception as failure:  # Of any kind: a compiler or a kernel that is not there.
            reason = (str(failure) or type(failure).__name__).splitlines()[0]
            raise UserError(
                f"--kernels {name}: {family}'s kernels fail: {reason}; choose --kernels eager"
            ) from failure
        for of_own, of_fused in zip(own, fused, strict=True):
            error = of_fused.distance(own[0])
            # Not "above": an error that is no number is no better.
            if not error <= TOLERANCE + ROUNDING * of_own.distance(own[0]):
                raise UserError(
                    f"--kernels {name}: {family}'s log-probs or gradients differ by {error:.2g}"
                    " from those of the model's own code; choose --kernels eager"
                )


@dataclass(frozen=True)
class Responses:
    """What a model computes of a few random rows."""

    values: Sequence[torch.Tensor]
    """Log-probs and entropies."""
    gradients: Sequence[torch.Tensor]
    """Of a random sum of log-probs by the embeddings, and by each weight of `trained_weights`."""

    @property
    def is_finite(self) -> bool:
        """Whether all are numbers."""
        tensors = [*self.values, *self.gradients]
        return all(bool(tensor.isfinite().all()) for tensor in tensors)

    def distance(self, other: "Responses") -> float:
        """The largest of: mean nats of log-probs and entropies, relative error of each gradient."""
        errors = []
        for own, its in zip(self.values, other.values, strict=True):
            errors.append(float((own - its).abs().mean()))
        norms = [float(gradient.norm()) for gradient in other.gradients]
        for own, its, norm in zip(self.gradients, other.gradients, norms, strict=True):
            # A gradient that is 0 but for rounding has no digits to compare.
            scale = max(norm, LEAST_SHARE * max(norms), 1e-30)
            errors.append(float((own - its).norm()) / scale)
        # Not `max`, which may leave out an error that is no number.
        return float(torch.tensor(errors).max())


def trained_weights(model: PreTrainedModel) -> list[torch.nn.Parameter]:
    """The weights of a model's first and last layer and those outside of layers, as far as they are
    trained and whole. Where there are several kinds of layers, these two are seldom of one kind."""
    numbers = []
    for name, _ in model.named_parameters():
        number = layer_number(name)
        if number is not None:
            numbers.append(number)
    counted = {None, min(numbers, default=None), max(numbers, default=None)}
    weights = []
    for name, parameter in model.named_parameters():
        is_counted = layer_number(name) in counted
        # Those of a sharded model are put together from parts for a pass, and are others there.
        is_whole = not hasattr(parameter, "to_local")
        if is_counted and is_whole and parameter.requires_grad:
            weights.append(parameter)
    return weights


def layer_number(name: str) -> int | None:
    """The number of the layer that a weight's name has, which is its first number; None outside of
    layers."""
    for part in name.split("."):
        if part.isdigit():
            return int(part)
    return None


def _responses(model: PreTrainedModel, dtype: torch.dtype, run: Run) -> Responses:
    """A model's `Responses`, with products in `dtype`; its weights keep no gradient."""
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
            values_2BT = run(forward)
        # Not unpacked: backward would make zeros of entropies' gradient, and copy all.
        log_probs_BT = values_2BT[0]
        entropies_BT = values_2BT[1]
        generator = torch.Generator().manual_seed(1)
        weights_BT = torch.randn(log_probs_BT.shape, generator=generator).to(log_probs_BT.device)
        inputs = [*embedded, *trained_weights(model)]
        total = (weights_BT * log_probs_BT).sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    finally:
        hook.remove()
        model.train(was_training)
    values = [value.detach().float().cpu() for value in (log_probs_BT, entropies_BT)]
    zero = torch.zeros(())
    of_inputs = []
    for gradient in gradients:
        # An embedding that is no head's, too, has none: what it gives stands among the inputs.
        of_inputs.append(zero if gradient is None else gradient.float())
    return Responses(values, of_inputs)
