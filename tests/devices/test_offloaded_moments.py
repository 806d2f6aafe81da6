"""Where the state of an optimiser is that keeps it on the host."""

import pytest
import torch
from simulated_gpus import simulated_gpus

from alignment.policy.single_device import make_optimizer

DEVICES = ("cuda:0", "cuda:1", "cpu")


def test_offloaded_moments_are_on_the_host_wherever_the_weights_are():
    """After a step, and after a resumed one, with the weights that AdamW on the CPU makes."""
    expected = torch.nn.Parameter(torch.ones(8, 4))
    plain = make_optimizer(torch.nn.ParameterList([expected]), 1e-3, 0.1, "adamw")
    for _ in range(2):
        expected.grad = torch.full_like(expected, 0.1)
        plain.step()
    with simulated_gpus(2):
        model = torch.nn.ParameterList([torch.ones(8, 4, device=device) for device in DEVICES])
        optimizer = make_optimizer(model, 1e-3, 0.1, "adamw_cpu_offload")
        for parameter in model:
            parameter.grad = torch.full_like(parameter, 0.1)
        optimizer.step()
        resumed = make_optimizer(model, 1e-3, 0.1, "adamw_cpu_offload")
        resumed.load_state_dict(optimizer.state_dict())
        resumed.step()
        for each in (optimizer, resumed):
            assert [str(parameter.device) for parameter in each.state] == list(DEVICES)
            assert {
                tensor.device.type for values in each.state.values() for tensor in values.values()
            } == {"cpu"}
        for parameter in model:
            assert parameter.detach().cpu().flatten().tolist() == pytest.approx(
                expected.flatten().tolist()
            )
        resumed.zero_grad(set_to_none=True)
        assert all(parameter.grad is None for parameter in model)
