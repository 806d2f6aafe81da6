"""What a model does at random while it trains: dropout, layers that are left out, noise on a
router's scores.

transformers makes all of it depend on training mode (`module.training`), wherever its size stands:
in an `nn.Dropout`, in a number that a module has copied from the config, or in the config itself.
So a policy that computes in evaluation mode has none of it, of any family. Two things that training
mode also decides are done here for both modes: recomputing layers in backward, and whether two
passes may run at once, which draw from one generator."""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from alignment.model.huggingface import PreTrainedConfig, PreTrainedModel

SETTING_NAMES = re.compile(r"drop|jitter")
# heads which classify whole texts; a language model has none of them
OTHER_HEADS = re.compile(r"^(classifier|summary|cls)_")


def random_settings(config: PreTrainedConfig) -> dict[str, float]:
    """The settings of a config, by name, that make a model compute at random in training mode."""
    return dict(_named_numbers(vars(config)))


def _named_numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The names and sizes of what a config's values have a language model do at random."""
    for name, value in values.items():
        # some families nest a config for each kind of layer
        if isinstance(value, PreTrainedConfig):
            yield from _named_numbers(vars(value))
        elif isinstance(value, Mapping):
            yield from _named_numbers(value)
        # a table of labels has numbers for names and texts for values
        elif _is_positive_number(value) and _is_random_setting(name):
            yield name, value


def _is_positive_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_random_setting(name: str) -> bool:
    is_of_other_head = OTHER_HEADS.match(name) is not None
    return SETTING_NAMES.search(name) is not None and not is_of_other_head


def draws_at_random(model: PreTrainedModel) -> bool:
    """Whether a forward pass of the model, in the mode that its modules are in, draws random
    numbers."""
    if model.training and random_settings(model.config):
        return True
    for module in model.modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        if is_dropout and module.training and module.p > 0:
            return True
    return False


def recompute_layers(model: PreTrainedModel) -> None:
    """Have the decoder's layers be computed again in backward, in both modes (gradient
    checkpointing, Chen et al. 2016, arXiv:1604.06174): transformers does it in training mode alone.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for stack in model.get_decoder().children():
        if isinstance(stack, torch.nn.ModuleList):
            for layer in stack:
                layer.forward = partial(_checkpoint_forward, layer, layer.forward)


def _checkpoint_forward(layer: torch.nn.Module, forward, *arguments, **options):
    """A layer's outputs, computed again in backward: by transformers in training mode, by torch in
    evaluation mode."""
    if layer.training or not torch.is_grad_enabled():
        return forward(*arguments, **options)
    return checkpoint(forward, *arguments, use_reentrant=False, **options)
