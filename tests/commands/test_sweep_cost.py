"""What a sweep's designs cost, beside what they show: the numbers are those of the statistics and
of `duration`."""

import re

import pytest

from alignment import sweep
from alignment.ablation.statistics import PlannedContrast, power
from alignment.args import RLArgs, SweepArgs, from_preset, parse
from alignment.builders.prediction import Known, duration, planned_machines, predict, span
from alignment.core.power import score_std
from alignment.planning.seconds import hardware_of
from alignment.system.errors import UserError
from alignment.system.terminal import make_console

LOSSES = ("no_baseline", "grpo_clip")


@pytest.fixture
def designed(tiny_folder, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*flags: str) -> str:
        own = [
            "--model",
            str(tiny_folder),
            "--sft_base",
            "",
            "--sampler",
            "transformers",
            "--loss_type",
            *LOSSES,
        ]
        monkeypatch.setattr("sys.argv", ["sweep", "--dry_run", *own, *flags])
        sweep.main()
        return capsys.readouterr().out

    return run


def test_hours_and_money_are_joined_to_the_difference_that_seeds_show(designed, tiny_folder):
    said = designed("--seed", "0", "1", "2", "--hardware", "2xL4", "--price", "0.5")
    hardware, hours = hardware_of("2xL4"), {}
    for loss in LOSSES:
        facts = {
            "model": str(tiny_folder),
            "sft_base": "",
            "sampler": "transformers",
            "loss_type": loss,
        }
        prediction = predict(from_preset(RLArgs, "tiny", **facts), planned_machines(hardware))
        hours[loss] = duration(prediction, hardware, Known()).gpu_hours
        assert f"- {loss}: {span(hours[loss])} GPU-hours a seed" in said
    designs = []
    for seeds in (3, 6):
        looks = range(seeds, seeds + 1)
        std = score_std(sweep.SEED_STD, 512)
        difference = power(PlannedContrast([1.0, -1.0], 1, looks, std, 0.03)).difference
        ends = [seeds * sum(each) for each in zip(*hours.values(), strict=True)]
        cost = f"{span(ends)} GPU-hours ({span([0.5 * end for end in ends])} dollars)"
        designs.append(f"{seeds} seeds and 512 questions show {difference:.3f} for {cost}")
    assert "; ".join(designs) in said
    # the line that a sweep prints without hardware, too
    assert f"chance of 80 %: {designs[0].split()[6]}" in said


@pytest.mark.parametrize(
    ("flags", "of_task"),
    [(["--eval_greedy", "True"], 1.0), (["--eval_tasks", "aime24"], 512 / (512 + 30))],
)
def test_greedy_answers_and_further_tasks_are_no_further_questions(
    flags, of_task, tiny_folder, tmp_path
):
    """An evaluation asks 512 questions, whatever else it samples; AIME 2024 has 30."""
    own = ["--model", str(tiny_folder), "--sft_base", "", "--sampler", "transformers"]
    args = parse(SweepArgs, [*own, "--output_dir", str(tmp_path), "--hardware", "L4", *flags])
    design = sweep.make_design(args)
    [cost] = sweep.print_seed_costs(design, args, make_console(quiet=True)).values()
    assert cost.scaled(2, 512) == pytest.approx(tuple(2 * cost.gpu_hours))
    every_evaluation = cost.evaluations + cost.further_evaluations
    assert cost.evaluations == pytest.approx(of_task * every_evaluation)


def test_controls_are_not_tuned_and_cost_nothing_before(designed):
    flags = ["--hardware", "L4", "--tune", "learning_rate=1e-4,1e-3"]
    [before] = re.findall("tuning before: .*", designed(*flags))
    assert before in designed(*flags, "--controls")


def test_answers_are_charged_as_answers(designed):
    """Hours that pay 2 seeds of 512 questions of 8 samples pay as many answers, however split."""
    flags = ["--seed", "0", "1", "--hardware", "L4", "--eval_samples", "8"]
    said = designed(*flags)
    [hours] = re.findall(r"512 questions show [\d.]+ for [\d.]+ to ([\d.]+) GPU-hours; 4", said)
    table = designed(*flags, "--budget", hours)
    [(questions, samples)] = re.findall(r"│ 2 +│ (\d+) +│ (\d+) ", table)
    assert int(questions) * int(samples) == pytest.approx(512 * 8, rel=0.15)


@pytest.mark.slow
def test_the_cheapest_design_shows_the_difference_and_fewer_seeds_do_not(designed):
    said = designed("--hardware", "L4", "--show_difference", "0.03")
    seeds, questions, shown = re.search(
        r"cheapest that shows 0.03: (\d+) seeds and (\d+) questions show ([\d.]+) for", said
    ).groups()

    def of(number):
        looks = range(number, number + 1)
        std = score_std(sweep.SEED_STD, int(questions))
        return power(PlannedContrast([1.0, -1.0], 1, looks, std, 0.03)).difference

    assert of(int(seeds)) <= 0.03 < of(int(seeds) - 1) and shown == f"{of(int(seeds)):.3f}"
    assert "no design of up to 64 seeds does" in designed(
        "--hardware", "L4", "--show_difference", "0.001"
    )


def test_without_hardware_a_sweep_says_what_it_said(designed):
    assert (
        "GPU-hours" not in designed()
        and "time: --calibrate FOLDER, of a finished run, or --hardware adds it" in designed()
    )
    with pytest.raises(UserError, match="--hardware 8xL5: there is no such machine"):
        designed("--hardware", "8xL5")
    with pytest.raises(UserError, match="--show_difference 1.5: must be 0 .none. or below 1"):
        designed("--show_difference", "1.5")
