"""What a model does at random while it trains: dropout, layers that are left out, noise on a
router's scores.

transformers makes all of it depend on training mode (`module.training`), wherever its size stands:
in an `nn.Dropout`, in a number that a module has copied from the config, or in the config itself.
So a policy that computes in evaluation mode has none of it, of any family. Whether two passes may
run at once, which draw from one generator, is decided here, too."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

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
