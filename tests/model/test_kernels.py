"""Fused kernels: the functions themselves in float64, the layers of each family, and which of them
a policy takes."""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from transformers.activations import ACT2FN

from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.builders.devices import check_kernels
from alignment.builders.run_plan import keeps_old_policy
from alignment.core.records import Distribution
from alignment.core.tokens import collate
from alignment.model import kernel_choice, kernels
from alignment.model.kernel_choice import use_kernels
from alignment.model.kernels import (
    GatedMLP,
    RowGradients,
    Tempering,
    fuse_layers,
    has_fused_kernels,
    join,
    label_scores,
    logit_gradient,
    use_fused_kernels,
)
from alignment.model.log_probs import head_log_probs
from alignment.model.products import cast_weight, one_gradient
from alignment.model.self_check import choose_path
from alignment.planning.placement import Roles
from alignment.policy.policy import Objective, PolicyConfig, open_policy
from alignment.system.errors import UserError
from alignment.system.ranks import close_ranks
from benchmarks.fake_ranks import FakeRanks, open_shard
from benchmarks.families import (
    FAMILIES,
    bfloat16_error,
    family_model,
    gradients,
    rows_of,
    training_differences,
)

SOME_FAMILIES = ("qwen2", "qwen3_moe", "gemma2", "cohere")


@pytest.fixture
def uncompiled(monkeypatch):
    """Functions that would be compiled are called as they are."""
    monkeypatch.setattr(kernels, "compiled", lambda function: function)
    monkeypatch.setattr(kernels, "FUSED", {})


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_of_a_logit_is_that_of_autograd(soft_cap, with_entropy):
    torch.manual_seed(0)
    logits = (4 * torch.randn(5, 11, dtype=torch.float64)).requires_grad_()
    labels = torch.tensor([0, 10, 3, 3, 7])
    gradient, entropy_gradient = torch.randn(2, 5, dtype=torch.float64)
    z = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    log_p = (z / 0.7).log_softmax(dim=-1)
    chosen = log_p[torch.arange(5), labels]
    entropy = torch.distributions.Categorical(logits=z / 0.7).entropy()
    loss = (gradient * chosen).sum()
    if with_entropy:
        loss = loss + (entropy_gradient * entropy).sum()
    (expected,) = torch.autograd.grad(loss, logits)
    scores = label_scores(logits, labels, Tempering(0.7, soft_cap))
    gradients = RowGradients(gradient, entropy_gradient if with_entropy else None)
    computed = logit_gradient(
        logits, labels, scores, gradients, Tempering(0.7, soft_cap), torch.float64
    )
    torch.testing.assert_close(scores[0], chosen, rtol=0, atol=1e-12)
    torch.testing.assert_close(scores[1], entropy, rtol=0, atol=1e-12)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)


def test_two_halves_of_a_softmax_are_joined_to_the_whole():
    # One query and head with scores 0, log 3 and log 2, and values 1, 2 and 5: the first two have
    # a sum of 4 and the mean 7/4, the third a sum of 2; together a sum of 6, (4 * 7/4 + 2 * 5) / 6.
    out = torch.tensor([[[7 / 4]]])
    log_sum = torch.tensor([[4.0]]).log()
    join(out, log_sum, torch.tensor([[[5.0]]]), torch.tensor([[2.0]]).log())
    assert out.item() == pytest.approx(17 / 6, rel=1e-6)
    assert log_sum.exp().item() == pytest.approx(6, rel=1e-6)


@pytest.mark.parametrize("keeps_inner", [True, False])
@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh"])
def test_a_gated_mlp_has_the_gradients_of_autograd(name, keeps_inner, uncompiled):
    torch.manual_seed(0)
    activation = ACT2FN[name]
    shapes = [(2, 5, 3), (7, 3), (7, 3), (3, 7)]
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    hidden, gate, up, down = inputs
    expected = (activation(hidden @ gate.T) * (hidden @ up.T)) @ down.T
    output = GatedMLP.apply(*inputs, activation, keeps_inner)
    gradient = torch.randn_like(expected)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    of_output = torch.autograd.grad(output, inputs, gradient)
    of_expected = torch.autograd.grad(expected, inputs, gradient)
    for own, its in zip(of_output, of_expected, strict=True):
        torch.testing.assert_close(own, its, rtol=0, atol=1e-12)


def test_passes_of_one_gradient_add_to_it_and_cast_a_weight_once(uncompiled):
    """Twice the gradient of a pass, by autograd alone and within a block; at its end casts are
    made anew."""
    torch.manual_seed(0)
    shapes = [(4, 3), (7, 3), (7, 3), (3, 7)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def add_gradient() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            GatedMLP.apply(*inputs, torch.nn.functional.silu, True).sum().backward()

    add_gradient()
    once = [tensor.grad.clone() for tensor in inputs]
    with one_gradient():
        add_gradient()
        cast = cast_weight(inputs[1], torch.bfloat16)
        assert cast_weight(inputs[1], torch.bfloat16) is cast
    assert cast_weight(inputs[1], torch.bfloat16) is not cast
    for tensor, gradient in zip(inputs, once, strict=True):
        assert torch.equal(tensor.grad, 2 * gradient)


def check_family(family: str) -> None:
    """Compare a family's fused layers and log-probs with its own forward pass."""
    model = family_model(family)
    if choose_path(model):
        pytest.skip("its rows are padded: it has no fused kernels")
    fuse_layers(model)
    use_fused_kernels(model)
    differences = training_differences(model)
    assert differences.log_probs < 1e-4
    assert differences.gradient < 1e-5


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_fused_layers_have_the_gradients_of_the_models_own(family, uncompiled):
    check_family(family)


@pytest.mark.slow
def test_fused_layers_of_every_family(uncompiled, subtests):
    for family in sorted(FAMILIES.keys() - set(SOME_FAMILIES)):
        with subtests.test(family):
            check_family(family)


@pytest.mark.slow
def test_fused_layers_round_as_the_models_own_do(uncompiled):
    """Uncompiled, so that each step is rounded, which a fused kernel computes in fp32."""
    ratios = []
    for family in ("llama", "qwen2", "qwen3", "olmo2", "gemma2"):
        for seed in (1, 2):
            fused, own = (bfloat16_error(family, is_fused, seed) for is_fused in (True, False))
            ratios.append(fused / own)
    assert sum(ratios) / len(ratios) < 1.05
    assert max(ratios) < 1.2


def test_a_head_in_pieces_gives_what_a_single_piece_gives(uncompiled, monkeypatch):
    model = family_model("gemma2")
    use_fused_kernels(model)
    torch.manual_seed(0)
    batch = rows_of([(4, 9)], repeats=3)
    hidden = torch.randn(int(batch.response_mask.sum()), 32)
    results = []
    for most in (2**27, 64 * 5):
        monkeypatch.setattr("alignment.model.log_probs.FUSED_LOGITS_IN_MEMORY", most)
        given = hidden.clone().requires_grad_()
        outputs = head_log_probs(
            model,
            given,
            batch.labels,
            batch.response_mask,
            Distribution(temperature=0.8),
            "differentiable",
        )
        flat = gradients(model, outputs["log_probs"].sum() + 0.3 * outputs["token_entropy"].sum())
        results.append((outputs["log_probs"], flat, given.grad))
    for one, several in zip(*results, strict=True):
        torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-5)


# --- which kernels a policy takes -----------------------------------------------------------------


def test_a_kernel_that_computes_something_else_is_refused_and_leaves_the_model(
    uncompiled, monkeypatch
):
    model = family_model("qwen2")
    monkeypatch.setattr(kernels, "gated", lambda activation, gate, up: 1.01 * activation(gate) * up)
    with pytest.raises(UserError, match="^--kernels compiled: qwen2's log-probs or gradients diff"):
        use_kernels(model, "compiled", torch.float32)
    assert not has_fused_kernels(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_gradient_alone_that_is_wrong_is_refused(uncompiled, monkeypatch):
    model = family_model("qwen2")

    def gated_gradients(activation, gradient, gate, up):
        product, to_gate, to_up = own(activation, gradient, gate, up)
        return product, torch.zeros_like(to_gate), to_up

    own = kernels.gated_gradients
    monkeypatch.setattr(kernels, "gated_gradients", gated_gradients)
    with pytest.raises(UserError, match="choose --kernels eager$"):
        use_kernels(model, "compiled", torch.bfloat16)


@pytest.mark.parametrize("scale", [1.01, float("nan")])
def test_a_weights_gradient_alone_that_is_wrong_is_refused(uncompiled, monkeypatch, scale):
    """It changes neither log-probs nor the gradients that reach the layers before."""

    class ScaledGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, weight):
            return weight.clone()

        @staticmethod
        def backward(ctx, *gradients):
            return gradients[0] * scale

    def cast_norm(own, module, hidden, dtype):
        weights = {"weight": ScaledGradient.apply(module.weight)}
        return torch.func.functional_call(OwnNorm(own, module), weights, (hidden,))

    class OwnNorm(torch.nn.Module):
        def __init__(self, own, module):
            super().__init__()
            self.weight = module.weight
            self.variance_epsilon = module.variance_epsilon
            self.own = own

        def forward(self, hidden):
            return self.own(self, hidden)

    model = family_model("qwen2")
    monkeypatch.setattr(kernels, "cast_norm", cast_norm)
    with pytest.raises(UserError, match="log-probs or gradients differ by"):
        use_kernels(model, "compiled", torch.float32)


def test_auto_on_a_gpu_takes_the_fastest_that_passes(uncompiled, monkeypatch, capsys):
    model = family_model("qwen2")
    assert use_kernels(model, "auto", torch.float32) == "eager"
    monkeypatch.setattr(kernel_choice, "devices_of", lambda model: [torch.device("cuda")])
    assert use_kernels(model, "auto", torch.float32) == "compiled"

    def fail(*arguments):
        raise RuntimeError("no compiler")

    model = family_model("qwen2")
    monkeypatch.setattr(kernels, "gated", fail)
    monkeypatch.setattr(kernel_choice, "find_spec", lambda package: None)
    assert use_kernels(model, "auto", torch.float32) == "eager"
    assert (
        "not compiled (--kernels compiled: qwen2's kernels fail: no comp" in capsys.readouterr().err
    )


def mean(rows, log_probs, mask):
    return (log_probs * mask).sum() / 14, {}


@pytest.fixture
def ranks() -> Iterator[None]:
    """Policies of several ranks have the same ones until a test ends."""
    threads = torch.get_num_threads()  # which ranks share
    yield
    close_ranks()
    torch.set_num_threads(threads)


def policy_gradient(folder, kind="single", ranks=1, **fields) -> torch.Tensor:
    config = PolicyConfig(folder, ("cpu",) * ranks, "float32", micro_batch_tokens=30, **fields)
    policy = open_policy(kind, config)
    prompts = [(1, 2, 3)] * 2 + [(5, 6), (7,)]
    responses = [(4, 5, 6, 7), (8, 9), (1, 2, 3, 4, 5, 6), (8, 9, 10)]
    batch = collate(prompts, responses, 0)
    list(policy.accumulate(batch, range(4), Objective(mean, entropy=False)))
    return policy.gradient()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_a_policy_with_compiled_functions_has_the_gradient_of_the_models_own(
    kind, tiny_folder, ranks, monkeypatch
):
    """Traced and differentiated by the compiler, and run by torch's kernels: a C++ compiler takes
    longer."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(kernels, "FUSED", {})
    own = policy_gradient(str(tiny_folder))
    compiled = policy_gradient(str(tiny_folder), kind, kernels="compiled")
    torch.testing.assert_close(compiled, own, rtol=0, atol=1e-5 * float(own.abs().max()))
    torch._dynamo.reset()


@pytest.mark.slow
def test_two_ranks_with_fused_functions_have_the_gradient_of_the_models_own(
    tiny_folder, uncompiled, ranks, monkeypatch
):
    """Their weights are put together for a pass, and gradients are summed after it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # of the other rank
    own = policy_gradient(str(tiny_folder))
    for kind in ("sharded", "replicated"):
        fused = policy_gradient(str(tiny_folder), kind, ranks=2, kernels="compiled")
        torch.testing.assert_close(fused, own, rtol=0, atol=1e-5 * float(own.abs().max()))


@pytest.mark.slow
def test_a_sharded_weights_gradient_that_is_wrong_is_refused(tiny_folder, uncompiled, monkeypatch):
    def weight_gradient(weight, left, right):
        return 1.01 * (left @ right)

    monkeypatch.setattr(kernels, "weight_gradient", weight_gradient)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # torch puts its own there
    config = PolicyConfig(str(tiny_folder), ("cpu",), "float32", kernels="compiled")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="log-probs or gradients differ by"):
            open_shard(FakeRanks(1, 1), config, replicated=False)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("kind", [RLArgs, SFTArgs])
def test_what_else_chooses_kernels_is_refused_beside_the_flag(kind):
    refusal = "^--kernels compiled: it chooses the layers' kernels, and so does --compile; leave"
    with pytest.raises(UserError, match=refusal):
        from_preset(kind, "tiny", kernels="compiled", compile=True)


def test_ligers_kernels_need_a_gpu():
    args = from_preset(RLArgs, "tiny", kernels="liger")
    with pytest.raises(UserError, match="^--kernels liger needs a GPU for each process"):
        check_kernels(args, ("cpu",))


def test_compiled_kernels_need_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    args = from_preset(RLArgs, "tiny", kernels="compiled")
    with pytest.raises(UserError, match=r"^--kernels compiled needs no-such-compiler: install"):
        check_kernels(args, ("cpu",))
    check_kernels(from_preset(RLArgs, "tiny"), ("cpu",))


def test_a_copy_is_the_old_policy_where_it_has_a_device_of_its_own():
    """Whatever kernels it has, but Liger's, which are one GPU's."""
    args = from_preset(RLArgs, "tiny")
    args = replace(args, train_mini_batch_size=args.rollout_size // 2)
    on_gpus = Roles(policy=("cuda:0",), sample=("cuda:2",), eval="cuda:2", reference="cuda:1")
    on_cpu = dataclasses.replace(on_gpus, policy=("cpu",))
    alone = dataclasses.replace(on_gpus, reference="cuda:0")
    for name in ("auto", "eager", "compiled"):
        own = replace(args, kernels=name)
        assert keeps_old_policy(own, on_cpu, "single")
        assert keeps_old_policy(own, on_gpus, "layer_split")
        assert not keeps_old_policy(own, alone, "single")
        assert not keeps_old_policy(own, on_gpus, "sharded")
    assert not keeps_old_policy(replace(args, kernels="liger"), on_gpus, "single")
