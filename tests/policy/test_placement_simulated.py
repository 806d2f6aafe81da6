"""Real forward passes over simulated GPUs: fake tensors know their device and refuse to meet across
devices.

A fake tensor has a shape, a dtype and a device and no data, and every operation checks that its
inputs share a device. So a forward pass of the true model shows whether each activation is moved to
where the weights it meets are placed. torch's engine runs no backward over fake GPUs: it asks the
driver for each one's streams (GraphTask::stash_current_streams). It does over fake CPUs with
numbers, which refuse to meet as well, so "cpu:1" to "cpu:5" stand for GPUs where gradients are
computed.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import traceback
from collections import Counter

import pytest
import torch
from accelerate import dispatch_model
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from alignment.core.records import Distribution
from alignment.model.device_map import partition_layers
from alignment.model.loading import STREAMS, autocast, copy_between, move_activations
from alignment.model.packing import ATTENTION, attention_by_layout, pack, send
from alignment.model.shape import ModelShape
from alignment.planning.placement import assign_roles
from alignment.policy.layer_split import LayerSplitPolicy
from alignment.policy.policy import Objective, PolicyConfig
from alignment.training.update import update
from benchmarks.families import FAMILIES, family_config
from tests.model.published_shapes import llama_1b, qwen2_1_5b, qwen3_0_6b
from tests.policy.test_layer_split import ARGS, made_up_rollout
from tests.some_families import by_speed

pytestmark = [
    pytest.mark.skipif(
        torch.version.cuda is None,
        reason=(
            "simulated GPUs need the CUDA build of torch (the plain Linux wheel); this build knows"
            " no CUDA device"
        ),
    ),
    # accelerate asks each tied weight for its address; a fake one has none (see `forward`).
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]

QWEN_1_5B, LLAMA_1B, QWEN3_06B = qwen2_1_5b(), llama_1b(), qwen3_0_6b()
# The same with fewer of their layers, which are all alike.
SHORT = copy.deepcopy(QWEN3_06B)
SHORT.num_hidden_layers, SHORT.layer_types = 5, SHORT.layer_types[:5]
TEN_LAYERS = copy.deepcopy(QWEN_1_5B)
TEN_LAYERS.num_hidden_layers, TEN_LAYERS.layer_types = 10, TEN_LAYERS.layer_types[:10]
FIVE_LAYERS = copy.deepcopy(QWEN_1_5B)
FIVE_LAYERS.num_hidden_layers, FIVE_LAYERS.layer_types = 5, FIVE_LAYERS.layer_types[:5]


class SimulatedStream:
    """One of a simulated GPU. `current` is that of each device by name, where it is not the
    device's own; `log` what happened."""

    current: dict[str, SimulatedStream] = {}
    log: list[tuple[str, ...]] = []

    def __init__(self, device: torch.device | str, name: str = "pair's"):
        self.name = f"{torch.device(device)} {name}"

    @classmethod
    def of(cls, device: torch.device | str) -> SimulatedStream:
        return cls.current.get(str(torch.device(device))) or cls(device, "own")

    def wait_stream(self, other: SimulatedStream) -> None:
        self.log.append((self.name, "waits for", other.name))

    @contextlib.contextmanager
    def made_current(self):
        device = self.name.partition(" ")[0]
        self.current[device] = self
        yield
        del self.current[device]


@pytest.fixture(autouse=True)
def no_real_gpu(monkeypatch: pytest.MonkeyPatch):
    """On a machine with GPUs, a fake tensor would start a context on the device it names, which may
    not exist."""
    monkeypatch.setattr(torch.cuda, "Stream", SimulatedStream)
    monkeypatch.setattr(torch.cuda, "stream", SimulatedStream.made_current)
    monkeypatch.setattr(torch.cuda, "current_stream", SimulatedStream.of)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(SimulatedStream, "log", [])
    to = torch.Tensor.to

    def logged(tensor, *args, **kwargs):
        """A copy, by the current streams of both devices."""
        copied = to(tensor, *args, **kwargs)
        if tensor.is_cuda and copied.is_cuda and tensor.device != copied.device:
            pair = (
                SimulatedStream.of(tensor.device).name,
                "and",
                SimulatedStream.of(copied.device).name,
            )
            SimulatedStream.log.append((*pair, "copy"))
        return copied

    monkeypatch.setattr(torch.Tensor, "to", logged)
    STREAMS.clear()
    monkeypatch.setattr(torch._subclasses.fake_tensor, "init_gpu_context", lambda device: None)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)


def fill(module: torch.nn.Module, device: str | int) -> None:
    """Replace every parameter and buffer under `module` by an empty one on `device`; call it in a
    FakeTensorMode."""
    for part in module.modules():
        for name, old in part.named_parameters(recurse=False):
            setattr(
                part,
                name,
                torch.nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device)),
            )
        for name, old in part.named_buffers(recurse=False):
            setattr(part, name, torch.empty(old.shape, dtype=old.dtype, device=device))


def fake_model(
    config: PretrainedConfig, device_map: dict[str, str] | dict[str, int]
) -> torch.nn.Module:
    """The model with fake weights placed by the map. Its embedding and lm_head are not tied yet:
    see `forward`."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    for name, device in device_map.items():
        fill(model.get_submodule(name), device)
    # the map left nothing out
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


def accelerate_moves(model: torch.nn.Module, device_map: dict) -> None:
    """What `from_pretrained(device_map=...)` does with a map."""
    dispatch_model(model, device_map, force_hooks=True, skip_keys=model._skip_keys_device_placement)


def no_moves(model: torch.nn.Module, device_map: dict) -> None:
    """Nothing moves."""


def forward(
    model: torch.nn.Module,
    device_map: dict,
    moves=move_activations,
    plant: tuple[str, str] | None = None,
):
    """Run 2 x 16 tokens from the embedding's device; returns the logits and each mapped module's
    output device.

    `plant` puts one module's weights on another device after the moves were set up.
    """
    moves(model, device_map)
    if model.config.tie_word_embeddings:
        # Only now, because accelerate tells tied weights by their address, which is 0 for every
        # fake tensor.
        model.lm_head.weight = model.get_input_embeddings().weight
    if plant is not None:
        fill(model.get_submodule(plant[0]), plant[1])
    seen: dict[str, str] = {}
    for name in device_map:

        def note(module, inputs, output, name=name):
            seen[name] = str((output[0] if isinstance(output, tuple) else output).device)

        model.get_submodule(name).register_forward_hook(note)
    ids = torch.zeros(2, 16, dtype=torch.long, device=next(iter(device_map.values())))
    return model(input_ids=ids, use_cache=False).logits, seen


def check(config: PretrainedConfig, devices: tuple[str, ...]) -> None:
    """Every module computes on the device the map gives it, lm_head at the end."""
    device_map = partition_layers(ModelShape.from_config(config), devices)
    assert set(device_map.values()) == set(devices)
    with FakeTensorMode():
        logits, seen = forward(fake_model(config, device_map), device_map)
    assert seen == device_map
    assert str(logits.device) == device_map["lm_head"]
    assert logits.shape == (2, 16, config.vocab_size)


@pytest.mark.parametrize(
    "count",
    [1, 8, pytest.param(2, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow)],
)
def test_qwen_1_5b_runs_over_simulated_gpus(count: int):
    check(QWEN_1_5B, tuple(f"cuda:{index}" for index in range(count)))


@pytest.mark.parametrize(
    "num_gpus",
    [8, pytest.param(1, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)],
)
def test_the_policy_runs_on_the_devices_without_another_role(num_gpus: int):
    check(QWEN3_06B, assign_roles(num_gpus).policy)


def test_each_other_role_of_eight_gpus_runs_on_its_own_device():
    roles = assign_roles(8)
    for device in (*roles.sample, roles.reference, roles.eval):
        check(SHORT, (device,))


def test_policy_on_chosen_gpus_in_a_chosen_order():
    check(TEN_LAYERS, assign_roles(8, policy_devices=("cuda:6", "cuda:2", "cuda:4")).policy)


@pytest.mark.slow
@pytest.mark.parametrize("config", [LLAMA_1B, QWEN3_06B], ids=lambda config: config.model_type)
@pytest.mark.parametrize("count", [2, 5])
def test_other_families_run_over_simulated_gpus(config: PretrainedConfig, count: int):
    check(config, tuple(f"cuda:{index}" for index in range(count)))


# Experts ask the driver which products it has, Gemma's embedding holds a number beside its buffers,
# and OPT reads its mask.
NOT_SIMULATED = {"qwen3_moe", "mixtral", "gpt_oss", "gemma", "gemma2", "gemma3_text", "opt"}
NOT_PLACED = {"gpt_bigcode"}  # its decoder has a buffer of its own, which no device would get


@pytest.mark.parametrize("family", by_speed(FAMILIES.keys() - NOT_SIMULATED - NOT_PLACED))
def test_every_family_runs_over_simulated_gpus(family: str):
    check(family_config(family), ("cuda:0", "cuda:1", "cuda:2"))


def test_accelerate_takes_gpu_numbers_and_device_strings_alike():
    by_name = partition_layers(ModelShape.from_config(SHORT), ("cuda:0", "cuda:1", "cuda:2"))
    by_number = {name: int(device.removeprefix("cuda:")) for name, device in by_name.items()}
    with FakeTensorMode():
        _, seen = forward(fake_model(SHORT, by_number), by_number, moves=accelerate_moves)
    assert seen == by_name


def test_without_moves_an_activation_meets_weights_elsewhere():
    device_map = partition_layers(ModelShape.from_config(TEN_LAYERS), ("cuda:0", "cuda:1"))
    with FakeTensorMode(), pytest.raises(FakeTensorDeviceMismatchError, match="cuda:"):
        forward(fake_model(TEN_LAYERS, device_map), device_map, moves=no_moves)


@pytest.mark.parametrize("planted", ["model.layers.9", "model.norm"])
def test_one_module_on_the_wrong_device_is_caught(planted: str):
    """The check can fail: the moves are in place, one module's weights are not where they lead."""
    device_map = partition_layers(ModelShape.from_config(TEN_LAYERS), ("cuda:0", "cuda:1"))
    with FakeTensorMode(), pytest.raises(FakeTensorDeviceMismatchError, match="cuda:5"):
        forward(fake_model(TEN_LAYERS, device_map), device_map, plant=(planted, "cuda:5"))


class Traffic(TorchDispatchMode):
    """Notes copies between GPUs, types of products with weights, and reads that make the host wait
    for a GPU. `fake` makes what is sent to a GPU or made there; the host's own tensors are real.
    GPUs are devices with a number."""

    READS = ("_local_scalar_dense", "nonzero", "equal", "masked_select")

    def __init__(self, fake: FakeTensorMode | None = None):
        super().__init__()
        self.fake = fake or contextlib.nullcontext()
        self.copies: list[tuple[str, str, tuple[int, ...]]] = []
        self.products: set[torch.dtype] = set()
        self.waits: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        to = (kwargs or {}).get("device")
        with contextlib.nullcontext() if to is None or to.index is None else self.fake:
            result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        tensors = [arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, torch.Tensor)]
        gpus = [str(tensor.device) for tensor in tensors if tensor.device.index is not None]
        if name == "copy_" and len(set(gpus)) > 1:
            self.copies.append((gpus[1], gpus[0], tuple(tensors[1].shape)))
        elif name == "_to_copy" and gpus and str(result.device) != gpus[0]:
            (self.waits if result.device.index is None else self.copies).append(
                (gpus[0], str(result.device), tuple(result.shape))
            )
        # attention's own products are of three axes, and in fp32 where tensors are fake
        if gpus and name in (
            "mm",
            "addmm",
        ):
            self.products.add(tensors[0].dtype)
        if gpus and name in self.READS:
            self.waits.append(name)
        return result


def packed_model(
    config: PretrainedConfig, device_map: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> torch.nn.Module:
    """The fake model as the policy has it: with our attention and our moves."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda._lazy_init", lambda: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # needs a driver
    model = fake_model(config, device_map)
    model.config._attn_implementation = ATTENTION
    if config.tie_word_embeddings:
        model.lm_head.weight = model.get_input_embeddings().weight
    return move_activations(model, device_map)


def packed_forward(
    config: PretrainedConfig, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> tuple[Traffic, dict]:
    """The policy's own forward pass of 3 rows, 2 of them of one prompt, under bf16 autocast; what
    it copied, and the map."""
    device_map = partition_layers(ModelShape.from_config(config), devices)
    packing = pack(
        [
            ((1, 2, 3, 4), (5, 6, 7, 8, 9)),
            ((1, 2, 3, 4), (9, 8, 7, 6, 5)),
            ((9, 8, 7), (6, 5, 4, 3, 2, 1)),
        ]
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = packed_model(config, device_map, monkeypatch)
        with (
            Traffic() as traffic,
            autocast("cuda:0", torch.bfloat16),
            attention_by_layout(model, packing),
        ):
            ids, positions = (
                send(ids, torch.device("cuda:0"))
                for ids in (packing.input_ids_1N, packing.position_ids_1N)
            )
            model.get_decoder()(
                input_ids=ids, position_ids=positions, use_cache=False, layout=packing
            )
    return traffic, device_map


FIVE = tuple(f"cuda:{index}" for index in range(5))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, crossed",
    [(TEN_LAYERS, 4), (LLAMA_1B, 3), (SHORT, 4)],
    ids=["qwen2", "llama", "qwen3"],
)
def test_hidden_states_alone_are_copied_between_gpus(
    config: PretrainedConfig, crossed: int, monkeypatch: pytest.MonkeyPatch
):
    """Each boundary between GPUs is crossed once. No weight is multiplied in fp32, and the host
    waits for no GPU."""
    traffic, device_map = packed_forward(config, FIVE, monkeypatch)
    tokens = 4 + 5 + 5 + 9
    path = list(dict.fromkeys(device for name, device in device_map.items() if name != "lm_head"))
    # an untied head has a GPU of its own, and the decoder ends before it
    assert len(path) == crossed + 1
    assert [(source, target) for source, target, _ in traffic.copies] == list(
        itertools.pairwise(path)
    )
    assert {shape for *_, shape in traffic.copies} == {(1, tokens, config.hidden_size)}
    assert traffic.products == {torch.bfloat16}
    assert not traffic.waits


def split_policy(
    config: PretrainedConfig, devices: tuple[str, ...], monkeypatch
) -> tuple[LayerSplitPolicy, FakeTensorMode]:
    """A policy with fake weights, all of whose code is the real one's, and the mode that makes what
    it is sent."""
    fake, device_map = (
        FakeTensorMode(allow_non_fake_inputs=True),
        partition_layers(ModelShape.from_config(config), devices),
    )
    policy = LayerSplitPolicy.__new__(LayerSplitPolicy)
    with fake:
        policy.model = packed_model(config, device_map, monkeypatch)
    policy.config, policy.devices, policy.dtype, policy.micro_batch_tokens = (
        config,
        devices,
        torch.bfloat16,
        200,
    )
    policy.policy_config = PolicyConfig("", devices, "bfloat16")
    return policy, fake


def test_a_copy_between_gpus_holds_up_none_of_them():
    """The streams of a pair wait for what is copied, and the GPU that reads it for the copy; no GPU
    waits for another's work."""
    source = torch.device("cuda:0")
    with FakeTensorMode():
        copied = copy_between(torch.empty(3, 4, device=source), torch.device("cuda:1"))
        assert copied.device == torch.device("cuda:1") and copied.shape == (3, 4)
        assert copy_between(copied, source).device == source
    assert SimulatedStream.log == [
        ("cuda:0 pair's", "waits for", "cuda:0 own"),
        ("cuda:0 pair's", "and", "cuda:1 pair's", "copy"),
        ("cuda:1 own", "waits for", "cuda:1 pair's"),
        ("cuda:1 pair's", "waits for", "cuda:1 own"),
        ("cuda:1 pair's", "and", "cuda:0 pair's", "copy"),
        ("cuda:0 own", "waits for", "cuda:0 pair's"),
    ]


FIVE_CPUS = tuple(f"cpu:{index}" for index in range(1, 6))


@pytest.mark.slow
@pytest.mark.parametrize("config", [FIVE_LAYERS, SHORT], ids=["qwen2", "qwen3"])
def test_forward_and_backward_cross_each_boundary_once(
    config: PretrainedConfig, monkeypatch: pytest.MonkeyPatch
):
    """A micro-batch's hidden states go from GPU to GPU and to the head's, and their gradients the
    same way back; nothing else is copied, no product is in fp32, and nothing is read."""
    policy, fake = split_policy(config, FIVE_CPUS, monkeypatch)
    rollout = made_up_rollout()
    objective = Objective(
        lambda rows, log_probs, mask: ((log_probs * mask).sum(), {}), Distribution()
    )
    with Traffic(fake) as traffic:  # one response a micro-batch, so that each device has one
        micro_batches = len(list(policy.accumulate(rollout.batch, range(5), objective)))
    device_map = partition_layers(ModelShape.from_config(config), FIVE_CPUS)
    path = list(dict.fromkeys(device for name, device in device_map.items() if name != "lm_head"))
    forward = [*itertools.pairwise(path), (path[-1], device_map["lm_head"])]
    assert micro_batches == 5 and len(forward) == {4: 4, 5: 5}[len(path)]
    expected = Counter(dict.fromkeys(forward, micro_batches)) + Counter(
        {pair[::-1]: micro_batches for pair in forward}
    )
    assert Counter((source, target) for source, target, _ in traffic.copies) == expected
    assert {shape[-1] for *_, shape in traffic.copies} == {config.hidden_size}
    assert traffic.products == {torch.bfloat16} and not traffic.waits
    assert all(parameter.grad.device == parameter.device for parameter in policy.model.parameters())
    with Traffic(fake) as traffic, fake:
        policy.clip_gradient(1.0)
    # Each other device sends the norm of its gradient, and gets the factor to scale it by.
    pairs = [
        (device, path[0]) for device in dict.fromkeys(device_map.values()) if device != path[0]
    ]
    assert Counter(traffic.copies) == Counter(
        (*pair, ()) for pair in [*pairs, *(pair[::-1] for pair in pairs)]
    )
    assert not traffic.waits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_update_reads_nothing_of_a_gpu_before_it_asks_whether_its_gradient_is_finite(
    kind: str, monkeypatch
):
    """A read of a fake tensor raises an error; the first one is that of `is_finite`. Over fake GPUs
    backward is left out."""
    policy, fake = split_policy(SHORT, FIVE if kind == "cuda" else FIVE_CPUS, monkeypatch)
    if kind == "cuda":

        def give_gradients(tensor: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
            for parameter in policy.model.parameters():
                parameter.grad = parameter.detach()

        monkeypatch.setattr(torch.Tensor, "backward", give_gradients)
    with Traffic(fake) as traffic, pytest.raises(DataDependentOutputException) as error:
        update(policy, made_up_rollout(), ARGS.update_config, 1)
    assert [
        frame.name for frame in traceback.extract_tb(error.tb) if "/alignment/" in frame.filename
    ] == [
        "update",
        "is_finite",
    ]
    assert not traffic.waits
