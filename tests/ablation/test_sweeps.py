"""Sweeps before anything runs: mistakes, what SLURM is given, and which runs an undecided pair
gets."""

import dataclasses
import os
import random
from functools import partial
from pathlib import Path

import pytest

from alignment import sweep
from alignment.ablation.design import grid, varied_values
from alignment.ablation.schedule import (
    LocalExecutor,
    SlurmExecutor,
    State,
    claim_folder,
    later_looks,
    make_executor,
    next_runs,
    note_report,
)
from alignment.ablation.statistics import Comparison
from alignment.ablation.verdicts import choices, factor_contrasts
from alignment.args import Resources, SweepArgs, SweepOptions, parse
from alignment.data.tasks import arithmetic
from alignment.sweep import make_design, print_power
from alignment.system.errors import UserError
from alignment.system.files import read_json, write_json, write_jsonl
from alignment.system.locks import lock_run_folder
from alignment.system.processes import start_command
from alignment.system.terminal import make_console
from tests.command_line import exit_code


def arguments(output: Path, *flags: str) -> SweepOptions:
    small = ["--prompts_per_rollout", "4", "--group_size", "4", "--train_mini_batch_size", "8"]
    folders = ["--sft_base", str(output / "sft"), "--output_dir", str(output)]
    return parse(SweepArgs, [*small, *folders, *flags])


def main(monkeypatch, *flags: str) -> int:
    return exit_code(monkeypatch, sweep.main, "alignment/sweep.py", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "huge"], "--preset huge: there is no such preset"),
        (["--group_size", "3", "4"], "--group_size 3 --hold rollouts"),
        (["--sweep_file", "none.toml"], "--sweep_file none.toml: there is no such file"),
        (["--tie", "2"], "--tie 2.0: must be between 0 and 1"),
        (["--sweep_name", "../x"], "--run_name ../x"),
        (["--loss_type", "grpo_clip", "--strict"], "--strict: one seed cannot tell"),
        (["--cliprange", "7"], "--cliprange 7.0"),
        (["--group_size", "0", "4"], "--group_size 0"),
        (["--seed", "-1", "1"], "--seed -1"),
        (
            ["--max_problems", "16", "32"],
            "--max_problems 16 32: the arms would answer different questions",
        ),
        (["--model", "tiny", "smollm2"], "differ in task or model and cannot share a warm start"),
        (["--preset", "smollm2_gsm8k"], "does not exist: make it with"),
        (["--max_seeds", "1"], "--max_seeds 1"),
        (["--cpus_per_run", "0"], "--cpus_per_run 0"),
        (["--ray_address", "127.0.0.1:1"], "--ray_address 127.0.0.1:1"),
        (
            ["--ray_address", "auto", "--executor", "local"],
            "--ray_address auto: must be with --executor ray",
        ),
        (
            ["--slurm", "time=9"],
            "--slurm time=9: must be name=value, time in minutes, and go with --executor slurm",
        ),
        (
            ["--slurm", "time=1:00", "--executor", "slurm"],
            "--slurm time=1:00: must be name=value, time in minutes",
        ),
        (["--executor", "slurm"], '--executor slurm: Could not detect "srun"'),
    ],
)
def test_mistakes_are_one_clear_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_ray_a_cluster_is_refused(monkeypatch):
    monkeypatch.setattr("alignment.ablation.schedule.find_spec", lambda name: None)
    assert isinstance(make_executor(Resources(), Path()), LocalExecutor)
    for kind, address, extra in ("auto", "auto", "ray"), ("slurm", "", "slurm"):
        with pytest.raises(
            UserError, match=f"not installed: start with `uv run --extra {extra} ...`"
        ):
            make_executor(Resources(kind, address), Path())


def test_runs_that_wait_together_are_one_job_array(tmp_path, monkeypatch):
    """SLURM's commands are stand-ins here, which keep the script that they are given."""
    for name, body in {
        "srun": "",
        "sacct": "",
        "scancel": "",
        "sbatch": f"cp $1 {tmp_path}/script; echo Submitted batch job 7",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    executor = SlurmExecutor(
        tmp_path / "sweep", {"time": 30, "partition": "gpu", "gpus_per_node": 1}, None
    )
    for name in ("a", "b", "c"):
        executor.submit(name, partial(start_command, "platform", (), tmp_path / "log"))
    assert executor.finished(0.0) == {}
    assert {name: job.job_id for name, job in executor.under_way.items()} == {
        "a": "7_0",
        "b": "7_1",
        "c": "7_2",
    }
    script = (tmp_path / "script").read_text()
    options = (
        "--array=0-2%3 --gpus-per-node=1 --job-name=sweep --open-mode=append --partition=gpu"
        " --signal=USR2@90 --time=30"
    )
    assert [option for option in options.split() if f"#SBATCH {option}\n" not in script] == []
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho invalid partition specified: gpu >&2; exit 1\n"
    )
    executor.submit("d", partial(start_command, "platform", (), tmp_path / "log"))
    with pytest.raises(
        UserError, match="--slurm: sbatch refused the jobs: .*invalid partition specified: gpu"
    ):
        executor.finished(0.0)


def test_an_unknown_option_of_sbatch_is_refused(tmp_path):
    with pytest.raises(UserError, match="--executor slurm: Unknown argument 'partitoin'"):
        SlurmExecutor(tmp_path, {"partitoin": "gpu"}, None, cluster="local")


def test_options_of_sbatch_are_flags(tmp_path):
    flags = [
        "--executor",
        "slurm",
        "--gpus_per_run",
        "2",
        "--slurm",
        "partition=gpu",
        "mem=8G",
        "time=30",
    ]
    parameters = arguments(tmp_path, *flags).slurm_parameters
    assert parameters == {"gpus_per_node": 2, "partition": "gpu", "mem": "8G", "time": 30}


def undecided(a: str, b: str, more: int | None = 3) -> Comparison:
    kind = "undecided" if more else "greater"
    return Comparison(
        a,
        b,
        2,
        0.1,
        -0.1,
        0.3,
        0.2,
        kind,
        "undecided: about 3 more seeds" if more else "",
        more,
        (a, b),
    )


def test_every_undecided_pair_gets_a_seed_until_none_is_left():
    states = [State(arm, seed, "done") for seed in (0, 1) for arm in "abc"]

    def names(states, comparisons, max_seeds):
        return [(state.arm, state.seed) for state in next_runs(states, comparisons, max_seeds)]

    assert names(states, [undecided("a", "b")], 3) == [("a", 2), ("b", 2)]
    assert names(states, [undecided("a", "b"), undecided("b", "c")], 3) == [
        ("a", 2),
        ("b", 2),
        ("c", 2),
    ]
    assert names(states, [undecided("a", "b")], 2) == []
    # An arm that is behind gets the seeds that it lacks and the next one, so that each look has one
    # seed more than the last.
    assert names([*states, State("b", 5, "done")], [undecided("a", "b")], 9) == [
        ("a", 5),
        ("a", 6),
        ("b", 6),
    ]
    assert names([*states[:-1], State("b", 1, "failed")], [undecided("a", "b")], 9) == []
    assert names(states, [undecided("a", "b", None)], 9) == []


def test_there_are_no_more_looks_than_share_the_error_rate():
    states, looks = [State(arm, seed, "done") for seed in (0, 1) for arm in "abcd"], 1
    rng = random.Random(0)
    while added := next_runs(states, [undecided(*rng.sample("abcd", 2))], 8):
        states, looks = [*states, *(State(s.arm, s.seed, "done") for s in added)], looks + 1
    assert looks == 7  # 2, 3, 4, 5, 6, 7 and 8 seeds


def test_a_question_is_two_arms_two_values_or_an_argument(tmp_path):
    grid = ["--loss_type", "no_baseline", "grpo_clip", "--group_size", "2", "4", "--seed", "0", "1"]
    for question in (
        ["loss_type"],
        ["no_baseline", "grpo_clip"],
        ["group_size 4", "group_size 2"],
        ["no_baseline_group_size2", "grpo_clip_group_size4"],
    ):
        assert make_design(arguments(tmp_path, *grid, "--question", *question)).alpha == 0.05
    for question in (["seed"], ["no_baseline", "group_size 2"], ["no_baseline", "no_baseline"]):
        with pytest.raises(
            UserError,
            match=f"--question {' '.join(question)}: give loss_type, group_size or two of",
        ):
            make_design(arguments(tmp_path, *grid, "--question", *question))


@pytest.mark.parametrize("losses", [("grpo_clip", "gspo"), ("grpo_clip", "sapo")])
def test_a_component_with_settings_is_one_argument_of_a_grid(losses):
    """negative_only has two settings that group_baseline lacks, as sapo has two: they are what the
    component is, and no further arguments."""
    values = {"advantage": ("group_baseline", "negative_only"), "loss_type": losses}
    arms = grid("tiny", values, "rollouts")
    varied = varied_values({name: arm.recorded_values for name, arm in arms.items()})
    assert len(varied["group_baseline_grpo_clip"]) > 2
    assert sorted(choices(varied)) == ["advantage", "loss_type"]
    assert {name: len(pairs) for name, pairs in factor_contrasts(varied).items()} == {
        "advantage": 1,
        "loss_type": 1,
    }
    # what varies beside its component is an argument
    thresholds = {"advantage": ("negative_only",), "advantage.threshold": (0.4, 0.5)}
    arms = grid("tiny", thresholds, "rollouts")
    varied = varied_values({name: arm.recorded_values for name, arm in arms.items()})
    assert choices(varied) == ["advantage.threshold"]


def test_controls_alone_are_compared_as_controls(tmp_path):
    design = make_design(arguments(tmp_path, "--loss_type", "no_baseline", "grpo_clip"))
    controls = {f"control_{name}": arm for name, arm in design.arms.items()}
    of_controls = dataclasses.replace(design, arms=controls)
    assert factor_contrasts(of_controls.varied) == {}
    assert list(sweep.compared_sides(of_controls)) == [sweep.CONTROL_SIDES]


def test_looking_again_is_paid_for(tmp_path):
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--seed", "0", "1"]
    assert make_design(arguments(tmp_path, *flags)).alpha == 0.05
    again = arguments(tmp_path, *flags, "--until_decided", "--max_seeds", "6")
    assert make_design(again).alpha == 0.01


def test_two_sweeps_are_not_at_work_in_one_folder(tmp_path):
    with (
        lock_run_folder(tmp_path),
        pytest.raises(UserError, match=f"in use by process {os.getpid()} on"),
        lock_run_folder(tmp_path),
    ):
        pass


def test_a_sweep_over_bands_of_pass_rates_checks_and_names_each_arm(tmp_path, capsys):
    """Two of the three problems have a rate of 0.5, and one of 1."""
    (tmp_path / "sft").mkdir()
    problems = arithmetic.problems("train")[:3]
    file = tmp_path / "rates.jsonl"
    rows = [
        {"question": problem.question, "samples": 2, "correct": correct}
        for problem, correct in zip(problems, (1, 2, 1), strict=True)
    ]
    write_jsonl(file, rows)
    flags = ["--pass_rates", str(file), "--seed", "0", "1"]
    design = make_design(arguments(tmp_path, *flags, "--pass_rate_band", "0-1", "0.2-0.8"))
    assert list(design.arms) == ["pass_rate_band0-1", "pass_rate_band0.2-0.8"]
    all_problems, banded_problems = capsys.readouterr().err.splitlines()
    assert "--pass_rate_band 0-1 keeps 3 of " in all_problems
    assert "--pass_rate_band 0.2-0.8 keeps 2 of " in banded_problems
    with pytest.raises(UserError, match="--pass_rate_band 0.6-0.8 keeps none of "):
        make_design(arguments(tmp_path, *flags, "--pass_rate_band", "0-1", "0.6-0.8"))


def test_seeds_that_are_added_after_a_report_are_a_second_look(tmp_path):
    """The warning names every number of seeds after which verdicts were made, and stays."""
    flags = ["--loss_type", "no_baseline", "grpo_clip"]
    (tmp_path / "sft").mkdir()

    def design_of(*seeds: str, more: tuple[str, ...] = ()):
        return make_design(arguments(tmp_path, *flags, "--seed", *seeds, *more))

    two = design_of("0", "1")
    assert two.warnings == ()
    two.folder.mkdir()
    claim_folder(two, ["sweep.py"])
    # before any report more seeds are the design itself
    assert design_of("0", "1", "2").warnings == ()
    note_report(two.folder, two.seeds)
    assert design_of("0", "1").warnings == ()
    more = design_of("2", "3")
    [warning] = more.warnings
    assert "verdicts were made after 2, then 4 seeds, each time with a chance of 5 %" in warning
    with pytest.raises(UserError, match="--strict: verdicts were made after 2, then 4 seeds"):
        design_of("2", "3", more=("--strict",))
    # no further look is planned, so that none has a share of the 5 %
    assert design_of("2", "3", more=("--until_decided", "--max_seeds", "2")).warnings == (warning,)
    planned = design_of("0", "1", more=("--until_decided", "--max_seeds", "9"))
    assert planned.warnings == () and planned.alpha == pytest.approx(0.05 / 8)
    claim_folder(more, ["sweep.py"])
    note_report(more.folder, more.seeds)
    # the first command again: the folder has four seeds, and has shown verdicts of two
    assert design_of("0", "1").warnings == (warning,)


def test_one_seed_that_others_follow_is_no_warning(tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    flags = ["--loss_type", "no_baseline", "grpo_clip"]
    design = make_design(arguments(tmp_path, *flags))
    sweep.print_design(design, arguments(tmp_path, *flags), make_console())
    assert "2 arms x 1 seed = 2 runs" in capsys.readouterr().out
    [warning] = design.warnings
    assert "one seed cannot tell an arm from luck" in warning
    args = arguments(tmp_path, *flags, "--until_decided", "--strict")
    design = make_design(args)
    assert design.warnings == ()
    print_power(design, args, make_console())
    printed = capsys.readouterr().out
    assert "smallest difference of two arms" in printed and "cannot show" not in printed


def test_a_switch_without_a_value_is_on(tmp_path):
    args = arguments(
        tmp_path, "--eval_greedy", "--seed", "0", "--normalize_by_std", "True", "False"
    )
    assert args.eval_greedy == (True,) and args.normalize_by_std == (True, False)
    assert arguments(tmp_path, "--eval_greedy").eval_greedy == (True,)


def test_a_single_arm_is_compared_with_nothing(tmp_path, capsys):
    (tmp_path / "sft").mkdir()
    args = arguments(tmp_path, "--seed", "0", "1")
    print_power(make_design(args), args, make_console())
    assert capsys.readouterr().out == "there are no two arms of a task to compare\n"


def test_the_power_of_several_tasks_is_that_of_pairs_of_one(tmp_path):
    """Two arms of each of two tasks are two comparisons, of which each task has one."""
    (tmp_path / "sft").mkdir()
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--seed", "0", "1", "2"]
    design = make_design(arguments(tmp_path, *flags))
    arms = {}
    for name, arm in design.arms.items():
        arms[name] = arm
        arms[f"{name}_countdown"] = dataclasses.replace(arm, task="countdown", sft_base="")
    of_tasks = dataclasses.replace(design, arms=arms)
    [(sides, table)] = sweep.compared_sides(of_tasks).items()
    assert sides == "two arms of a task"
    assert table == sweep.ComparedSides([1.0, -1.0], 1, 0.025)
    [power] = sweep.powers(of_tasks, range(3, 4), 500).values()
    [alone] = sweep.powers(design, range(3, 4), 500).values()
    assert 1.2 * alone.difference < power.difference < 1.6 * alone.difference


def test_looks_that_share_the_error_rate_are_not_added_to(tmp_path):
    """Six looks of 3 to 8 seeds, and six of 8 to 13, would be eleven at 0.05 / 6."""
    (tmp_path / "sft").mkdir()
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--until_decided"]
    first = arguments(tmp_path, *flags, "--seed", "0", "1", "2", "--max_seeds", "8")
    design = make_design(first)
    design.folder.mkdir()
    claim_folder(design, ["sweep.py"])
    note_report(design.folder, range(8))
    assert make_design(first).alpha == pytest.approx(0.05 / 6)
    grown = arguments(tmp_path, *flags, "--seed", *map(str, range(8)), "--max_seeds", "13")
    with pytest.raises(UserError, match="--until_decided: .* began its looks with --seed 0 1 2,"):
        make_design(grown)


def test_looks_that_share_the_error_rate_keep_their_question(tmp_path):
    """Seeds that one question has added are seen by the next, whose looks would be further ones."""
    (tmp_path / "sft").mkdir()
    flags = ["--loss_type", "no_baseline", "grpo_clip", "gspo", "--until_decided", "--seed", "0"]
    flags += ["1", "2", "--max_seeds", "8", "--question"]
    first = arguments(tmp_path, *flags, "no_baseline", "grpo_clip")
    design = make_design(first)
    design.folder.mkdir()
    claim_folder(design, ["sweep.py"])
    assert make_design(first).alpha == pytest.approx(0.05 / 6)
    assert make_design(arguments(tmp_path, *flags, "grpo_clip", "no_baseline")).arms == design.arms
    with pytest.raises(UserError, match="began its looks with --question grpo_clip no_baseline,"):
        make_design(arguments(tmp_path, *flags, "no_baseline", "gspo"))
    facts = read_json(design.folder / "sweep.json")
    del facts["question"]
    write_json(design.folder / "sweep.json", facts)  # as older versions wrote it
    assert make_design(arguments(tmp_path, *flags, "no_baseline", "gspo")).seeds == (0, 1, 2)


def test_one_seed_is_no_look_and_a_report_of_an_older_version_is_one(tmp_path):
    file = tmp_path / "sweep.json"
    file.write_text('{"seeds": [0], "reported": [1]}')
    assert later_looks(tmp_path, [0, 1]) == ()
    file.write_text('{"seeds": [0, 1, 2]}')
    assert later_looks(tmp_path, [3]) == ()
    (tmp_path / "report.html").write_text("")
    assert "after 3, then 4 seeds" in later_looks(tmp_path, [3])[0]
    for damaged in ('{"seeds": null}', '{"seeds": [0], "reported": "3"}'):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"sweep.json is damaged"):
            later_looks(tmp_path, [0])
