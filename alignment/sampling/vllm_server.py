"""A `Sampler` that draws from vLLM's own OpenAI-compatible server, on any machine
(docs/asynchronous.md starts one)."""

import asyncio
import hmac
import os
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from functools import partial
from pathlib import Path

import httpx
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file, save_file

from alignment.core.records import Completion, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.policy.loading import load_config, load_end_ids, load_weights
from alignment.policy.policy import Policy
from alignment.sampling.arrival import HeldWeights, NamedTensors, load_proven
from alignment.sampling.sampler import (
    Completions,
    SamplerConfig,
    SamplerLost,
    check_sampler_url,
    encode_prompts,
)
from alignment.sampling.vllm import _repack_output_embedding, held_checksums, request_parameters
from alignment.system.errors import RunStopped, UserError, os_error
from alignment.system.files import json_object, read_toml, written_by_library
from alignment.system.processes import START_SECONDS

CONNECT_SECONDS = 10
CHECK_SECONDS = 60  # for a server that has nothing to do to say what it is
# a machine that is gone is noticed in two minutes
KEEPALIVE = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}
KEEPALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
KEEPALIVE_OPTIONS += [
    (socket.IPPROTO_TCP, getattr(socket, name), n)
    for name, n in KEEPALIVE.items()
    if hasattr(socket, name)
]
# requests on their way, each of one prompt; vLLM works on 128 to 1024 completions at a time
CONCURRENT = 256
FACTS = read_toml(Path(__file__).with_name("vllm_server.toml"), "--sampler_url")
NEUTRAL, SHAPE = FACTS["neutral"], FACTS["shape"]


class VLLMServerSampler:
    """A `Sampler` that draws from the vLLM server at `config.url`, whose key is the environment's
    ALIGNMENT_SAMPLER_TOKEN. `context` is in tokens; None: the model's own. `config.weights_folder`
    holds one version of the weights until the server, which must see it under the same name, has
    loaded it. In bfloat16 a completion also depends on its batch. Raises `UserError` where the
    server cannot be used, and `SamplerLost` where it dies, is silent for `config.timeout` seconds,
    answers no completions, or has other weights (restarted or used by others). A new sampler may
    use it once it is back."""

    def __init__(
        self,
        config: SamplerConfig,
        tokenizer,
        policy: Policy | None = None,
        *,
        context: int | None = None,
    ):
        model_path, dtype = config.model_path, config.dtype
        model_config = load_config(model_path)
        self.tokenizer, self.restarts, self.policy_version = tokenizer, 0, config.policy_version
        self.context = context or model_config.max_position_embeddings
        self._responses = ResponseReader(tokenizer, load_end_ids(model_path, tokenizer))
        self._timeout, self.dtype = min(config.timeout, CHECK_SECONDS), getattr(torch, dtype)
        self._weights_folder = Path(config.weights_folder).resolve()
        check_sampler_url(config.url, token := os.environ.get("ALIGNMENT_SAMPLER_TOKEN", ""))
        url = config.url.rstrip("/").removesuffix("/v1")
        headers = {"Connection": "close"} | ({"Authorization": f"Bearer {token}"} if token else {})
        # No proxy (trust_env) and no redirect (httpx follows none): the key goes nowhere else.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._http = {"base_url": url, "headers": headers, "timeout": timeout, "trust_env": False}
        self._certificates = ssl.create_default_context() if url.startswith("https:") else False
        self._server = f"the vLLM server at {url}"
        command = FACTS["command"].format(
            model=model_path, dtype=dtype, context=self.context, module=__name__
        )
        self._refuse_unfit(_shape(model_config.get_text_config()), dtype, command)
        self._timeout = max(config.timeout, START_SECONDS)  # for the first weights
        try:
            self._weights_folder.mkdir(parents=True, exist_ok=True)
            load_proven(self, load_weights(model_path, self.dtype), config.policy_version)
        except RunStopped as error:
            need = f"It has to see {self._weights_folder}, where weights are written"
            remedy = (
                "let both machines have that folder under the same name, and the server's user"
                " read it"
            )
            older = "If it runs an older version of this package, start it again"
            raise UserError(f"--sampler_url: {error}. {need}: {remedy}. {older}") from None
        self._timeout = config.timeout

    def sample(self, prompts: Sequence[str], sampling: SamplingConfig) -> Completions:
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        repeats = sampling.n if sampling.temperature == 0 else 1
        self._drop_cached_prefixes()
        # Token ids stand beside the log-probs too, where the tokens' texts would be longer.
        shared = {**NEUTRAL, "return_token_ids": True, "return_tokens_as_token_ids": True}
        parameters = request_parameters(sampling, len(encoded), self._responses.end_ids)
        requests = [
            shared | own | {"prompt": ids} for own, ids in zip(parameters, encoded, strict=True)
        ]
        answers = self._post("/v1/completions", requests)
        # Checked after the answers have come: a server that is lost before gives none.
        if any(facts.get("loaded") != self._loaded for facts in self._call("sampler_facts")):
            raise SamplerLost(
                f"{self._server} lost our weights: it was started again, or another command has"
                " loaded its own"
            )
        read = partial(self._responses.text, stop=sampling.stop)
        pairs = zip(encoded, answers, strict=True)
        return [
            _completions(answer, tuple(ids), self.policy_version, read) * repeats
            for ids, answer in pairs
        ]

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        # A new name each time: another machine may remember for a while what an old one had in it.
        with tempfile.TemporaryDirectory(
            ".tmp", ".sampler_weights.", self._weights_folder, True
        ) as folder:
            os.chmod(folder, 0o755)  # the server may have a user of its own
            _write_files(Path(folder), named_tensors, self.dtype)
            self._call("sampler_reload", folder)
            self._loaded = folder
        self._drop_cached_prefixes()
        self.policy_version = version

    def weight_checksums(self, version: int) -> HeldWeights | None:
        held = self._call("sampler_checksums", version)
        return held[0] if len(held) == 1 else None

    def close(self) -> None:
        """Nothing: the server is its operator's, and nothing is left in `weights_folder` between
        calls."""

    def _drop_cached_prefixes(self) -> None:
        """Drop old weights' keys and values. vLLM refuses while it has requests, such as an
        interrupted caller's: then wait."""
        until = time.monotonic() + self._timeout
        while self._post("/reset_prefix_cache", [None])[0].get("success") is not True:
            if time.monotonic() > until:
                raise SamplerLost(
                    f"{self._server} does not drop its prefix cache: it is busy with other requests"
                )
            time.sleep(0.1)

    def _call(self, method: str, *arguments: str | int) -> list[dict]:
        """What `SamplerWorker`'s method says in each of the server's workers."""
        results = self._post("/collective_rpc", [{"method": method, "args": arguments}])[0].get(
            "results"
        )
        if not (
            isinstance(results, list)
            and results
            and all(isinstance(result, dict) for result in results)
        ):
            raise SamplerLost(f"{self._server} answered with no results")
        return results

    def _post(self, path: str, bodies: Sequence) -> list[dict]:
        """The answers to requests sent side by side, in order. Raises `SamplerLost` for the first
        that fails, ends the rest."""
        # in a thread, as a signal could be lost within an event loop
        with start_blocking_portal() as portal:
            return portal.call(self._answers, path, bodies)

    async def _answers(self, path: str, bodies: Sequence) -> list[dict]:
        limits = httpx.Limits(max_connections=CONCURRENT)
        transport = httpx.AsyncHTTPTransport(
            self._certificates, limits=limits, socket_options=KEEPALIVE_OPTIONS
        )
        client = httpx.AsyncClient(transport=transport, **self._http)
        try:
            async with asyncio.timeout(self._timeout), client:
                return await asyncio.gather(*(self._answer(client, path, body) for body in bodies))
        except TimeoutError:
            raise SamplerLost(
                f"{self._server} gave no answer within {self._timeout:.1f} s"
            ) from None
        except (httpx.TransportError, ValueError) as error:
            cause = os_error(error)
            raise SamplerLost(
                f"{self._server} cannot be reached, or broke off ({type(cause).__name__}: {cause})"
            ) from None

    async def _answer(self, client: httpx.AsyncClient, path: str, body: dict | None) -> dict:
        response = await client.post(path, json=body)
        content = json_object(response.content)
        if response.status_code != 200:
            said = (content or {}).get("error") or (content or {}).get("detail") or ""
            said = said.get("message") if isinstance(said, dict) else said
            reason = f": {' '.join(str(said).split())[:300]}" if said else ""
            if response.status_code == 401:
                reason += (
                    ". Set ALIGNMENT_SAMPLER_TOKEN to what VLLM_API_KEY is where the server runs"
                )
            raise SamplerLost(
                f"{self._server} answered {path} with status {response.status_code}{reason}"
            )
        if content is None:
            raise SamplerLost(f"{self._server} answered what is no JSON object")
        return content

    def _refuse_unfit(self, shape: dict, dtype: str, command: str) -> None:
        """Raise `UserError` for a server that could not take our weights, or whose log-probs would
        be others."""
        try:
            facts = self._call("sampler_facts")[0]
        except SamplerLost as error:
            remedy = (
                "Check host and port; to be given new weights, a vLLM server must be started as"
            )
            raise UserError(f"--sampler_url: {error}. {remedy}: {command}") from None
        theirs, context = facts.get("shape", {}), facts.get("context", 0)
        others = [
            f"{key} {theirs.get(key)} and not {ours}"
            for key, ours in shape.items()
            if theirs.get(key) != ours
        ]
        wrong = {
            f"serves another model, with {', '.join(others)}": bool(others),
            f"has a context of {context} tokens and not {self.context}": context < self.context,
            f"computes in {facts.get('dtype')} and not in {dtype}": facts.get("dtype") != dtype,
            "gives log-probs that leave out temperature, top-p and top-k": (
                facts.get("logprobs_mode") != "processed_logprobs"
            ),
            "cuts prompts into chunks, which loses the seeds on a CPU": (
                facts.get("chunked_on_cpu") is not False
            ),
        }
        if reasons := [reason for reason, applies in wrong.items() if applies]:
            raise UserError(
                f"--sampler_url: {self._server} {'; '.join(reasons)}. Start it as: {command}"
            )


def _shape(config) -> dict:
    return {key: getattr(config, key, None) for key in SHAPE}


def _write_files(folder: Path, named_tensors: NamedTensors, dtype: torch.dtype) -> None:
    """Write each weight, cast to `dtype`, as a safetensors file of its own, so that one at a time
    is in memory."""
    with written_by_library(folder):
        for number, (name, tensor) in enumerate(named_tensors):
            # cast where it is, so that fewer bytes travel
            weight = tensor.detach().to(dtype).cpu().contiguous()
            save_file({name: weight}, folder / f"{number:06d}.safetensors")


def _completions(
    answer: dict, prompt_ids: tuple[int, ...], version: int, read: Callable
) -> list[Completion]:
    """The completions of one prompt, whose text `read` makes of their token ids, as vLLM's own ends
    with that of the EOS token. Raises `SamplerLost` for values of other types."""
    completions = []
    try:
        for choice in answer["choices"]:
            tokens, log_probs = (
                tuple(choice["token_ids"]),
                tuple(map(float, choice["logprobs"]["token_logprobs"])),
            )
            text, reason = choice["text"], choice["finish_reason"]
            # but "abort"
            if (
                set(map(type, tokens)) != {int}
                or not isinstance(text, str)
                or reason not in ("stop", "length")
            ):
                raise ValueError
            completions.append(
                Completion(prompt_ids, tokens, log_probs, read(tokens), reason, version)
            )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SamplerLost("a vLLM server answered what are no completions") from None
    return completions


class SamplerWorker:
    """Mixed by vLLM into its workers, whose `vllm_config` and `reload_weights` it uses, by
    --worker-extension-cls."""

    sampler_loaded = ""  # the folder of the weights that it has; none while it loads some

    def sampler_facts(self) -> dict:
        """What a sampler must know before it uses this server, and whose weights it has."""
        config = self.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        return {
            "shape": _shape(config.model_config.hf_text_config),
            "context": config.model_config.max_model_len,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "chunked_on_cpu": on_cpu and config.scheduler_config.enable_chunked_prefill,
            "loaded": self.sampler_loaded,
        }

    def sampler_reload(self, folder: str) -> dict:
        """Load the weights of the safetensors files in `folder`, in place."""
        self.sampler_loaded = ""
        self.reload_weights(weights_iterator=_read_files(Path(folder)))
        _repack_output_embedding(self)
        self.sampler_loaded = folder
        return {}

    def sampler_checksums(self, version: int) -> dict:
        """Checksums of the weights that it holds; none where it holds a part of them, which nobody
        compares."""
        return (
            held_checksums(self, version)
            if self.vllm_config.parallel_config.world_size == 1
            else {}
        )


def _read_files(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} is not to be seen on {socket.gethostname()}")
    for file in files:
        yield from load_file(file).items()


class Guard:
    """ASGI middleware that asks for VLLM_API_KEY on all paths; vLLM asks under /v1 only, where
    nothing loads weights."""

    def __init__(self, app: Callable):
        self.app, self.expected = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: MutableMapping, receive: Callable, send: Callable) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self.expected):
            return await self.app(scope, receive, send)
        answer = "websocket.http.response" if scope["type"] == "websocket" else "http.response"
        await send({"type": f"{answer}.start", "status": 401, "headers": []})
        await send({"type": f"{answer}.body", "body": b""})
