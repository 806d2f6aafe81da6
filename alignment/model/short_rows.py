"""Attention of short rows on a CPU, where a call for each length of a prompt takes longer than what
it computes: one call for all prefixes, and one for all suffixes, which see their prefixes and
themselves under a mask."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from alignment.model.attention import AttentionRule, Inputs
from alignment.model.flash_attention import Lengths

aten = torch.ops.aten

LONGEST_ROW = 128
"""Tokens of a prompt and a response at most.

Source: benchmarks/README.md, "Attention of packed rows". Shown wrong by: `benchmarks.attention`
with rows of about so many tokens. Read by: `takes_short_rows`."""


def takes_short_rows(inputs: Inputs, lengths: Lengths, rule: AttentionRule) -> bool:
    """Whether a layer's attention is by `ShortRowAttention`: on a CPU, where no row has more than
    `LONGEST_ROW` tokens, by a rule that torch's kernel knows."""
    longest = lengths.longest_row
    return (
        inputs.q.device.type == "cpu"
        and longest <= LONGEST_ROW
        and rule.soft_cap is None
        and rule.sinks is None
        and (not rule.window or rule.window >= longest)
        and inputs.q.shape[2] == inputs.v.shape[2]
    )


@dataclass(frozen=True)
class ShortRows:
    """Rows of queries, as they are in a sequence, each of which sees a row of keys in one call of
    torch's kernel."""

    queries_XQ: torch.Tensor
    """Places in the sequence, right-padded with -1; from one token to the next they grow by 1."""
    prefixes_XP: torch.Tensor | None
    """Places of the prefix that stands before each row's own tokens, right-padded with -1. None
    where these are prefixes themselves."""
    tokens: int
    """Of all rows of queries, without padding."""

    @cached_property
    def places(self) -> torch.Tensor:
        """Of the queries [X * Q]; at padding anything."""
        return self.queries_XQ.flatten().clamp(min=0)

    @cached_property
    def key_places(self) -> torch.Tensor:
        """Of the keys [X * K]; at padding anything."""
        if self.prefixes_XP is None:
            return self.places
        return torch.cat([self.prefixes_XP, self.queries_XQ], dim=1).flatten().clamp(min=0)

    @cached_property
    def tokens_N(self) -> torch.Tensor:
        """Which of [X * Q] are tokens, in the order of the sequence."""
        is_token_N = self.queries_XQ.flatten() >= 0
        return is_token_N.nonzero_static(size=self.tokens).squeeze(1)

    @cached_property
    def is_padding_X1Q(self) -> torch.Tensor:
        """Whether a query is no token."""
        return self.queries_XQ[:, None] < 0

    @cached_property
    def mask_X1QK(self) -> torch.Tensor | None:
        """0 where a query sees a key, else -inf; None where it sees all keys up to itself."""
        prefix_XP = self.prefixes_XP
        if prefix_XP is None:
            return None
        rows, queries = self.queries_XQ.shape
        is_prefix_XQP = (prefix_XP >= 0)[:, None].expand(-1, queries, -1)
        # What a place beyond a row's end sees is dropped; it must see something.
        device = prefix_XP.device
        is_earlier_QQ = torch.ones(queries, queries, dtype=torch.bool, device=device).tril()
        is_seen_XQK = torch.cat([is_prefix_XQP, is_earlier_QQ.expand(rows, -1, -1)], dim=2)
        mask_XQK = torch.zeros(is_seen_XQK.shape, device=device)
        mask_XQK.masked_fill_(~is_seen_XQK, -torch.inf)
        return mask_XQK[:, None]

    def seen(self, dtype: torch.dtype) -> dict[str, Any]:
        """Who sees whom, for torch's kernel and queries in `dtype`, in which it reads a mask."""
        mask = self.mask_X1QK
        if mask is None:
            return {"is_causal": True}
        return {"is_causal": False, "attn_mask": mask.to(dtype)}

    def take(self, tensor_NHD: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """The rows [X, H, places, D] of a sequence at some places of each."""
        rows = tensor_NHD.index_select(0, places).unflatten(0, (len(self.queries_XQ), -1))
        return rows.transpose(1, 2)

    def put(self, rows_XHQD: torch.Tensor, sequence_NHD: torch.Tensor) -> None:
        """Write the rows' tokens to their part of a sequence."""
        flat = rows_XHQD.transpose(1, 2).flatten(0, 1).to(sequence_NHD.dtype)
        torch.index_select(flat, 0, self.tokens_N, out=sequence_NHD)


class ShortRowAttention(torch.autograd.Function):
    """(q [N, H, D], k [N, J, D], v [N, J, D], prefixes and suffixes as `ShortRows`, scaling) -> [N,
    H, D]. Kept for backward: keys, values, the rows of queries and outputs, and one number a query
    and head. Rows of keys and values are gathered again, since each has its prefix once more."""

    @staticmethod
    def forward(ctx, q_NHD, k_NJD, v_NJD, layout: Sequence[ShortRows], scaling: float):
        out_NHD = q_NHD.new_empty(q_NHD.shape)
        kept = []
        start = 0
        for rows in layout:
            end = start + rows.tokens
            q = rows.take(q_NHD, rows.places)
            k = rows.take(k_NJD, rows.key_places)
            v = rows.take(v_NJD, rows.key_places)
            out, log_sum = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, **rows.seen(q.dtype), scale=scaling
            )
            rows.put(out, out_NHD[start:end])
            # Where the denominator is infinite, weights are 0.
            kept += [q, out, log_sum.masked_fill_(rows.is_padding_X1Q, torch.inf)]
            start = end
        ctx.save_for_backward(k_NJD, v_NJD, *kept)
        ctx.layout = layout
        ctx.scaling = scaling
        return out_NHD

    @staticmethod
    def backward(ctx, gradient_NHD):
        k_NJD, v_NJD, *kept = ctx.saved_tensors
        precise = torch.promote_types(gradient_NHD.dtype, torch.float32)
        sums = []
        # Queries are as many, and as wide, as outputs (`takes_short_rows`).
        for shape in (gradient_NHD.shape, k_NJD.shape, v_NJD.shape):
            sums.append(gradient_NHD.new_empty(shape, dtype=precise))
        start = 0
        for number, rows in enumerate(ctx.layout):
            end = start + rows.tokens
            q, out, log_sum = kept[3 * number : 3 * number + 3]
            k = rows.take(k_NJD, rows.key_places)
            v = rows.take(v_NJD, rows.key_places)
            gradient = rows.take(gradient_NHD, rows.places)
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, out, log_sum, 0.0, **rows.seen(q.dtype), scale=ctx.scaling
            )
            for total, by_rows in zip(sums, gradients, strict=True):
                own = by_rows[:, :, -q.shape[2] :]
                rows.put(own, total[start:end])
            if rows.prefixes_XP is not None:
                places = rows.prefixes_XP.flatten().clamp(min=0)
                for total, by_rows in zip(sums[1:], gradients[1:], strict=True):
                    by_prefix = by_rows[:, :, : -q.shape[2]].transpose(1, 2).flatten(0, 1)
                    total.index_add_(0, places, by_prefix.to(precise))
            start = end
        return *(total.to(gradient_NHD.dtype) for total in sums), None, None
