"""Policies of several processes: the same numbers as one process's."""

import dataclasses
import json
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.builders import checks, devices, run_plan
from alignment.builders.run_plan import PlannedMachines
from alignment.core.tokens import packed_tokens
from alignment.data.embedded import embedded_model
from alignment.model.activations import activation_bytes
from alignment.model.loading import load_tokenizer
from alignment.policy import micro_batches
from alignment.policy.policy import PolicyConfig, open_policy
from alignment.policy.sharded import Shard, deal
from alignment.policy.single_device import SingleDevicePolicy
from alignment.system.errors import UserError
from alignment.system.ranks import close_ranks
from benchmarks import collectives
from benchmarks.fake_ranks import fake_ranks
from benchmarks.ranks import main as compare_ranks
from tests.command_line import exit_code
from tests.some_families import BUFFER, save_with_buffer

ROOT = Path(__file__).parents[2]
ROWS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=30).map(
    lambda pairs: [((prompt,) * (prompt + 1), tuple(range(length))) for prompt, length in pairs]
)


@given(rows=ROWS, ranks=st.integers(1, 6))
def test_rows_are_dealt_by_prompt_and_as_even_as_the_largest_group_lets(rows, ranks):
    hands = deal(rows, ranks)
    assert (
        sorted(number for hand in hands for number in hand) == list(range(len(rows)))
        and len(hands) == ranks
    )
    prompts = [{rows[number][0] for number in hand} for hand in hands]
    # no prompt has rows on two ranks
    assert sum(map(len, prompts)) == len({prompt for prompt, _ in rows})
    tokens = [packed_tokens([rows[number] for number in hand]) for hand in hands]
    groups = [
        packed_tokens([row for row in rows if row[0] == prompt])
        for prompt in {prompt for prompt, _ in rows}
    ]
    assert max(tokens) - min(tokens) <= max(groups, default=0)


def test_rows_are_dealt_largest_group_first():
    # 8, 3 and 4 tokens
    rows = [
        ((1,), (1, 1)),
        ((2, 2), (1,)),
        ((1,), (1,) * 5),
        ((3,), (1,) * 3),
        ((2, 2), ()),
    ]
    assert deal(rows, 2) == [[0, 2], [1, 3, 4]]
    assert deal(rows, 4) == [[0, 2], [3], [1, 4], []]


@pytest.mark.parametrize(
    ("parallelism", "policy_devices", "bytes_of_each", "kind"),
    [
        ("device_map", ("cuda:0",), 1.0, "single"),
        ("device_map", ("cuda:0", "cuda:1"), 1.0, "layer_split"),
        ("device_map", ("cpu", "cpu"), 1e9, "replicated"),
        ("auto", ("cuda:0",), 1.0, "single"),
        ("auto", ("cuda:0", "cuda:1"), 1e9, "replicated"),
        ("auto", ("cpu", "cpu"), 1.0, "sharded"),
        ("layer_split", ("cuda:0", "cuda:1"), 1e9, "layer_split"),
    ],
)
def test_the_kind_of_policy(parallelism, policy_devices, bytes_of_each, kind, tiny_folder):
    gpus = sum(device != "cpu" for device in policy_devices)
    own = {"policy_devices": policy_devices} if gpus else {"policy_ranks": len(policy_devices)}
    args = from_preset(RLArgs, "tiny", policy_parallelism=parallelism, **own)
    machine = PlannedMachines(gpus, bytes_of_each)
    plan = run_plan.plan_policy(args, devices.roles_of(args, gpus), str(tiny_folder), machine)
    assert (plan.devices, plan.kind) == (policy_devices, kind)


@pytest.mark.parametrize(("here", "everywhere"), [(1, 2), (2, 2), (2, 4)])
def test_auto_takes_all_processes_that_torchrun_has_started(
    here, everywhere, tmp_path, monkeypatch
):
    """One on each of two machines, two on one, and two on each of two."""
    for module in (devices, run_plan):
        monkeypatch.setattr(module, "PROCESSES", everywhere)
    monkeypatch.setattr(devices, "PROCESSES_HERE", here)
    monkeypatch.setattr(devices, "visible_gpus", lambda: 0)
    args, base = from_preset(RLArgs, "tiny"), str(embedded_model("tiny", str(tmp_path)))
    plan = run_plan.plan_policy(args, devices.roles_of(args), base)
    assert plan.devices == ("cpu",) * here and plan.kind == "replicated"
    with pytest.raises(
        UserError,
        match=(
            f"torchrun has started {everywhere} processes: a policy that is single is one process"
        ),
    ):
        checks.check(dataclasses.replace(args, policy_parallelism="single"))


@pytest.mark.parametrize(("dtype", "casts"), [("float32", 0), ("bfloat16", 2)])
def test_a_ranks_micro_batch_leaves_room_for_gathered_weights_and_casts(
    tmp_path, monkeypatch, dtype, casts
):
    """Four ranks on one host have a quarter of its memory each. One needs 12 bytes for each
    parameter of its quarter (gradient and moments), and 8 for those outside the layers and in two
    of them, which it gathers; under autocast 2 for all layers'."""
    model_path = str(embedded_model("tiny", str(tmp_path)))
    with fake_ranks(count=4, local_count=4) as ranks:
        shard = Shard(ranks, PolicyConfig(model_path, ("cpu",) * 4, dtype), replicated=False)
        layers = shard.model.model.layers
        parameters = sum(p.numel() for p in shard.model.parameters())
        in_a_layer = sum(p.numel() for p in layers[0].parameters())
        outside_of_layers = parameters - len(layers) * in_a_layer
        gathered = 8 * (outside_of_layers + 2 * in_a_layer) + casts * len(layers) * in_a_layer
        own = 12 * (parameters // 4)
        a_token = activation_bytes(shard.config, shard.dtype.itemsize)
        activations = 128 * int(a_token / micro_batches.ACTIVATION_SHARE)
        enough_for_128 = 4 * (activations + own + gathered)
        for spare, tokens in ((4 * 12 * 100, 128), (-4 * a_token, 64)):
            free = enough_for_128 + spare
            monkeypatch.setattr(micro_batches, "free_bytes", lambda device, free=free: free)
            shard.micro_batch_tokens = 0
            shard.choose_micro_batch_tokens(longest=10)
            assert shard.micro_batch_tokens == tokens


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_rank_that_writes_keeps_what_all_gather(rank, tiny_folder, tmp_path, monkeypatch):
    """As the next tensor is gathered, the one before it, and of rank 0 all before it, are there."""
    gathered: list[weakref.ref] = []
    alive = []

    def gather(shard: Shard):
        for name, parameter in shard.model.named_parameters():
            tensor = torch.zeros(parameter.shape)
            gathered.append(weakref.ref(tensor))
            yield name, tensor
            del tensor
            alive.append(sum(reference() is not None for reference in gathered))

    monkeypatch.setattr(Shard, "weights", gather)
    with fake_ranks(count=2, local_count=2) as two_ranks:
        ranks = dataclasses.replace(two_ranks, rank=rank, local_rank=rank)
        shard = Shard(ranks, PolicyConfig(str(tiny_folder), ("cpu", "cpu"), "float32"), False)
        shard.save(tmp_path, load_tokenizer(str(tiny_folder)))
    assert alive == [number if rank == 0 else 1 for number in range(1, len(gathered) + 1)]
    assert (tmp_path / "model.safetensors").exists() == (rank == 0)


@pytest.mark.slow
def test_ranks_take_the_same_kernels_where_those_of_one_fail(tiny_folder, tmp_path):
    """And go on with the gradient of the model's own code; none waits for another."""
    command = [sys.executable, str(Path(__file__).with_name("kernels_of_ranks.py"))]
    arguments = [str(tiny_folder), str(tmp_path / "meeting")]
    processes = []
    for rank in ("0", "1"):
        processes.append(
            subprocess.Popen([*command, rank, *arguments], cwd=ROOT, stdout=subprocess.PIPE)
        )
    norms = []
    for rank, process in enumerate(processes):
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        own, auto, named, *where_one_fails = json.loads(printed)
        assert [own["kernels"], auto["kernels"], named["kernels"]] == ["eager", *["compiled"] * 2]
        left, refused = where_one_fails
        assert left["kernels"] == "eager"
        reason = "other ranks' kernels" if rank == 0 else "no compiler"
        assert reason in refused["refusal"]
        norms += [auto["norm"], named["norm"], left["norm"]]
    assert norms == pytest.approx([own["norm"]] * 6, rel=1e-5)


@pytest.mark.slow
def test_three_processes_have_the_gradients_and_checkpoints_of_one():
    """Every loss and normalisation, a KL penalty, silent rows, ranks without rows, no rows at all,
    entropy bonus, selected tokens, SFT; then adapters. Within 1e-5."""
    try:
        compare_ranks(3)
        compare_ranks(3, ("layer_split", "sharded"), lora_rank=4)
    finally:
        close_ranks()


@pytest.mark.slow
def test_two_ranks_save_a_models_buffers(tiny_folder, tmp_path):
    buffer = save_with_buffer(tmp_path / "base")
    config = PolicyConfig(str(tmp_path / "base"), ("cpu", "cpu"), "float32", micro_batch_tokens=64)
    try:
        policy = open_policy("sharded", config)
        policy.save(tmp_path / "saved", load_tokenizer(str(tiny_folder)))
    finally:
        close_ranks()
    saved = SingleDevicePolicy(PolicyConfig(str(tmp_path / "saved"), ("cpu",), "float32"))
    assert torch.equal(saved.model.get_buffer(BUFFER), buffer)


@pytest.mark.slow
def test_a_step_sends_what_the_closed_form_says_for_1_to_64_ranks(monkeypatch):
    """Number and bytes of every kind of collective, counted on a fake process group."""
    assert exit_code(monkeypatch, collectives.main, "benchmarks.collectives") == 0
