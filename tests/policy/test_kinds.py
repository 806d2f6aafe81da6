"""The table of kinds of policy: plans, checks and --help follow an entry's facts, whatever it is
called."""

import dataclasses
import io

import pytest
from rich.console import Console
from transformers import LlamaConfig

from alignment.args import PlanArgs, RLArgs, from_preset
from alignment.builders.devices import check_kernels, roles_of
from alignment.builders.prediction import Known, ranked
from alignment.builders.run_plan import PlannedMachines, plan_policy, plan_run
from alignment.config import command_line
from alignment.model.shape import ModelShape
from alignment.planning.peaks import peak_bytes
from alignment.planning.placement import Roles
from alignment.planning.seconds import hardware_of
from alignment.planning.step_shape import SampledRows, StepShape
from alignment.policy.policy import (
    POLICIES,
    RESOLVED_KINDS,
    PolicyKind,
    kind_of_devices,
    kind_of_ranks,
    kinds_in_words,
)

FLAT = PolicyKind(
    "my_package.flat_policy:FlatPolicy",
    summary="weights in flat buffers",
    one_device=True,
    keeps_gradients=True,
    lends_model=False,
)
CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    tie_word_embeddings=True,
)
SHAPE = ModelShape.from_config(CONFIG)
PARAMETERS = sum(SHAPE.parameters.values())


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    monkeypatch.setitem(POLICIES, "flat", FLAT)


def phases(kind: str, device: str, update_tokens: int = 1000) -> dict[str, dict[str, int]]:
    """Phase -> kind -> bytes, with all roles on one device and products in float32."""
    step = StepShape(
        card=10**10,
        policy_parallelism=kind,
        itemsize=4,
        optimizer="adamw",
        micro_batch_tokens=100,
        update_tokens=update_tokens,
        parallel=1,
        prompt=20,
        max_new_tokens=10,
        group_size=4,
        sampled={"sampling": SampledRows(5, 4, 10), "evaluation": SampledRows(7, 1, 10)},
        truncated=False,
        passes=frozenset(),
        frozen_passes=frozenset(),
        vllm=False,
        gpu_memory_utilization=None,
        engines=1,
        sleeps=True,
    )
    roles = Roles((device,), (device,), device, device)
    (peak,) = peak_bytes(SHAPE, CONFIG, roles, step)
    return peak.phases


@pytest.mark.parametrize("tokens", [1000, 50])
def test_kept_gradients_count_once_in_every_phase(tokens):
    """4 bytes for each parameter, of several micro-batches as of one with all rows."""
    kept, freed = (phases(kind, "cuda:0", tokens) for kind in ("flat", "single"))
    assert {phase["kept gradients"] for phase in kept.values()} == {4 * PARAMETERS}
    assert kept["update"]["gradients"] == 0
    assert all("kept gradients" not in phase for phase in freed.values())
    assert freed["sync"].get("gradients", 0) == 0
    if tokens == 1000:
        assert sum(kept["update"].values()) == pytest.approx(
            sum(freed["update"].values()), rel=0.01
        )


def test_a_model_that_is_not_lent_is_copied_by_a_sampler_on_the_policys_cpu():
    assert phases("single", "cpu")["sampling"]["sampler"] == 0
    assert phases("flat", "cpu")["sampling"]["sampler"] == 4 * PARAMETERS
    assert phases("flat", "cuda:0")["sampling"]["sampler"] == 4 * PARAMETERS


def test_a_kind_for_one_device_is_refused_on_several(tiny_folder):
    args = from_preset(PlanArgs, "tiny", policy_parallelism="flat")
    machine = PlannedMachines(8, 1e9)
    with pytest.raises(
        Exception,
        match=r"^--policy_parallelism flat computes on one device, and the policy has 5 \(cuda:0,"
        r" .*cuda:4\): name one, as --policy_devices cuda:0, or choose layer_split, replicated or"
        " sharded",
    ):
        plan_policy(args, roles_of(args, 8), str(tiny_folder), machine)
    one = dataclasses.replace(args, policy_devices=("cuda:0",))
    plan = plan_policy(one, roles_of(one, 8), str(tiny_folder), machine)
    assert (plan.kind, plan.devices) == ("flat", ("cuda:0",))


def test_the_best_placements_have_a_kind_for_one_device_on_one_alone(tiny_folder):
    run = from_preset(
        RLArgs,
        "tiny",
        model=str(tiny_folder),
        sft_base="",
        sampler="transformers",
        max_prompt_tokens=300,
    )
    devices = {}
    for _, prediction in ranked(run, hardware_of("2xL4"), Known()):
        devices.setdefault(prediction.kind, set()).add(len(prediction.roles.policy))
    assert devices["flat"] == devices["single"] == {1}
    assert 1 not in devices.get("sharded", {2})


def test_engines_wait_for_a_policy_that_may_not_start_from_the_base(tiny_folder):
    args = from_preset(RLArgs, "tiny", policy_parallelism="flat")
    machine = PlannedMachines(1, 1e9)
    assert plan_run(args, str(tiny_folder), machine).engines_need_policy
    single = dataclasses.replace(args, policy_parallelism="single")
    assert not plan_run(single, str(tiny_folder), machine).engines_need_policy


def test_ranks_have_copies_or_parts():
    assert kind_of_ranks(1, lambda: False) == "single"
    assert kind_of_ranks(2, lambda: True) == "replicated"
    assert kind_of_ranks(2, lambda: False) == "sharded"


def test_the_default_on_several_devices_is_the_device_map():
    assert RLArgs().policy_parallelism == "device_map"
    assert kind_of_devices("device_map", 1) == "single"
    assert kind_of_devices("device_map", 2) == "layer_split"
    assert kind_of_devices("sharded", 2) == "sharded"


def test_help_lists_the_table(monkeypatch, capsys):
    assert "flat: weights in flat buffers" in kinds_in_words()
    assert all(kind.summary for kind in POLICIES.values())
    console = Console(file=io.StringIO(), width=100)
    monkeypatch.setattr(command_line, "make_console", lambda: console)
    with pytest.raises(SystemExit):
        command_line.parse(RLArgs, ["--help"])
    said = " ".join(console.file.getvalue().split())
    for name in ("single", "layer_split", "replicated", "sharded"):
        assert f"{name}: {POLICIES[name].summary}" in said
    assert all(f"{name}: {words}" in said for name, words in RESOLVED_KINDS.items())


def test_ligers_kernels_refuse_a_kind_that_passes_hidden_states_from_gpu_to_gpu():
    args = from_preset(RLArgs, "tiny", policy_parallelism="layer_split")
    object.__setattr__(args, "use_liger_kernel", True)
    with pytest.raises(Exception, match="choose --policy_parallelism replicated or sharded"):
        check_kernels(args, ("cuda:0", "cuda:1"))
