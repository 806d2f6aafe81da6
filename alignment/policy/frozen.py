"""Models that only compute log-probs: the reference model, and the old policy on a device of its own."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, split_rows, take_rows
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import autocast, copy_weights, first_device, load_model
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.packing import takes_plain_path
from alignment.policy.parallel_micro_batches import Result, cut_for_parallel, run_parallel

ONE_TOKEN = Batch(*[torch.zeros(1, 1, dtype=torch.int64)] * 2, torch.ones(1, 1, dtype=torch.bool))
"""A batch for a micro-batch without rows: collectives need every rank, so one computes and discards it."""


class MicroBatchedModel:
    """A model that computes micro-batches of at most so many tokens, with matrix products in `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, micro_batch_tokens: int):
        self.model, self.dtype, self.micro_batch_tokens = model, dtype, micro_batch_tokens

    def run(self, function: Callable, *arguments):
        """`function` of the model and some arguments: a forward pass, or a part of one."""
        return function(self.model, *arguments)

    def in_micro_batches(
        self, compute: Callable[[Sequence[int]], Result], rows: Sequence[Row], parameters: Iterable[torch.nn.Parameter] = ()
    ) -> Iterator[tuple[Sequence[int], Result]]:
        """Yields (indices into `rows`, `compute` of them), on a CPU perhaps in pairs; `parameters` get its gradients."""
        pieces, parallel = cut_for_parallel(self.model, rows, self.micro_batch_tokens)
        return zip(pieces, run_parallel(compute, pieces, parallel, parameters), strict=True)

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Log-probs [B, T] of a batch's responses, on the CPU, without gradient; 0 elsewhere, and in rows not among `rows`."""
        self.model.eval()  # dropout would make the ratio to these log-probs differ from 1
        rows = range(len(batch.labels)) if rows is None else rows
        log_probs_BT = torch.zeros(batch.labels.shape)

        @torch.no_grad()
        def compute(piece: Sequence[int]) -> torch.Tensor:
            part = take_rows(batch, [rows[i] for i in piece]) if piece else ONE_TOKEN
            return self.run(model_log_probs, part, distribution, self.dtype).cpu()

        for piece, part_bt in self.in_micro_batches(compute, computed_rows(self.model, batch, rows)):
            log_probs_BT[[rows[i] for i in piece], : part_bt.shape[1]] = part_bt
        return log_probs_BT


class FrozenModel:
    """A model for log-probs alone, with matrix products in `dtype`. Raises `UserError` for weights that cannot be loaded. With
    the same weights its log-probs are a policy's, bit for bit: what autocast would cast is in `dtype`, all else in fp32."""

    def __init__(self, model_path: str, device: str, dtype: torch.dtype):
        self.model = load_model(model_path, (device,), torch.float32, dtype)
        self.dtype = dtype

    def log_probs(self, batch: Batch, distribution: Distribution, micro_batch_tokens: int, rows=None) -> torch.Tensor:
        return MicroBatchedModel(self.model, self.dtype, micro_batch_tokens).log_probs(batch, distribution, rows)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every weight over, in place."""
        copy_weights(self.model, weights)


def computed_rows(model: PreTrainedModel, batch: Batch, rows: Sequence[int]) -> list[Row]:
    """The token ids of some rows as a model computes them, from which micro-batches are made."""
    if not rows:
        return []
    chosen = take_rows(batch, rows)
    split = split_rows(chosen.input_ids, chosen.response_mask)
    # On the plain path rows share no prompt, so that each one's tokens count in full.
    return [((*prompt, *response), ()) for prompt, response in split] if takes_plain_path(model) else split


def model_log_probs(model: PreTrainedModel, batch: Batch, distribution: Distribution, dtype: torch.dtype) -> torch.Tensor:
    """`get_response_log_probs` of a batch that is still on the CPU, with matrix products in `dtype`."""
    with autocast(first_device(model), dtype):
        return get_response_log_probs(model, **vars(batch), **vars(distribution))["log_probs"]
