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
    soft_cap: float | None = None
    """Of scores: `soft_capped`."""
    sinks: torch.Tensor | None = None
    """[heads of queries]; exp(sink) joins the denominator (gpt-oss, arXiv:2508.10925)."""

    def softmax(self, scores_XHSK: torch.Tensor) -> torch.Tensor:
        """Attention weights in fp32. The S queries of a head of keys are each of its heads of
        queries, one after another."""
        if self.sinks is None:
            return scores_XHSK.softmax(dim=3, dtype=torch.float32)
        rows, key_heads, queries, _ = scores_XHSK.shape
        sinks_HG = self.sinks.view(key_heads, -1)
        sinks_HS = sinks_HG.repeat_interleave(queries // sinks_HG.shape[1], dim=1)
        sinks_XHS1 = sinks_HS[None, :, :, None].expand(rows, -1, -1, 1)
        scores = torch.cat([scores_XHSK, sinks_XHS1.to(scores_XHSK.dtype)], dim=3)
        return scores.softmax(dim=3, dtype=torch.float32)[..., :-1]


class Part(NamedTuple):
    """Rows of queries, each of which sees a row of keys; both are places in a sequence,
    right-padded with -1."""

    queries_XQ: torch.Tensor
    keys_XK: torch.Tensor
    """Padded only where they are the queries."""
    before: int
    """Positions from the first key to the first query; 0: the keys are the queries, and see those
    up to themselves."""


class Inputs(NamedTuple):
    """Queries, keys and values: of a sequence [N, heads, size], or of a part's rows [X, heads,
    tokens, size]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class JointOutput(NamedTuple):
    """What the gradient by any part's scores needs of attention over all parts."""

    gradient: torch.Tensor
    """Of the loss by the output."""
    out: torch.Tensor
    log_sum: torch.Tensor
    """The log-sum-exp of scores."""


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
        tokens, heads, _ = q_NHD.shape
        precise = torch.promote_types(q_NHD.dtype, torch.float32)
        # Padding's place, -1, is that of one more token, whose sums are dropped at the end.
        out = q_NHD.new_zeros(tokens + 1, heads, v_NJE.shape[2], dtype=precise)
        log_sum = q_NHD.new_zeros(tokens + 1, heads, dtype=precise)
        for part in parts:
            _add_part(out, log_sum, Inputs(q_NHD, k_NJD, v_NJE), part, rule)
        if sinks_H is not None:
            out *= torch.sigmoid(log_sum - sinks_H)[..., None]
            log_sum = torch.logaddexp(log_sum, sinks_H)
        out_NHE = out[:-1].to(q_NHD.dtype)
        log_sum_NH1 = log_sum[:-1, :, None]
        ctx.save_for_backward(q_NHD, k_NJD, v_NJE, sinks_H, out_NHE, log_sum_NH1)
        ctx.parts = parts
        ctx.rule = rule
        return out_NHE

    @staticmethod
    def backward(ctx, gradient_NHE):
        q_NHD, k_NJD, v_NJE, sinks_H, out_NHE, log_sum_NH1 = ctx.saved_tensors
        inputs = Inputs(q_NHD, k_NJD, v_NJE)
        joint = JointOutput(gradient_NHE, out_NHE, log_sum_NH1)
        precise = log_sum_NH1.dtype
        sums = [torch.zeros_like(tensor, dtype=precise) for tensor in inputs]
        for part in ctx.parts:
            _add_gradients(sums, joint, inputs, part, ctx.rule)
        to_q, to_k, to_v = (
            total.to(tensor.dtype) for total, tensor in zip(sums, inputs, strict=True)
        )
        to_sinks = None
        if sinks_H is not None:
            # A sink's share of the denominator lessens every output: d/ds = -share * (dO . O).
            shares_NH = (sinks_H - log_sum_NH1[..., 0]).exp()
            delta_NH = (gradient_NHE * out_NHE).sum(dim=2, dtype=precise)
            to_sinks = -(shares_NH * delta_NH).sum(dim=0).to(sinks_H.dtype)
        return to_q, to_k, to_v, to_sinks, None, None


def _add_part(
    out: torch.Tensor, log_sum: torch.Tensor, inputs: Inputs, part: Part, rule: AttentionRule
) -> None:
    """Join a part's attention to `out` [N + 1, H, E] and `log_sum` [N + 1, H], in place."""
    out_XHQE, log_sum_XHQ = _attend(_rows_of_part(inputs, part), part, rule)
    change = out_XHQE.transpose(1, 2).flatten(0, 1).to(out.dtype)
    log_change = log_sum_XHQ.transpose(1, 2).flatten(0, 1).to(out.dtype)
    places = part.queries_XQ.flatten() % len(out)
    if part.before:
        # With o, L of the earlier parts and o', L' of this one, the joint output is
        # o + sigmoid(L' - L) (o' - o), and its log-sum-exp logaddexp(L', L).
        earlier_out = out.index_select(0, places)
        earlier_log_sum = log_sum.index_select(0, places)
        share = torch.sigmoid(log_change - earlier_log_sum)[..., None]
        change = share * (change - earlier_out)
        log_change = torch.logaddexp(log_change, earlier_log_sum) - earlier_log_sum
    out.index_add_(0, places, change)  # several times faster on a CPU than assigning
    log_sum.index_add_(0, places, log_change)


def _add_gradients(
    sums: Sequence[torch.Tensor],
    joint: JointOutput,
    inputs: Inputs,
    part: Part,
    rule: AttentionRule,
) -> None:
    """Add a part's gradients by the `inputs` q, k and v to `sums`. What is gathered for that is
    freed at the end."""
    queries = part.queries_XQ
    keys = part.keys_XK
    gradient, out, log_sum = (_rows(tensor, queries) for tensor in joint)
    # Where the denominator is infinite, as padding's, weights are 0.
    log_sum = log_sum.squeeze(3).masked_fill(queries[:, None] < 0, torch.inf)
    rows = _rows_of_part(inputs, part)
    gradients = _attend_backward(JointOutput(gradient, out, log_sum), rows, part, rule)
    for total, places, by_rows in zip(sums, (queries, keys, keys), gradients, strict=True):
        added = by_rows.transpose(1, 2).flatten(0, 1).to(total.dtype)
        total.index_add_(0, places.flatten().clamp(min=0), added)  # padding adds 0


def _rows_of_part(inputs: Inputs, part: Part) -> Inputs:
    """The queries, keys and values of a part's rows."""
    return Inputs(
        _rows(inputs.q, part.queries_XQ),
        _rows(inputs.k, part.keys_XK),
        _rows(inputs.v, part.keys_XK),
    )


def _rows(tensor: torch.Tensor, places_XP: torch.Tensor) -> torch.Tensor:
    """[X, heads, P, size], what a sequence [N, heads, size] has at places [X, P]; at padding
    anything."""
    gathered = tensor.index_select(0, places_XP.flatten().clamp(min=0))
    return gathered.unflatten(0, places_XP.shape).transpose(1, 2)


def _attend(inputs: Inputs, part: Part, rule: AttentionRule) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [X, H, Q, E] of a part's rows q [X, H, Q, D], k [X, J, K, D] and v [X, J, K, E],
    and the log-sum-exp of scores [X, H, Q]."""
    if not _has_kernel(inputs, part.before, rule):
        return _attend_in_pieces(inputs, part.before, rule)
    q, k, v = inputs
    causal = part.before == 0
    if not q.is_cuda:
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=rule.scaling
        )
    # no bias, with the log-sum-exp, no dropout
    out, log_sum, *_ = aten._scaled_dot_product_efficient_attention(
        q, _repeated(k, q), _repeated(v, q), None, True, 0.0, causal, scale=rule.scaling
    )
    return out, log_sum[..., : q.shape[2]]  # the kernel pads it


def _attend_in_pieces(
    inputs: Inputs, before: int, rule: AttentionRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_attend` for any rule, `QUERIES_AT_A_TIME` of each row."""
    q, k, v = inputs
    outs = []
    log_sums = []
    for piece in _pieces(inputs, before, rule):
        scores = _scores(q[:, :, piece.queries], k[:, :, piece.keys], piece.unseen_QK, rule)
        log_sum = scores.logsumexp(dim=3)
        weights = scores.sub_(log_sum[..., None]).exp_()
        outs.append(weights.to(v.dtype) @ _repeated(v[:, :, piece.keys], q))
        log_sums.append(log_sum)
    return torch.cat(outs, dim=2), torch.cat(log_sums, dim=2)


def _attend_backward(
    joint: JointOutput, inputs: Inputs, part: Part, rule: AttentionRule
) -> Sequence[torch.Tensor]:
    """Gradients by q, k and v through the scores of `_attend`. The log-sum-exp of `joint` is that
    of these and other scores."""
    if not _has_kernel(inputs, part.before, rule):
        return _backward_in_pieces(joint, inputs, part.before, rule)
    if inputs.q.is_cuda:
        return _backward_on_gpu(joint, inputs, part.before, rule)
    gradient, out, log_sum = joint
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, *inputs, out, log_sum, 0.0, part.before == 0, scale=rule.scaling
    )


def _backward_on_gpu(
    joint: JointOutput, inputs: Inputs, before: int, rule: AttentionRule
) -> Sequence[torch.Tensor]:
    """`_attend_backward` by torch's memory-efficient kernel."""
    gradient, out, log_sum = joint
    q, k, v = inputs
    # The kernel reads the log-sum-exp in blocks of 32 queries; infinity gives padding no weight.
    padded = pad(log_sum, (0, -q.shape[2] % 32), value=torch.inf).contiguous()
    k_repeated = _repeated(k, q)
    v_repeated = _repeated(v, q)
    seed = torch.zeros((), dtype=torch.int64)  # of dropout, and its offset: there is none
    wanted = [True, True, True, False]  # by q, k and v; not by the bias, which is None
    to_q, to_k, to_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        gradient,
        q,
        k_repeated,
        v_repeated,
        None,
        out,
        padded,
        seed,
        seed,
        0.0,
        wanted,
        before == 0,
        scale=rule.scaling,
    )
    heads = (k.shape[1], -1)  # of keys, and of queries to each
    return to_q, to_k.unflatten(1, heads).sum(dim=2), to_v.unflatten(1, heads).sum(dim=2)


def _backward_in_pieces(
    joint: JointOutput, inputs: Inputs, before: int, rule: AttentionRule
) -> Sequence[torch.Tensor]:
    """`_attend_backward` for any rule, `QUERIES_AT_A_TIME` of each row.

    With scores S, the joint log-sum-exp L, weights P = exp(S - L) and this part's O = P V, the
    gradient by S is P * (dO V^T - delta), where delta = dO . O of the joint output: autograd's, of
    O by dO and of P by -delta, where L is a constant."""
    delta = (joint.gradient * joint.out).sum(dim=3, dtype=joint.log_sum.dtype)
    sums = [torch.zeros_like(tensor, dtype=joint.log_sum.dtype) for tensor in inputs]
    for piece in _pieces(inputs, before, rule):
        slices = (piece.queries, piece.keys, piece.keys)
        leaves = []
        for tensor, tokens in zip(inputs, slices, strict=True):
            leaf = tensor[:, :, tokens].detach()
            leaves.append(leaf.requires_grad_())
        q, k, v = leaves
        with torch.enable_grad():
            scores = _scores(q, k, piece.unseen_QK, rule)
            weights = (scores - joint.log_sum[:, :, piece.queries, None]).exp_()
            out = weights.to(v.dtype) @ _repeated(v, q)
        by_out = joint.gradient[:, :, piece.queries]
        by_weights = -delta[:, :, piece.queries, None].expand_as(weights)
        gradients = torch.autograd.grad((out, weights), leaves, (by_out, by_weights))
        for total, tokens, gradient in zip(sums, slices, gradients, strict=True):
            total[:, :, tokens] += gradient
    return sums


def _has_kernel(inputs: Inputs, before: int, rule: AttentionRule) -> bool:
    """Whether torch has a kernel for a rule: it knows no windows that end what is seen, no caps,
    and one size of heads."""
    reach = before + inputs.q.shape[2]
    sees_all = not rule.window or rule.window >= reach
    return sees_all and rule.soft_cap is None and inputs.q.shape[3] == inputs.v.shape[3]


def _repeated(keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values with as many heads as the queries."""
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)


class Piece(NamedTuple):
    """Some queries of each row, the keys that any of them sees, and which of these keys each query
    does not see."""

    queries: slice
    keys: slice
    unseen_QK: torch.Tensor


def _pieces(inputs: Inputs, before: int, rule: AttentionRule) -> Iterator[Piece]:
    """All queries, `QUERIES_AT_A_TIME` in a piece."""
    queries = inputs.q.shape[2]
    window = rule.window or before + queries
    places_Q = torch.arange(queries, device=inputs.q.device)
    places_K = torch.arange(inputs.k.shape[2], device=inputs.q.device)
    for start in range(0, queries, QUERIES_AT_A_TIME):
        end = start + QUERIES_AT_A_TIME
        own = slice(start, end)
        seen = slice(max(0, before + start - window + 1), before + end)
        distance_QK = before + places_Q[own, None] - places_K[seen]
        yield Piece(own, seen, (distance_QK < 0) | (distance_QK >= window))


def _scores(q, k, unseen_QK: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Scores in fp32, or double; those unseen are finite: a window may leave out all of a part's
    keys."""
    products = (q @ _repeated(k, q).transpose(2, 3)).to(torch.promote_types(q.dtype, torch.float32))
    scores = soft_capped(products.mul_(rule.scaling), rule.soft_cap)
    return scores.masked_fill_(unseen_QK, torch.finfo(scores.dtype).min)
