"""TODO."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from alignment.args import RLArgs
from alignment.core.records import Batch
from alignment.core.rollout import Rollout
from alignment.core.tokens import take_rows
from alignment.core.train_step import grpo_microbatch_train_step
from alignment.policy.loading import autocast, devices_of
from alignment.policy.log_probs import head_log_probs, hidden_states
from alignment.policy.packing import send
from alignment.policy.placement import issue_order
from alignment.rollouts.collect import distribution

IN_FLIGHT = 2  # micro-batches for each device of a split policy (benchmarks/README.md)


def pipelined(
    begun: Callable[[Sequence[int]], MicroBatch], pieces: Sequence[Sequence[int]], in_flight: int, policy, dtype: torch.dtype
) -> Iterator[MicroBatch]:
    """The micro-batches of some pieces, once they are through a split policy and back, in `issue_order`."""
    devices = devices_of(policy)
    heads_first = policy.get_output_embeddings().weight.device != devices[-1]
    under_way: dict[int, MicroBatch] = {}
    for what, issued in itertools.groupby(issue_order(len(pieces), in_flight, heads_first), key=lambda pair: pair[0]):
        numbers = [number for _, number in issued]
        if what == "forward":
            with autocast(devices[0], dtype):  # one for all of them, so that they share one copy of the weights in `dtype`
                under_way |= {number: begun(pieces[number]) for number in numbers}
        elif what == "head":
            for number in numbers:
                under_way[number].head()
        else:
            for number in numbers:
                done = under_way.pop(number)
                done.backward()
                yield done


class MicroBatch:
    """Some rows on their way through the policy: forward at once, then `head`, then `backward`."""

    def __init__(self, policy, rows: Sequence[int], rollout: Rollout, denominator: float, args: RLArgs, dtype: torch.dtype):
        self.policy, self.rows, self.rollout, self.denominator, self.args = policy, rows, rollout, denominator, args
        self.part = take_rows(rollout.batch, rows)
        self.autocast = functools.partial(autocast, devices_of(policy)[0], dtype)
        with self.autocast():
            self.hidden_NH = hidden_states(policy, self.part.input_ids, self.part.response_mask)

    def head(self) -> None:
        """Log-probs and loss, and the loss's gradient down to what the head was given."""
        self.given_NH = self.hidden_NH.detach().requires_grad_()
        how = distribution(self.args)
        with self.autocast():
            found = head_log_probs(self.policy, self.given_NH, self.part.labels, self.part.response_mask, True, **how)
        loss, sums = train_step(found["log_probs"], self.part, self.rows, self.rollout, self.denominator, self.args)
        self.log_probs = found["log_probs"].detach()
        self.sums = {"loss": loss, "entropy_sum": found["token_entropy"].sum(), **sums}

    def backward(self) -> None:
        """The gradient from there on."""
        self.hidden_NH.backward(self.given_NH.grad)
        del self.hidden_NH, self.given_NH


def train_step(
    log_probs: torch.Tensor, part: Batch, rows: Sequence[int], rollout: Rollout, denominator: float, args: RLArgs
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """`grpo_microbatch_train_step` of some rows of a rollout, by the arguments."""
    there = functools.partial(_take, rows, part.labels.shape[1], log_probs.device)
    return grpo_microbatch_train_step(
        log_probs,
        send(part.response_mask, log_probs.device),
        gradient_accumulation_steps=1,
        loss_type=args.loss_type,
        raw_rewards=there(rollout.raw_rewards_B1),
        advantages=there(rollout.advantages_B1),
        # Where old log-probs are used and there are none, there is one update a rollout, so the old policy is this one.
        old_log_probs=log_probs.detach() if rollout.old_log_probs_BT is None else there(rollout.old_log_probs_BT),
        cliprange=args.cliprange,
        loss_normalization=args.loss_normalization,
        denominator=denominator,
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        reference_log_probs=there(rollout.reference_log_probs_BT),
        sampler_correction=args.sampler_correction,
        correction_cap=args.correction_cap,
        sampler_log_probs=there(rollout.sampler_log_probs_BT),
    )


def _take(rows: Sequence[int], width: int, device: torch.device, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Some rows of a tensor [B, 1] or [B, T], cut to `width`, on their way to `device`."""
    return None if tensor is None else send(tensor[rows, :width], device)
