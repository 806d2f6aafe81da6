"""Compiled layers, and Liger's kernels: the numbers of the model's own code, and what is
refused."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

from alignment.args import RLArgs, SFTArgs, from_preset
from alignment.builders.devices import check_kernels, devices_of_ranks, roles_of
from alignment.core.records import Distribution
from alignment.core.tokens import collate
from alignment.model import packing
from alignment.model.huggingface import AttentionInterface
from alignment.model.loading import load_model, use_liger_kernel
from alignment.model.parallel_micro_batches import cut_for_parallel
from alignment.policy.policy import Objective, PolicyConfig, open_policy
from alignment.system.errors import UserError

ROOT = Path(__file__).parents[2]
CONFIG = Qwen2Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
    max_position_embeddings=64,
)
# Two rows that share a prompt, and two others, packed to 19 tokens; then three rows of one prompt,
# to 14. Not to 16, a head's size: the compiler takes equal sizes for the same one, and compiles
# others anew.
FIRST = [
    ((1, 2, 3), (4, 5, 6, 7)),
    ((1, 2, 3), (8, 9)),
    ((5, 6), (1, 2, 3, 4, 5, 6)),
    ((7,), (8, 9, 10, 11, 12)),
]
SECOND = [((9, 8, 7, 6, 5), (10 + row, 20, 30 + row, 2, 1, row)[: 3 + row]) for row in range(3)]


def mean(rows, log_probs, mask):
    return (log_probs * mask).sum() / 14, {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with a model of `CONFIG`."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(CONFIG).save_pretrained(made := tmp_path_factory.mktemp("compiled") / "model")
    return str(made)


def close_pool(pool) -> None:
    """End the compiler's processes, where it has started any. `pool` is a cached function."""
    if pool.cache_info().currsize:
        pool().shutdown()
        pool.cache_clear()


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Forgets what was compiled, and afterwards has attention and limits as they were."""
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(sys, "path", list(sys.path))  # to which the compiler adds its cache
    with mock.patch.dict(os.environ):
        yield
    if compiler := sys.modules.get("torch._inductor.async_compile"):
        close_pool(compiler.AsyncCompile.pool)
    AttentionInterface.register(packing.ATTENTION, packing.attention)
    torch._dynamo.config.recompile_limit = limit
    torch._dynamo.reset()


@pytest.fixture
def without_code(monkeypatch):
    """Layers are traced and differentiated by the compiler, and run by torch's kernels: a C++
    compiler takes longer."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def open_pair(folder, kind="single", devices=("cpu",), **fields):
    """A policy as it is, and one with compiled layers."""
    config = functools.partial(
        PolicyConfig, folder, devices, "float32", micro_batch_tokens=1000, **fields
    )
    return open_policy(kind, config()), open_policy(kind, config(compile=True))


def gradient(policy, rows) -> torch.Tensor:
    policy.drop_gradient()
    batch = collate(*zip(*rows, strict=True), 0)
    list(policy.accumulate(batch, range(len(rows)), Objective(mean, entropy=False)))
    return policy.gradient()


def assert_same(policies, *batches) -> None:
    for rows in batches or (FIRST,):
        own, compiled = (gradient(policy, rows) for policy in policies)
        assert own.abs().max() > 0.1
        torch.testing.assert_close(compiled, own, rtol=0, atol=1e-5)


def log_probs(policy, rows) -> torch.Tensor:
    return policy.log_probs(collate(*zip(*rows, strict=True), 0), Distribution())


@pytest.mark.slow
def test_compiled_layers_have_the_log_probs_and_gradients_of_the_models_own(folder, monkeypatch):
    # g++ takes a third of the time where it optimises nothing, and reads no headers of vectors.
    monkeypatch.setenv("TORCHINDUCTOR_DEBUG_COMPILE", "1")
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)
    policies = own, compiled = open_pair(folder)
    assert_same(policies, FIRST, SECOND)
    assert [name for name, _ in compiled.weights()] == [name for name, _ in own.weights()]
    # A layer before and after its attention module, and that before and after attention: once for
    # all layers and lengths.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4


@pytest.mark.slow
def test_layers_that_are_computed_again_in_backward(folder, without_code):
    policies = open_pair(folder)
    for policy in policies:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_same(policies)


@pytest.mark.slow
def test_layers_split_over_devices(folder, without_code):
    """Over two names of the CPU: moves of inputs are not compiled, and have their hooks."""
    policies = open_pair(folder, "layer_split", ("cpu", "cpu:0"))
    for policy in policies:
        policy.devices = ("cpu", "cpu:0")
    assert_same(policies)


@pytest.mark.slow
def test_adapters_and_the_weights_without_them(tmp_path, without_code):
    Qwen2ForCausalLM(
        Qwen2Config(**CONFIG.to_dict() | {"num_hidden_layers": 1, "layer_types": None})
    ).save_pretrained(tmp_path)
    policies = own, compiled = open_pair(str(tmp_path), lora_rank=2)
    for policy in policies:
        policy.use_adapters("random")
    assert_same(policies)
    batch = collate(*zip(*FIRST, strict=True), 0)
    base = own.base_log_probs(batch, Distribution())
    torch.testing.assert_close(
        compiled.base_log_probs(batch, Distribution()), base, rtol=0, atol=1e-5
    )
    assert (log_probs(own, FIRST) - base).abs().max() > 0.01


@pytest.mark.slow
def test_a_sharded_policy(folder, without_code):
    policies = own, _ = open_pair(folder, "sharded")
    try:
        assert_same(policies)
    finally:
        own.ranks.close()


def test_compiled_layers_are_one_threads_and_no_samplers(folder, without_code, monkeypatch):
    own, compiled = open_pair(folder)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [cut_for_parallel(policy.model, SECOND, 1000)[1] for policy in (own, compiled)] == [2, 1]
    assert (
        own.model_on("cpu", torch.float32) is own.model
        and compiled.model_on("cpu", torch.float32) is None
    )


@pytest.mark.slow
def test_ligers_kernels_have_the_gradients_of_the_models_own(tmp_path):
    script, environment = (
        Path(__file__).with_name("liger_in_interpreter.py"),
        {**os.environ, "TRITON_INTERPRET": "1"},
    )
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True
    )
    assert len(done.stdout.splitlines()) == 2, done.stdout + done.stderr
    # The last line is of a kernel that is wrong on purpose.
    fault = "UserError: --use_liger_kernel: qwen3's log-probs differ by "
    assert fault in done.stderr.splitlines()[-1] and done.stderr.endswith("leave the flag out\n"), (
        done.stderr
    )


def test_a_family_that_liger_does_not_know(tmp_path):
    GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)
    ).save_pretrained(tmp_path)
    with pytest.raises(
        UserError,
        match=(
            "^--use_liger_kernel: Liger has no kernels for gpt2; leave the flag out, or give --com"
        ),
    ):
        use_liger_kernel(load_model(str(tmp_path), ("cpu",), torch.float32))


def attributes(model) -> dict[str, object]:
    """Every attribute of a model's modules, of its family's classes, and of the file of code that
    defines them."""
    file = sys.modules["transformers.models.qwen2.modeling_qwen2"]
    found = {f"code.{name}": value for name, value in vars(file).items()}
    for name, kind in vars(file).items():
        if isinstance(kind, type) and kind.__module__ == file.__name__:
            found |= {f"class {name}.{key}": value for key, value in vars(kind).items()}
    for name, module in model.named_modules(prefix="model"):
        found |= {f"{name}.{key}": value for key, value in vars(module).items()}
    return found


def test_a_model_that_refuses_ligers_kernels_is_as_it_was(folder):
    """On a CPU without Triton's interpreter no kernel of Liger's runs, so that the log-probs of two
    rows fail."""
    model, another = (load_model(folder, ("cpu",), torch.float32) for _ in range(2))
    ids = torch.arange(1, 12)[None]
    before, logits = attributes(model), model(ids).logits
    with pytest.raises(
        UserError, match="^--use_liger_kernel: qwen2's log-probs fail: .*; leave the flag out$"
    ):
        use_liger_kernel(model)
    after = attributes(model)
    assert after.keys() == before.keys()
    assert [name for name, value in before.items() if after[name] is not value] == []
    assert "Liger" not in repr(model) and torch.equal(model(ids).logits, logits)
    assert torch.equal(another(ids).logits, logits)


def test_what_a_kernel_changes_in_classes_and_children_is_undone_too(folder, monkeypatch):
    """A patch of Liger's that exchanges a layer's child, a method of the family's class and an
    attribute, and then fails."""
    from liger_kernel.transformers import monkey_patch

    model = load_model(folder, ("cpu",), torch.float32)
    layer = model.model.layers[1]
    before, children = attributes(model), dict(layer.named_children())

    def apply(model) -> None:
        layer.mlp = torch.nn.Identity()
        type(layer).forward = torch.nn.Identity.forward
        type(layer).new = 1
        del model.model.norm.variance_epsilon
        raise ValueError("no such layers")

    monkeypatch.setitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "qwen2", apply)
    with pytest.raises(ValueError, match="no such layers"):
        use_liger_kernel(model)
    after = attributes(model)
    assert after.keys() == before.keys() and dict(layer.named_children()) == children
    assert [name for name, value in before.items() if after[name] is not value] == []


@pytest.mark.parametrize("kind", [RLArgs, SFTArgs])
def test_what_cannot_be_is_said_before_anything_loads(kind, monkeypatch):
    with pytest.raises(
        UserError,
        match="^--compile: torch does not compile Liger's kernels; leave out this flag or --use_",
    ):
        from_preset(kind, "tiny", compile=True, use_liger_kernel=True)
    monkeypatch.setattr("alignment.config.flag.find_spec", lambda package: None)
    needs = "^--use_liger_kernel needs liger_kernel: start with `uv run --extra liger ...`$"
    with pytest.raises(UserError, match=needs):
        from_preset(kind, "tiny", use_liger_kernel=True)


@pytest.mark.parametrize(
    ("flags", "gpus", "variables", "message"),
    [
        ({"compile": True}, 0, {}, ""),
        (
            {"compile": True},
            0,
            {"CXX": "no-compiler"},
            "--compile needs no-compiler: install that, or leave the flag out",
        ),
        (
            {"compile": True},
            0,
            {"PATH": ""},
            "--compile needs g++: install that, or leave the flag out",
        ),
        ({"compile": True}, 1, {}, ""),
        (
            {"compile": True},
            1,
            {"CC": "no-compiler"},
            "--compile needs no-compiler and triton: install that, or leave the",
        ),
        ({"use_liger_kernel": True}, 1, {}, ""),
        ({"use_liger_kernel": True, "policy_parallelism": "replicated"}, 8, {}, ""),
        ({"use_liger_kernel": True, "policy_parallelism": "sharded"}, 8, {}, ""),
        (
            {"use_liger_kernel": True},
            8,
            {},
            (
                "--use_liger_kernel needs a GPU for each process of the policy, not cuda:0 cuda:1"
                " cuda:2 cuda:3 cuda:4: choose --policy_parallelism replicated or sharded"
            ),
        ),
        (
            {"use_liger_kernel": True},
            0,
            {},
            "--use_liger_kernel needs a GPU for each process of the policy, not cpu: leave",
        ),
        (
            {
                "use_liger_kernel": True,
                "policy_parallelism": "layer_split",
                "policy_devices": ("cuda:0", "cuda:1"),
            },
            4,
            {},
            (
                "--use_liger_kernel needs a GPU for each process of the policy, not cuda:0 cuda:1:"
                " choose --policy"
            ),
        ),
    ],
)
def test_compilers_and_devices(flags, gpus, variables, message, tmp_path, monkeypatch):
    for compiler in ("g++", "gcc"):  # whether this machine has them plays no part
        (tmp_path / compiler).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    args = from_preset(RLArgs, "tiny", sampler="transformers", **flags)
    devices = devices_of_ranks(args.policy_ranks, roles_of(args, gpus).policy)
    if message:
        with pytest.raises(UserError) as error:
            check_kernels(args, devices)
        assert str(error.value).startswith(message)
    else:
        check_kernels(args, devices)
