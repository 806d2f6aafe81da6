"""The served reference model: the same bits as a model in this process, whatever else is sent to the server."""

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
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.core.records import Batch, Distribution
from alignment.core.tokens import collate
from alignment.models import make_reference
from alignment.policy import reference_client, reference_service
from alignment.policy.frozen import FrozenModel, weights_digest
from alignment.policy.reference_client import ReferenceProcess, RemoteReference
from alignment.policy.reference_protocol import TOKEN_VARIABLE, ServedModel, reference_token
from alignment.policy.reference_service import ReferenceService, model_facts
from alignment.reference_server import bind, main
from alignment.system.errors import RunStopped, UserError, run_command

MICRO_BATCH_TOKENS = 100
VOCABULARY = 304
METADATA = {"temperature": "1.0", "top_p": "1.0", "top_k": "0", "micro_batch_tokens": "100"}


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
        env={**os.environ, TOKEN_VARIABLE: "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def make_batch(seed: int = 0, rows: int = 8) -> Batch:
    rng = random.Random(seed)
    prompts, responses = ([[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))] for _ in range(rows)] for _ in "pr")
    return collate(prompts, responses, pad_token_id=1)


def upload_of(batch: Batch, distribution=Distribution(), micro_batch_tokens=MICRO_BATCH_TOKENS) -> tuple:
    """The arguments, after the key, with which a client uploads a batch."""
    return batch, distribution, micro_batch_tokens


def tensors_of(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: getattr(batch, name) for name in ("input_ids", "labels", "response_mask")}


BODY = safetensors.torch.save(tensors_of(make_batch()), METADATA)


@contextlib.contextmanager
def serving(model, port=0, token="", max_pending=8, max_upload_bytes=1 << 20, computing=True, **other):
    """The service as the command runs it, but outside the main thread; it computes once `begin` is called."""
    served = ServedModel("tiny", "cpu", "float32", max_pending, max_upload_bytes)
    compute = other.pop("compute", model.log_probs)
    service = ReferenceService(compute, {**model_facts(served, model), **other}, token, max_pending)
    thread = threading.Thread(target=service.work)
    with bind("127.0.0.1", port, token) as listener, service.running(listener) as url:
        address = listener.getsockname()
        if computing:
            thread.start()
        yield SimpleNamespace(url=url, address=address, token=token, begin=thread.start)
        service.stop()
        if thread.ident:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(model):
    with serving(model, token="secret") as server:
        yield server


def request(server, method="GET", path="/info", body=None, headers=(("Authorization", "Bearer secret"),)) -> tuple[int, bytes]:
    """A request whose headers are just these and the host; with a body, its length as well."""
    with contextlib.closing(http.client.HTTPConnection(*server.address, timeout=30)) as connection:
        connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", "localhost")
        given = dict(headers)
        if body is not None:
            given.setdefault("Content-Length", str(len(body)))
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, response.read()


def refusal(answer: tuple[int, bytes]) -> tuple[int, str]:
    status, body = answer
    error = json.loads(body)
    assert error.keys() == {"error"} and "\n" not in error["error"] and "Traceback" not in error["error"]
    return status, error["error"]


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
    upload = upload_of(make_batch(1), distribution, micro_batch_tokens)
    expected = model.log_probs(*upload)
    assert expected[upload[0].response_mask].lt(0).all()
    remote = client(server)
    remote.upload("step_1", *upload)
    assert torch.equal(remote.log_probs("step_1", *upload), expected)
    never_uploaded = upload_of(make_batch(2), distribution, micro_batch_tokens)
    assert torch.equal(remote.log_probs("step_2", *never_uploaded), model.log_probs(*never_uploaded))


def test_batches_and_settings_of_one_name_are_never_mixed_up(server, model):
    remote, plain, hotter = client(server), Distribution(), Distribution(temperature=2.0)
    for seed, distribution in ((3, plain), (4, plain), (3, hotter), (3, plain)):
        upload = upload_of(make_batch(seed), distribution)
        assert torch.equal(remote.log_probs("the_same", *upload), model.log_probs(*upload))


def test_info(server, model):
    status, body = request(server)
    assert status == 200
    assert json.loads(body) == {
        "service": "alignment.reference_server",
        "model": "tiny",
        "vocabulary": VOCABULARY,
        "context": 256,
        "dtype": "float32",
        "device": "cpu",
        "weights": model.weights_digest(),
        "max_upload_bytes": 1 << 20,
    }


def test_the_digest_differs_with_weights_and_dtypes(model, tiny_folder):
    digest, other = weights_digest, load_frozen(tiny_folder)
    assert other.weights_digest() == model.weights_digest() != digest(model.model, torch.bfloat16)
    assert digest(model.model, torch.bfloat16) == load_frozen(tiny_folder, torch.bfloat16).weights_digest()
    with torch.no_grad():
        other.model.get_input_embeddings().weight[0, 0] += 1
    assert other.weights_digest() != model.weights_digest()


def test_an_answer_can_be_read_again_until_newer_ones_replace_it(model):
    with serving(model) as server:
        for number in range(reference_service.READ_RESULTS + 2):
            assert request(server, "POST", f"/upload?key=k{number}", BODY)[0] == 202
            first, again = (request(server, path=f"/get?key=k{number}") for _ in range(2))
            assert first == again and first[0] == 200
        kept = [request(server, path=f"/get?key=k{number}")[0] for number in range(reference_service.READ_RESULTS + 2)]
        assert kept == [404, 404, *[200] * reference_service.READ_RESULTS]


# --- refusals ----------------------------------------------------------------------------------------------

TOKEN = ("Authorization", "Bearer secret")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status", "words"),
    [
        ("GET", "/info", None, (), 401, "ALIGNMENT_REFERENCE_TOKEN"),
        ("GET", "/info", None, (("Authorization", "Bearer wrong"),), 401, "token"),
        ("GET", "/info", None, (("Authorization", "Bearer \xff"),), 401, "token"),
        ("GET", "/info", None, (("Authorization", "secret"),), 401, "token"),
        ("POST", "/upload?key=a", BODY, (), 401, "token"),
        ("GET", "/nowhere", None, (), 401, "token"),
        ("GET", "/nowhere", None, (TOKEN,), 404, "nothing but /upload, /get, /info"),
        ("GET", "/", None, (TOKEN,), 404, "nothing but"),
        ("GET", "//[", None, (TOKEN,), 404, "nothing but"),
        ("GET", "http://[/info", None, (TOKEN,), 404, "nothing but"),
        ("GET", "/upload?key=a", None, (TOKEN,), 405, "takes POST"),
        ("POST", "/get?key=a", b"", (TOKEN,), 405, "takes GET"),
        ("POST", "/info", b"", (TOKEN,), 405, "takes GET"),
        ("DELETE", "/info", None, (TOKEN,), 405, "no request"),
        ("GET", "/get?key=unheard", None, (TOKEN,), 404, "no such key"),
        ("GET", "/get", None, (TOKEN,), 400, "key"),
        ("GET", "/get?key=", None, (TOKEN,), 400, "key"),
        ("GET", "/get?key=a/b", None, (TOKEN,), 400, "key"),
        ("GET", "/get?key=a%0A", None, (TOKEN,), 400, "key"),
        ("GET", "/get?key=a&key=b", None, (TOKEN,), 400, "key"),
        ("GET", f"/get?key={'a' * 201}", None, (TOKEN,), 400, "key"),
        ("POST", "/upload?key=a/b", BODY, (TOKEN,), 400, "key"),
        ("POST", "/upload?key=a", None, (TOKEN,), 411, "Content-Length"),
        ("POST", "/upload?key=a", BODY, (TOKEN, ("Transfer-Encoding", "chunked")), 411, "no Transfer-Encoding"),
        ("POST", "/upload?key=a", b"", (TOKEN, ("Content-Length", "-1")), 400, "no number"),
        ("POST", "/upload?key=a", b"", (TOKEN, ("Content-Length", "\xb2")), 400, "no number"),
        ("POST", "/upload?key=a", b"", (TOKEN, ("Content-Length", "9" * 18)), 413, "1048576 bytes"),
        ("POST", "/upload?key=a", bytes(1 + (1 << 20)), (TOKEN,), 413, "1048576 bytes"),
        ("POST", "/upload?key=a", bytes(8 << 20), (TOKEN,), 413, "1048576 bytes"),
        ("POST", "/upload?key=a", b"", (TOKEN,), 400, "no safetensors"),
    ],
)
def test_refusals(server, method, path, body, headers, status, words):
    answered, message = refusal(request(server, method, path, body, headers))
    assert answered == status and words in message


def test_a_body_that_ends_too_early_is_never_computed(server):
    with socket.create_connection(server.address, timeout=20) as connection:
        head = f"POST /upload?key=short HTTP/1.0\r\nAuthorization: Bearer secret\r\nContent-Length: {len(BODY)}\r\n\r\n"
        connection.sendall(head.encode() + BODY[:-1])
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            assert b" 202 " not in file.read()
    assert request(server, path="/get?key=short")[0] == 404


@pytest.mark.parametrize("head", [b"GET /", b"GET /info HTTP/1.1\r\nX: ", b"GET /info HTTP/1.1\r\n"])
def test_a_head_without_end_is_refused(server, head):
    with socket.create_connection(server.address, timeout=20) as connection:
        with pytest.raises(ConnectionError):
            connection.sendall(head)
            for _ in range(1 << 10):
                connection.sendall(b"a: a\r\n" * 1000 if head.endswith(b"\n") else b"a" * 6000)
                time.sleep(0.001)
    assert request(server)[0] == 200


def altered(**changes):
    """The tensors of an upload, changed."""
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
    ("change", "metadata", "words"),
    [
        (lambda t: {"labels": t["labels"]}, {}, "the tensors must be input_ids"),
        (lambda t: {**t, "more": t["labels"].clone()}, {}, "the tensors must be input_ids"),
        (altered(labels=lambda t: t.int()), {}, "int64"),
        (altered(response_mask=lambda t: t.to(torch.uint8)), {}, "bool"),
        (altered(input_ids=lambda t: t.to(torch.float8_e4m3fn)), {}, "int64"),
        (altered(labels=lambda t: t[:, 1:].contiguous()), {}, "one shape"),
        (all_altered(lambda t: t[0]), {}, "[B, T]"),
        (all_altered(lambda t: t[:0]), {}, "[B, T]"),
        (all_altered(lambda t: t[:, :0].contiguous()), {}, "[B, T]"),
        (all_altered(lambda t: t[:, :1].repeat(1, 257)), {}, "257 tokens do not fit in the model's context of 256"),
        (altered(input_ids=put((0, 0), VOCABULARY)), {}, "input_ids outside the vocabulary of 304"),
        (altered(input_ids=put((7, -1), -1)), {}, "input_ids outside"),
        (altered(labels=put((0, 0), 2**62)), {}, "labels outside"),
        (altered(labels=put((0, 0), -(2**63))), {}, "labels outside"),
        (altered(response_mask=put(3, False)), {}, "a row has no response"),
        (dict, {"temperature": None}, "temperature"),
        (dict, {"temperature": "hot"}, "temperature"),
        (dict, {"temperature": "0"}, "temperature"),
        (dict, {"temperature": "nan"}, "temperature"),
        (dict, {"temperature": "inf"}, "temperature"),
        (dict, {"top_p": "0"}, "top_p"),
        (dict, {"top_p": "1.0001"}, "top_p"),
        (dict, {"top_k": "-1"}, "top_k"),
        (dict, {"top_k": "1.5"}, "top_k"),
        (dict, {"micro_batch_tokens": "0"}, "micro_batch_tokens"),
        (dict, {"micro_batch_tokens": "9" * 5000}, "micro_batch_tokens"),
    ],
)
def test_uploads_that_cannot_be_computed_are_refused(server, change, metadata, words):
    merged = {name: value for name, value in {**METADATA, **metadata}.items() if value is not None}
    body = safetensors.torch.save(change(tensors_of(make_batch())), merged)
    status, message = refusal(request(server, "POST", "/upload?key=bad", body))
    assert status == 400 and words in message
    assert request(server, path="/get?key=bad")[0] == 404


def test_bytes_that_are_no_booleans_are_refused(server):
    place = BODY.rfind(b"\1")  # in the mask, which a file holds last
    assert safetensors.torch.load(BODY)["response_mask"].flatten()[place - len(BODY)]
    status, message = refusal(request(server, "POST", "/upload?key=bad", BODY[:place] + b"\2" + BODY[place + 1 :]))
    assert status == 400 and "neither 0 nor 1" in message


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
            lines, st.sampled_from([b"GET /info HTTP/1.1", b"POST /upload?key=a HTTP/1.0", b"GET /get?key=\xff HTTP/0.9"])
        ),
        st.lists(st.one_of(lines, st.just(b"Authorization: Bearer secret"), st.just(b"Content-Length: 5")), max_size=4),
        raw_bytes,
    ),
)
fuzzed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@fuzzed
@given(raw_bytes)
def test_any_body_is_answered_and_the_server_goes_on(server, body):
    status, answer = request(server, "POST", "/upload?key=fuzz", body)
    assert status in (202, 400) and json.loads(answer).keys() <= {"error"}
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
    assert b"Traceback" not in answer and not answer.startswith(b"HTTP/1.1 5") or b" 505 " in answer[:20]
    assert request(server)[0] == 200


# --- slow, many, too many -----------------------------------------------------------------------------------------


def test_connections_of_silent_and_slow_clients_are_closed(model, monkeypatch):
    monkeypatch.setattr(reference_service, "HEAD_SECONDS", 0.5)
    monkeypatch.setattr(reference_service, "BODY_SECONDS", 0.5)
    monkeypatch.setattr(reference_service, "BODIES", 4)
    begun = b"POST /upload?key=a HTTP/1.0\r\nContent-Length: 1000\r\n\r\nabc"
    with serving(model) as server, contextlib.ExitStack() as stack:
        many = [stack.enter_context(socket.create_connection(server.address, timeout=10)) for _ in range(15)]
        over = threading.Event()

        def dribble():
            """Send a byte now and then, as an attacker would; some connections begin with a body."""
            for connection in many[5:]:
                connection.sendall(begun)
            while not over.wait(0.05):
                for connection in many[1:]:
                    with contextlib.suppress(OSError):
                        connection.sendall(b"G")

        thread = threading.Thread(target=dribble)
        thread.start()
        try:
            start = time.monotonic()
            assert request(server)[0] == 200
            assert request(server, "POST", "/upload?key=b", BODY)[0] == 202  # after ten others, four at a time
            assert time.monotonic() - start < 10
            assert many[0].recv(1) == b""
            for connection in many[1:]:
                with contextlib.suppress(ConnectionResetError), connection.makefile("rb") as file:
                    answer = file.read()
                    assert not answer or b" 408 " in answer[:20]
        finally:
            over.set()
            thread.join()


def test_only_some_bodies_are_read_at_a_time(model, monkeypatch):
    monkeypatch.setattr(reference_service, "BODY_SECONDS", 1.0)
    monkeypatch.setattr(reference_service, "BODIES", 1)
    with serving(model) as server, socket.create_connection(server.address, timeout=10) as slow:
        slow.sendall(b"POST /upload?key=a HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\nabc")
        time.sleep(0.1)
        start = time.monotonic()
        assert request(server)[0] == 200
        assert time.monotonic() - start < 0.5  # other requests do not wait
        assert request(server, "POST", "/upload?key=b", BODY)[0] == 202
        assert time.monotonic() - start > 0.5
        with slow.makefile("rb") as file:
            assert b" 408 " in file.readline()


def test_the_server_closes_while_clients_hold_every_connection(model, monkeypatch):
    monkeypatch.setattr(reference_service, "BODIES", 2)
    with contextlib.ExitStack() as stack:
        with serving(model) as server:
            for number in range(4):
                connection = stack.enter_context(socket.create_connection(server.address))
                if number % 2:
                    connection.sendall(b"POST /upload?key=a HTTP/1.0\r\nContent-Length: 1000\r\n\r\nabc")
            time.sleep(0.3)
            start = time.monotonic()
        assert time.monotonic() - start < 5


def test_back_pressure(model):
    with serving(model, max_pending=2, computing=False) as server:
        uploaded = [request(server, "POST", f"/upload?key={key}", BODY)[0] for key in ("a", "b", "c", "a")]
        assert uploaded == [202, 202, 503, 202]
        remote, batch = client(server, timeout=0.3), make_batch(5)
        with pytest.raises(RunStopped, match="has had no room for another rollout for 0.3 seconds"):
            remote.upload("step_1", *upload_of(batch))
        server.begin()
        assert request(server, path="/get?key=b")[0] == 200
        # One result is unread and one place is left; the upload takes it until it is read.
        remote.upload("step_1", *upload_of(batch))
        assert request(server, "POST", "/upload?key=d", BODY)[0] == 503
        patient, made = client(server), []
        waiting = threading.Thread(target=lambda: made.append(patient.log_probs("step_2", *upload_of(make_batch(6)))))
        waiting.start()
        time.sleep(0.2)
        assert not made
        log_probs = remote.log_probs("step_1", *upload_of(batch))
        assert torch.equal(log_probs, model.log_probs(*upload_of(batch)))
        waiting.join(10)
        assert len(made) == 1


def test_results_that_nobody_reads_are_dropped_in_time(model, monkeypatch, wait_for):
    computed = threading.Event()

    def compute(batch, *settings):
        computed.set()
        return torch.zeros(batch.labels.shape)

    with serving(model, max_pending=1, compute=compute) as server:
        assert request(server, "POST", "/upload?key=left", BODY)[0] == 202
        assert computed.wait(30)
        assert request(server, "POST", "/upload?key=next", BODY)[0] == 503
        monkeypatch.setattr(reference_service, "ABANDONED_SECONDS", 0.0)
        wait_for(lambda: request(server, "POST", "/upload?key=next", BODY)[0] == 202)
        assert request(server, path="/get?key=left")[0] == 404
        assert request(server, path="/get?key=next")[0] == 200


def test_an_unfinished_result_is_waited_for(model, monkeypatch):
    monkeypatch.setattr(reference_service, "POLL_SECONDS", 0.2)
    with serving(model, computing=False) as server:
        request(server, "POST", "/upload?key=a", BODY)
        start = time.monotonic()
        assert request(server, path="/get?key=a")[0] == 202
        assert time.monotonic() - start > 0.2
        with pytest.raises(RunStopped, match="has not computed its log-probs for 0.5 seconds"):
            client(server, timeout=0.5).log_probs("step_1", *upload_of(make_batch()))


def test_a_failed_computation_is_reported_and_can_be_tried_again(model, monkeypatch, capsys):
    fail = [True]

    def failing(batch, *settings):
        if fail:
            raise RuntimeError("out of memory\nat some length")
        return torch.zeros(batch.labels.shape)

    with serving(model, compute=failing) as server:
        with pytest.raises(RunStopped, match="500, could not be computed: RuntimeError: out of memory; then go on"):
            client(server).log_probs("step_1", *upload_of(make_batch()))
        assert "step_1" in (said := capsys.readouterr().err) and said.count("\n") == 1
        fail.clear()
        client(server).upload("step_1", *upload_of(make_batch()))
        assert client(server).log_probs("step_1", *upload_of(make_batch())) is not None


# --- the client when things go wrong ------------------------------------------------------------------------------


def test_a_restarted_server_gets_the_rollout_again(model, monkeypatch):
    monkeypatch.setattr(reference_client, "PAUSES", (0.1, 0.2))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    batch = make_batch(7)
    with serving(model, computing=False) as first:
        remote = client(first)
        remote.upload("step_1", *upload_of(batch))
    with pytest.raises(RunStopped, match="does not answer .*: start it again with the same --model; then go on with --resume"):
        remote.log_probs("step_1", *upload_of(batch))
    with serving(model, port=first.address[1]) as second:
        assert second.url == first.url
        log_probs = remote.log_probs("step_1", *upload_of(batch))
        assert torch.equal(log_probs, model.log_probs(*upload_of(batch)))
    with serving(model, port=first.address[1], weights="another"):
        with pytest.raises(RunStopped, match="has another model than when the run began"):
            remote.log_probs("step_1", *upload_of(batch))


def test_rollouts_that_are_too_large_are_not_sent(model):
    with serving(model, max_upload_bytes=1000) as server, pytest.raises(RunStopped, match="raise its --max_upload_mib"):
        client(server).upload("step_1", *upload_of(make_batch()))


@pytest.mark.parametrize(
    "url", ["https://a:1", "http://a", "a:1", "http://a:0", "http://a:70000", "http://a:1/x", "http://u@a:1", "\x1b"]
)
def test_malformed_addresses_are_refused(url):
    with pytest.raises(UserError, match="--reference_url .*: must be http://HOST:PORT"):
        RemoteReference(url, "", VOCABULARY, 1.0)


def test_mistakes_are_noticed_at_the_start(server, monkeypatch):
    monkeypatch.setattr(reference_client, "START_SECONDS", 0.3)
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
    "service": "alignment.reference_server",
    "model": "m",
    "vocabulary": VOCABULARY,
    "weights": "w",
    "max_upload_bytes": 1 << 20,
}
GOOD_INFO = http_answer(json.dumps(INFO).encode())


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"",
        http_answer(b"<html>"),
        http_answer(b"[" * 50000),
        http_answer(b"[]"),
        http_answer(b"{}"),
        http_answer(json.dumps({**INFO, "vocabulary": "304"}).encode()),
        http_answer(json.dumps({**INFO, "service": "other"}).encode()),
        http_answer(json.dumps(INFO).encode(), 404),
        http_answer(b"", 302, "Location: http://127.0.0.1:1/info"),
        http_answer(b"{" + b" " * (1 << 17)),
    ],
)
def test_an_address_without_a_reference_server_is_refused(answer):
    with answering(answer) as url, pytest.raises(UserError, match="--reference_url .*is no reference server: give the address"):
        RemoteReference(url, "", VOCABULARY, 5.0)


def results(change=lambda t: t, name="log_probs", *headers: str) -> bytes:
    log_probs = change(torch.full(make_batch().labels.shape, -1.0))
    return http_answer(safetensors.torch.save({name: log_probs}), 200, *(headers or ("Reference-Weights: w",)))


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "does not answer"),
        (http_answer(b"abc", 200, length=1 << 40), "does not answer .peer closed connection"),
        (http_answer(bytes(1 << 20), 200, "Reference-Weights: w"), "does not answer .its answer has no end"),
        (http_answer(b"abc", 200, "Reference-Weights: w"), "what are no log-probs"),
        (results(name="other"), "what are no log-probs"),
        (results(lambda t: t[1:]), r"answers log-probs \[7, "),
        (results(lambda t: t.double()), "torch.float64"),
        (results(lambda t: t / 0), "no logarithms"),
        (results(lambda t: t * torch.nan), "no logarithms"),
        (results(lambda t: t + 1.01), "no logarithms"),
        (results(lambda t: t, "log_probs", "Reference-Weights: other"), "has another model"),
        (http_answer(b"", 302, "Location: http://127.0.0.1:1/get"), "refuses a rollout: 302"),
        (http_answer(b'{"error": "a\\u001b[2J\\nb"}', 400), r"400, a\\x1b\[2J b;"),
    ],
)
def test_malformed_answers_stop_the_run_with_one_line(answer, words, monkeypatch):
    monkeypatch.setattr(reference_client, "PAUSES", (0.0, 0.0))
    with answering(GOOD_INFO, answer) as url:
        remote = RemoteReference(url, "", VOCABULARY, 5.0)
        with pytest.raises(RunStopped, match=words) as stopped:
            remote.log_probs("step_1", *upload_of(make_batch()))
        assert "\n" not in str(stopped.value) and url in str(stopped.value)


def test_a_connection_that_breaks_is_tried_again_and_other_places_are_zero(monkeypatch):
    monkeypatch.setattr(reference_client, "PAUSES", (0.0, 0.0))
    mask = make_batch().response_mask
    good = results(lambda t: torch.where(mask, t, torch.nan))
    with answering(GOOD_INFO, b"", good[:-1], good) as url:
        log_probs = RemoteReference(url, "", VOCABULARY, 5.0).log_probs("step_1", *upload_of(make_batch()))
        assert torch.equal(log_probs, torch.where(mask, -1.0, 0.0))


def test_a_server_that_keeps_losing_a_rollout_gets_it_three_times(server, monkeypatch):
    remote, sent = client(server), []

    def lost(method, path, *body, **limits):
        sent.append(method)
        return 404 if method == "GET" else 202, b'{"error": "gone"}'

    monkeypatch.setattr(remote, "_request", lost)
    with pytest.raises(RunStopped, match="refuses a rollout: 404, gone"):
        remote.log_probs("step_1", *upload_of(make_batch()))
    assert sent == ["GET", "POST"] * 3 + ["GET"]


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
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
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
        monkeypatch.setenv(TOKEN_VARIABLE, token)
        with pytest.raises(UserError, match="ALIGNMENT_REFERENCE_TOKEN: must be printable ASCII without spaces$"):
            reference_token()


def test_with_a_token_the_server_may_listen_anywhere():
    with bind("0.0.0.0", 0, "secret") as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_the_command_serves_until_sigterm(command, tiny_folder, model):
    line = command.stdout.readline()
    start, _, url = line.rstrip("\n").rpartition(": ")
    assert start == f"reference model {tiny_folder} on cpu" and url.startswith("http://127.0.0.1:")
    remote, batch = RemoteReference(url, "secret", VOCABULARY, 60.0), make_batch(8)
    assert remote.info["model"] == str(tiny_folder)
    log_probs = remote.log_probs("step_1", *upload_of(batch))
    assert torch.equal(log_probs, model.log_probs(*upload_of(batch)))
    with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))):  # a silent client delays nothing
        time.sleep(0.2)
        command.send_signal(signal.SIGTERM)
        rest, said = command.communicate(timeout=20)
    assert (command.returncode, rest) == (143, "")
    assert said.splitlines()[-1] == "interrupted by SIGTERM" and "Traceback" not in said  # after messages of libraries


# --- of a run ---------------------------------------------------------------------------------------------------------


def test_a_run_replaces_its_own_server_when_that_dies(tiny_folder, model, capsys):
    batch, other = make_batch(), make_batch(seed=1)
    own = ReferenceProcess(ServedModel(str(tiny_folder), "cpu", "float32", max_pending=4), VOCABULARY, 600.0)
    try:
        url = own.url
        own._child.kill()
        log_probs = own.log_probs("step-1", *upload_of(batch))
        assert torch.equal(log_probs, model.log_probs(*upload_of(batch)))
        assert (own.restarts, own.url) == (1, url) and "the reference model is started again" in capsys.readouterr().err
        assert own.log_probs("step-2", *upload_of(other)) is not None and own.restarts == 1
    finally:
        own.close()
    assert not own._child.is_open and own._child.process.returncode is not None


def test_a_served_model_that_training_does_not_start_from_is_refused(server, tiny_folder, monkeypatch):
    args = from_preset(RLArgs, "tiny", beta=0.1, reference_url=server.url, dtype="float32")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    remote, batch = make_reference(args, None, str(tiny_folder)), make_batch()
    assert remote.log_probs("step-1", *upload_of(batch)).shape == batch.labels.shape
    with pytest.raises(UserError, match="has other weights, or another dtype than torch.bfloat16"):
        make_reference(dataclasses.replace(args, dtype="bfloat16"), None, str(tiny_folder))
