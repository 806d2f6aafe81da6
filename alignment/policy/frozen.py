"""Models that only compute log-probs: the reference model, and the old policy on a device of its own."""

import hashlib
from collections.abc import Iterable, Sequence

import torch

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, split_rows, take_rows
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import autocast, first_device, load_model
from alignment.policy.log_probs import get_response_log_probs
from alignment.policy.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.policy.plain_path import takes_plain_path, unshared


class FrozenModel:
    """A model on one device, of whose weights no gradient is taken. Raises `UserError` for weights that cannot be loaded.
    `dtype` is the type of its matrix products. With the same weights its log-probs are a policy's, bit for bit: what autocast
    would cast for a product is kept in `dtype`, and all else, such as norms and embeddings, in float32."""

    def __init__(self, model_path: str, device: str, dtype: torch.dtype):
        self.model = load_model(model_path, (device,), torch.float32, dtype)
        self.dtype = dtype

    def log_probs(
        self, batch: Batch, distribution: Distribution, micro_batch_tokens: int, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        return batch_log_probs(self.model, batch, distribution, micro_batch_tokens, self.dtype, rows)

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every weight over, in place."""
        own = dict(self.model.named_parameters())
        for name, tensor in weights:
            own[name].copy_(tensor, non_blocking=True)

    def weights_digest(self) -> str:
        return weights_digest(self.model, self.dtype)


def weights_digest(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """What tells a model's weights, in `dtype`, from others: a hash of each one's name, shape and first 4,096 numbers."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:4096].to("cpu", dtype).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def batch_log_probs(
    model: PreTrainedModel,
    batch: Batch,
    distribution: Distribution,
    micro_batch_tokens: int,
    dtype: torch.dtype,
    rows: Sequence[int] | None = None,
) -> torch.Tensor:
    """A model's log-probs [B, T] of a batch's responses, on the CPU, without gradient; 0 elsewhere and in rows not among `rows`
    (None: all). `dtype` is the type of matrix products."""
    rows = range(len(batch.labels)) if rows is None else rows
    log_probs_BT = torch.zeros(batch.labels.shape)
    pieces, parallel = cut_for_parallel(model, computed_rows(model, batch, rows), micro_batch_tokens)
    pieces = [[rows[i] for i in piece] for piece in pieces]

    @torch.no_grad()
    def compute(piece: Sequence[int]) -> torch.Tensor:
        return model_log_probs(model, take_rows(batch, piece), distribution, dtype).cpu()

    for piece, part_bt in zip(pieces, run_parallel(compute, pieces, parallel), strict=True):
        log_probs_BT[piece, : part_bt.shape[1]] = part_bt
    return log_probs_BT


def computed_rows(model: PreTrainedModel, batch: Batch, rows: Sequence[int], with_last_label: bool = False) -> list[Row]:
    """The token ids of some rows as a model computes them, from which micro-batches are made."""
    if not rows:
        return []
    chosen = take_rows(batch, rows)
    split = split_rows(chosen.input_ids, chosen.response_mask)
    split = [(prompt, (*response, 0)) for prompt, response in split] if with_last_label else split
    return unshared(split) if takes_plain_path(model) else split


def model_log_probs(model: PreTrainedModel, batch: Batch, distribution: Distribution, dtype: torch.dtype) -> torch.Tensor:
    """`get_response_log_probs` of a batch that is still on the CPU, with matrix products in `dtype`."""
    with autocast(first_device(model), dtype):
        told = {"response_mask": batch.response_mask, **vars(distribution)}
        return get_response_log_probs(model, batch.input_ids, batch.labels, **told)["log_probs"]
