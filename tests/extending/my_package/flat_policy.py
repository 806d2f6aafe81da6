"""A kind of policy: its weights are in flat buffers, and their gradients likewise; the model's
parameters are views into them."""

import torch

from alignment.policy.single_device import SingleDevicePolicy

BUFFER = 100_000  # numbers in a buffer, before the next one begins


class FlatPolicy(SingleDevicePolicy):
    """A `Policy` (alignment/policy/policy.py) on one device."""

    def __init__(self, config):
        super().__init__(config)
        groups = [[]]
        for parameter in self.model.parameters():
            if sum(p.numel() for p in groups[-1]) > BUFFER:
                groups.append([])
            groups[-1].append(parameter)
        self.buffers = [torch.cat([p.detach().flatten() for p in group]) for group in groups]
        self.gradients = [torch.zeros_like(buffer) for buffer in self.buffers]
        for group, buffer, gradient in zip(groups, self.buffers, self.gradients, strict=True):
            sizes = [p.numel() for p in group]
            for p, weights, grad in zip(
                group, buffer.split(sizes), gradient.split(sizes), strict=True
            ):
                p.data, p.grad = weights.view_as(p), grad.view_as(p)

    def accumulate(self, batch, rows, objective):
        # without rows the gradient stays 0
        return super().accumulate(batch, rows, objective) if rows else iter(())

    def drop_gradient(self):
        for gradient in self.gradients:
            gradient.zero_()

    def gradient(self):
        return torch.cat(self.gradients).cpu()

    def model_on(self, device, dtype):
        return None  # no sampler reads the model in place: each gets the weights by `weights`
