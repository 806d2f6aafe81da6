"""A GPU's memory as an engine finds it, on a machine without one: stand-ins for torch's allocator
and for an engine."""

import gc
import os
import subprocess
import sys
import weakref

import pytest
import torch
from rollout_helpers import open_tiny

from alignment import EXPANDABLE_SEGMENTS
from alignment.policy import micro_batches
from alignment.policy.micro_batches import MicroBatchNeed, choose_micro_batch_tokens
from alignment.sampling.pool import open_sampler
from alignment.sampling.sampler import SamplerConfig, SamplerEngine
from alignment.sampling.vllm import worker_environment
from alignment.system import device_memory
from alignment.system.errors import UserError
from alignment.system.processes import ROOT

GIB = 2**30
UUID = "GPU-8f2bd1a5-6e3c-4b8e-9d0a-1c2f3a4b5c6d"


class Allocator:
    """A card of 24 GiB. What torch has freed it keeps until `empty_cache`; CUDA's figure of free
    memory leaves that out."""

    def __init__(self, monkeypatch):
        self.used, self.kept = 0, 0
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (self.free(), 24 * GIB))

    def allocate(self, owner: object, size: int) -> None:
        self.used += size
        weakref.finalize(owner, self.keep, size)

    def keep(self, size: int) -> None:
        self.used, self.kept = self.used - size, self.kept + size

    def empty_cache(self) -> None:
        self.kept = 0

    def free(self) -> int:
        return 24 * GIB - self.used - self.kept


class Trainer:
    """Something that holds memory, in a circle of references as modules and their hooks are."""

    def __init__(self):
        self.itself = self


def strict_engine(config, tokenizer, policy):
    """Refuses as vLLM does where less than its share is free."""
    free, total = torch.cuda.mem_get_info(config.device)
    if free < config.memory_share * total:
        raise UserError(
            f"free memory {free / GIB:.0f} GiB is less than {config.memory_share} of"
            f" {total / GIB:.0f}"
        )
    return "started"


def start(share: float):
    return open_sampler(
        SamplerEngine(strict_engine),
        SamplerConfig("m", "cuda:0", "bfloat16", memory_share=share),
        None,
    )


def test_memory_that_a_trainer_has_left_is_given_back_before_an_engine_starts(monkeypatch):
    gc.disable()
    try:
        allocator, trainer = Allocator(monkeypatch), Trainer()
        allocator.allocate(trainer, 20 * GIB)
        with pytest.raises(UserError, match="free memory 4 GiB"):
            start(0.4)
        del trainer
        assert allocator.free() == 4 * GIB  # not collected yet, nor given back
        assert start(0.9) == "started" and allocator.free() == 24 * GIB
    finally:
        gc.enable()


def test_to_read_the_free_memory_changes_nothing(monkeypatch):
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("collected"))
    monkeypatch.setattr(allocator, "used", 14 * GIB)
    monkeypatch.setattr(allocator, "kept", 2 * GIB)
    assert device_memory.free_bytes("cuda:0") == 8 * GIB and allocator.kept == 2 * GIB
    assert device_memory.free_bytes("cpu") > 0


def test_the_budget_of_micro_batches_counts_what_torch_keeps_as_free(tiny_folder, monkeypatch):
    """Collected once, however many devices a policy has."""
    allocator, policy, collected, frees = Allocator(monkeypatch), open_tiny(tiny_folder), [], []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(allocator, "kept", 10 * GIB)
    monkeypatch.setattr(
        micro_batches, "devices_of", lambda model: [torch.device("cuda:0"), torch.device("cuda:1")]
    )
    read = device_memory.free_bytes
    monkeypatch.setattr(
        micro_batches, "free_bytes", lambda device: frees.append(read(device)) or frees[-1]
    )
    choose_micro_batch_tokens(
        policy.model, policy.optimizer, policy.policy_config, MicroBatchNeed(9)
    )
    assert frees == [24 * GIB] * 2 and len(collected) == 1


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "cuda:3", "3"),
        ("5,2", "cuda:1", "2"),
        (f"0,{UUID}", "cuda:1", UUID),
        ("0", "cpu", ""),
    ],
)
def test_the_worker_sees_its_gpu_only(visible, device, expected):
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert worker_environment((device,), environment)["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    "entry", ["MIG-8f2bd1a5-6e3c-4b8e-9d0a-1c2f3a4b5c6d", "GPU-8f2bd1a5", "MIG-GPU-8f2b/1/0"]
)
def test_gpus_that_vllm_cannot_name_are_refused(entry):
    with pytest.raises(
        UserError, match=f"vLLM cannot be started on {entry}; list GPUs by index or by whole UUID"
    ):
        worker_environment(("cuda:0",), {"CUDA_VISIBLE_DEVICES": entry})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trainers", "engines"),
    [(EXPANDABLE_SEGMENTS, ""), ("max_split_size_mb:512", "max_split_size_mb:512")],
)
def test_the_trainers_allocator_setting_is_not_the_engines(trainers, engines):
    """In a process that imports what the worker imports, this package among it."""
    environment = worker_environment(("cpu",), {**os.environ, "PYTORCH_ALLOC_CONF": trainers})
    code = "import os, alignment.sampling.vllm; print(os.environ['PYTORCH_ALLOC_CONF'])"
    process = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == f"{engines}\n"
