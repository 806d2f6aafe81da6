"""Sends the trainer's weights to a vLLM engine, through vLLM's weight transfer API. Its backends
are vLLM's own for CUDA IPC and NCCL, and one of this file for shared memory of the host.

The trainer and the engine both import this file. So the trainer imports a part of vLLM, which takes
4 to 6 s and 70 MB, starts no thread, and changes how torch.compile works. The alternative would be
to write vLLM's message formats here, which change with its versions."""

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

# Tensors are sent together up to this size; a larger tensor is sent alone.
BUCKET_BYTES = 2**27
# For vLLM's own limit, so that vLLM does not cut the buckets into parts.
NO_LIMIT = 2**62  # bytes

Bucket = list[tuple[str, torch.Tensor]]


class PolicySource:
    """The weights of one update. Iteration gathers, casts and moves one tensor at a time."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype = dtype
        self.device = device
        self.tensors: Iterable[tuple[str, torch.Tensor]] = ()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            # Cast before the move, so that fewer bytes are copied.
            cast = tensor.detach().to(self.dtype)
            yield name, cast.to(self.device)

    def buckets(self) -> Iterator[Bucket]:
        """The weights in parts of at most BUCKET_BYTES; a larger tensor is a part by itself."""
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
    """Sends weights to one engine. It is also the client (vLLM's `VLLMWeightSyncClient`) whose
    methods the trainer side of a backend calls to have the engine do its part.

    `ask("transfer", phase, *arguments)` has the engine's process call vLLM's method `phase`. It
    raises `SamplerLost` if that fails or takes too long."""

    def __init__(self, ask: Callable, config: SamplerConfig, dtype: torch.dtype):
        self._ask = ask
        self._config = config
        self._backend = config.transfer_backend
        self._device = torch.device(config.policy_device)
        if self._backend == "shared_memory":
            self._device = torch.device("cpu")
        self._source = PolicySource(dtype, self._device)
        self._version = ""  # of the weights that were sent last
        self._lost: SamplerLost | None = None  # why the engine was lost, if it was
        self._trainer: Any = None  # an instance of one of `TRAINERS`, once weights are sent

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the engine's weights. Names and shapes are sent with each bucket, so that weights
        need not be gathered in advance to list them."""
        self._source.tensors = named_tensors
        self._version = str(version)
        try:
            with torch.accelerator.device_index(self._device.index):
                if self._device.type == "cuda":
                    torch.cuda.synchronize()  # vLLM reads the weights on other streams
                if self._trainer is None:
                    trainer_class = TRAINERS[self._backend]
                    self._trainer = trainer_class.trainer_init(
                        self._init_info(), client=self, source=self._source
                    )
                self.start_weight_update()
                for bucket in self._source.buckets():
                    self._trainer.send_bucket(bucket)
                self.finish_weight_update()
                self._trainer.end_update()
        except Exception as error:
            # The loss of the engine may have caused the error.
            raise self._lost or error from None
        finally:
            self._source.tensors = ()

    def _init_info(self) -> TrainerInitInfo:
        if self._backend == "shared_memory":
            return SharedMemoryInitInfo(rank=0)
        if self._backend == "ipc":
            return ipc_engine.IPCTrainerInitInfo(packed=True, rank=0)
        world_size = 1 + len(self._config.devices)  # this process and the engine's workers
        return nccl_engine.NCCLTrainerInitInfo(
            "127.0.0.1",
            get_open_port(),
            world_size,
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
                # Another thread may wait for the engine in a broadcast, which this ends.
                self._trainer.shutdown()
            raise


def metadata_of(bucket: Bucket) -> dict[str, list]:
    """The fields of vLLM's update infos that describe the tensors of a bucket."""
    return {
        "names": [name for name, _ in bucket],
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
        "shapes": [list(tensor.shape) for _, tensor in bucket],
    }


def sizes_of(bucket: Bucket) -> list[int]:
    return [tensor.nbytes for _, tensor in bucket]


def pack(bucket: Bucket, memory: torch.Tensor) -> None:
    """Copy the bytes of a bucket's tensors, one after the other, into `memory` [bytes]."""
    sizes = sizes_of(bucket)
    for place, (_, tensor) in zip(memory[: sum(sizes)].split(sizes), bucket, strict=True):
        place.copy_(tensor.contiguous().flatten().view(torch.uint8))


class IPCTrainer(ipc_engine.IPCTrainerWeightTransferEngine):
    """vLLM's backend for CUDA IPC, with this process as the only sender; vLLM's own would wait for
    the trainer's other ranks. All buckets of an update go through one buffer on this GPU, which is
    replaced by a larger one if a tensor does not fit."""

    memory: torch.Tensor | None = None

    def send_bucket(self, bucket: Bucket) -> None:
        sizes = sizes_of(bucket)
        if self.memory is None or self.memory.nbytes < sum(sizes):
            device = bucket[0][1].device
            capacity = max(BUCKET_BYTES, sum(sizes))
            self.memory = torch.empty(capacity, dtype=torch.uint8, device=device)
            _, rebuild_arguments = reduce_tensor(self.memory)
            self.handle = {self.gpu_uuid: rebuild_arguments}
        pack(bucket, self.memory)
        torch.cuda.current_stream().synchronize()
        self._do_send(**metadata_of(bucket), ipc_handles=self.handle, tensor_sizes=sizes)

    def end_update(self) -> None:
        """Free the buffer, which the engine has closed by now. The next update makes another."""
        self.memory = None
        torch.cuda.ipc_collect()


class NCCLTrainer(nccl_engine.NCCLTrainerWeightTransferEngine):
    """vLLM's backend for NCCL, which broadcasts each bucket to the engine's workers."""

    def send_bucket(self, bucket: Bucket) -> None:
        parameters = []
        for name, tensor in bucket:
            shape = tuple(tensor.shape)
            parameters.append(weight_transfer.ParamMeta(name, tensor.dtype, shape))
        update = nccl_engine.NCCLWeightTransferUpdateInfo(**metadata_of(bucket))
        # A broadcast needs both sides at once, so another thread asks the engine to receive. If
        # sending fails, the engine hangs in NCCL; `wait=False` then does not wait for its answer.
        executor = ThreadPoolExecutor(1)
        try:
            received = executor.submit(self.client.update_weights, asdict(update))
            self._broadcast(bucket, parameters)
            received.result()
        finally:
            executor.shutdown(wait=False)

    def end_update(self) -> None:
        self._post_send_sync()


class SharedMemoryInitInfo(TrainerInitInfo):
    backend = "shared_memory"


class SharedMemoryTrainer(weight_transfer.TrainerWeightTransferEngine[SharedMemoryInitInfo]):
    """The trainer's side of the backend for shared memory. It fills a file in memory (memfd) with a
    bucket; then the engine maps the file and reads it. The kernel frees the file when no process
    has it open any more."""

    file: BinaryIO
    memory: torch.Tensor  # the file's bytes

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
            # Allocates the memory now, and raises OSError if there is too little. A process that
            # writes to memory that cannot be allocated is killed.
            os.posix_fallocate(self.file.fileno(), 0, length)
            self.memory = torch.from_file(path, True, length, dtype=torch.uint8)
        pack(bucket, self.memory)
        # The arguments of `torch.from_file`: path, whether it is shared, number of elements.
        handle = {"bucket": (path, True, length)}
        update = ipc_engine.IPCWeightTransferUpdateInfo(
            **metadata_of(bucket), ipc_handles=handle, tensor_sizes=sizes
        )
        self.client.update_weights(asdict(update))

    def end_update(self) -> None:
        pass


class SharedMemoryEngine(ipc_engine.IPCWeightTransferEngine):
    """The engine's side of the backend for shared memory, in each of its workers. It is vLLM's for
    CUDA IPC, but its handle is a file and not memory of a GPU."""

    def update_weights(self, update_info: dict) -> None:
        """Load a bucket's weights. The method that this replaces would also synchronize with a GPU,
        which an engine on a CPU lacks."""
        info = self.parse_update_info(update_info)
        bucket = torch.from_file(*info.ipc_handles["bucket"], dtype=torch.uint8)
        dtypes = [getattr(torch, name) for name in info.dtype_names]
        tensors = unpack_tensor(bucket, info.names, info.shapes, dtypes, info.tensor_sizes)
        # Copies: vLLM may keep a tensor until the rest of its layer has arrived, while the trainer
        # fills the file with the next bucket.
        self.model.load_weights(
            (name, tensor.to(self.device, copy=True)) for name, tensor in tensors
        )


class WorkerExtension:
    """Empty. vLLM's option `worker_extension_cls` names it, so that each of vLLM's workers, which
    may be a process of its own, imports this file and so registers the backend below."""


weight_transfer.WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryEngine)
TRAINERS = {"ipc": IPCTrainer, "nccl": NCCLTrainer, "shared_memory": SharedMemoryTrainer}
