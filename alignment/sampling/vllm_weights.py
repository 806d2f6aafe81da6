"""New weights for a vLLM engine by vLLM's weight transfer API, with a backend of ours for the host's memory. Trainer and engine
import this file, and with it a part of vLLM: in a trainer that takes 4 to 6 s and 70 MB, starts no thread, and changes how
torch.compile works. Without vLLM, a trainer would repeat formats that are each version's own."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import torch
from vllm.distributed import weight_transfer
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.base import TrainerInitInfo
from vllm.distributed.weight_transfer.packed_tensor import unpack_tensor
from vllm.utils.network_utils import get_open_port

from alignment.sampling.sampler import SamplerConfig, SamplerLost

BUCKET_BYTES = 2**27  # of tensors that travel together; more where one tensor is larger


class PolicySource(weight_transfer.WeightSource):
    """The weights of one update, each gathered, cast and moved to `device` when its turn comes. NCCL and CUDA IPC need names
    and shapes before: there the first update passes through the host's memory as a whole."""

    def __init__(self, dtype: torch.dtype, device: str):
        self.dtype, self.device, self.tensors, self._metadata = dtype, device, (), None

    def metadata(self) -> list[weight_transfer.ParamMeta]:
        if self._metadata is None:
            self.tensors = [(name, tensor.cpu()) for name, tensor in self]
            self._metadata = [weight_transfer.ParamMeta(name, each.dtype, tuple(each.shape)) for name, each in self.tensors]
        return self._metadata

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors:
            yield name, tensor.detach().to(self.dtype).to(self.device)  # cast where it is, so that fewer bytes travel


class EngineClient:
    """The trainer's side of an engine, and the `VLLMWeightSyncClient` by which vLLM's trainer side asks that engine.
    `ask("transfer", phase, *arguments)` asks its process, and raises `SamplerLost` where that takes too long."""

    def __init__(self, ask: Callable, config: SamplerConfig, dtype: torch.dtype):
        self._ask, self._config, self._backend = ask, config, config.transfer_backend
        self._device = torch.device("cpu" if self._backend == "shared_memory" else config.policy_device)
        self._source, self._version, self._lost, self._trainer = PolicySource(dtype, self._device), "", None, None

    def send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Replace the engine's weights."""
        self._source.tensors, self._version = named_tensors, str(version)
        try:
            with torch.accelerator.device_index(self._device.index):
                if self._device.type == "cuda":
                    torch.cuda.synchronize()  # vLLM reads the weights on streams of its own
                if self._trainer is None:
                    factory = weight_transfer.WeightTransferTrainerFactory
                    self._trainer = factory.trainer_init(self._init_info(), client=self, source=self._source)
                self._trainer.send_weights()
        except Exception as error:
            raise self._lost or error from None

    def _init_info(self) -> TrainerInitInfo:
        if self._backend == "shared_memory":
            return SharedMemoryInitInfo(rank=0)
        bytes_of_each = [meta.dtype.itemsize * torch.Size(meta.shape).numel() for meta in self._source.metadata()]
        packed = {"packed": True, "packed_buffer_size_bytes": max(BUCKET_BYTES, *bytes_of_each), "rank": 0}
        if self._backend == "ipc":
            return ipc_engine.IPCTrainerInitInfo(**packed)
        return nccl_engine.NCCLTrainerInitInfo("127.0.0.1", get_open_port(), 1 + len(self._config.devices), **packed)

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
                self._trainer.shutdown()  # ends a broadcast that waits for the engine in another thread
            raise


class SharedMemoryInitInfo(TrainerInitInfo):
    backend = "shared_memory"


class SharedMemoryTrainer(weight_transfer.TrainerWeightTransferEngine[SharedMemoryInitInfo]):
    """Fills a bucket and has the engine load it, by turns. It is memory without a name, which ends with its processes."""

    @classmethod
    def trainer_init(cls, init_info: SharedMemoryInitInfo, *, client, source=None):
        trainer = cls(client=client, source=source)
        trainer.file, trainer.bucket = os.fdopen(os.memfd_create("weights"), "wb"), torch.empty(0, dtype=torch.uint8)
        client.init_weight_transfer_engine({"packed": True})
        return trainer

    def send_weights(self) -> None:
        self.client.start_weight_update()
        bucket: list[tuple[str, torch.Tensor]] = []
        for name, tensor in self.source:
            if bucket and tensor.nbytes + sum(earlier.nbytes for _, earlier in bucket) > BUCKET_BYTES:
                self._send_bucket(bucket)
                bucket = []
            bucket.append((name, tensor))
        if bucket:
            self._send_bucket(bucket)
        self.client.finish_weight_update()

    def _send_bucket(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        names, tensors = [name for name, _ in named_tensors], [tensor for _, tensor in named_tensors]
        sizes, path = [tensor.nbytes for tensor in tensors], f"/proc/{os.getpid()}/fd/{self.file.fileno()}"
        if sum(sizes) > len(self.bucket):
            os.posix_fallocate(self.file.fileno(), 0, sum(sizes))  # else a process is killed where memory is short
            self.bucket = torch.from_file(path, True, sum(sizes), dtype=torch.uint8)
        for place, tensor in zip(self.bucket[: sum(sizes)].split(sizes), tensors, strict=True):
            place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        types, shapes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors], [list(each.shape) for each in tensors]
        handle = {"bucket": (path, True, sum(sizes))}
        update = ipc_engine.IPCWeightTransferUpdateInfo(names, types, shapes, handle, tensor_sizes=sizes)
        self.client.update_weights(asdict(update))


class SharedMemoryEngine(ipc_engine.IPCWeightTransferEngine):
    """A worker's side: vLLM's own for CUDA IPC, but for the handle, which is a file's name."""

    def update_weights(self, update_info: dict) -> None:  # vLLM's own waits for a GPU afterwards, too
        info = self.parse_update_info(update_info)
        bucket = torch.from_file(*info.ipc_handles["bucket"], dtype=torch.uint8)
        types = [getattr(torch, name) for name in info.dtype_names]
        # Copies, since vLLM keeps the tensors of a layer that is not complete while the bucket is filled again.
        parts = unpack_tensor(bucket, info.names, info.shapes, types, info.tensor_sizes)
        self.model.load_weights((name, part.to(self.device, copy=True)) for name, part in parts)


class WorkerExtension:
    """Has each of vLLM's workers, which may be processes of vLLM's own, import this file and so know the backend."""


weight_transfer.WeightTransferEngineFactory.register_engine("shared_memory", SharedMemoryEngine)
weight_transfer.WeightTransferTrainerFactory.register_engine("shared_memory", SharedMemoryTrainer)
