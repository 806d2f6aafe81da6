"""Roles, parameter counts, the layer partition and bytes per device, against hand-worked numbers
and brute force."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from alignment.model.device_map import partition_layers, split_evenly
from alignment.model.shape import ModelShape
from alignment.planning.placement import Roles, assign_roles, frozen_share, place
from alignment.policy.layer_split import issue_order
from alignment.system.errors import UserError
from benchmarks.families import family_config
from tests.model.published_shapes import qwen2_1_5b

# Qwen2.5-Math-1.5B. Worked by hand:
#   embedding  151936 * 1536                               = 233,373,696
#   attention  q 1536*1536 + 1536, k and v 2*(1536*256 + 256), o 1536*1536 = 5,507,072
#   MLP        3 * 1536 * 8960 = 41,287,680;  two norms 3,072
QWEN_1_5B = ModelShape.from_config(qwen2_1_5b())
EMBEDDING, LAYER, NORM = 233_373_696, 46_797_824, 1536
ALL = EMBEDDING + 28 * LAYER + NORM  # 1,543,714,304
# the tied embedding and the norms in fp32: 3.55 GB
REFERENCE = 2 * ALL + 2 * (EMBEDDING + 57 * NORM)


def gpus(count: int) -> tuple[str, ...]:
    return tuple(f"cuda:{index}" for index in range(count))


# ---- roles


@pytest.mark.parametrize(
    ("num_gpus", "expected"),
    [
        (0, Roles(("cpu",), ("cpu",), "cpu", "cpu")),
        (1, Roles(("cuda:0",), ("cuda:0",), "cuda:0", "cuda:0")),
        (2, Roles(("cuda:0",), ("cuda:1",), "cuda:1", "cuda:1")),
        (3, Roles(("cuda:0",), ("cuda:2",), "cuda:1", "cuda:1")),
        (4, Roles(("cuda:0",), ("cuda:3",), "cuda:2", "cuda:1")),
        (5, Roles(("cuda:0", "cuda:1"), ("cuda:4",), "cuda:3", "cuda:2")),
        (8, Roles(gpus(5), ("cuda:7",), "cuda:6", "cuda:5")),
    ],
)
@pytest.mark.parametrize("vllm", [False, True])
def test_default_roles(num_gpus: int, expected: Roles, vllm: bool):
    assert assign_roles(num_gpus, vllm=vllm) == expected


@pytest.mark.parametrize("num_gpus", range(17))
def test_default_roles_exist_and_leave_the_policy_alone(num_gpus: int):
    roles = assign_roles(num_gpus)
    helpers = {*roles.sample, roles.reference, roles.eval}
    assert {*roles.policy, *helpers} == set(gpus(num_gpus) or ("cpu",))
    assert list(roles.policy) == sorted(
        roles.policy, key=lambda device: int(device.partition(":")[2] or 0)
    )
    if num_gpus >= 2:
        assert not helpers & set(roles.policy)


@pytest.mark.parametrize("num_gpus", range(17))
def test_spelling_out_the_defaults_changes_nothing(num_gpus: int):
    """A run's resolved arguments can be given back as they are."""
    for vllm in (False, True):
        roles = assign_roles(num_gpus, vllm=vllm)
        again = assign_roles(
            num_gpus, ",".join(roles.sample), roles.reference, roles.eval, roles.policy, vllm=vllm
        )
        assert again == roles


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        # The policy keeps the lowest GPU left, so here it moves up.
        (
            {"num_gpus": 2, "sample_device": "cuda:0"},
            Roles(("cuda:1",), ("cuda:0",), "cuda:0", "cuda:0"),
        ),
        (
            {"num_gpus": 4, "sample_device": "cuda"},
            Roles(("cuda:1",), ("cuda:0",), "cuda:3", "cuda:2"),
        ),
        (
            {"num_gpus": 3, "sample_device": "cuda:1"},
            Roles(("cuda:0",), ("cuda:1",), "cuda:2", "cuda:2"),
        ),
        # Several engines each take a GPU; reference and eval find theirs among the rest.
        (
            {"num_gpus": 8, "sample_device": "cuda:6,cuda:7"},
            Roles(gpus(4), ("cuda:6", "cuda:7"), "cuda:5", "cuda:4"),
        ),
        (
            {"num_gpus": 4, "sample_device": "cuda:0,cuda:3"},
            Roles(("cuda:1",), ("cuda:0", "cuda:3"), "cuda:2", "cuda:2"),
        ),
        (
            {"num_gpus": 3, "sample_device": "cuda:1,cuda:2"},
            Roles(("cuda:0",), ("cuda:1", "cuda:2"), "cuda:1", "cuda:1"),
        ),
        (
            {"num_gpus": 0, "sample_device": "cpu,cpu"},
            Roles(("cpu",), ("cpu", "cpu"), "cpu", "cpu"),
        ),
        (
            {"num_gpus": 3, "reference_model_device": "cuda:1"},
            Roles(("cuda:0",), ("cuda:2",), "cuda:1", "cuda:1"),
        ),
        (
            {"num_gpus": 3, "eval_device": "cuda:2"},
            Roles(("cuda:0",), ("cuda:1",), "cuda:1", "cuda:2"),
        ),
        # A helper on the CPU frees its GPU for the policy, and no other helper follows it there.
        (
            {"num_gpus": 2, "reference_model_device": "cpu"},
            Roles(("cuda:0",), ("cuda:1",), "cpu", "cuda:1"),
        ),
        (
            {"num_gpus": 4, "reference_model_device": "cpu"},
            Roles(("cuda:0", "cuda:1"), ("cuda:3",), "cpu", "cuda:2"),
        ),
        (
            {"num_gpus": 4, "sample_device": "cuda:3", "eval_device": "cuda:3"},
            Roles(gpus(2), ("cuda:3",), "cuda:2", "cuda:3"),
        ),
        (
            {"num_gpus": 4, "policy_devices": ("cuda:3", "cuda:1")},
            Roles(("cuda:3", "cuda:1"), ("cuda:2",), "cuda:0", "cuda:0"),
        ),
        (
            {"num_gpus": 1, "policy_devices": ("cuda:0", "cpu")},
            Roles(("cuda:0", "cpu"), ("cuda:0",), "cuda:0", "cuda:0"),
        ),
        (
            {"num_gpus": 2, "policy_devices": ("cpu",)},
            Roles(("cpu",), ("cuda:1",), "cuda:0", "cuda:0"),
        ),
        # Every GPU is the policy's by request: a bf16 copy beside it is the user's to judge.
        (
            {"num_gpus": 2, "policy_devices": gpus(2)},
            Roles(gpus(2), ("cuda:1",), "cuda:1", "cuda:1"),
        ),
        # With nowhere else to go, the sampler joins eval rather than the reference on the policy's
        # GPU.
        (
            {
                "num_gpus": 2,
                "policy_devices": ("cuda:0",),
                "reference_model_device": "cuda:0",
                "eval_device": "cuda:1",
            },
            Roles(("cuda:0",), ("cuda:1",), "cuda:0", "cuda:1"),
        ),
    ],
)
def test_named_devices_are_honoured_and_the_rest_filled_in(named: dict, expected: Roles):
    assert assign_roles(**named) == expected


@pytest.mark.parametrize(
    ("named", "parts"),
    [
        ({"num_gpus": 4, "sample_device": "gpu1"}, ["--sample_device 'gpu1'", "cuda:N"]),
        (
            {"num_gpus": 4, "eval_device": "cuda:1,cuda:2"},
            ["--eval_device 'cuda:1,cuda:2'", "cuda:N"],
        ),
        ({"num_gpus": 4, "eval_device": "cuda:-1"}, ["--eval_device 'cuda:-1'", "cuda:N"]),
        ({"num_gpus": 4, "eval_device": "cuda:1\n"}, ["--eval_device", "cuda:N"]),
        ({"num_gpus": 4, "policy_devices": ("cuda:0", "")}, ["--policy_devices ''", "cuda:N"]),
        (
            {"num_gpus": 4, "sample_device": "cuda:7"},
            [
                "--sample_device cuda:7",
                "only 4 GPUs are visible (cuda:0..cuda:3)",
                "name one of these",
            ],
        ),
        (
            {"num_gpus": 1, "eval_device": "cuda:1"},
            ["--eval_device cuda:1", "only 1 GPU is visible (cuda:0)"],
        ),
        (
            {"num_gpus": 2, "policy_devices": ("cuda:2",)},
            ["--policy_devices cuda:2", "(cuda:0..cuda:1)"],
        ),
        (
            {"num_gpus": 0, "reference_model_device": "cuda"},
            ["--reference_model_device cuda:0", "no GPU", "use cpu"],
        ),
        (
            {"num_gpus": 0, "policy_devices": ("cuda:0",)},
            ["--policy_devices cuda:0", "no GPU", "use cpu"],
        ),
        (
            {"num_gpus": 2, "sample_device": "cuda:0", "reference_model_device": "cuda:1"},
            [
                "--sample_device cuda:0 and --reference_model_device cuda:1",
                "none of the 2 GPUs",
                "put two of these",
            ],
        ),
        (
            {"num_gpus": 2, "policy_devices": ("cuda", "cuda:0")},
            ["--policy_devices", "cuda:0 2 times", "once"],
        ),
        (
            {"num_gpus": 0, "policy_devices": ("cpu", "cpu")},
            ["--policy_devices", "cpu 2 times", "once"],
        ),
        (
            {"num_gpus": 4, "sample_device": "cuda:2,cuda,cuda:2"},
            ["--sample_device", "cuda:2 2 times", "once"],
        ),
        (
            {"num_gpus": 0, "sample_device": "cpu,cuda:1"},
            ["--sample_device cuda:1", "no GPU", "use cpu"],
        ),
        ({"num_gpus": 4, "sample_device": "cuda:1,,cuda:2"}, ["--sample_device ''", "cuda:N"]),
        (
            {"num_gpus": 3, "sample_device": "cuda:0,cuda:1", "eval_device": "cuda:2"},
            ["--sample_device cuda:0 cuda:1 and --eval_device cuda:2", "none of the 3 GPUs"],
        ),
    ],
)
def test_refusals_name_the_flag_and_the_remedy(named: dict, parts: list[str]):
    for vllm in (False, True):
        with pytest.raises(UserError) as refusal:
            assign_roles(**named, vllm=vllm)
        message = str(refusal.value)
        assert "\n" not in message
        for part in parts:
            assert part in message


@pytest.mark.parametrize(
    ("named", "parts", "remedy"),
    [
        (
            {"num_gpus": 4, "sample_device": "cuda:3", "reference_model_device": "cuda:3"},
            [
                "--sample_device and --reference_model_device are both cuda:3",
                "use --reference_model_device cuda:2",
            ],
            {"reference_model_device": "cuda:2"},
        ),
        (
            {"num_gpus": 3, "sample_device": "cuda:0", "policy_devices": ("cuda:0", "cuda:1")},
            ["--sample_device cuda:0 is also in --policy_devices", "use --sample_device cuda:2"],
            {"sample_device": "cuda:2"},
        ),
        (
            {"num_gpus": 2, "sample_device": "cuda:1", "policy_devices": ("cuda:0", "cuda:1")},
            [
                "--sample_device cuda:1 is also in --policy_devices",
                "take cuda:1 off --policy_devices",
            ],
            {"policy_devices": ("cuda:0",)},
        ),
        (
            {
                "num_gpus": 4,
                "sample_device": "cuda:3,cuda:1",
                "policy_devices": ("cuda:0", "cuda:1"),
            },
            ["--sample_device cuda:1 is also in --policy_devices", "use --sample_device cuda:2"],
            {"sample_device": "cuda:3,cuda:2"},
        ),
        (
            {"num_gpus": 4, "sample_device": "cuda:3,cuda:1", "reference_model_device": "cuda:1"},
            [
                "--sample_device and --reference_model_device are both cuda:1",
                "use --reference_model_device cuda:2",
            ],
            {"reference_model_device": "cuda:2"},
        ),
        (
            {"num_gpus": 3, "eval_device": "cuda:0", "policy_devices": ("cuda:0",)},
            ["--eval_device cuda:0 is also in --policy_devices", "use --eval_device cuda:2"],
            {"eval_device": "cuda:2"},
        ),
        (
            {"num_gpus": 2, "policy_devices": ("cuda:0", "cuda:1")},
            ["--policy_devices names every GPU", "take cuda:1 off --policy_devices"],
            {"policy_devices": ("cuda:0",)},
        ),
        (
            {"num_gpus": 1, "sample_device": "cpu"},
            ["--sample_device cpu", "cannot run there", "name a GPU (cuda:0)"],
            {"sample_device": "cuda:0"},
        ),
        (
            {"num_gpus": 2, "eval_device": "cpu"},
            ["--eval_device cpu", "cannot run there", "leave the flag out"],
            {"eval_device": None},
        ),
    ],
)
def test_gpus_that_vllm_cannot_share_are_refused_and_the_remedy_is_accepted(
    named: dict, parts: list[str], remedy: dict
):
    with pytest.raises(UserError) as refusal:
        assign_roles(**named, vllm=True)
    for part in parts:
        assert part in str(refusal.value)
    assign_roles(**named)  # without vLLM the same is the user's to judge
    assign_roles(**{**named, **remedy}, vllm=True)


def test_one_gpu_and_two_gpus_share_under_vllm():
    everything = assign_roles(1, "cuda:0", "cuda:0", "cuda:0", ("cuda:0",), vllm=True)
    assert everything == Roles(("cuda:0",), ("cuda:0",), "cuda:0", "cuda:0")
    # The policy needs the other GPU, so sampler and reference have to share this one.
    assert assign_roles(2, "cuda:1", "cuda:1", vllm=True).policy == ("cuda:0",)
    assert assign_roles(4, sample_device="cuda:3", eval_device="cuda:3", vllm=True).eval == "cuda:3"
    assert assign_roles(0, sample_device="cpu", vllm=True).sample == ("cpu",)  # the CPU build


def test_a_sampler_on_the_cpu_beside_one_on_a_gpu_leaves_the_policy_a_gpu():
    """The other helpers share the sampler's GPU, the only one that is not the policy's."""
    expected = Roles(
        policy=("cuda:1",), sample=("cpu", "cuda:0"), reference="cuda:0", eval="cuda:0"
    )
    assert assign_roles(2, "cpu,cuda:0") == expected


@given(data=st.data(), num_gpus=st.integers(0, 6), vllm=st.booleans())
@settings(deadline=None, max_examples=300)
def test_any_request_is_honoured_or_refused(data: st.DataObject, num_gpus: int, vllm: bool):
    device = st.sampled_from(["cpu", *gpus(num_gpus)])
    samplers = data.draw(st.lists(device, max_size=3))
    named = [",".join(samplers) or None, *(data.draw(st.none() | device) for _ in range(2))]
    policy = tuple(data.draw(st.lists(device, max_size=3, unique=True)))
    try:
        roles = assign_roles(num_gpus, *named, policy, vllm=vllm)
    except UserError as refusal:
        assert "--" in str(refusal) and num_gpus > 0
        return
    helpers = (*roles.sample, roles.reference, roles.eval)
    placed = (",".join(roles.sample), roles.reference, roles.eval)
    assert all(got == want for got, want in zip(placed, named, strict=True) if want is not None)
    assert policy in ((), roles.policy)
    assert {*helpers, *roles.policy} <= {"cpu", *gpus(num_gpus)} and roles.policy
    if num_gpus >= 2 and not policy:
        assert not set(helpers) & set(roles.policy)
        assert {*helpers, *roles.policy} >= set(gpus(num_gpus))  # no GPU is left idle
    if num_gpus >= 1:
        assert all(got != "cpu" for got, want in zip(placed, named, strict=True) if want is None)


# ---- parameter counts

SMALL = {
    "vocab_size": 211,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
YES_NO = (False, True)
CONFIGS = [
    *(
        LlamaConfig(**SMALL, tie_word_embeddings=tied, attention_bias=attention, mlp_bias=mlp)
        for tied, attention, mlp in product(YES_NO, repeat=3)
    ),
    *(Qwen2Config(**SMALL, tie_word_embeddings=tied) for tied in YES_NO),
    *(
        Qwen3Config(**SMALL, tie_word_embeddings=tied, attention_bias=attention, head_dim=10)
        for tied, attention in product(YES_NO, repeat=2)
    ),
    LlamaConfig(**SMALL, head_dim=16),
    LlamaConfig(**{**SMALL, "num_key_value_heads": None}),  # means as many as attention heads
    Qwen2Config(**SMALL, head_dim=16),
]


def layer_by_hand(config: PretrainedConfig) -> int:
    """Parameters of a Llama, Qwen2 or Qwen3 layer: attention, gated MLP, two norms."""
    hidden, inner = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    qwen2 = config.model_type == "qwen2"
    qkv = (queries + 2 * keys) * (hidden + (qwen2 or config.attention_bias))
    output = (queries + (not qwen2 and config.attention_bias)) * hidden
    mlp = 3 * hidden * inner + getattr(config, "mlp_bias", False) * (2 * inner + hidden)
    return qkv + output + mlp + 2 * hidden + (config.model_type == "qwen3") * 2 * head_dim


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_parameters_equal_those_worked_by_hand(config: PretrainedConfig):
    embedding = config.vocab_size * config.hidden_size
    shape = ModelShape.from_config(config)
    assert shape.parameters == {
        "model.rotary_emb": 0,
        "model.embed_tokens": embedding,
        **{f"model.layers.{index}": layer_by_hand(config) for index in range(3)},
        "model.norm": config.hidden_size,
        "lm_head": 0 if config.tie_word_embeddings else embedding,
    }
    assert (shape.layers, shape.head, shape.is_tied) == (
        ("model.layers.0", "model.layers.1", "model.layers.2"),
        "lm_head",
        config.tie_word_embeddings,
    )


def test_qwen_1_5b_by_hand():
    layers = [f"model.layers.{index}" for index in range(28)]
    sizes = QWEN_1_5B.parameters
    assert list(sizes) == [
        "model.rotary_emb",
        "model.embed_tokens",
        *layers,
        "model.norm",
        "lm_head",
    ]
    assert sizes["model.embed_tokens"] == EMBEDDING
    assert {sizes[layer] for layer in layers} == {LAYER}
    assert (sizes["model.norm"], sizes["lm_head"]) == (NORM, 0)
    assert sum(sizes.values()) == 1_543_714_304


def test_gpt2_by_hand():
    """Per layer: attention 4 * 16^2 + 4 * 16, MLP 2 * 16 * 64 + 64 + 16, two norms 2 * 32."""
    config = GPT2Config(vocab_size=50, n_positions=20, n_embd=16, n_layer=2, n_head=2)
    shape = ModelShape.from_config(config)
    layer = 4 * 256 + 64 + 2048 + 80 + 64
    sizes = {
        "transformer.wte": 800,
        "transformer.wpe": 320,
        "transformer.h.0": layer,
        "transformer.h.1": layer,
    }
    assert shape.parameters == {
        "transformer.drop": 0,
        **sizes,
        "transformer.ln_f": 32,
        "lm_head": 0,
    }
    assert partition_layers(shape, gpus(2)) == {
        **dict.fromkeys(
            ["transformer.drop", "transformer.wte", "transformer.wpe", "transformer.h.0"], "cuda:0"
        ),
        **dict.fromkeys(["transformer.h.1", "transformer.ln_f"], "cuda:1"),
        "lm_head": "cuda:0",
    }


def test_a_model_that_is_no_list_of_layers_is_refused():
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2)
    )
    model.extra = torch.nn.Linear(2, 2)  # which no device would get
    with pytest.raises(UserError, match="'gpt_bigcode' is no embedding, list of layers and head"):
        ModelShape.from_config(family_config("gpt_bigcode"))
    with pytest.raises(
        UserError, match="model_type 'gpt2' is no embedding, list of layers and head"
    ):
        ModelShape.of(model)


# ---- partition


def loads(shape: ModelShape, device_map: dict[str, str]) -> Counter[str]:
    total: Counter[str] = Counter()
    for name, count in shape.parameters.items():
        total[device_map[name]] += count
    return total


def decoder(
    num_layers: int, layer: int, embedding: int, is_tied: bool, norm: int = 8
) -> ModelShape:
    """A Llama-like model of these numbers of parameters."""
    layers = [f"model.layers.{index}" for index in range(num_layers)]
    sizes = {
        "model.rotary_emb": 0,
        "model.embed_tokens": embedding,
        **dict.fromkeys(layers, layer),
        "model.norm": norm,
    }
    return ModelShape(sizes | {"lm_head": 0 if is_tied else embedding}, tuple(layers), "lm_head")


def test_qwen_1_5b_over_two_gpus():
    """12 + 16 layers: with 11 on the first, the second's 17 (795,564,544) would be the larger
    bottleneck."""
    placed = partition_layers(QWEN_1_5B, gpus(2))
    expected = {"model.rotary_emb": "cuda:0", "model.embed_tokens": "cuda:0"}
    expected |= {
        f"model.layers.{index}": "cuda:0" if index < 12 else "cuda:1" for index in range(28)
    }
    expected |= {"model.norm": "cuda:1", "lm_head": "cuda:0"}
    assert placed == expected
    assert list(placed) == list(expected)
    assert loads(QWEN_1_5B, placed) == {
        "cuda:0": EMBEDDING + 12 * LAYER,
        "cuda:1": 16 * LAYER + NORM,
    }


def test_qwen_1_5b_over_five_and_eight_gpus():
    """Five hold at best 7 layers each beside the embedding; of eight, one holds the embedding and
    the rest 4 each."""
    assert max(loads(QWEN_1_5B, partition_layers(QWEN_1_5B, gpus(5))).values()) == 7 * LAYER
    eight = loads(QWEN_1_5B, partition_layers(QWEN_1_5B, gpus(8)))
    assert [eight[gpu] for gpu in gpus(8)] == [EMBEDDING, *[4 * LAYER] * 6, 4 * LAYER + NORM]


def test_untied_head_takes_its_own_place_at_the_end():
    shape = decoder(2, 1000, 8000, is_tied=False)
    assert partition_layers(shape, ("cuda:2", "cpu", "cuda:0")) == {
        "model.rotary_emb": "cuda:2",
        "model.embed_tokens": "cuda:2",
        "model.layers.0": "cpu",
        "model.layers.1": "cpu",
        "model.norm": "cpu",
        "lm_head": "cuda:0",
    }


def test_more_devices_than_modules_uses_the_first_ones():
    tied = decoder(1, 1000, 80, is_tied=True)
    # embedding and head | layer and norm
    assert set(partition_layers(tied, gpus(16)).values()) == {
        "cuda:0",
        "cuda:1",
    }
    untied = decoder(1, 1000, 80, is_tied=False)
    assert set(partition_layers(untied, gpus(16)).values()) == {"cuda:0", "cuda:1", "cuda:2"}


def test_ties_for_the_bottleneck_go_to_the_even_split():
    # The 9 forces a bottleneck of 9; filling greedily up to it would give 9 | 2 2 2 2 | 2.
    assert split_evenly([9, 2, 2, 2, 2, 2], 3) in ([0, 1, 1, 1, 2, 2], [0, 1, 1, 2, 2, 2])


@pytest.mark.parametrize("devices", [(), ("cuda:0", "cuda:0")])
def test_a_partition_needs_distinct_devices(devices: tuple[str, ...]):
    with pytest.raises(ValueError, match="each listed once"):
        partition_layers(QWEN_1_5B, devices)


SHAPES = st.builds(
    decoder,
    num_layers=st.integers(1, 80),
    layer=st.integers(1, 100_000),
    embedding=st.integers(1, 6_400_000),
    is_tied=st.booleans(),
    norm=st.integers(1, 64),
)


@given(shape=SHAPES, count=st.integers(1, 16))
@settings(deadline=None, max_examples=150)
def test_partition_properties(shape: ModelShape, count: int):
    devices = gpus(count)
    placed = partition_layers(shape, devices)
    sizes, layers = shape.parameters, shape.layers
    assert list(placed) == list(sizes)  # every module once, in forward order
    assert placed["model.rotary_emb"] == placed["model.embed_tokens"] == "cuda:0"
    assert placed["model.norm"] == placed[layers[-1]]
    path = ["model.embed_tokens", *layers, "model.norm"]
    if shape.is_tied:
        assert placed["lm_head"] == placed["model.embed_tokens"]
    else:
        path.append("lm_head")
    steps = [devices.index(placed[name]) for name in path]
    # Contiguous, in order, nothing skipped: from one module to the next the same device or the one
    # after it.
    assert all(after - before in (0, 1) for before, after in pairwise(steps))
    used = min(count, len(layers) + (1 if shape.is_tied else 2))
    assert set(placed.values()) == set(devices[:used])
    assert sum(loads(shape, placed).values()) == sum(sizes.values())


def all_cuts(sizes: list[int], parts: int) -> list[list[int]]:
    """The part sums of every way to cut `sizes` into non-empty contiguous parts."""
    return [
        [sum(sizes[start:end]) for start, end in pairwise((0, *cuts, len(sizes)))]
        for cuts in combinations(range(1, len(sizes)), parts - 1)
    ]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=9), data=st.data())
@settings(deadline=None, max_examples=300)
def test_split_is_the_best_of_all_cuts(sizes: list[int], data: st.DataObject):
    parts = data.draw(st.integers(1, len(sizes)))
    owners = split_evenly(sizes, parts)
    assert sorted(set(owners)) == list(range(parts)) and owners == sorted(owners)
    sums = [
        sum(size for size, owner in zip(sizes, owners, strict=True) if owner == part)
        for part in range(parts)
    ]
    assert sorted(sums, reverse=True) == min(
        sorted(cut, reverse=True) for cut in all_cuts(sizes, parts)
    )


@given(shape=SHAPES.filter(lambda shape: len(shape.layers) <= 8), count=st.integers(1, 5))
@settings(deadline=None, max_examples=100)
def test_partition_bottleneck_equals_brute_force(shape: ModelShape, count: int):
    _, embedding, *layers, norm, head = shape.parameters.values()
    layers[-1] += norm
    items = [embedding, *layers] if shape.is_tied else [embedding, *layers, head]
    # At most `count` devices: this also shows that using all of them costs nothing.
    best = min(
        max(cut) for parts in range(1, min(count, len(items)) + 1) for cut in all_cuts(items, parts)
    )
    assert max(loads(shape, partition_layers(shape, gpus(count))).values()) == best


def test_the_map_is_one_that_from_pretrained_takes(tmp_path):
    config = Qwen2Config(**SMALL, tie_word_embeddings=True)
    saved = AutoModelForCausalLM.from_config(config)
    saved.save_pretrained(tmp_path)
    device_map = partition_layers(ModelShape.from_config(config), ("cpu",))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device_map)
    ids = torch.arange(6)[None]
    torch.testing.assert_close(loaded(ids).logits, saved.eval()(ids).logits, rtol=0, atol=0)


# ---- bytes


def test_eight_gpus_by_hand():
    shares = place(QWEN_1_5B, assign_roles(8), "adamw", 2, "layer_split")
    assert [(share.device, share.role) for share in shares] == [
        *((gpu, "policy") for gpu in gpus(5)),
        ("cuda:7", "sample"),
        ("cuda:5", "eval"),
    ]
    layers = [name for share in shares[:5] for name in share.modules if name in QWEN_1_5B.layers]
    assert layers == [f"model.layers.{index}" for index in range(28)]
    assert sum(share.bytes for share in shares[:5]) == 16 * ALL  # 24.7 GB
    assert max(share.bytes for share in shares[:5]) == 16 * 7 * LAYER
    assert [share.bytes for share in shares[5:]] == [2 * ALL] * 2  # 3.1 GB
    in_float32 = place(QWEN_1_5B, assign_roles(8), "adamw", 4, "layer_split")
    assert [share.bytes for share in in_float32[5:]] == [4 * ALL] * 2 and in_float32[:5] == shares[
        :5
    ]
    assert shares[5].modules == tuple(QWEN_1_5B.parameters)


def test_frozen_models_by_hand():
    """A reference, alone or with a copy of the old policy beside it."""
    for models in (1, 2):
        share = frozen_share(QWEN_1_5B, "cuda:6", "reference", 2, models)
        assert (share.device, share.role) == ("cuda:6", "reference")
        assert share.bytes == models * REFERENCE
        assert share.modules == tuple(QWEN_1_5B.parameters)
    assert frozen_share(QWEN_1_5B, "cuda:6", "teacher", 4).bytes == 4 * ALL


def bytes_by_device(shares):
    totals = Counter()
    for share in shares:
        totals[share.device] += share.bytes
    return totals


def test_sampler_and_eval_on_one_gpu_are_one_copy():
    shares = place(QWEN_1_5B, assign_roles(2), "adamw", 2, "layer_split")
    assert [(share.device, share.role) for share in shares] == [
        ("cuda:0", "policy"),
        ("cuda:1", "sample+eval"),
    ]
    assert bytes_by_device(shares) == {"cuda:0": 16 * ALL, "cuda:1": 2 * ALL}
    assert bytes_by_device(place(QWEN_1_5B, assign_roles(1), "adamw", 2, "layer_split")) == {
        "cuda:0": (16 + 2) * ALL
    }
    # Each has a GPU of its own.
    three = {
        "cuda:0": 16 * ALL,
        "cuda:2": 2 * ALL,
        "cuda:1": 2 * ALL,
    }
    assert bytes_by_device(place(QWEN_1_5B, assign_roles(3), "adamw", 2, "layer_split")) == three


def test_the_optimizer_decides_the_policys_bytes():
    offloaded = place(QWEN_1_5B, assign_roles(1), "adamw_cpu_offload", 2, "layer_split")
    # 15.4 GB, and 12.3 of moments
    assert bytes_by_device(offloaded) == {
        "cuda:0": (8 + 2) * ALL,
        "cpu": 8 * ALL,
    }
    assert bytes_by_device(
        place(QWEN_1_5B, assign_roles(0), "adamw_cpu_offload", 2, "layer_split")
    ) == {"cpu": (16 + 2) * ALL}
    assert bytes_by_device(place(QWEN_1_5B, assign_roles(1), "adamw_8bit", 2, "layer_split")) == {
        "cuda:0": (10 + 2) * ALL
    }


def test_one_micro_batch_after_another_and_several_in_flight():
    one = list(issue_order(2, 1, heads_first=False))
    assert one == [
        ("forward", 0),
        ("head", 0),
        ("backward", 0),
        ("forward", 1),
        ("head", 1),
        ("backward", 1),
    ]
    assert one == list(issue_order(2, 1, heads_first=True))
    short = [f"{what[0]}{number}" for what, number in issue_order(3, 2, heads_first=True)]
    assert short == ["f0", "f1", "h0", "h1", "b0", "b1", "f2", "h2", "b2"]
    short = [f"{what[0]}{number}" for what, number in issue_order(3, 2, heads_first=False)]
    assert short == ["f0", "f1", "h0", "b0", "h1", "b1", "f2", "h2", "b2"]
    short = [f"{what[0]}{number}" for what, number in issue_order(4, 3, heads_first=True)]
    # two and two, not three and one
    assert short == [
        "f0",
        "f1",
        "h0",
        "h1",
        "b0",
        "b1",
        "f2",
        "f3",
        "h2",
        "h3",
        "b2",
        "b3",
    ]


@given(st.integers(0, 9), st.integers(1, 6), st.booleans())
def test_no_more_than_allowed_are_in_flight_and_each_returns(micro_batches, in_flight, heads_first):
    order, held = list(issue_order(micro_batches, in_flight, heads_first)), 0
    for what, _ in order:
        held += {"forward": 1, "head": 0, "backward": -1}[what]
        assert 0 <= held <= in_flight
    assert sorted(order) == sorted(
        (what, n) for what in ("forward", "head", "backward") for n in range(micro_batches)
    )
    for number in range(micro_batches):
        assert [what for what, n in order if n == number] == ["forward", "head", "backward"]
