"""`plan` for policies of several processes: what each holds, whether that fits, and the command
that trains so."""

import dataclasses
import io
import json
import math
import re

import pytest
from rich.console import Console

from alignment import plan
from alignment.args import PlanArgs, RLArgs, from_preset
from alignment.builders import prediction
from alignment.builders.devices import roles_of
from alignment.builders.prediction import (
    kinds_by_plan,
    predict,
    span,
    steps_of_kinds,
    with_fastest_kind,
)
from alignment.builders.run_plan import PlannedMachines, plan_policy, plan_run
from alignment.builders.training import announced_plan
from alignment.system.errors import UserError


@pytest.fixture
def planned(tiny_folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*flags: str) -> str:
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(
            "sys.argv", ["plan", "--model", str(tiny_folder), "--sampler", "transformers", *flags]
        )
        plan.main()
        return capsys.readouterr().out

    return run


def test_several_machines_are_started_by_torchrun(planned):
    said = planned("--num_gpus", "8", "--machines", "2", "--policy_parallelism", "sharded")
    start = (
        "torchrun --nnodes 2 --nproc_per_node 5 --rdzv_backend c10d --rdzv_endpoint HOST:29500 -m"
        " alignment.train_rl"
    )
    command = said.splitlines()[-1]
    assert (
        command.startswith(start)
        and "--policy_parallelism sharded" in command
        and "--policy_ranks" not in command
    )


def test_gpus_without_a_role_are_named(planned):
    """Sampler, reference and eval take the last three of five, and the policy is given the
    first."""
    hint = "unused: cuda:1 (--policy_devices and --sample_device name the devices of policy and"
    flags = ("--num_gpus", "5", "--gpu_memory", "80", "--policy_devices", "cuda:0")
    assert f"{hint} sampler; --best ranks other placements)\n" in planned(*flags)
    assert f"{hint} sampler)\n" in planned(*flags, "--best")
    assert "unused" not in planned(*flags, "cuda:1", "--policy_parallelism", "layer_split")


def test_the_engine_that_auto_took_is_said(planned, monkeypatch):
    monkeypatch.setattr("alignment.sampling.sampler.find_spec", lambda package: None)
    line = "sampler: transformers, as vLLM is not installed here; with --sampler vllm the plan"
    assert line in planned("--num_gpus", "2", "--sampler", "auto")
    assert line not in planned("--num_gpus", "2", "--sampler", "vllm")
    assert line not in planned("--num_gpus", "0", "--sampler", "auto")


def test_the_command_installs_what_its_flags_need(planned):
    flags = ("--num_gpus", "2", "--gpu_memory", "80", "--sampler", "vllm", "--lora_rank", "8")
    command = planned(*flags).splitlines()[-1]
    assert command.startswith("uv run --extra lora --extra vllm -m alignment.train_rl --preset")


def test_ranks_on_a_cpu_share_the_hosts_memory(planned):
    """Each takes 0.8 GB for Python, torch and transformers, so that two do not fit into 1 GB."""
    flags = ("--num_gpus", "0", "--policy_parallelism", "replicated", "--policy_ranks", "2")
    said = planned(*flags, "--gpu_memory", "8")
    assert said.splitlines()[-1].startswith("uv run -m alignment.train_rl --preset tiny")
    assert said.splitlines()[-1].endswith("--policy_parallelism replicated --policy_ranks 2")
    assert said.count("of 8 GB, fits") == 2 and "rank 0, cpu" in said and "rank 1, cpu" in said
    assert planned(*flags, "--gpu_memory", "1").count("of 1 GB, does not fit") == 2


def test_no_command_is_printed_for_what_does_not_fit(planned):
    """Where flags would make it fit, they are in the command."""
    flags = ("--num_gpus", "0", "--policy_parallelism", "replicated", "--policy_ranks", "2")
    said = planned(*flags, "--gpu_memory", "1")
    assert "no flag, and no two of them, would make it fit" in said
    assert said.splitlines()[-1] == ("no command is printed, since what was asked for does not fit")


@pytest.mark.parametrize(
    ("hours", "is_guess"),
    [([], False), ([(1, 2)], False), ([(1, 2), (2, 4)], False), ([(1, 3), (2, 4)], True)],
)
def test_an_order_of_ranges_that_overlap_is_a_guess(hours, is_guess):
    assert plan.order_is_guess([{"seconds": {"hours": pair}} for pair in hours]) == is_guess


def test_auto_replicates_what_fits_70_percent_of_each_gpu(planned, tiny_folder):
    """466,304 parameters of 16 bytes each, with AdamW."""
    args = from_preset(PlanArgs, "tiny", optimizer="adamw", policy_parallelism="auto")
    for memory, kind in ((16 * 466_304 / 0.699, "replicated"), (16 * 466_304 / 0.701, "sharded")):
        machine = PlannedMachines(8, memory)
        assert plan_policy(args, roles_of(args, 8), str(tiny_folder), machine).kind == kind
    flags = ("--num_gpus", "8", "--policy_parallelism", "auto")
    assert "policy replicated" in planned(*flags, "--gpu_memory", "1")
    with pytest.raises(UserError, match="auto depends on the memory of a GPU: give --gpu_memory"):
        planned(*flags)


def test_auto_is_the_fastest_kind_that_fits():
    """On eight cards all kinds fit, and devices that work side by side beat those in a row; with
    16 bytes a parameter on no card only parts and layers are left."""
    args = from_preset(RLArgs, "async_gsm8k", policy_parallelism="auto", sampler="transformers")
    for memory in (80e9, 20e9):
        machines = PlannedMachines(8, memory)
        steps = steps_of_kinds(args, machines)
        assert set(steps) == {"layer_split", "replicated", "sharded"}
        assert (steps["replicated"] is None) == (memory == 20e9)
        middles = {kind: math.prod(step) for kind, step in steps.items() if step}
        fastest = with_fastest_kind(args, machines).policy_parallelism
        assert fastest == min(middles, key=lambda kind: middles[kind])
        line = kinds_by_plan(args, fastest, ("cuda:0", "cuda:1"), machines)
        assert line.startswith(f"policy: {fastest} on cuda:0 cuda:1; by the plan: layer_split ")
        assert ("replicated does not fit" in line) == (memory == 20e9)
    default = dataclasses.replace(args, policy_parallelism="device_map")
    assert with_fastest_kind(default, machines) is default
    assert predict(default, machines).kind == "layer_split"


def test_auto_behind_torchrun_is_the_fastest_kind_on_all_its_machines(tiny_folder, monkeypatch):
    """Also where another one is the fastest on one machine."""

    def steps_of_kinds(args, machines):
        seconds = {"replicated": machines.number * 2.0, "sharded": 3.0}
        return {kind: (step, step) for kind, step in seconds.items()}

    monkeypatch.setattr(prediction, "steps_of_kinds", steps_of_kinds)
    args = from_preset(RLArgs, "tiny", policy_parallelism="auto", policy_ranks=2)
    console = Console(file=io.StringIO())
    kinds = []
    for machines in (1, 2):
        monkeypatch.setattr(prediction, "MACHINES", machines)
        kinds.append(announced_plan(args, str(tiny_folder), console).policy.kind)
    assert kinds == ["replicated", "sharded"]


def test_a_policy_of_one_process_needs_one_machine(planned):
    with pytest.raises(
        UserError, match="--machines 2: a policy that is layer_split is one process"
    ):
        planned("--machines", "2", "--policy_parallelism", "layer_split", "--num_gpus", "8")


def test_the_reference_recipe_is_planned_for_other_numbers_of_gpus(planned):
    """Its roles take the last GPUs, of eight as of four."""
    said = planned("--preset", "qwen2.5_math_1.5b_gsm8k_8gpu", "--num_gpus", "4")
    rows = {
        line.split("│")[1].strip(): line.split("│")[2].strip()
        for line in said.splitlines()
        if line.startswith("│ cuda")
    }
    assert rows == {"cuda:0": "policy", "cuda:1": "eval", "cuda:2": "reference", "cuda:3": "sample"}
    with pytest.raises(UserError, match="--sample_device cuda:6"):
        planned(
            "--preset",
            "qwen2.5_math_1.5b_gsm8k_8gpu",
            "--num_gpus",
            "4",
            "--sample_device",
            "cuda:6",
        )


@pytest.mark.parametrize(
    ("model", "parameters"),
    [("Qwen/Qwen2.5-Math-1.5B", 1_543_714_304), ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512)],
)
def test_a_published_model_is_planned_without_the_hub(model, parameters, planned, monkeypatch):
    monkeypatch.setattr(prediction, "resolve_model", None)  # which would ask it
    said = planned(
        "--model",
        model,
        "--num_gpus",
        "8",
        "--policy_parallelism",
        "sharded",
        "--gpu_memory",
        "80",
        "--dtype",
        "float32",
        "--beta",
        "0.1",
    )
    reference = next(line for line in said.splitlines() if "reference" in line)
    assert f"{4 * parameters / 1e9:.2f}" in reference


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        ("", 0),
        ("--beta 0.1", 1),
        # The policy without its adapters is the reference, until a reset asks for other weights.
        ("--beta 0.1 --lora_rank 4", 0),
        ("--beta 0.1 --lora_rank 4 --reference_reset_interval 3", 1),
    ],
)
def test_the_table_has_the_reference_that_a_run_keeps(flags, models, planned):
    said = planned("--num_gpus", "1", "--gpu_memory", "8", *flags.split())
    rows = [line.split("│")[2].strip() for line in said.splitlines() if line.startswith("│ cuda")]
    assert rows == ["policy", "sample+eval", *["reference"] * models]


def test_hardware_says_gpus_machines_memory_and_seconds(planned, tmp_path):
    """Of one GPU-hour for 10 dollars, so that dollars are 10 times the GPU-hours."""
    said = planned(
        "--hardware",
        "2x8xA100-40GB",
        "--policy_parallelism",
        "sharded",
        "--price",
        "10",
        "--json",
        "plan.json",
    )
    # of several lines where the model's path is long
    title = " ".join(said.partition("┏")[0].split())
    assert (
        "tiny" in title
        and "on 2x8xA100-40GB, policy sharded" in title
        and said.count("of 40 GB, fits") == 7
    )
    assert said.splitlines()[-1].startswith("torchrun --nnodes 2 --nproc_per_node 5")
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert set(facts) == {
        "run",
        "machine",
        "peaks",
        "fits",
        "remedies",
        "seconds",
        "dollars",
        "off",
        "best",
        "command",
    }
    assert (
        facts["command"] == said.splitlines()[-1]
        and facts["run"]["policy_parallelism"] == "sharded"
    )
    assert facts["machine"]["gpus"] == 8 and facts["machine"]["card"]["bandwidth"] == 1555
    # no reference
    assert [peak["device"] for peak in facts["peaks"]] == [
        f"cuda:{gpu}" for gpu in (0, 1, 2, 3, 4, 5, 7)
    ]
    assert facts["peaks"][0]["excess"] < 0 < facts["peaks"][0]["phases"]["update"]["weights"]
    seconds = facts["seconds"]
    assert set(seconds["phases"]) == {
        "sampling",
        "old_log_probs",
        "update",
        "sync",
        "evaluation",
        "checkpoint",
    }
    hours = seconds["gpu_hours"]
    assert hours == pytest.approx([16 * end for end in seconds["hours"]]) and facts["dollars"] == [
        10 * end for end in hours
    ]
    line = next(line for line in said.splitlines() if line.startswith("the whole run"))
    assert f"{span(hours)} GPU-hours, {span([10 * end for end in hours])} dollars; " in line
    step = next(line for line in said.splitlines() if line.startswith("seconds"))
    assert step.startswith(
        f"seconds (not calibrated, hence wide): a step {span(seconds['step'])}, and by phase:"
        " sampling "
    )


def test_seconds_are_of_any_card_where_none_is_named(planned):
    any_card = (
        "seconds (not calibrated, hence wide; of any card, where there are GPUs: name yours with"
        " --hardware): a step "
    )
    assert any_card in planned("--num_gpus", "8", "--gpu_memory", "80")
    with pytest.raises(UserError, match="--hardware 8xT4: says all that"):
        planned("--hardware", "8xT4", "--num_gpus", "8")
    with pytest.raises(UserError, match="none is no run's folder"):
        planned("--calibrate", "none")


def test_worked_solutions_take_no_sampling(planned):
    flags = ("--loss_type", "no_baseline", "--group_size", "1")
    said = planned(*flags)
    assert "sampling" in said and "sampled tokens a second" in said
    said = planned(*flags, "--train_on", "solutions")
    assert "sampling" not in said and "sampled" not in said
    assert "update" in said and "evaluation" in said
    # On GPUs nothing is left of the sampler's.
    assert "sample+eval" in planned(*flags, "--train_on", "solutions", "--num_gpus", "4")


def test_the_best_is_printed_with_its_rank(planned):
    """Three GPUs: the policy on one, beside two engines or one engine and the others' models; or on
    two, by three kinds."""
    said = planned("--hardware", "3xL4", "--best").splitlines()[-6:]
    assert said[0].startswith("placements that fit, fastest run first")
    assert [line.split(" ", 1)[0] for line in said[1:]] == [
        "1.",
        "2.",
        "3.",
        "4.",
        "5.",
    ]
    assert (
        all("GPU-hours: uv run -m alignment.train_rl --preset tiny" in line for line in said[1:])
        and len(set(said)) == 6
    )


@pytest.mark.slow
def test_flags_that_would_make_a_run_fit_are_tried(planned):
    """16 bytes a parameter less with adapters; fewer tokens at a time; a smaller share for an
    engine that is awake, while it samples. Not: a known optimizer; nor that share where the update
    is the peak, for the engine sleeps then."""
    flags = (
        "--preset",
        "single_gpu_gsm8k_kl",
        "--model",
        "Qwen/Qwen2.5-1.5B-Instruct",
        "--sampler",
        "vllm",
        "--num_gpus",
        "1",
        "--max_new_tokens",
        "200",
        "--no_gradient_checkpointing",
        "--gpu_memory_utilization",
        "0.25",
    )
    said = planned(*flags, "--gpu_memory", "26")
    assert "does not fit by 2.8 GB" in said and "; sampling " in said
    assert "with --micro_batch_tokens 512 it would fit: 24.0 GB on the fullest device" in said
    assert "with --lora_rank 16 it would fit: 19.5 GB on the fullest device" in said
    assert (
        "adamw_cpu_offload it would fit" not in said and "with --gpu_memory_utilization" not in said
    )
    assert "with --micro_batch_tokens 0 --lora_rank 16 it would fit" in planned(
        *flags, "--gpu_memory", "20"
    )
    said = planned(*flags, "--gpu_memory", "40", "--gpu_memory_utilization", "0.9")
    # Weights 6.2, reference 3.6, two contexts 1.6, and 36 of 40 GB; with 0.4 the update is the
    # peak.
    assert "47.5 of 40 GB, does not fit by 9.5 GB (sampling: " in said
    assert "with --gpu_memory_utilization 0.4 it would fit: 27.5 GB on the fullest device" in said
    assert "no flag, and no two of them, would make it fit" in planned(*flags, "--gpu_memory", "6")
    assert "would fit" not in planned(*flags, "--gpu_memory", "48")


def test_a_run_that_will_not_fit_is_warned_of(tiny_folder, monkeypatch):
    """0.8 GB for Python with its libraries do not fit 0.5; and a run whose model is not there is
    not predicted."""
    console = Console(record=True, width=300, file=io.StringIO())
    args = from_preset(RLArgs, "tiny", sft_base=str(tiny_folder))
    monkeypatch.setattr(prediction, "total_bytes", lambda device: int(0.5e9))
    prediction.warn_of_short_memory(args, console)
    assert "warning: cpu will lack" in (said := console.export_text()) and said.count("\n") == 1
    absent = dataclasses.replace(args, model="/nowhere", sft_base="")
    prediction.warn_of_short_memory(absent, console)
    assert console.export_text() == ""
    plan = plan_run(args, str(tiny_folder))
    assert prediction.expected_peaks(args, plan)(0)[0].name == "cpu"
    plan = dataclasses.replace(plan, base="/nowhere")
    assert prediction.expected_peaks(args, plan)(0) == []


def test_what_was_not_counted_neither_fits_nor_lacks_memory(planned, tmp_path):
    """GPUs of unknown memory."""
    said = planned("--num_gpus", "8", "--policy_parallelism", "layer_split", "--json", "plan.json")
    facts = json.loads((tmp_path / "plan.json").read_text())
    assert facts["fits"] is None and facts["peaks"] == facts["remedies"] == [] and "fit" not in said


def test_a_host_of_unknown_memory_does_not_decide(planned, tmp_path):
    """That of other machines, beside GPUs that are known."""
    flags = ("--num_gpus", "1", "--gpu_memory", "80", "--json", "plan.json")
    said = planned(*flags, "--beta", "0.1", "--reference_model_device", "cpu")
    assert re.search(
        r"^cpu, peak of a step: \d.\d GB, of a memory that is not known \(", said, re.M
    )
    assert re.search(r"^cuda:0, peak of a step: \d.\d of 80 GB, fits \(", said, re.M)
    facts = json.loads((tmp_path / "plan.json").read_text())
    excess = {peak["device"]: peak["excess"] for peak in facts["peaks"]}
    assert facts["fits"] is True and excess["cuda:0"] < 0 and excess["cpu"] is None


def test_a_model_that_transformers_cannot_make_is_one_clear_line(
    planned, tiny_folder, tmp_path, monkeypatch
):
    """A configuration whose attention heads do not divide its width, say: the class itself
    raises."""

    def fail(config):
        raise AssertionError("no such layers")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", fail)
    with pytest.raises(
        UserError, match="--model: transformers makes no qwen2 of its config.json .*no such layers"
    ):
        planned("--num_gpus", "0", "--lora_rank", "3")  # which no other test has counted
