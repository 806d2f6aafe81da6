"""Attention of a packed sequence by torch's flash kernels of variable length, which GPUs have for
16 bits: one causal call over all prefixes and suffixes, and one without a mask from suffixes to
their prefixes, joined by log-sum-exp. Keys and values are never repeated, and nothing is gathered
or padded."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignment.model.attention import AttentionRule, Inputs
from alignment.model.kernels import fused, join
from alignment.system.terminal import say_once

aten = torch.ops.aten

HEAD_SIZES = 8
"""The kernels take heads of a multiple of so many numbers."""
LARGEST_HEAD = 256
TOLERANCE = 4.0
"""Of the self-check: relative, in units of the type's precision. Rounding of right kernels makes up
to 1; a part left out, or a gradient by the joint output, tens."""


# --- who sees whom --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lengths:
    """The tokens of each prefix of a packed sequence, and, of each prefix, those of its suffixes.
    All prefixes come first, then all suffixes, in the order of their prefixes."""

    prefixes: Sequence[int]
    suffixes: Sequence[Sequence[int]]

    @property
    def longest_row(self) -> int:
        """Tokens of the longest prefix and suffix together."""
        rows = []
        for prefix, own in zip(self.prefixes, self.suffixes, strict=True):
            rows.append(prefix + max(own, default=0))
        return max(rows)


@dataclass(frozen=True)
class Pieces:
    """The sides of one call of the kernel: several runs of tokens, one after another."""

    starts: torch.Tensor
    """Where each begins, and where the last ends; int32."""
    longest: int
    """Tokens at most, and 2 at least: for runs of a single token the kernel returns the
    log-sum-exp in another order where heads of queries share keys."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> "Pieces":
        """Runs of these lengths."""
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        if device.type == "cuda":
            # The host does not wait for a copy of pinned memory.
            starts = starts.pin_memory()
        return cls(starts.to(device, non_blocking=True), max(2, *lengths))


@dataclass(frozen=True)
class Sides:
    """Who sees whom in one call: each run of queries the run of keys in its place."""

    queries: Pieces
    keys: Pieces
    causal: bool
    """Whether a token sees only those up to itself, where the runs are the same."""

    @property
    def arguments(self) -> tuple:
        """The arguments that forward and backward calls of the kernel have in common: where runs
        begin, the longest, the probability of a dropout, and the mask."""
        return (
            self.queries.starts,
            self.keys.starts,
            self.queries.longest,
            self.keys.longest,
            0.0,
            self.causal,
        )


@dataclass(frozen=True)
class FlashLayout:
    """A packed sequence as the kernel takes it."""

    own: Sides
    """Every prefix and suffix, which sees itself."""
    to_prefix: Sides | None
    """Of each prefix its suffixes, as one run, which sees all of the prefix; the run has no tokens
    where there is no suffix. None without any suffix."""
    prefix_tokens: int
    is_fused: bool = False
    """Whether the two calls are joined by a compiled kernel."""

    @classmethod
    def of(cls, lengths: Lengths, device: torch.device, is_fused: bool = False) -> "FlashLayout":
        """The layout of these lengths."""
        suffixes = list(itertools.chain.from_iterable(lengths.suffixes))
        every = Pieces.of([*lengths.prefixes, *suffixes], device)
        to_prefix = None
        if suffixes:
            groups = Pieces.of([sum(own) for own in lengths.suffixes], device)
            prefixes = Pieces.of(lengths.prefixes, device)
            to_prefix = Sides(groups, prefixes, causal=False)
        own = Sides(every, every, causal=True)
        return cls(own, to_prefix, sum(lengths.prefixes), is_fused)


# --- the two calls --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Output:
    """What the kernel returns of a call."""

    out_NHD: torch.Tensor
    log_sum_HN: torch.Tensor
    """The log-sum-exp of scores, in fp32."""
    state: Sequence[torch.Tensor]
    """Of the random numbers of a dropout that is off; backward wants it."""

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The output and the log-sum-exp."""
        return self.out_NHD, self.log_sum_HN


def _attend(inputs: Inputs, sides: Sides, scaling: float) -> Output:
    """One call of the kernel."""
    out, log_sum, *state, _ = aten._flash_attention_forward(
        *inputs,
        *sides.arguments,
        False,  # no weights, for debugging
        scale=scaling,
    )
    return Output(out, log_sum, state)


def _attend_backward(
    gradient: torch.Tensor, output: Output, inputs: Inputs, sides: Sides, scaling: float
) -> Inputs:
    """Gradients through the scores of `_attend`; `output` may be that of these and other scores."""
    gradients = aten._flash_attention_backward(
        gradient,
        *inputs,
        output.out_NHD,
        output.log_sum_HN,
        *sides.arguments,
        *output.state,
        scale=scaling,
    )
    return Inputs(*gradients)


class FlashAttention(torch.autograd.Function):
    """(q [N, H, D], k [N, J, D], v [N, J, D], layout, scaling) -> [N, H, D], as `JoinedAttention`
    computes it of the same prefixes and suffixes.

    With the output o and the log-sum-exp L of a suffix's own keys, and o', L' of its prefix's, the
    joint output is (1 - s) o + s o' with s = sigmoid(L' - L), and its log-sum-exp logaddexp(L, L').
    Backward gives both calls the joint output and log-sum-exp: the gradient by a set's scores needs
    nothing else of the other set (Dao et al. 2022, arXiv:2205.14135, algorithm 4). Kept for
    backward: q, k, v, output, and one fp32 number a query and head."""

    @staticmethod
    def forward(ctx, q_NHD, k_NJD, v_NJD, layout, scaling):
        inputs = Inputs(q_NHD, k_NJD, v_NJD)
        own = _attend(inputs, layout.own, scaling)
        if layout.to_prefix is not None:
            start = layout.prefix_tokens
            to_prefix = _attend(_to_prefix(inputs, start), layout.to_prefix, scaling)
            _join(own, to_prefix, layout)
        ctx.save_for_backward(*inputs, own.out_NHD, own.log_sum_HN, *own.state)
        ctx.layout = layout
        ctx.scaling = scaling
        return own.out_NHD

    @staticmethod
    def backward(ctx, gradient_NHD):
        q_NHD, k_NJD, v_NJD, out_NHD, log_sum_HN, *state = ctx.saved_tensors
        inputs = Inputs(q_NHD, k_NJD, v_NJD)
        layout = ctx.layout
        gradient_NHD = gradient_NHD.contiguous()
        joint = Output(out_NHD, log_sum_HN, state)
        sums = _attend_backward(gradient_NHD, joint, inputs, layout.own, ctx.scaling)
        if layout.to_prefix is not None:
            start = layout.prefix_tokens
            # The kernel reads a head's numbers one after another.
            of_suffixes = Output(out_NHD[start:], log_sum_HN[:, start:].contiguous(), state)
            added = _attend_backward(
                gradient_NHD[start:],
                of_suffixes,
                _to_prefix(inputs, start),
                layout.to_prefix,
                ctx.scaling,
            )
            # Not +=, which would copy each part onto itself after it.
            sums.q[start:].add_(added.q)
            sums.k[:start].add_(added.k)
            sums.v[:start].add_(added.v)
        return *sums, None, None


def _to_prefix(inputs: Inputs, start: int) -> Inputs:
    """The queries of suffixes, from token `start` on, and the keys and values of prefixes."""
    return Inputs(inputs.q[start:], inputs.k[:start], inputs.v[:start])


def _join(own: Output, to_prefix: Output, layout: FlashLayout) -> None:
    """Join what suffixes see of their prefix to `own`, in place."""
    start = layout.prefix_tokens
    function = fused(join) if layout.is_fused else join
    function(own.out_NHD[start:], own.log_sum_HN[:, start:], *to_prefix.parts)


# --- whether it may be used -----------------------------------------------------------------------


def takes_flash(inputs: Inputs, lengths: Lengths, rule: AttentionRule) -> bool:
    """Whether a layer's attention is by the flash kernels: on a GPU, in 16 bits, by a rule that
    they know, and where they have passed the self-check for such heads in this process."""
    q, k, v = inputs
    is_known = (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and rule.soft_cap is None
        and rule.sinks is None
        and (not rule.window or rule.window >= lengths.longest_row)
        and q.shape[2] == v.shape[2]
        and q.shape[2] % HEAD_SIZES == 0
        and q.shape[2] <= LARGEST_HEAD
    )
    return is_known and passes_check(q.device, q.dtype, q.shape[1], k.shape[1], q.shape[2])


@functools.cache
def passes_check(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int
) -> bool:
    """Whether the kernels' output and gradients are those of each row's own softmax, for random
    queries of such heads; says so where they are not. It runs once a process."""
    try:
        error = check_error(device, dtype, heads, key_heads, size)
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:  # of any kind: a kernel that this torch or GPU does not have
        reason = f"fail: {str(failure).splitlines()[0]}"
    else:
        # Not "above": an error that is no number is no better.
        if error <= TOLERANCE * torch.finfo(dtype).eps:
            return True
        reason = f"differ by {error:.2g}, relative, from attention of single rows"
    say_once(f"flash kernels of variable length {reason}; attention goes by its parts: slower")
    return False


CHECKED = Lengths(prefixes=(150, 70, 1, 33), suffixes=((200, 1, 131), (), (5, 2), (64,)))
"""The tokens of the self-check, of which some lie on both sides of a kernel's blocks of 64 or 128.
One prefix has no suffix."""


def check_error(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int
) -> float:
    """The largest relative error of output and gradients of `FlashAttention` on random numbers."""
    # A sampler's first pass may come here in inference mode, whose tensors take no gradient.
    autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.enable_grad(), autocast:
        return _check_error(device, dtype, heads, key_heads, size)


def _check_error(
    device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, size: int
) -> float:
    """`check_error`, in torch's usual modes."""
    generator = torch.Generator().manual_seed(0)
    layout = FlashLayout.of(CHECKED, device)
    tokens = sum(CHECKED.prefixes) + sum(map(sum, CHECKED.suffixes))

    def draw(heads: int) -> torch.Tensor:
        numbers = torch.randn(tokens, heads, size, generator=generator)
        return numbers.to(device=device, dtype=dtype)

    inputs = [draw(number).requires_grad_() for number in (heads, key_heads, key_heads)]
    wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
    gradient = draw(heads)
    out = FlashAttention.apply(*inputs, layout, size**-0.5)
    expected = _attend_rows(Inputs(*wide), CHECKED, size**-0.5)
    pairs = [(out, expected)]
    pairs += zip(
        torch.autograd.grad(out, inputs, gradient),
        torch.autograd.grad(expected, wide, gradient.float()),
        strict=True,
    )
    errors = [(own.float() - other).norm() / other.norm() for own, other in pairs]
    return float(torch.stack(errors).detach().max())


def _attend_rows(inputs: Inputs, lengths: Lengths, scaling: float) -> torch.Tensor:
    """Attention of each row by itself, in one softmax: [N, H, D]."""
    q_NHD, k_NJD, v_NJD = inputs
    shared = q_NHD.shape[1] // k_NJD.shape[1]
    # Heads first; each head of keys as often as heads of queries share it.
    q_HND = q_NHD.transpose(0, 1)
    k_HND = k_NJD.transpose(0, 1).repeat_interleave(shared, dim=0)
    v_HND = v_NJD.transpose(0, 1).repeat_interleave(shared, dim=0)
    outputs = [torch.zeros_like(q_HND[:, :0])]
    prefix_start = 0
    prefix_outputs = []
    suffix_start = sum(lengths.prefixes)
    for prefix, suffixes in zip(lengths.prefixes, lengths.suffixes, strict=True):
        own = torch.arange(prefix_start, prefix_start + prefix, device=q_NHD.device)
        prefix_start += prefix
        prefix_outputs.append(_attend_row(q_HND, k_HND, v_HND, own, prefix, scaling))
        for suffix in suffixes:
            added = torch.arange(suffix_start, suffix_start + suffix, device=q_NHD.device)
            suffix_start += suffix
            row = torch.cat([own, added])
            outputs.append(_attend_row(q_HND, k_HND, v_HND, row, suffix, scaling))
    return torch.cat([*prefix_outputs, *outputs], dim=1).transpose(0, 1)


def _attend_row(q_HND, k_HND, v_HND, places: torch.Tensor, last: int, scaling: float):
    """The output [H, last, D] of a row's last tokens, whose tokens are at these places."""
    queries = places[-last:]
    scores = q_HND[:, queries] @ k_HND[:, places].transpose(1, 2) * scaling
    position = torch.arange(len(places), device=places.device)
    unseen = position[None] > position[-last:, None]
    weights = scores.masked_fill(unseen, -torch.inf).softmax(dim=2)
    return weights @ v_HND[:, places]
