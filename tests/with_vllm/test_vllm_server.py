"""The sampler of a vLLM server against vLLM within a process and a plain forward pass, with a real
server on this machine."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoConfig

from alignment.core.records import SamplingConfig
from alignment.sampling.pool import SamplerPool
from alignment.sampling.sampler import SamplerConfig, SamplerLost
from alignment.sampling.vllm_server import VLLMServerSampler
from alignment.system.errors import RunStopped, UserError
from tests.with_vllm.conftest import CONTEXT, ROOT, VOCABULARY, happens_within, tiny_llama
from tests.with_vllm.test_vllm_sampler import (
    LONG_PROMPT,
    OPEN_END,
    PROMPTS,
    expected_log_probs,
    flat,
)

# a test that comes after the one that kills the server starts it again, for its whole file
pytestmark = pytest.mark.replaces_processes
KEY = "the key"
# three processes, each of which takes ten seconds or more of a core to import what it needs
READY_SECONDS = 400


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> dict[str, str]:
    """Settings by which processes share what they compile, where Python is told to keep none of it:
    half of their start."""
    return {
        "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("compiled")),
        "PYTHONDONTWRITEBYTECODE": "",
    }


class Server:
    """A vLLM server with a model of its own weights, which starts again after a test has killed
    it."""

    def __init__(self, folder: Path, settings: dict[str, str]):
        self.folder = folder
        self.settings = settings
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = self.start()

    def start(self) -> psutil.Popen:
        options = f"""
            --model {self.folder} --dtype float32 --max-model-len {CONTEXT}
            --logprobs-mode processed_logprobs --host 127.0.0.1 --port {self.port}
            --worker-extension-cls alignment.sampling.vllm_server.SamplerWorker
            --middleware alignment.sampling.vllm_server.Guard
            --no-enable-chunked-prefill --max-num-batched-tokens {CONTEXT} --enforce-eager"""
        with (self.folder / "log").open("ab") as log:
            return psutil.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *options.split()],
                env={**os.environ, **self.settings},
                cwd=ROOT,  # where -m finds this package
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def answers(self) -> bool:
        return status(self.port, "GET", "/health", KEY) == 200

    def wait(self) -> None:
        """Until it answers. Where it has ended, it is started again."""
        if not self.process.is_running():
            self.process = self.start()
        assert happens_within(
            READY_SECONDS, lambda: self.process.poll() is not None or self.answers()
        )
        assert self.process.is_running()

    def processes(self) -> list[psutil.Process]:
        """Its own at last."""
        if not self.process.is_running():
            return []
        return [*self.process.children(recursive=True), self.process]

    def kill(self) -> None:
        left = self.processes()
        for each in left:
            each.kill()
        psutil.wait_procs(left, 10)


@pytest.fixture(scope="module")
def starting(tmp_path_factory, tokenizer, compiled):
    """A server that is on its way."""
    folder = tmp_path_factory.mktemp("server")
    tiny_llama(seed=9).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_WAIT_POLICY": "PASSIVE"}
    settings |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": KEY, "VLLM_NO_USAGE_STATS": "1"}
    server = Server(folder, settings | compiled)
    yield server
    server.kill()
    # which pytest shows where a test failed
    print((folder / "log").read_text(errors="replace")[-5000:])


@pytest.fixture
def server(starting, restarting) -> Server:
    """The server once it answers; the engine of this process starts meanwhile."""
    starting.wait()
    return starting


@pytest.fixture
def connect(server, model_path, tokenizer, tmp_path, monkeypatch):
    def connecting(
        model_path: str = model_path, context: int = CONTEXT, token: str = KEY, **options
    ) -> VLLMServerSampler:
        url, folder = f"http://127.0.0.1:{server.port}", str(tmp_path / "weights")
        options = {"timeout": 120.0, "url": url, "weights_folder": folder} | options
        monkeypatch.setenv("ALIGNMENT_SAMPLER_TOKEN", token or "")
        return VLLMServerSampler(
            SamplerConfig(model_path, "cpu", "float32", **options), tokenizer, context=context
        )

    return connecting


def status(port: int, method: str, path: str, key: str) -> int | None:
    """The status that the server answers with; None where it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


HOW = {
    "another temperature, nucleus and tokens": SamplingConfig(
        n=4, temperature=0.7, top_p=0.9, top_k=20, max_new_tokens=24, stop=()
    ),
    "greedy": SamplingConfig(n=2, temperature=0.0, max_new_tokens=24, stop=()),
    "to a stop string or EOS": SamplingConfig(
        n=8, max_new_tokens=48, stop=(" ba", " fe ", "</answer>"), seed=2
    ),
}


@pytest.mark.parametrize("sampling", HOW.values(), ids=HOW)
def test_completions_are_those_of_vllm_within_a_process(sampling, connect, sampler):
    prompts = [*PROMPTS, LONG_PROMPT]
    ours, theirs = connect().sample(prompts, sampling), sampler.sample(prompts, sampling)
    assert [len(group) for group in ours] == [sampling.n] * 4
    for own, other in zip(flat(ours), flat(theirs), strict=True):
        assert (own.prompt_ids, own.token_ids, own.text) == (
            other.prompt_ids,
            other.token_ids,
            other.text,
        )
        assert (
            own.finish_reason == other.finish_reason and own.policy_version == other.policy_version
        )
        torch.testing.assert_close(own.log_probs, other.log_probs, rtol=0, atol=1e-4)
    if sampling.stop:
        assert {completion.finish_reason for completion in flat(ours)} == {"stop", "length"}


def test_new_weights_replace_the_old_ones_and_their_cached_prefixes(connect, policy, tmp_path):
    server, prompts = connect(), [LONG_PROMPT, PROMPTS[0]]
    for seed, model in [(0, policy), (1, tiny_llama(seed=1)), (2, tiny_llama(seed=2))]:
        server.load_weights(model.named_parameters(), version=seed)
        assert list((tmp_path / "weights").iterdir()) == []
        # the second finds cached prefixes
        first, again = (flat(server.sample(prompts, OPEN_END)) for _ in range(2))
        assert [completion.token_ids for completion in first] == [
            completion.token_ids for completion in again
        ]
        for completion in (*first, *again):
            assert completion.policy_version == seed
            assert (
                torch.tensor(completion.log_probs) - expected_log_probs(model, completion)
            ).abs().max() < 1e-3


def test_weights_that_another_command_has_replaced_are_brought_again(connect):
    others = tiny_llama(seed=1)
    ours = SamplerPool({"engine": connect}, torch.float32, len(VOCABULARY), others.named_parameters)
    ours.load_weights(others.named_parameters(), 4)
    expected = ours.sample(PROMPTS, OPEN_END)
    direct = ours._engines["engine"]
    connect()
    with pytest.raises(SamplerLost, match="lost our weights"):
        direct.sample(PROMPTS, OPEN_END)
    assert ours.sample(PROMPTS, OPEN_END) == expected and ours.restarts == 1


def test_without_the_key_nothing_is_answered(connect, server):
    for token in (None, "another"):
        with pytest.raises(UserError, match="--sampler_url: .*401. Set ALIGNMENT_SAMPLER_TOKEN"):
            connect(token=token)
    for method, path in [
        ("POST", "/collective_rpc"),
        ("POST", "/reset_prefix_cache"),
        ("GET", "/server_info"),
    ]:
        assert status(server.port, method, path, "another") == 401


def test_a_server_that_does_not_fit_says_how_to_start_it(
    connect, model_path, tmp_path, monkeypatch
):
    with pytest.raises(
        UserError,
        match=f"a context of {CONTEXT} tokens and not 9999. Start it as: .* --max-model-len 9999 ",
    ):
        connect(context=9999)
    config = AutoConfig.from_pretrained(model_path)
    config.hidden_size, config.tie_word_embeddings = 128, False
    config.save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=(
            "another model, with hidden_size 64 and not 128, tie_word_embeddings True and not False"
        ),
    ):
        connect(str(tmp_path))
    call = VLLMServerSampler._call  # as where the server has no such method
    monkeypatch.setattr(
        VLLMServerSampler, "_call", lambda self, method, *rest: call(self, "no_such_method", *rest)
    )
    with pytest.raises(
        UserError,
        match="no attribute 'no_such_method'.* must be started as: .*--worker-extension-cls",
    ):
        connect()


def test_a_folder_that_the_server_does_not_see(connect, monkeypatch):
    monkeypatch.setattr("alignment.sampling.vllm_server._write_files", lambda *arguments: None)
    with pytest.raises(UserError, match="is not to be seen on .*It has to see .*weights, where"):
        connect()


def test_a_server_that_hangs_is_given_up_in_time_and_serves_again_after(connect, server):
    sampler = connect()
    expected = sampler.sample(PROMPTS, OPEN_END)
    sampler._timeout = 2.0
    everyone = server.processes()
    for each in everyone:
        each.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(SamplerLost, match="gave no answer within 2.0 s"):
            sampler.sample(PROMPTS, OPEN_END)
    finally:
        for each in everyone:
            each.send_signal(signal.SIGCONT)
    sampler._timeout = 120.0
    assert sampler.sample(PROMPTS, OPEN_END) == expected


def test_what_is_interrupted_is_dropped_by_the_server(connect):
    sampler = connect()
    expected = sampler.sample(PROMPTS, OPEN_END)
    sampler._timeout = 1.0
    with pytest.raises(SamplerLost, match="gave no answer within"):
        sampler.sample(PROMPTS * 20, SamplingConfig(n=32, max_new_tokens=480, stop=()))
    sampler._timeout = 120.0
    assert sampler.sample(PROMPTS, OPEN_END) == expected


def test_a_server_that_is_killed_loses_the_sampler(connect, server):
    sampler = SamplerPool({"engine": connect}, torch.float32, len(VOCABULARY))
    # what is left is the process that listens, which then ends itself
    engine = server.processes()[:-1]
    threading.Timer(0.5, lambda: [each.kill() for each in engine]).start()
    with pytest.raises(
        RunStopped,
        match="the sampler was lost .*, and once more after it was started again: --sampler_url: ",
    ):
        sampler.sample(PROMPTS * 20, SamplingConfig(n=32, max_new_tokens=480, stop=()))
    server.kill()
    with pytest.raises(UserError, match="--sampler_url: .* cannot be reached"):
        connect()
