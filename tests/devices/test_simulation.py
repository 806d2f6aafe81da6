"""The simulation itself: it raises where a GPU would, computes what the CPU computes, and leaves
nothing behind."""

import copy
import threading

import pytest
import torch
from simulated_gpus import DeviceMismatch, simulated_gpus
from torch.nn.functional import scaled_dot_product_attention

aten = torch.ops.aten


def host() -> torch.Tensor:
    return torch.arange(6.0).view(2, 3)


def device(index: int = 0) -> torch.Tensor:
    return host().to(f"cuda:{index}")


MIXINGS = {
    "a sum": lambda: device() + host(),
    "a product of matrices": lambda: device() @ host().T,
    "two GPUs": lambda: device(0) * device(1),
    "a number of a GPU on the host": lambda: host() * torch.tensor(2.0, device="cuda"),
    "an index of a GPU into the host's": lambda: host()[torch.tensor([0], device="cuda")],
    "a mask of a GPU on the host's": lambda: host()[device() > 1],
    "an index of another GPU": lambda: device(0)[torch.tensor([0], device="cuda:1")],
    "values of the host put into a GPU's": (
        lambda: device().index_put_((torch.tensor([0]),), torch.ones(3))
    ),
    "gather": lambda: device().gather(1, torch.zeros(2, 1, dtype=torch.int64)),
    "index_select": lambda: device().index_select(0, torch.tensor([0])),
    "index_add": lambda: device().index_add_(0, torch.tensor([0], device="cuda"), torch.ones(1, 3)),
    "a concatenation": lambda: torch.cat([device(), host()]),
    "a choice": lambda: torch.where(device() > 1, device(), host()),
    "an embedding": lambda: torch.nn.functional.embedding(torch.tensor([0]), device()),
    "a linear layer": lambda: torch.nn.Linear(3, 1).cuda()(host()),
    "an optimiser's lists": lambda: torch._foreach_add_([device()], [host()]),
    "a generator of the host": lambda: torch.rand(3, device="cuda", generator=torch.Generator()),
    "a draw by a generator of the host": lambda: device().exponential_(generator=torch.Generator()),
    "a GPU's numbers to NumPy": lambda: device().numpy(),
    "a GPU that is not there": lambda: torch.ones(1, device="cuda:7"),
}


@pytest.mark.parametrize("mixing", MIXINGS.values(), ids=MIXINGS)
def test_what_a_gpu_refuses_is_refused(mixing):
    with simulated_gpus(2), pytest.raises((DeviceMismatch, TypeError, RuntimeError)):
        mixing()


ALLOWED = {
    "a number of the host": (lambda: device() * torch.tensor(2.0), "cuda:0"),
    "an index of the host": (lambda: device(1)[torch.tensor([1])], "cuda:1"),
    "a mask of the host": (lambda: device()[host() > 1], "cuda:0"),
    "a number put by an index of the host": (
        lambda: device().index_put_((torch.tensor([0]),), torch.tensor(0.0)),
        "cuda:0",
    ),
    "a copy between devices": (lambda: host().copy_(device()), "cpu"),
    "a move and back": (lambda: device(1).cpu(), "cpu"),
    "like another": (lambda: torch.zeros_like(device(1)), "cuda:1"),
    "like another, on the host": (lambda: torch.zeros_like(device(1), device="cpu"), "cpu"),
    "a view": (lambda: device(1).T[:1], "cuda:1"),
    "a copy of an object": (
        lambda: copy.deepcopy(torch.nn.Linear(2, 2).to("cuda:1")).weight,
        "cuda:1",
    ),
}


@pytest.mark.parametrize(("made", "expected"), ALLOWED.values(), ids=ALLOWED)
def test_what_a_gpu_allows_is_allowed_and_says_where_it_is(made, expected):
    with simulated_gpus(2):
        assert str(made().device) == expected
        assert made().is_cuda == (expected != "cpu")


def test_gradients_are_the_cpus_and_go_back_to_where_the_weights_are():
    weight, inputs = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    with simulated_gpus(2):
        on_gpu = weight.to("cuda:0").requires_grad_()
        loss = ((on_gpu * inputs.to("cuda:0")).to("cuda:1") ** 2).sum()
        loss.backward()
        assert str(loss.device) == "cuda:1" and str(on_gpu.grad.device) == "cuda:0"
        assert on_gpu.grad.tolist() == [18.0, 64.0]  # 2 w x^2


def test_a_fault_in_a_backward_pass_is_seen():
    class Faulty(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.ones(2)

    with simulated_gpus(1):
        tensor = torch.ones(2, device="cuda", requires_grad=True)
        with pytest.raises(DeviceMismatch):
            Faulty.apply(tensor).sum().backward()


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_stand_in_of_efficient_attention_is_attention(is_causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    expected = scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    with simulated_gpus(1):
        given = [tensor.detach().cuda() for tensor in (q, k, v)]
        out, log_sum, *seeds = aten._scaled_dot_product_efficient_attention(
            *given, None, True, 0.0, is_causal
        )
        assert log_sum.shape == (2, 3, 32) and out.is_cuda
        options = (*seeds, 0.0, [True, True, True, False], is_causal)
        found = aten._scaled_dot_product_efficient_attention_backward(
            2 * out, *given, None, out, log_sum, *options
        )
        torch.testing.assert_close(out.cpu(), expected.detach())
        for tensor, gradient in zip(found, gradients, strict=False):
            torch.testing.assert_close(tensor.cpu(), gradient, rtol=1e-4, atol=1e-5)


def test_threads_see_the_gpus_and_nothing_stays_behind():
    seen = []
    with simulated_gpus(1):
        thread = threading.Thread(target=lambda: seen.append(str(device().device)))
        thread.start()
        thread.join()
    assert seen == ["cuda:0"]
    assert not torch.cuda.is_available() and str(torch.ones(1).device) == "cpu"
