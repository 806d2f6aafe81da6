"""The log-probs of a frozen model as an HTTP service: a Starlette app on uvicorn, which computes one rollout at a time.

    POST /log_probs?temperature=1.0&top_p=1.0&top_k=0&micro_batch_tokens=1024
                 The body is a safetensors file: input_ids and labels (int64 [B, T]), response_mask (bool [B, T]). The answer
                 is one with log_probs (float32 [B, T]), as soon as they are computed. Requests may be repeated.
    GET /info    JSON: the model, its vocabulary, context, dtype, device and weights, and the largest upload in bytes

A refusal is a line of text: 400 for what the model cannot compute, 401 without the token, 408 and 413 for bodies that are too
slow or too large, 503 where there is no room now. Every answer names the weights in its header Reference-Weights. With a token,
requests need `Authorization: Bearer TOKEN`. `alignment.policy.reference_client` is the client.
"""

import asyncio
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

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
from alignment.policy.loading import context_length
from alignment.policy.reference_client import SERVICE, WEIGHTS_HEADER
from alignment.system.http import REFERENCE_TOKEN, TokenCheck

BODY_SECONDS = 60.0  # for a client to send its body


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
        self._room, self._turn = asyncio.Semaphore(max_pending), asyncio.Lock()
        self._thread = ThreadPoolExecutor(1)
        refusal = PlainTextResponse(f"this server needs its token: set {REFERENCE_TOKEN}", 401)
        app = Starlette(
            routes=[Route("/log_probs", self._log_probs, methods=["POST"]), Route("/info", JSONResponse(self.info))],
            middleware=[Middleware(TokenCheck, token=token, refusal=refusal)] if token else [],
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
                rollout = read_rollout(await self._body(request), request.query_params, self.info)
                async with self._turn:
                    if await request.is_disconnected():  # its client asks again, or is gone
                        return Response()
                    return Response(await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, *rollout))
        except asyncio.CancelledError:
            raise HTTPException(503, "the server is being stopped: ask again when it is back") from None

    async def _body(self, request: Request) -> bytes:
        body, most = bytearray(), self.info["max_upload_bytes"]
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise HTTPException(413, f"the body is larger than {most} bytes (--max_upload_mib)")
        except TimeoutError:
            late = f"the body did not come within {BODY_SECONDS:g} seconds"
            raise HTTPException(408, late, {"Connection": "close"}) from None
        return bytes(body)

    def _compute(self, batch: Batch, distribution: Distribution, micro_batch_tokens: int) -> bytes:
        try:
            return safetensors.torch.save({"log_probs": self.model.log_probs(batch, distribution, micro_batch_tokens)})
        except Exception as error:  # such as a device without memory for this one; the next may be smaller
            reason = f"could not be computed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            print(f"a rollout {reason}", file=sys.stderr, flush=True)
            raise HTTPException(500, reason) from None


def read_rollout(body: bytes, settings: Mapping[str, str], info: Mapping) -> tuple[Batch, Distribution, int]:
    """The batch of a body, its distribution and tokens of a micro-batch. Raises `HTTPException` (400) for what the model of
    `info` cannot compute; on a GPU, an id outside the vocabulary would end the server."""
    try:
        batch = Batch(**safetensors.torch.load(body))
        distribution = Distribution(float(settings["temperature"]), float(settings["top_p"]), int(settings["top_k"]))
        micro_batch_tokens = int(settings["micro_batch_tokens"])
        ids, (rows, length) = torch.stack([batch.input_ids, batch.labels]), batch.response_mask.shape
        fits = ids.shape[1:] == (rows, length) and length <= info["context"]
        fits = fits and 0 <= ids.min() and ids.max() < info["vocabulary"]
    except Exception as error:  # of many kinds, for bytes that are no such file
        raise HTTPException(400, f"what was sent is no rollout ({type(error).__name__})") from None
    if not fits:
        limits = f"its context is {info['context']} tokens, its vocabulary {info['vocabulary']}"
        raise HTTPException(400, f"the rollout, {rows} x {length} tokens, does not fit the model: {limits}")
    return batch, distribution, micro_batch_tokens
