"""The count of kernels of operators worked out by hand, and the seconds that follow."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from alignment.args import RLArgs, from_preset
from alignment.builders.prediction import step_shape
from alignment.model import kernels
from alignment.model.shape import ModelShape
from alignment.planning.peaks import peak_bytes
from alignment.planning.placement import assign_roles
from benchmarks import gpu_cost
from benchmarks.gpu_cost import MEASURED, Rates, Setting, cost_of
from benchmarks.gpu_fused import compiled_functions
from benchmarks.gpu_trace import (
    CARD,
    COPIES,
    EFFICIENT_FORWARD,
    ELEMENTWISE,
    FUSED,
    INDEX_ADD,
    PRODUCTS,
    READ,
    STRIDED,
    Kernel,
    traced_card,
)

RATES = Rates(
    products=1000.0,
    bandwidth=100.0,
    smallest_kernel=0.01,
    launch=0.5,
    efficiency={PRODUCTS: 0.5, ELEMENTWISE: 1.0},
)


def on_card(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=CARD)


def test_a_product_has_two_operations_for_each_pair_of_numbers():
    with traced_card() as trace:
        on_card(3, 4, dtype=torch.bfloat16) @ on_card(4, 5, dtype=torch.bfloat16)
    # 12, 20 and 15 numbers of 2 bytes
    assert trace.kernels == [Kernel("mm", PRODUCTS, operations=120, bytes=94)]


def test_a_product_in_fp32_of_16_bit_numbers_writes_four_bytes_a_number():
    with traced_card() as trace:
        left, right = on_card(3, 4, dtype=torch.bfloat16), on_card(4, 5, dtype=torch.bfloat16)
        torch.mm(left, right, out_dtype=torch.float32)
    assert trace.kernels == [Kernel("mm", PRODUCTS, operations=120, bytes=64 + 60)]


def test_a_sum_reads_two_and_writes_one_and_a_view_does_nothing():
    with traced_card() as trace:
        (on_card(2, 3) + on_card(3, 2).view(2, 3)).view(6)
    assert trace.kernels == [Kernel("add", ELEMENTWISE, bytes=72)]


def test_what_is_broadcast_is_read_once_and_by_the_slower_kernel():
    with traced_card() as trace:
        on_card(2, 3) * on_card(2, 1)
    assert trace.kernels == [Kernel("mul", STRIDED, bytes=24 + 8 + 24)]


def test_a_sum_in_place_reads_and_writes_its_target_and_a_copy_only_writes_it():
    with traced_card() as trace:
        target = on_card(6)
        target += on_card(6)
        target.copy_(on_card(6))
    assert trace.kernels == [
        Kernel("add_", ELEMENTWISE, bytes=72),
        Kernel("copy_", COPIES, bytes=48),
    ]


def test_index_add_moves_the_rows_that_it_adds():
    with traced_card() as trace:
        places = torch.tensor([0, 1]).to(CARD)
        trace.kernels.clear()
        on_card(100, 3).index_add_(0, places, on_card(2, 3))
    # two places of 8 bytes; 6 numbers are read, and their sums read and written
    assert trace.kernels == [Kernel("index_add_", INDEX_ADD, bytes=16 + 3 * 24)]


def test_a_gpu_takes_its_own_attention_and_half_of_the_products_where_it_is_causal():
    with traced_card() as trace:
        q = on_card(1, 2, 10, 8, dtype=torch.bfloat16)
        assert q.is_cuda
        torch.ops.aten._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, True)
    # Q K^T and weights by values: 2 * 2 * (2 heads * 10 * 10 * 8), and half of it
    assert [kernel.kind for kernel in trace.kernels] == [EFFICIENT_FORWARD]
    assert trace.kernels[0].operations == 3200
    assert not hasattr(torch.Tensor.__dict__, "is_cuda")


def test_flash_attention_multiplies_the_pairs_of_each_run():
    starts = torch.tensor([0, 3, 5], dtype=torch.int32)
    with traced_card() as trace:
        q = on_card(5, 4, 8, dtype=torch.bfloat16)
        k = on_card(5, 2, 8, dtype=torch.bfloat16)
        place = starts.to(CARD)
        trace.kernels.clear()
        forward = torch.ops.aten._flash_attention_forward
        out, log_sum, *state, _ = forward(q, k, k, place, place, 3, 3, 0.0, True, False, scale=1.0)
        backward = torch.ops.aten._flash_attention_backward
        backward(out, q, k, k, out, log_sum, place, place, 3, 3, 0.0, False, *state, scale=1.0)
    causal, whole = trace.kernels
    # 9 and 4 pairs in each of 4 heads, 8 products and sums for a score, and 8 for its value
    assert causal.operations == 4 * 4 * 8 * 13 / 2
    assert causal.launches == 1
    # five products for two; zeros with dO . O, a cast, and two sums over heads that share keys
    assert whole.operations == 2.5 * 4 * 4 * 8 * 13
    assert whole.launches == 5


def test_a_gradient_is_counted_with_the_sum_that_takes_it():
    with traced_card() as trace:
        weight = on_card(4, 5).requires_grad_()
        product = on_card(3, 4) @ weight
        trace.kernels.clear()
        gradient = on_card(3, 5)
        product.backward(gradient)
        product = on_card(3, 4) @ weight
        trace.kernels.clear()
        product.backward(gradient)
    assert trace.kernels == [
        Kernel("mm", PRODUCTS, operations=120, bytes=4 * 47),
        Kernel("add_", ELEMENTWISE, bytes=240),
    ]


def test_a_compiled_function_reads_its_inputs_and_writes_its_outputs_once():
    with traced_card() as trace, compiled_functions(trace):
        gate, up = (on_card(3, 4, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
        product = kernels.fused(kernels.gated)(torch.nn.functional.silu, gate, up)
        product.backward(on_card(3, 4, dtype=torch.bfloat16))
    # Two of 24 bytes in and one out; then both again, the output's gradient, and two of inputs.
    assert trace.kernels == [
        Kernel("gated", FUSED, bytes=3 * 24),
        Kernel("gated, backward", FUSED, bytes=5 * 24),
    ]


def test_a_function_that_is_left_uncompiled_is_counted_by_its_operators():
    with traced_card() as trace, compiled_functions(trace, ["gated"]):
        gate, up = (on_card(3, 4, dtype=torch.bfloat16) for _ in range(2))
        kernels.fused(kernels.gated)(torch.nn.functional.silu, gate, up)
    # One in and one out; then two in and one out.
    assert trace.kernels == [
        Kernel("silu", ELEMENTWISE, bytes=2 * 24),
        Kernel("mul", ELEMENTWISE, bytes=3 * 24),
    ]


def test_the_card_holds_what_lives_and_not_what_a_fused_function_makes_on_its_way():
    with traced_card() as trace, compiled_functions(trace):
        gate, up = (on_card(3, 4, dtype=torch.bfloat16) for _ in range(2))
        with torch.no_grad():
            product = kernels.fused(kernels.gated)(torch.nn.functional.silu, gate, up)
        view = product[0]
        del gate, up, product
        assert trace.memory.live.total() == 24
        del view
    # Three tensors of 12 numbers of 2 bytes at a time.
    assert trace.memory.live.total() == 0
    assert trace.memory.peak.total() == 72


def test_what_a_compiled_function_writes_in_place_is_read_and_written():
    with traced_card() as trace, compiled_functions(trace):
        out, other = (on_card(5, 2, 4, dtype=torch.bfloat16) for _ in range(2))
        log_sum, other_log_sum = (on_card(2, 5) for _ in range(2))
        kernels.fused(kernels.join)(out, log_sum, other, other_log_sum)
    # 80 bytes of outputs and 40 of sums: two of each are read, one of each is written.
    assert trace.kernels == [Kernel("join", FUSED, bytes=3 * 120 / 2)] * 2


def test_the_host_waits_where_it_reads():
    with traced_card() as trace:
        on_card(3).cpu()
        torch.empty(3) + 1  # the host's own
    assert [kernel.kind for kernel in trace.kernels] == [READ]


def test_a_segment_takes_what_the_slower_of_host_and_card_takes():
    product = Kernel("mm", PRODUCTS, operations=1000, bytes=10)
    add = Kernel("add", ELEMENTWISE, bytes=50)
    # the card: 1000 / 1000 / .5 = 2 s; .5 s; the smallest kernel .01 s. The host: .5 s a launch
    cost = cost_of([Counter({product: 1, add: 1}), Counter({replace(add, bytes=0): 3})], RATES)
    assert cost.card == pytest.approx(2.5 + 0.03)
    assert cost.host == pytest.approx(2.5)
    assert cost.seconds == pytest.approx(2.5 + 1.5)
    assert cost.launches == 5


def test_layers_are_alike(monkeypatch):
    small = dict(gpu_cost.SMOLLM2, vocab_size=500, num_hidden_layers=3)
    monkeypatch.setattr(gpu_cost, "SMOLLM2", small)
    setting = Setting(model="smollm2", prompts=2, group_size=2, prompt=3, response=4)
    by_two = gpu_cost.count_kernels(setting)
    all_layers = gpu_cost.segments_of(gpu_cost.trace_update(setting))
    assert by_two == all_layers


def test_two_of_the_six_figures_are_held_out():
    held_out = [name for name, figure in MEASURED["figures"].items() if figure["held_out"]]
    assert held_out == [
        "update, 16,384, Liger's kernels",
        "attention layer, forward and backward",
    ]
    assert MEASURED["figures"].keys() == gpu_cost.FIGURES.keys()


@pytest.mark.slow
def test_the_plan_counts_what_compiled_kernels_keep_and_what_is_computed_again():
    """Two layers of the true widths, whose MLPs' insides are computed again in one, at the head.
    The form has the trainer's share of all roles' bytes beside."""
    setting = Setting(kernels="compiled", layers=2, prompts=1, response=600)
    config = gpu_cost.config_of(setting)
    roles = assign_roles(1)
    args = from_preset(RLArgs, "single_gpu_gsm8k_kl", gradient_checkpointing=False, beta=0.0)
    sums = []
    for share in (0.0, 0.5):
        peak = gpu_cost.trace_peak(replace(setting, recomputed_mlps=share))
        step = replace(
            step_shape(args, roles, 80e9, True),
            optimizer="adamw",
            micro_batch_tokens=0,
            update_tokens=10**6,
            prompt=150,
            max_new_tokens=600,
            truncated=False,
            frozen_passes=frozenset(),
            largest_micro_batch=peak.tokens,
        )
        (device,) = peak_bytes(ModelShape.from_config(config), config, roles, step)
        update = device.phases["update"]
        others = {"sampler", "reference", "teacher", "context", "engine", "margin", "reserved"}
        form = sum(size for kind, size in update.items() if kind not in others)
        counted = sum(peak.held.values())
        sums.append((counted, peak.tokens))
        if share == 0:
            assert counted <= form <= 1.05 * counted
    # Gate and up of one layer, 8,960 numbers of two bytes.
    (whole, tokens), (recomputed, _) = sums
    assert whole - recomputed == 2 * 2 * 8960 * tokens
