"""A policy on one device. `LayerSplitPolicy` inherits from it and replaces the order of the micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from alignment.core.records import Batch, Distribution
from alignment.core.tokens import Row, packed_tokens, take_rows
from alignment.policy.frozen import batch_log_probs, computed_rows, model_log_probs
from alignment.policy.huggingface import PreTrainedModel
from alignment.policy.loading import autocast, first_device, load_model
from alignment.policy.log_probs import head_log_probs, hidden_states
from alignment.policy.memory import choose_micro_batch_tokens, whole
from alignment.policy.optimizers import make_optimizer
from alignment.policy.packing import send
from alignment.policy.parallel_micro_batches import cut_for_parallel, run_parallel
from alignment.policy.policy import MicroBatchResult, Objective, PolicyConfig
from alignment.system.files import full_disk_is_an_os_error


class MicroBatch:
    """The forward and backward pass of some rows of a batch: the constructor, then `head`, then `backward`. `head`
    backpropagates to the hidden states only, which frees the head's memory before the backward pass of the layers. Supervised
    objectives keep one graph from the weights to the loss instead."""

    def __init__(self, policy: "SingleDevicePolicy", batch: Batch, rows: Sequence[int], objective: Objective):
        self.model, self.dtype, self.rows, self.objective = policy.model, policy.dtype, rows, objective
        self.part = take_rows(batch, rows)
        with autocast(first_device(self.model), self.dtype):
            self.hidden_NH = policy.run(hidden_states, self.part.input_ids, self.part.response_mask)

    def head(self) -> None:
        """Compute log-probs and loss, and backpropagate the loss to the hidden states."""
        one_graph, objective = self.objective.supervised, self.objective
        self.head_input_NH = self.hidden_NH if one_graph else self.hidden_NH.detach().requires_grad_()
        labels, mask = self.part.labels, self.part.response_mask
        with autocast(first_device(self.model), self.dtype):
            outputs = head_log_probs(self.model, self.head_input_NH, labels, mask, objective.distribution, objective.entropy)
        log_probs = outputs["log_probs"]
        loss, sums = objective.loss(self.rows, log_probs, send(mask, log_probs.device))
        loss.backward()
        names = {"entropy_sum": "token_entropy", "sampling_entropy_sum": "sampling_entropy"} if objective.entropy else {}
        entropy = {name: outputs[values].sum() for name, values in names.items()}
        self.log_probs, self.sums = log_probs.detach(), {"loss": loss.detach(), **entropy, **sums}

    def backward(self) -> None:
        """Backpropagate from the hidden states to the weights."""
        if not self.objective.supervised:
            self.hidden_NH.backward(self.head_input_NH.grad)
        del self.hidden_NH, self.head_input_NH

    def result(self, tokens: int) -> MicroBatchResult:
        """The record that `Policy.accumulate` yields; `tokens` is the number of computed tokens."""
        return MicroBatchResult(self.rows, self.log_probs, {"tokens": tokens, **self.sums})


class SingleDevicePolicy:
    """A `Policy` of one process, on one device. Raises `UserError` for weights that cannot be loaded."""

    def __init__(self, config: PolicyConfig):
        self.policy_config = config
        self.devices = config.devices
        self.dtype = getattr(torch, config.dtype)
        self.micro_batch_tokens = config.micro_batch_tokens
        self.model = self._load(config.model_path)
        self.config = self.model.config
        self.optimizer = make_optimizer(self.model, 0.0, config.weight_decay, config.optimizer)

    def _load(self, model_path: str) -> PreTrainedModel:
        return load_model(model_path, self.devices, torch.float32)

    def run(self, function: Callable, *arguments):
        """`function` of the model and some arguments: a forward pass, or a part of one."""
        return function(self.model, *arguments)

    def log_probs(self, batch: Batch, distribution: Distribution, rows: Sequence[int] | None = None) -> torch.Tensor:
        self.model.eval()  # dropout would make the ratio to these differ from 1
        return batch_log_probs(self.model, batch, distribution, self.micro_batch_tokens, self.dtype, rows)

    def accumulate(self, batch: Batch, rows: Sequence[int], objective: Objective) -> Iterator[MicroBatchResult]:
        self.model.train()
        if not rows:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        split = computed_rows(self.model, batch, rows, objective.supervised)
        for micro_batch, piece in self._micro_batches(batch, rows, split, objective):
            yield micro_batch.result(packed_tokens([split[i] for i in piece]))

    def _micro_batches(
        self, batch: Batch, rows: Sequence[int], split: Sequence[Row], objective: Objective
    ) -> Iterator[tuple[MicroBatch, Sequence[int]]]:
        """Yield each micro-batch, after adding its gradient, with its indices into `rows`. A CPU may compute two at a time."""

        def compute(piece: Sequence[int]) -> MicroBatch:
            micro_batch = MicroBatch(self, batch, [rows[i] for i in piece], objective)
            micro_batch.head()
            micro_batch.backward()
            return micro_batch

        pieces, parallel = cut_for_parallel(self.model, split, self.micro_batch_tokens)
        return zip(run_parallel(compute, pieces, parallel, self.model.parameters()), pieces, strict=True)

    def supervised_log_probs(self, batch: Batch) -> Iterator[torch.Tensor]:
        self.model.eval()
        rows = range(len(batch.labels))
        pieces, parallel = cut_for_parallel(self.model, computed_rows(self.model, batch, rows, True), self.micro_batch_tokens)

        @torch.no_grad()
        def compute(piece: Sequence[int]) -> torch.Tensor:
            return model_log_probs(self.model, take_rows(batch, piece), Distribution(), self.dtype)

        return run_parallel(compute, pieces, parallel)

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
        return torch.cat([whole(torch.zeros_like(p) if p.grad is None else p.grad).flatten().cpu() for p in trained])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, whole(parameter.detach())) for name, parameter in self.model.named_parameters())

    def model_on(self, device: str, dtype: torch.dtype) -> PreTrainedModel | None:
        return self.model if self.devices == (device,) and self.model.dtype == dtype else None

    def choose_micro_batch_tokens(self, longest: int, previous: int = 0) -> str | None:
        """See `Policy.choose_micro_batch_tokens`. Turns gradient checkpointing on if the longest row does not fit without."""
        if self.micro_batch_tokens:
            return None
        budget = choose_micro_batch_tokens(self.model, self.optimizer, self.policy_config.optimizer, self.dtype, longest)
        self.micro_batch_tokens = previous or budget.tokens
        if not budget.checkpointing:
            return None
        self.model.gradient_checkpointing_enable({"use_reentrant": False})
        return "memory is short: activations are computed again in backward (gradient checkpointing)"

    def save(self, folder: Path, tokenizer) -> None:
        self.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def optimizer_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the optimiser's state; each name begins with the number of its parameter."""
        for index, values in self.optimizer.state_dict()["state"].items():
            yield from ((f"{index}.{key}", whole(tensor).cpu()) for key, tensor in values.items())

    def save_optimizer(self, file: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in self.optimizer_tensors()}
        with full_disk_is_an_os_error(file):
            save_file(tensors, file)

    def load_optimizer(self, file: Path) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for name, tensor in load_file(file).items():
            index, _, key = name.partition(".")
            state.setdefault(int(index), {})[key] = self.stored(parameters[int(index)], tensor)
        self.optimizer.load_state_dict({"state": state, "param_groups": self.optimizer.state_dict()["param_groups"]})

    def stored(self, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the optimiser's state for a parameter, as this policy keeps it."""
        return tensor
