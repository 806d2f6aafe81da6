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
from typing import Any

import httpx
import torch
from anyio.from_thread import start_blocking_portal
from safetensors.torch import load_file, save_file

from alignment.core.records import Completion, SamplingConfig
from alignment.core.text import ResponseReader
from alignment.model.loading import load_config, load_end_ids, load_weights
from alignment.policy.policy import Policy
from alignment.sampling.arrival import HeldWeights, NamedTensors, load_proven
from alignment.sampling.sampler import (
    Completions,
    OnResponseEnd,
    SamplerConfig,
    SamplerLost,
    check_sampler_url,
    encode_prompts,
)
from alignment.sampling.vllm import _repack_output_embedding, held_checksums, request_parameters
from alignment.system.errors import RunStopped, UserError, os_error
from alignment.system.files import guard_library_write, json_object, read_toml
from alignment.system.processes import START_SECONDS

CONNECT_SECONDS = 10
CHECK_SECONDS = 60  # for a server that has nothing to do to say what it is
# Options of TCP by which a machine that is gone is noticed in two minutes.
KEEPALIVE = {
    "TCP_KEEPIDLE": 60,
    "TCP_KEEPINTVL": 10,
    "TCP_KEEPCNT": 6,
}
KEEPALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
for _name, _value in KEEPALIVE.items():
    if hasattr(socket, _name):  # Not every system has every option.
        KEEPALIVE_OPTIONS.append((socket.IPPROTO_TCP, getattr(socket, _name), _value))
# Requests on their way, each of one prompt. vLLM works on 128 to 1024 completions at a time.
CONCURRENT = 256
FACTS = read_toml(Path(__file__).with_name("vllm_server.toml"), "--sampler_url")
# Parameters of a request that a server otherwise takes from the model's generation_config.json, at
# values that change no probability.
NEUTRAL = FACTS["neutral"]
# Names of a model's configuration that must be alike, so that its weights and tokens fit.
SHAPE = FACTS["shape"]


class VLLMServerSampler:
    """A `Sampler` that draws from the vLLM server at `config.url`. The environment variable
    ALIGNMENT_SAMPLER_TOKEN has the server's key.

    New weights go through files: `config.weights_folder`, which the server must see under the same
    name, holds one version until the server has loaded it. `context` is in tokens; None: the
    model's own. In bfloat16 a completion also depends on what else is in its batch.

    Raises `UserError` where the server cannot be used. Raises `SamplerLost` where the server dies,
    is silent for `config.timeout` seconds, answers no completions, or has other weights, as after a
    restart or where another command uses it. A new sampler may use it once it is back."""

    def __init__(
        self,
        config: SamplerConfig,
        tokenizer,
        policy: Policy | None = None,
        *,
        context: int | None = None,
    ):
        model_config = load_config(config.model_path)
        end_ids = load_end_ids(config.model_path, tokenizer)
        self.tokenizer = tokenizer
        self.context = context or model_config.max_position_embeddings
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.policy_version = config.policy_version
        self.restarts = 0
        self._responses = ResponseReader(tokenizer, end_ids)
        self._weights_folder = Path(config.weights_folder).resolve()
        self._loaded = ""  # The folder whose weights the server has.
        token = os.environ.get("ALIGNMENT_SAMPLER_TOKEN", "")
        check_sampler_url(config.url, token)
        url = config.url.rstrip("/").removesuffix("/v1")
        self._server = f"the vLLM server at {url}"
        self._http = client_options(url, token)
        self._certificates: ssl.SSLContext | bool = False
        if url.startswith("https:"):
            self._certificates = ssl.create_default_context()
        command = FACTS["command"].format(
            model=config.model_path, dtype=config.dtype, context=self.context, module=__name__
        )
        # A server that has nothing to do answers soon. Its first weights may take long.
        self._timeout = min(config.timeout, CHECK_SECONDS)
        self._refuse_unfit(_shape(model_config.get_text_config()), config.dtype, command)
        self._timeout = max(config.timeout, START_SECONDS)
        try:
            self._weights_folder.mkdir(parents=True, exist_ok=True)
            weights = load_weights(config.model_path, self.dtype)
            load_proven(self, weights, config.policy_version)
        except RunStopped as error:
            raise UserError(
                f"--sampler_url: {error}. It has to see {self._weights_folder}, where weights are"
                " written: let both machines have that folder under the same name, and the"
                " server's user read it. If it runs an older version of this package, start it"
                " again"
            ) from None
        self._timeout = config.timeout

    def sample(
        self,
        prompts: Sequence[str],
        sampling: SamplingConfig,
        on_response_end: OnResponseEnd = None,
    ) -> Completions:
        """See `Sampler.sample`. All completions come at once, so `on_response_end` is not
        called."""
        encoded = encode_prompts(self.tokenizer, prompts, self.context, sampling.max_new_tokens)
        self._drop_cached_prefixes()
        parameters = request_parameters(sampling, len(encoded), self._responses.end_ids)
        shared = {
            **NEUTRAL,
            # Token ids stand beside the log-probs too, where the tokens' texts would be longer.
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        requests = []
        for own_parameters, prompt_ids in zip(parameters, encoded, strict=True):
            requests.append({**shared, **own_parameters, "prompt": prompt_ids})
        answers = self._post("/v1/completions", requests)
        # Checked after the answers have come: a server that is lost before gives none.
        for facts in self._call("sampler_facts"):
            if facts.get("loaded") != self._loaded:
                raise SamplerLost(
                    f"{self._server} lost our weights: it was started again, or another command has"
                    " loaded its own"
                )
        # Greedy completions of a prompt are all the same, and drawn once.
        repeats = sampling.n if sampling.temperature == 0 else 1
        read_text = partial(self._responses.text, stop=sampling.stop)
        groups: Completions = []
        for prompt_ids, answer in zip(encoded, answers, strict=True):
            drawn = _completions(answer, tuple(prompt_ids), self.policy_version, read_text)
            groups.append(drawn * repeats)
        return groups

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        # A new name each time: another machine may remember for a while what an old one had in it.
        with tempfile.TemporaryDirectory(
            suffix=".tmp",
            prefix=".sampler_weights.",
            dir=self._weights_folder,
            ignore_cleanup_errors=True,
        ) as folder:
            os.chmod(folder, 0o755)  # the server may have a user of its own
            _write_files(Path(folder), named_tensors, self.dtype)
            self._call("sampler_reload", folder)
            self._loaded = folder
        self._drop_cached_prefixes()
        self.policy_version = version

    def weight_checksums(self, version: int) -> HeldWeights | None:
        held = self._call("sampler_checksums", version)
        if len(held) > 1:  # each worker has parts of the weights
            return None
        return held[0]

    def close(self) -> None:
        """Do nothing: the server is its operator's, and nothing is left in `weights_folder` between
        calls."""

    def _drop_cached_prefixes(self) -> None:
        """Drop old weights' keys and values. vLLM refuses while it has requests, such as an
        interrupted caller's: then wait."""
        deadline = time.monotonic() + self._timeout
        while self._post("/reset_prefix_cache", [None])[0].get("success") is not True:
            if time.monotonic() > deadline:
                raise SamplerLost(
                    f"{self._server} does not drop its prefix cache: it is busy with other requests"
                )
            time.sleep(0.1)

    def _call(self, method: str, *arguments: str | int) -> list[dict]:
        """What `SamplerWorker`'s method says in each of the server's workers."""
        (answer,) = self._post("/collective_rpc", [{"method": method, "args": arguments}])
        results = answer.get("results")
        if not isinstance(results, list) or not results:
            raise SamplerLost(f"{self._server} answered with no results")
        if not all(isinstance(result, dict) for result in results):
            raise SamplerLost(f"{self._server} answered with no results")
        return results

    def _post(self, path: str, bodies: Sequence) -> list[dict]:
        """The answers to requests sent side by side, in order. Raises `SamplerLost` for the first
        that fails, and ends the rest."""
        # In a thread, as a signal could be lost within an event loop.
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
                answers = [self._answer(client, path, body) for body in bodies]
                return await asyncio.gather(*answers)
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
            reason = _reason_in(content or {})
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
            raise UserError(
                f"--sampler_url: {error}. Check host and port; to be given new weights, a vLLM"
                f" server must be started as: {command}"
            ) from None
        served_shape = facts.get("shape", {})
        differences = []
        for key, value in shape.items():
            served = served_shape.get(key)
            if served != value:
                differences.append(f"{key} {served} and not {value}")
        context = facts.get("context", 0)
        reasons: list[str] = []
        if differences:
            reasons.append(f"serves another model, with {', '.join(differences)}")
        if context < self.context:
            reasons.append(f"has a context of {context} tokens and not {self.context}")
        if facts.get("dtype") != dtype:
            reasons.append(f"computes in {facts.get('dtype')} and not in {dtype}")
        if facts.get("logprobs_mode") != "processed_logprobs":
            reasons.append("gives log-probs that leave out temperature, top-p and top-k")
        if facts.get("chunked_on_cpu") is not False:
            reasons.append("cuts prompts into chunks, which loses the seeds on a CPU")
        if reasons:
            raise UserError(
                f"--sampler_url: {self._server} {'; '.join(reasons)}. Start it as: {command}"
            )


def client_options(url: str, token: str) -> dict[str, Any]:
    """The options of the HTTP client that asks the server at `url`."""
    headers = {"Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return {
        "base_url": url,
        "headers": headers,
        "timeout": httpx.Timeout(None, connect=CONNECT_SECONDS),
        # No proxy, and no redirect, as httpx follows none: the key goes nowhere else.
        "trust_env": False,
    }


def _reason_in(answer: dict) -> str:
    """What a failed request's answer says, after a colon; empty where it says nothing."""
    message = answer.get("error") or answer.get("detail") or ""
    if isinstance(message, dict):
        message = message.get("message")
    if not message:
        return ""
    one_line = " ".join(str(message).split())
    return f": {one_line[:300]}"


def _shape(config) -> dict:
    return {key: getattr(config, key, None) for key in SHAPE}


def _write_files(folder: Path, named_tensors: NamedTensors, dtype: torch.dtype) -> None:
    """Write each weight, cast to `dtype`, as a safetensors file of its own, so that one at a time
    is in memory."""
    with guard_library_write(folder):
        for number, (name, tensor) in enumerate(named_tensors):
            # Cast where it is, so that fewer bytes travel.
            weight = tensor.detach().to(dtype).cpu().contiguous()
            save_file({name: weight}, folder / f"{number:06d}.safetensors")


def _completions(
    answer: dict,
    prompt_ids: tuple[int, ...],
    version: int,
    read_text: Callable[[tuple[int, ...]], str],
) -> list[Completion]:
    """The completions of one prompt, whose text `read_text` makes of their token ids: vLLM's own
    ends with that of the EOS token. Raises `SamplerLost` for values of other types."""
    completions: list[Completion] = []
    try:
        for choice in answer["choices"]:
            token_ids = tuple(choice["token_ids"])
            log_probs = tuple(float(number) for number in choice["logprobs"]["token_logprobs"])
            finish_reason = choice["finish_reason"]
            if {type(token) for token in token_ids} != {int}:
                raise ValueError("token ids are no integers")
            if not isinstance(choice["text"], str):
                raise ValueError("a text is no string")
            if finish_reason not in ("stop", "length"):  # "abort" is the third that there is.
                raise ValueError("a completion was broken off")
            text = read_text(token_ids)
            completions.append(
                Completion(prompt_ids, token_ids, log_probs, text, finish_reason, version)
            )
    except (KeyError, TypeError, ValueError, OverflowError):
        raise SamplerLost("a vLLM server answered what are no completions") from None
    return completions


class SamplerWorker:
    """vLLM mixes this class into its workers' (--worker-extension-cls), whose `vllm_config` and
    `reload_weights` it uses."""

    vllm_config: Any
    reload_weights: Callable[..., None]
    sampler_loaded = ""  # The folder of the weights that it has; empty while it loads some.

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
        """Checksums of the weights that this worker holds. {} if the weights are split over several
        workers: the trainer compares whole weights only."""
        if self.vllm_config.parallel_config.world_size > 1:
            return {}
        return dict(held_checksums(self, version))


def _read_files(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} is not to be seen on {socket.gethostname()}")
    for file in files:
        yield from load_file(file).items()


class Guard:
    """ASGI middleware that refuses a request without VLLM_API_KEY, on every path. vLLM itself asks
    for the key on paths under /v1 alone, so others could load weights without it."""

    def __init__(self, app: Callable):
        self.app = app
        self.expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: MutableMapping, receive: Callable, send: Callable) -> None:
        authorization = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(authorization, self.expected):
            return await self.app(scope, receive, send)
        answer = "http.response"
        if scope["type"] == "websocket":
            answer = "websocket.http.response"
        await send({"type": f"{answer}.start", "status": 401, "headers": []})
        await send({"type": f"{answer}.body", "body": b""})
