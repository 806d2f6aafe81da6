"""Old and reference log-probs of a rollout: the other policies that a loss compares with."""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future

import torch

from alignment.core.records import Batch, Distribution, Rollout
from alignment.policy.frozen import FrozenModel
from alignment.policy.policy import Policy
from alignment.system.clock import Clock, start_in_background
from alignment.training.config import UpdateConfig
from alignment.training.update import rows_with_gradient

ReferenceLogProbs = Callable[[Batch, Distribution, int], torch.Tensor]
"""Log-probs [B, T] of a batch's responses, by the frozen model that training started from, wherever it runs: the KL penalty
keeps the policy near it. Called with the batch, the distribution, and the tokens of a micro-batch."""


class References:
    """Adds old and reference log-probs to rollouts, where the loss needs them. `old_policy` is the policy as it was when the
    rollout was sampled, on a device of its own; None where the policy itself serves, before its first update. A reference that
    works `in_background`, in another process, is called in a thread."""

    def __init__(
        self, config: UpdateConfig, old_policy: FrozenModel | None, reference: ReferenceLogProbs | None, clock: Clock,
        in_background: bool = False,
    ):  # fmt: skip
        self.config, self.old_policy, self.reference, self.clock = config, old_policy, reference, clock
        self.in_background = in_background
        self._requests: dict[int, Future[torch.Tensor]] = {}

    def request(self, step: int, batch: Batch, micro_batch_tokens: int) -> None:
        """Have a reference that works `in_background` begin with a step's batch; `annotate` waits for what it computes."""
        if self.in_background and step not in self._requests:
            question = (batch, self.config.distribution, micro_batch_tokens)
            self._requests[step] = start_in_background(lambda: self.reference(*question))

    def annotate(self, rollout: Rollout, policy: Policy, step: int) -> Rollout:
        """The rollout with `old_log_probs_BT` and `reference_log_probs_BT`, as far as the loss needs them."""
        self.request(step, rollout.batch, policy.micro_batch_tokens)
        if self.config.old_log_probs == "sampler":
            rollout = dataclasses.replace(rollout, old_log_probs_BT=rollout.sampler_log_probs_BT)
        elif self.config.old_log_probs == "policy":
            with self.clock("old_log_probs"):
                rollout = dataclasses.replace(rollout, old_log_probs_BT=self._old_log_probs(rollout, policy))
        if self.reference is not None:
            with self.clock("reference"):
                request = self._requests.pop(step, None)
                question = (rollout.batch, self.config.distribution, policy.micro_batch_tokens)
                log_probs_BT = request.result() if request else self.reference(*question)
                rollout = dataclasses.replace(rollout, reference_log_probs_BT=log_probs_BT)
        return rollout

    def _old_log_probs(self, rollout: Rollout, policy: Policy) -> torch.Tensor:
        rows = rows_with_gradient(rollout, self.config)
        if self.old_policy is None:
            return policy.log_probs(rollout.batch, self.config.distribution, rows)
        self.old_policy.load_weights(policy.weights())
        return self.old_policy.log_probs(rollout.batch, self.config.distribution, policy.micro_batch_tokens, rows)
