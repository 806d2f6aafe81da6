"""The frozen reference model behind HTTP, so that it can be on another GPU or another machine than the trainer.

uv run -m alignment.reference_server --model checkpoints/tiny_sft --device cuda:1

    POST /upload?key=K   a safetensors file: input_ids and labels (int64 [B, T]), response_mask (bool [B, T]), and, as
                         metadata, temperature, top_p, top_k and micro_batch_tokens. 202: it is queued, or known already;
                         503: there is no room for it now
    GET  /get?key=K      200: a safetensors file with log_probs (float32 [B, T]); 202: not yet, ask again; 404: never heard of
                         it, or forgotten; 500: could not be computed
    GET  /info           JSON: the model, its vocabulary, context, dtype and device, and the largest upload in bytes

Whatever is refused is answered with {"error": "..."}. Where ALIGNMENT_REFERENCE_TOKEN is set, requests need it, as
`Authorization: Bearer ...`. `alignment.remote_reference` is the client.
"""

from __future__ import annotations

import hmac
import io
import ipaddress
import json
import math
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple
from urllib.parse import parse_qs

import safetensors.torch
import torch
import tyro
from transformers import PreTrainedModel

from alignment.args import Args, ReferenceServerArgs
from alignment.core.records import Batch
from alignment.policy.loading import (
    batch_log_probs,
    compute_dtype,
    context_length,
    load_model,
    make_deterministic,
    resolve_model,
)
from alignment.policy.reference_client import KEY, SERVICE, TOKEN_VARIABLE, WEIGHTS_HEADER, reference_token, weights_digest
from alignment.system import signals
from alignment.system.errors import UserError, run_command

CONNECTIONS = 16  # at a time
HEADER_SECONDS = 10.0  # that a client has to say what it wants
BODY_SECONDS = 60.0  # to send its body, and to take its answer
LINGER_SECONDS = 2.0  # that a refused client is still listened to
POLL_SECONDS = 5.0  # that a client waits for a result before it is told to ask again
READ_RESULTS = 4  # kept, for answers that were lost on their way
ABANDONED_SECONDS = 600.0  # after which a result that nobody has asked for makes room for others


class Refused(Exception):
    """A request that is answered with a status other than 2xx and with one line."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Upload:
    """What log-probs are asked for: those of a batch, under a distribution, in micro-batches of at most so many tokens."""

    batch: Batch
    distribution: dict[str, float]
    micro_batch_tokens: int


class Answer(NamedTuple):
    """What a request is answered with."""

    status: int
    body: bytes
    kind: str = "application/json"


# --- computing --------------------------------------------------------------------------------------------------


def read_upload(body: bytes, vocabulary: int, context: int) -> Upload:
    """The request in an upload's body. Raises `Refused` for whatever could not be computed."""
    try:
        tensors = safetensors.torch.load(body)
        metadata = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")]).get("__metadata__") or {}
    except Exception:  # of many kinds, for bytes that are no such file
        raise Refused(400, "the body is no safetensors file") from None
    _demand(
        {name: tensor.dtype for name, tensor in tensors.items()}
        == {"input_ids": torch.int64, "labels": torch.int64, "response_mask": torch.bool},
        "the tensors must be input_ids and labels (int64) and response_mask (bool)",
    )
    batch = Batch(**tensors)
    shape = batch.labels.shape
    _demand(len(shape) == 2 and 0 not in shape, "the tensors must be [B, T], neither of them 0")
    _demand(all(tensor.shape == shape for tensor in tensors.values()), "the tensors must have one shape")
    _demand(shape[1] <= context, f"sequences of {shape[1]} tokens do not fit in the model's context of {context}")
    for name, ids in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        _demand(0 <= ids.min() and ids.max() < vocabulary, f"{name} outside the vocabulary of {vocabulary}")
    _demand(batch.response_mask.view(torch.uint8).max() <= 1, "response_mask has bytes that are neither 0 nor 1")
    _demand(batch.response_mask.any(dim=1).all(), "a row has no response")
    temperature, top_p = _number(metadata, "temperature", float), _number(metadata, "top_p", float)
    top_k, micro_batch_tokens = _number(metadata, "top_k", int), _number(metadata, "micro_batch_tokens", int)
    _demand(0 < temperature < math.inf, "temperature must be a number above 0")
    _demand(0 < top_p <= 1, "top_p must be above 0 and at most 1")
    _demand(top_k >= 0, "top_k must be 0 (all) or more")
    _demand(micro_batch_tokens >= 1, "micro_batch_tokens must be at least 1")
    return Upload(batch, {"temperature": temperature, "top_p": top_p, "top_k": top_k}, micro_batch_tokens)


def _number(metadata: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float:
    try:
        return kind(metadata[name])
    except (KeyError, ValueError):
        raise Refused(400, f"the metadata has no {name}, or one that cannot be read") from None


def _demand(condition: bool, message: str) -> None:
    if not condition:
        raise Refused(400, message)


def work(desk: Desk, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Compute what is uploaded, in order, until the desk closes."""
    while (waiting := desk.next()) is not None:
        key, upload = waiting
        try:
            found_BT = batch_log_probs(model, upload.batch, upload.distribution, upload.micro_batch_tokens, dtype)
            answer = Answer(200, safetensors.torch.save({"log_probs": found_BT}), "application/octet-stream")
        except Exception as error:  # such as a device without memory for this one; the next may be smaller
            reason = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0][:300]}"
            print(f"{key} could not be computed: {reason}", file=sys.stderr, flush=True)
            answer = _error(500, f"could not be computed: {reason}")
        with signals.deferred_signals():  # a signal within would leave the desk's lock shut
            desk.finish(key, answer)


# --- what waits and what is done ----------------------------------------------------------------------------------


class Desk:
    """Uploads that wait and answers that are held, by key. Any thread may use it; one calls `next` and `finish`.

    At most `most` uploads wait or have an answer that nobody has read; beside these the last few that were read are held.
    """

    def __init__(self, most: int):
        self.most = most
        self._changed = threading.Condition()
        self._queue: SimpleQueue[tuple[str, Upload] | None] = SimpleQueue()
        self._pending: set[str] = set()
        self._unread: dict[str, tuple[float, Answer]] = {}  # with the time from which each is held; oldest first
        self._read: dict[str, Answer] = {}
        self._closed = False

    def put(self, key: str, upload: Upload) -> bool:
        """Queue an upload, unless its key is known; False where there is no room. One that failed is computed again."""
        with self._changed:
            held = self._unread.get(key, (0.0, self._read.get(key)))[1]
            if key in self._pending or (held is not None and held.status == 200):
                return True
            self._unread.pop(key, None)
            if self._is_full() and self._unread:
                oldest = next(iter(self._unread))
                if time.monotonic() - self._unread[oldest][0] > ABANDONED_SECONDS:
                    del self._unread[oldest]
            if self._is_full():
                return False
            self._read.pop(key, None)
            self._pending.add(key)
            self._queue.put((key, upload))
            return True

    def _is_full(self) -> bool:
        return len(self._pending) + len(self._unread) >= self.most

    def get(self, key: str, seconds: float) -> Answer | None:
        """The answer, waited for so long; None where there is none yet. Raises `Refused` for a key that is not known."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or key not in self._pending, seconds)
            if key in self._pending:
                return None
            if key in self._unread:
                self._read[key] = self._unread.pop(key)[1]
                for old in list(self._read)[:-READ_RESULTS]:
                    del self._read[old]
            if key not in self._read:
                raise Refused(404, "there is no such key, or no longer")
            return self._read[key]

    def next(self) -> tuple[str, Upload] | None:
        """The next upload to compute, waited for; None once the desk is closed."""
        return self._queue.get()

    def finish(self, key: str, answer: Answer) -> None:
        """Hold the answer to an upload that `next` gave."""
        with self._changed:
            self._pending.discard(key)
            self._unread[key] = time.monotonic(), answer
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._queue.put(None)


# --- HTTP ---------------------------------------------------------------------------------------------------------


class _Incoming(io.RawIOBase):
    """The bytes of a connection until a deadline: who sends one every now and then is no better than who is silent."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.allow(HEADER_SECONDS)

    def allow(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client is too slow")
        self.connection.settimeout(left)
        return self.connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One request, on a connection of its own: none is kept that is not used."""

    server: ReferenceServer
    server_version, sys_version = SERVICE, ""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.incoming = _Incoming(self.connection)
        self.rfile = io.BufferedReader(self.incoming)

    def do_GET(self) -> None:
        try:
            self._refuse_stranger()
            path, _, query = self.path.partition("?")
            if path not in ROUTES:
                raise Refused(404, f"there is nothing but {', '.join(ROUTES)}")
            method, act = ROUTES[path]
            if self.command != method:
                raise Refused(405, f"{path} takes {method}")
            self._send(act(self, query))
        except Refused as refusal:
            self._send(_error(refusal.status, str(refusal)))
        except OSError:  # the connection's
            raise
        except Exception as error:
            print(f"a request failed: {type(error).__name__}", file=sys.stderr, flush=True)
            self._send(_error(500, "the server could not make sense of this request"))

    do_POST = do_GET

    def upload(self, query: str) -> Answer:
        key = _key(query)
        upload = read_upload(self._body(), self.server.info["vocabulary"], self.server.info["context"])
        if not self.server.desk.put(key, upload):
            raise Refused(503, "too many batches wait, or have results that nobody has read: try again later")
        return Answer(202, b"{}")

    def get(self, query: str) -> Answer:
        return self.server.desk.get(_key(query), POLL_SECONDS) or Answer(202, b"{}")

    def info(self, query: str) -> Answer:
        return Answer(200, json.dumps(self.server.info).encode())

    def _refuse_stranger(self) -> None:
        given, wanted = self.headers.get("Authorization", ""), f"Bearer {self.server.token}"
        if self.server.token and not hmac.compare_digest(given.encode("latin-1", "replace"), wanted.encode()):
            raise Refused(401, f"this server needs its token: set {TOKEN_VARIABLE}")

    def _body(self) -> bytes:
        """The body, whose length is checked before any of it is read."""
        lengths = self.headers.get_all("Content-Length", [])
        if not lengths or "Transfer-Encoding" in self.headers:
            raise Refused(411, "the request needs a Content-Length, and no Transfer-Encoding")
        if len(lengths) > 1 or not re.fullmatch("[0-9]{1,18}", lengths[0]):
            raise Refused(400, "the Content-Length is no number")
        if int(lengths[0]) > self.server.info["max_upload_bytes"]:
            raise Refused(413, f"the body is larger than {self.server.info['max_upload_bytes']} bytes (--max_upload_mib)")
        self.incoming.allow(BODY_SECONDS)
        body = self.rfile.read(int(lengths[0]))
        if len(body) < int(lengths[0]):
            raise Refused(400, "the body ends too early")
        return body

    def _send(self, answer: Answer) -> None:
        self.connection.settimeout(BODY_SECONDS)
        self.request_version = "HTTP/1.0"  # what came as 0.9, or as no HTTP at all, gets an answer with a status, too
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        if answer.status in (200, 202, 404):
            self.send_header(WEIGHTS_HEADER, self.server.info["weights"])
        self.end_headers()
        self.wfile.write(answer.body)
        if answer.status >= 400:
            self._listen_on()

    def _listen_on(self) -> None:
        """Closing a socket with bytes that were not read would break the connection before the client has read its answer."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.incoming.allow(LINGER_SECONDS)
            while self.rfile.read1(1 << 16):
                pass

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the base class refuses by itself: lines that are no HTTP, and methods it does not know (501)."""
        self._send(_error(405 if code == 501 else code, "this is no request that the server knows"))

    def log_message(self, format: str, *args) -> None:
        """Nothing: a line for each request would be many."""


ROUTES = {"/upload": ("POST", _Handler.upload), "/get": ("GET", _Handler.get), "/info": ("GET", _Handler.info)}


def _key(query: str) -> str:
    try:
        keys = parse_qs(query, keep_blank_values=True, max_num_fields=1).get("key", [""])
    except ValueError:
        keys = [""]
    if not KEY.fullmatch(keys[0]):
        raise Refused(400, f"the query must be key=..., of {KEY.pattern}")
    return keys[0]


def _error(status: int, message: str) -> Answer:
    return Answer(status, json.dumps({"error": message}).encode())


class ReferenceServer(ThreadingHTTPServer):
    """Answers requests on a bound socket, a thread each, at most `CONNECTIONS`; others wait in the kernel's queue."""

    request_queue_size = 64

    def __init__(self, listener: socket.socket, desk: Desk, info: Mapping[str, object], token: str):
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.desk, self.info, self.token = listener, desk, info, token
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        self._closing = False

    @property
    def url(self) -> str:
        host, port = self.server_address
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve in a thread of its own. At the end those that wait for a result are told so, and nobody else is waited for."""
        self.server_activate()
        thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="reference server", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._closing = True
            self.desk.close()
            self.shutdown()
            self.server_close()
            deadline = time.monotonic() + 1
            for _ in range(CONNECTIONS):
                self._slots.acquire(timeout=max(0, deadline - time.monotonic()))

    def process_request(self, request, client_address) -> None:
        while not self._slots.acquire(timeout=0.1):
            if self._closing:
                return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._slots.release()
            raise

    def process_request_thread(self, request, client_address) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request, client_address) -> None:
        """Nothing: the connection has broken, and what breaks in us is answered before it comes here."""


# --- the command --------------------------------------------------------------------------------------------------


def bound(host: str, port: int, token: str) -> socket.socket:
    """A socket bound to an address of this machine. Raises `UserError` where it cannot be, or must not without a token."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host {host}: there is no such address; write one of this machine, such as 127.0.0.1") from None
    if not token and not ipaddress.ip_address(address[0].partition("%")[0]).is_loopback:
        raise UserError(
            f"--host {host}: other machines could use it there, so it needs a secret: set {TOKEN_VARIABLE} for the server and"
            " for the trainer, or take --host 127.0.0.1"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise UserError(f"--host {host} --port {port}: {error.strerror}; choose others (--port 0: any that is free)") from None
    return listener


def device_of(args: ReferenceServerArgs) -> str:
    """The device that --device names, or the first GPU, or the CPU. Raises `UserError` for one that is not there."""
    there = [*(f"cuda:{number}" for number in range(torch.cuda.device_count())), "cpu"]
    device = args.device or there[0]
    if device not in there:
        raise UserError(f"--device {device}: this machine has {', '.join(there)}")
    return device


def facts(args: ReferenceServerArgs, model: PreTrainedModel, dtype: torch.dtype, device: str) -> dict[str, object]:
    """What /info tells."""
    return {
        "service": SERVICE,
        "model": args.model,
        "vocabulary": model.config.vocab_size,
        "context": context_length(model.config),
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "weights": weights_digest(model, dtype),
        "max_upload_bytes": args.max_upload_mib << 20,
    }


def serve_on(listener: socket.socket, args: ReferenceServerArgs, token: str, ready: Callable[[str], None]) -> None:
    """Load the model and answer requests until a signal comes; `ready` is told the address."""
    device = device_of(args)
    dtype = compute_dtype(args, device)
    model = load_model(resolve_model(args.model, Args.output_dir), (device,), dtype)
    desk = Desk(args.max_pending)
    server = ReferenceServer(listener, desk, facts(args, model, dtype, device), token)
    with server.running():
        ready(server.url)
        work(desk, model, dtype)  # in the main thread, which a signal can end between any two operations


def serve(descriptor: int) -> None:
    """The server of one run, which is its parent: what to serve comes through the pipe `descriptor`, the address goes back."""
    connection = Connection(descriptor)
    args, token, run = connection.recv()
    make_deterministic(run)
    with bound(args.host, args.port, token) as listener:
        threading.Thread(target=_end_when_told, args=(connection,), daemon=True).start()
        serve_on(listener, args, token, connection.send)


def _end_when_told(connection: Connection) -> None:
    with suppress(EOFError, OSError):
        connection.recv()
    os._exit(0)


def main() -> None:
    args = tyro.cli(ReferenceServerArgs, use_underscores=True)
    token = reference_token()
    with bound(args.host, args.port, token) as listener:
        name = f"reference model {args.model} on {device_of(args)}"
        serve_on(listener, args, token, lambda url: print(f"{name}: {url}", flush=True))


if __name__ == "__main__":
    run_command(main)
