"""Bytes of the model's head: the logits of a micro-batch, piece by piece, and the head's cast."""

from dataclasses import dataclass
from typing import Any, Literal

from alignment.model.log_probs import FUSED_LOGITS_IN_MEMORY, row_pieces
from alignment.planning.device_load import BF16, FP32
from alignment.planning.step_shape import StepShape

HeadUse = Literal["pass", "frozen", "trained"]
"""A forward pass without gradients; or an update, in which the head is frozen or trained."""


@dataclass(frozen=True)
class LogitCopies:
    """Tensors of a piece's logits that live at a time, as multiples of the piece in fp32. Counted
    over fake tensors, in the pass that `LabelLogProbs` makes."""

    with_entropies: float  # Forward of an update, which logs entropies.
    without: float  # A pass for log-probs alone, and backward.


CPU_FP32 = LogitCopies(1, 1)
"""Copies of a piece's logits on a CPU.

Source: counted; it works in place, over few rows at a time. Shown wrong by: the count over fake
tensors of tests/planning/test_peak.py. Read by: `logit_copies`."""

CPU_BF16 = LogitCopies(1.5, 1.5)
"""Copies of a piece's logits on a CPU with products in bf16.

Source: counted; the product in bf16, half a piece, is there beside its fp32 copy. Shown wrong by:
that count. Read by: `logit_copies`."""

GPU = LogitCopies(4, 3)
"""Copies of a piece's logits on a GPU.

Source: counted: the logits, the tempered ones, which become log-probs, and the exponentials in
their sum. For entropies four: logits, log-probs, probabilities, and the product of these two. Shown
wrong by: that count, and torch's peak of an update on a GPU (docs/gpus.md#memory). Read by:
`logit_copies`."""

GPU_TRUNCATED = LogitCopies(5, 5)
"""Copies of a piece's logits on a GPU with top-p or top-k, which add a copy, masks and ranks.

Source: counted. Shown wrong by: that count. Read by: `logit_copies`."""


FUSED_IN_FORWARD = 1
"""Copies of a piece's logits by fused kernels in a forward pass.

Source: counted: the logits. Shown wrong by: the count of a traced card (benchmarks/gpu_cost.md).
Read by: `fused_head_bytes`."""

FUSED_IN_BACKWARD = 1.5
"""Copies of a piece's logits by fused kernels in backward.

Source: counted: the logits, and their gradient in 16 bits. Shown wrong by: that count. Read by:
`fused_head_bytes`."""


def logit_copies(step: StepShape, device: str) -> LogitCopies:
    """The copies of a piece's logits on a device."""
    if device == "cpu":
        return CPU_BF16 if step.in_bfloat16 else CPU_FP32
    return GPU_TRUNCATED if step.truncated else GPU


def head_bytes(config: Any, step: StepShape, tokens: int, device: str, use: HeadUse) -> int:
    """Bytes beside the head's weight while a micro-batch of `tokens` is at the head, which goes
    over its rows in pieces of P rows:

        cast + max(forward, backward)
        cast      2 V H             the weight in bf16, where products are
        forward   copies x 4 P V    temporaries of a piece's fp32 logits
        backward  4 V H             the weight's gradient in fp32, of a trained head alone
                  + the larger of: copies x 4 P V
                                   the gradient's bf16 product 2 V H, a piece, and its bf16 copy
    """
    head = config.vocab_size * config.hidden_size
    # of a micro-batch's tokens the prompt's get no logits
    rows = max(tokens - step.prompt, step.max_new_tokens)
    if step.kernels != "eager" and not step.truncated:
        return fused_head_bytes(config, step, rows, use)
    piece_rows = row_pieces(rows, config.vocab_size)[0].stop
    piece = FP32 * piece_rows * config.vocab_size
    copies = logit_copies(step, device)
    cast = BF16 * head if step.in_bfloat16 else 0
    if use == "pass":
        return cast + int(copies.without * piece)
    forward = int(copies.with_entropies * piece)
    if use == "frozen":
        return cast + forward
    product = cast + piece
    if step.in_bfloat16 or device != "cpu":
        product += piece // 2
    backward = FP32 * head + max(int(copies.without * piece), product)
    return cast + max(forward, backward)


def fused_head_bytes(config: Any, step: StepShape, rows: int, use: HeadUse) -> int:
    """`head_bytes` of so many rows by fused kernels, whose products add the head's gradient to that
    of earlier micro-batches: the cast, and copies of a piece's logits."""
    piece_rows = row_pieces(rows, config.vocab_size, FUSED_LOGITS_IN_MEMORY)[0].stop
    piece = FP32 * piece_rows * config.vocab_size
    cast = BF16 * config.vocab_size * config.hidden_size if step.in_bfloat16 else 0
    copies = FUSED_IN_FORWARD if use == "pass" else FUSED_IN_BACKWARD
    return cast + int(copies * piece)
