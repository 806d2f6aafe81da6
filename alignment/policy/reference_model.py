"""A reference model that computes beside the trainer, in a process of the run."""

import os
import sys
import threading
from collections.abc import Sequence

import numpy as np
import torch

from alignment.core.records import Batch, Distribution
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import make_deterministic
from alignment.system.processes import START_SECONDS, ChildProcess, ProcessLost, answer_requests


class ReferenceProcess:
    """The reference model of the folder `model_path` in a process of its own. Where that dies, hangs or answers no log-probs,
    `log_probs` replaces it once; then it raises `RunStopped`. An answer is waited for no longer than `timeout` seconds."""

    def __init__(self, model_path: str, device: str, dtype: torch.dtype, deterministic: bool, timeout: float):
        self.restarts, self.timeout = 0, timeout
        self._model = (model_path, device, dtype, deterministic)
        self._is_closed, self._turn = False, threading.Lock()
        self._start()

    def log_probs(self, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> torch.Tensor:
        """The log-probs [B, T] of the responses, 0 elsewhere. Callers in several threads take turns."""
        question = "log_probs", [tensor.numpy() for tensor in vars(batch).values()], distribution, micro_batch_tokens
        with self._turn:
            try:
                return torch.from_numpy(self._child.ask(self.timeout, *question))
            except ProcessLost as lost:
                if self._is_closed:
                    raise
                print(f"the reference model is started again: {lost}", file=sys.stderr)
            self.restarts += 1
            self._child.close()
            self._start()
            return torch.from_numpy(self._child.ask(self.timeout, *question))

    def close(self) -> None:
        """End it, also while another thread waits for it."""
        self._is_closed = True
        self._child.close()

    def _start(self) -> None:
        self._child = ChildProcess("reference model's process", f"{__name__}:serve", os.environ, grace_seconds=0)
        self._child.ask(max(self.timeout, START_SECONDS), "start", *self._model)


def serve(descriptor: int) -> None:
    """Be the process of a `ReferenceProcess`."""

    def start(path: str, device: str, dtype: torch.dtype, deterministic: bool) -> FrozenModel:
        if deterministic:
            make_deterministic()
        return FrozenModel(path, device, dtype)

    def log_probs(model: FrozenModel, _, arrays: Sequence[np.ndarray], *settings) -> np.ndarray:
        batch = Batch(*map(torch.from_numpy, arrays))
        return of_responses(model.log_probs(batch, *settings), batch.response_mask).numpy()

    answer_requests(descriptor, {"start": start, "log_probs": log_probs, "stop": lambda model: None})


def of_responses(log_probs_BT: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-probs [B, T] where the mask is true, 0 elsewhere. Raises ValueError for what are no log-probs of these tokens."""
    if log_probs_BT.shape != mask.shape or log_probs_BT.dtype != torch.float32:
        raise ValueError(f"{list(log_probs_BT.shape)} in {log_probs_BT.dtype} for a rollout {list(mask.shape)}")
    values = log_probs_BT[mask]
    if not (values.isfinite() & (values <= 1e-3)).all():  # a bfloat16 sum may pass 0
        raise ValueError("some are no logarithms of probabilities")
    return torch.where(mask, log_probs_BT, 0.0)
