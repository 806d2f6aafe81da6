"""Which kernels compute the work between a model's matrix products, and whether they compute what
the model's own code does."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from alignment.core.tokens import collate
from alignment.model.huggingface import AutoModelForCausalLM, PreTrainedModel
from alignment.model.kernels import fuse_layers, use_fused_kernels
from alignment.model.loading import (
    autocast,
    devices_of,
    first_device,
    unchanged_where_it_fails,
    use_liger_kernel,
)
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import OWN_ATTENTION, take_plain_path, takes_plain_path
from alignment.model.self_check import random_pieces
from alignment.system.errors import UserError, is_out_of_memory
from alignment.system.terminal import say_once

TOLERANCE = 1e-3
"""Of log-probs, mean nats a token, and of gradients, relative: sums in another order make 1e-6 in
fp32; a part left out, tenths."""
ROUNDING = 2.0
"""In 16 bits, the error of kernels against the model's own code in fp32 may be so many times that
of the model's own code in 16 bits."""
LEAST_SHARE = 1e-3
"""Of the largest gradient's norm: the error of a smaller gradient is relative to so much."""

LAYERS_OF_SMALL_MODEL = 2
SPREAD_OF_SMALL_MODEL = 0.02
"""Standard deviation of what is added to the weights that a family starts from, of which norms are
1 and biases 0."""


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


def kernels_to_try(name: str, devices: Sequence[torch.device]) -> list[str]:
    """The entries of `KERNELS` that `name` stands for on some devices, in the order in which they
    are tried; "auto": on a CPU eager alone, on a GPU the fastest first."""
    if name != "auto":
        return [name]
    if devices[0].type != "cuda":
        return ["eager"]
    names = list(reversed(KERNELS))
    if len(devices) > 1 or find_spec("liger_kernel") is None:
        names.remove("liger")
    return names


def use_kernels(model: PreTrainedModel, name: str, dtype: torch.dtype) -> str:
    """Have the first of `kernels_to_try` that computes what the model's own code does compute a
    model whose products are in `dtype`. Returns its name. Raises `UserError` for other kernels than
    auto's where they fail, or compute something else: the model is as before."""
    *faster, last = kernels_to_try(name, devices_of(model))
    for choice in faster:
        try:
            _use_checked(model, choice, dtype)
        except UserError as refusal:
            say_once(f"--kernels auto: not {choice} ({refusal})")
        else:
            return choice
    if last != "eager":
        _use_checked(model, last, dtype)
    return last


def _use_checked(model: PreTrainedModel, name: str, dtype: torch.dtype) -> None:
    """Apply an entry of `KERNELS`. Raises `UserError` where it fails, or changes what the model
    computes: the model is as before."""
    dtypes = list(dict.fromkeys((torch.float32, dtype)))
    own = [_responses(model, each) for each in dtypes]
    if not own[0].is_finite:
        return  # Damaged weights are the run's to notice.
    family = model.config.model_type
    with unchanged_where_it_fails(model):
        try:
            KERNELS[name](model)
            fused = [_responses(model, each) for each in dtypes]
        except UserError:
            raise
        except Exception as failure:  # Of any kind: a compiler or a kernel that is not there.
            if is_out_of_memory(failure):
                raise
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


def _responses(model: PreTrainedModel, dtype: torch.dtype) -> Responses:
    """A model's `Responses`, with products in `dtype`; its weights keep no gradient."""
    prompts = random_pieces(model, (5, 3))
    responses = random_pieces(model, (9, 6, 4))
    batch = collate([prompts[0], prompts[0], prompts[1]], responses, pad_token_id=0)
    embedded = []

    def keep(module, arguments, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[0]

    was_training = model.training
    hook = model.get_input_embeddings().register_forward_hook(keep)
    model.eval()
    try:
        with torch.enable_grad(), autocast(first_device(model), dtype):
            outputs = get_response_log_probs(model, **vars(batch), return_token_entropy=True)
        log_probs_BT = outputs["log_probs"]
        generator = torch.Generator().manual_seed(1)
        weights_BT = torch.randn(log_probs_BT.shape, generator=generator).to(log_probs_BT.device)
        inputs = [*embedded, *trained_weights(model)]
        total = (weights_BT * log_probs_BT).sum()
        gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    finally:
        hook.remove()
        model.train(was_training)
    values = [value.detach().float().cpu() for value in (log_probs_BT, outputs["token_entropy"])]
    zero = torch.zeros(())
    of_inputs = []
    for gradient in gradients:
        # An embedding that is no head's, too, has none: what it gives stands among the inputs.
        of_inputs.append(zero if gradient is None else gradient.float())
    return Responses(values, of_inputs)


def small_model(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A model of a model's family and widths, of `LAYERS_OF_SMALL_MODEL` layers and with random
    weights in fp32, whole on a device, which computes by the same path."""
    config = copy.deepcopy(model.config)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = layer_types[:LAYERS_OF_SMALL_MODEL]
    config.num_hidden_layers = min(LAYERS_OF_SMALL_MODEL, config.num_hidden_layers)
    attention = OWN_ATTENTION if takes_plain_path(model) else config._attn_implementation
    generators = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=generators), torch.no_grad():
        torch.manual_seed(0)
        with device:
            small = AutoModelForCausalLM.from_config(
                config, attn_implementation=attention, dtype=torch.float32
            )
        for parameter in small.parameters():
            parameter += SPREAD_OF_SMALL_MODEL * torch.randn_like(parameter)
    if takes_plain_path(model):
        take_plain_path(small)
    return small
