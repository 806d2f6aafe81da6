"""Clients of the reference model that `alignment.reference_server` serves: log-probs over HTTP, as safetensors files."""

import dataclasses
import hashlib
import json
import os
import secrets
import sys
import time

import httpx
import safetensors.torch
import torch

from alignment.core.records import Batch, Distribution
from alignment.policy.reference_protocol import KEY, SERVICE, TOKEN_VARIABLE, WEIGHTS_HEADER, ServedModel, check_url
from alignment.system.errors import RunStopped, UserError, os_error
from alignment.system.files import json_object
from alignment.system.processes import START_SECONDS as PROCESS_START_SECONDS
from alignment.system.processes import ChildProcess
from alignment.system.terminal import printable

START_SECONDS = 10.0  # for the first answer, so that a wrong address is noticed at once
SOCKET_SECONDS = 60.0  # for each part of a request or an answer; the server itself answers within a few seconds
PAUSES = (1.0, 4.0)  # seconds, before a request is tried again whose connection broke
UPLOADS = 3  # of one batch, to a server that has lost it
LONGEST_MESSAGE = 1 << 16  # bytes of an answer without log-probs, and of what a file has beside them


class RemoteReference:
    """The served reference model. Its log-probs are the very bits that the same model would give on the same kind of device.
    Raises `UserError` where no reference server with a model of `vocabulary` tokens answers at `url`. Afterwards whatever makes
    it impossible to go on is a `RunStopped`; no request is waited for longer than `timeout` seconds."""

    restarts = 0

    def __init__(self, url: str, token: str, vocabulary: int, timeout: float):
        check_url(url)
        self.url, self.token, self.timeout = url, token, timeout
        # No proxy (trust_env) and no redirect (httpx follows none): the token goes nowhere else. http:// has no certificates.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        limits = httpx.Limits(max_keepalive_connections=0)  # so none breaks while it is idle
        self._http = httpx.Client(headers=headers, trust_env=False, verify=False, limits=limits)
        self.info = self._get_info()
        if (its := self.info["vocabulary"]) != vocabulary:
            other = f"{printable(self.info['model'])} has a vocabulary of {its} tokens, the policy of {vocabulary}"
            raise UserError(f"--reference_url {url}: its model {other}: serve the model that training starts from")

    def upload(self, key: str, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> None:
        """Have the server compute a batch. `key` is a name for it; equal names of different batches do no harm."""
        full_key, body = _encode(key, batch, distribution, micro_batch_tokens)
        if len(body) > (most := self.info["max_upload_bytes"]):
            self._stop(f"takes at most {most} bytes, and a rollout has {len(body)}: raise its --max_upload_mib")
        status, answer = self._poll(503, "has had no room for another rollout", "POST", f"/upload?key={full_key}", body)
        if status != 202:
            self._stop_refused(status, answer)

    def log_probs(self, key: str, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> torch.Tensor:
        """The log-probs [B, T] of the responses, 0 elsewhere. Uploads the batch where the server does not have it."""
        path = f"/get?key={_encode(key, batch, distribution, micro_batch_tokens)[0]}"
        most = batch.labels.numel() * 4 + LONGEST_MESSAGE
        for uploads in range(1 + UPLOADS):
            status, answer = self._poll(202, "has not computed its log-probs", "GET", path, most=most)
            if status == 200:
                return self._read_log_probs(answer, batch.response_mask)
            if status != 404 or uploads == UPLOADS:
                self._stop_refused(status, answer)
            self.upload(key, batch, distribution, micro_batch_tokens)

    def _get_info(self) -> dict:
        flag = f"--reference_url {self.url}"
        try:
            status, answer, _ = self._exchange("GET", "/info", None, LONGEST_MESSAGE, START_SECONDS)
        except httpx.ProtocolError:
            status, answer = 0, b""
        except (httpx.TransportError, UnicodeError) as error:
            command = f"start it with `uv run -m {SERVICE} --model ...`, and wait for the line with its address"
            raise UserError(f"{flag}: cannot be reached ({_reason(error)}): {command}") from None
        if status == 401:
            raise UserError(f"{flag}: refuses this token: set {TOKEN_VARIABLE} here to what it was for the server")
        info = json_object(answer) or {}
        kinds = {"model": str, "vocabulary": int, "weights": str, "max_upload_bytes": int}
        typed = all(isinstance(info.get(key), kind) for key, kind in kinds.items())
        if status != 200 or info.get("service") != SERVICE or not typed:
            raise UserError(f"{flag}: is no reference server: give the address that `uv run -m {SERVICE}` prints")
        return info

    def _request(self, method: str, path: str, body: bytes | None = None, most: int = LONGEST_MESSAGE) -> tuple[int, bytes]:
        """Status and body of an answer. Tries again where the connection breaks: every request can be repeated."""
        for pause in (*PAUSES, None):
            try:
                status, answer, weights = self._exchange(method, path, body, most, SOCKET_SECONDS)
                break
            except (httpx.TransportError, UnicodeError) as error:
                if pause is None:
                    self._stop(f"does not answer ({_reason(error)}): start it again with the same --model")
                time.sleep(pause)
        if status in (200, 202, 404) and weights != self.info["weights"]:
            self._stop("has another model than when the run began: start it again with the same --model")
        return status, answer

    def _exchange(self, method: str, path: str, body: bytes | None, most: int, seconds: float) -> tuple[int, bytes, str | None]:
        """Status, body and weights of the answer to one request. Raises `httpx.TransportError`."""
        deadline, answer = time.monotonic() + self.timeout, bytearray()
        url = self.url.rstrip("/") + path
        with self._http.stream(method, url, content=body, timeout=min(seconds, self.timeout)) as response:
            for part in response.iter_raw():
                answer += part
                if len(answer) > most or time.monotonic() > deadline:
                    raise httpx.ProtocolError("its answer has no end")
        return response.status_code, bytes(answer), response.headers.get(WEIGHTS_HEADER)

    def _read_log_probs(self, answer: bytes, mask: torch.Tensor) -> torch.Tensor:
        """The log-probs [B, T] in an answer, 0 outside the responses."""
        try:
            log_probs_BT = safetensors.torch.load(answer)["log_probs"]
        except Exception:  # of many kinds, for bytes that are no such file
            self._stop("answers what are no log-probs: is it of another version?")
        if log_probs_BT.shape != mask.shape or log_probs_BT.dtype != torch.float32:
            self._stop(f"answers log-probs {list(log_probs_BT.shape)} in {log_probs_BT.dtype} to a rollout {list(mask.shape)}")
        of_responses = log_probs_BT[mask]
        if not (of_responses.isfinite() & (of_responses <= 1e-3)).all():  # a bfloat16 sum may pass 0
            self._stop("answers log-probs that are no logarithms of probabilities: look after its model and its device")
        return torch.where(mask, log_probs_BT, 0.0)

    def _poll(self, again: int, failure: str, *request, **limits) -> tuple[int, bytes]:
        """Status and body of an answer. Repeats a request while its status is `again`, for `timeout` seconds."""
        deadline, pause = time.monotonic() + self.timeout, 0.005
        while (answer := self._request(*request, **limits))[0] == again:
            if time.monotonic() + pause > deadline:
                self._stop(f"{failure} for {self.timeout:g} seconds: see what it is doing")
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)
        return answer

    def _stop_refused(self, status: int, answer: bytes) -> None:
        reason = " ".join(printable(str((json_object(answer) or {}).get("error"))).split())[:300]
        self._stop(f"refuses a rollout: {status}, {reason}")

    def _stop(self, reason: str) -> None:
        raise RunStopped(f"the reference server {self.url} {reason}; then go on with --resume")


class ReferenceProcess:
    """A reference server that a run starts on this machine, to work while the trainer does. Where it dies, hangs or answers no
    log-probs, `log_probs` replaces it once; then it raises `RunStopped`."""

    def __init__(self, model: ServedModel, vocabulary: int, timeout: float):
        self.token, self.restarts = secrets.token_urlsafe(), 0
        self._model, self._vocabulary, self._timeout = model, vocabulary, timeout
        self._start(port=0)

    def log_probs(self, key: str, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> torch.Tensor:
        """See `RemoteReference.log_probs`."""
        try:
            return self._client.log_probs(key, batch, distribution, micro_batch_tokens)
        except RunStopped as error:
            print(f"the reference model is started again: {error}", file=sys.stderr)
        self.restarts += 1
        self.close()
        self._start(port=int(self.url.rpartition(":")[2]))  # which the sampler knows
        return self._client.log_probs(key, batch, distribution, micro_batch_tokens)

    def close(self) -> None:
        """End it."""
        self._child.close()

    def _start(self, port: int) -> None:
        name, entry = "reference model's process", "alignment.policy.reference_service:serve"
        self._child = ChildProcess(name, entry, os.environ, grace_seconds=0)
        with self._child.time_limit(max(self._timeout, PROCESS_START_SECONDS)):
            try:
                self._child.connection.send((self._model, self.token, port))
                self.url = self._child.connection.recv()  # which a replacement keeps
            except (EOFError, OSError):
                raise RunStopped(self._child.exit_report()) from None
        self._client = RemoteReference(self.url, self.token, self._vocabulary, self._timeout)


def _encode(key: str, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> tuple[str, bytes]:
    """The key and the body of an upload. The key ends with a hash of all that log-probs depend on, so that two runs with the
    same names for their batches get their own log-probs."""
    tensors = {name: getattr(batch, name).contiguous() for name in ("input_ids", "labels", "response_mask")}
    settings = {**dataclasses.asdict(distribution), "micro_batch_tokens": micro_batch_tokens}
    metadata = {name: str(value) for name, value in settings.items()}
    digest = hashlib.sha256(json.dumps([metadata, list(batch.labels.shape)]).encode())
    for tensor in tensors.values():
        digest.update(tensor.numpy())
    full_key = f"{key}-{digest.hexdigest()[:32]}"
    if not KEY.fullmatch(full_key):
        raise ValueError(f"{key!r} is no key: at most 167 letters, digits, dots, hyphens and underscores")
    return full_key, safetensors.torch.save(tensors, metadata)


def _reason(error: Exception) -> str:
    cause = os_error(error)
    return printable(getattr(cause, "strerror", None) or str(cause) or type(cause).__name__).splitlines()[0][:200]
