"""The served reference model: the same bits as a model in this process, whatever happens to server, client or process."""

import contextlib
import dataclasses
import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.core.records import Batch, Distribution
from alignment.core.tokens import collate
from alignment.models import checked_reference
from alignment.policy import reference_model
from alignment.policy.frozen import FrozenModel, weights_digest
from alignment.policy.reference_model import SERVICE, ReferenceProcess, ReferenceService, RemoteReference
from alignment.reference_server import bind, main
from alignment.system.errors import RunStopped, UserError, run_command
from alignment.system.http import REFERENCE_TOKEN, check_reference_url, reference_token

VOCABULARY = 304
SETTINGS = {"temperature": "1.0", "top_p": "1.0", "top_k": "0", "micro_batch_tokens": "100"}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load_frozen(tiny_folder)


def load_frozen(folder, dtype=torch.float32) -> FrozenModel:
    return FrozenModel(str(folder), "cpu", dtype)


@pytest.fixture(scope="module", autouse=True)
def command(tiny_folder):
    """The command in a process of its own, which starts, for seconds, while the other tests run."""
    flags = ["--model", str(tiny_folder), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "alignment.reference_server", *flags],
        cwd=Path(__file__).parents[2],
        env={**os.environ, REFERENCE_TOKEN: "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch):
    monkeypatch.setattr(reference_model, "RETRY_SECONDS", 0.05)


def make_batch(seed: int = 0, rows: int = 8) -> Batch:
    rng = random.Random(seed)
    prompts, responses = ([[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(rows)] for _ in "pr")
    return collate(prompts, responses, pad_token_id=1)


def question(seed: int = 0, distribution=Distribution(), micro_batch_tokens=100) -> tuple:
    """The arguments with which log-probs are asked for."""
    return make_batch(seed), distribution, micro_batch_tokens


BODY = safetensors.torch.save(vars(make_batch()))


@contextlib.contextmanager
def serving(model, port=0, token="", max_pending=8, max_upload_bytes=1 << 20):
    """The service as the command runs it, but in another thread."""
    service = ReferenceService("tiny", model, token, max_pending, max_upload_bytes)
    with bind("127.0.0.1", port, token) as listener:
        address = listener.getsockname()
        thread = threading.Thread(target=service.server.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield SimpleNamespace(url=f"http://127.0.0.1:{address[1]}", address=address, token=token)
        finally:
            service.server.should_exit = True
            thread.join(10)
        assert not thread.is_alive()


def computing(model, compute) -> SimpleNamespace:
    """The model with other log-probs."""
    return SimpleNamespace(model=model.model, dtype=model.dtype, log_probs=compute)


@pytest.fixture(scope="module")
def server(model):
    with serving(model, token="secret") as server:
        yield server


TOKEN = ("Authorization", "Bearer secret")


def path_for(**changes) -> str:
    merged = {**SETTINGS, **changes}
    return "/log_probs?" + urlencode({name: value for name, value in merged.items() if value is not None})


def request(server, method="GET", path="/info", body=None, headers=(TOKEN,)) -> tuple[int, bytes]:
    """A request whose headers are just these and the host; with a body, its length as well."""
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", "localhost")
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        for name, value in headers:
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()


def client(server, timeout=30.0, vocabulary=VOCABULARY) -> RemoteReference:
    return RemoteReference(server.url, "secret" if server.token else "", vocabulary, timeout)


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("distribution", "micro_batch_tokens"),
    [
        (Distribution(), 100),
        (Distribution(), 30),
        (Distribution(), 16304),
        (Distribution(temperature=0.7, top_p=0.83, top_k=20), 100),
    ],
)
def test_log_probs_are_those_of_the_model_in_this_process_bit_for_bit(server, model, distribution, micro_batch_tokens):
    asked = question(1, distribution, micro_batch_tokens)
    expected = model.log_probs(*asked)
    assert expected[asked[0].response_mask].lt(0).all()
    assert torch.equal(client(server).log_probs(*asked), expected)
    single = make_batch(rows=1), distribution, micro_batch_tokens
    assert torch.equal(client(server).log_probs(*single), model.log_probs(*single))


def test_requests_at_the_same_time_are_never_mixed_up(server, model):
    remote, hotter = client(server), Distribution(temperature=2.0)
    questions = [question(seed, distribution) for seed in (3, 4, 5) for distribution in (Distribution(), hotter)]
    with ThreadPoolExecutor(len(questions)) as threads:
        answers = list(threads.map(lambda asked: remote.log_probs(*asked), questions))
    for answer, asked in zip(answers, questions, strict=True):
        assert torch.equal(answer, model.log_probs(*asked))


def test_info(server, model):
    status, body = request(server)
    assert status == 200
    assert json.loads(body) == {
        "service": SERVICE,
        "model": "tiny",
        "vocabulary": VOCABULARY,
        "context": 256,
        "dtype": "float32",
        "device": "cpu",
        "weights": weights_digest(model.model, model.dtype),
        "max_upload_bytes": 1 << 20,
    }


def test_the_digest_differs_with_weights_and_dtypes(model, tiny_folder):
    own, other = weights_digest(model.model, torch.float32), load_frozen(tiny_folder).model
    in_16_bits = load_frozen(tiny_folder, torch.bfloat16).model
    assert weights_digest(other, torch.float32) == own != weights_digest(model.model, torch.bfloat16)
    assert weights_digest(model.model, torch.bfloat16) == weights_digest(in_16_bits, torch.bfloat16)
    with torch.no_grad():
        other.get_input_embeddings().weight[0, 0] += 1
    assert weights_digest(other, torch.float32) != own


# --- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("GET", "/info", None, (), 401, "ALIGNMENT_REFERENCE_TOKEN"),
        ("GET", "/info", None, (("Authorization", "Bearer wrong"),), 401, "token"),
        ("GET", "/info", None, (("Authorization", "Bearer \xff"),), 401, "token"),
        ("GET", "/info", None, (("Authorization", "secret"),), 401, "token"),
        ("POST", path_for(), BODY, (), 401, "token"),
        ("GET", "/nowhere", None, (), 401, "token"),
        ("GET", "/nowhere", None, (TOKEN,), 404, "Not Found"),
        ("GET", path_for(), None, (TOKEN,), 405, "Method Not Allowed"),
        ("POST", path_for(), b"", (TOKEN,), 400, "is no rollout"),
        ("POST", path_for(), BODY[:-1], (TOKEN,), 400, "is no rollout"),
        ("POST", path_for(), bytes(1 + (1 << 20)), (TOKEN,), 413, "Content Too Large"),
        ("POST", path_for(), bytes(8 << 20), (TOKEN,), 413, "Content Too Large"),
        ("POST", path_for(temperature=None), BODY, (TOKEN,), 400, "is no rollout: KeyError"),
        ("POST", path_for(temperature="hot"), BODY, (TOKEN,), 400, "is no rollout: ValueError"),
        ("POST", path_for(top_k="1.5"), BODY, (TOKEN,), 400, "is no rollout: ValueError"),
    ],
)
def test_refusals(server, method, path, body, headers, status, words):
    answered, message = request(server, method, path, body, headers)
    assert answered == status and words in message.decode() and b"Traceback" not in message and b"\n" not in message


def altered(**changes):
    """The tensors of a rollout, changed."""
    return lambda tensors: {**tensors, **{name: change(tensors[name]) for name, change in changes.items()}}


def put(index, value):
    def change(tensor):
        changed = tensor.clone()
        changed[index] = value
        return changed

    return change


def all_altered(change):
    return lambda tensors: {name: change(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {"labels": t["labels"]}, "is no rollout"),
        (lambda t: {**t, "more": t["labels"].clone()}, "is no rollout"),
        (altered(input_ids=lambda t: t.to(torch.float8_e4m3fn)), "is no rollout"),
        (altered(labels=lambda t: t[:, 1:].contiguous()), "is no rollout"),
        (altered(response_mask=lambda t: t[:, 1:].contiguous()), "does not fit"),
        (all_altered(lambda t: t[0]), "is no rollout"),
        (all_altered(lambda t: t[:0]), "is no rollout"),
        (all_altered(lambda t: t[:, :1].repeat(1, 257)), "8 x 257 tokens, does not fit the model: its context is 256 tokens"),
        (altered(input_ids=put((0, 0), VOCABULARY)), "vocabulary 304"),
        (altered(input_ids=put((7, -1), -1)), "vocabulary 304"),
        (altered(labels=put((0, 0), 2**62)), "vocabulary 304"),
        (altered(labels=put((0, 0), -(2**63))), "vocabulary 304"),
    ],
)
def test_rollouts_that_the_model_cannot_compute_are_refused(server, change, words):
    status, message = request(server, "POST", path_for(), safetensors.torch.save(change(vars(make_batch()))))
    assert status == 400 and words in message.decode()


raw_bytes = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda start, end, between: BODY[:start] + between + BODY[end:],
        st.integers(0, 400),
        st.integers(0, 400),
        st.binary(max_size=20),
    ),
)
lines = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n"), max_size=40).map(
    lambda text: text.encode("latin-1")
)
requests = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda first, headers, body: b"\r\n".join([first, *headers, b"", body]),
        st.one_of(
            lines, st.sampled_from([b"GET /info HTTP/1.1", f"POST {path_for()} HTTP/1.0".encode(), b"GET /\xff HTTP/0.9"])
        ),
        st.lists(st.one_of(lines, st.just(b"Authorization: Bearer secret"), st.just(b"Content-Length: 5")), max_size=4),
        raw_bytes,
    ),
)
fuzzed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@fuzzed
@given(raw_bytes)
def test_any_body_is_answered_and_the_server_goes_on(server, body):
    assert request(server, "POST", path_for(), body)[0] in (200, 400)
    assert request(server)[0] == 200


@fuzzed
@given(requests)
def test_any_bytes_are_answered_and_the_server_goes_on(server, sent):
    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            answer = file.read()
    assert not answer or answer.startswith(b"HTTP/1.1 ")
    assert b"Traceback" not in answer
    assert request(server)[0] == 200


# --- slow, many, too many -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def body_begun(server):
    """A client that has sent a part of its body."""
    with socket.create_connection(server.address, timeout=10) as connection:
        head = f"POST {path_for()} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(BODY)}\r\n\r\n"
        connection.sendall(head.encode() + BODY[:-1])
        yield connection


def test_a_body_that_ends_too_early_is_never_computed(model):
    calls = []
    with serving(computing(model, lambda *asked: calls.append(asked))) as server:
        with body_begun(server) as connection:
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as file:
                assert b" 200 " not in file.read()
        assert request(server)[0] == 200 and calls == []


def test_slow_and_silent_clients_delay_nobody_and_a_slow_body_is_refused_in_time(model, monkeypatch):
    monkeypatch.setattr(reference_model, "BODY_SECONDS", 1.0)
    with serving(model) as server, contextlib.ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(socket.create_connection(server.address, timeout=10))
        slow, start = stack.enter_context(body_begun(server)), time.monotonic()
        assert torch.equal(client(server).log_probs(*question()), model.log_probs(*question()))
        assert time.monotonic() - start < 1
        with slow.makefile("rb") as file:
            assert b" 503 " in file.readline()


def test_the_server_ends_while_clients_hold_connections(model):
    with contextlib.ExitStack() as stack:
        with serving(model) as server:
            stack.enter_context(socket.create_connection(server.address))
            stack.enter_context(body_begun(server))
            time.sleep(0.3)
            start = time.monotonic()
        assert time.monotonic() - start < 5


def test_rollouts_beyond_the_room_wait_at_the_client(model, capsys):
    with serving(model, max_pending=1) as server:
        with body_begun(server) as first, ThreadPoolExecutor(1) as thread:
            time.sleep(0.2)
            assert request(server, "POST", path_for(), BODY) == (503, b"too many rollouts wait: ask again later")
            with pytest.raises(RunStopped, match="has no room .too many rollouts wait.* for 0.3 s"):
                client(server, timeout=0.3).log_probs(*question())
            waiting = thread.submit(client(server).log_probs, *question(6))
            time.sleep(0.3)
            assert not waiting.done()
            first.sendall(BODY[-1:])
            assert torch.equal(waiting.result(10), model.log_probs(*question(6)))
    assert capsys.readouterr().err.count("asking it again for 30 s") == 1


def test_one_rollout_is_computed_at_a_time(model, wait_for):
    begun, go_on = [], threading.Event()

    def compute(batch, *settings):
        begun.append(len(batch.labels))
        assert go_on.wait(20)
        return model.log_probs(batch, *settings)

    with serving(computing(model, compute)) as server, ThreadPoolExecutor(2) as threads:
        batches = [make_batch(rows=rows) for rows in (1, 2)]
        answers = [threads.submit(client(server).log_probs, batch, Distribution(), 100) for batch in batches]
        wait_for(lambda: begun)
        time.sleep(0.5)
        assert len(begun) == 1
        go_on.set()
        for answer, batch in zip(answers, batches, strict=True):
            assert torch.equal(answer.result(20), model.log_probs(batch, Distribution(), 100))
    assert sorted(begun) == [1, 2]


def test_a_failed_computation_is_reported_and_the_next_one_works(model, capsys):
    fail = [True]

    def failing(*asked):
        if fail:
            raise RuntimeError("out of memory\nat some length")
        return model.log_probs(*asked)

    with serving(computing(model, failing)) as server:
        failed = "500, 'could not be computed: RuntimeError: out of memory at some length'; then go on"
        with pytest.raises(RunStopped, match=failed):
            client(server).log_probs(*question())
        assert "out of memory" in (said := capsys.readouterr().err) and said.count("\n") == 1
        fail.clear()
        assert torch.equal(client(server).log_probs(*question()), model.log_probs(*question()))


# --- the client when things go wrong ------------------------------------------------------------------------------


def test_a_run_waits_for_a_server_that_is_started_again(model, monkeypatch, capsys):
    """The first server ends while it computes, and is back a second later."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    begun, never = threading.Event(), threading.Event()

    def hangs(*asked):
        begun.set()
        never.wait(20)
        return torch.zeros(1)

    with ThreadPoolExecutor(1) as thread:
        with serving(computing(model, hangs)) as first:
            waiting = thread.submit((remote := client(first)).log_probs, *question(7))
            assert begun.wait(10)
        time.sleep(1)
        assert not waiting.done()
        with serving(model, port=first.address[1]):
            assert torch.equal(waiting.result(10), model.log_probs(*question(7)))
        never.set()
    assert capsys.readouterr().err.count("asking it again") == 1
    monkeypatch.setattr(reference_model, "LOST_SECONDS", 0.3)
    lost = "does not answer .Connection refused. for 0.3 s: start it again with the same --model"
    with pytest.raises(RunStopped, match=lost):
        remote.log_probs(*question(7))


def test_a_server_that_is_back_with_another_model_stops_the_run(model, tiny_folder):
    other = load_frozen(tiny_folder)
    with torch.no_grad():
        other.model.get_input_embeddings().weight[0, 0] += 1
    with serving(model) as first:
        remote = client(first)
    with serving(other, port=first.address[1]):
        with pytest.raises(RunStopped, match="has another model than when the run began"):
            remote.log_probs(*question())


def test_a_server_that_hangs_stops_the_run(model):
    never = threading.Event()
    with serving(computing(model, lambda *asked: never.wait(20))) as server:
        with pytest.raises(RunStopped, match="has not computed its log-probs for 0.5 seconds: see what it is doing"):
            client(server, timeout=0.5).log_probs(*question())
        assert request(server)[0] == 200
        never.set()


def test_rollouts_that_are_too_large_are_not_sent(model):
    with serving(model, max_upload_bytes=1000) as server, pytest.raises(RunStopped, match="raise its --max_upload_mib"):
        client(server).log_probs(*question())


@pytest.mark.parametrize(
    "url", ["https://a:1", "http://a", "a:1", "http://a:0", "http://a:70000", "http://a:1/x", "http://u@a:1", "\x1b"]
)
def test_malformed_addresses_are_refused(url):
    with pytest.raises(UserError, match="--reference_url .*: must be http://HOST:PORT") as refused:
        check_reference_url(url)
    assert str(refused.value).isprintable()


def test_mistakes_are_noticed_at_the_start(server, monkeypatch):
    monkeypatch.setattr(reference_model, "CONNECT_SECONDS", 0.3)
    with pytest.raises(UserError, match="--reference_url .*: refuses this token: set ALIGNMENT_REFERENCE_TOKEN"):
        RemoteReference(server.url, "", VOCABULARY, 1.0)
    with pytest.raises(UserError, match="tiny has a vocabulary of 304 tokens, the policy of 305"):
        client(server, vocabulary=305)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UserError, match="cannot be reached .timed out."):
            RemoteReference(silent, "", VOCABULARY, 1.0)
    with pytest.raises(UserError, match="cannot be reached .Connection refused.: start it with `uv run -m"):
        RemoteReference(silent, "", VOCABULARY, 1.0)
    for url in ("http://no.such.host.invalid:1", "http://a..b:1", f"http://{'a' * 70}:1"):
        with pytest.raises(UserError, match="--reference_url .*: cannot be reached"):
            RemoteReference(url, "", VOCABULARY, 1.0)


@contextlib.contextmanager
def answering(*answers: bytes):
    """A server that gives these answers, each on a connection of its own, the last one for good; an empty one hangs up."""
    left = list(answers)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def respond():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    answer = left.pop(0) if len(left) > 1 else left[0]
                    connection.recv(1 << 20)
                    connection.sendall(answer)

        thread = threading.Thread(target=respond, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def http_answer(body: bytes, status: int = 200, *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.0 {status} X", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


INFO = {
    "service": SERVICE,
    "model": "m",
    "vocabulary": VOCABULARY,
    "weights": "w",
    "max_upload_bytes": 1 << 20,
}
GOOD_INFO = http_answer(json.dumps(INFO).encode())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "cannot be reached .[a-zA-Z]+"),
        (b"", "cannot be reached .Server disconnected"),
        (http_answer(b"<html>"), "is no reference server of ours: give the address"),
        (http_answer(b"[" * 50000), "is no reference server"),
        (http_answer(b"[]"), "is no reference server"),
        (http_answer(b"{}"), "is no reference server"),
        (http_answer(json.dumps({**INFO, "service": "other"}).encode()), "is no reference server"),
        (http_answer(b"not found", 404), "is no reference server"),
        (http_answer(b"", 302, "Location: http://127.0.0.1:1/info"), "is no reference server"),
    ],
)
def test_an_address_without_a_reference_server_is_refused(answer, words):
    with answering(answer) as url, pytest.raises(UserError, match=f"--reference_url .*{words}") as refused:
        RemoteReference(url, "", VOCABULARY, 5.0)
    assert str(refused.value).isprintable()


def results(change=lambda t: t, name="log_probs", *headers: str) -> bytes:
    log_probs = change(torch.full(make_batch().labels.shape, -1.0))
    return http_answer(safetensors.torch.save({name: log_probs}), 200, *(headers or ("Reference-Weights: w",)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "does not answer .(Server disconnected|Connection reset)"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer .[a-zA-Z]+"),
        (http_answer(b"abc", 200, length=1 << 40), "does not answer .peer closed connection"),
        (http_answer(b"abc", 200, "Reference-Weights: w"), "what are no log-probs"),
        (results(name="other"), "what are no log-probs"),
        (results(lambda t: t[1:]), r"what are no log-probs \(\[7, "),
        (results(lambda t: t.double()), "torch.float64"),
        (results(lambda t: t / 0), "no logarithms"),
        (results(lambda t: t * torch.nan), "no logarithms"),
        (results(lambda t: t + 1.01), "no logarithms"),
        (results(lambda t: t, "log_probs", "Reference-Weights: other"), "has another model"),
        (http_answer(b"", 302, "Location: http://127.0.0.1:1/get"), "has another model than when the run began, or"),
        (http_answer(b"a\x1b[2J\nb", 400, "Reference-Weights: w"), r"refuses a rollout: 400, 'a\\x1b\[2J\\nb';"),
    ],
)
def test_malformed_answers_stop_the_run_with_one_line(answer, words, monkeypatch):
    monkeypatch.setattr(reference_model, "LOST_SECONDS", 0.2)
    with answering(GOOD_INFO, answer) as url:
        remote = RemoteReference(url, "", VOCABULARY, 5.0)
        with pytest.raises(RunStopped, match=words) as stopped:
            remote.log_probs(*question())
        assert str(stopped.value).isprintable() and url in str(stopped.value)


def test_a_connection_that_breaks_is_tried_again_and_other_places_are_zero():
    mask = make_batch().response_mask
    good = results(lambda t: torch.where(mask, t, torch.nan))
    with answering(GOOD_INFO, b"", good[:-1], good) as url:
        log_probs = RemoteReference(url, "", VOCABULARY, 5.0).log_probs(*question())
        assert torch.equal(log_probs, torch.where(mask, -1.0, 0.0))


# --- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0: other machines could use it there, so it needs a secret: set ALIGNMENT_REFER"),
        (["--host", "::"], "--host ::: other machines could use it"),
        (["--host", ""], "--host ''"),
        (["--host", "no.such.host.invalid"], "--host no.such.host.invalid: there is no such address"),
        (["--port", "70000"], "--port 70000: must be from 0 (any) to 65535"),
        (["--port", "{taken}"], "--port {taken}: Address already in use"),
        (["--max_pending", "0"], "--max_pending 0"),
        (["--max_upload_mib", "0"], "--max_upload_mib 0"),
        (["--device", "cuda:99"], "--device cuda:99: this machine has"),
        (["--device", "gpu"], "--device gpu: this machine has"),
        (["--model", "no/such/folder"], "--model no/such/folder: no model folder"),
    ],
)
def test_mistakes_on_the_command_line(flags, message, tiny_folder, monkeypatch, capsys):
    monkeypatch.delenv(REFERENCE_TOKEN, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        named = [flag.replace("{taken}", port) for flag in flags]
        monkeypatch.setattr(sys, "argv", ["reference_server", "--model", str(tiny_folder), "--port", "0", *named])
        with pytest.raises(SystemExit) as stop:
            run_command(main)
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.startswith("error: ") and said.count("\n") == 1
    assert message.replace("{taken}", port) in said


@pytest.mark.parametrize("flags", [["--help"], [], ["--port", "x"], ["--max_pending", "0"], ["--host", "no.such.host.invalid"]])
def test_flags_are_checked_before_torch_is_loaded(flags):
    code = (
        "import sys; from alignment import reference_server\n"
        "try: reference_server.run_command(reference_server.main)\n"
        "finally: assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    command = [sys.executable, "-c", code, "--model", "nowhere", *flags]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == (0 if flags == ["--help"] else 2) and "Traceback" not in done.stderr


def test_tokens_that_no_header_can_carry_are_refused(monkeypatch):
    for token in ("two words", "line\n", "größe"):
        monkeypatch.setenv(REFERENCE_TOKEN, token)
        with pytest.raises(UserError, match="ALIGNMENT_REFERENCE_TOKEN: must be printable ASCII without spaces$"):
            reference_token()


def test_with_a_token_the_server_may_listen_anywhere():
    with bind("0.0.0.0", 0, "secret") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_command_serves_until_sigterm(command, tiny_folder, model):
    line = command.stdout.readline()
    start, _, url = line.rstrip("\n").rpartition(": ")
    assert start == f"reference model {tiny_folder} on cpu" and url.startswith("http://127.0.0.1:")
    remote = RemoteReference(url, "secret", VOCABULARY, 60.0)
    assert remote.info["model"] == str(tiny_folder)
    assert torch.equal(remote.log_probs(*question(8)), model.log_probs(*question(8)))
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):  # a silent client delays nothing
        time.sleep(0.2)
        command.send_signal(signal.SIGTERM)
        rest, said = command.communicate(timeout=20)
    assert (command.returncode, rest) == (143, "")
    assert said.splitlines()[-1] == "interrupted by SIGTERM" and "Traceback" not in said  # after messages of libraries


# --- of a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def process(tiny_folder):
    with contextlib.closing(ReferenceProcess(str(tiny_folder), "cpu", torch.float32, False, 30.0)) as process:
        yield process
    assert not process._child.is_open and process._child.process.returncode is not None


def test_a_run_replaces_its_own_process_when_that_dies_or_hangs(process, model, capsys):
    assert torch.equal(process.log_probs(*question()), model.log_probs(*question()))
    process._child.kill()
    assert torch.equal(process.log_probs(*question(1)), model.log_probs(*question(1)))
    assert process.restarts == 1
    again = "the reference model is started again: the reference model's process was killed by SIGKILL"
    assert again in capsys.readouterr().err
    process._child.process.send_signal(signal.SIGSTOP)
    process.timeout = 5.0
    assert torch.equal(process.log_probs(*question(2)), model.log_probs(*question(2)))
    assert process.restarts == 2 and "gave no answer within 5 s (--sampler_timeout)" in capsys.readouterr().err


def test_a_rollout_that_no_process_can_compute_stops_the_run_with_its_reason(process):
    batch, *settings = question()
    unknown = dataclasses.replace(batch, input_ids=batch.input_ids + VOCABULARY)
    with pytest.raises(RunStopped, match="the reference model's process failed: IndexError: index out of range"):
        process.log_probs(unknown, *settings)
    assert process.restarts == 1


def test_a_process_that_is_closed_while_another_thread_waits_is_not_started_again(process):
    process._child.process.send_signal(signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(process.log_probs, *question())
        time.sleep(0.3)
        process.close()
        with pytest.raises(RunStopped):
            waiting.result(5)
    assert process.restarts == 0


def test_a_served_model_that_training_does_not_start_from_is_refused(server, tiny_folder, monkeypatch):
    args = from_preset(RLArgs, "tiny", beta=0.1, reference_url=server.url, dtype="float32")
    monkeypatch.setenv(REFERENCE_TOKEN, "secret")
    remote = checked_reference(args, str(tiny_folder), torch.float32)
    assert remote.log_probs(*question()).shape == make_batch().labels.shape
    with pytest.raises(UserError, match="has other weights, or another dtype than torch.bfloat16"):
        checked_reference(args, str(tiny_folder), torch.bfloat16)
