"""Attention of a packed sequence as that of its parts, joined by their log-sum-exp: no tensor grows
with the square of a part's length. Exact, with gradients, for windows, soft caps and sinks too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

QUERIES_AT_A_TIME = 128  # of each row, where torch has no kernel for a layer's rule

aten = torch.ops.aten


def soft_capped(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """c * tanh(v / c), or v without a cap (Gemma 2, arXiv:2408.00118)."""
    return values if cap is None else cap * torch.tanh(values / cap)


@dataclass(frozen=True)
class AttentionRule:
    """What one layer makes of the products of queries and keys, besides who sees whom:
    transformers' arguments to attention."""

    scaling: float
    window: int | None = None
    """A token sees those less than so many positions before it (Mistral, arXiv:2310.06825)."""
    soft_cap: float | None = None  # of scores: `soft_capped`
    sinks: torch.Tensor | None = None
    """[heads of queries]; exp(sink) joins the denominator (gpt-oss, arXiv:2508.10925)."""

    def softmax(self, scores_XHSK: torch.Tensor) -> torch.Tensor:
        """Attention weights in fp32. The S queries of a head of keys are each of its heads of
        queries, one after another."""
        if self.sinks is None:
            return scores_XHSK.softmax(dim=3, dtype=torch.float32)
        sinks_HG = self.sinks.view(scores_XHSK.shape[1], -1)
        sinks_HS = sinks_HG.repeat_interleave(scores_XHSK.shape[2] // sinks_HG.shape[1], dim=1)
        column = (
            sinks_HS[None, :, :, None].expand(len(scores_XHSK), -1, -1, 1).to(scores_XHSK.dtype)
        )
        return torch.cat([scores_XHSK, column], dim=3).softmax(dim=3, dtype=torch.float32)[..., :-1]


class Part(NamedTuple):
    """Rows of queries, each of which sees a row of keys; both are places in a sequence,
    right-padded with -1."""

    queries_XQ: torch.Tensor
    keys_XK: torch.Tensor  # padded only where they are the queries
    # positions from the first key to the first query; 0: the keys are the queries, and see those up
    # to themselves
    before: int


class JoinedAttention(torch.autograd.Function):
    """(q [N, H, D], k [N, J, D], v [N, J, E], sinks [H] or None, parts, rule) -> [N, H, E]. Each of
    J heads of keys serves H / J heads of queries. The first parts are of tokens that see
    themselves.

    Softmax over several sets of keys is the sets' outputs, each weighted by its share of the
    denominator (Milakov & Gimelshein 2018, arXiv:1805.02867); a sink is a set whose output is 0.
    Given the joint output and denominator, the gradient by a set's scores needs nothing of the
    other sets (Dao et al. 2022, arXiv:2205.14135, algorithm 4). Kept for backward: q, k, v, output,
    and one fp32 number a query and head."""

    @staticmethod
    def forward(ctx, q_NHD, k_NJD, v_NJE, sinks_H, parts, rule):
        (tokens, heads, _), precise = q_NHD.shape, torch.promote_types(q_NHD.dtype, torch.float32)
        out = q_NHD.new_zeros(tokens + 1, heads, v_NJE.shape[2], dtype=precise)
        log_sum = q_NHD.new_zeros(tokens + 1, heads, dtype=precise)
        for queries, keys, before in parts:
            found = _attend(
                _rows(q_NHD, queries), _rows(k_NJD, keys), _rows(v_NJE, keys), before, rule
            )
            own_out, own_log_sum = (
                result.transpose(1, 2).flatten(0, 1).to(precise) for result in found
            )
            places = queries.flatten() % len(out)  # padding's, -1, is that of one more token here
            if before:  # the difference that these keys make, by their share of the denominator
                earlier_out, earlier = out.index_select(0, places), log_sum.index_select(0, places)
                own_out = torch.sigmoid(own_log_sum - earlier)[..., None] * (own_out - earlier_out)
                own_log_sum = torch.logaddexp(own_log_sum, earlier) - earlier
            out.index_add_(0, places, own_out)  # several times faster on a CPU than assigning
            log_sum.index_add_(0, places, own_log_sum)
        if sinks_H is not None:
            out *= torch.sigmoid(log_sum - sinks_H)[..., None]
            log_sum = torch.logaddexp(log_sum, sinks_H)
        out_NHE, log_sum_NH1 = out[:-1].to(q_NHD.dtype), log_sum[:-1, :, None]
        ctx.save_for_backward(q_NHD, k_NJD, v_NJE, sinks_H, out_NHE, log_sum_NH1)
        ctx.parts, ctx.rule = parts, rule
        return out_NHE

    @staticmethod
    def backward(ctx, gradient_NHE):
        *inputs, sinks_H, out_NHE, log_sum_NH1 = ctx.saved_tensors
        sums = [torch.zeros_like(tensor, dtype=log_sum_NH1.dtype) for tensor in inputs]
        for part in ctx.parts:
            _add_gradients(sums, (gradient_NHE, out_NHE, log_sum_NH1), inputs, part, ctx.rule)
        to_sinks = None
        if sinks_H is not None:
            delta_NH = (gradient_NHE * out_NHE).sum(dim=2, dtype=log_sum_NH1.dtype)
            to_sinks = (
                -((sinks_H - log_sum_NH1[..., 0]).exp() * delta_NH).sum(dim=0).to(sinks_H.dtype)
            )
        return (
            *(total.to(tensor.dtype) for total, tensor in zip(sums, inputs, strict=True)),
            to_sinks,
            None,
            None,
        )


def _add_gradients(sums, joint, inputs, part: Part, rule: AttentionRule) -> None:
    """Add a part's gradients by the `inputs` q, k and v to `sums`; `joint` are the output's
    gradient, the output and the log-sum-exp of all parts. What is gathered for that is freed at the
    end."""
    queries, keys, before = part
    gradient, out, log_sum = (_rows(tensor, queries) for tensor in joint)
    # so that padding weighs nothing
    log_sum = log_sum.squeeze(3).masked_fill(queries[:, None] < 0, torch.inf)
    rows = [
        _rows(tensor, places) for tensor, places in zip(inputs, (queries, keys, keys), strict=True)
    ]
    found = _attend_backward((gradient, out, log_sum, *rows), before, rule)
    for total, places, by_rows in zip(sums, (queries, keys, keys), found, strict=True):
        added = by_rows.transpose(1, 2).flatten(0, 1).to(total.dtype)
        total.index_add_(0, places.flatten().clamp(min=0), added)  # padding adds 0


def _rows(tensor: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[X, heads, P, size], what a sequence [N, heads, size] has at places [X, P]; at padding
    anything."""
    return (
        tensor.index_select(0, places.flatten().clamp(min=0))
        .unflatten(0, places.shape)
        .transpose(1, 2)
    )


def _attend(q, k, v, before: int, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [X, H, Q, E] of q [X, H, Q, D], k [X, J, K, D] and v [X, J, K, E], and the
    log-sum-exp of scores [X, H, Q]."""
    if _has_kernel(q, v, before, rule):
        if not q.is_cuda:
            return aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, before == 0, scale=rule.scaling
            )
        given = (q, _repeated(k, q), _repeated(v, q), None, True, 0.0, before == 0)
        out, log_sum, *_ = aten._scaled_dot_product_efficient_attention(*given, scale=rule.scaling)
        return out, log_sum[..., : q.shape[2]]  # which comes padded
    outs, log_sums = [], []
    for (queries, keys, _), unseen_QK in _pieces(q, k, before, rule):
        scores = _scores(q[:, :, queries], k[:, :, keys], unseen_QK, rule)
        log_sums.append(scores.logsumexp(dim=3))
        outs.append(
            (scores - log_sums[-1][..., None]).exp_().to(v.dtype) @ _repeated(v[:, :, keys], q)
        )
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)


def _attend_backward(
    rows: Sequence[torch.Tensor], before: int, rule: AttentionRule
) -> Sequence[torch.Tensor]:
    """Gradients by q, k and v through the scores of `_attend`. `rows` are the output's gradient,
    the output and log-sum-exp, which other scores have joined, and q, k and v."""
    gradient, out, log_sum, q, k, v = rows
    if _has_kernel(q, v, before, rule):
        if not q.is_cuda:
            given = (gradient, q, k, v, out, log_sum, 0.0, before == 0)
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *given, scale=rule.scaling
            )
        padded = pad(log_sum, (0, -q.shape[2] % 32), value=torch.inf).contiguous()
        seed = torch.zeros((), dtype=torch.int64)
        given = (gradient, q, _repeated(k, q), _repeated(v, q), None, out, padded, seed, seed, 0.0)
        kernel = aten._scaled_dot_product_efficient_attention_backward
        to_q, to_k, to_v, _ = kernel(
            *given, [True, True, True, False], before == 0, scale=rule.scaling
        )
        return to_q, *(
            repeated.unflatten(1, (k.shape[1], -1)).sum(dim=2) for repeated in (to_k, to_v)
        )
    delta = (gradient * out).sum(dim=3, dtype=log_sum.dtype)
    sums = [torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in (q, k, v)]
    for slices, unseen_QK in _pieces(q, k, before, rule):
        inputs = [
            tensor[:, :, here].detach().requires_grad_()
            for tensor, here in zip((q, k, v), slices, strict=True)
        ]
        queries = slices[0]
        with torch.enable_grad():
            weights = (_scores(*inputs[:2], unseen_QK, rule) - log_sum[:, :, queries, None]).exp_()
            piece = weights.to(v.dtype) @ _repeated(inputs[2], q)
        given = gradient[:, :, queries], -delta[:, :, queries, None].expand_as(weights)
        for total, here, found in zip(
            sums, slices, torch.autograd.grad((piece, weights), inputs, given), strict=True
        ):
            total[:, :, here] += found
    return sums


def _has_kernel(q, v, before: int, rule: AttentionRule) -> bool:
    """Whether torch has a kernel for a rule: it knows no windows that end what is seen, no caps,
    and one size of heads."""
    reach = before + q.shape[2]
    return (rule.window or reach) >= reach and rule.soft_cap is None and q.shape[3] == v.shape[3]


def _repeated(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as the queries."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)


def _pieces(
    q, k, before: int, rule: AttentionRule
) -> Iterator[tuple[tuple[slice, slice, slice], torch.Tensor]]:
    """Slices of queries, of the keys that any of them sees, and of values; and which of these keys
    each query does not see."""
    window = rule.window or before + q.shape[2]
    for start in range(0, q.shape[2], QUERIES_AT_A_TIME):
        end = start + QUERIES_AT_A_TIME
        queries, keys = slice(start, end), slice(max(0, before + start - window + 1), before + end)
        places_Q, places_K = (torch.arange(tensor.shape[2], device=q.device) for tensor in (q, k))
        distance_QK = before + places_Q[queries, None] - places_K[keys]
        yield (queries, keys, keys), (distance_QK < 0) | (distance_QK >= window)


def _scores(q, k, unseen_QK: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Scores in fp32, or double; those unseen are finite: a window may leave out all of a part's
    keys."""
    products = (q @ _repeated(k, q).transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    scores = soft_capped(products.mul_(rule.scaling), rule.soft_cap)
    return scores.masked_fill_(unseen_QK, torch.finfo(scores.dtype).min)
