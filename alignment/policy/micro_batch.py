"""One micro-batch on its way through a policy's model: hidden states, then log-probs and loss, then the gradient."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from alignment.core.records import Batch
from alignment.core.tokens import take_rows
from alignment.policy.loading import autocast, first_device
from alignment.policy.log_probs import head_log_probs, hidden_states
from alignment.policy.packing import send
from alignment.policy.policy import MicroBatchResult, Objective


class MicroBatch:
    """Some rows of a batch. The constructor computes their hidden states; `head`, then `backward` do the rest.

    The head's backward ends at the hidden states, so that the head's memory is free again before the layers' backward begins.
    Supervised objectives keep one graph from the weights to the loss instead.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, batch: Batch, rows: Sequence[int], objective: Objective):
        self.model, self.dtype, self.rows, self.objective = model, dtype, rows, objective
        self.part = take_rows(batch, rows)
        with autocast(first_device(model), dtype):
            self.hidden_NH = hidden_states(model, self.part.input_ids, self.part.response_mask)

    def head(self) -> None:
        """Log-probs and loss, and the loss's gradient down to the hidden states."""
        one_graph, objective = self.objective.supervised, self.objective
        self.head_input_NH = self.hidden_NH if one_graph else self.hidden_NH.detach().requires_grad_()
        labels, mask = self.part.labels, self.part.response_mask
        with autocast(first_device(self.model), self.dtype):
            outputs = head_log_probs(self.model, self.head_input_NH, labels, mask, objective.distribution, objective.entropy)
        log_probs = outputs["log_probs"]
        loss, sums = objective.loss(self.rows, log_probs, send(mask, log_probs.device))
        loss.backward()
        entropy = {"entropy_sum": outputs["token_entropy"].sum()} if objective.entropy else {}
        self.log_probs, self.sums = log_probs.detach(), {"loss": loss.detach(), **entropy, **sums}

    def backward(self) -> None:
        """The gradient from the hidden states on."""
        if not self.objective.supervised:
            self.hidden_NH.backward(self.head_input_NH.grad)
        del self.hidden_NH, self.head_input_NH

    def result(self, tokens: int) -> MicroBatchResult:
        """What the caller of `Policy.accumulate` sees; `tokens` is the number that was computed."""
        return MicroBatchResult(self.rows, self.log_probs, {"tokens": tokens, **self.sums})
