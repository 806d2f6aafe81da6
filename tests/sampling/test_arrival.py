"""Weights that do not arrive stop the run: checksums by hand, and engines that drop, damage or
repeat a transfer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rollout_helpers import open_tiny
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.model.loading import load_model, load_tokenizer
from alignment.sampling.arrival import (
    COLUMNS,
    checksum,
    choose_columns,
    compare_checksums,
    load_proven,
    read_checksums,
    record_checksums,
    weight_checksum,
)
from alignment.sampling.pool import SamplerPool
from alignment.sampling.transformers import TransformersSampler
from alignment.system.errors import RunStopped

ONE, TWO = 0x3F800000, 0x40000000  # the bits of 1.0 and 2.0 in float32


def test_a_checksum_by_hand():
    assert checksum(torch.tensor([1.0, 0.0, 2.0, -0.0])) == ONE**2 + TWO**2
    assert checksum(torch.tensor([1.0, 2.0]).bfloat16()) == 0x3F80**2 + 0x4000**2
    assert checksum(torch.full((20,), 1.0)) == (20 * ONE**2 + 2**63) % 2**64 - 2**63  # modulo 2^64


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=9),
    st.integers(1, 8),
    st.randoms(),
)
def test_an_engine_may_stack_and_pad_and_permute(numbers, cut, random):
    shuffled = [*numbers, 0.0, -0.0]
    random.shuffle(shuffled)
    parts = (
        checksum(torch.tensor(part, dtype=torch.float32)) for part in (numbers[:cut], numbers[cut:])
    )
    assert (sum(parts) - checksum(torch.tensor(shuffled, dtype=torch.float32))) % 2**64 == 0


def test_other_columns_of_a_matrix_are_checked_at_each_version():
    matrix_64 = torch.arange(64.0).expand(3, 64)
    columns = choose_columns(64, version=5)
    assert (
        len(columns) == COLUMNS
        and columns != choose_columns(64, version=6)
        and choose_columns(3, 1) == [0, 1, 2]
    )
    assert weight_checksum(matrix_64, 5, torch.float32) == checksum(matrix_64[:, columns])
    seen = {column for version in range(60) for column in choose_columns(64, version)}
    assert seen == set(range(64))


def test_stacked_and_tied_tensors_are_compared_by_their_parts():
    sent = {"a.q.weight": (3, 30), "a.k.weight": (2**63 - 1, 40), "wte.weight": (7, 8)}
    stacked = (["a.q.weight", "a.k.weight"], 3 + (2**63 - 1) - 2**64)
    embedding = (["wte.weight"], 7)
    compare_checksums(
        sent, {"a.qk.weight": stacked, "wte.weight": embedding, "lm_head.weight": embedding}, 1
    )
    with pytest.raises(RunStopped, match="1 of 2 tensors differ, such as lm_head.weight"):
        compare_checksums(
            {"wte.weight": (7, 8)},
            {"wte.weight": embedding, "lm_head.weight": (["wte.weight"], 9)},
            1,
        )


class Reads(TorchDispatchMode):
    """Counts the numbers that are read one by one, for each of which a GPU would have to be waited
    for."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*arguments, **(named or {}))


def test_checksums_are_read_together_after_the_transfer():
    weights = [(str(number), torch.randn(3, 5)) for number in range(6)]
    checksums = {}
    with Reads() as reads:
        assert len(list(record_checksums(weights, torch.float32, 1, checksums))) == 6
        numbers = read_checksums(checksums)
    assert reads.count == 0
    with Reads() as reads:
        expected = {name: weight_checksum(tensor, 1, torch.float32) for name, tensor in weights}
    assert (
        reads.count == 6
        and {name: of_matrix for name, (of_matrix, _) in numbers.items()} == expected
    )
    assert list(numbers) == list(expected) and read_checksums({}) == {}


def test_an_engine_may_keep_the_transpose():
    matrix_35 = torch.arange(15.0).view(3, 5)
    checksums = {}
    assert [
        name
        for name, _ in record_checksums(
            [("a", matrix_35), ("b", matrix_35[0])], torch.float32, 1, checksums
        )
    ] == [
        "a",
        "b",
    ]
    of_transpose = weight_checksum(matrix_35.T.contiguous(), 1, torch.float32)
    assert checksums["a"] == (weight_checksum(matrix_35, 1, torch.float32), of_transpose)
    compare_checksums({"a": (1, 10), "b": (2, 20)}, {"ab": (["a", "b"], 30)}, 1)
    # a part of one and a part of the other are neither
    with pytest.raises(RunStopped, match="such as ab"):
        compare_checksums({"a": (1, 10), "b": (2, 20)}, {"ab": (["a", "b"], 21)}, 1)


def test_tensors_that_were_never_sent_or_are_not_held_differ():
    with pytest.raises(RunStopped, match="such as b"):
        compare_checksums({"a": (1, 1)}, {"a": (["a"], 1), "b": (["b"], 2)}, 1)
    with pytest.raises(RunStopped, match="such as b"):
        compare_checksums({"a": (1, 1), "b": (2, 2)}, {"a": (["a"], 1)}, 1)


def test_names_of_the_engines_own_are_said_to_be_unchecked(capsys):
    compare_checksums({"a": (1, 1), "experts.0": (2, 2)}, {"a": (["a"], 1), "w13": (["w13"], 9)}, 1)
    assert (
        "keeps 1 of 2 weights, such as experts.0, under names of its own" in capsys.readouterr().err
    )


def test_weights_that_an_engine_keeps_in_float32_beside_its_type_are_compared_in_its_type(
    tiny_folder,
):
    """As families with routers of experts do; a number without axes is compared, too."""
    policy, sampler = open_tiny(tiny_folder), Faulty(str(tiny_folder), "none")
    sampler.model.bfloat16().model.norm.float()
    sampler.model.model.layers[0].scale = torch.nn.Parameter(torch.tensor(2.0))
    weights = [*policy.weights(), ("model.layers.0.scale", torch.tensor(3.0))]
    sampler.dtype = torch.bfloat16
    assert (
        sampler.model.dtype == torch.bfloat16
        and sampler.model.model.norm.weight.dtype == torch.float32
    )
    load_proven(sampler, weights, 1)
    with torch.no_grad():
        sampler.model.model.norm.weight += 1
    with pytest.raises(RunStopped, match="1 of 27 tensors differ, such as model.norm.weight"):
        sent = {name: (weight_checksum(w, 1, torch.bfloat16),) for name, w in weights}
        compare_checksums(sent, sampler.weight_checksums(1), 1)


# --- engines with a fault -------------------------------------------------------------------------


class Faulty(TransformersSampler):
    """An engine with weights of its own, which loses or repeats a part of the second transfer."""

    def __init__(self, folder: str, fault: str):
        super().__init__(load_model(folder, ("cpu",), torch.float32), load_tokenizer(folder), 256)
        self.fault = fault

    def load_weights(self, named_tensors, version):
        before = {name: tensor.clone() for name, tensor in self.model.named_parameters()}
        tensors = list(named_tensors)
        if version == 2 and self.fault == "sync":
            tensors = []
        if version == 2 and self.fault == "tensor":
            tensors = [
                (name, tensor) for name, tensor in tensors if "layers.1.mlp.up_proj" not in name
            ]
        if version == 2 and self.fault == "twice":
            tensors = [(name, 2 * tensor - before[name]) for name, tensor in tensors]
        super().load_weights(tensors, version)


@pytest.mark.parametrize(
    ("fault", "share"), [("sync", "all"), ("tensor", "1"), ("twice", "all"), ("none", "none")]
)
@pytest.mark.parametrize("restarting", [False, True])
def test_a_fault_of_one_transfer_stops_the_run_in_that_step(fault, share, restarting, tiny_folder):
    """At a learning rate of 1e-6, far below what a comparison of log-probs could see."""
    policy, sampler = open_tiny(tiny_folder), Faulty(str(tiny_folder), fault)
    if restarting:
        sampler = SamplerPool(
            {"engine": lambda: Faulty(str(tiny_folder), fault)}, torch.float32, 256, policy.weights
        )

    def train() -> None:
        with torch.no_grad():
            for _, weight in policy.weights():
                weight += 1e-6 * torch.randn(weight.shape, generator=generator).sign()

    generator = torch.Generator().manual_seed(0)
    train()
    load_proven(sampler, policy.weights(), 1)
    train()
    if fault == "none":
        load_proven(sampler, policy.weights(), 2)
        return
    total = len(list(policy.weights()))
    number = total if share == "all" else 1
    differ = f"after step 2 .*: {number} of {total} tensors differ, such as model"
    with pytest.raises(
        RunStopped, match=f"{differ}.* start a new run with --sampler transformers$"
    ):
        load_proven(sampler, policy.weights(), 2)


def open_faulty(config, tokenizer, policy=None) -> Faulty:
    """A sampler for --sampler that loses a tensor of the second transfer."""
    return Faulty(config.model_path, "tensor")
