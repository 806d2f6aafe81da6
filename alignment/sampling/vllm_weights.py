"""New weights for a vLLM engine by vLLM's weight transfer API, with a backend of ours for the
host's memory. Trainer and engine import this file, and with it a part of vLLM: in a trainer that
takes 4 to 6 s and 70 MB, starts no thread, and changes how torch.compile works. Without vLLM, a
trainer would repeat formats that are each version's own."""

# vLLM is an extra, which a checkout may lack.
# pyright: reportMissingImports=false

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, BinaryIO

import torch
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed import weight_transfer
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.utils.network_utils import get_open_port

from alignment.sampling.sampler import SamplerConfig, SamplerLost

BUCKET_BYTES = 2**27  # of tensors that travel together; more where one tensor is larger
NO_LIMIT = 2**62  # bytes, where vLLM would cut a bucket into more parts

Bucket = list[tuple[str, torch.Tensor]]


class PolicySource:
    """The weights of one update, each gathered, cast and moved to `device` when its turn comes."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.tensors: Iterable[tuple[str, torch.Tensor]] = ()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            # Cast where it is, so that fewer bytes travel.
            cast = tensor.detach().to(self.dtype)
            yield name, cast.to(self.device)

    def buckets(self) -> Iterator[Bucket]:
        """The weights in parts of at most BUCKET_BYTES, or of one larger tensor."""
        bucket: Bucket = []
        size = 0
        for name, tensor in self:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
                size = 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket


class EngineClient:
    """The trainer's side of an engine, and the `VLLMWeightSyncClient` by which vLLM's trainer side
    asks that engine. `ask("transfer", phase, *arguments)` asks its process, and raises
    `SamplerLost` where that takes too long."""

    def __init__(self, ask: Callable, config: SamplerConfig, dtype: torch.dtype):
        self._ask = ask
        self._config = config
        self._backend = config.transfer_backend
        self._device = torch.device(config.policy_device)
        if self._backend == "shared_memory":
            self._device = torch.device("cpu")
        self._source = PolicySource(dtype, self._device)
        self._version = ""  # Of the weights that are sent last.
        self._lost: SamplerLost | None = None  # Why the engine was lost.
        self._trainer: Any = None  # One of `TRAINERS`, made for the first weights.

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the engine's weights. Names and shapes travel with each bucket, so that no weight
        is read before its turn."""
        self._source.tensors = named_tensors
        self._version = str(version)
        try:
            with torch.accelerator.device_index(self._device.index):
                if self._device.type == "cuda":
                    torch.cuda.synchronize()  # vLLM reads the weights on streams of its own
                if self._trainer is None:
                    kind = TRAINERS[self._backend]
                    self._trainer = kind.trainer_init(
                        self._init_info(), client=self, source=self._source
                    )
                self.start_weight_update()
                for bucket in self._source.buckets():
                    self._trainer.send_bucket(bucket)
                self.finish_weight_update()
                self._trainer.end_update()
        except Exception as error:
            raise self._lost or error from None
        finally:
            self._source.tensors = ()

    def _init_info(self) -> TrainerInitInfo:
        if self._backend == "shared_memory":
            return SharedMemoryInitInfo(rank=0)
        if self._backend == "ipc":
            return ipc_engine.IPCTrainerInitInfo(packed=True, rank=0)
        size = 1 + len(self._config.devices)
        return nccl_engine.NCCLTrainerInitInfo(
            "127.0.0.1",
            get_open_port(),
            size,
            packed=True,
            packed_buffer_size_bytes=NO_LIMIT,
            rank=0,
        )

    def init_weight_transfer_engine(self, init_info: dict) -> None:
        self._phase("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._phase("start_weight_update")

    def update_weights(self, update_info: dict) -> None:
        self._phase("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._phase("finish_weight_update", weight_version or self._version)

    def _phase(self, *arguments) -> None:
        try:
            self._ask("transfer", *arguments)
        except SamplerLost as error:
            self._lost = error
            if self._trainer is not None:
                # Ends a broadcast that waits for the engine in another thread.
                self._trainer.shutdown()
            raise


def described(bucket: Bucket) -> dict[str, list]:
    """What vLLM's update of a bucket says of it."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def sizes_of(bucket: Bucket) -> list[int]:
    return [tensor.nbytes for _, tensor in bucket]


def pack(bucket: Bucket, memory: torch.Tensor) -> None:
    """Copy a bucket's tensors one behind the other into `memory` [bytes]."""
    sizes = sizes_of(bucket)
    for place, (_, tensor) in zip(memory[: sum(sizes)].split(sizes), bucket, strict=True):
        place.copy_(tensor.contiguous().flatten().view(torch.uint8))


class IPCTrainer(ipc_engine.IPCTrainerWeightTransferEngine):
    """vLLM's CUDA IPC from this process alone: a trainer's other ranks, which vLLM's own would wait
    for, take no part. One buffer of this GPU carries each bucket of an update; a larger one
    replaces it where a tensor needs it."""

    memory: torch.Tensor | None = None

    def send_bucket(self, bucket: Bucket) -> None:
        sizes = sizes_of(bucket)
        if self.memory is None or self.memory.nbytes < sum(sizes):
            device = bucket[0][1].device
            capacity = max(BUCKET_BYTES, sum(sizes))
            self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
            self.handle = {self.gpu_uuid: reduce_tensor(self.memory)[1]}
        pack(bucket, self.memory)
        torch.cuda.current_stream().synchronize()
        self._do_send(**described(bucket), ipc_handles=self.handle, tensor_sizes=sizes)

    def end_update(self) -> None:
        """Let go of the buffer, as the engine has: each update exports one of its own."""
        self.memory = None
        torch.cuda.ipc_collect()


class NCCLTrainer(nccl_engine.NCCLTrainerWeightTransferEngine):
    """vLLM's broadcast by NCCL, a bucket at a time."""

    def send_bucket(self, bucket: Bucket) -> None:
        shapes = [
            weight_transfer.ParamMeta(name, tensor.dtype, tuple(tensor.shape))
            for name, tensor in bucket
        ]
        update = nccl_engine.NCCLWeightTransferUpdateInfo(**described(bucket))
        # The engine receives while this side sends. If sending fails, the engine waits in NCCL:
        # then nobody waits for its answer.
        thread = ThreadPoolExecutor(1)
        try:
            received = thread.submit(self.client.update_weights, asdict(update))
            self._broadcast(bucket, shapes)
            received.result()
        finally:
            thread.shutdown(wait=False)

    def end_update(self) -> None:
        self._post_send_sync()


class SharedMemoryInitInfo(TrainerInitInfo):
    backend = "shared_memory"


class SharedMemoryTrainer(weight_transfer.TrainerWeightTransferEngine[SharedMemoryInitInfo]):
    """Fills memory that the engine maps, by turns with the engine. It has no name, and ends with
    its processes."""

    file: BinaryIO
    memory: torch.Tensor  # The file's bytes.

    @classmethod
    def trainer_init(cls, init_info: SharedMemoryInitInfo, *, client, source=None):
        trainer = cls(client=client, source=source)
        trainer.file = os.fdopen(os.memfd_create("weights"), "wb")
        trainer.memory = torch.empty(0, dtype=torch.uint8)
        client.init_weight_transfer_engine({"packed": True})
        return trainer

    def send_weights(self) -> None:
        raise NotImplementedError("an `EngineClient` sends buckets")

    def send_bucket(self, bucket: Bucket) -> None:
        sizes = sizes_of(bucket)
        length = sum(sizes)
        path = f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        if length > len(self.memory):
            # Without it a process is killed where memory is short; this raises OSError.
            os.posix_fallocate(self.file.fileno(), 0, length)
            self.memory = torch.from_file(path, True, length, dtype=torch.uint8)
        pack(bucket, self.memory)
        handle = {"bucket": (path, True, length)}
        update = ipc_engine.IPCWeightTransferUpdateInfo(
            **described(bucket), ipc_handles=handle, tensor_sizes=sizes
        )
        self.client.update_weights(asdict(update))

    def end_update(self) -> None:
        pass


class SharedMemoryEngine(ipc_engine.IPCWeightTransferEngine):
    """A worker's side: vLLM's own for CUDA IPC, but for the handle, which is a file's name."""

    def update_weights(self, update_info: dict) -> None:
        """Load a bucket's weights. vLLM's own method waits for a GPU afterwards, too."""
        info = self.parse_update_info(update_info)
        bucket = torch.from_file(*info.ipc_handles["bucket"], dtype=torch.uint8)
        types = [getattr(torch, name) for name in info.dtype_names]
        # Copies, since vLLM keeps the tensors of a layer that is not complete while the bucket is
        # filled again.
        parts = unpack_tensor(bucket, info.names, info.shapes, types, info.tensor_sizes)
        self.model.load_weights((name, part.to(self.device, copy=True)) for name, part in parts)


class WorkerExtension:
    """Has each of vLLM's workers, which may be processes of vLLM's own, import this file and so
    know the backend."""


weight_transfer.WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryEngine)
TRAINERS = {"ipc": IPCTrainer, "nccl": NCCLTrainer, "shared_memory": SharedMemoryTrainer}
