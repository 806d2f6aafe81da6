"""The optimisers of --optimizer: that they train as AdamW does, where their state is, and how
big."""

import math
import sys

import pytest
import torch

from alignment import plan
from alignment.args import RLArgs, parse
from alignment.config.flag import flags_of_class
from alignment.planning.placement import place
from alignment.policy.muon import orthogonalize
from alignment.policy.optimizers import OPTIMIZERS, AdamSettings
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy, make_optimizer
from alignment.system.errors import UserError
from benchmarks.families import family_model


def trained(folder, kind: str, steps: int) -> tuple[SingleDevicePolicy, list[float]]:
    """The tiny model after some steps with clipped gradients and a changing learning rate, and the
    losses of these steps."""
    policy = SingleDevicePolicy(
        PolicyConfig(str(folder), ("cpu",), "float32", kind, weight_decay=0.1)
    )
    return policy, [train_once(policy, step) for step in range(steps)]


def train_once(policy: SingleDevicePolicy, step: int) -> float:
    ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step % 3))
    loss = policy.model(ids, labels=ids).loss
    loss.backward()
    policy.clip_gradient(0.5)
    policy.step(1e-3 * (1 + step % 2))
    assert all(p.grad is None for p in policy.model.parameters())
    return loss.item()


def test_the_names_are_those_of_the_flag():
    assert flags_of_class(RLArgs)["optimizer"].choices == tuple(OPTIMIZERS)
    assert RLArgs().optimizer == "adamw"
    with pytest.raises(
        UserError, match="--optimizer sgd: choose one of adamw, adamw_cpu_offload, adamw_8bit, muon"
    ):
        parse(RLArgs, ["--optimizer", "sgd"])


def test_without_torchao_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        UserError, match="^--optimizer adamw_8bit needs torchao: .*`uv run --extra torchao ...`$"
    ):
        RLArgs(optimizer="adamw_8bit")


@pytest.mark.parametrize("copied", [False, True])
def test_offloaded_steps_are_those_of_adamw_bit_for_bit(tiny_folder, monkeypatch, copied):
    expected, losses = trained(tiny_folder, "adamw", 5)
    if copied:  # as from a GPU: the step is made on copies, and only what is brought back counts
        monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    offloaded, same = trained(tiny_folder, "adamw_cpu_offload", 5)
    assert same == losses
    for (name, one), (_, other) in zip(expected.weights(), offloaded.weights(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.slow
def test_8bit_trains_as_adamw_within_half_a_percent(tiny_folder):
    _, plain = trained(tiny_folder, "adamw", 30)
    policy, rounded = trained(tiny_folder, "adamw_8bit", 30)
    assert plain[-1] < plain[0] / 2  # there is something to compare
    assert rounded == pytest.approx(plain, rel=0.005)
    assert rounded != plain
    # the number that was set, not a rounded tensor
    assert policy.optimizer.param_groups[0]["lr"] == 2e-3


def test_8bit_moments_take_a_quarter():
    matrix, vector = torch.nn.Parameter(torch.ones(512, 512)), torch.nn.Parameter(torch.ones(512))
    optimizer = make_optimizer(torch.nn.ParameterList([matrix, vector]), 1e-3, 0.0, "adamw_8bit")
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    optimizer.step()
    sizes = [
        sum(t.nbytes for t in values.values())
        for values in optimizer.state_dict()["state"].values()
    ]
    # Twice: codes, a scale for each block of 256, a table of 256 numbers; and the step.
    assert sizes[0] == 2 * (512**2 + 4 * 512**2 // 256 + 4 * 256) + 4
    assert math.isclose(sizes[0] / (8 * 512**2), 0.25, rel_tol=0.02)
    assert sizes[1] == 8 * 512 + 4  # too small to be worth rounding
    # Adam's first step is the learning rate, whatever the gradient.
    torch.testing.assert_close(matrix.data, torch.full((512, 512), 1 - 1e-3), rtol=0, atol=1e-7)


@pytest.mark.parametrize("shape", [(6, 6), (8, 3), (3, 8)])
def test_orthogonalising_is_a_quintic_of_each_singular_value(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()  # the Frobenius norm is that of the singular values
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    torch.testing.assert_close(
        orthogonalize(matrix), left @ values.diag() @ right, rtol=0, atol=1e-12
    )
    assert ((values > 0.3) & (values < 1.3)).all()


def test_muon_steps_hidden_matrices_as_torchs_and_all_else_as_adamw(tiny_folder, monkeypatch):
    policy, plain = (
        SingleDevicePolicy(PolicyConfig(str(tiny_folder), ("cpu",), "float32", kind))
        for kind in ("muon", "adamw")
    )
    layers = {
        name: p.detach().clone().requires_grad_()
        for name, p in policy.model.named_parameters()
        if "proj.weight" in name
    }
    reference = torch.optim.Muon(
        layers.values(), weight_decay=0.0, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step))
        policy.model(ids, labels=ids).loss.backward()
        for name, p in policy.model.named_parameters():
            (
                layers[name] if name in layers else plain.model.get_parameter(name)
            ).grad = p.grad.clone()
        reference.param_groups[0]["lr"] = 1e-2
        # Torch's multiplies in bfloat16: torch 2.13 by the method, torch 2.15 by the type's name.
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
            patch.setattr(torch, "bfloat16", torch.float32)
            reference.step()
        policy.step(1e-2)
        plain.step(1e-2)
    began = dict(SingleDevicePolicy(PolicyConfig(str(tiny_folder), ("cpu",), "float32")).weights())
    assert len(layers) == 14
    for name, weight in policy.weights():
        if name in layers:
            torch.testing.assert_close(
                weight - began[name], layers[name].detach() - began[name], rtol=0, atol=1e-5
            )
        else:
            assert torch.equal(weight, plain.model.get_parameter(name)), name
    stored = [set(values) for values in policy.optimizer.state_dict()["state"].values()]
    assert stored.count({"step", "momentum"}) == 14


def test_muon_decays_matrices_and_has_no_step_without_a_gradient():
    matrix, idle = torch.nn.Parameter(torch.eye(2)), torch.nn.Parameter(torch.eye(2))
    optimizer = make_optimizer(torch.nn.ParameterList([matrix, idle]), 0.1, 0.5, "muon")
    matrix.grad = torch.zeros(2, 2)
    optimizer.step()
    # 1 - 0.1 * 0.5, and the momentum is 0
    torch.testing.assert_close(matrix.data, 0.95 * torch.eye(2))
    assert torch.equal(idle.data, torch.eye(2))
    # nor by a momentum that is left
    matrix.grad = torch.eye(2)
    optimizer.step()
    before = matrix.detach().clone()
    matrix.grad = torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(matrix.data, 0.95 * before)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_stacked_biases_are_vectors(kind):
    """Of experts, [experts, outputs]: they are neither decayed nor made orthogonal, so without a
    gradient they keep their bits."""
    model = family_model("gpt_oss")
    optimizer = make_optimizer(model, 0.1, 0.1, kind)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert before["model.layers.0.mlp.experts.down_proj_bias"].shape == (4, 32)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim >= 2 and "bias" not in name
        assert torch.equal(parameter, before[name]) != is_matrix, name
    hidden = set()
    for group in optimizer.param_groups:
        for parameter, is_hidden in zip(group["params"], group["hidden"], strict=True):
            hidden |= {parameter} if is_hidden else set()
    names = {name for name, parameter in model.named_parameters() if parameter in hidden}
    layer = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "router.weight")
    assert all(name.endswith(layer) for name in names) and len(names) == 2 * len(layer)


def test_state_matrices_of_mamba_are_vectors():
    decays = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = make_optimizer(torch.nn.ParameterDict({"A_log": decays}), 0.1, 0.5, "muon")
    decays.grad = torch.ones(3, 2)
    optimizer.step()
    # AdamW's first step, without decay
    torch.testing.assert_close(decays.detach(), torch.full((3, 2), 0.9))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_has_the_numbers_of_adam(tiny_folder, kind):
    """Two steps of a vector by gradients of 2 and then 0 at a rate of 1, with betas 0.5 and 0.75
    and an epsilon of 2. The unbiased moments are 2 and 4, then 1/3 of 2 and 3/7 of 4."""
    settings = PolicyConfig("", ("cpu",), "float32", adam_beta1=0.5, adam_beta2=0.75, adam_eps=2.0)
    vector = torch.nn.Parameter(torch.zeros(3))
    optimizer = make_optimizer(torch.nn.ParameterList([vector]), 1.0, 0.0, kind, settings.adam)
    for gradient in (2.0, 0.0):
        vector.grad = torch.full_like(vector, gradient)
        optimizer.step()
    expected = 2 / (2 + 2) + (2 / 3) / (math.sqrt(12 / 7) + 2)
    torch.testing.assert_close(vector.detach(), torch.full((3,), -expected))
    policy = SingleDevicePolicy(
        PolicyConfig(str(tiny_folder), ("cpu",), "float32", kind, adam_beta2=0.5, adam_eps=0.1)
    )
    groups = policy.optimizer.param_groups
    assert [(tuple(group["betas"]), group["eps"]) for group in groups] == [((0.9, 0.5), 0.1)] * 2


def test_the_longest_step_by_hand():
    """With betas 0.9 and 0.95: 0.01 / (0.05 (1 - 0.81 / 0.95)) = 0.2 / (0.14 / 0.95)."""
    assert AdamSettings().longest_step == pytest.approx(math.sqrt(0.2 * 0.95 / 0.14))
    assert AdamSettings(0.9, 0.999).longest_step == pytest.approx(7.27, abs=0.01)
    assert AdamSettings(0.9, 0.8).longest_step == math.inf


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_saved_optimizer_goes_on_with_the_same_bits(tiny_folder, tmp_path, kind):
    policy, _ = trained(tiny_folder, kind, 2)
    policy.save_optimizer(tmp_path)
    resumed = SingleDevicePolicy(
        PolicyConfig(str(tiny_folder), ("cpu",), "float32", kind, weight_decay=0.1)
    )
    resumed.model.load_state_dict(policy.model.state_dict())
    resumed.load_optimizer(tmp_path)
    assert [train_once(policy, step) for step in (2, 3)] == [
        train_once(resumed, step) for step in (2, 3)
    ]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_reset_optimizer_goes_on_as_a_new_one(tiny_folder, kind):
    policy, _ = trained(tiny_folder, kind, 2)
    new = SingleDevicePolicy(
        PolicyConfig(str(tiny_folder), ("cpu",), "float32", kind, weight_decay=0.1)
    )
    new.model.load_state_dict(policy.model.state_dict())
    policy.reset_optimizer()
    assert [train_once(policy, step) for step in (2, 3, 4)] == [
        train_once(new, step) for step in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    ("flags", "bytes_by_role"),
    [
        ([], {"policy": 16}),
        (["--optimizer", "adamw_cpu_offload"], {"policy": 8, "moments": 8}),
        (["--optimizer", "adamw_8bit"], {"policy": 10}),
        (["--preset", "countdown_qwen2.5_3b"], {"policy": 8, "moments": 8}),
    ],
)
def test_the_plan_counts_the_moments(tiny_folder, monkeypatch, flags, bytes_by_role):
    shares = []
    monkeypatch.setattr(
        plan, "place", lambda *arguments: shares.extend(place(*arguments)) or shares
    )
    monkeypatch.setattr(
        "sys.argv",
        [
            "plan",
            "--model",
            str(tiny_folder),
            "--num_gpus",
            "1",
            "--sampler",
            "transformers",
            *flags,
        ],
    )
    plan.main()
    parameters = 466_304
    assert {
        s.role: s.bytes / parameters for s in shares if s.role in ("policy", "moments")
    } == bytes_by_role
    assert {s.device for s in shares if s.role == "moments"} <= {"cpu"}
