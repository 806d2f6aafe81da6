"""From a model's name and a machine's GPUs to folders and devices."""

import dataclasses
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from alignment.args import PlanArgs, RLArgs, from_preset
from alignment.builders import run_plan, samplers
from alignment.builders.base_models import resolve_model
from alignment.builders.devices import roles_of
from alignment.builders.policies import partition_model_across_devices
from alignment.model.loading import load_tokenizer
from alignment.planning.placement import Roles
from alignment.sampling.sampler import SAMPLERS
from alignment.system.errors import UserError
from tests.files import digest


def test_the_policy_is_partitioned_over_the_devices_without_another_role(tiny_folder):
    args = from_preset(RLArgs, "tiny", model=str(tiny_folder))
    device_map = partition_model_across_devices(args, num_gpus=5)
    assert device_map["model.embed_tokens"] == device_map["lm_head"] == "cuda:0"
    assert set(device_map.values()) == {"cuda:0", "cuda:1"}
    assert set(partition_model_across_devices(args, num_gpus=0).values()) == {"cpu"}


def test_the_reference_devices_on_eight_gpus(tiny_folder):
    args = from_preset(PlanArgs, "qwen2.5_math_1.5b_gsm8k_8gpu", model=str(tiny_folder))
    roles = roles_of(args, 8)
    assert (roles.sample, roles.reference, roles.eval) == (("cuda:7",), "cuda:6", "cuda:5")
    assert roles.policy == tuple(f"cuda:{number}" for number in range(5))
    assert not {"cuda:5", "cuda:6", "cuda:7"} & set(
        partition_model_across_devices(args, num_gpus=8).values()
    )
    assert set(partition_model_across_devices(args, num_gpus=4).values()) == {"cuda:0"}
    with pytest.raises(UserError, match="--sample_device cuda:7"):
        partition_model_across_devices(
            dataclasses.replace(args, sample_device=("cuda:7",)), num_gpus=4
        )


def test_an_embedded_model_is_built_once(tmp_path):
    folder = resolve_model("tiny", str(tmp_path))
    weights = digest(tmp_path / "tiny_base" / "model.safetensors")
    assert resolve_model("tiny", str(tmp_path)) == folder == str(tmp_path / "tiny_base")
    assert digest(tmp_path / "tiny_base" / "model.safetensors") == weights


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/c", "/nowhere"])
def test_a_folder_without_a_model_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        resolve_model(name, str(tmp_path))


def test_a_broken_config_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(resolve_model(str(tmp_path), str(tmp_path)))


@pytest.mark.parametrize(
    ("policy", "rollouts", "share"),
    [
        ("cuda:0", "sync", 0.9),
        ("cuda:0", "async", 0.45),
        ("cuda:7", "sync", 0.4),
        ("cuda:7", "async", 0.2),
    ],
)
def test_engines_on_one_gpu_share_its_memory(policy, rollouts, share, tiny_folder, monkeypatch):
    """With asynchronous rollouts the evaluation's engine and the rollouts' are two; a GPU of the
    policy's keeps room for it."""
    roles = Roles(policy=(policy,), sample=("cuda:7",), reference="cuda:6", eval="cuda:7")
    monkeypatch.setattr(run_plan, "roles_of", lambda args, num_gpus: roles)
    args = from_preset(RLArgs, "tiny", rollouts=rollouts)
    config = run_plan.plan_run(args, str(tiny_folder)).evaluation.config
    assert config.memory_share == pytest.approx(share)
    assert config.sleeps == (policy == "cuda:7")  # on the policy's GPU alone


class Opening:
    """Stands in for an `Opening`: says when it may take memory."""

    def __init__(self, name, open_sampler):
        self.name, self.open_sampler, self.allowed = name, open_sampler, False

    def allow(self):
        self.allowed = True

    def close(self):
        pass


@pytest.mark.parametrize(
    ("rollouts", "policy", "sample", "evaluation", "allowed"),
    [
        ("sync", "cuda:0", "cuda:0", "cuda:0", {"evaluation": False}),  # one GPU for all
        ("sync", "cuda:0", "cuda:1", "cuda:1", {"evaluation": True}),
        ("sync", "cuda:0", "cuda:1", "cuda:2", {"evaluation": True, "rollouts": True}),
        (
            "sync",
            "cuda:0",
            "cuda:1",
            "cuda:6",
            {"evaluation": False, "rollouts": True},
        ),  # beside the reference
        (
            "async",
            "cuda:0",
            "cuda:1",
            "cuda:1",
            {"evaluation": False, "rollouts": False},
        ),  # one after the other
        ("async", "cuda:0", "cuda:1", "cuda:0", {"evaluation": False, "rollouts": True}),
        ("sync", "cpu", "cpu", "cpu", {"evaluation": False}),
    ],
)
def test_engines_take_memory_beside_the_models_loading_on_devices_of_nobody_elses(
    rollouts, policy, sample, evaluation, allowed, tiny_folder, monkeypatch
):
    reference = "cpu" if policy == "cpu" else "cuda:6"
    roles = Roles(policy=(policy,), sample=(sample,), reference=reference, eval=evaluation)
    monkeypatch.setattr(run_plan, "roles_of", lambda args, num_gpus: roles)
    monkeypatch.setattr(samplers, "Opening", Opening)
    monkeypatch.setattr(samplers, "find_engine", lambda name: SAMPLERS["vllm"])
    args = from_preset(RLArgs, "tiny", rollouts=rollouts)
    with ExitStack() as closing:
        run = SimpleNamespace(last_step=0, closing=closing)
        plan = run_plan.plan_run(args, str(tiny_folder))
        engines = samplers.Engines(plan, run, None)
        assert {use: opening.allowed for use, opening in engines.openings.items()} == allowed


def test_a_command_that_waits_for_an_engine_leaves_it_able_to_be_replaced(tiny_folder, monkeypatch):
    """And ends the processes of one that it no longer waits for."""
    log = []

    class Waiting(Opening):
        def result(self, console):
            log.append(f"wait for {self.name}")
            if console == "interrupted":
                raise KeyboardInterrupt
            return "the sampler"

        def close(self):
            log.append("close")

    monkeypatch.setattr(samplers, "Opening", Waiting)
    monkeypatch.setattr(samplers, "find_engine", lambda name: SAMPLERS["vllm"])
    args = from_preset(RLArgs, "tiny", sampler="vllm")
    plan = run_plan.plan_engine(args, roles_of(args, 0), str(tiny_folder), ("cpu",))
    assert samplers.make_sampler(plan, None, console="console") == "the sampler"
    with pytest.raises(KeyboardInterrupt):
        samplers.make_sampler(plan, None, console="interrupted")
    assert log == ["wait for vLLM", "wait for vLLM", "close"]


def test_an_engine_that_reads_the_policy_is_not_opened_before_it(tiny_folder):
    args = from_preset(RLArgs, "tiny", sampler="transformers")
    plan = run_plan.plan_run(args, str(tiny_folder))
    run = SimpleNamespace(last_step=0, closing=None)
    assert samplers.Engines(plan, run, None).openings == {}


def test_engines_of_a_policy_of_several_machines_wait_for_it(tiny_folder, monkeypatch):
    """It says which machines those are."""
    monkeypatch.setattr(run_plan, "PROCESSES", 2)
    monkeypatch.setattr(samplers, "find_engine", lambda name: SAMPLERS["vllm"])
    args = from_preset(RLArgs, "tiny")
    plan = run_plan.plan_run(args, str(tiny_folder))
    run = SimpleNamespace(last_step=0, closing=None)
    assert samplers.Engines(plan, run, None).openings == {}


@pytest.mark.parametrize(("url", "share"), [("", 0.2), ("http://127.0.0.1:8000", 0.4)])
def test_an_evaluations_engine_shares_a_gpu_with_engines_that_are_there(url, share, tiny_folder):
    """By default vLLM's engines take 0.4 of a GPU of the policy's. Those of asynchronous rollouts
    are beside the evaluation's, but for a server's, which is elsewhere."""
    args = from_preset(RLArgs, "tiny", sampler="vllm", rollouts="async", sampler_url=url)
    plan = run_plan.plan_run(args, str(tiny_folder), run_plan.PlannedMachines(1, 80e9))
    assert plan.evaluation.config.memory_share == share
