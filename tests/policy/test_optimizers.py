"""The optimisers of --optimizer: that they train as AdamW does, where their state is, and how big."""

import math
import sys
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

from alignment import args as arguments
from alignment import plan
from alignment.args import RLArgs, parse
from alignment.policy.loading import load_model, load_tokenizer, make_optimizer, set_learning_rate
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import TRAINED_BYTES, place
from alignment.runs.checkpoint import OPTIMIZER, load_optimizer, save_checkpoint
from alignment.system.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tiny_folder):
    return load_tokenizer(str(tiny_folder))


def trained(folder, kind: str, steps: int):
    """The tiny model after some steps with clipped gradients and a moving rate, its optimiser, and the losses on the way."""
    model = load_model(str(folder), ("cpu",), torch.float32)
    optimizer = make_optimizer(model, 1.0, 0.1, kind)
    return model, optimizer, [train_once(model, optimizer, step) for step in range(steps)]


def train_once(model, optimizer, step: int) -> float:
    ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step % 3))
    loss = model(ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    set_learning_rate(optimizer, 1e-3 * (1 + step % 2))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())
    return loss.item()


def test_the_names_are_those_of_the_flag(capsys):
    assert get_args(arguments.Optimizer) == tuple(OPTIMIZERS) == tuple(TRAINED_BYTES)
    assert RLArgs().optimizer == "adamw"
    with pytest.raises(SystemExit) as stop:
        parse(RLArgs, ["--optimizer", "sgd"])
    assert stop.value.code == 2
    assert "--optimizer" in capsys.readouterr().err


def test_without_torchao_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(UserError, match="^--optimizer adamw_8bit needs torchao: .*`uv run --extra torchao ...`$"):
        RLArgs(optimizer="adamw_8bit")


@pytest.mark.parametrize("copied", [False, True])
def test_offloaded_steps_are_those_of_adamw_bit_for_bit(tiny_folder, monkeypatch, copied):
    expected, _, losses = trained(tiny_folder, "adamw", 5)
    if copied:  # as from a GPU: the step is made on copies, and only what is brought back counts
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    found, _, same = trained(tiny_folder, "adamw_cpu_offload", 5)
    assert same == losses
    for one, other in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.skipif(torch.version.cuda is None, reason="simulated GPUs need the CUDA build of torch")
def test_offloaded_moments_are_on_the_cpu_wherever_the_weights_are(monkeypatch):
    # Fake tensors have a device and no data, and refuse to meet across devices.
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.empty(8, 4, device=device) for device in ("cuda:0", "cuda:1", "cpu")])
        optimizer = make_optimizer(model, 1e-3, 0.1, "adamw_cpu_offload")
        for p in model:
            p.grad = torch.zeros_like(p)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        resumed = make_optimizer(model, 1e-3, 0.1, "adamw_cpu_offload")
        resumed.load_state_dict(optimizer.state_dict())
        for each in (optimizer, resumed):
            each.step()
            assert [str(p.device) for p in each.state] == ["cuda:0", "cuda:1", "cpu"]
            assert {t.device.type for values in each.state.values() for t in values.values()} == {"cpu"}
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_optimizer_goes_on_bit_for_bit(tiny_folder, tokenizer, tmp_path, kind):
    model, optimizer, _ = trained(tiny_folder, kind, 3)
    save_checkpoint(tmp_path / "one", model, tokenizer, optimizer)
    again = load_model(str(tmp_path / "one"), ("cpu",), torch.float32)
    resumed = make_optimizer(again, 1.0, 0.1, kind)
    load_optimizer(tmp_path / "one", resumed)
    for m, o, name in ((model, optimizer, "whole"), (again, resumed, "resumed")):
        train_once(m, o, 3)
        save_checkpoint(tmp_path / name, m, tokenizer, o)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    whole, other = (load_file(tmp_path / name / OPTIMIZER) for name in ("whole", "resumed"))
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in whole)


def test_8bit_trains_as_adamw_within_half_a_percent(tiny_folder):
    _, _, plain = trained(tiny_folder, "adamw", 30)
    _, optimizer, rounded = trained(tiny_folder, "adamw_8bit", 30)
    assert plain[-1] < plain[0] / 2  # there is something to compare
    assert rounded == pytest.approx(plain, rel=0.005)
    assert rounded != plain
    assert optimizer.param_groups[0]["lr"] == 2e-3  # the number that was set, not a rounded tensor


def test_8bit_moments_take_a_quarter():
    matrix, vector = torch.nn.Parameter(torch.ones(512, 512)), torch.nn.Parameter(torch.ones(512))
    optimizer = make_optimizer(torch.nn.ParameterList([matrix, vector]), 1e-3, 0.0, "adamw_8bit")
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    optimizer.step()
    sizes = [sum(t.nbytes for t in values.values()) for values in optimizer.state_dict()["state"].values()]
    # Twice: codes, a scale for each block of 256, a table of 256 numbers; and the step.
    assert sizes[0] == 2 * (512**2 + 4 * 512**2 // 256 + 4 * 256) + 4
    assert math.isclose(sizes[0] / (8 * 512**2), 0.25, rel_tol=0.02)
    assert sizes[1] == 8 * 512 + 4  # too small to be worth rounding
    # Adam's first step is the learning rate, whatever the gradient.
    torch.testing.assert_close(matrix.data, torch.full((512, 512), 1 - 1e-3), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ([], {"policy": 16}),
        (["--optimizer", "adamw_cpu_offload"], {"policy": 8, "moments": 8}),
        (["--optimizer", "adamw_8bit"], {"policy": 10}),
        (["--preset", "countdown_qwen2.5_3b"], {"policy": 8, "moments": 8}),
    ],
)
def test_the_plan_counts_the_moments(tiny_folder, monkeypatch, flags, found):
    shares = []
    monkeypatch.setattr(plan, "place", lambda *how: shares.extend(place(*how)) or shares)
    monkeypatch.setattr(
        "sys.argv", ["plan", "--model", str(tiny_folder), "--num_gpus", "1", "--sampler", "transformers", *flags]
    )
    plan.main()
    parameters = 466_304
    assert {s.role: s.bytes / parameters for s in shares if s.role in ("policy", "moments")} == found
    assert {s.device for s in shares if s.role == "moments"} <= {"cpu"}
