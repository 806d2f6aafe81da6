"""Rows of a batch as one sequence without padding, in which rows of one prompt share it, and
attention over that. Models for which this is not exact take the plain path: rows padded, a model's
own attention, its own logits."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Protocol

import torch

from alignment.core.tokens import Row, rows_by_prompt
from alignment.model.attention import AttentionRule, Inputs, JoinedAttention, Part
from alignment.model.flash_attention import FlashAttention, FlashLayout, Lengths, takes_flash
from alignment.model.huggingface import (
    ALL_ATTENTION_FUNCTIONS,
    AttentionInterface,
    PreTrainedModel,
    decoder_layers,
)
from alignment.model.kernels import compiled
from alignment.model.short_rows import ShortRowAttention, ShortRows, takes_short_rows


@dataclass
class Packing:
    """N tokens in one sequence without padding: first S prefixes, then R suffixes. A prompt of
    several rows is a prefix, their responses its suffixes; any other row is a prefix as a whole. A
    token sees those before it in its suffix and prefix."""

    input_ids_1N: torch.Tensor
    position_ids_1N: torch.Tensor
    spots_BT: torch.Tensor
    """The place in the sequence of token t of row b of the batch; 0 beyond the row's end."""
    parts: list[Part]
    """Who sees whom: prefixes and suffixes themselves, then suffixes their prefixes, which are of
    one length in each part."""
    lengths: Lengths
    applied: list[bool] = field(default_factory=list)
    """Not empty once a model's attention has gone by this packing."""
    is_fused: bool = False
    """Whether calls of flash kernels are joined by a compiled kernel."""
    copies: dict[torch.device, "Packing"] = field(default_factory=dict)
    """The same on other devices."""

    def attend(self, module, query, key, value, rule) -> torch.Tensor:
        """See `attention_by_layout`; there is one row, of N tokens."""
        # Under autocast only values are sure to be of the type of products: rotary embeddings are
        # in float32.
        q_NHD, k_NHD, v_NHD = (
            tensor.squeeze(0).transpose(0, 1).to(value.dtype) for tensor in (query, key, value)
        )
        packing = self.to(query.device)
        inputs = Inputs(q_NHD, k_NHD, v_NHD)
        if takes_flash(inputs, self.lengths, rule):
            return FlashAttention.apply(*inputs, packing.flash, rule.scaling)[None]
        if takes_short_rows(inputs, self.lengths, rule):
            return ShortRowAttention.apply(*inputs, packing.short_rows, rule.scaling)[None]
        return JoinedAttention.apply(*inputs, rule.sinks, packing.parts, rule)[None]

    @cached_property
    def flash(self) -> FlashLayout:
        """The same for flash kernels, made once for all layers."""
        return FlashLayout.of(self.lengths, self.input_ids_1N.device, self.is_fused)

    @cached_property
    def short_rows(self) -> list[ShortRows]:
        """The same for short rows on a CPU, made once for all layers."""
        prefixes, *others = self.parts
        rows = [ShortRows(prefixes.queries_XQ, None, sum(self.lengths.prefixes))]
        if others:
            numbers = []
            tokens = 0
            for number, own in enumerate(self.lengths.suffixes):
                numbers += [number] * len(own)
                tokens += sum(own)
            longest = max(self.lengths.prefixes[number] for number in numbers)
            before_XP = prefixes.queries_XQ[numbers, :longest]
            rows.append(ShortRows(others[0].queries_XQ, before_XP, tokens))
        return rows

    def to(self, device: torch.device | str) -> "Packing":
        """The same on another device, copied there once however many layers ask."""
        device = torch.device(device)
        if device == self.input_ids_1N.device:
            return self
        if device not in self.copies:
            parts = []
            for queries, keys, before in self.parts:
                parts.append(Part(send(queries, device), send(keys, device), before))
            self.copies[device] = replace(
                self,
                input_ids_1N=send(self.input_ids_1N, device),
                position_ids_1N=send(self.position_ids_1N, device),
                spots_BT=send(self.spots_BT, device),
                parts=parts,
                copies={},
            )
        return self.copies[device]


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on its way to a device. The host does not wait for the copy, for which the memory
    must be pinned."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)  # what comes to a CPU must have arrived


class Segment(NamedTuple):
    """One prefix or suffix: a run of tokens of the sequence, and the rows that have it."""

    ids: tuple[int, ...]
    first: int
    """Position, in its rows, of the first token."""
    rows: list[int]
    prefix: int
    """Number of the prefix that it is, or that it follows."""

    @property
    def end(self) -> int:
        """Position, in its rows, after the last token."""
        return self.first + len(self.ids)


def pack(rows: Sequence[Row], is_fused: bool = False) -> Packing:
    """Pack rows, on the CPU: those of one prompt together."""
    prefixes, suffixes = _segments(rows)
    segments = [*prefixes, *suffixes]
    # The places in the sequence of each segment's tokens: one segment after another.
    lengths = [len(segment.ids) for segment in segments]
    ends = list(itertools.accumulate(lengths))
    places = []
    for end, length in zip(ends, lengths, strict=True):
        places.append(torch.arange(end - length, end))

    longest = max(len(prompt) + len(response) for prompt, response in rows)
    spots_BT = torch.zeros(len(rows), longest, dtype=torch.int64)
    for segment, places_of_segment in zip(segments, places, strict=True):
        spots_BT[segment.rows, segment.first : segment.end] = places_of_segment
    ids = itertools.chain.from_iterable(segment.ids for segment in segments)
    positions = [torch.arange(segment.first, segment.end) for segment in segments]
    return Packing(
        input_ids_1N=torch.tensor([list(ids)]),
        position_ids_1N=torch.cat(positions)[None],
        spots_BT=spots_BT,
        parts=_parts(prefixes, suffixes, places),
        lengths=_lengths(prefixes, suffixes),
        is_fused=is_fused,
    )


def _segments(rows: Sequence[Row]) -> tuple[list[Segment], list[Segment]]:
    """The prefixes of rows, and the suffixes: the responses, other than empty ones, of prompts that
    several rows have."""
    prefixes = []
    suffixes = []
    for prefix, (prompt, members) in enumerate(rows_by_prompt(rows).items()):
        if len(members) == 1:
            _, response = rows[members[0]]
            prefixes.append(Segment(prompt + response, 0, members, prefix))
            continue
        prefixes.append(Segment(prompt, 0, members, prefix))
        for row in members:
            _, response = rows[row]
            if response:
                suffixes.append(Segment(response, len(prompt), [row], prefix))
    return prefixes, suffixes


def _parts(
    prefixes: Sequence[Segment], suffixes: Sequence[Segment], places: Sequence[torch.Tensor]
) -> list[Part]:
    """Who sees whom, of segments with these places, prefixes first: see `Packing.parts`."""
    prefix_places = places[: len(prefixes)]
    suffix_places = places[len(prefixes) :]
    parts = []
    for own in (prefix_places, suffix_places):
        if own:
            places_XP = _padded(own)
            parts.append(Part(places_XP, places_XP, 0))
    # A suffix sees all of its prefix, so that prefixes of one length need no padding.
    seen_by_length: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for suffix, own in zip(suffixes, suffix_places, strict=True):
        prefix = prefix_places[suffix.prefix]
        seen_by_length.setdefault(len(prefix), []).append((own, prefix))
    for length, seen in sorted(seen_by_length.items(), key=lambda item: item[0]):
        queries = _padded([own for own, _ in seen])
        keys = _padded([prefix for _, prefix in seen])
        parts.append(Part(queries, keys, length))
    return parts


def _lengths(prefixes: Sequence[Segment], suffixes: Sequence[Segment]) -> Lengths:
    """The tokens of prefixes, and of each one's suffixes."""
    of_suffixes: list[list[int]] = [[] for _ in prefixes]
    for suffix in suffixes:
        of_suffixes[suffix.prefix].append(len(suffix.ids))
    return Lengths([len(prefix.ids) for prefix in prefixes], of_suffixes)


def _padded(places: Sequence[torch.Tensor]) -> torch.Tensor:
    """Places of several segments as rows [X, P], right-padded with -1."""
    return torch.nn.utils.rnn.pad_sequence(list(places), batch_first=True, padding_value=-1)


class Layout(Protocol):
    """Which tokens see which, for `attention_by_layout`."""

    applied: list[bool]
    """Not empty once a model's attention has gone by the layout."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """The output [rows, tokens, heads, D] of one layer's queries, keys and values [rows, heads,
        tokens, D]."""
        ...


def attention(module, query, key, value, attention_mask, scaling=None, layout=None, **kwargs):
    """(Output, None) of scaled dot-product attention as transformers calls it, by a layout where
    one is given. Raises ValueError for arguments that it does not know, such as a position bias,
    and for those that only a layout knows."""
    window = kwargs.get("sliding_window")
    soft_cap = kwargs.get("softcap")
    sinks = kwargs.get("s_aux")
    if layout is None:
        ends_what_is_seen = window is not None and key.shape[2] > window
        if soft_cap is not None or sinks is not None or ends_what_is_seen:
            raise ValueError(
                "attention without a layout has no window, soft cap or sinks: use attention_named"
            )
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
    for name, argument in kwargs.items():
        if isinstance(argument, torch.Tensor | float) and name not in KNOWN_TO_LAYOUTS:
            raise ValueError(f"attention is told {name}, which is not supported")
    layout.applied.append(True)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rule = AttentionRule(scaling, window, soft_cap, sinks)
    return layout.attend(module, query, key, value, rule), None


# The numbers and tensors beside its scaling that attention by a layout takes, or, as dropout, may
# leave out.
KNOWN_TO_LAYOUTS = {
    "sliding_window",
    "softcap",
    "s_aux",
    "dropout",
    "position_ids",
    "cache_position",
}
# without "sdpa" in it: transformers then refuses models whose attention torch's cannot compute
ATTENTION = "layout"
# Without a mask, for which transformers would wait for the device in each pass: micro-batches could
# not overlap.
AttentionInterface.register(ATTENTION, attention)
# which every family of transformers has, and which leaves out none of the family's features
OWN_ATTENTION = "eager"


def compile_layers(model: PreTrainedModel) -> None:
    """Have torch compile a model's decoder layers, each by itself and for any number of tokens; our
    attention, whose layout differs from batch to batch, is left as it is. Only one thread at a time
    may run a model that `is_compiled`."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(attention))
    for layer in decoder_layers(model):
        # Without hooks, which move inputs between devices.
        layer.forward = compiled(layer.forward)
    # The types of torch say that a module's attributes are tensors or modules.
    model.is_compiled = True  # pyright: ignore[reportArgumentType]


def takes_plain_path(model: PreTrainedModel) -> bool:
    """Whether `take_plain_path` was called with this model."""
    return getattr(model, "takes_plain_path", False)


def take_plain_path(model: PreTrainedModel) -> None:
    """Have a model's log-probs and decoding go by the plain path from now on."""
    # As above, of the types of torch.
    model.takes_plain_path = True  # pyright: ignore[reportArgumentType]
    model.config._attn_implementation = OWN_ATTENTION


@contextmanager
def attention_named(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Have a model compute attention by the entry `name` of transformers' table, whatever it was
    loaded with."""
    before = model.config._attn_implementation
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


@contextmanager
def attention_by_layout(model: PreTrainedModel, layout: Layout) -> Iterator[None]:
    """Have a model's attention go by a layout.

    Raises ValueError if the model drops the layout, which would mix up its rows in silence, or
    would drop it on recomputing layers."""
    recomputes_layers = getattr(model, "is_gradient_checkpointing", False)
    if recomputes_layers and model.config._attn_implementation != ATTENTION:
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
