"""The reference model of a run, where it is served by `alignment.reference_server`: log-probs over HTTP, as safetensors."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator, Mapping

import safetensors.torch
import torch

from alignment.args import ReferenceServerArgs, RLArgs
from alignment.core.rollout import Rollout
from alignment.rollouts.collect import distribution
from alignment.system.errors import RunStopped, UserError
from alignment.system.processes import START_SECONDS as PROCESS_START_SECONDS
from alignment.system.processes import ChildProcess
from alignment.system.terminal import printable

TOKEN_VARIABLE = "ALIGNMENT_REFERENCE_TOKEN"
SERVICE = "alignment.reference_server"
WEIGHTS_HEADER = "Reference-Weights"
KEY = re.compile(r"[A-Za-z0-9._-]{1,200}")

START_SECONDS = 10.0  # for the first answer, so that a wrong address is noticed at once
SOCKET_SECONDS = 60.0  # for sending a body, and for each part of an answer; the server itself answers within a few seconds
PAUSES = (1.0, 4.0)  # seconds, before a request is tried again whose connection broke
UPLOADS = 3  # of one rollout, to a server that has lost it
LONGEST_MESSAGE = 1 << 16  # bytes of an answer without log-probs, and of what a file has beside them


def reference_token() -> str:
    """The secret that server and trainer share, "" where there is none. An environment variable, because flags are shown in
    process lists. Raises `UserError` for what cannot stand in a header."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"[!-~]*", token):
        raise UserError(f"{TOKEN_VARIABLE}: must be printable ASCII without spaces")
    return token


def weights_digest(model: torch.nn.Module, dtype: torch.dtype) -> str:
    """What tells a model's weights, in `dtype`, from those of another: a hash of each parameter's name, shape and beginning."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().flatten()[:4096].to("cpu", dtype).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


class RemoteReference:
    """The served reference model. Its answers are the very bits that the same model would give on the same kind of device here.

    Raises `UserError` where no reference server with a model of `vocabulary` tokens answers at `url`. Afterwards whatever
    makes it impossible to go on is a `RunStopped`; no request is waited for longer than `timeout` seconds.
    """

    restarts = 0

    def __init__(self, url: str, token: str, vocabulary: int, timeout: float):
        match = re.fullmatch(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})/?", url)
        if match is None or not 0 < int(match[2]) < 65536:
            raise UserError(f"--reference_url {printable(url)}: must be http://HOST:PORT, as the reference server prints it")
        self.url, self.token, self._address = url, token, (match[1].strip("[]"), int(match[2]))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self.timeout = timeout
        self.info = self._ask_info()
        if self.info["vocabulary"] != vocabulary:
            raise UserError(
                f"--reference_url {url}: its model {printable(self.info['model'])} has a vocabulary of"
                f" {self.info['vocabulary']} tokens, the policy of {vocabulary}: serve the model that training starts from"
            )

    def upload(self, key: str, rollout: Rollout, args: RLArgs) -> None:
        """Have the server begin with a rollout. `key` is a name for it; equal ones of different rollouts do no harm."""
        tensors, metadata = _question(rollout, args)
        body = safetensors.torch.save(tensors, metadata)
        if len(body) > (most := self.info["max_upload_bytes"]):
            self._stop(f"takes at most {most} bytes, and a rollout has {len(body)}: raise its --max_upload_mib")
        for _ in self._patiently("has had no room for another rollout"):
            status, answer = self._ask("POST", f"/upload?key={_full_key(key, tensors, metadata)}", body)
            if status == 202:
                return
            if status != 503:
                self._refuse(status, answer)

    def annotate(self, rollout: Rollout, args: RLArgs, key: str) -> Rollout:
        """The rollout with `reference_log_probs_BT`. It is uploaded where the server does not have it (any more)."""
        path = f"/get?key={_full_key(key, *_question(rollout, args))}"
        most = rollout.batch.labels.numel() * 4 + LONGEST_MESSAGE
        uploads = 0
        for _ in self._patiently("has not computed its log-probs"):
            status, answer = self._ask("GET", path, most=most)
            if status == 200:
                return dataclasses.replace(rollout, reference_log_probs_BT=self._log_probs(answer, rollout))
            if status == 404 and uploads < UPLOADS:
                self.upload(key, rollout, args)
                uploads += 1
            elif status != 202:
                self._refuse(status, answer)

    # --- what is sent and received ------------------------------------------------------------------------------

    def _ask_info(self) -> dict:
        flag = f"--reference_url {self.url}"
        try:
            status, answer, _ = self._exchange("GET", "/info", None, LONGEST_MESSAGE, START_SECONDS)
        except http.client.HTTPException:
            status, answer = 0, b""
        except (OSError, UnicodeError) as error:
            raise UserError(
                f"{flag}: cannot be reached ({_reason(error)}): start it with `uv run -m {SERVICE} --model ...`, and wait for"
                " the line with its address"
            ) from None
        if status == 401:
            raise UserError(f"{flag}: refuses this token: set {TOKEN_VARIABLE} here to what it was for the server")
        info = _json(answer)
        kinds = {"model": str, "vocabulary": int, "weights": str, "max_upload_bytes": int}
        if (
            status != 200
            or info.get("service") != SERVICE
            or not all(isinstance(info.get(key), kind) for key, kind in kinds.items())
        ):
            raise UserError(f"{flag}: is no reference server: give the address that `uv run -m {SERVICE}` prints")
        return info

    def _ask(self, method: str, path: str, body: bytes | None = None, most: int = LONGEST_MESSAGE) -> tuple[int, bytes]:
        """Status and body of an answer; a connection that breaks is tried again, which no request minds."""
        for pause in (*PAUSES, None):
            try:
                status, answer, weights = self._exchange(method, path, body, most, SOCKET_SECONDS)
                break
            except (OSError, http.client.HTTPException, UnicodeError) as error:
                if pause is None:
                    self._stop(f"does not answer ({_reason(error)}): start it again with the same --model")
                time.sleep(pause)
        if status in (200, 202, 404) and weights != self.info["weights"]:
            self._stop("has another model than when the run began: start it again with the same --model")
        return status, answer

    def _exchange(self, method: str, path: str, body: bytes | None, most: int, seconds: float) -> tuple[int, bytes, str | None]:
        """One request on a connection of its own: no proxy, no redirect. Raises OSError or HTTPException."""
        with contextlib.closing(http.client.HTTPConnection(*self._address, timeout=min(seconds, self.timeout))) as connection:
            deadline = time.monotonic() + self.timeout
            connection.request(method, path, body, self._headers)
            response = connection.getresponse()
            answer = bytearray()
            while part := response.read(1 << 16):
                answer += part
                if len(answer) > most or time.monotonic() > deadline:
                    raise http.client.HTTPException("its answer has no end")
            if response.length:
                raise http.client.HTTPException("its answer was cut short")
            return response.status, bytes(answer), response.getheader(WEIGHTS_HEADER)

    def _log_probs(self, answer: bytes, rollout: Rollout) -> torch.Tensor:
        """The log-probs [B, T] in an answer, 0 outside the responses."""
        mask = rollout.batch.response_mask
        try:
            found_BT = safetensors.torch.load(answer)["log_probs"]
        except Exception:  # of many kinds, for bytes that are no such file
            self._stop("answers what are no log-probs: is it of another version?")
        if found_BT.shape != mask.shape or found_BT.dtype != torch.float32:
            self._stop(f"answers log-probs {list(found_BT.shape)} in {found_BT.dtype} to a rollout {list(mask.shape)}")
        of_responses = found_BT[mask]
        if not (of_responses.isfinite() & (of_responses <= 1e-3)).all():  # a bfloat16 sum may pass 0
            self._stop("answers log-probs that are no logarithms of probabilities: look after its model and its device")
        return torch.where(mask, found_BT, 0.0)

    def _patiently(self, what: str) -> Iterator[None]:
        """OrderedAccumulation to ask again, with pauses in between that grow."""
        deadline, pause = time.monotonic() + self.timeout, 0.005
        while True:
            yield
            if time.monotonic() + pause > deadline:
                self._stop(f"{what} for {self.timeout:g} seconds: see what it is doing")
            time.sleep(pause)
            pause = min(1.5 * pause, 1.0)

    def _refuse(self, status: int, answer: bytes) -> None:
        said = _json(answer).get("error")
        self._stop(f"refuses a rollout: {status}, {' '.join(printable(str(said)).split())[:300]}")

    def _stop(self, what: str) -> None:
        raise RunStopped(f"the reference server {self.url} {what}; then go on with --resume")


class OwnReferenceServer:
    """A reference server that one run starts on this machine, so that it works while the trainer does.

    It serves the model of the folder `start`, on `device`. One that dies, hangs or answers what cannot be log-probs is
    replaced, once a rollout; then `RunStopped` is raised.
    """

    def __init__(self, start: str, device: str, dtype: str, vocabulary: int, args: RLArgs):
        self.token, self.restarts = secrets.token_urlsafe(), 0
        self._vocabulary, self._timeout, self._rl_args = vocabulary, args.sampler_timeout, args
        # Room for all rollouts that can be ahead, of any size: nobody else can send it any.
        self._args = ReferenceServerArgs(
            model=start, device=device, dtype=dtype, port=0, max_upload_mib=1 << 12, max_pending=args.staleness + 4
        )
        self._start()

    @property
    def url(self) -> str:
        """Where it is, also after it has been replaced."""
        return self._client.url

    def annotate(self, rollout: Rollout, args: RLArgs, key: str) -> Rollout:
        """The rollout with `reference_log_probs_BT`."""
        try:
            return self._client.annotate(rollout, args, key)
        except RunStopped as error:
            print(f"the reference model is started again: {error}", file=sys.stderr)
        self.restarts += 1
        self._child.kill()
        self._child.close()
        self._args = dataclasses.replace(self._args, port=int(self.url.rpartition(":")[2]))  # which the sampler knows
        self._start()
        return self._client.annotate(rollout, args, key)

    def close(self) -> None:
        """End it."""
        self._child.close()

    def _start(self) -> None:
        self._child = ChildProcess("reference model's process", f"{SERVICE}:serve", os.environ)
        with self._child.time_limit(max(self._timeout, PROCESS_START_SECONDS)):
            try:
                self._child.connection.send((self._args, self.token, self._rl_args))
                url = self._child.connection.recv()
            except (EOFError, OSError):
                raise RunStopped(self._child.exit_report()) from None
        self._client = RemoteReference(url, self.token, self._vocabulary, self._timeout)


def _question(rollout: Rollout, args: RLArgs) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata that log-probs depend on."""
    batch = rollout.batch
    tensors = {"input_ids": batch.input_ids, "labels": batch.labels, "response_mask": batch.response_mask}
    how = {**distribution(args), "micro_batch_tokens": args.micro_batch_tokens}
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, {name: str(value) for name, value in how.items()}


def _full_key(key: str, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """The key with a hash of what is asked, so that two runs that call their rollouts the same never get each other's."""
    digest = hashlib.sha256(json.dumps([metadata, list(tensors["labels"].shape)]).encode())
    for tensor in tensors.values():
        digest.update(tensor.numpy())
    full = f"{key}-{digest.hexdigest()[:32]}"
    if not KEY.fullmatch(full):
        raise ValueError(f"{key!r} is no key: at most 167 letters, digits, dots, hyphens and underscores")
    return full


def _json(answer: bytes) -> dict:
    """The JSON object of an answer, {} where it is none."""
    try:
        found = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _reason(error: Exception) -> str:
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0][:200]
