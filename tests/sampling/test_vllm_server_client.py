"""The sampler that talks to a vLLM server, against a stand-in that answers what a test has it
answer. vLLM is not needed."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from alignment.core.records import SamplingConfig
from alignment.model.loading import load_config, load_model, load_tokenizer
from alignment.sampling import vllm_server
from alignment.sampling.arrival import load_proven, weight_checksum
from alignment.sampling.pool import SamplerPool, check_completions, open_sampler
from alignment.sampling.sampler import SAMPLERS, SamplerConfig, SamplerLost
from alignment.sampling.vllm_server import SHAPE, Guard, SamplerWorker, VLLMServerSampler
from alignment.system.errors import RunStopped, UserError

PROMPTS = ["User: What is 2 + 3?\nAssistant: <think>", "User: What is 6 * 2?\nAssistant: <think>"]
SAMPLING = SamplingConfig(n=2, max_new_tokens=3, seed=3)


class Server(ThreadingHTTPServer):
    """Answers as vLLM does. `answers` replaces answers: path -> (status, bytes), or a function that
    is given the handler."""

    daemon_threads = True

    def __init__(self, shape: dict):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict = {}
        self.requests: list = []
        self.weights: list[dict[str, torch.Tensor]] = []
        self.facts = {
            "shape": shape,
            "context": 256,
            "dtype": "float32",
            "logprobs_mode": "processed_logprobs",
            "chunked_on_cpu": False,
            "loaded": "",
        }

    def handle_error(self, request, client_address):
        """Clients that hang up are none."""

    def answer(self, path: str, body: dict | None) -> dict:
        if path == "/reset_prefix_cache":
            return {"success": True}
        if path == "/v1/completions":
            return {"choices": [choice(body["seed"] + child) for child in range(body["n"])]}
        assert path == "/collective_rpc"
        if body["method"] == "sampler_reload":
            (folder,) = body["args"]
            self.weights.append(dict(vllm_server._read_files(Path(folder))))
            self.facts["loaded"] = folder
            return {"results": [{}]}
        if body["method"] == "sampler_checksums":
            (version,) = body["args"]
            held = {
                name: ([name], weight_checksum(tensor, version, tensor.dtype))
                for name, tensor in self.weights[-1].items()
            }
            return {"results": [held]}
        return {"results": [self.facts]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.path, body, dict(self.headers)))
        answer = self.server.answers.get(self.path)
        if callable(answer):
            answer = answer(self)
            if answer is None:
                return
        status, data = answer or (200, json.dumps(self.server.answer(self.path, body)).encode())
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 307:
            self.send_header("Location", data.decode())
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_GET

    def log_message(self, *arguments):
        pass


def choice(seed: int, **changes) -> dict:
    """What vLLM gives for a completion: three tokens that its seed decides, none of which ends
    it."""
    tokens = [10 + seed % 100 + place for place in range(3)]
    return {
        "token_ids": tokens,
        "logprobs": {"token_logprobs": [-0.5, 0, -(seed % 7) / 2]},
        "text": f"text of {seed}",
        "finish_reason": "length",
    } | changes


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


@contextmanager
def running_server(tiny_folder):
    config = load_config(str(tiny_folder))
    standing_in = Server({key: getattr(config, key, None) for key in SHAPE})
    threading.Thread(
        target=standing_in.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    ).start()
    yield standing_in
    standing_in.shutdown()
    standing_in.server_close()


@pytest.fixture
def server(tiny_folder):
    with running_server(tiny_folder) as standing_in:
        yield standing_in


@pytest.fixture
def connect(server, tiny_folder, tokenizer, tmp_path, monkeypatch):
    """Makes a sampler of the stand-in."""

    def connecting(
        url: str = server.url, dtype: str = "float32", token: str | None = None, **options
    ) -> VLLMServerSampler:
        options = {
            "url": url,
            "weights_folder": str(tmp_path / "weights"),
            "timeout": 5.0,
        } | options
        monkeypatch.setenv("ALIGNMENT_SAMPLER_TOKEN", token or "")
        return VLLMServerSampler(
            SamplerConfig(str(tiny_folder), "cpu", dtype, **options), tokenizer, context=256
        )

    return connecting


def asked(server: Server, path: str) -> list[dict]:
    return [body for requested, body, _ in server.requests if requested == path]


def test_each_prompt_is_a_request_with_a_seed_and_the_completions_come_back_in_order(
    connect, server, tokenizer
):
    sampler = connect(token="the key", policy_version=4)
    drawn = sampler.sample(
        PROMPTS, SamplingConfig(n=2, temperature=0.7, top_p=0.9, top_k=5, max_new_tokens=3, seed=3)
    )
    first_seed = random.Random(3).getrandbits(48)  # as in samplers/vllm.py
    encoded = tokenizer(PROMPTS)["input_ids"]
    requests = sorted(asked(server, "/v1/completions"), key=lambda body: body["seed"])
    assert [(body["prompt"], body["seed"]) for body in requests] == list(
        zip(encoded, (first_seed, first_seed + 2), strict=True)
    )
    expected = {"n": 2, "max_tokens": 3, "stop": ["</answer>"], "temperature": 0.7, "top_p": 0.9}
    expected |= {
        "top_k": 5,
        "min_p": 0,
        "repetition_penalty": 1,
        "frequency_penalty": 0,
        "presence_penalty": 0,
    }
    assert all(body | expected == body for body in requests)
    for index, (ids, group) in enumerate(zip(encoded, drawn, strict=True)):
        for child, completion in enumerate(group):
            fields = choice(first_seed + 2 * index + child)
            assert completion.prompt_ids == tuple(ids) and completion.policy_version == 4
            assert completion.token_ids == tuple(fields["token_ids"])
            assert completion.log_probs == tuple(fields["logprobs"]["token_logprobs"])
            assert (
                completion.text == tokenizer.decode(fields["token_ids"])
                and completion.finish_reason == "length"
            )
    assert {headers.get("Authorization") for _, _, headers in server.requests} == {"Bearer the key"}


def test_the_text_has_special_tokens_and_no_end(connect, server, tokenizer):
    """What vLLM gives as text ends with that of the EOS token; its own stop strings see all special
    tokens."""
    end = tokenizer.eos_token_id
    tokens = [*tokenizer("7<|pad|>")["input_ids"], end]
    server.answers["/v1/completions"] = completions(
        *[choice(1, token_ids=tokens, text="7<|pad|><|endoftext|>", finish_reason="stop")] * 2
    )
    drawn = connect().sample(PROMPTS[:1], SAMPLING)[0]
    assert [(completion.text, completion.token_ids) for completion in drawn] == [
        ("7", tuple(tokens))
    ] * 2
    (body,) = asked(server, "/v1/completions")
    assert body["skip_special_tokens"] is False and body["stop_token_ids"] == [end]


@pytest.mark.slow
def test_two_servers_share_the_prompts_and_both_get_the_weights(
    server, tiny_folder, tokenizer, tmp_path
):
    first_seed, model = (
        random.Random(3).getrandbits(48),
        load_model(str(tiny_folder), ("cpu",), torch.float32),
    )
    with running_server(tiny_folder) as other:
        config = SamplerConfig(
            str(tiny_folder),
            "cpu",
            "float32",
            timeout=60.0,
            url=f"{server.url},{other.url}",
            weights_folder=str(tmp_path),
        )
        pool = open_sampler(SAMPLERS["vllm_server"], config, tokenizer)
        try:
            load_proven(pool, model.named_parameters(), 1)
            drawn = pool.sample(PROMPTS, SAMPLING)
        finally:
            pool.close()
        for number, one in enumerate((server, other)):
            assert [body["seed"] for body in asked(one, "/v1/completions")] == [
                first_seed + 2 * number
            ]
            # those that it began with, and the new ones
            assert len(one.weights) == 2 and not list(tmp_path.iterdir())
        token_ids = [completion.token_ids for group in drawn for completion in group]
        assert token_ids == [tuple(choice(first_seed + child)["token_ids"]) for child in range(4)]
        assert pool.policy_version == 1


def test_greedy_completions_are_drawn_once(connect, server):
    first, second = connect().sample(
        PROMPTS[:1], SamplingConfig(n=2, temperature=0.0, max_new_tokens=3)
    )[0]
    assert first == second
    assert [body["n"] for body in asked(server, "/v1/completions")] == [1]


def test_weights_cross_the_folder_one_by_one_and_leave_nothing_there(
    connect, server, tiny_folder, tmp_path, monkeypatch
):
    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    folders, read = [], vllm_server._read_files
    monkeypatch.setattr(
        vllm_server,
        "_read_files",
        lambda folder: folders.append(list(folder.iterdir())) or read(folder),
    )
    server.facts["dtype"] = "bfloat16"
    sampler = connect(dtype="bfloat16")
    sampler.load_weights(((name, 2 * weight) for name, weight in model.named_parameters()), 7)
    assert (
        sampler.policy_version == 7 and sampler.sample(PROMPTS, SAMPLING)[0][0].policy_version == 7
    )
    assert [len(files) for files in folders] == [len(list(model.parameters()))] * 2
    for factor, loaded in zip((1, 2), server.weights, strict=True):
        assert loaded.keys() == dict(model.named_parameters()).keys()
        for name, weight in model.named_parameters():
            assert torch.equal(loaded[name], (factor * weight).bfloat16())
    assert list((tmp_path / "weights").iterdir()) == []
    assert asked(server, "/reset_prefix_cache")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://a@host",
        "http://[",
        "",
    ],
)
def test_an_address_that_is_none(url, connect):
    with pytest.raises(UserError, match="--sampler_url .*give it as http://HOST:PORT"):
        connect(url)


def test_nobody_answers(connect):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with pytest.raises(
            UserError,
            match=(
                "--sampler_url: .* cannot be reached.*ConnectionRefusedError.*Check host and port"
            ),
        ):
            connect(f"http://127.0.0.1:{unused.getsockname()[1]}")


def redirect(server: Server) -> tuple[int, bytes]:
    return 307, f"{server.url}/elsewhere".encode()


REFUSALS = {
    "a wrong key": ("/collective_rpc", (401, b""), "with status 401. Set ALIGNMENT_SAMPLER_TOKEN"),
    "a web site": ("/collective_rpc", (200, b"<html>"), "no JSON object. Check host and port"),
    "another API": (
        "/collective_rpc",
        (200, b'{"data": [{"id": "a"}]}'),
        "no results. Check host and port",
    ),
    "results of another type": (
        "/collective_rpc",
        (200, b'{"results": null}'),
        "no results. Check host and port",
    ),
    "no development mode": (
        "/collective_rpc",
        (404, b'{"detail": "Not Found"}'),
        "status 404: Not Found. Check host and port; .* started as: VLLM_SERVER_DEV_MODE=1 ",
    ),
    "no extension": (
        "/collective_rpc",
        (500, b'{"error": {"message": "\'CPUWorker\' object\\n has no attribute"}}'),
        (
            "'CPUWorker' object has no attribute. .*--worker-extension-cls"
            " alignment.sampling.vllm_server.SamplerWorker"
        ),
    ),
    "odd results": ("/collective_rpc", (200, b'{"results": [7]}'), "answered with no results"),
}


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
def test_a_server_that_cannot_be_used_is_the_users_to_mend(refusal, connect, server):
    path, answer, message = refusal
    server.answers[path] = answer
    with pytest.raises(UserError, match=f"^--sampler_url: .*{message}"):
        connect()


UNFIT = {
    "shape": (
        {"vocab_size": 99},
        "serves another model, with model_type None and not qwen2, vocab_size 99 and not 304, ",
    ),
    "context": (255, "a context of 255 tokens and not 256"),
    "dtype": (
        "bfloat16",
        "computes in bfloat16 and not in float32. Start it as: .* --dtype float32 ",
    ),
    "logprobs_mode": (
        "raw_logprobs",
        "leave out temperature.* --logprobs-mode processed_logprobs ",
    ),
    "chunked_on_cpu": (True, "cuts prompts into chunks"),
}


@pytest.mark.parametrize("key", UNFIT)
def test_a_server_that_does_not_fit(key, connect, server):
    server.facts[key], message = UNFIT[key]
    with pytest.raises(UserError, match=f"^--sampler_url: .*{message}"):
        connect()


def test_weights_that_the_server_does_not_see(connect, server):
    def blind(handler) -> tuple[int, bytes]:
        if server.requests[-1][1]["method"] == "sampler_reload":
            return 500, b'{"error": {"message": "not to be seen on host"}}'
        return 200, json.dumps({"results": [server.facts]}).encode()

    server.answers["/collective_rpc"] = blind
    with pytest.raises(
        UserError, match="not to be seen on host. It has to see .*weights, .* under the same name"
    ):
        connect()


OLDER = {
    "without checksums": (
        lambda held: (500, b'{"error": {"message": "no attribute \'sampler_checksums\'"}}'),
        "no attribute 'sampler_checksums'.* start it again",
    ),
    "with a tied head as a weight of its own": (
        lambda held: (
            200,
            json.dumps({"results": [held | {"lm_head.weight": [["lm_head.weight"], 7]}]}).encode(),
        ),
        "1 of 27 tensors differ, such as lm_head.weight.* start the server again",
    ),
}


@pytest.mark.parametrize(("checksums", "message"), OLDER.values(), ids=OLDER)
def test_a_server_that_runs_an_older_version_is_refused_before_anything_is_sampled(
    checksums, message, connect, server
):
    def older(handler) -> tuple[int, bytes]:
        body = server.requests[-1][1]
        answer = server.answer(handler.path, body)
        is_asked = body["method"] == "sampler_checksums"
        return checksums(answer["results"][0]) if is_asked else (200, json.dumps(answer).encode())

    server.answers["/collective_rpc"] = older
    with pytest.raises(UserError, match=f"^--sampler_url: .*{message}") as refused:
        connect()
    assert refused.value.code == 2


def test_workers_that_hold_parts_of_the_weights_give_no_checksums(connect, server):
    """The answer of 16 workers of a large model would be longer than an answer may be."""
    worker = SamplerWorker()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=16))
    assert worker.sampler_checksums(1) == {}
    sampler = connect()
    server.answers["/collective_rpc"] = 200, json.dumps({"results": [{}] * 16}).encode()
    assert sampler.weight_checksums(1) is None


def test_the_key_goes_nowhere_else(connect, server, monkeypatch):
    monkeypatch.setenv("http_proxy", f"{server.url}/proxy")
    server.answers["/collective_rpc"] = redirect(server)
    with pytest.raises(UserError, match="status 307"):
        connect(token="secret")
    assert [path for path, *_ in server.requests] == ["/collective_rpc"]
    with pytest.raises(UserError, match="ALIGNMENT_SAMPLER_TOKEN") as refused:
        connect(token="secret\r\nX: y")
    assert "secret" not in str(refused.value)


def drip(handler) -> None:
    """A byte now and then, for longer than anybody waits."""
    with suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        for _ in range(300):
            handler.wfile.write(b" ")
            time.sleep(0.1)


def hang_up(handler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(socket.SHUT_RDWR)


def completions(*choices) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": list(choices)}).encode()


GARBAGE = {
    "no JSON": (200, b"not JSON"),
    "no text": (200, b"\xff\xfe\x00"),
    "no object": (200, b"[1]"),
    "nesting": (200, b"[" * 100_000),
    "nothing": (200, b""),
    "no choices": (200, b"{}"),
    "an error": (500, b'{"error": {"message": "EngineDeadError"}}'),
    "an error that is none": (503, b'{"error": [1, 2]}'),
    "another status": (204, b""),
    "choices of another type": (200, b'{"choices": 7}'),
    "a choice of another type": completions("text", "text"),
    "one choice too few": completions(choice(1)),
    "one choice too many": completions(choice(1), choice(2), choice(3)),
    "no tokens": completions(choice(1), choice(2, token_ids=None)),
    "tokens that are strings": completions(choice(1), choice(2, token_ids=["1", "2", "3"])),
    "tokens that are truths": completions(choice(1), choice(2, token_ids=[True, True, True])),
    "tokens outside the vocabulary": completions(choice(1), choice(2, token_ids=[1, 2, 10**6])),
    "too many tokens": completions(
        choice(1), choice(2, token_ids=[1] * 4, logprobs={"token_logprobs": [-1] * 4})
    ),
    "no log-probs": completions(choice(1), choice(2, logprobs=None)),
    "a log-prob too few": completions(choice(1), choice(2, logprobs={"token_logprobs": [-1, -1]})),
    "log-probs that are none": completions(
        choice(1), choice(2, logprobs={"token_logprobs": [None] * 3})
    ),
    "log-probs that are no numbers": completions(
        choice(1), choice(2, logprobs={"token_logprobs": [float("nan")] * 3})
    ),
    "log-probs above zero": completions(
        choice(1), choice(2, logprobs={"token_logprobs": [0.5] * 3})
    ),
    "endless numbers": completions(
        choice(1), choice(2, logprobs={"token_logprobs": [-(10**400)] * 3})
    ),
    "no text at all": completions(choice(1), choice(2, text=None)),
    "an aborted completion": completions(choice(1), choice(2, finish_reason="abort")),
    "more than there can be": (200, b" " * (2**20 + 10**5)),
    "a broken line": lambda handler: handler.wfile.write(b"what is this\r\n\r\n"),
    "half an answer": lambda handler: handler.wfile.write(
        b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{}"
    ),
    "no answer": hang_up,
    "a byte at a time": drip,
}


def garbage_cases() -> list:
    """All of them; two of three are slow tests."""
    cases = []
    for number, (name, garbage) in enumerate(GARBAGE.items()):
        marks = [pytest.mark.slow] if number % 3 else []
        cases.append(pytest.param(garbage, id=name, marks=marks))
    return cases


@pytest.mark.parametrize("garbage", garbage_cases())
def test_garbage_loses_the_sampler_in_bounded_time(garbage, connect, server):
    sampler = connect(timeout=4.0)
    server.answers["/v1/completions"] = completions(choice(1), choice(2))
    assert sampler.sample(PROMPTS, SAMPLING)[0][1].token_ids == tuple(choice(2)["token_ids"])
    server.answers["/v1/completions"] = garbage
    began = time.monotonic()
    # of the sampler, or of the check that `SamplerPool` makes of all that it gives
    with pytest.raises(SamplerLost):
        check_completions(
            sampler.sample(PROMPTS, SAMPLING),
            len(PROMPTS),
            SAMPLING,
            server.facts["shape"]["vocab_size"],
        )
    assert time.monotonic() - began < 12


@pytest.mark.slow
def test_a_server_that_says_nothing_is_given_up_in_time(connect, server):
    sampler = connect(timeout=1.5)
    still = threading.Event()
    for path in ("/v1/completions", "/collective_rpc", "/reset_prefix_cache", "at the start"):
        silent = path if path.startswith("/") else "/collective_rpc"
        server.answers = {silent: lambda handler: still.wait(30) and None}
        with pytest.raises((SamplerLost, UserError), match="gave no answer within 1.[0-5] s"):
            sampler.sample(PROMPTS, SAMPLING) if path == silent else connect(timeout=1.5)
    still.set()


def test_a_busy_server_is_waited_for_before_its_cached_prefixes_are_dropped(connect, server):
    sampler = connect(timeout=2.0)
    busy = [b'{"success": false}'] * 2
    server.answers["/reset_prefix_cache"] = lambda handler: (
        200,
        busy.pop() if busy else b'{"success": true}',
    )
    assert len(sampler.sample(PROMPTS, SAMPLING)) == 2 and not busy
    server.answers["/reset_prefix_cache"] = 200, b'{"success": false}'
    with pytest.raises(SamplerLost, match="busy with other requests"):
        sampler.sample(PROMPTS, SAMPLING)


def test_weights_that_are_not_ours_any_more_are_brought_again(connect, server, tiny_folder, capfd):
    model = load_model(str(tiny_folder), ("cpu",), torch.float32)
    sampler = SamplerPool(
        {"engine": connect}, torch.float32, model.config.vocab_size, model.named_parameters
    )
    sampler.load_weights(model.named_parameters(), 3)
    expected = sampler.sample(PROMPTS, SAMPLING)
    server.facts["loaded"] = ""  # a server that was started again
    assert sampler.sample(PROMPTS, SAMPLING) == expected and expected[0][0].policy_version == 3
    assert sampler.restarts == 1 and "lost our weights" in capfd.readouterr().err
    server.facts["loaded"] = "/somebody/else"
    facts = [(200, json.dumps({"results": [server.facts]}).encode())]  # once, and then it is gone
    server.answers["/collective_rpc"] = lambda handler: facts.pop() if facts else (500, b"")
    with pytest.raises(RunStopped, match="lost our weights.* once more .*--sampler_url"):
        sampler.sample(PROMPTS, SAMPLING)


def test_more_prompts_than_go_at_once(connect, server, monkeypatch):
    monkeypatch.setattr(vllm_server, "CONCURRENT", 3)
    drawn = connect().sample(PROMPTS * 10, SAMPLING)
    assert (
        len(drawn) == 20 and len({completion.text for group in drawn for completion in group}) == 40
    )


def test_the_guard_asks_for_the_key_on_every_path(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    seen, sent = [], []

    async def app(scope, receive, send):
        seen.append(scope)

    async def send(message):
        sent.append(message)

    def request(*headers) -> dict:
        return {"type": "http", "path": "/collective_rpc", "headers": headers}

    guard = Guard(app)
    for scope in (request(), request((b"authorization", b"Bearer secre")), {"type": "websocket"}):
        asyncio.run(guard(scope, None, send))
    assert not seen and [message["status"] for message in sent[::2]] == [401, 401, 401]
    for scope in (request((b"authorization", b"Bearer secret")), {"type": "lifespan"}):
        asyncio.run(guard(scope, None, send))
    assert len(seen) == 2 and len(sent) == 6
    monkeypatch.delenv("VLLM_API_KEY")
    with pytest.raises(KeyError, match="VLLM_API_KEY"):
        Guard(app)
