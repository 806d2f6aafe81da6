"""vLLM's weight transfer API: what runs on CPUs with a real engine, and what only GPUs have, against vLLM's own signatures."""

import inspect
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.distributed.weight_transfer import VLLMWeightSyncClient, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from alignment.sampling import vllm, vllm_weights
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import SamplerConfig, SamplerLost
from alignment.sampling.vllm_memory import Engine
from tests.with_vllm.conftest import tiny_llama
from tests.with_vllm.test_vllm_on_gpus import methods
from tests.with_vllm.test_vllm_sampler import OPEN_END, PROMPTS


def config(policy_device: str, *devices: str) -> SamplerConfig:
    return SamplerConfig("model", devices[0], "bfloat16", further_devices=devices[1:], policy_device=policy_device)


@pytest.mark.parametrize(
    ("policy_device", "devices", "backend"),
    [
        ("cpu", ("cpu",), "shared_memory"),
        ("cpu", ("cuda:0",), "shared_memory"),
        ("cuda:0", ("cpu",), "shared_memory"),
        ("cuda:0", ("cuda:1",), "nccl"),
        ("cuda:0", ("cuda:1", "cuda:2"), "nccl"),
        ("cuda:0", ("cuda:0",), "ipc"),
        ("cuda:0", ("cuda:0", "cuda:1"), "shared_memory"),
    ],
)
def test_the_devices_decide_the_backend(policy_device, devices, backend):
    assert config(policy_device, *devices).transfer_backend == backend


# --- a real engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [1, 2**14, 2**27])
def test_buckets_of_any_size_carry_the_same_weights(bucket, sampler, policy, monkeypatch):
    """With one tensor each, and with several, a layer's tensors arrive by several updates, and memory is used again."""
    updates, ask = [], sampler._ask
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(sampler._client, "_ask", lambda *arguments: (updates.append(arguments[1]), ask(*arguments)))
    load_proven(sampler, tiny_llama(seed=1).named_parameters(), 1)
    load_proven(sampler, policy.named_parameters(), 0)
    sent = updates.count("update_weights")
    tensors = len(list(policy.named_parameters()))
    assert {1: sent == 2 * tensors, 2**14: 2 < sent < 2 * tensors, 2**27: sent == 2}[bucket]
    assert updates[-1] == "finish_weight_update" and updates.count("start_weight_update") == 2


def test_an_engine_that_hangs_in_a_phase_is_killed_and_replaced_with_the_new_weights(restarting, policy, monkeypatch, capfd):
    restarting.load_weights(tiny_llama(seed=1).named_parameters(), 3)
    expected, engine, restarts = restarting.sample(PROMPTS, OPEN_END), restarting._engines["engine"], restarting.restarts
    ask, seconds = engine._ask, []

    def ask_a_stopped_process(verb, asked, *arguments):
        if asked == "update_weights":
            psutil.Process(engine._worker.process.pid).send_signal(signal.SIGSTOP)
            seconds.append(time.monotonic())
        return ask(verb, asked, *arguments)

    monkeypatch.setattr(engine, "_timeout", 5.0)
    monkeypatch.setattr(engine._client, "_ask", ask_a_stopped_process)
    hung = psutil.Process(engine._worker.process.pid)
    with pytest.raises(SamplerLost, match="gave no answer within 5 s"):
        engine.load_weights(tiny_llama(seed=1).named_parameters(), 4)
    assert 5 <= time.monotonic() - seconds[0] < 15 and not hung.is_running()
    restarting.load_weights(tiny_llama(seed=1).named_parameters(), 3)  # finds it dead
    assert restarting.sample(PROMPTS, OPEN_END) == expected and restarting.restarts == restarts + 1
    assert "the sampler is started again" in capfd.readouterr().err
    load_proven(restarting._engines["engine"], policy.named_parameters(), 0)


# --- what GPUs alone have -------------------------------------------------------------------------------------------------


def test_the_client_has_the_methods_and_arguments_that_vllm_calls():
    names = [name for name in vars(VLLMWeightSyncClient) if name.endswith(("_engine", "_update", "_weights"))]
    assert len(names) == 4
    for name in names:
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (vllm_weights.EngineClient, VLLMWeightSyncClient))
        assert list(ours.parameters) == list(theirs.parameters)
        offline = methods("entrypoints/rl/offline.py", "RLOfflineMixin")[name]
        assert len(offline) == len(ours.parameters)


@pytest.mark.parametrize(
    ("policy_device", "devices", "info", "engine"),
    [
        ("cuda:0", ("cuda:0",), IPCTrainerInitInfo, IPCTrainerWeightTransferEngine),
        ("cuda:0", ("cuda:1", "cuda:2"), NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine),
    ],
)
def test_gpus_get_vllms_own_trainer_with_room_for_the_largest_tensor(policy_device, devices, info, engine, monkeypatch):
    """Up to the trainer's start: its sources' metadata, and the facts that it is given."""
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", 16)
    client = vllm_weights.EngineClient(None, config(policy_device, *devices), torch.bfloat16)
    client._source.device = "cpu"
    client._source.tensors = iter([("a", torch.ones(3, 5)), ("b", torch.ones(2))])
    facts = client._init_info()
    assert type(facts) is info and facts.packed and facts.packed_buffer_size_bytes == 30 and facts.is_sender
    assert getattr(facts, "world_size", 3) == 1 + len(devices) or info is IPCTrainerInitInfo
    assert WeightTransferTrainerFactory._registry[facts.backend]() is engine
    assert [(meta.name, meta.dtype, meta.shape) for meta in client._source.metadata()] == [
        ("a", torch.bfloat16, (3, 5)),
        ("b", torch.bfloat16, (2,)),
    ]
    assert [name for name, _ in client._source] == ["a", "b"]  # metadata did not use them up


def test_a_broadcast_that_waits_for_a_lost_engine_breaks_off_and_says_what_was_lost():
    """As vLLM's NCCL trainer does: it asks in a thread, and broadcasts meanwhile until its communicator is destroyed."""

    def ask(verb, phase, *arguments):
        if phase == "update_weights":
            raise SamplerLost("the engine hangs")

    class Trainer:
        def __init__(self):
            self.destroyed = threading.Event()
            self.shutdown = self.destroyed.set

        def send_weights(self):
            client.start_weight_update()
            threading.Thread(target=lambda: pytest.raises(SamplerLost, client.update_weights, {})).start()
            assert self.destroyed.wait(30)
            raise RuntimeError("NCCL error")

    client = vllm_weights.EngineClient(ask, config("cpu", "cpu"), torch.float32)
    client._trainer = Trainer()
    with pytest.raises(SamplerLost, match="the engine hangs"):
        client.send([], 1)


def test_a_sleeping_engine_takes_weights_before_it_takes_memory_for_keys_and_values():
    calls = []
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))),
        wake_up=lambda tags: calls.append(f"wake {' '.join(tags)}"),
        collective_rpc=lambda function: calls.append(function.__name__),
    )
    engine = Engine(llm)
    engine.asleep = {"weights", "kv_cache"}
    for phase in ("start_weight_update", "update_weights", "finish_weight_update"):
        setattr(llm, phase, lambda *arguments, phase=phase: calls.append(phase))
        vllm._transfer(engine, None, phase)
    engine.wake_to_sample()
    assert calls == [
        "wake weights", "start_weight_update", "update_weights", "finish_weight_update", "_repack_output_embedding",
        "wake kv_cache",
    ]  # fmt: skip
