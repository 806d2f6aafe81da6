"""vLLM's weight transfer API: what runs on CPUs with a real engine, and what only GPUs have,
against vLLM's own signatures."""

import inspect
import pickle
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from vllm.distributed.weight_transfer import VLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import (
    IPCTrainerInitInfo,
    IPCTrainerWeightTransferEngine,
)
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
)

from alignment.sampling import vllm, vllm_weights
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import SamplerConfig, SamplerLost, WeightsDiscarded
from alignment.sampling.vllm_memory import Engine
from tests.with_vllm.conftest import tiny_llama
from tests.with_vllm.test_vllm_on_gpus import methods
from tests.with_vllm.test_vllm_sampler import OPEN_END, PROMPTS


def config(policy_device: str, *devices: str) -> SamplerConfig:
    return SamplerConfig(
        "model", devices[0], "bfloat16", further_devices=devices[1:], policy_device=policy_device
    )


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


# --- a real engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [1, 2**14, 2**27])
def test_buckets_of_any_size_carry_the_same_weights(bucket, sampler, policy, monkeypatch):
    """With one tensor each, and with several, a layer's tensors arrive by several updates, and
    memory is used again."""
    updates, ask = [], sampler._ask
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", bucket)
    monkeypatch.setattr(
        sampler._client, "_ask", lambda *arguments: (updates.append(arguments[1]), ask(*arguments))
    )
    load_proven(sampler, tiny_llama(seed=1).named_parameters(), 1)
    load_proven(sampler, policy.named_parameters(), 0)
    sent = updates.count("update_weights")
    tensors = len(list(policy.named_parameters()))
    assert {1: sent == 2 * tensors, 2**14: 2 < sent < 2 * tensors, 2**27: sent == 2}[bucket]
    assert updates[-1] == "finish_weight_update" and updates.count("start_weight_update") == 2


def test_bytes_on_the_way_to_an_engine(sampler, policy, monkeypatch):
    """Of a first update, as of a later one: each weight once, by the memory that both processes
    map. What crosses the pipe are names, shapes and checksums."""
    first = vllm_weights.EngineClient(sampler._ask, sampler._config, sampler.dtype)
    monkeypatch.setattr(sampler, "_client", first)
    packed, piped, ask, pack = [], [], sampler._ask, vllm_weights.pack

    def counted_pack(bucket, memory):
        packed.append(sum(tensor.nbytes for _, tensor in bucket))
        pack(bucket, memory)

    def counted_ask(verb, *arguments, **options):
        answer = ask(verb, *arguments, **options)
        piped.append(len(pickle.dumps((verb, arguments))) + len(pickle.dumps(answer)))
        return answer

    monkeypatch.setattr(vllm_weights, "pack", counted_pack)
    monkeypatch.setattr(sampler, "_ask", counted_ask)
    monkeypatch.setattr(first, "_ask", counted_ask)
    of_model = sum(parameter.nbytes for parameter in policy.parameters())
    counts = []
    for version in (1, 2):
        load_proven(sampler, policy.named_parameters(), version)
        counts.append((sum(packed), sum(piped)))
        packed.clear()
        piped.clear()
    (first_packed, first_piped), (later_packed, later_piped) = counts
    assert first_packed == later_packed == of_model
    assert later_piped <= first_piped < later_piped + 200 < 8000  # bytes, of 20 tensors
    print(f"{of_model} bytes of weights, {first_piped} and {later_piped} by the pipe")


def test_an_engine_that_hangs_in_a_phase_is_killed_and_replaced_with_the_new_weights(
    restarting, policy, monkeypatch, capfd
):
    restarting.load_weights(tiny_llama(seed=1).named_parameters(), 3)
    expected, engine, restarts = (
        restarting.sample(PROMPTS, OPEN_END),
        restarting._engines["engine"],
        restarting.restarts,
    )
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
    with pytest.raises(WeightsDiscarded, match="nothing is sampled with it"):
        engine.sample(PROMPTS, OPEN_END)
    restarting.load_weights(tiny_llama(seed=1).named_parameters(), 3)  # finds it dead
    assert restarting.sample(PROMPTS, OPEN_END) == expected and restarting.restarts == restarts + 1
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.startswith("the sampler is started again: ")
    load_proven(restarting._engines["engine"], policy.named_parameters(), 0)


# --- what GPUs alone have -------------------------------------------------------------------------


def test_the_client_has_the_methods_and_arguments_that_vllm_calls():
    names = [
        name
        for name in vars(VLLMWeightSyncClient)
        if name.endswith(("_engine", "_update", "_weights"))
    ]
    assert len(names) == 4
    for name in names:
        ours, theirs = (
            inspect.signature(getattr(kind, name))
            for kind in (vllm_weights.EngineClient, VLLMWeightSyncClient)
        )
        assert list(ours.parameters) == list(theirs.parameters)
        offline = methods("entrypoints/rl/offline.py", "RLOfflineMixin")[name]
        assert len(offline) == len(ours.parameters)


@pytest.mark.parametrize(
    ("policy_device", "devices", "info", "trainer"),
    [
        ("cuda:0", ("cuda:0",), IPCTrainerInitInfo, IPCTrainerWeightTransferEngine),
        ("cuda:0", ("cuda:1", "cuda:2"), NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine),
    ],
)
def test_gpus_get_vllms_own_trainer_which_needs_no_weights_to_start(
    policy_device, devices, info, trainer
):
    client = vllm_weights.EngineClient(None, config(policy_device, *devices), torch.bfloat16)
    facts = client._init_info()
    assert type(facts) is info and facts.packed and facts.is_sender
    assert getattr(facts, "world_size", 3) == 1 + len(devices) or info is IPCTrainerInitInfo
    assert issubclass(vllm_weights.TRAINERS[facts.backend], trainer)


class OnGPU:
    """A client of an engine on the policy's GPU, whose tensors are "meta": torch refuses to copy
    one to the host."""

    def __init__(self, kind, monkeypatch):
        self.updates, self.phases, self.exported = [], [], []
        self.client = vllm_weights.EngineClient(
            self.ask, config("cuda:0", "cuda:0"), torch.bfloat16
        )
        self.client._device = self.client._source.device = torch.device("meta")
        trainer = self.client._trainer = kind.__new__(kind)
        trainer.client, trainer.is_sender, trainer.gpu_uuid = self.client, True, "GPU-1"
        monkeypatch.setattr(vllm_weights, "reduce_tensor", self.export)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None)
        )
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)

    def ask(self, verb, phase, *arguments):
        self.phases.append(phase)
        if phase == "update_weights":
            self.updates.append(arguments[0]["update_info"])

    def export(self, tensor):
        self.exported.append(tensor.nbytes)
        return None, (len(self.exported),)


# name, numbers of two bytes
WEIGHTS = [
    ("a", 100),
    ("b", 20),
    ("large", 400),
    ("c", 30),
    ("d", 30),
    ("e", 30),
]


def weights_on_a_gpu():
    for name, numbers in WEIGHTS:
        yield name, torch.empty(numbers, dtype=torch.float32, device="meta")


def test_cuda_ipc_reads_each_weight_once_and_none_on_the_host(monkeypatch):
    """In the first update as in later ones. A tensor larger than a bucket gets a larger buffer,
    which carries those after it."""
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", 256)
    gpu = OnGPU(vllm_weights.IPCTrainer, monkeypatch)
    for version in (1, 2):
        gpu.client.send(weights_on_a_gpu(), version)
        assert [update["names"] for update in gpu.updates] == [
            ["a", "b"],
            ["large"],
            ["c", "d", "e"],
        ]
        assert [update["tensor_sizes"] for update in gpu.updates] == [
            [200, 40],
            [800],
            [60, 60, 60],
        ]
        assert gpu.updates[1]["shapes"] == [[400]] and gpu.updates[1]["dtype_names"] == ["bfloat16"]
        handles = [update["ipc_handles"]["GPU-1"][0] for update in gpu.updates]
        assert handles == [2 * version - 1, 2 * version, 2 * version]
        gpu.updates.clear()
    assert gpu.exported == [256, 800, 256, 800]
    assert gpu.phases == 2 * [
        "start_weight_update",
        *3 * ["update_weights"],
        "finish_weight_update",
    ]


def test_nccl_sends_each_weight_once_and_none_through_the_host(monkeypatch):
    monkeypatch.setattr(vllm_weights, "BUCKET_BYTES", 256)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    broadcast = []
    monkeypatch.setattr(
        vllm_weights.NCCLTrainer,
        "_broadcast",
        lambda self, bucket, meta: broadcast.append((bucket, meta)),
    )
    gpu = OnGPU(vllm_weights.NCCLTrainer, monkeypatch)
    gpu.client.send(weights_on_a_gpu(), 1)
    assert [update["names"] for update in gpu.updates] == [["a", "b"], ["large"], ["c", "d", "e"]]
    for bucket, meta in broadcast:  # as vLLM's own broadcast compares them
        assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in bucket] == [
            (each.name, each.dtype, each.shape) for each in meta
        ]
    assert [name for bucket, _ in broadcast for name, _ in bucket] == [name for name, _ in WEIGHTS]


def test_a_broadcast_that_waits_for_a_lost_engine_breaks_off_and_says_what_was_lost():
    """As vLLM's NCCL trainer does: it asks in a thread, and broadcasts meanwhile until its
    communicator is destroyed."""

    def ask(verb, phase, *arguments):
        if phase == "update_weights":
            raise SamplerLost("the engine hangs")

    class Trainer:
        def __init__(self):
            self.destroyed = threading.Event()
            self.shutdown = self.destroyed.set

        def send_bucket(self, bucket):
            threading.Thread(
                target=lambda: pytest.raises(SamplerLost, client.update_weights, {})
            ).start()
            assert self.destroyed.wait(30)
            raise RuntimeError("NCCL error")

    client = vllm_weights.EngineClient(ask, config("cpu", "cpu"), torch.float32)
    client._trainer = Trainer()
    with pytest.raises(SamplerLost, match="the engine hangs"):
        client.send([("a", torch.ones(1))], 1)


def test_a_sleeping_engine_takes_weights_before_it_takes_memory_for_keys_and_values():
    calls = []
    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        ),
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
        "wake weights",
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "_repack_output_embedding",
        "wake kv_cache",
    ]
