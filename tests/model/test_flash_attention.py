"""Attention by flash kernels of variable length, with an emulator in the kernels' place, against
attention by parts and each row's own softmax."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.model import flash_attention
from alignment.model.attention import AttentionRule, Inputs, JoinedAttention
from alignment.model.flash_attention import FlashAttention, Lengths, check_error, takes_flash
from alignment.model.packing import pack
from tests.devices.flash_kernels import flash_backward, flash_forward

CPU = torch.device("cpu")
KERNELS = SimpleNamespace(
    _flash_attention_forward=flash_forward, _flash_attention_backward=flash_backward
)


@pytest.fixture
def emulated(monkeypatch):
    """The emulator is the kernels, and no check has run."""
    monkeypatch.setattr(flash_attention, "aten", KERNELS)
    flash_attention.passes_check.cache_clear()
    yield
    flash_attention.passes_check.cache_clear()


def packed(lengths: list[tuple[int, list[int]]]):
    """The packing of prompts and responses of these lengths; prompts differ."""
    rows = []
    for number, (prompt, responses) in enumerate(lengths):
        rows += [((number,) * prompt, (0,) * own) for own in responses]
    return pack(rows)


def random_inputs(packing, heads: int, key_heads: int, dtype=torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = packing.input_ids_1N.shape[1]
    inputs = []
    for number in (heads, key_heads, key_heads):
        numbers = torch.randn(tokens, number, 8, generator=generator, dtype=torch.float64)
        inputs.append(numbers.to(dtype).requires_grad_())
    return inputs


GROUPS = [(3, [2, 1]), (2, [4]), (1, [1, 3, 2]), (4, [0, 0])]
"""Two prompts with several responses, a row of its own, and a prompt whose responses are empty."""

LENGTHS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(0, 6), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def test_the_gradient_is_that_of_the_output(emulated):
    packing = packed([(2, [2, 1]), (1, [2])])
    inputs = random_inputs(packing, heads=2, key_heads=1)

    def attend(*tensors):
        return FlashAttention.apply(*tensors, packing.flash, 0.3)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@settings(max_examples=10, deadline=None)
@given(LENGTHS, st.sampled_from([(1, 1), (4, 2), (3, 1)]))
def test_flash_kernels_make_what_parts_make(lengths, heads):
    packing = packed(lengths)
    inputs = random_inputs(packing, *heads)
    rule = AttentionRule(0.3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_attention, "aten", KERNELS)
        own = FlashAttention.apply(*inputs, packing.flash, rule.scaling)
        expected = JoinedAttention.apply(*inputs, None, packing.parts, rule)
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-11)
        gradient = torch.randn(own.shape, dtype=own.dtype)
        gradients = torch.autograd.grad(own, inputs, gradient)
        expected_gradients = torch.autograd.grad(expected, inputs, gradient)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-9, atol=1e-11)


def test_in_16_bits_it_is_no_farther_from_double_than_parts_are(emulated):
    packing = packed([(40, [30, 20, 25]), (20, [9])])
    inputs = random_inputs(packing, 4, 2, torch.bfloat16)
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    gradient = torch.randn(inputs[0].shape, dtype=torch.float64).bfloat16()
    rule = AttentionRule(8**-0.5)

    def results(tensors, attend):
        out = attend(tensors)
        return [out, *torch.autograd.grad(out, tensors, gradient.to(out.dtype))]

    def by_flash(tensors):
        return FlashAttention.apply(*tensors, packing.flash, rule.scaling)

    def by_parts(tensors):
        return JoinedAttention.apply(*tensors, None, packing.parts, rule)

    exact = results(doubles, by_parts)
    for own, other, right in zip(
        results(inputs, by_flash), results(inputs, by_parts), exact, strict=True
    ):
        assert (own.double() - right).norm() <= 1.1 * (other.double() - right).norm()


def test_one_key_each_by_hand(emulated):
    """A prompt of one token with the value 1, and two responses of one token with the values 2 and
    3: with queries of 0 a response's output is the mean of its own and the prompt's."""
    packing = packed([(1, [1, 1])])
    zeros = torch.zeros(3, 1, 8, dtype=torch.float64)
    values = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None].expand(3, 1, 8)
    out = FlashAttention.apply(zeros, zeros, values.contiguous(), packing.flash, 1.0)
    assert out[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, 2.0])


def test_no_key_is_repeated_and_the_two_calls_are_these(monkeypatch):
    calls = []

    def noted(*args, **kwargs):
        calls.append(args)
        return flash_forward(*args, **kwargs)

    monkeypatch.setattr(flash_attention, "aten", SimpleNamespace(_flash_attention_forward=noted))
    packing = packed(GROUPS)
    FlashAttention.apply(*random_inputs(packing, 4, 2), packing.flash, 0.3)
    every, to_prefix = calls
    # prefixes of 3, 6 (the row of its own), 1 and 4 tokens; suffixes of 2, 1, 1, 3, 2
    assert every[3].tolist() == every[4].tolist() == [0, 3, 9, 10, 14, 16, 17, 18, 21, 23]
    assert every[5:10] == (6, 6, 0.0, True, False)
    assert to_prefix[3].tolist() == [0, 3, 3, 9, 9]
    assert to_prefix[4].tolist() == [0, 3, 9, 10, 14]
    assert to_prefix[5:10] == (6, 6, 0.0, False, False)
    assert [len(tensor) for tensor in to_prefix[:3]] == [9, 14, 14]
    assert to_prefix[1].shape[1] == 2


def inputs_that_claim_a_gpu(dtype, size=8):
    """Queries, keys and values of which `takes_flash` reads this alone."""
    q, k = SimpleNamespace(), SimpleNamespace()
    for tensor, heads in ((q, 4), (k, 2)):
        vars(tensor).update(is_cuda=True, dtype=dtype, device=CPU, shape=(5, heads, size))
    return Inputs(q, k, k)  # pyright: ignore[reportArgumentType]


LENGTHS_OF_ONE = Lengths([3], [[2, 1]])


def test_it_is_taken_in_16_bits_where_the_check_accepts_it(emulated):
    inputs = inputs_that_claim_a_gpu(torch.bfloat16)
    assert takes_flash(inputs, LENGTHS_OF_ONE, AttentionRule(1.0))
    assert takes_flash(inputs, LENGTHS_OF_ONE, AttentionRule(1.0, window=5))


@torch.inference_mode()
def test_a_sampler_may_be_the_first_to_ask(emulated):
    inputs = inputs_that_claim_a_gpu(torch.bfloat16)
    assert takes_flash(inputs, LENGTHS_OF_ONE, AttentionRule(1.0))


@pytest.mark.parametrize(
    ("dtype", "size", "rule"),
    [
        (torch.float32, 8, AttentionRule(1.0)),
        (torch.bfloat16, 12, AttentionRule(1.0)),
        (torch.bfloat16, 264, AttentionRule(1.0)),
        (torch.bfloat16, 8, AttentionRule(1.0, window=4)),
        (torch.bfloat16, 8, AttentionRule(1.0, soft_cap=20.0)),
        (torch.bfloat16, 8, AttentionRule(1.0, sinks=torch.zeros(4))),
    ],
)
def test_other_types_heads_and_rules_keep_the_parts(dtype, size, rule, emulated):
    assert not takes_flash(inputs_that_claim_a_gpu(dtype, size), LENGTHS_OF_ONE, rule)


def test_a_cpu_keeps_the_parts():
    tensors = [torch.zeros(5, heads, 8, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    assert not takes_flash(Inputs(*tensors), LENGTHS_OF_ONE, AttentionRule(1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_right_kernels_pass_by_a_wide_margin(dtype, emulated):
    assert check_error(CPU, dtype, 12, 2, 64) < torch.finfo(dtype).eps


def without_joint(*args, **kwargs):
    """A backward pass that takes the log-sum-exp of its own keys, as a kernel's own autograd."""
    args = list(args)
    out, log_sum, *_ = flash_forward(*args[1:4], *args[6:12], False, **kwargs)
    return flash_backward(args[0], *args[1:4], out, log_sum, *args[6:], **kwargs)


def unsummed(*args, **kwargs):
    """A forward pass whose log-sum-exp is that of twice the keys."""
    out, log_sum, *rest = flash_forward(*args, **kwargs)
    return out, log_sum + 0.7, *rest


def not_causal(*args, **kwargs):
    """A forward pass without its mask."""
    return flash_forward(*args[:8], False, *args[9:], **kwargs)


def not_finite(*args, **kwargs):
    """A backward pass that divides by zero."""
    return [gradient * torch.nan for gradient in flash_backward(*args, **kwargs)]


def missing(*args, **kwargs):
    raise NotImplementedError("no such kernel\nfor this device")


@pytest.mark.parametrize(
    ("forward", "backward", "message"),
    [
        (flash_forward, without_joint, "differ by"),
        (not_causal, flash_backward, "differ by"),
        (unsummed, flash_backward, "differ by"),
        (flash_forward, not_finite, "differ by nan"),
        (missing, flash_backward, "fail: no such kernel;"),
    ],
)
def test_wrong_or_missing_kernels_are_left_out_and_named(
    forward, backward, message, emulated, monkeypatch, capsys
):
    kernels = SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)
    monkeypatch.setattr(flash_attention, "aten", kernels)
    # of another size than in other tests, for what is said is said once
    inputs = inputs_that_claim_a_gpu(torch.bfloat16)
    assert not takes_flash(inputs, LENGTHS_OF_ONE, AttentionRule(1.0))
    assert not takes_flash(inputs, LENGTHS_OF_ONE, AttentionRule(1.0))
    said = capsys.readouterr().err
    assert said.count("flash kernels of variable length") <= 1
    if said:
        assert message in said


def test_the_kernels_of_this_torch_take_the_arguments(emulated):
    """The operators' schemas bind what both passes give them: the emulator reads its arguments by
    these (`by_name`), and the schemas have what it reads."""
    forward = {a.name for a in torch.ops.aten._flash_attention_forward.default._schema.arguments}
    backward = {a.name for a in torch.ops.aten._flash_attention_backward.default._schema.arguments}
    shared = {"query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "scale"}
    assert shared | {"is_causal", "dropout_p", "return_debug_mask"} <= forward
    assert shared | {"is_causal", "grad_out", "out", "logsumexp", "rng_state"} <= backward
    returned = torch.ops.aten._flash_attention_forward.default._schema.returns
    assert [value.name for value in returned] == [
        "output",
        "softmax_logsumexp",
        "rng_state",
        "unused",
        "debug_attn_mask",
    ]
