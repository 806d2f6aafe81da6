"""Models that only compute log-probs: the reference model and the teacher, here or in processes
beside the trainer, and the old policy."""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, split_rows, take_rows
from alignment.model.huggingface import PreTrainedModel
from alignment.model.kernel_choice import KERNELS
from alignment.model.loading import (
    autocast,
    copy_weights,
    first_device,
    load_model,
    make_deterministic,
)
from alignment.model.log_probs import get_response_log_probs
from alignment.model.packing import takes_plain_path
from alignment.model.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.system.processes import START_SECONDS, ChildProcess, ProcessLost, answer_requests

ONE_TOKEN = Batch(
    input_ids=torch.zeros(1, 1, dtype=torch.int64),
    labels=torch.zeros(1, 1, dtype=torch.int64),
    response_mask=torch.ones(1, 1, dtype=torch.bool),
)
"""A batch for a micro-batch without rows: collectives need every rank, so one computes and discards
it."""


Result = TypeVar("Result")


class MicroBatchedModel:
    """A model that computes micro-batches of at most so many tokens, with matrix products in
    `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, micro_batch_tokens: int):
        self.model = model
        self.dtype = dtype
        self.micro_batch_tokens = micro_batch_tokens

    def run(self, forward: Callable[[PreTrainedModel], torch.Tensor]) -> torch.Tensor:
        """`forward` of the model: a forward pass, or a part of one. What it computes on, it holds
        itself: tensors that are handed through a module may arrive on another device than they left
        (FSDP2 moves the inputs of what it wraps)."""
        return forward(self.model)

    def in_micro_batches(
        self,
        compute: Callable[[Sequence[int]], Result],
        rows: Sequence[Row],
        parameters: Iterable[torch.nn.Parameter] = (),
    ) -> Iterator[tuple[Sequence[int], Result]]:
        """Yields (indices into `rows`, `compute` of them), on a CPU perhaps in pairs; `parameters`
        get its gradients."""
        pieces, parallel = cut_for_parallel(self.model, rows, self.micro_batch_tokens)
        return zip(pieces, run_parallel(compute, pieces, parallel, parameters), strict=True)

    def log_probs(
        self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Log-probs [B, T] of a batch's responses, on the CPU, without gradient; 0 elsewhere, and
        in rows not among `rows`."""
        return self._token_values(batch, distribution, rows, ("log_probs",))[0]

    def log_probs_and_entropies(
        self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`log_probs`, and the entropies [B, T], in nats, of the distribution before truncation."""
        log_probs_BT, entropies_BT = self._token_values(
            batch, distribution, rows, ("log_probs", "token_entropy")
        )
        return log_probs_BT, entropies_BT

    def _token_values(
        self,
        batch: Batch,
        distribution: Distribution,
        rows: Sequence[int] | None,
        names: Sequence[str],
    ) -> torch.Tensor:
        """Values [names, B, T] of `get_response_log_probs`, as `log_probs`."""
        self.model.eval()  # dropout would make the ratio to these log-probs differ from 1
        rows = range(len(batch.labels)) if rows is None else rows
        values_KBT = torch.zeros(len(names), *batch.labels.shape)

        @torch.no_grad()
        def compute(piece: Sequence[int]) -> torch.Tensor:
            part = take_rows(batch, [rows[i] for i in piece]) if piece else ONE_TOKEN
            forward = partial(
                model_values, batch=part, distribution=distribution, dtype=self.dtype, names=names
            )
            return self.run(forward).cpu()

        for piece, part_kbt in self.in_micro_batches(
            compute, computed_rows(self.model, batch, rows)
        ):
            values_KBT[:, [rows[i] for i in piece], : part_kbt.shape[2]] = part_kbt
        return values_KBT


class FrozenModel:
    """A model for log-probs alone, with matrix products in `dtype`. Raises `UserError` for weights
    that cannot be loaded. With the same weights, and the same `kernels` of `KERNELS`, its log-probs
    are a policy's, bit for bit: what autocast would cast is in `dtype`, all else in fp32."""

    def __init__(self, model_path: str, device: str, dtype: torch.dtype, kernels: str = "eager"):
        self.dtype = dtype
        self.device = device
        self.kernels = kernels
        self.model = self._load(model_path)

    def _load(self, model_path: str) -> PreTrainedModel:
        model = load_model(model_path, (self.device,), torch.float32, self.dtype)
        # Unchecked: the policy has checked them, by its weights in fp32.
        KERNELS[self.kernels](model)
        return model

    def reload(self, model_path: str) -> None:
        """Load the weights of another folder instead. Raises `UserError` as the constructor."""
        # The device has room for one of them.
        del self.model
        self.model = self._load(model_path)

    def log_probs(
        self, batch: Batch, distribution: Distribution, micro_batch_tokens: int, rows=None
    ) -> torch.Tensor:
        return MicroBatchedModel(self.model, self.dtype, micro_batch_tokens).log_probs(
            batch, distribution, rows
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every weight over, in place."""
        copy_weights(self.model, weights)


def computed_rows(model: PreTrainedModel, batch: Batch, rows: Sequence[int]) -> list[Row]:
    """The token ids of some rows as a model computes them, from which micro-batches are made."""
    if not rows:
        return []
    chosen = take_rows(batch, rows)
    split = split_rows(chosen.input_ids, chosen.response_mask)
    if not takes_plain_path(model):
        return split
    # On the plain path rows share no prompt, so that each one's tokens count in full.
    return [((*prompt, *response), ()) for prompt, response in split]


def model_values(
    model: PreTrainedModel,
    batch: Batch,
    distribution: Distribution,
    dtype: torch.dtype,
    names: Sequence[str],
) -> torch.Tensor:
    """What `get_response_log_probs` returns under these names [names, B, T], of a batch that is
    still on the CPU, with matrix products in `dtype`."""
    with autocast(first_device(model), dtype):
        values = get_response_log_probs(
            model,
            **vars(batch),
            **vars(distribution),
            return_token_entropy="token_entropy" in names,
        )
    return torch.stack([values[name] for name in names])


class ReferenceProcess:
    """The frozen model of the folder `model_path`, which messages call `name`, in a process of its
    own. Where that dies, hangs or answers no log-probs, `log_probs` replaces it once; then it
    raises `RunStopped`. An answer is waited for no longer than `timeout` seconds."""

    def __init__(
        self,
        model_path: str,
        device: str,
        dtype: torch.dtype,
        deterministic: bool,
        timeout: float,
        name: str = "reference model",
    ):
        self.name = name
        self.restarts = 0
        self.timeout = timeout
        self._model = (model_path, device, dtype, deterministic)
        self._is_closed = False
        self._turn = threading.Lock()
        self._start()

    def log_probs(
        self, batch: Batch, distribution: Distribution, micro_batch_tokens: int
    ) -> torch.Tensor:
        """The log-probs [B, T] of the responses, 0 elsewhere. Callers in several threads take
        turns."""
        question = (
            "log_probs",
            [tensor.numpy() for tensor in vars(batch).values()],
            distribution,
            micro_batch_tokens,
        )
        with self._turn:
            try:
                return torch.from_numpy(self._child.ask(self.timeout, *question))
            except ProcessLost as lost:
                self._replace(lost)
            return torch.from_numpy(self._child.ask(self.timeout, *question))

    def reload(self, model_path: str) -> None:
        """Load the weights of another folder instead; a process that is started again has these,
        too."""
        _, *others = self._model
        with self._turn:
            self._model = (model_path, *others)
            try:
                self._child.ask(max(self.timeout, START_SECONDS), "reload", model_path)
            except ProcessLost as lost:
                self._replace(lost)

    def close(self) -> None:
        """End it, also while another thread waits for it."""
        self._is_closed = True
        self._child.close()

    def _replace(self, lost: ProcessLost) -> None:
        """Start another process in the place of the lost one. Raises `lost` once this object is
        closed."""
        if self._is_closed:
            raise lost
        print(f"the {self.name} is started again: {lost}", file=sys.stderr)
        self.restarts += 1
        self._start()

    def _start(self) -> None:
        self._child = ChildProcess(
            f"{self.name}'s process", f"{__name__}:serve", os.environ, grace_seconds=0
        )
        self._child.ask(max(self.timeout, START_SECONDS), "start", *self._model)


def serve(descriptor: int) -> None:
    """Be the process of a `ReferenceProcess`."""

    def start(path: str, device: str, dtype: torch.dtype, deterministic: bool) -> FrozenModel:
        if deterministic:
            make_deterministic()
        return FrozenModel(path, device, dtype)

    def log_probs(model: FrozenModel, _, arrays: Sequence[np.ndarray], *settings) -> np.ndarray:
        log_probs_BT = model.log_probs(Batch(*map(torch.from_numpy, arrays)), *settings)
        # a bfloat16 sum may pass 0
        are_log_probs = log_probs_BT.isfinite() & (log_probs_BT <= 1e-3)
        if not are_log_probs.all():
            raise ValueError("some are no logarithms of probabilities")
        return log_probs_BT.numpy()

    def reload(model: FrozenModel, _, path: str) -> None:
        model.reload(path)

    answer_requests(
        descriptor,
        {"start": start, "log_probs": log_probs, "reload": reload, "stop": lambda model: None},
    )
