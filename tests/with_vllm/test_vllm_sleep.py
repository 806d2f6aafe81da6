"""vLLM's sleep mode, which only GPUs have: the calls that are made, and what vLLM's own sources say of them."""

from types import SimpleNamespace

import pytest

from alignment.sampling import vllm
from tests.with_vllm.test_vllm_on_gpus import FOLDER, methods

GIB = 2**30


class Engine:
    """Stands in for `LLM` on two GPUs of 80 GiB, of which sleep frees `frees`."""

    def __init__(self, enabled: bool = True, frees: tuple[int, int] = (30 * GIB, 30 * GIB)):
        model_config = SimpleNamespace(enable_sleep_mode=enabled)
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=model_config))
        self.calls, self.frees, self.asleep = [], frees, False

    def sleep(self, level):
        self.calls.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self):
        self.calls.append("wake up")
        self.asleep = False

    def collective_rpc(self, function):
        assert function is vllm.gpu_memory
        return [(40 * GIB + freed * self.asleep, 30 * GIB) for freed in self.frees]


def request(engine, *arguments):
    engine.calls.append(("request", *arguments))
    return "answer"


def test_an_engine_is_awake_for_a_request_alone():
    engine = Engine()
    vllm.fall_asleep(engine)
    assert vllm.while_awake(request)(engine, "pipe", 3) == "answer"
    assert engine.calls == ["sleep 1", "wake up", ("request", "pipe", 3), "sleep 1"]


def test_one_without_sleep_mode_is_left_alone():
    engine = Engine(enabled=False)
    assert vllm.while_awake(request)(engine, "pipe") == "answer" and engine.calls == [("request", "pipe")]


@pytest.mark.parametrize("frees", [(30 * GIB, 29 * GIB), (0, 30 * GIB)])
def test_memory_that_a_gpu_does_not_get_back_is_an_error(frees):
    with pytest.raises(RuntimeError, match="vLLM sleeps, but has freed .* of the 32212254720 bytes in its pool"):
        vllm.while_awake(request)(Engine(frees=frees), "pipe")


def test_vllm_has_what_is_called():
    assert methods("entrypoints/llm.py", "LLM")["sleep"][:2] == ["self", "level"]
    assert methods("entrypoints/llm.py", "LLM")["wake_up"][:2] == ["self", "tags"]
    assert {"sleep", "wake_up"} <= methods("v1/worker/gpu_worker.py", "Worker").keys()
    assert methods("device_allocator/cumem.py", "CuMemAllocator")["get_current_usage"] == ["self"]
    assert "def get_mem_allocator_instance()" in (FOLDER / "device_allocator/__init__.py").read_text()
    assert "enable_sleep_mode: bool" in (FOLDER / "config/model.py").read_text()
