"""A policy on one device. `LayerSplitPolicy` inherits from it and replaces the order of the
micro-batches."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, packed_tokens, take_rows
from alignment.model.frozen import ONE_TOKEN, MicroBatchedModel, computed_rows
from alignment.model.huggingface import PreTrainedModel
from alignment.model.kernel_choice import use_kernels
from alignment.model.loading import (
    autocast,
    devices_of,
    first_device,
    use_liger_kernel,
)
from alignment.model.log_probs import EntropyKind, head_log_probs, hidden_states
from alignment.model.packing import compile_layers, send
from alignment.model.products import one_gradient
from alignment.model.recomputation import recompute_layers, recompute_mlps
from alignment.model.saving import persistent_buffers, save_model
from alignment.model.shards import own_part, whole
from alignment.policy import lora
from alignment.policy.micro_batches import MicroBatchNeed, choose_micro_batch_tokens
from alignment.policy.optimizers import OPTIMIZERS, AdamSettings
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.system.files import guard_library_write
from alignment.system.registry import import_object

OPTIMIZER_FILE = "optimizer.safetensors"  # of a policy of one process


class MicroBatch:
    """The forward and backward pass of some rows of a batch, in three steps. The constructor
    computes the hidden states. `head` computes logits and loss, and backpropagates to the hidden
    states alone, so that the logits' memory is free again. `backward` backpropagates from there to
    the weights. Without rows the gradient is zeros."""

    def __init__(
        self, policy: "SingleDevicePolicy", batch: Batch, rows: Sequence[int], objective: Objective
    ):
        self.model = policy.model
        self.dtype = policy.dtype
        self.rows = rows
        self.objective = objective
        self.part = take_rows(batch, rows) if rows else ONE_TOKEN
        with autocast(first_device(self.model), self.dtype):
            forward = partial(
                hidden_states,
                input_ids=self.part.input_ids,
                response_mask=self.part.response_mask,
            )
            self.hidden_NH = policy.run(forward)

    def head(self) -> None:
        """Compute log-probs and loss, and backpropagate the loss to the hidden states."""
        objective = self.objective
        mask = self.part.response_mask
        self.head_input_NH = self.hidden_NH.detach().requires_grad_()
        with autocast(first_device(self.model), self.dtype):
            outputs = head_log_probs(
                self.model,
                self.head_input_NH,
                self.part.labels,
                mask,
                objective.distribution,
                entropy_kind(objective),
            )
        log_probs = outputs["log_probs"]
        reported: Mapping[str, torch.Tensor] = {}
        if self.rows:
            values = [log_probs, send(mask, log_probs.device)]
            if objective.differentiable_entropy:
                values.append(outputs["token_entropy"])
            loss, reported = objective.loss(self.rows, *values)
        else:
            loss = log_probs.sum() * 0  # It has a graph, and a gradient of zeros.
        loss.backward()
        self.log_probs = log_probs.detach()
        self.sums = {"loss": loss.detach()}
        if objective.entropy:
            self.sums["entropy_sum"] = outputs["token_entropy"].detach().sum()
            self.sums["sampling_entropy_sum"] = outputs["sampling_entropy"].sum()
        self.sums.update(reported)

    def backward(self) -> None:
        """Backpropagate from the hidden states to the weights."""
        self.hidden_NH.backward(self.head_input_NH.grad)
        del self.hidden_NH, self.head_input_NH


def entropy_kind(objective: Objective) -> EntropyKind:
    """Which entropies an objective needs."""
    if objective.differentiable_entropy:
        return "differentiable"
    return "detached" if objective.entropy else "none"


class SingleDevicePolicy(MicroBatchedModel):
    """A `Policy` of one process, on one device. Raises `UserError` for weights that cannot be
    loaded."""

    gathers_weights = False
    """Whether each pass gathers the weights anew, so that no cast of them may outlive it."""

    def __init__(self, config: PolicyConfig):
        self.policy_config = config
        super().__init__(self._load(), getattr(torch, config.dtype), config.micro_batch_tokens)
        # A model with few layers may not use all the devices of its config.
        self.devices = tuple(map(str, devices_of(self.model)))
        self.config = self.model.config
        self.optimizer = make_optimizer(
            self.model, 0.0, config.weight_decay, config.optimizer, config.adam
        )
        if config.compile:
            compile_layers(self.model)
        # This comes after the optimiser has taken the parameters: Liger's check runs the model,
        # after which a sharded model's parameters are gathered ones.
        if config.use_liger_kernel:
            use_liger_kernel(self.model)
        self.kernels = "eager"
        if not config.compile and not config.use_liger_kernel:
            self.kernels = self._use_kernels(config.kernels)
        if config.gradient_checkpointing:
            recompute_layers(self.model)

    def _load(self) -> PreTrainedModel:
        return lora.load_trained_model(self.policy_config, self.policy_config.devices)

    def _use_kernels(self, name: str) -> str:
        """See `use_kernels`."""
        return use_kernels(self.model, name, self.dtype)

    def base_log_probs(self, batch: Batch, distribution: Distribution) -> torch.Tensor:
        with lora.without_adapters(self.model):
            return self.log_probs(batch, distribution)

    def use_adapters(self, kind: Literal["trained", "random"]) -> None:
        lora.use_adapters(self.model, kind)

    def accumulate(
        self, batch: Batch, rows: Sequence[int], objective: Objective
    ) -> Iterator[MicroBatchResult]:
        # With dropout, log-probs are not the sampler's, so only an explicit choice turns it on.
        self.model.train(self.policy_config.dropout)
        # Without rows there may be no micro-batch, which would leave the gradient None, not zeros.
        if not rows:
            for parameter in self.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        split = computed_rows(self.model, batch, rows)  # each row as (prompt, response)
        block = nullcontext() if self.gathers_weights else one_gradient()
        with block:
            for piece, micro_batch in self._micro_batches(batch, rows, split, objective):
                tokens = packed_tokens([split[i] for i in piece])
                yield MicroBatchResult(
                    micro_batch.rows, micro_batch.log_probs, {"tokens": tokens, **micro_batch.sums}
                )

    def _micro_batches(
        self, batch: Batch, rows: Sequence[int], split: Sequence[Row], objective: Objective
    ) -> Iterator[tuple]:
        """Add the gradient of each micro-batch, and then yield its indices into `rows` and the
        `MicroBatch`."""

        def compute(piece: Sequence[int]) -> MicroBatch:
            micro_batch = MicroBatch(self, batch, [rows[i] for i in piece], objective)
            micro_batch.head()
            micro_batch.backward()
            return micro_batch

        return self.in_micro_batches(compute, split, self.model.parameters())

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        return whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm))

    def step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        self.drop_gradient()

    def drop_gradient(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradient(self) -> torch.Tensor:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gradients = []
        for parameter in trained:
            gradient = parameter.grad
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            gradients.append(whole(gradient).flatten().cpu())
        return torch.cat(gradients)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return lora.merged_weights(self.model)

    def model_on(self, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
        changed = (
            self.policy_config.lora_rank
            or self.policy_config.compile
            or self.policy_config.use_liger_kernel
            or self.kernels != "eager"
        )
        if changed or self.devices != (device,) or self.model.dtype != dtype:
            return None
        return self.model

    def choose_micro_batch_tokens(
        self, longest: int, previous: int = 0, processes: int = 1, copied_bytes: int = 0
    ) -> str | None:
        """See `Policy.choose_micro_batch_tokens`. What is inside of MLPs, or whole layers, are
        computed again in backward if the longest row, or the given tokens, do not fit otherwise,
        where `processes` share the device, beside `copied_bytes` of gathered weights."""
        need = MicroBatchNeed(
            longest,
            self.policy_config.gradient_checkpointing,
            self.micro_batch_tokens,
            self.kernels,
        )
        size = choose_micro_batch_tokens(
            self.model, self.optimizer, self.policy_config, need, processes, copied_bytes
        )
        self.micro_batch_tokens = self.micro_batch_tokens or previous or size.tokens
        if size.recomputed_mlps:
            recompute_mlps(self.model, size.recomputed_mlps)
            return (
                "memory is short: what is inside of the MLPs of"
                f" {size.recomputed_mlps} of {self.config.num_hidden_layers} layers is computed"
                " again in backward"
            )
        if not size.checkpointing or self.policy_config.gradient_checkpointing:
            return None
        recompute_layers(self.model)
        return (
            "memory is short: activations are computed again in backward (gradient checkpointing)"
        )

    def save(self, folder: Path, tokenizer) -> None:
        state_dict = None
        # Merged weights are new tensors. They go to the CPU one by one, since an engine that is
        # awake leaves no room for all of them on a GPU.
        if self.policy_config.lora_rank:
            state_dict = {name: tensor.cpu() for name, tensor in self.weights()}
            state_dict.update(persistent_buffers(self.model))
        save_model(self.model, folder, tokenizer, state_dict)
        lora.save(self.model, folder)

    def save_optimizer(self, folder: Path) -> None:
        tensors = {}
        for name, tensor in self.optimizer_tensors():
            tensors[name] = whole(tensor).cpu().contiguous()
        with guard_library_write(folder):
            save_file(tensors, folder / OPTIMIZER_FILE)

    def load_optimizer(self, folder: Path) -> None:
        parameters: list[torch.nn.Parameter] = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        wrote_one_process = (folder / OPTIMIZER_FILE).exists()
        are_whole = all(own_part(parameter) is parameter for parameter in parameters)
        if wrote_one_process and are_whole:
            tensors = load_file(folder / OPTIMIZER_FILE)
        else:
            tensors = read_parts(folder, parameters)
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = tensor
        self.optimizer.load_state_dict(
            {"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]}
        )

    def reset_optimizer(self) -> None:
        self.optimizer.state.clear()

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the optimiser's state; each name begins with the number of its
        parameter."""
        for index, values in self.optimizer.state_dict()["state"].items():
            yield from ((f"{index}.{key}", tensor) for key, tensor in values.items())


def read_parts(folder: Path, parameters: Sequence[torch.nn.Parameter]) -> dict[str, torch.Tensor]:
    """This process's part, on the CPU, of the `optimizer_tensors` in a folder. Raises OSError where
    some are missing."""
    # Imported here: this takes seconds, which a policy of one process saves.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    # Every entry is of a tensor, and has its size and its chunks.
    stored_tensors: Any = reader.read_metadata().state_dict_metadata
    for name, stored in stored_tensors.items():
        parameter = parameters[int(name.partition(".")[0])]
        if stored.size:
            tensors[name] = torch.empty_like(parameter, device="cpu")
        else:
            tensors[name] = torch.empty(())
        # torch would leave the elements of a missing part unset, without an error.
        if sum(part.sizes.numel() for part in stored.chunks) != tensors[name].numel():
            raise OSError(f"{folder}: parts of {name} are missing")
    with warnings.catch_warnings(action="ignore"):  # The warning says that no ranks take part.
        load_checkpoint(tensors, storage_reader=reader, no_dist=True)
    return tensors


def make_optimizer(
    model: torch.nn.Module,
    lr: float,
    weight_decay: float,
    kind: str = "adamw",
    adam: AdamSettings = AdamSettings(),  # noqa: B008, it is frozen
) -> torch.optim.Optimizer:
    """An optimiser of the entry `kind` in `OPTIMIZERS`, with Adam's numbers `adam`, for the
    parameters that need a gradient. Weight decay is for matrices and stacks of them alone. The list
    "hidden" of a group has a bool for each of its parameters: whether it is one matrix, and neither
    an embedding nor the output head."""
    entry = OPTIMIZERS[kind]
    # A module that is no language model has no head.
    find_head = getattr(model, "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    embeddings_and_head = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) or module is head:
            embeddings_and_head.add(module.weight)
    named = model.named_parameters()
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    matrices = [parameter for name, parameter in trained if _is_matrix(name, parameter)]
    vectors = [parameter for name, parameter in trained if not _is_matrix(name, parameter)]
    hidden = [matrix.ndim == 2 and matrix not in embeddings_and_head for matrix in matrices]
    groups = [
        {"params": matrices, "weight_decay": weight_decay, "hidden": hidden},
        {"params": vectors, "weight_decay": 0.0, "hidden": [False] * len(vectors)},
    ]
    optimizer_class: Any = import_object("--optimizer", entry.path)
    betas = (adam.beta1, adam.beta2)
    return optimizer_class(groups, lr=lr, betas=betas, eps=adam.eps, **entry.options)


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a matrix, or a stack of some. Of vectors there are stacks, too: the
    biases of a mixture's experts, and the logarithms of A of Mamba's channels, each a diagonal
    matrix (Gu & Dao 2023, arXiv:2312.00752, section 3.6)."""
    last_name = name.rpartition(".")[2]
    is_stack_of_vectors = last_name in ("bias", "A_log") or last_name.endswith("_bias")
    return parameter.ndim >= 2 and not is_stack_of_vectors
