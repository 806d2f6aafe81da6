"""Attention of short rows on a CPU, where a call for each length of a prompt takes longer than what
it computes: all suffixes see their prefixes and themselves in one call, under a mask."""

import torch

from alignment.model.attention import AttentionRule, Inputs, Part
from alignment.model.flash_attention import Lengths

LONGEST_ROW = 128
"""Tokens of a prompt and a response at most.

Source: benchmarks/README.md, "Attention of packed rows". Shown wrong by: `benchmarks.attention`
with rows of about so many tokens. Read by: `takes_short_rows`."""


def takes_short_rows(inputs: Inputs, lengths: Lengths, rule: AttentionRule) -> bool:
    """Whether a layer's attention is by `short_parts`: on a CPU, where no row has more than
    `LONGEST_ROW` tokens, by a rule that torch's kernel knows."""
    longest = lengths.longest_row
    return (
        inputs.q.device.type == "cpu"
        and longest <= LONGEST_ROW
        and rule.soft_cap is None
        and (not rule.window or rule.window >= longest)
        and inputs.q.shape[2] == inputs.v.shape[2]
    )


def short_parts(prefixes: Part, suffixes: Part, lengths: Lengths) -> list[Part]:
    """The prefixes, which see themselves, and the suffixes, which see their prefixes too, of two
    parts that see themselves."""
    numbers = []
    for number, own in enumerate(lengths.suffixes):
        numbers += [number] * len(own)
    longest = max(lengths.prefixes[number] for number in numbers)
    prefix_XP = prefixes.queries_XQ[numbers, :longest]
    own_XQ = suffixes.queries_XQ
    rows, queries = own_XQ.shape
    is_prefix_XQP = (prefix_XP >= 0)[:, None].expand(-1, queries, -1)
    # What a place beyond a row's end sees is dropped; it must see something.
    is_earlier_QQ = torch.ones(queries, queries, dtype=torch.bool, device=own_XQ.device).tril()
    is_seen_XQK = torch.cat([is_prefix_XQP, is_earlier_QQ.expand(rows, -1, -1)], dim=2)
    mask_XQK = torch.zeros(is_seen_XQK.shape, device=own_XQ.device)
    mask_XQK.masked_fill_(~is_seen_XQK, -torch.inf)
    keys_XK = torch.cat([prefix_XP, own_XQ], dim=1)
    return [prefixes, Part(own_XQ, keys_XK, 0, mask_XQK[:, None])]
