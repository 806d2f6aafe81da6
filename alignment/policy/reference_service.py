"""The log-probs of a frozen model as an HTTP service: a Starlette app on uvicorn, which queues batches for one thread.

    POST /upload?key=K   a safetensors file: input_ids and labels (int64 [B, T]), response_mask (bool [B, T]), and, as
                         metadata, temperature, top_p, top_k and micro_batch_tokens. 202: the batch is queued or known;
                         503: the server has no room for it now
    GET  /get?key=K      200: a safetensors file with log_probs (float32 [B, T]); 202: not computed yet; 404: the key is
                         unknown or forgotten; 500: the computation failed
    GET  /info           JSON: the model, its vocabulary, context, dtype and device, and the largest upload in bytes

The server answers every refused request with {"error": "..."}. With a token, requests need `Authorization: Bearer TOKEN`.
`alignment.policy.reference_client` is the client.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue

import h11
import safetensors.torch
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from alignment.core.records import Batch, Distribution
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import context_length, make_deterministic
from alignment.policy.reference_protocol import KEY, SERVICE, TOKEN_VARIABLE, WEIGHTS_HEADER, ServedModel
from alignment.system import signals

HEAD_SECONDS = 10.0  # for a client to send its request line and headers
BODY_SECONDS = 60.0  # for a client to send its body, and as long again to take its answer
LINGER_SECONDS = 2.0  # for a client that sends no HTTP to read its refusal
POLL_SECONDS = 5.0  # a GET waits for a result before its client has to poll again
BODIES = 16  # read at a time
HEAD_BYTES = 1 << 15  # a request line with headers; the server refuses one of more than twice as many bytes
READ_RESULTS = 4  # kept, because an answer can be lost on its way
ABANDONED_SECONDS = 600.0  # before an unread result makes room for another upload

UVICORN = {"loop": "asyncio", "ws": "none", "lifespan": "off", "proxy_headers": False, "timeout_graceful_shutdown": 1}
UVICORN |= {"log_config": None, "log_level": "critical", "access_log": False, "server_header": False, "date_header": False}

Compute = Callable[[Batch, Distribution, int], torch.Tensor]
"""(batch, distribution, micro_batch_tokens) -> log-probs [B, T]."""


def read_upload(body: bytes, vocabulary: int, context: int) -> tuple[Batch, Distribution, int]:
    """The arguments of `Compute` in an upload's body. Raises `HTTPException` (400) for values that a model cannot take."""
    try:
        tensors = safetensors.torch.load(body)
        metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    except Exception:  # of many kinds, for bytes that are no such file
        raise HTTPException(400, "the body is no safetensors file") from None
    _require(
        {name: tensor.dtype for name, tensor in tensors.items()}
        == {"input_ids": torch.int64, "labels": torch.int64, "response_mask": torch.bool},
        "the tensors must be input_ids and labels (int64) and response_mask (bool)",
    )
    batch = Batch(**tensors)
    shape = batch.labels.shape
    _require(len(shape) == 2 and 0 not in shape, "the tensors must be [B, T], neither of them 0")
    _require(all(tensor.shape == shape for tensor in tensors.values()), "the tensors must have one shape")
    _require(shape[1] <= context, f"sequences of {shape[1]} tokens do not fit in the model's context of {context}")
    for name, ids in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        _require(0 <= ids.min() and ids.max() < vocabulary, f"{name} outside the vocabulary of {vocabulary}")
    _require(batch.response_mask.view(torch.uint8).max() <= 1, "response_mask has bytes that are neither 0 nor 1")
    _require(batch.response_mask.any(dim=1).all(), "a row has no response")
    try:
        temperature, top_p = float(metadata["temperature"]), float(metadata["top_p"])
        top_k, micro_batch_tokens = int(metadata["top_k"]), int(metadata["micro_batch_tokens"])
    except (KeyError, ValueError):
        raise HTTPException(400, "the metadata needs numbers: temperature, top_p, top_k and micro_batch_tokens") from None
    _require(0 < temperature < math.inf, "temperature must be a number above 0")
    _require(0 < top_p <= 1, "top_p must be above 0 and at most 1")
    _require(top_k >= 0, "top_k must be 0 (all) or more")
    _require(micro_batch_tokens >= 1, "micro_batch_tokens must be at least 1")
    return batch, Distribution(temperature, top_p, top_k), micro_batch_tokens


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise HTTPException(400, message)


@dataclass
class Job:
    """An upload, and its answer: a status with the log-probs' file or an error message."""

    upload: tuple[Batch, Distribution, int]
    answer: Future[tuple[int, bytes | str]] = field(default_factory=Future)
    finished: float = math.inf  # time.monotonic()

    def __post_init__(self) -> None:
        self.answer.set_running_or_notify_cancel()  # so that a client that stops waiting does not cancel the answer

    def finish(self, status: int, content: bytes | str) -> None:
        self.finished = time.monotonic()
        self.answer.set_result((status, content))


# --- the service --------------------------------------------------------------------------------------------------


class ReferenceService:
    """Computes the uploads of HTTP clients, in order, in the thread that calls `work`.

    At most `max_pending` uploads wait or have an unread answer; the last `READ_RESULTS` answers that were read are kept too.
    Only the event loop's thread touches the two tables of jobs.
    """

    def __init__(self, compute: Compute, info: Mapping[str, object], token: str, max_pending: int):
        self.compute, self.info, self.max_pending = compute, info, max_pending
        self._queue: SimpleQueue[tuple[str, Job] | None] = SimpleQueue()
        self._unread: dict[str, Job] = {}  # waiting jobs, and finished ones that no client has read; oldest first
        self._read: dict[str, Job] = {}
        self._body_slots = asyncio.Semaphore(BODIES)
        self.app = Starlette(
            routes=[Route("/upload", self._upload, methods=["POST"]), Route("/get", self._get), Route("/info", self._info)],
            middleware=[Middleware(TokenCheck, token=token)],
            exception_handlers={HTTPException: self._refuse, Exception: self._fail},
        )
        self.app.router.redirect_slashes = False

    def work(self) -> None:
        """Compute the uploads until `stop`."""
        while (waiting := self._queue.get()) is not None:
            key, job = waiting
            try:
                answer = 200, safetensors.torch.save({"log_probs": self.compute(*job.upload)})
            except Exception as error:  # such as a device without memory for this one; the next may be smaller
                reason = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
                print(f"{key} could not be computed: {reason}", file=sys.stderr, flush=True)
                answer = 500, f"could not be computed: {reason}"
            with signals.deferred_signals():  # a signal within would leave the future's lock shut
                job.finish(*answer)

    def stop(self) -> None:
        """End `work` after the upload that it computes."""
        self._queue.put(None)

    @contextmanager
    def running(self, listener: socket.socket) -> Iterator[str]:
        """Answer requests on a bound socket, in another thread; yields the URL. At the end clients that wait for a result are
        told to poll again, and the service waits a second for its connections."""
        listener.listen(64)
        server = uvicorn.Server(uvicorn.Config(self.app, http=_Connection, h11_max_incomplete_event_size=HEAD_BYTES, **UVICORN))
        thread = threading.Thread(target=server.run, args=([listener],), name="reference service", daemon=True)
        thread.start()
        host, port = listener.getsockname()[:2]
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            for job in list(self._unread.values()):
                if not job.answer.done():
                    job.finish(202, "")
            server.should_exit = True
            thread.join(2)

    async def _upload(self, request: Request) -> Response:
        key = _key(request)
        upload = read_upload(await self._body(request), self.info["vocabulary"], self.info["context"])
        if not self._enqueue(key, upload):
            raise HTTPException(503, "too many batches wait, or have results that nobody has read: try again later")
        return self._response(202, b"{}")

    async def _body(self, request: Request) -> bytes:
        """The body, whose length is checked before any of it is read."""
        if "transfer-encoding" in request.headers or "content-length" not in request.headers:
            raise HTTPException(411, "the request needs a Content-Length, and no Transfer-Encoding")
        length, body = int(request.headers["content-length"]), bytearray()
        if length > (most := self.info["max_upload_bytes"]):
            raise HTTPException(413, f"the body is larger than {most} bytes (--max_upload_mib)")
        try:
            async with self._body_slots, asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} seconds") from None
        except ClientDisconnect:
            pass
        if len(body) < length:
            raise HTTPException(400, "the body ends too early")
        return bytes(body)

    def _enqueue(self, key: str, upload: tuple[Batch, Distribution, int]) -> bool:
        """Queue an upload, unless its key is known; False without room for it. A job that failed is computed again."""
        known = self._unread.get(key) or self._read.get(key)
        if known and not (known.answer.done() and known.answer.result()[0] == 500):
            return True
        self._unread.pop(key, None)
        if len(self._unread) >= self.max_pending:
            oldest = next(iter(self._unread))
            if time.monotonic() - self._unread[oldest].finished > ABANDONED_SECONDS:
                del self._unread[oldest]
        if len(self._unread) >= self.max_pending:
            return False
        self._read.pop(key, None)
        self._unread[key] = Job(upload)
        self._queue.put((key, self._unread[key]))
        return True

    async def _get(self, request: Request) -> Response:
        key = _key(request)
        job = self._unread.get(key) or self._read.get(key)
        if job is None:
            raise HTTPException(404, "there is no such key, or no longer")
        try:
            status, content = await asyncio.wait_for(asyncio.wrap_future(job.answer), POLL_SECONDS)
        except TimeoutError:
            status, content = 202, ""
        if status == 202:
            return self._response(202, b"{}")
        if self._unread.get(key) is job:
            self._read[key] = self._unread.pop(key)
            for old in list(self._read)[:-READ_RESULTS]:
                del self._read[old]
        if status != 200:
            raise HTTPException(status, content)
        return self._response(200, content, "application/octet-stream")

    async def _info(self, request: Request) -> Response:
        return self._response(200, json.dumps(self.info).encode())

    def _response(self, status: int, body: bytes, media_type: str = "application/json") -> Response:
        return Response(body, status, {WEIGHTS_HEADER: self.info["weights"]}, media_type)

    def _refuse(self, request: Request, error: HTTPException) -> Response:
        path, reason = request.scope["path"], error.detail
        if error.status_code == 405:
            reason = f"this is no request that the server knows: {path} takes {'POST' if path == '/upload' else 'GET'}"
        elif "endpoint" not in request.scope:
            reason = "there is nothing but /upload, /get, /info"
        return self._response(error.status_code, _error(reason))

    def _fail(self, request: Request, error: Exception) -> Response:
        print(f"a request failed: {type(error).__name__}", file=sys.stderr, flush=True)
        return self._response(500, _error("the server could not make sense of this request"))


def _key(request: Request) -> str:
    keys = request.query_params.multi_items()
    if len(keys) != 1 or keys[0][0] != "key" or not KEY.fullmatch(keys[0][1]):
        raise HTTPException(400, f"the query must be key=..., of {KEY.pattern}")
    return keys[0][1]


def _error(message: str) -> bytes:
    return json.dumps({"error": message}).encode()


class TokenCheck:
    """ASGI middleware that refuses requests without the token, whatever else they say."""

    def __init__(self, app, token: str):
        self.app, self.token = app, token

    async def __call__(self, scope, receive, send) -> None:
        app, given = self.app, dict(scope["headers"]).get(b"authorization", b"")
        if self.token and not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            app = JSONResponse({"error": f"this server needs its token: set {TOKEN_VARIABLE}"}, 401)
        await app(scope, receive, send)


# --- connections --------------------------------------------------------------------------------------------------


class _Connection(H11Protocol):
    """uvicorn's HTTP connection, with three things that it lacks: time limits for clients that send or take nothing, an
    answer to a client that ends its body early, and refusals in JSON, which a client can still read."""

    _limit: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._hang_up_in(HEAD_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        self._limit.cancel()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), HEAD_BYTES):  # as h11 measures no head that comes whole
            if not self._refused:
                super().data_received(data[start : start + HEAD_BYTES])
        if self._is_answering():  # the service limits the rest of a request
            self._limit.cancel()

    def eof_received(self) -> bool:
        """Whether the connection stays open: until its request is answered."""
        if self._is_answering():
            self._end_body()
        return self._is_answering()

    def on_response_complete(self) -> None:
        self._hang_up_in(BODY_SECONDS)
        super().on_response_complete()

    def send_400_response(self, message: str) -> None:
        """uvicorn calls this while it handles the h11 error of a client that sends no HTTP."""
        if self._is_answering():
            return self._end_body()  # of chunks, which the service refuses
        self._refused = True
        if self.conn.our_state is h11.IDLE:
            status = {501: 411}.get(sys.exception().error_status_hint, sys.exception().error_status_hint)
            if status == 431 and b"\n" not in self.conn.trailing_data[0]:
                status = 414
            body = _error("this is no request that the server knows, or its Content-Length is no number")
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body))), ("Connection", "close")]
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event))
        self.transport.write_eof()  # closing it with unread bytes would break it before the client has read its answer
        self._hang_up_in(LINGER_SECONDS)

    def _hang_up_in(self, seconds: float) -> None:
        if self._limit:
            self._limit.cancel()
        self._limit = self.loop.call_later(seconds, self.transport.abort)

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end_body(self) -> None:
        self.cycle.more_body = self.cycle.keep_alive = False
        self.cycle.message_event.set()


# --- serving a model ----------------------------------------------------------------------------------------------


def serve_model(served: ServedModel, listener: socket.socket, token: str, ready: Callable[[str], None]) -> None:
    """Load the model, call `ready` with the URL, and answer requests until a signal comes."""
    dtype = getattr(torch, served.dtype)
    model = FrozenModel(served.path, served.device, dtype, dtype)
    service = ReferenceService(model.log_probs, model_facts(served, model), token, served.max_pending)
    with service.running(listener) as url:
        ready(url)
        service.work()  # in the main thread, which a signal can end between any two operations


def model_facts(served: ServedModel, model: FrozenModel) -> dict[str, object]:
    """The facts that /info lists."""
    config = model.model.config
    return {
        "service": SERVICE,
        "model": served.name or served.path,
        "vocabulary": config.vocab_size,
        "context": context_length(config),
        "dtype": served.dtype,
        "device": served.device,
        "weights": model.weights_digest(),
        "max_upload_bytes": served.max_upload_bytes,
    }


def serve(descriptor: int) -> None:
    """The process of `ReferenceProcess`: what to serve comes through the pipe `descriptor`, the URL goes back."""
    connection = Connection(descriptor)
    served, token, port = connection.recv()
    if served.deterministic:
        make_deterministic()
    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=_end_when_told, args=(connection,), daemon=True).start()
        serve_model(served, listener, token, connection.send)


def _end_when_told(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)
