"""Attention by parts against each row's own, in which a query sees all keys before it in one
softmax."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from alignment.model import attention
from alignment.model.attention import (
    AttentionRule,
    Inputs,
    JoinedAttention,
    Part,
    soft_capped,
)
from alignment.model.packing import pack
from alignment.model.short_rows import LONGEST_ROW, ShortRowAttention, takes_short_rows


def rows_of(lengths: list[tuple[int, list[int]]]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Rows of prompts and responses of these lengths; prompts differ, and rows of different ones
    alternate."""
    rows = [
        ((number,) * prompt, (0,) * own)
        for number, (prompt, responses) in enumerate(lengths)
        for own in responses
    ]
    return rows[::2] + rows[1::2]


def eager(q, k, v, sinks, packing, rows, rule: AttentionRule) -> torch.Tensor:
    """The packed tokens' outputs, from one softmax for each row's tokens."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    for places, row in zip(packing.spots_BT, rows, strict=True):
        places = places[: sum(map(len, row))]
        groups, number = q.shape[1] // k.shape[1], len(places)
        q_HTD, k_HTD, v_HTE = (
            x[places].transpose(0, 1).repeat_interleave(repeats, dim=0)
            for x, repeats in ((q, 1), (k, groups), (v, groups))
        )
        scores = soft_capped(q_HTD @ k_HTD.transpose(1, 2) * rule.scaling, rule.soft_cap)
        distance = torch.arange(number)[:, None] - torch.arange(number)
        scores = scores.masked_fill(
            (distance < 0) | (distance >= (rule.window or number)), -torch.inf
        )
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, number, 1)], dim=2)
        out = out.index_put(
            (places,), (scores.softmax(dim=2)[..., :number] @ v_HTE).transpose(0, 1)
        )
    return out


def inputs_of(
    packing, heads: int, kv_heads: int, sizes: tuple[int, int], sinks: bool, dtype=torch.float32
) -> list:
    """q, k, v of the packed tokens and sinks or None, which take gradients."""
    torch.manual_seed(0)
    tokens = packing.input_ids_1N.shape[1]
    shapes = [
        (tokens, heads, sizes[0]),
        (tokens, kv_heads, sizes[0]),
        (tokens, kv_heads, sizes[1]),
    ] + [(heads,)] * sinks
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes] + [None] * (
        not sinks
    )


def assert_equals_eager(
    rows,
    heads,
    sizes,
    rule: AttentionRule,
    sinks: bool,
    tolerance: float = 1e-5,
    dtype=torch.float32,
):
    """Outputs and gradients, to a tolerance relative to the largest number where that is above one.
    Also as short rows, where they are taken so."""
    packing = pack(rows)
    inputs = inputs_of(packing, *heads, sizes, sinks, dtype)
    found = JoinedAttention.apply(*inputs, packing.parts, rule)
    assert_output_equals_eager(found, packing, rows, inputs, rule, tolerance)
    if not sinks and takes_short_rows(Inputs(*inputs[:3]), packing.lengths, rule):
        found = ShortRowAttention.apply(*inputs[:3], packing.short_rows, rule.scaling)
        assert_output_equals_eager(found, packing, rows, inputs, rule, tolerance)


def assert_output_equals_eager(found, packing, rows, inputs, rule: AttentionRule, tolerance: float):
    expected = eager(*inputs, packing, rows, rule)
    weights, taken = torch.randn_like(expected), [tensor for tensor in inputs if tensor is not None]
    results = zip(
        (found, *torch.autograd.grad(found, taken, weights)),
        (expected, *torch.autograd.grad(expected, taken, weights)),
        strict=True,
    )
    for ours, theirs in results:
        torch.testing.assert_close(
            ours, theirs, rtol=0, atol=tolerance * max(1.0, float(theirs.detach().abs().max()))
        )


LENGTHS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    sizes=st.sampled_from([(8, 8), (8, 5), (4, 6)]),
    window=st.sampled_from([None, 1, 2, 5, 100]),
    soft_cap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    at_a_time=st.sampled_from([1, 3, 256]),
)
def test_parts_make_what_whole_rows_make(lengths, heads, sizes, window, soft_cap, sinks, at_a_time):
    """Grouped queries, values of another size, windows that leave out all of a prompt, caps, sinks,
    a prompt's single row, responses without tokens, several lengths of prompts: outputs and
    gradients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERIES_AT_A_TIME", at_a_time)
        assert_equals_eager(
            rows_of(lengths), heads, sizes, AttentionRule(0.5, window, soft_cap), sinks
        )


@pytest.mark.parametrize(
    ("prompt", "rule", "is_taken"),
    [
        (LONGEST_ROW - 5, AttentionRule(1.0), True),
        (LONGEST_ROW - 4, AttentionRule(1.0), False),
        (9, AttentionRule(1.0, window=14), True),
        (9, AttentionRule(1.0, window=13), False),
        (9, AttentionRule(1.0, soft_cap=2.0), False),
        (9, AttentionRule(1.0, sinks=torch.zeros(2)), False),
    ],
)
def test_short_rows_are_those_of_so_many_tokens_by_a_rule_of_torchs_kernel(prompt, rule, is_taken):
    """The longest row is a prompt and a response of five tokens."""
    packing = pack(rows_of([(prompt, [5, 2]), (3, [1])]))
    inputs = Inputs(*(torch.zeros(1, 2, 8) for _ in range(3)))
    assert takes_short_rows(inputs, packing.lengths, rule) == is_taken


@pytest.mark.parametrize(("window", "sinks"), [(None, True), (None, False), (70, True)])
def test_double_precision_stays(window, sinks):
    rows = rows_of([(40, [30, 60, 50]), (20, [10, 70])])
    assert_equals_eager(
        rows, (4, 2), (8, 8), AttentionRule(0.5, window), sinks, 1e-12, torch.float64
    )


@pytest.mark.parametrize("size", [200.0, -200.0])
def test_parts_of_which_one_outweighs_the_others_stay_finite(size):
    """Scores of hundreds, of the prompt or of the response."""
    packing = pack([((1,), (2,)), ((1,), (3,))])
    q = torch.full((3, 1, 1), size)
    k, v = (
        torch.tensor([1.0, -1.0, -1.0]).view(3, 1, 1),
        torch.tensor([5.0, 6.0, 7.0]).view(3, 1, 1),
    )
    out = JoinedAttention.apply(q, k, v, None, packing.parts, AttentionRule(1.0))
    assert out.flatten().tolist() == ([5, 5, 5] if size > 0 else [5, 6, 7])


def test_a_window_and_a_sink_by_hand():
    """Equal scores of 0. A window of two: the token before, and itself. A sink of log 2 is as two
    tokens of value 0."""
    packing = pack([((1, 2), (3, 4)), ((1, 2), ())])
    q, k, v = (
        torch.zeros(4, 1, 1),
        torch.ones(4, 1, 1),
        torch.tensor([3.0, 6.0, 9.0, 12.0]).view(4, 1, 1),
    )
    out = JoinedAttention.apply(q, k, v, None, packing.parts, AttentionRule(1.0, window=2))
    torch.testing.assert_close(out.flatten(), torch.tensor([3, 4.5, 7.5, 10.5]))
    sinks = torch.tensor([2.0]).log().requires_grad_()
    out = JoinedAttention.apply(q, k, v, sinks, packing.parts, AttentionRule(1.0))
    torch.testing.assert_close(out.flatten(), torch.tensor([3 / 3, 9 / 4, 18 / 5, 30 / 6]))
    # The output falls by its own size times the sink's share.
    (gradient,) = torch.autograd.grad(out.sum(), sinks)
    torch.testing.assert_close(
        gradient, -torch.tensor([1 * 2 / 3 + 9 / 4 * 2 / 4 + 18 / 5 * 2 / 5 + 5 * 2 / 6])
    )


def test_rotary_embeddings_in_float32_meet_values_in_bfloat16():
    """As under autocast. What is returned is of the type of values, within rounding of
    float32's."""
    rows = rows_of([(20, [30, 25, 0]), (7, [9])])
    packing, rule = pack(rows), AttentionRule(0.35)
    exact = inputs_of(packing, 4, 2, (8, 8), False)
    halves = [tensor.detach()[None].transpose(1, 2) for tensor in exact[:3]]
    halves = [*halves[:2], halves[2].bfloat16()]
    for tensor in halves:
        tensor.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found = packing.attend(None, *halves, rule)
    assert found.shape[:2] == (1, len(exact[0])) and found.dtype == torch.bfloat16
    expected = eager(*exact, packing, rows, rule)
    torch.testing.assert_close(found[0].float(), expected, rtol=0, atol=0.02)
    weights = torch.randn_like(expected)
    given = torch.autograd.grad(expected, exact[:3], weights)
    for tensor, ours, theirs in zip(
        halves, torch.autograd.grad(found[0], halves, weights.bfloat16()), given, strict=True
    ):
        assert ours.dtype == tensor.dtype
        torch.testing.assert_close(
            ours[0].transpose(0, 1).float(), theirs, rtol=0, atol=0.02 * float(theirs.abs().max())
        )


RULES = {"plain": {}, "window": {"window": 300}, "soft cap": {"soft_cap": 2.0}}


class LargestTensor(TorchDispatchMode):
    """Notes the most numbers that any tensor has."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(
                    self.numbers, tensor.untyped_storage().nbytes() // tensor.itemsize
                )
        return out


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sinks", [False, True])
def test_no_tensor_grows_with_the_square_of_the_responses(rule, sinks):
    """Twice as long responses make twice as large tensors, in forward and backward."""
    largest = []
    for length in (512, 1024):
        packing = pack(rows_of([(2, [length, length]), (1, [length])]))
        inputs = inputs_of(packing, 2, 1, (8, 8), sinks)
        with LargestTensor() as held:
            JoinedAttention.apply(
                *inputs, packing.parts, AttentionRule(0.5, **RULES[rule])
            ).sum().backward()
        largest.append(held.numbers)
    assert largest[1] < 2.1 * largest[0]


@pytest.mark.parametrize("rule", RULES)
def test_backward_keeps_queries_keys_values_outputs_and_one_number_a_query(rule):
    packing = pack(rows_of([(30, [300, 200, 100]), (10, [50])]))
    inputs, kept = inputs_of(packing, 4, 2, (8, 8), False), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = JoinedAttention.apply(*inputs, packing.parts, AttentionRule(0.5, **RULES[rule]))
    tokens = len(out)
    assert tokens == 30 + 600 + 60
    # The row beyond the tokens' is that of padding.
    assert (
        sum(tensor.untyped_storage().nbytes() for tensor in kept)
        <= 4 * (tokens + 1) * 8 * (4 + 2 + 2 + 4) + 4 * (tokens + 1) * 4
    )
    kept.clear()
    with (
        torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor),
    ):
        JoinedAttention.apply(*inputs, packing.parts, AttentionRule(0.5, **RULES[rule]))
    assert not kept


@pytest.mark.skipif(
    torch.version.cuda is None, reason="simulated GPUs need the CUDA build of torch"
)
@pytest.mark.skipif(
    torch.__version__.startswith("2.9."), reason="its fake tensors ask the driver of a GPU"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "padded"), [(32, 32), (33, 64)])
def test_a_gpus_kernels_get_what_they_read(dtype, length, padded, monkeypatch):
    """As many heads of keys as of queries; sizes of heads side by side; outputs of a row's tokens
    one after another; and in backward a log-sum-exp padded to a multiple of 32 queries, of which
    only the strides between rows and heads are read."""
    calls = []

    def recorded(name):
        kernel = getattr(torch.ops.aten, name)

        def call(*inputs, **options):
            calls.append((name, inputs))
            return kernel(*inputs, **options)

        return call

    names = [f"_scaled_dot_product_efficient_attention{suffix}" for suffix in ("", "_backward")]
    monkeypatch.setattr(
        attention, "aten", SimpleNamespace(**{name: recorded(name) for name in names})
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(70, heads, 8, dtype=dtype, device="cuda") for heads in (4, 2, 2))
        suffixes = torch.empty(2, length, dtype=torch.int64, device="cuda")
        prefixes = torch.empty(2, 3, dtype=torch.int64, device="cuda")
        parts = [Part(suffixes, suffixes, 0), Part(suffixes, prefixes, 3)]
        ctx = SimpleNamespace(
            save_for_backward=lambda *tensors: setattr(ctx, "saved_tensors", tensors)
        )
        out = JoinedAttention.forward(ctx, q, k, v, None, parts, AttentionRule(0.5))
        gradients = JoinedAttention.backward(ctx, torch.empty_like(out))
    assert out.shape == q.shape and out.dtype == dtype and out.device.type == "cuda"
    assert [(g.shape, g.dtype) for g in gradients[:3]] == [(t.shape, dtype) for t in (q, k, v)]
    assert [(name, inputs[-1] if "backward" in name else inputs[6]) for name, inputs in calls] == [
        (names[0], True),
        (names[0], False),
        (names[1], True),
        (names[1], False),
    ]
    for name, inputs in calls:
        q, k, v = inputs[1:4] if "backward" in name else inputs[:3]
        assert q.shape[1] == k.shape[1] == v.shape[1] == 4 and all(
            tensor.stride(3) == 1 for tensor in (q, k, v)
        )
        if "backward" in name:
            out, log_sum = inputs[5:7]
            assert out.transpose(1, 2).is_contiguous() and out.dtype == dtype
            assert (
                log_sum.shape == (2, 4, padded)
                and log_sum.is_contiguous()
                and log_sum.dtype == torch.float32
            )
