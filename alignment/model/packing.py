"""Rows of a batch as one sequence without padding, in which rows of one prompt share it, and
attention over that. Models for which this is not exact take the plain path: rows padded, a model's
own attention, its own logits."""

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from alignment.core.tokens import Row, rows_by_prompt
from alignment.model.attention import AttentionRule, JoinedAttention, Part
from alignment.model.huggingface import ALL_ATTENTION_FUNCTIONS, AttentionInterface


@dataclass
class Packing:
    """N tokens in one sequence without padding: first S prefixes, then R suffixes. A prompt of
    several rows is a prefix, their responses its suffixes; any other row is a prefix as a whole. A
    token sees those before it in its suffix and prefix."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    # The place in the sequence of token t of row b of the batch; 0 beyond the row's end
    spots_BT: torch.Tensor
    # Who sees whom: prefixes and suffixes themselves, then suffixes their prefixes, which are of
    # one length
    parts: list[Part]
    applied: list[bool] = field(default_factory=list)
    copies: dict[torch.device, "Packing"] = field(default_factory=dict)

    def attend(self, module, query, key, value, rule) -> torch.Tensor:
        """See `attention_by_layout`; there is one row, of N tokens."""
        # Under autocast only values are sure to be of the type of products: rotary embeddings are
        # in float32.
        q_NHD, k_NHD, v_NHD = (
            tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)
        )
        return JoinedAttention.apply(
            q_NHD, k_NHD, v_NHD, rule.sinks, self.to(query.device).parts, rule
        )[None]

    def to(self, device: torch.device | str) -> "Packing":
        """The same on another device, copied there once however many layers ask."""
        device = torch.device(device)
        if device == self.input_ids_1N.device:
            return self
        if device not in self.copies:
            moved = {
                name: send(value, device)
                for name, value in vars(self).items()
                if isinstance(value, torch.Tensor)
            }
            parts = [
                Part(send(queries, device), send(keys, device), before)
                for queries, keys, before in self.parts
            ]
            self.copies[device] = replace(self, **moved, parts=parts, copies={})
        return self.copies[device]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to a device. The host does not wait for the copy, for which the memory
    must be pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # what comes to a CPU must have arrived


def pack(rows: Sequence[Row]) -> Packing:
    """Pack rows, on the CPU: those of one prompt together."""
    prompt_groups = rows_by_prompt(rows)
    # Each piece of the sequence has token ids, the position of the first of them, and rows.
    # Prefixes come first.
    pieces = [
        (prompt + rows[own[0]][1] if len(own) == 1 else prompt, 0, own)
        for prompt, own in prompt_groups.items()
    ]
    members = [
        (prefix, row)
        for prefix, own in enumerate(prompt_groups.values())
        for row in own
        if len(own) > 1
    ]
    sharing = [(prefix, row) for prefix, row in members if rows[row][1]]
    pieces += [(rows[row][1], len(rows[row][0]), [row]) for _, row in sharing]

    ends = itertools.accumulate(len(ids) for ids, *_ in pieces)
    ranges = [
        torch.arange(end - len(ids), end) for (ids, *_), end in zip(pieces, ends, strict=True)
    ]
    spots_BT = torch.zeros(
        len(rows), max(len(prompt) + len(response) for prompt, response in rows), dtype=torch.int64
    )
    for (ids, first, own), places in zip(pieces, ranges, strict=True):
        spots_BT[own, first : first + len(ids)] = places
    input_ids_1N = torch.tensor([[token for ids, *_ in pieces for token in ids]])
    position_ids_1N = torch.cat(
        [torch.arange(first, first + len(ids)) for ids, first, _ in pieces]
    )[None]
    prefixes, suffixes = ranges[: len(prompt_groups)], ranges[len(prompt_groups) :]
    parts = [
        Part(places, places, 0) for places in (_padded(own) for own in (prefixes, suffixes) if own)
    ]
    for length in sorted({len(prefixes[prefix]) for prefix, _ in sharing}):
        seen = [
            (own, prefixes[prefix])
            for own, (prefix, _) in zip(suffixes, sharing, strict=True)
            if len(prefixes[prefix]) == length
        ]
        parts.append(Part(*(_padded(places) for places in zip(*seen, strict=True)), length))
    return Packing(input_ids_1N, position_ids_1N, spots_BT, parts)


def _padded(places: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True, padding_value=-1)


def attention(module, query, key, value, attention_mask, scaling=None, layout=None, **kwargs):
    """(Output, None) of scaled dot-product attention as transformers calls it, by a layout where
    one is given. Raises ValueError for arguments that it does not know, such as a position bias,
    and for those that only a layout knows."""
    window, soft_cap, sinks = (kwargs.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    if layout is None:
        if (
            soft_cap is not None
            or sinks is not None
            or (window is not None and key.shape[2] > window)
        ):
            raise ValueError(
                "attention without a layout has no window, soft cap or sinks: use attention_named"
            )
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    # Of the numbers and tensors beside its scaling a layout knows positions, and it leaves out
    # dropout.
    known = {"sliding_window", "softcap", "s_aux", "dropout", "position_ids", "cache_position"}
    unknown = [
        name
        for name, told in kwargs.items()
        if isinstance(told, torch.Tensor | float) and name not in known
    ]
    if unknown:
        raise ValueError(f"attention is told {unknown[0]}, which is not supported")
    layout.applied.append(True)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return (
        layout.attend(module, query, key, value, AttentionRule(scaling, window, soft_cap, sinks)),
        None,
    )


VARIANTS = 64  # of a compiled layer's code, at most: by device, gradient mode, window, adapters
# without "sdpa" in it: transformers then refuses models whose attention torch's cannot compute
ATTENTION = "layout"
# Without a mask, for which transformers would wait for the device in each pass: micro-batches could
# not overlap.
AttentionInterface.register(ATTENTION, attention)
# which every family of transformers has, and which leaves out none of the family's features
OWN_ATTENTION = "eager"


def compiled(forward: Callable) -> Callable:
    """A layer's forward pass, compiled for any number of tokens."""
    options = {"dynamic": True}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = VARIANTS
    else:  # an older torch, which has one limit for all code
        torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    return torch.compile(**options)(forward)


def compile_layers(model: torch.nn.Module) -> None:
    """Have torch compile a model's decoder layers, each by itself and for any number of tokens; our
    attention, whose layout differs from batch to batch, is left as it is. Only one thread at a time
    may run a model that `is_compiled`."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))
    stacks = [
        child for child in model.get_decoder().children() if isinstance(child, torch.nn.ModuleList)
    ]
    for layer in itertools.chain(*stacks):
        # Without hooks, which move inputs between devices.
        layer.forward = compiled(layer.forward)
    model.is_compiled = True


def takes_plain_path(model: torch.nn.Module) -> bool:
    """Whether `take_plain_path` was called with this model."""
    return getattr(model, "takes_plain_path", False)


def take_plain_path(model: torch.nn.Module) -> None:
    """Have a model's log-probs and decoding go by the plain path from now on."""
    model.takes_plain_path = True
    model.config._attn_implementation = OWN_ATTENTION


@contextmanager
def attention_named(model: torch.nn.Module, name: str) -> Iterator[None]:
    """Have a model compute attention by the entry `name` of transformers' table, whatever it was
    loaded with."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def attention_by_layout(model: torch.nn.Module, layout) -> Iterator[None]:
    """Have a model's attention go by a layout: its `attend(module, query, key, value, rule)` makes
    [rows, tokens, heads, D] of [rows, heads, tokens, D]; its list `applied` is not empty once it
    has: a model that ignores it would mix up its rows in silence. Raises ValueError if the model
    drops it, or would on recomputing layers."""
    if model.config._attn_implementation != ATTENTION and getattr(
        model, "is_gradient_checkpointing", False
    ):
        raise ValueError(
            f"load the model with attn_implementation={ATTENTION!r}: its layers are run again in"
            " backward"
        )
    with attention_named(model, ATTENTION):
        yield
    if not layout.applied:
        name = type(model).__name__
        raise ValueError(
            f"{name} does not pass keyword arguments to its attention, so it cannot be told a"
            " layout"
        )
