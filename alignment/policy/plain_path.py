"""The plain path, for what packing does not compute exactly: rows padded, a model's own attention, its own logits."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from alignment.core.tokens import Row
from alignment.policy.packing import attention_named

OWN_ATTENTION = "eager"  # which every family of transformers has, and which leaves out none of the family's features


def takes_plain_path(model: torch.nn.Module) -> bool:
    """Whether `take_plain_path` was called with this model."""
    return getattr(model, "takes_plain_path", False)


def take_plain_path(model: torch.nn.Module) -> None:
    """Have a model's log-probs and decoding go by the plain path from now on."""
    model.takes_plain_path = True
    model.config._attn_implementation = OWN_ATTENTION


def own_attention(model: torch.nn.Module) -> AbstractContextManager:
    """A context in which a model computes its own attention, whatever it was loaded with."""
    return attention_named(model, OWN_ATTENTION)


def padded_logits(model: torch.nn.Module, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The model's own logits at the mask's N positions, [N, V], in the order of the flattened mask. `input_ids` and `mask`:
    [batch, sequence], right-padded."""
    device = model.get_input_embeddings().weight.device
    last_B1 = mask.int().cumsum(dim=1).argmax(dim=1, keepdim=True)
    attention_mask = (torch.arange(mask.shape[1]) <= last_B1).long()
    logits = model(input_ids=input_ids.to(device), attention_mask=attention_mask.to(device), use_cache=False).logits
    return logits[mask.to(logits.device)]


def unshared(rows: Sequence[Row]) -> list[Row]:
    """Rows that share no prompt, for which each one's tokens count in full."""
    return [((*prompt, *response), ()) for prompt, response in rows]
