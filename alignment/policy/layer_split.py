"""A policy whose layers are split over several devices by the hand-built device map."""

import itertools
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from alignment.core.records import Batch
from alignment.core.tokens import Row, cut_by_tokens, packed_tokens, rows_by_prompt
from alignment.model.loading import autocast
from alignment.policy.policy import Objective
from alignment.policy.single_device import MicroBatch, SingleDevicePolicy

IN_FLIGHT = 4  # micro-batches for each device, at most (benchmarks/README.md)


class LayerSplitPolicy(SingleDevicePolicy):
    """A `Policy` of one process, split by layers over its devices, with several micro-batches in
    flight so that all are busy. Nothing here waits for a device, so one micro-batch's late layers
    run beside the next ones' early layers."""

    def _micro_batches(
        self, batch: Batch, rows: Sequence[int], split: Sequence[Row], objective: Objective
    ) -> Iterator[tuple]:
        """Each micro-batch in `issue_order`; all in flight together have `micro_batch_tokens`. Rows
        of a prompt stay together where that leaves a micro-batch for each device."""
        devices = len(self.devices)
        groups = rows_by_prompt(split).values()
        lengths = [1]
        tokens_of_groups = [1]
        for prompt, response in split:
            lengths.append(len(prompt) + len(response))
        for numbers in groups:
            tokens_of_groups.append(packed_tokens([split[number] for number in numbers]))
        longest = max(lengths)
        largest = max(tokens_of_groups)

        # Groups that are computed at once if no group is cut. Else rows are counted instead.
        whole_groups = min(len(groups), self.micro_batch_tokens // largest)
        keeps_groups = whole_groups >= devices
        most_in_flight = self.micro_batch_tokens // longest
        if keeps_groups:
            most_in_flight = whole_groups
        in_flight = max(1, min(IN_FLIGHT * devices, most_in_flight))
        # Few rows are cut into no more than a micro-batch for each device, since each takes the
        # host's time.
        even = max(1, -(-packed_tokens(split) // devices))
        if keeps_groups:
            even = max(even, largest)
        pieces = cut_by_tokens(split, min(max(1, self.micro_batch_tokens // in_flight), even))
        head: Any = self.model.get_output_embeddings()
        head_on_last_device = str(head.weight.device) == self.devices[-1]
        started: dict[int, MicroBatch] = {}
        order = issue_order(len(pieces), in_flight, heads_first=not head_on_last_device)
        for action, issued in itertools.groupby(order, key=lambda pair: pair[0]):
            numbers = [number for _, number in issued]
            if action == "forward":
                # one for all of them, so that they share one cast of the weights
                with autocast(self.devices[0], self.dtype):
                    for number in numbers:
                        own_rows = [rows[index] for index in pieces[number]]
                        started[number] = MicroBatch(self, batch, own_rows, objective)
            elif action == "head":
                for number in numbers:
                    started[number].head()
            else:
                for number in numbers:
                    micro_batch = started.pop(number)
                    micro_batch.backward()
                    yield pieces[number], micro_batch

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        """See `Policy.clip_gradient`. Each device sends the norm of its part; torch would copy the
        norm of every parameter."""
        gradients = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                gradients.append(parameter.grad)
        norms = []
        for device in self.devices:
            part = [gradient for gradient in gradients if str(gradient.device) == device]
            if part:
                norms.append(get_total_norm(part))
        norm = get_total_norm(norms)
        clip_grads_with_norm_(self.model.parameters(), max_norm, norm)
        return norm


def issue_order(micro_batches: int, in_flight: int, heads_first: bool) -> Iterator[tuple[str, int]]:
    """("forward", "head" or "backward", number of the micro-batch) in the order in which a step
    issues them.

    In as few blocks as hold at most `in_flight`, all alike: all of a block's forwards, then, from
    the output head and the loss on, what leads back (GPipe, Huang et al. 2019, arXiv:1811.06965). A
    device works in that order; with one in flight, a split model's first device waits through each
    micro-batch's whole way. `heads_first` is for a head off the last layers' device, as a tied one:
    all of a block's heads then come before its backwards, the first of which ends on that device
    too."""
    blocks = max(1, -(-micro_batches // in_flight))
    size = max(1, -(-micro_batches // blocks))
    for start in range(0, micro_batches, size):
        block = range(start, min(start + size, micro_batches))
        forwards = [("forward", number) for number in block]
        heads = [("head", number) for number in block]
        backwards = [("backward", number) for number in block]
        yield from forwards
        if heads_first:
            yield from heads + backwards
        else:
            yield from chain(*zip(heads, backwards, strict=True))
