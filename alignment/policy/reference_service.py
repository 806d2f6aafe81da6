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

import asyncio
import hmac
import json
import math
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
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
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from alignment.core.records import Batch, Distribution
from alignment.policy.frozen import FrozenModel
from alignment.policy.loading import context_length, make_deterministic
from alignment.policy.reference_protocol import KEY, SERVICE, TOKEN_VARIABLE, WEIGHTS_HEADER, ServedModel
from alignment.system import signals

HEAD_SECONDS = 10.0  # for a client to send its request line and headers
BODY_SECONDS = 60.0  # for a client to send its body, and as long again to take its answer
POLL_SECONDS = 5.0  # a GET waits for a result before its client has to poll again
BODIES = 16  # read at a time
READ_RESULTS = 4  # kept, because an answer can be lost on its way
ABANDONED_SECONDS = 600.0  # before an unread result makes room for another upload

Compute = Callable[[Batch, Distribution, int], torch.Tensor]  # (batch, distribution, micro_batch_tokens) -> log-probs [B, T].


def read_upload(body: bytes, vocabulary: int, context: int) -> tuple[Batch, Distribution, int]:
    """The arguments of `Compute` in an upload's body. Raises `HTTPException` (400) for values that a model cannot take."""
    try:
        tensors = safetensors.torch.load(body)
        metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    except Exception:  # of many kinds, for bytes that are no such file
        raise HTTPException(400, "the body is no safetensors file") from None
    types = {"input_ids": torch.int64, "labels": torch.int64, "response_mask": torch.bool}
    given = {name: tensor.dtype for name, tensor in tensors.items()}
    _require(given == types, "the tensors must be input_ids and labels (int64) and response_mask (bool)")
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
        fits = 0 < temperature < math.inf and 0 < top_p <= 1 and top_k >= 0 and micro_batch_tokens >= 1
    except (KeyError, ValueError):
        fits = False
    _require(fits, "the metadata needs temperature > 0, 0 < top_p <= 1, top_k >= 0 (0: all), micro_batch_tokens >= 1")
    return batch, Distribution(temperature, top_p, top_k), micro_batch_tokens


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise HTTPException(400, message)


@dataclass
class Job:
    """The answer to an upload, when it was found, by time.monotonic(), and whether a client has read it."""

    answer: Future[Response] = field(default_factory=Future)
    finished: float = math.inf
    was_read: bool = False

    def finish(self, answer: Response) -> None:
        self.finished = time.monotonic()
        self.answer.set_result(answer)


class ReferenceService:
    """Computes the uploads of HTTP clients, in order, in the thread that calls `work`. At most `max_pending` uploads wait or
    have an unread answer; it keeps the last `READ_RESULTS` read ones, too. Only the event loop's thread touches the jobs."""

    def __init__(self, compute: Compute, info: Mapping[str, object], token: str, max_pending: int):
        self.compute, self.info, self.max_pending = compute, info, max_pending
        self._queue: SimpleQueue[tuple[str, Job, tuple] | None] = SimpleQueue()
        self._jobs: dict[str, Job] = {}  # those that are read stand in the order of that
        self._body_slots = asyncio.Semaphore(BODIES)
        needs_token = JSONResponse({"error": f"this server needs its token: set {TOKEN_VARIABLE}"}, 401)
        self.app = Starlette(
            routes=[
                Route("/upload", self._upload, methods=["POST"]),
                Route("/get", self._get),
                Route("/info", JSONResponse(info), methods=["GET"]),
            ],
            middleware=[Middleware(TokenCheck, token=token, refusal=needs_token)] if token else [],
            exception_handlers={HTTPException: _refuse, Exception: _refuse},
        )

    def work(self) -> None:
        """Compute the uploads until `stop`."""
        while (waiting := self._queue.get()) is not None:
            key, job, upload = waiting
            try:
                log_probs = safetensors.torch.save({"log_probs": self.compute(*upload)})
                answer = Response(log_probs, media_type="application/octet-stream")
            except Exception as error:  # such as a device without memory for this one; the next may be smaller
                reason = f"could not be computed: {type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
                print(f"{key} {reason}", file=sys.stderr, flush=True)
                answer = JSONResponse({"error": reason}, 500)
            with signals.deferred_signals():  # a signal within would leave the future's lock shut
                job.finish(answer)

    def stop(self) -> None:
        """End `work` after the upload that it computes."""
        self._queue.put(None)

    @contextmanager
    def running(self, listener: socket.socket) -> Iterator[str]:
        """Answer requests on a bound socket, in another thread; yields the URL. At the end waiting clients poll again."""
        listener.listen(64)
        options = {"http": TimedConnection, "headers": [(WEIGHTS_HEADER, self.info["weights"])], "timeout_graceful_shutdown": 1}
        quiet = {"ws": "none", "lifespan": "off", "log_config": None, "log_level": "critical"}
        server = uvicorn.Server(uvicorn.Config(self.app, **options, **quiet))
        thread = threading.Thread(target=server.run, args=([listener],), name="reference service", daemon=True)
        thread.start()
        host, port = listener.getsockname()[:2]
        try:
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
        finally:
            for job in list(self._jobs.values()):
                if not job.answer.done():
                    job.finish(JSONResponse({}, 202))
            server.should_exit = True
            thread.join(2)

    async def _upload(self, request: Request) -> Response:
        key = _key(request)
        upload = read_upload(await self._body(request), self.info["vocabulary"], self.info["context"])
        known = self._jobs.get(key)
        if known is None or (known.answer.done() and known.answer.result().status_code == 500):  # which is tried again
            unread = [other for other, job in self._jobs.items() if not job.was_read and other != key]  # oldest first
            if len(unread) >= self.max_pending:
                if time.monotonic() - self._jobs[unread[0]].finished <= ABANDONED_SECONDS:
                    raise HTTPException(503, "too many batches wait, or have results that nobody has read: try again later")
                del self._jobs[unread[0]]
            self._jobs.pop(key, None)
            self._jobs[key] = Job()
            self._queue.put((key, self._jobs[key], upload))
        return JSONResponse({}, 202)

    async def _body(self, request: Request) -> bytes:
        if "transfer-encoding" in request.headers or "content-length" not in request.headers:
            raise HTTPException(411, "the request needs a Content-Length, and no Transfer-Encoding")
        if int(request.headers["content-length"]) > (most := self.info["max_upload_bytes"]):
            raise HTTPException(413, f"the body is larger than {most} bytes (--max_upload_mib)")
        try:
            async with self._body_slots, asyncio.timeout(BODY_SECONDS):
                return await request.body()
        except (TimeoutError, ClientDisconnect):
            raise HTTPException(408, f"the body did not come within {BODY_SECONDS:g} seconds") from None

    async def _get(self, request: Request) -> Response:
        key = _key(request)
        job = self._jobs.get(key)
        if job is None:
            raise HTTPException(404, "there is no such key, or no longer")
        answered, _ = await asyncio.wait([asyncio.wrap_future(job.answer)], timeout=POLL_SECONDS)
        if not answered:
            return JSONResponse({}, 202)
        if not job.was_read and self._jobs.get(key) is job:
            job.was_read = True
            self._jobs[key] = self._jobs.pop(key)
            for old in [other for other, kept in self._jobs.items() if kept.was_read][:-READ_RESULTS]:
                del self._jobs[old]
        return job.answer.result()


def _refuse(request: Request, error: Exception) -> Response:
    reason = getattr(error, "detail", f"the request failed: {type(error).__name__}")
    if reason in ("Not Found", "Method Not Allowed"):  # Starlette's own words
        paths = "there is nothing but /upload, /get, /info; /upload takes POST, each other takes GET"
        reason = f"no request that the server knows: {paths}"
    return JSONResponse({"error": reason}, getattr(error, "status_code", 500))


def _key(request: Request) -> str:
    keys = request.query_params.getlist("key")
    if len(keys) != 1 or not KEY.fullmatch(keys[0]):
        raise HTTPException(400, f"the query must be key=..., of {KEY.pattern}")
    return keys[0]


class TokenCheck:
    """ASGI middleware that gives `refusal` to requests without the token, whatever else they say."""

    def __init__(self, app: ASGIApp, token: str, refusal: ASGIApp):
        self.app, self.expected, self.refusal = app, f"Bearer {token}".encode(), refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        is_known = scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected)
        await (self.app if is_known else self.refusal)(scope, receive, send)


class TimedConnection(H11Protocol):
    """uvicorn's HTTP connection, for one request: it closes where a client sends no request, or takes no answer, in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(HEAD_SECONDS, lambda: self.cycle or transport.abort())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.loop.call_later(BODY_SECONDS, self.transport.abort)

    def send_400_response(self, message: str) -> None:
        if self.conn.our_state is h11.IDLE:
            message = "this is no request that the server knows, or its Content-Length is no number"
            super().send_400_response(json.dumps({"error": message}))
        else:  # uvicorn would begin a second answer
            self.transport.abort()


def serve_model(served: ServedModel, listener: socket.socket, token: str, ready: Callable[[str], None]) -> None:
    """Load the model, call `ready` with the URL, and answer requests until a signal comes."""
    dtype = getattr(torch, served.dtype)
    model = FrozenModel(served.path, served.device, dtype)
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
    """The process of `ReferenceProcess`: receives what to serve through the pipe `descriptor` and sends the URL back."""
    connection = Connection(descriptor)
    served, token, port = connection.recv()
    if served.deterministic:
        make_deterministic()
    with socket.create_server(("127.0.0.1", port)) as listener:
        serve_model(served, listener, token, connection.send)
