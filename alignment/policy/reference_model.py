"""Reference models that compute beside the trainer: served over HTTP, or in a process of the run.

`alignment.reference_server` runs a `ReferenceService`, a Starlette app on uvicorn, which computes one rollout at a time:

    POST /log_probs?temperature=1.0&top_p=1.0&top_k=0&micro_batch_tokens=1024
                 The body is a safetensors file: input_ids and labels (int64 [B, T]), response_mask (bool [B, T]). The answer
                 is one with log_probs (float32 [B, T]), as soon as they are computed. Requests may be repeated.
    GET /info    JSON: the model, its vocabulary, context, dtype, device and weights, and the largest upload in bytes

A refusal is a line of text: 400 for what the model cannot compute, 401 without the token, 413 for a body that is too large, 503
where there is no room now. Every answer names the weights in its header Reference-Weights. With a token, requests need
`Authorization: Bearer TOKEN`. `RemoteReference` is the client.
"""

import asyncio
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import safetensors.torch
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from alignment.core.records import Batch, Distribution
from alignment.policy.frozen import FrozenModel, weights_digest
from alignment.policy.loading import context_length, make_deterministic
from alignment.system.errors import RunStopped, UserError, os_error
from alignment.system.files import json_object
from alignment.system.http import KEEPALIVE_OPTIONS, REFERENCE_TOKEN, TokenCheck
from alignment.system.processes import START_SECONDS, ChildProcess, ProcessLost, answer_requests

COMMAND = "alignment.reference_server"
SERVICE = f"{COMMAND} 2"  # and the version of its requests
WEIGHTS_HEADER = "Reference-Weights"
BODY_SECONDS = 60.0  # for a client to send its body
CONNECT_SECONDS = 10.0  # and for the first answer, so that a wrong address is noticed at once
LOST_SECONDS = 300.0  # for a lost server to be started again
RETRY_SECONDS = 1.0
NAME = "reference model's process"


class ReferenceService:
    """A server of `model`, which clients know by `name`. At most `max_pending` rollouts, each of at most `max_upload_bytes`,
    are uploaded, wait, or are computed at a time."""

    def __init__(self, name: str, model: FrozenModel, token: str, max_pending: int, max_upload_bytes: int):
        config = model.model.config
        self.model = model
        self.info = {
            "service": SERVICE,
            "model": name,
            "vocabulary": config.vocab_size,
            "context": context_length(config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.model.device),
            "weights": weights_digest(model.model, model.dtype),
            "max_upload_bytes": max_upload_bytes,
        }
        self._room, self._thread = asyncio.Semaphore(max_pending), ThreadPoolExecutor(1)
        refusal = PlainTextResponse(f"this server needs its token: set {REFERENCE_TOKEN}", 401)
        app = Starlette(
            routes=[Route("/log_probs", self._log_probs, methods=["POST"]), Route("/info", JSONResponse(self.info))],
            middleware=[Middleware(TokenCheck, token=token, refusal=refusal)] if token else [],
            max_body_size=max_upload_bytes,
        )
        options = {"headers": [(WEIGHTS_HEADER, self.info["weights"])], "timeout_graceful_shutdown": 1}
        quiet = {"ws": "none", "lifespan": "off", "log_config": None, "log_level": "critical"}
        self.server = uvicorn.Server(uvicorn.Config(app, **options, **quiet))
        """Its `run([socket])` answers requests until SIGINT or SIGTERM, which it then raises again."""

    async def _log_probs(self, request: Request) -> Response:
        if self._room.locked():
            raise HTTPException(503, "too many rollouts wait: ask again later")
        try:
            async with self._room:
                async with asyncio.timeout(BODY_SECONDS):
                    rollout = await request.body(), request.query_params
                return Response(await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, *rollout))
        except (TimeoutError, asyncio.CancelledError):
            raise HTTPException(503, "the body was too slow, or the server is being stopped: ask again later") from None

    def _compute(self, body: bytes, settings: Mapping[str, str]) -> bytes:
        """The answer to a rollout. Raises `HTTPException`: 400 for what the model cannot compute, such as ids outside the
        vocabulary, which on a GPU would end the server; 500 where the device could not, which may do the next one."""
        status, failure = 400, "is no rollout"
        try:
            batch = Batch(**safetensors.torch.load(body))
            distribution = Distribution(float(settings["temperature"]), float(settings["top_p"]), int(settings["top_k"]))
            ids, (rows, length) = torch.stack([batch.input_ids, batch.labels]), batch.response_mask.shape
            micro_batch_tokens = int(settings["micro_batch_tokens"])
            context, vocabulary = self.info["context"], self.info["vocabulary"]
            if ids.shape[1:] != (rows, length) or length > context or ids.min() < 0 or ids.max() >= vocabulary:
                fits = f"its context is {context} tokens, its vocabulary {vocabulary}"
                raise ValueError(f"{rows} x {length} tokens, does not fit the model: {fits}")
            status, failure = 500, "could not be computed"
            return safetensors.torch.save({"log_probs": self.model.log_probs(batch, distribution, micro_batch_tokens)})
        except Exception as error:  # of many kinds, for bytes that are no such file, and of the device
            reason = f"{failure}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"a rollout {reason}", file=sys.stderr, flush=True)
            raise HTTPException(status, reason) from None


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
        self._child = ChildProcess(NAME, f"{__name__}:serve", os.environ, grace_seconds=0)
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


def _reason(error: Exception) -> str:
    cause = os_error(error)
    return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
