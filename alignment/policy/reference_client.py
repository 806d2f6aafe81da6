"""Reference models that compute beside the trainer: a client of `alignment.reference_server`, and a process of the run."""

import dataclasses
import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import safetensors.torch
import torch

from alignment.core.records import Batch, Distribution
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import make_deterministic
from alignment.system.errors import RunStopped, UserError, os_error
from alignment.system.files import json_object
from alignment.system.http import KEEPALIVE_OPTIONS, REFERENCE_TOKEN
from alignment.system.processes import START_SECONDS, ChildProcess, ProcessLost, answer_requests

COMMAND = "alignment.reference_server"
SERVICE = f"{COMMAND} 2"  # and the version of its requests
WEIGHTS_HEADER = "Reference-Weights"
CONNECT_SECONDS = 10.0  # and for the first answer, so that a wrong address is noticed at once
LOST_SECONDS = 300.0  # for a lost server to be started again
RETRY_SECONDS = 1.0
NAME = "reference model's process"


class RemoteReference:
    """The reference model of the server at `url`. Its log-probs are the very bits that the same model would give on the same
    kind of device. Raises `UserError` where no reference server with a model of `vocabulary` tokens answers, and `RunStopped`
    where it later gives no log-probs, for `timeout` seconds or for good."""

    def __init__(self, url: str, token: str, vocabulary: int, timeout: float):
        self.url, self.timeout = url, timeout
        # No proxy (trust_env) and no redirect (httpx follows none): the token goes nowhere else. http:// has no certificates.
        headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})
        transport = httpx.HTTPTransport(verify=False, trust_env=False, socket_options=KEEPALIVE_OPTIONS)
        limits = httpx.Timeout(timeout, connect=CONNECT_SECONDS)
        self._http = httpx.Client(base_url=url, headers=headers, transport=transport, timeout=limits, trust_env=False)
        self.info = self._get_info()
        if (its := self.info["vocabulary"]) != vocabulary:
            other = f"{self.info['model']} has a vocabulary of {its} tokens, the policy of {vocabulary}"
            raise UserError(f"--reference_url {url}: its model {other}: serve the model that training starts from")

    def log_probs(self, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> torch.Tensor:
        """The log-probs [B, T] of the responses, 0 elsewhere."""
        # Copies, because ids and labels of a single row are views of the same numbers, which safetensors refuses.
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in vars(batch).items()}
        body = safetensors.torch.save(copies)
        if len(body) > (most := self.info["max_upload_bytes"]):
            self._stop(f"takes at most {most} bytes, and a rollout has {len(body)}: raise its --max_upload_mib")
        response = self._post(body, dataclasses.asdict(distribution) | {"micro_batch_tokens": micro_batch_tokens})
        if response.headers.get(WEIGHTS_HEADER) != self.info["weights"]:
            self._stop("has another model than when the run began, or is another server: start it again with the same --model")
        if response.status_code != 200:
            self._stop(f"refuses a rollout: {response.status_code}, {response.text[:300]!r}")
        try:
            return of_responses(safetensors.torch.load(response.content)["log_probs"], batch.response_mask)
        except Exception as error:  # of many kinds, for bytes that are no such file
            self._stop(f"answers what are no log-probs ({error}): look after its version, its model and its device")

    def _get_info(self) -> dict:
        flag = f"--reference_url {self.url}"
        try:
            response = self._http.get("/info", timeout=CONNECT_SECONDS)
        except (httpx.TransportError, UnicodeError) as error:
            command = f"start it with `uv run -m {COMMAND} --model ...`, and wait for the line with its address"
            raise UserError(f"{flag}: cannot be reached ({_reason(error)}): {command}") from None
        if response.status_code == 401:
            raise UserError(f"{flag}: refuses this token: set {REFERENCE_TOKEN} here to what it was for the server")
        info = json_object(response.content) or {}
        if info.get("service") != SERVICE:
            raise UserError(f"{flag}: is no reference server of ours: give the address that `uv run -m {COMMAND}` prints")
        return info

    def _post(self, body: bytes, settings: dict) -> httpx.Response:
        """The answer to a request, which is repeated where the server has no room for it, or is lost until it is back."""
        first_failure = None
        while True:
            try:
                response = self._http.post("/log_probs", params=settings, content=body)
                if response.status_code != 503:
                    return response
                failure, patience = f"has no room ({response.text})", self.timeout
            except httpx.ReadTimeout:
                self._stop(f"has not computed its log-probs for {self.timeout:g} seconds: see what it is doing")
            except httpx.TransportError as error:
                failure, patience = f"does not answer ({_reason(error)})", min(self.timeout, LOST_SECONDS)
            if first_failure is None:
                first_failure = time.monotonic()
                print(f"the reference server {self.url} {failure}: asking it again for {patience:g} s", file=sys.stderr)
            elif time.monotonic() - first_failure > patience:
                self._stop(f"{failure} for {patience:g} s: start it again with the same --model")
            time.sleep(RETRY_SECONDS)

    def _stop(self, reason: str) -> None:
        raise RunStopped(f"the reference server {self.url} {reason}; then go on with --resume")


class ReferenceProcess:
    """The reference model of the folder `model_path` in a process of its own. Where that dies, hangs or answers no log-probs,
    `log_probs` replaces it once; then it raises `RunStopped`. An answer is waited for no longer than `timeout` seconds."""

    def __init__(self, model_path: str, device: str, dtype: torch.dtype, deterministic: bool, timeout: float):
        self.restarts, self.timeout = 0, timeout
        self._model = (model_path, device, dtype, deterministic)
        self._is_closed, self._turn = False, threading.Lock()
        self._start()

    def log_probs(self, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> torch.Tensor:
        """See `RemoteReference.log_probs`. Callers in several threads take turns."""
        question = ([tensor.numpy() for tensor in vars(batch).values()], distribution, micro_batch_tokens)
        with self._turn:
            try:
                return self._answer(question, batch.response_mask)
            except RunStopped as stopped:
                if self._is_closed:
                    raise
                print(f"the reference model is started again: {stopped}", file=sys.stderr)
            self.restarts += 1
            self._child.close()
            self._start()
            return self._answer(question, batch.response_mask)

    def close(self) -> None:
        """End it, also while another thread waits for it."""
        self._is_closed = True
        self._child.close()

    def _start(self) -> None:
        self._child = ChildProcess(NAME, "alignment.policy.reference_client:serve", os.environ, grace_seconds=0)
        self._ask(max(self.timeout, START_SECONDS), "start", *self._model)

    def _answer(self, question: tuple, mask: torch.Tensor) -> torch.Tensor:
        try:
            return of_responses(torch.from_numpy(self._ask(self.timeout, "log_probs", *question)), mask)
        except ValueError as error:
            raise RunStopped(f"the {NAME} answers what are no log-probs: {error}") from None

    def _ask(self, seconds: float, verb: str, *arguments) -> Any:
        try:
            return self._child.ask(seconds, verb, *arguments)
        except ProcessLost as lost:
            raise RunStopped(str(lost)) from None


def serve(descriptor: int) -> None:
    """Be the process of a `ReferenceProcess`."""
    answer_requests(descriptor, {"start": _load, "log_probs": _log_probs, "stop": lambda model: None})


def _load(path: str, device: str, dtype: torch.dtype, deterministic: bool) -> FrozenModel:
    if deterministic:
        make_deterministic()
    return FrozenModel(path, device, dtype)


def _log_probs(model: FrozenModel, _, arrays: Sequence[np.ndarray], *settings) -> np.ndarray:
    return model.log_probs(Batch(*map(torch.from_numpy, arrays)), *settings).numpy()


def of_responses(log_probs_BT: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log-probs [B, T] where the mask is true, 0 elsewhere. Raises ValueError for what are no log-probs of these tokens."""
    if log_probs_BT.shape != mask.shape or log_probs_BT.dtype != torch.float32:
        raise ValueError(f"{list(log_probs_BT.shape)} in {log_probs_BT.dtype} for a rollout {list(mask.shape)}")
    values = log_probs_BT[mask]
    if not (values.isfinite() & (values <= 1e-3)).all():  # a bfloat16 sum may pass 0
        raise ValueError("some are no logarithms of probabilities")
    return torch.where(mask, log_probs_BT, 0.0)


def _reason(error: Exception) -> str:
    cause = os_error(error)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
