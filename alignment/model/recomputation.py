"""What a model computes again in backward, because memory is too short to keep it (gradient
checkpointing, Chen et al. 2016, arXiv:1604.06174): whole layers, or what is inside of their MLPs.
Gradients are the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from alignment.model.huggingface import PreTrainedModel, decoder_layers

MLP = "mlp"
"""The name of a layer's MLP, in nearly all families."""


def recompute_layers(model: PreTrainedModel) -> None:
    """Have the decoder's layers be computed again in backward, in both modes: transformers does it
    in training mode alone, and not for all families, such as JetMoe."""
    if not model.supports_gradient_checkpointing:
        for layer in decoder_layers(model):
            layer.forward = partial(_recompute, layer.forward)
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in decoder_layers(model):
        layer.forward = partial(_recompute_in_evaluation, layer, layer.forward)


def recompute_mlps(model: PreTrainedModel, number: int) -> None:
    """Have so many of the decoder's layers, evenly spread, keep the input of their MLP alone, and
    compute what is inside of it again in backward. Layers without an MLP of that name keep all."""
    layers = decoder_layers(model)
    for place, layer in enumerate(layers):
        mlp: Any = getattr(layer, MLP, None)
        is_chosen = (place + 1) * number // len(layers) > place * number // len(layers)
        if mlp is None or not is_chosen:
            continue
        if hasattr(mlp, "recomputes_inner"):
            mlp.recomputes_inner = True
        else:
            mlp.forward = partial(_recompute, mlp.forward)


def _recompute_in_evaluation(layer: torch.nn.Module, forward: Callable, *arguments, **options):
    """A layer's outputs, computed again in backward: by transformers in training mode, by torch in
    evaluation mode."""
    if layer.training:
        return forward(*arguments, **options)
    return _recompute(forward, *arguments, **options)


def _recompute(forward: Callable, *arguments, **options):
    """The outputs of `forward`, computed again in backward. Torch stops there once it has what
    backward reads, so that an MLP's last product is not computed again."""
    if not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(forward, *arguments, use_reentrant=False, **options)
