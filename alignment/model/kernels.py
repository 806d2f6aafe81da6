"""The work between a model's matrix products, as pure functions that torch compiles to one kernel
each, which reads its inputs once and writes its outputs once; and how a model's layers get them."""

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from alignment.model.huggingface import PreTrainedModel, decoder_layers
from alignment.model.products import cast_weight, dtype_of_products, weight_gradient

VARIANTS = 64
"""Of compiled code, at most: by device, gradient mode, window, adapters."""


def compiled(function: Callable) -> Callable:
    """A function, compiled by torch for any number of tokens when it is first called."""
    options: dict[str, Any] = {"dynamic": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = VARIANTS
    else:  # An older torch has one limit for all code.
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(**options)(function)


FUSED: dict[Callable, Callable] = {}
"""Function -> the same, compiled."""


def fused(function: Callable) -> Callable:
    """One of this file's functions, compiled once a process."""
    if function not in FUSED:
        FUSED[function] = compiled(function)
    return FUSED[function]


# --- the functions --------------------------------------------------------------------------------


def cast_norm(
    own: Callable, module: torch.nn.Module, hidden: torch.Tensor, dtype: torch.dtype | None
) -> torch.Tensor:
    """A norm by its family's own code, in the type of the products that read it (None: its own)."""
    output = own(module, hidden)
    return output if dtype is None else output.to(dtype)


def cast_rotation(
    own: Callable, dtype: torch.dtype | None, *arguments: torch.Tensor, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys turned by their positions, by a family's own code for (queries, keys,
    cosines, sines), in the type of the products that read them (None: its own)."""
    q, k = own(*arguments, **options)
    if dtype is None:
        return q, k
    return q.to(dtype), k.to(dtype)


def gated(activation: Callable, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """What an MLP's last product reads: act(gate) * up."""
    return activation(gate) * up


class GatedGradients(NamedTuple):
    """What the backward pass of an MLP needs of `gated`."""

    product: torch.Tensor
    """Its output, again."""
    to_gate: torch.Tensor
    to_up: torch.Tensor


def gated_gradients(
    activation: Callable, gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> GatedGradients:
    """The output of `gated` and the gradients by its inputs, from the gradient by its output."""
    # It returns a third only where it is told so.
    activated, backward = torch.func.vjp(activation, gate)  # pyright: ignore[reportAssignmentType]
    (to_gate,) = backward(gradient * up)
    return GatedGradients(activated * up, to_gate, gradient * activated)


def join(
    out_RHD: torch.Tensor,
    log_sum_HR: torch.Tensor,
    other_out_RHD: torch.Tensor,
    other_log_sum_HR: torch.Tensor,
) -> None:
    """Join what the same queries see of other keys to an attention's output and log-sum-exp, in
    place: with s = sigmoid(L' - L), the output is (1 - s) o + s o', and logaddexp(L, L')."""
    share_RH1 = torch.sigmoid(other_log_sum_HR - log_sum_HR).T[..., None]
    log_sum_HR.copy_(torch.logaddexp(log_sum_HR, other_log_sum_HR))
    # The sum is rounded to 16 bits once.
    torch.add(out_RHD * (1 - share_RH1), other_out_RHD * share_RH1, out=out_RHD)


class Tempering(NamedTuple):
    """What makes the logits of a distribution of a head's output."""

    temperature: float
    soft_cap: float | None = None

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """A head's output with its soft cap c, c tanh(z / c), over the temperature."""
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits / self.temperature


def label_scores(
    logits_NV: torch.Tensor, labels_N: torch.Tensor, tempering: Tempering
) -> torch.Tensor:
    """[3, N] of the tempered distribution: the labels' log-probs, entropies in nats, and the
    logarithm of the sum by which probabilities are normalised."""
    z_NV = tempering.apply(logits_NV)
    # Two passes over the logits: one for the highest, one for both sums. With d = z - max z and
    # s = sum exp d, the entropy is log s - sum(d exp d) / s, whose terms are of one sign.
    highest_N1 = z_NV.amax(dim=-1, keepdim=True)
    below_NV = z_NV - highest_N1
    parts_NV = below_NV.exp()
    sum_N1 = parts_NV.sum(dim=-1, keepdim=True)
    weighted_N1 = (parts_NV * below_NV).sum(dim=-1, keepdim=True)
    entropy_N1 = sum_N1.log() - weighted_N1 / sum_N1
    log_sum_N1 = highest_N1 + sum_N1.log()
    # Of the label's logit alone: what is gathered from all log-probs would be written first.
    chosen_N1 = tempering.apply(logits_NV.gather(-1, labels_N[:, None]))
    return torch.cat([chosen_N1 - log_sum_N1, entropy_N1, log_sum_N1], dim=1).T


class RowGradients(NamedTuple):
    """Gradients of a loss by what each row of logits gives."""

    log_prob_N: torch.Tensor
    entropy_N: torch.Tensor | None = None
    """None: entropies are only reported."""


def logit_gradient(
    logits_NV: torch.Tensor,
    labels_N: torch.Tensor,
    scores_3N: torch.Tensor,
    gradients: RowGradients,
    tempering: Tempering,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient [N, V] by a head's output, in `dtype`, of log-probs with the gradient g
    and entropies H with g': (1[y] - p) g - p (log p + H) g', over the temperature, times
    1 - tanh(z / c)^2 with a soft cap c. `scores_3N`: see `label_scores`."""
    _, entropy_N, log_sum_N = scores_3N
    log_p_NV = tempering.apply(logits_NV) - log_sum_N[:, None]
    p_NV = log_p_NV.exp()
    tokens_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_label_NV = tokens_V == labels_N[:, None]
    by_logits = (is_label_NV.to(p_NV.dtype) - p_NV) * gradients.log_prob_N[:, None]
    if gradients.entropy_N is not None:
        by_entropy = p_NV * (log_p_NV + entropy_N[:, None]) * gradients.entropy_N[:, None]
        by_logits = by_logits - by_entropy
    by_logits = by_logits / tempering.temperature
    if tempering.soft_cap is not None:
        by_logits = by_logits * (1 - torch.tanh(logits_NV / tempering.soft_cap).square())
    return by_logits.to(dtype)


# --- a model's layers -----------------------------------------------------------------------------

ROTATION = "apply_rotary_pos_emb"
"""The function that layers look up in their family's code."""
READ_BY_PRODUCTS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
"""Norms of a layer that linear layers alone read, where they are given the fp32 residual."""
GATED_MLP = {"down_proj", "act_fn", "gate_proj", "up_proj"}
"""All that the code of an MLP's forward pass names, which is down(act(gate(x)) * up(x))."""


def has_fused_kernels(model: PreTrainedModel) -> bool:
    """Whether log-probs and attention's joints of a model are by fused kernels."""
    return getattr(model, "has_fused_kernels", False)


def use_fused_kernels(model: PreTrainedModel) -> None:
    """Have fused kernels compute a model's log-probs and joints from now on. Only one thread at a
    time may run a model that `is_compiled`."""
    # The types of torch say that a module's attributes are tensors or modules.
    model.has_fused_kernels = True  # pyright: ignore[reportArgumentType]
    model.is_compiled = True  # pyright: ignore[reportArgumentType]


def fuse_layers(model: PreTrainedModel) -> None:
    """Have compiled functions compute a model's norms, rotations and gated MLPs, each by its
    family's own code, wherever a layer has modules that are written as we know them. Other models
    of the family keep their own."""
    decoder: Any = model.get_decoder()
    for module in decoder.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _fuse_norm(module, is_cast=module is getattr(decoder, "norm", None))
        if _names_in_forward(module) == GATED_MLP:
            _fuse_mlp(module)
        if ROTATION in _names_in_forward(module):
            _fuse_rotation(module)
    for layer in decoder_layers(model):
        _cast_norms_of_layer(layer)


def _names_in_forward(module: torch.nn.Module) -> set[str]:
    """The attributes and functions that the code of a module's class names."""
    code = getattr(type(module).forward, "__code__", None)
    return set() if code is None else set(code.co_names)


def _cast_norms_of_layer(layer: torch.nn.Module) -> None:
    """Have norms write the type of the products that read them, in a layer with a dense MLP and
    projections: a mixture's experts are added up in the type of what they are given."""
    children = dict(layer.named_children())
    attention = children.get("self_attn")
    is_dense = _names_in_forward(children.get("mlp", layer)) == GATED_MLP
    if not is_dense or not hasattr(attention, "q_proj"):
        return
    for name in READ_BY_PRODUCTS:
        norm = children.get(name)
        if norm is not None and type(norm).__name__.endswith("RMSNorm"):
            _fuse_norm(norm, is_cast=True)


def product_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    """The type of matrix products where autocast gives them another than a tensor's; else None."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.dtype == torch.float32:
        return torch.get_autocast_dtype(kind)
    return None


def _fuse_norm(module: torch.nn.Module, is_cast: bool) -> None:
    """Bind a compiled forward pass to a norm; `is_cast`: in the type of products where it is given
    fp32."""
    own = type(module).forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        dtype = product_dtype(hidden) if is_cast else None
        return fused(cast_norm)(own, module, hidden, dtype)

    module.forward = forward


class GatedMLP(torch.autograd.Function):
    """(hidden [..., H], weights of gate and up [M, H] and down [H, M], activation, whether gate and
    up are kept) -> down(act(gate x) * up x) [..., H], in the type of products. What down reads is
    made again in backward, by the kernel that reads gate and up there anyway; gate and up are where
    they are not kept (as Chen et al. 2016, arXiv:1604.06174, of a part of a layer). Gradients by
    weights are added up in fp32, which a product of 16 bits would be rounded and cast for."""

    @staticmethod
    def forward(ctx, hidden, gate_MH, up_MH, down_HM, activation, keeps_inner):
        dtype = dtype_of_products(gate_MH)
        with torch.autocast(hidden.device.type, enabled=False):
            x_NH = hidden.to(dtype).flatten(0, -2)
            casts = [cast_weight(weight, dtype) for weight in (gate_MH, up_MH, down_HM)]
            gate_NM = x_NH @ casts[0].T
            up_NM = x_NH @ casts[1].T
            out_NH = fused(gated)(activation, gate_NM, up_NM) @ casts[2].T
        inner = (gate_NM, up_NM) if keeps_inner else ()
        ctx.save_for_backward(x_NH, gate_MH, up_MH, down_HM, *casts, *inner)
        ctx.activation = activation
        ctx.hidden_dtype = hidden.dtype
        return out_NH.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx, gradient):
        x_NH, *weights_and_casts = ctx.saved_tensors
        gate_MH, up_MH, down_HM, gate_cast, up_cast, down_cast, *inner = weights_and_casts
        wants_hidden, wants_gate, wants_up, wants_down, *_ = ctx.needs_input_grad
        with torch.autocast(x_NH.device.type, enabled=False):
            if not inner:
                inner = [x_NH @ gate_cast.T, x_NH @ up_cast.T]
            gate_NM, up_NM = inner
            by_out_NH = gradient.to(x_NH.dtype).flatten(0, -2)
            by_product_NM = by_out_NH @ down_cast
            product_NM, to_gate_NM, to_up_NM = fused(gated_gradients)(
                ctx.activation, by_product_NM, gate_NM, up_NM
            )
            to_down = to_gate = to_up = to_hidden = None
            if wants_down:
                to_down = weight_gradient(down_HM, by_out_NH.T, product_NM)
            if wants_gate:
                to_gate = weight_gradient(gate_MH, to_gate_NM.T, x_NH)
            if wants_up:
                to_up = weight_gradient(up_MH, to_up_NM.T, x_NH)
            if wants_hidden:
                to_hidden_NH = (to_gate_NM @ gate_cast).addmm_(to_up_NM, up_cast)
                to_hidden = to_hidden_NH.view(*gradient.shape[:-1], -1).to(ctx.hidden_dtype)
        return to_hidden, to_gate, to_up, to_down, None, None


def _fuse_mlp(module: Any) -> None:
    """Bind a forward pass to an MLP: `GatedMLP` where its projections are matrices alone; else only
    activation and product are one kernel."""
    projections = (module.gate_proj, module.up_proj, module.down_proj)
    are_matrices = all(type(linear) is torch.nn.Linear for linear in projections)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        weights = [linear.weight for linear in projections]
        return GatedMLP.apply(hidden, *weights, module.act_fn, not module.recomputes_inner)

    def forward_in_parts(hidden: torch.Tensor) -> torch.Tensor:
        gate = module.gate_proj(hidden)
        up = module.up_proj(hidden)
        return module.down_proj(fused(gated)(module.act_fn, gate, up))

    if are_matrices and all(linear.bias is None for linear in projections):
        module.recomputes_inner = False
        module.forward = forward
    else:
        module.forward = forward_in_parts


def _fuse_rotation(module: torch.nn.Module) -> None:
    """Bind to an attention module its own forward pass, which finds a compiled rotation under the
    name of its family's."""
    own_forward: Any = type(module).forward
    own_rotation = own_forward.__globals__[ROTATION]

    def rotate(*arguments, **options):
        if len(arguments) != 4:  # Of a family that turns each by itself, or says an axis.
            return own_rotation(*arguments, **options)
        kind = arguments[0].device.type
        dtype = None
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        return fused(cast_rotation)(own_rotation, dtype, *arguments, **options)

    names = {**own_forward.__globals__, ROTATION: rotate}
    forward = types.FunctionType(
        own_forward.__code__,
        names,
        own_forward.__name__,
        own_forward.__defaults__,
        own_forward.__closure__,
    )
    forward.__kwdefaults__ = own_forward.__kwdefaults__
    module.forward = functools.partial(forward, module)
