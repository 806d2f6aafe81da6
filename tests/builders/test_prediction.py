"""A run's predicted seconds: hand-worked links, ranges and totals; what can only make it slower;
and finished runs' rates."""

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from alignment.args import RLArgs, from_preset, parse
from alignment.builders.prediction import (
    Known,
    PhaseSample,
    calibrate,
    duration,
    peaks_of_micro_batches,
    planned_machines,
    predict,
    ranked,
    read_finished_run,
    seconds_of,
    span,
    steps_of_kinds,
    work_of_phases,
)
from alignment.builders.run_plan import PlannedMachines
from alignment.plan import command_of
from alignment.planning.measured_memory import CUDA_CONTEXT_BYTES, PYTHON_BYTES
from alignment.planning.phase_work import Shares
from alignment.planning.seconds import CARDS, NUMBERS, Hardware, Rates, hardware_of, rates
from alignment.planning.work import UnitSeconds, Work
from alignment.system.errors import UserError

TOTAL = 466_304  # parameters of the tiny model
SHARES = Shares(prompt=0.1, response=0.5, trained=1.0)
ONES = UnitSeconds(*[1.0] * 7)
DONE = Work(operations=6.0, memory_bytes=4.0, launches=2.0)
EIGHT = hardware_of("8xA100-40GB")


@pytest.fixture
def arguments(tiny_folder):
    def make(**others) -> RLArgs:
        given = {
            "model": str(tiny_folder),
            "sft_base": "",
            "sampler": "transformers",
            "dtype": "bfloat16",
            "max_prompt_tokens": 300,
        }
        return from_preset(
            RLArgs, "tiny", **given | {"num_steps": 80, "eval_interval": 20} | others
        )

    return make


def works(args: RLArgs, hardware: Hardware = EIGHT, **shares) -> dict[str, dict[str, float]]:
    prediction = predict(args, planned_machines(hardware))
    phases = work_of_phases(prediction, hardware.machines, SHARES._replace(**shares))
    return {phase: asdict(work) for phase, work in phases.items()}


def test_what_goes_over_links_is_hand_worked(arguments):
    """Five policy GPUs. A gradient's sum sends and receives 4 bytes of each number. A part of five
    gathers 4 bytes of what the others hold in each of three passes, and sends their gradients. Four
    borders see fp32 hidden states and gradients."""
    # two updates of one micro-batch each
    facts = {
        "train_mini_batch_size": 128,
        "micro_batch_tokens": 10**6,
    }
    links = {
        kind: works(arguments(policy_parallelism=kind, **facts))["update"]["link_bytes"]
        for kind in ("replicated", "sharded")
    }
    assert links == {
        "replicated": 8 * TOTAL * 2,
        "sharded": pytest.approx((3 * 4 + 4) * TOTAL * 0.8 * 2),
    }
    tokens = 32 * 0.1 * 300 + 256 * 0.5 * 48
    split = works(arguments(policy_parallelism="layer_split", **facts))["update"]["link_bytes"]
    assert split == pytest.approx(8 * 128 * tokens * 4)
    two = works(arguments(policy_parallelism="sharded", **facts), hardware_of("2x8xA100-40GB"))[
        "update"
    ]
    assert (
        two["network_bytes"] == pytest.approx(8 * TOTAL / 5 * 2)
        and works(arguments())["update"]["network_bytes"] == 0
    )


def test_ranks_share_operations_and_split_layers_all_but_their_idle_time(arguments):
    one, five, split = (
        works(
            arguments(
                policy_parallelism=kind,
                policy_devices=("cuda:0",) if kind == "single" else (),
                policy_ranks=ranks,
                train_mini_batch_size=0,
                micro_batch_tokens=1775,
            )
        )
        for kind, ranks in (("single", 0), ("replicated", 5), ("layer_split", 0))
    )
    assert five["update"]["operations"] == pytest.approx(one["update"]["operations"] / 5)
    # 7,104 tokens are five micro-batches, of which five stages compute one at a time: 9 turns, not
    # 5.
    assert split["update"]["operations"] == pytest.approx(one["update"]["operations"] * 9 / 25)
    assert works(arguments(lora_rank=0))["checkpoint"] == asdict(Work(disk_bytes=12 * TOTAL))


def test_a_frozen_model_computes_all_rows_on_one_device(arguments):
    """A reference, by eager kernels, and a copy of the old policy, by the policy's. Ranks have no
    such copy, and with adapters the policy itself is the reference: then all of them share rows."""

    def passes(kind: str, **flags) -> dict[str, dict[str, float]]:
        devices = ("cuda:0",) if kind == "single" else ()
        args = arguments(beta=0.1, policy_parallelism=kind, policy_devices=devices, **flags)
        return works(args)

    one = passes("single")
    for kind in ("replicated", "sharded", "layer_split"):
        assert passes(kind)["reference"]["operations"] == one["reference"]["operations"]
        assert passes(kind)["reference"]["link_bytes"] == 0
    assert one["reference"]["memory_bytes"] > one["old_log_probs"]["memory_bytes"]
    of_old = "old_log_probs"
    assert passes("layer_split")[of_old]["operations"] == one[of_old]["operations"]
    split = passes("replicated")[of_old]["operations"]
    assert split == pytest.approx(one[of_old]["operations"] / 5)
    adapters = [passes(kind, lora_rank=4)["reference"] for kind in ("single", "replicated")]
    assert adapters[1]["operations"] == pytest.approx(adapters[0]["operations"] / 5)


def test_an_evaluation_is_divided_where_it_shares_the_sampler_of_rollouts(arguments):
    """Two engines on each of two machines sample four times as fast as one. An evaluation on a GPU
    of its own, or beside rollouts that go on, is one engine's."""

    def operations(phase: str, text: str = "8xA100-40GB", **placed) -> float:
        args = arguments(policy_parallelism="sharded", policy_devices=("cuda:0",), **placed)
        return works(args, hardware_of(text))[phase]["operations"]

    two = ("cuda:6", "cuda:7")
    alone = operations("evaluation", eval_device="cuda:5", sample_device=("cuda:7",))
    sampled = operations("sampling", eval_device="cuda:5", sample_device=("cuda:7",))
    for text, engines in (("8xA100-40GB", 2), ("2x8xA100-40GB", 4)):
        apart = {"text": text, "sample_device": two, "eval_device": "cuda:5"}
        assert operations("sampling", **apart) == pytest.approx(sampled / engines)
        assert operations("evaluation", **apart) == alone
        shared = {"text": text, "sample_device": two, "eval_device": "cuda:6"}
        assert operations("evaluation", **shared) == pytest.approx(alone / engines)
        assert operations("evaluation", rollouts="async", **shared) == alone


@pytest.mark.parametrize("flags", [{"token_selection": "top_entropy"}, {"entropy_target": 0.2}])
def test_an_update_that_looks_at_all_its_tokens_first_takes_a_forward_pass_more(flags, arguments):
    """In each epoch, and also of rows without a gradient."""
    facts = {"epochs_per_rollout": 2, "policy_devices": ("cuda:0",)}
    alone, prepared = (works(arguments(**facts, **others), trained=0.5) for others in ({}, flags))
    more = prepared["update"]["operations"] - alone["update"]["operations"]
    assert more == pytest.approx(2 * alone["old_log_probs"]["operations"])


def test_a_run_is_its_steps_evaluations_and_checkpoints(arguments):
    """80 steps, of which every 20th is followed by an evaluation and a checkpoint; one evaluation
    comes before."""
    spent = duration(predict(arguments(), planned_machines(EIGHT)), EIGHT, Known())
    phases = spent.phases
    for end in (0, 1):
        step = sum(
            seconds[end]
            for phase, seconds in phases.items()
            if phase not in ("evaluation", "checkpoint")
        )
        assert spent.step[end] == pytest.approx(step)
        run = 80 * step + 5 * phases["evaluation"][end] + 4 * phases["checkpoint"][end]
        assert spent.hours[end] == pytest.approx(run / 3600) and spent.gpu_hours[
            end
        ] == pytest.approx(8 * run / 3600)
        assert spent.evaluations_gpu_hours[end] == pytest.approx(
            8 * 5 * phases["evaluation"][end] / 3600
        )
    ahead = duration(predict(arguments(rollouts="async"), planned_machines(EIGHT)), EIGHT, Known())
    assert ahead.step[1] == pytest.approx(
        max(phases["sampling"][1], spent.step[1] - phases["sampling"][1])
    )


@pytest.mark.parametrize(
    "more",
    [
        {"max_new_tokens": 64},
        {"group_size": 16},
        {"prompts_per_rollout": 64},
        {"epochs_per_rollout": 2},
        {"beta": 0.1},
        {"max_prompt_tokens": 400},
        {"max_refills": 2},
        {"train_mini_batch_size": 64},
        {"max_problems": 1024},
        {"num_steps": 81},
    ],
)
@pytest.mark.parametrize("kind", ["single", "replicated", "sharded", "layer_split"])
def test_more_to_do_is_never_faster(more, kind, arguments):
    base = arguments(
        policy_parallelism=kind,
        train_mini_batch_size=128,
        policy_devices=("cuda:0",) if kind == "single" else (),
    )
    less, longer = (
        duration(predict(args, planned_machines(EIGHT)), EIGHT, Known())
        for args in (base, replace(base, **more))
    )
    assert less.hours < longer.hours and less.hours[1] <= longer.hours[1]


@pytest.mark.parametrize(
    ("slow", "fast"),
    [("A100-40GB", "A100-80GB"), ("A100-80GB", "H100"), ("H100", "H200"), ("L4", "L40S")],
)
def test_a_faster_card_is_never_slower(slow, fast, arguments):
    """By their numbers alone; of one that was measured more is known."""
    assert all(
        CARDS[fast][number] >= CARDS[slow][number]
        for number in ("bfloat16", "float32", "bandwidth", "link", "network")
    )
    prediction = predict(arguments(), planned_machines(EIGHT))
    before, after = (
        duration(prediction, of_unmeasured(f"8x{card}"), Known()) for card in (slow, fast)
    )
    for phase, seconds in before.phases.items():
        assert all(new <= old for new, old in zip(after.phases[phase], seconds, strict=True))


def of_unmeasured(text: str) -> Hardware:
    """Machines of a card's numbers that are in no table."""
    hardware = hardware_of(text)
    assert hardware.card is not None
    return hardware._replace(card={number: hardware.card[number] for number in NUMBERS})


def test_more_is_known_of_a_card_that_was_measured(arguments):
    """Its range is within the one that its numbers alone give."""
    prediction = predict(arguments(), planned_machines(EIGHT))
    known = duration(prediction, hardware_of("8xH200"), Known()).phases
    by_numbers = duration(prediction, of_unmeasured("8xH200"), Known()).phases
    assert by_numbers["update"].least < known["update"].least
    assert known["update"].most < by_numbers["update"].most


def test_kinds_of_policy_are_compared_on_the_named_card(arguments):
    by_card = {}
    for card in ("L4", "L40S"):
        machines = planned_machines(hardware_of(f"8x{card}"))
        by_card[card] = steps_of_kinds(arguments(), machines)["replicated"]
    hardware = hardware_of("8xL4")
    run = arguments(policy_parallelism="replicated")
    expected = duration(predict(run, planned_machines(hardware)), hardware, Known()).step
    assert by_card["L4"] == expected
    assert by_card["L40S"] < by_card["L4"]


def test_a_range_is_from_full_overlap_to_none():
    at_rates = Rates(ONES, UnitSeconds(*[2.0] * 7))
    assert seconds_of("update", DONE, at_rates, Known()) == (6.0, 24.0)


def test_finished_runs_correct_a_phase_by_runs_of_its_size():
    """Rates say 12 seconds. The phase took 2 times what rates said in a run of 12 seconds, 1.8
    times in one of 12 e^0.9: their weights are 1 / 0.1^2 = 100 and 1 / (0.1 + 0.9)^2 = 1. The range
    is the ratio of both corrections, but at least 1.25 either way, and 1.1 times wider for each
    e-fold of size that the nearest run is off."""
    samples = [("update", 12.0, 2.0), ("update", 12 * np.exp(0.9), 1.8), ("sync", 1.0, 9.0)]
    known = Known(ONES, [PhaseSample(*sample) for sample in samples])
    middle = 12 * np.exp((100 * np.log(2) + np.log(1.8)) / 101)
    assert seconds_of("update", DONE, None, known) == pytest.approx((middle / 1.25, middle * 1.25))
    alone = Known(ONES, [PhaseSample("update", 12.0, 2.0)])
    assert seconds_of("update", DONE, None, alone) == pytest.approx((24 / 1.5, 24 * 1.5))
    assert seconds_of("update", DONE * np.e, None, alone) == pytest.approx(
        (24 * np.e / 1.65, 24 * np.e * 1.65)
    )


TRUE_RATES = UnitSeconds(1e-9, 1e-9, 1e-4, 0.0, 0.0, 0.0, 0.0)


@pytest.fixture
def finished(tmp_path, tiny_folder, arguments):
    """A finished run of a machine whose rates are known: 1 Gflop, 1 GB and 10,000 kernels a
    second."""

    def write(name: str, **others):
        args = arguments(micro_batch_tokens=4096, **others)
        work = work_of_phases(predict(args, PlannedMachines(0)), 1, SHARES)
        seconds = {phase: TRUE_RATES.in_turn(done) for phase, done in work.items()}
        names = {"sampling": "seconds_sample"}
        record = {names.get(phase, f"seconds_{phase}"): taken for phase, taken in seconds.items()}
        lengths = {
            "response_length": 0.5 * args.max_new_tokens,
            "responses": 256,
            "rows_with_gradient": 256,
        }
        run = tmp_path / name
        (run / "completions").mkdir(parents=True)
        (run / "final").symlink_to(tiny_folder)
        (run / "completions" / "rollout_000002.jsonl").write_text(
            json.dumps({"prompt_ids": [1] * 30}) + "\n"
        )
        (run / "args.json").write_text(
            json.dumps({"args": vars(args), "command": [], "versions": {}})
        )
        steps = [record | lengths | {"step": step, "micro_batch_tokens": 4096} for step in (1, 2)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
        (run / "evals.jsonl").write_text(
            json.dumps({"step": 0, "seconds": seconds["evaluation"]}) + "\n"
        )
        (run / "summary.json").write_text("{}")
        return str(run)

    return write


def test_a_machines_rates_are_learnt_from_one_run_and_hold_for_another_shape(finished, arguments):
    known = calibrate([finished("one")], 2)
    assert known.fit.amounts[:3] == pytest.approx([1e-9, 1e-9, 1e-4], rel=1e-6)
    assert known.least == known.most == Shares(prompt=0.1, response=0.5, trained=1.0)
    # sampling, two passes, update, evaluation, sync
    assert [beyond for *_, beyond in known.samples] == pytest.approx([1.0] * 5)
    other = predict(arguments(group_size=16, max_new_tokens=100), PlannedMachines(0))
    spent = duration(other, hardware_of(""), known).phases
    for phase, done in work_of_phases(other, 1, SHARES).items():
        if phase != "checkpoint":
            assert np.sqrt(np.prod(spent[phase])) == pytest.approx(
                TRUE_RATES.in_turn(done), rel=1e-6
            )
    wide = duration(other, hardware_of(""), Known()).phases
    assert spent["update"][1] / spent["update"][0] < wide["update"][1] / wide["update"][0]


def test_a_finished_run_is_of_the_planned_machine_and_not_of_this_one(finished, arguments):
    """On a machine without GPUs for one that has some: its run computed in 16 bits, as `auto` does
    there, and by a GPU's kernels."""
    machines = PlannedMachines(1, 80e9, number=2)
    run = finished("one", dtype="auto")
    phases = read_finished_run(Path(run), 2, machines).phases
    prediction = predict(arguments(dtype="auto", micro_batch_tokens=4096), PlannedMachines(1, 80e9))
    expected = work_of_phases(prediction, 1, SHARES)
    measured = {phase.phase: phase.work for phase in phases}
    assert "update" in measured
    assert measured == {phase: expected[phase] for phase in measured}
    assert calibrate([run], 2, machines).fit is not None


def test_runs_that_tell_no_rates_are_refused(finished, tmp_path):
    run = finished("one")
    with pytest.raises(UserError, match="has products of another --dtype than what is planned"):
        calibrate([run], 4)
    with pytest.raises(UserError, match="is no run's folder"):
        calibrate([str(tmp_path / "none")], 2)
    (tmp_path / "one" / "summary.json").unlink()
    with pytest.raises(UserError, match="must be a finished run of train_rl, of two steps or more"):
        calibrate([run], 2)


@pytest.mark.parametrize("text", ["4xA100-40GB", "2x4xH100"])
def test_the_best_placements_come_first_with_commands_that_parse(text, arguments):
    hardware, run = hardware_of(text), arguments()
    found = ranked(run, hardware, Known())
    products = [np.prod(spent.hours) for spent, _ in found]
    assert products == sorted(products)
    kinds = {prediction.kind for _, prediction in found}
    assert kinds == (
        {"replicated", "sharded"}
        if hardware.machines > 1
        else {"single", "layer_split", "replicated", "sharded"}
    )
    for _, prediction in found:
        start, _, flags = command_of(prediction, hardware).partition(" -m alignment.train_rl ")
        assert parse(RLArgs, shlex.split(flags)) == prediction.run
        ranks = len(prediction.roles.policy)
        torchrun = (
            f"torchrun --nnodes 2 --nproc_per_node {ranks} --rdzv_backend c10d --rdzv_endpoint"
            " HOST:29500"
        )
        assert start == (torchrun if hardware.machines > 1 else "uv run")


def test_ranges_in_words():
    assert span((0.0123, 4567.8)) == "0.012 to 4,568" and span([3.0]) == "3"
    assert rates(EIGHT, 4).best.operations == pytest.approx(1 / (2 * 0.98 * 782 / 989.4 * 19.5e12))


def test_runs_without_a_gradient_take_the_time_of_a_micro_batch_and_sft_is_no_run(
    arguments, tmp_path
):
    """A step whose groups are all flat makes no update; a folder of SFT has no rollouts."""
    assert np.isfinite([*works(arguments(), trained=0.0)["update"].values()]).all()
    facts = {"args": {"seed": 0}, "command": [], "versions": {}}
    (tmp_path / "args.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "seconds": 1.0}) + "\n" for step in (1, 2, 3))
    )
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(
        UserError,
        match="must be a finished run of train_rl, of two steps or more, with its completions",
    ):
        calibrate([str(tmp_path)], 4)
    assert calibrate([], 4) == Known()


def test_machines_share_an_updates_rows(arguments):
    """256 rows in 32 groups are 7 groups a rank of five, and 4 of ten."""
    policy = {"policy_parallelism": "sharded", "train_mini_batch_size": 0}
    one, two = (
        predict(
            arguments(**policy), planned_machines(hardware_of(f"{n}x8xH100"))
        ).step.update_tokens
        for n in (1, 2)
    )
    assert one / 7 == two / 4 == 300 + 8 * 48


def test_a_runs_peaks_are_those_of_its_largest_micro_batch(arguments):
    """On a GPU; on a CPU, whose margin was fitted to the limit of micro-batches side by side, those
    of the limit."""
    on_gpu = predict(arguments(policy_devices=("cuda:0",)), PlannedMachines(2, 80e9))
    limit, real = (
        peaks_of_micro_batches(on_gpu, tokens)[0].phases["update"] for tokens in (0, 1000)
    )
    assert limit == on_gpu.peaks[0].phases["update"]
    # of an update of 128 rows, which are fewer than a micro-batch may have
    tokens = 16 * (300 + 8 * 48)
    for kind in ("activations", "attention"):
        assert real[kind] == pytest.approx(limit[kind] * 1000 / tokens, abs=2)
    on_cpu = predict(arguments(), PlannedMachines(0, 8e9))
    assert peaks_of_micro_batches(on_cpu, 1000) == on_cpu.peaks


def test_a_model_on_the_cpu_beside_gpus_takes_the_hosts_memory(arguments, monkeypatch):
    """Which is this machine's, and of another one not known: then GPUs alone decide."""
    args = arguments(
        beta=0.04, reference_model_device="cpu", max_problems=32, micro_batch_tokens=4096
    )
    elsewhere = predict(args, PlannedMachines(1, 1.2e9))
    taken = {peak.device: peak.total for peak in elsewhere.peaks}
    assert taken["cuda:0"] < 0.95 * 1.2e9 < taken["cpu"]
    assert elsewhere.capacity("cpu") is elsewhere.excess("cpu") is None and elsewhere.fits is True
    monkeypatch.setattr("alignment.builders.devices.visible_gpus", lambda: 1)
    for host, fits in ((512e9, True), (1e9, False)):
        totals = {"cpu": int(host), "cuda:0": int(24e9)}
        monkeypatch.setattr("alignment.builders.prediction.total_bytes", totals.get)
        here = predict(args)
        assert (here.capacity("cpu"), here.capacity("cuda:0"), here.fits) == (host, 24e9, fits)


@pytest.mark.parametrize(
    ("gpus", "context"), [(1, CUDA_CONTEXT_BYTES), (0, PYTHON_BYTES)], ids=["GPU", "CPU"]
)
def test_asynchronous_rollouts_take_a_copy_of_the_weights_and_three_processes(
    gpus, context, arguments, tiny_folder
):
    """Of the sampler, the reference and the teacher, beside the trainer and its evaluations."""
    facts = {"beta": 0.1, "teacher": str(tiny_folder), "dtype": "float32"}
    peaks = []
    for rollouts in ("sync", "async"):
        args = arguments(rollouts=rollouts, **facts)
        [peak] = predict(args, PlannedMachines(gpus, 80e9)).peaks
        peaks.append(peak)
    sync, beside = peaks
    more = {
        kind: beside.phases["sync"][kind] - size
        for kind, size in sync.phases["sync"].items()
        if kind != "reserved"
    }
    assert {kind: size for kind, size in more.items() if size} == {
        "sampler": 4 * TOTAL,
        "engine": 3 * context,
    }
    assert beside.of_trainer("sync") - sync.of_trainer("sync") == 4 * TOTAL
