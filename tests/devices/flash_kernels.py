"""What torch's two flash kernels of variable length compute, for tensors of a CPU and in any
precision: one softmax after another, from the formulas. They refuse arguments that the kernels of a
GPU refuse or would read wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

FORWARD = torch.ops.aten._flash_attention_forward.default
BACKWARD = torch.ops.aten._flash_attention_backward.default


class Run(NamedTuple):
    """A run of queries and the run of keys that it sees."""

    queries: slice
    keys: slice


def by_name(operator, args: tuple, kwargs: dict) -> dict:
    """The arguments of a call by the names of the operator's schema, which says what may be
    missing."""
    named = {}
    for place, argument in enumerate(operator._schema.arguments):
        if argument.kwarg_only or place >= len(args):
            assert argument.name in kwargs or argument.has_default_value(), argument.name
            named[argument.name] = kwargs.get(argument.name, argument.default_value)
        else:
            named[argument.name] = args[place]
    assert len(args) <= sum(not argument.kwarg_only for argument in operator._schema.arguments)
    assert kwargs.keys() <= named.keys()
    return named


def runs_of(call: dict) -> Iterator[Run]:
    """The runs of a call, whose arguments must fit each other."""
    q, k, v = call["query"], call["key"], call["value"]
    starts_q, starts_k = call["cum_seq_q"], call["cum_seq_k"]
    for tensor in (q, k, v):
        assert tensor.ndim == 3
        assert tensor.stride(2) == 1
        assert tensor.shape[2] % 8 == 0
        assert tensor.shape[2] <= 256
        assert tensor.dtype == q.dtype
    assert k.shape == v.shape
    assert q.shape[1] % k.shape[1] == 0
    for starts, tensor, longest in (
        (starts_q, q, call["max_q"]),
        (starts_k, k, call["max_k"]),
    ):
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert starts[0] == 0
        assert starts[-1] == len(tensor)
        assert (starts.diff() >= 0).all()
        assert starts.diff().max() <= longest
        # with runs of one query the kernel returns the log-sum-exp in another order
        assert longest > 1
    assert len(starts_q) == len(starts_k)
    assert call["dropout_p"] == 0
    ends_q, ends_k = starts_q.tolist(), starts_k.tolist()
    for number in range(len(ends_q) - 1):
        yield Run(
            slice(ends_q[number], ends_q[number + 1]), slice(ends_k[number], ends_k[number + 1])
        )


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """In fp32, or double."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def heads_first(tensor: torch.Tensor, run: slice, heads: int) -> torch.Tensor:
    """[heads, tokens, size], each head of keys as often as heads of queries share it."""
    return wide(tensor[run]).transpose(0, 1).repeat_interleave(heads // tensor.shape[1], dim=0)


def scores_of(call: dict, run: Run) -> torch.Tensor:
    """[heads, queries, keys], -inf where a query does not see a key."""
    heads = call["query"].shape[1]
    q = heads_first(call["query"], run.queries, heads)
    k = heads_first(call["key"], run.keys, heads)
    scores = q @ k.transpose(1, 2) * call["scale"]
    if call["is_causal"]:
        unseen = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(unseen, -torch.inf)
    return scores


def flash_forward(*args, **kwargs):
    """(output, log-sum-exp [heads, queries], state, unused, weights for debugging)."""
    call = by_name(FORWARD, args, kwargs)
    q = call["query"]
    heads = q.shape[1]
    out = torch.zeros_like(q)
    log_sum = torch.full((heads, len(q)), torch.inf, dtype=wide(q).dtype)
    for run in runs_of(call):
        scores = scores_of(call, run)
        log_sum[:, run.queries] = scores.logsumexp(dim=2)
        values = heads_first(call["value"], run.keys, heads)
        out[run.queries] = (scores.softmax(dim=2) @ values).transpose(0, 1).to(q.dtype)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, log_sum, state, torch.zeros((), dtype=torch.uint64), torch.zeros(0)


def flash_backward(*args, **kwargs):
    """Gradients by queries, keys and values, where the output and the log-sum-exp may be those of
    more keys than the call's."""
    call = by_name(BACKWARD, args, kwargs)
    q, k, v = call["query"], call["key"], call["value"]
    heads, shared = q.shape[1], q.shape[1] // k.shape[1]
    assert call["logsumexp"].shape == (heads, len(q))
    assert call["logsumexp"].is_contiguous()
    assert call["rng_state"].dtype == torch.uint64
    to_q, to_k, to_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for run in runs_of(call):
        weights = (scores_of(call, run) - call["logsumexp"][:, run.queries, None]).exp()
        gradient = heads_first(call["grad_out"], run.queries, heads)
        out = heads_first(call["out"], run.queries, heads)
        values = heads_first(v, run.keys, heads)
        delta = (gradient * out).sum(dim=2, keepdim=True)
        by_scores = weights * (gradient @ values.transpose(1, 2) - delta) * call["scale"]
        by_q = by_scores @ heads_first(k, run.keys, heads)
        by_k = by_scores.transpose(1, 2) @ heads_first(q, run.queries, heads)
        by_v = weights.transpose(1, 2) @ gradient
        to_q[run.queries] = by_q.transpose(0, 1).to(q.dtype)
        # the sum over the heads of queries that share a head of keys
        to_k[run.keys] = by_k.unflatten(0, (-1, shared)).sum(dim=1).transpose(0, 1).to(k.dtype)
        to_v[run.keys] = by_v.unflatten(0, (-1, shared)).sum(dim=1).transpose(0, 1).to(v.dtype)
    return to_q, to_k, to_v
