"""vLLM's sleep mode, which only GPUs have. What runs here is vLLM's own: `Executor` and `Worker` as
far as they sleep and wake, the backend and `CuMemAllocator` with its table of blocks. Stand-ins are
what CUDA does: a block's memory is the host's, and when the allocator gives it back it is filled
with garbage."""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from vllm import device_allocator
from vllm.device_allocator import cumem
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.gpu_worker import Worker

from alignment.sampling import vllm
from alignment.sampling.sampler import WeightsDiscarded
from alignment.sampling.vllm_memory import Blocks, Engine, blocks_by_tag
from tests.with_vllm.test_vllm_on_gpus import FOLDER, methods

KIB = 2**10
GARBAGE = 0x5A


class Runtime:
    """CUDA's runtime, for memory of the host. Counts the bytes that it copies."""

    copied = 0

    def cudaMemcpy(self, target, source, size):
        self.copied += size
        ctypes.memmove(target, source, size)

    def cudaMemset(self, target, value, size):
        ctypes.memset(target, value, size)


class GPU:
    """A GPU with the pool of a vLLM engine: `allocate` gives a block to its allocator."""

    def __init__(self, monkeypatch):
        self.allocator, self.runtime = cumem.CuMemAllocator(), Runtime()
        self.memory: dict[int, torch.Tensor] = {}
        self.mapped: dict[int, int] = {}
        self.used_by_others = 0
        monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: self.allocator)
        monkeypatch.setattr(cumem, "libcudart", self.runtime)
        monkeypatch.setattr(cumem, "PIN_MEMORY", False)
        monkeypatch.setattr(cumem, "create_and_map", self.take)
        monkeypatch.setattr(cumem, "unmap_and_release", self.give_back)
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda *device: None)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (self.free(), 640 * KIB))

    def allocate(self, tag: str, size: int) -> torch.Tensor:
        """The bytes of a new block."""
        block = torch.zeros(size, dtype=torch.uint8)
        self.memory[block.data_ptr()] = block
        handle = (0, size, block.data_ptr(), 7)
        self.take(handle)
        self.allocator.current_tag = tag
        self.allocator._python_malloc_callback(handle)
        return block

    def take(self, handle) -> None:
        assert handle[2] not in self.mapped, "taken twice"
        self.mapped[handle[2]] = handle[1]

    def give_back(self, handle) -> None:
        del self.mapped[handle[2]]
        self.memory[handle[2]].fill_(GARBAGE)

    def free(self) -> int:
        return 640 * KIB - self.used_by_others - sum(self.mapped.values())


class Model(torch.nn.Module):
    """Tied embeddings, a projection, a buffer, and ALiBi's slopes as vLLM has them: an attribute
    that is no buffer."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor):
        super().__init__()
        numbers = first.view(torch.bfloat16)
        self.embedding = torch.nn.Parameter(numbers[256:512].view(16, 16))
        self.head = self.embedding
        self.slopes = numbers[512:520]
        self.register_buffer("rotary", numbers[768:1024])
        self.projection = torch.nn.Parameter(second.view(torch.bfloat16)[:512].view(16, 32).mT)
        # as the sampler's state of requests, which is there, too
        self.requests = second.view(torch.int32)[256:]
        with torch.no_grad():
            self.embedding.copy_(torch.arange(256).view(16, 16))
            self.projection.copy_(torch.arange(512).view(32, 16) / 4)
        self.slopes.copy_(torch.arange(8) / 8)
        self.rotary.fill_(3.0)
        self.requests.fill_(-5)

    def state(self) -> dict[str, torch.Tensor]:
        tensors = ("embedding", "projection", "slopes", "rotary", "requests")
        return {name: getattr(self, name).detach().clone() for name in tensors}


class SleepingExecutor(Executor):
    """vLLM's executor of one worker in its process."""

    def __init__(self, worker):
        self.worker, self.sleeping_tags = worker, set()

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        function = method if callable(method) else getattr(type(self.worker), method)
        return [function(self.worker, *args, **(kwargs or {}))]

    def check_health(self):
        pass

    def _init_executor(self):
        pass


@pytest.fixture
def gpu(monkeypatch):
    return GPU(monkeypatch)


@pytest.fixture
def engine(gpu):
    """An engine that is awake, with `engine.model`, a block of each tag, and the names of the calls
    that it gets."""
    model = Model(gpu.allocate("weights", 2 * KIB), gpu.allocate("weights", 4 * KIB))
    for tag, size in {
        "kv_cache": 64 * KIB,
        "runtime": KIB,
        "cudagraph": 8 * KIB,
        "workspace": KIB,
    }.items():
        gpu.allocate(tag, size)
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace(
        model=model, get_model=lambda: model, get_draft_model=lambda: None
    )
    worker.model_config = SimpleNamespace(
        enable_sleep_mode=True,
        sleep_mode_backend="cumem",
        enable_nccl_comm_suspend=False,
        sleep_preserve_parameter_names=[],
    )
    worker.vllm_config = SimpleNamespace(model_config=worker.model_config)
    (
        worker._sleep_saved_buffers,
        worker._sleep_saved_draft_buffers,
        worker._sleep_saved_parameters,
    ) = (
        {},
        {},
        {},
    )
    worker._sleep_mode_backend = None
    executor, calls = SleepingExecutor(worker), []

    def collective_rpc(method, *arguments, **named):
        calls.append(getattr(method, "__name__", method))
        return executor.collective_rpc(method, *arguments, **named)

    llm = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=worker.vllm_config),
        sleep=lambda level: (calls.append(f"sleep {level}"), executor.sleep(level)),
        wake_up=lambda tags: (calls.append("wake " + " ".join(tags)), executor.wake_up(tags)),
        collective_rpc=collective_rpc,
    )
    engine = Engine(llm)
    engine.model, engine.calls, engine.worker = model, calls, worker
    return engine


def load(engine) -> None:
    """New weights for all parameters, as a weight update brings them."""
    engine.begin_update()
    with torch.no_grad():
        engine.model.embedding.copy_(-torch.arange(256).view(16, 16))
        engine.model.projection.fill_(0.5)
    engine.end_update()


def test_a_sleeping_engine_has_no_memory_of_the_gpu_and_wakes_as_it_was(engine, gpu):
    before, free = engine.model.state(), gpu.free()
    engine.sleep(keep_weights=True)
    assert gpu.free() == 640 * KIB and free == 560 * KIB
    assert blocks_by_tag(engine.worker)["kv_cache"] == Blocks(64 * KIB, 0)
    engine.wake_to_sample()
    assert gpu.free() == free
    after = engine.model.state()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("change", [4 * KIB, -4 * KIB])
def test_memory_that_others_take_or_give_back_meanwhile_says_nothing_of_the_engine(
    change, engine, gpu, monkeypatch
):
    gpu.used_by_others = 100 * KIB
    give_back = gpu.give_back

    def others_change_theirs(handle):
        give_back(handle)
        gpu.used_by_others = 100 * KIB + change

    monkeypatch.setattr(cumem, "unmap_and_release", others_change_theirs)
    engine.sleep(keep_weights=True)
    assert gpu.free() == 540 * KIB - change


@pytest.mark.parametrize("keep_weights", [True, False])
def test_keys_and_values_that_stay_on_the_gpu_are_noticed(keep_weights, engine, gpu):
    sleep = gpu.allocator.sleep

    def keeps_one_block(offload_tags):
        sleep(offload_tags)
        data = next(
            data for data in gpu.allocator.pointer_to_data.values() if data.tag == "kv_cache"
        )
        gpu.take(data.handle)
        data.is_asleep = False

    gpu.allocator.sleep = keeps_one_block
    with pytest.raises(
        RuntimeError,
        match="vLLM sleeps, but keeps 65536 of the 65536 bytes of its kv_cache on a GPU",
    ):
        engine.sleep(keep_weights)


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_memory_outside_the_pool_is_noticed(tag, engine, gpu):
    """As where a KV connector has a pool of its own."""
    for data in gpu.allocator.pointer_to_data.values():
        data.tag = data.tag.replace(tag, "other")
    with pytest.raises(RuntimeError, match=f"its pool holds no {tag}"):
        engine.sleep(keep_weights=True)


def test_discarded_weights_are_neither_copied_nor_used(engine, gpu):
    """The first wake takes the weights' memory and not that of keys and values, for which the
    trainer still has no room."""
    before = engine.model.state()
    engine.sleep(keep_weights=False)
    parameters = 256 * 2 + 512 * 2  # bytes
    # What is copied to the host: all blocks of weights but the parameters, the graphs, the
    # runtime's state.
    assert gpu.runtime.copied == 6 * KIB - parameters + 8 * KIB + KIB
    with pytest.raises(WeightsDiscarded, match="discarded its weights"):
        engine.wake_to_sample()
    assert gpu.free() == 640 * KIB
    engine.begin_update()
    assert gpu.free() == (640 - 6 - 8 - 1 - 1) * KIB
    assert engine.model.embedding.isnan().all() and engine.model.projection.isnan().all()
    with pytest.raises(WeightsDiscarded):
        engine.wake_to_sample()
    load(engine)
    engine.wake_to_sample()
    assert gpu.free() == 560 * KIB
    after = engine.model.state()
    assert all(torch.equal(before[name], after[name]) for name in ("slopes", "rotary", "requests"))
    assert (
        after["embedding"][0, 1] == -1
        and engine.model.head[0, 1] == -1
        and (after["projection"] == 0.5).all()
    )


def test_the_sequence_of_training_copies_no_weights_and_never_sleeps_between_sync_and_sampling(
    engine,
):
    engine.sleep(keep_weights=True)  # it has started
    engine.wake_to_sample()  # an evaluation
    engine.wake_to_sample()  # the first rollout
    engine.sleep(keep_weights=False)
    load(engine)
    engine.wake("weights")  # checksums
    engine.wake_to_sample()  # an evaluation
    engine.wake_to_sample()  # a rollout
    engine.sleep(keep_weights=False)
    functions = ["save_all_but_parameters", "blocks_by_tag", "restore_all_but_parameters"]
    assert [call for call in engine.calls if call not in functions] == [
        "sleep 1",
        "wake kv_cache weights",
        "sleep 2",
        "wake weights",
        "wake kv_cache",
        "sleep 2",
    ]


def test_an_engine_that_sleeps_with_its_weights_may_be_told_that_they_are_not_needed(engine):
    engine.sleep(keep_weights=True)
    engine.sleep(keep_weights=False)
    with pytest.raises(WeightsDiscarded):
        engine.wake_to_sample()
    load(engine)
    engine.wake_to_sample()
    assert (engine.model.projection == 0.5).all()


def test_an_engine_without_sleep_mode_is_left_alone(engine):
    engine.sleeps = False
    engine.sleep(keep_weights=False)
    engine.wake_to_sample()
    assert engine.calls == []


def test_weights_that_came_in_part_are_not_sampled_with(engine):
    engine.sleeps = False
    engine.begin_update()
    with pytest.raises(WeightsDiscarded):
        vllm._generate(engine, None, [[1]], [{"n": 1}], 1, 0)


def test_vllm_has_what_is_called():
    assert methods("entrypoints/llm.py", "LLM")["sleep"][:2] == ["self", "level"]
    assert methods("entrypoints/llm.py", "LLM")["wake_up"][:2] == ["self", "tags"]
    assert methods("device_allocator/cumem.py", "CuMemAllocator")["sleep"] == [
        "self",
        "offload_tags",
    ]
    assert "enable_sleep_mode: bool" in (FOLDER / "config/model.py").read_text()
    runtime = methods("distributed/device_communicators/cuda_wrapper.py", "CudaRTLibrary")
    assert runtime["cudaMemcpy"] == ["self", "dst", "src", "count"]
    assert runtime["cudaMemset"] == ["self", "devPtr", "value", "count"]
    worker = methods("v1/worker/worker_base.py", "WorkerBase")
    assert worker["synchronize_device"] == ["self"]
