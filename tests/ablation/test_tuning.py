"""Tuning of arms before a sweep: what is tried, who chooses what by which questions, and what the
report says of it."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

from alignment import sweep
from alignment.ablation import schedule
from alignment.ablation.referee import design_hash, referee_answers
from alignment.ablation.report import figures, write_report
from alignment.ablation.statistics import Comparison
from alignment.ablation.study import read_study
from alignment.ablation.summary import choice_caution, survives_choice
from alignment.ablation.tuning import (
    Candidate,
    Choice,
    Tuning,
    choose,
    next_value,
    read_grid,
    read_tuning,
    refuse_shared_seeds,
    with_choices,
    write_tuning,
)
from alignment.ablation.verdicts import decide
from alignment.args import RLArgs, SweepArgs, SweepOptions, from_preset, parse
from alignment.data.tasks import TASKS
from alignment.system.errors import UserError
from alignment.system.terminal import make_console
from tests.ablation.test_report import make_run

TUNE = ["--tune", "learning_rate=1e-4,3e-4,1e-3", "--loss_type", "no_baseline", "grpo_clip"]


def arguments(folder, *flags: str) -> SweepOptions:
    (folder / "sft").mkdir(exist_ok=True)
    places = ["--sft_base", str(folder / "sft"), "--output_dir", str(folder)]
    return parse(SweepArgs, [*places, "--seed", "0", "1", *TUNE, *flags])


def test_the_validation_split_and_the_test_split_share_no_question():
    task = TASKS["arithmetic"]
    every = {task.key(problem) for problem in task.test_problems("")}
    validation = {task.key(p) for p in task.test_problems("", 0, "validation", 0.3)}
    test = {task.key(p) for p in task.test_problems("", 0, "test", 0.3)}
    assert validation | test == every and not validation & test
    assert len(validation) / len(every) == pytest.approx(0.3, abs=0.05)
    # A larger share keeps what a smaller one has.
    assert validation < {task.key(p) for p in task.test_problems("", 0, "validation", 0.5)}
    assert task.test_problems("", 5) == task.test_problems("", 5, "test", 0.0)
    with pytest.raises(UserError, match="--eval_split validation: must be test without"):
        from_preset(RLArgs, "tiny", eval_split="validation")


def test_the_next_value_lies_beyond_the_edge_by_the_factor_or_the_step():
    assert next_value([1e-5, 3e-5, 1e-4], 1e-4) == pytest.approx(3.33e-4)
    assert next_value([1e-5, 3e-5, 1e-4], 1e-5) == pytest.approx(3.33e-6)
    assert next_value([1e-5, 3e-5, 1e-4], 3e-5) is None
    assert next_value([0.0, 0.1, 0.2], 0.2) == pytest.approx(0.3)
    assert next_value([4, 8], 8) == 16
    assert next_value(["a", "b"], "b") is None


@pytest.mark.parametrize(
    ("name", "values", "taken", "following"),
    [
        ("beta", (0.0, 0.01), 0.0, {}),
        ("sampling_top_p", (0.9, 1.0), 1.0, {}),
        ("sampling_top_p", (0.8, 0.95), 0.95, {"sampling_top_p": 1.0}),
        ("max_refills", (0, 1), 0, {}),
        ("learning_rate", (1e-4, 1e-3), 1e-3, {"learning_rate": 1e-2}),
        ("adam_beta2", (0.9, 0.99), 0.99, {"adam_beta2": 0.995}),
    ],
)
def test_no_next_value_is_out_of_its_flags_bounds(name, values, taken, following):
    candidates = tuple(Candidate({name: value}, {}) for value in values)
    assert Choice(candidates, values.index(taken)).edges() == following


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["learning_rate=1e-5"], "give an argument once, with two values or more"),
        (["learning_rate=1e-5,1e-5"], "give an argument once, with two values or more"),
        (["learning_rate"], "give an argument once, with two values or more"),
        (["lr=1,2"], "--tune lr: is no argument of an arm"),
        (["seed=1,2"], "--tune seed: is no argument of an arm"),
        (["group_size=4,x"], "--tune group_size=x: must be a whole number"),
    ],
)
def test_a_grid_that_cannot_be_tried_is_refused(words, message):
    with pytest.raises(UserError, match=message):
        read_grid(words)


def test_values_are_read_as_their_flags_take_them():
    grid = read_grid(["learning_rate=1,3e-5", "group_size=4,8", "normalize_by_std=true,false"])
    assert grid["learning_rate"] == (1.0, 3e-5) and type(grid["learning_rate"][0]) is float
    assert grid["group_size"] == (4, 8) and grid["normalize_by_std"] == (True, False)


def test_seeds_that_a_verdict_may_use_do_not_tune(tmp_path):
    refuse_shared_seeds([100], [0, 1], 0, tmp_path)
    with pytest.raises(UserError, match="--tune_seeds 1: a verdict may use this seed"):
        refuse_shared_seeds([100, 1], [0, 1], 0, tmp_path)
    # --until_decided may reach seed 9.
    with pytest.raises(UserError, match="--tune_seeds 9"):
        refuse_shared_seeds([9], [0, 1], 10, tmp_path)


def test_seeds_of_earlier_commands_stay_what_they_were(tmp_path):
    (tmp_path / "sweep.json").write_text('{"seeds": [0, 7]}')
    (tmp_path / "grpo_clip_seed8").mkdir()  # which --until_decided added
    (tmp_path / "tuning").mkdir()
    (tmp_path / "tuning" / "sweep.json").write_text('{"seeds": [100]}')
    refuse_shared_seeds([100, 101], [0, 1], 0, tmp_path)
    for seed in (7, 8):
        with pytest.raises(UserError, match=f"--tune_seeds {seed}: a verdict may use this seed"):
            refuse_shared_seeds([seed], [0, 1], 0, tmp_path)
    with pytest.raises(UserError, match="--seed 100: runs with this seed chose values before"):
        refuse_shared_seeds([101], [0, 100], 0, tmp_path)


def test_an_arm_chooses_by_the_seeds_of_its_command(tmp_path):
    """Seed 100, of an earlier command, has another best value than 101."""
    args = arguments(tmp_path)
    design = sweep.make_design(args)
    grid = read_grid(args.tune)
    accuracies = {}
    for arm in design.arms:
        for value, before in zip(grid["learning_rate"], (0.9, 0.2, 0.1), strict=True):
            accuracies[f"{arm}_learning_rate{value}"] = {100: before, 101: (1 - before) / 2}
    choice = choose(design.arms, grid, accuracies, (101,))["grpo_clip"]
    assert choice.candidate.values == {"learning_rate": 1e-3}
    assert choice.candidate.accuracies == {101: 0.45}


def test_the_plan_counts_the_runs_that_tune(tmp_path, capsys):
    args = arguments(tmp_path)
    design = sweep.make_design(args)
    runs = sweep.make_tuning_design(design, args)
    assert runs is not None
    # 2 arms x 3 values, with seeds of their own, on the validation split.
    assert len(runs.arms) == 6 and runs.seeds == (100, 101)
    assert {arm.eval_split for arm in runs.arms.values()} == {"validation"}
    assert {arm.eval_split for arm in design.arms.values()} == {"test"}
    assert {arm.validation_share for arm in (*runs.arms.values(), *design.arms.values())} == {0.3}
    assert "grpo_clip_learning_rate0.0003" in runs.arms
    assert runs.folder == design.folder / "tuning"
    sweep.print_design(design, args, make_console(), runs)
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 arms x 3 values of learning_rate x 2 seeds = 12 runs" in printed
    assert "16 runs in all" in printed
    with pytest.raises(UserError, match="the arms differ in it"):
        varied = arguments(tmp_path, "--learning_rate", "1e-4", "1e-3")
        sweep.make_tuning_design(sweep.make_design(varied), varied)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("eval_temperature=0,1", "--tune eval_temperature: .*; give --eval_temperature one value"),
        ("eval_rule=boxed,r1_zero", "--tune eval_rule: it changes how an arm is evaluated"),
        ("eval_samples=1,4", "--tune eval_samples: it changes how an arm is evaluated"),
        ("max_problems=100,200", "--tune max_problems: it changes how an arm is evaluated"),
        ("sampling_temperature=0.6,1", "temperature: .*; give --eval_temperature one value, so"),
        ("max_prompt_tokens=12,64", "--tune max_prompt_tokens: it changes how an arm is evaluated"),
        ("prompt=tiny,question", "--tune prompt: it changes how an arm is evaluated"),
        ("system_prompt=a,b", "--tune system_prompt: it changes how an arm is evaluated"),
        ("few_shot=a,b", "--tune few_shot: it changes how an arm is evaluated"),
        ("task=arithmetic,countdown", "--tune task: it changes how an arm is evaluated"),
    ],
)
def test_no_arm_chooses_the_evaluation_that_suits_it(words, message, tmp_path):
    args = dataclasses.replace(arguments(tmp_path), tune=("beta=0,0.1", words))
    design = sweep.make_design(args)
    with pytest.raises(UserError, match=message):
        sweep.make_tuning_design(design, args)


def test_what_plays_no_part_in_any_arm_is_not_tuned(tmp_path):
    args = dataclasses.replace(arguments(tmp_path), tune=("lora_alpha=16,64",))
    design = sweep.make_design(args)
    with pytest.raises(UserError, match="^--tune: --lora_alpha 16 64: must be left out, or go"):
        sweep.make_tuning_design(design, args)


def test_controls_alone_are_not_tuned(tmp_path):
    args = arguments(tmp_path)
    design = sweep.make_design(args)
    arms = {f"control_{name}": arm for name, arm in design.arms.items()}
    with pytest.raises(UserError, match="--tune: the names of all arms begin with control_"):
        sweep.make_tuning_design(dataclasses.replace(design, arms=arms), args)


def test_a_temperature_of_training_alone_is_tuned(tmp_path):
    args = arguments(tmp_path, "--eval_temperature", "1")
    args = dataclasses.replace(args, tune=("sampling_temperature=0.6,1",))
    assert sweep.make_tuning_design(sweep.make_design(args), args) is not None


def test_each_arm_takes_its_own_best_and_a_run_that_failed_rules_its_value_out(tmp_path):
    args = arguments(tmp_path, "--controls")
    design = sweep.make_design(args)
    grid = read_grid(args.tune)
    means = {"no_baseline": (0.2, 0.4, 0.3), "grpo_clip": (0.5, 0.1, 0.9)}
    accuracies = {}
    for arm, (small, middle, large) in means.items():
        names = [f"{arm}_learning_rate{value}" for value in grid["learning_rate"]]
        accuracies |= {
            names[0]: {100: small - 0.1, 101: small + 0.1},
            names[1]: {100: middle, 101: middle},
            names[2]: {100: large, 101: large},
        }
    del accuracies["grpo_clip_learning_rate0.001"][101]
    choices = choose(design.arms, grid, accuracies, (100, 101))
    assert choices["no_baseline"].candidate.values == {"learning_rate": 3e-4}
    assert choices["no_baseline"].candidate.mean == pytest.approx(0.4)
    assert choices["no_baseline"].edges() == {}
    assert choices["grpo_clip"].candidate.values == {"learning_rate": 1e-4}
    assert choices["grpo_clip"].edges() == {"learning_rate": pytest.approx(3.33e-5)}
    assert choices["grpo_clip"].candidates[2].failed == (101,)

    chosen = with_choices(design, choices)
    assert chosen.arms["grpo_clip"].learning_rate == 1e-4
    assert chosen.arms["no_baseline"].learning_rate == 3e-4
    # Controls are copies of the first arm, but for what makes one a control.
    assert chosen.arms["control_random"].learning_rate == 3e-4
    assert chosen.arms["control_no_training"].learning_rate == 0.0
    # What is tuned is not what varies.
    assert "learning_rate" not in chosen.varied["grpo_clip"]
    assert chosen.facts()["tuned"] == ["learning_rate"] and "tuned" not in design.facts()
    with pytest.raises(UserError, match="arm grpo_clip has no value with which all runs finished"):
        choose(design.arms, grid, {k: v for k, v in accuracies.items() if "no_b" in k}, (100, 101))


def runs_by_hand(folder, monkeypatch, accuracy_of) -> list[str]:
    """Make the runs of a sweep by hand from here on, each with `accuracy_of` its arm and seed;
    returns the list of the names of those that are made. The sweep's command line is set too."""
    submitted: list[str] = []

    def run(design, executor, states, console):
        for state in states:
            arm = design.arms[state.arm]
            state.status = "done"
            if schedule.is_done(design, state):
                continue
            submitted.append(state.name)
            values = {
                "loss_type": arm.loss_type,
                "learning_rate": arm.learning_rate,
                "num_steps": 4,
                "task": "arithmetic",
            }
            accuracy = accuracy_of(arm, state.seed)
            make_run(design.folder / state.name, state.seed, accuracy, **values)

    monkeypatch.setattr(schedule, "run_all", run)
    monkeypatch.setattr(schedule, "warm_up", lambda *given: None)
    (folder / "sft").mkdir()
    flags = ["sweep", "--sft_base", str(folder / "sft"), "--output_dir", str(folder)]
    words = [*flags, "--seed", "0", "1", *TUNE, "--executor", "local", "--run_name", "s"]
    monkeypatch.setattr("sys.argv", words)
    return submitted


def test_a_choice_that_a_seed_changes_leaves_a_sweep_as_it_was(tmp_path, monkeypatch):
    """Both arms took 3e-4 by seeds 100 and 101. By seed 102 they would take 1e-3."""
    best = {100: 3e-4, 101: 3e-4, 102: 1e-3}

    def accuracy_of(arm, seed):
        height = 0.5 if seed == 102 else 0.1
        return 0.3 + height * (arm.learning_rate == best.get(seed)) + seed % 2 / 40

    runs_by_hand(tmp_path, monkeypatch, accuracy_of)
    sweep.main()
    before = (tmp_path / "s" / "tuning.json").read_text()
    monkeypatch.setattr("sys.argv", [*sys.argv, "--tune_seeds", "100", "101", "102"])
    with pytest.raises(UserError, match="/s holds a sweep of another design; give another --run_n"):
        sweep.main()
    assert (tmp_path / "s" / "tuning.json").read_text() == before


def test_runs_of_an_arm_that_were_asked_other_questions_choose_nothing(tmp_path, monkeypatch):
    runs_by_hand(tmp_path, monkeypatch, lambda arm, seed: 0.5 + seed % 2 / 40)
    sweep.main()
    run = tmp_path / "s" / "tuning" / "grpo_clip_learning_rate0.001_seed100"
    for file in (run / "completions").glob("eval_*.jsonl"):
        file.write_text(file.read_text().replace("What is 3?", "What is 1 + 2?"))
    with pytest.raises(UserError, match="tuning/grpo_clip.* were evaluated on different questions"):
        sweep.main()


def test_a_sweep_tunes_first_resumes_and_reports_what_it_chose(tmp_path, monkeypatch):
    """Runs are made by hand: no_baseline is best at 1e-3, the edge, and grpo_clip at 3e-4."""
    best = {"no_baseline": 1e-3, "grpo_clip": 3e-4}

    def accuracy_of(arm, seed):
        return (0.7 if arm.learning_rate == best[arm.loss_type] else 0.5) + seed % 2 / 40

    submitted = runs_by_hand(tmp_path, monkeypatch, accuracy_of)
    words = sys.argv
    sweep.main()
    assert len(submitted) == 12 + 4
    sweep.main()
    assert len(submitted) == 16

    folder = tmp_path / "s"
    study = read_study([folder])
    assert study.tuning is not None
    taken = {arm: choice.candidate.values for arm, choice in study.tuning.choices.items()}
    assert taken == {arm: {"learning_rate": value} for arm, value in best.items()}
    # 12 runs of 4 steps of 8 responses of 6, 7, 8 and 9 tokens
    assert study.tuning.amounts["runs"] == 12 and study.tuning.amounts["tokens"] == 12 * 240
    assert study.varied["no_baseline"] == {"loss_type": "no_baseline"}
    [comparison] = decide(study)
    assert {comparison.a, comparison.b} == set(best)
    assert study.tuning.measure == "accuracy" and study.is_finished
    assert "at the edge of the values that it tried" in " ".join(study.warnings)
    page = (folder / "report.html").read_text()
    assert "at the edge: try learning_rate 0.00333 too" in page
    assert "What a referee asks" in page and "Validation accuracy by learning_rate" in page
    assert (
        "no_baseline took learning_rate 0.001; grpo_clip took" in (folder / "report.md").read_text()
    )
    answers = {answer.question: answer for answer in referee_answers(study, [comparison])}
    tuned = answers["Was every arm tuned alike, the baseline too?"]
    assert tuned.status == "partly" and "among 3 values of learning_rate, by 2 seeds" in tuned.words

    tuned_by_pass = dataclasses.replace(study.tuning, measure="pass@4")
    drawn = figures(dataclasses.replace(study, tuning=tuned_by_pass), [comparison])
    drawn_tuning = drawn["Validation pass@4 by learning_rate"]
    assert drawn_tuning.axes[0].get_ylabel() == "validation pass@4"

    # stopped before any verdict's run, it goes on; another grid is another sweep
    (folder / "sweep.json").unlink()
    sweep.main()
    assert len(submitted) == 16
    other = [word.replace("3e-4", "2e-4") for word in words]
    monkeypatch.setattr("sys.argv", other)
    with pytest.raises(UserError, match="tuning holds a sweep of another design"):
        sweep.main()


def test_what_an_arm_may_have_lost_by_its_choice():
    """Two arms of two values, two seeds, 100 questions. The runs' variance is that of answers plus
    0.02 squared, 0.5 * 0.5 / 100 + 0.0004 = 0.0029: pooled over seeds it is 0.0002 / 4 only. The
    error of a difference is sqrt(2 * 0.0029 / 2) = 0.05385; z of 0.05 / 2 is 1.95996: 0.10555. The
    values that were not taken are 0.02 and 0.2 lower."""
    near = Choice(
        (Candidate({"v": 1}, {0: 0.5, 1: 0.5}), Candidate({"v": 2}, {0: 0.47, 1: 0.49})), 0
    )
    far = Choice((Candidate({"v": 1}, {0: 0.3, 1: 0.3}), Candidate({"v": 2}, {0: 0.5, 1: 0.5})), 1)
    lost = Tuning({"a": near, "b": far}, (0, 1), 100, {}).most_lost(0.05)
    assert lost == pytest.approx({"a": 0.10555 - 0.02, "b": 0.0}, abs=1e-5)
    undone = Comparison("b", "a", 5, 0.1, 0.05, 0.15, 0.01, "greater", "b > a")
    assert not survives_choice(undone, lost, 0.03)
    assert survives_choice(dataclasses.replace(undone, low=0.09), lost, 0.03)
    # "a" is above: nothing that it lost could undo that, and "b" has lost nothing.
    assert survives_choice(dataclasses.replace(undone, a="a", b="b", low=0.01), lost, 0.03)


def test_an_arm_with_a_value_that_did_not_finish_may_have_lost_anything():
    choice = Choice((Candidate({"v": 1}, {0: 0.5, 1: 0.5}), Candidate({"v": 2}, {0: 0.9}, (1,))), 0)
    whole = Choice(
        (Candidate({"v": 1}, {0: 0.5, 1: 0.5}), Candidate({"v": 2}, {0: 0.1, 1: 0.1})), 0
    )
    lost = Tuning({"a": choice, "b": whole}, (0, 1), 100, {}).most_lost(0.05)
    assert lost == {"a": math.inf, "b": 0.0}
    b_above = Comparison("b", "a", 5, 0.1, 0.05, 0.15, 0.01, "greater", "b > a")
    a_above = dataclasses.replace(b_above, a="a", b="b", verdict="a > b")
    assert not survives_choice(b_above, lost, 0.03) and survives_choice(a_above, lost, 0.03)


def test_verdicts_on_another_measure_than_arms_chose_by_are_of_the_values(tmp_path):
    runs = []
    for loss, accuracy in (("a", 0.5), ("b", 0.9)):
        for seed in range(6):
            runs.append(make_run(tmp_path / f"{loss}{seed}", seed, accuracy, loss_type=loss))
    candidates = (Candidate({"v": 1}, {100: 0.9}), Candidate({"v": 2}, {100: 0.1}))
    choices = {f"loss_type {loss}": Choice(candidates, 0) for loss in "ab"}
    by_accuracy = Tuning(choices, (100,), 400, {})
    study = dataclasses.replace(read_study(runs), tuning=by_accuracy)
    assert choice_caution(study, decide(study)) == ""
    by_area = dataclasses.replace(study, measure="area")
    assert choice_caution(by_area, decide(by_area)) == (
        "of the values taken: all verdicts on area. Arms chose by accuracy after all steps, and"
        " what that choice costs in area after all steps is not known"
    )
    at_equal_tokens = dataclasses.replace(study, match="tokens")
    assert "costs in accuracy at equal tokens" in choice_caution(at_equal_tokens, decide(study))
    # the mean over samples is the same accuracy
    assert choice_caution(dataclasses.replace(study, measure="avg@4"), decide(study)) == ""
    failed = Choice((candidates[0], Candidate({"v": 2}, {}, (100,))), 0)
    amounts = {"runs": 3.0, "tokens": 9.0, "seconds": 1.0}
    unknown = Tuning({**choices, "loss_type a": failed}, (100,), 400, amounts)
    study = dataclasses.replace(study, tuning=unknown)
    assert "Runs of loss_type a with other values did not finish" in choice_caution(
        study, decide(study)
    )
    tuned = referee_answers(study, decide(study))[1]
    assert tuned.status == "partly" and "runs with v 2 did not finish" in tuned.words


def test_only_arms_of_a_verdict_are_blamed_for_it(tmp_path):
    """0.55 and 0.5 of 400 questions differ, but not where the lower arm may have lost 0.06; that a
    third arm has a value that did not finish has no part in it."""
    runs = []
    for loss, accuracy in (("a", 0.5), ("b", 0.55), ("c", 0.5)):
        for seed in range(6):
            folder = tmp_path / f"{loss}{seed}"
            runs.append(make_run(folder, seed, accuracy, questions=400, loss_type=loss))
    near = Choice((Candidate({"v": 1}, {100: 0.5}), Candidate({"v": 2}, {100: 0.49})), 0)
    failed = Choice((Candidate({"v": 1}, {100: 0.5}), Candidate({"v": 2}, {}, (100,))), 0)
    choices = {"loss_type a": near, "loss_type b": near, "loss_type c": failed}
    study = dataclasses.replace(read_study(runs), tuning=Tuning(choices, (100,), 400, {}))
    [pair] = [c for c in decide(study) if {c.a, c.b} == {"loss_type a", "loss_type b"}]
    assert pair.kind == "greater"
    words = choice_caution(study, [pair])
    assert "an arm may have lost up to 0.0" in words and "did not finish" not in words


def test_a_damaged_record_of_tuning_is_named(tmp_path):
    assert read_tuning(tmp_path) is None
    choice = Choice((Candidate({"a": 1}, {100: 0.5}), Candidate({"a": 2}, {}, (100,))), 0)
    tuning = Tuning({"arm": choice}, (100,), 7, {"runs": 1.0}, "pass@4")
    write_tuning(tmp_path, tuning)
    assert read_tuning(tmp_path) == tuning
    assert math.isnan(choice.candidates[1].mean)
    file = tmp_path / "tuning.json"
    content = json.loads(file.read_text())
    for damaged in ({**content, "arms": 3}, {**content, "seeds": None}, {}):
        file.write_text(json.dumps(damaged))
        with pytest.raises(UserError, match="tuning.json is damaged"):
            read_tuning(tmp_path)


@pytest.mark.parametrize(
    ("measure", "match", "status", "words"),
    [
        ("accuracy", "steps", "yes", "trains on, after the last step of every run; tuning chose"),
        ("accuracy", "tokens", "yes", "trains on, at equal tokens of every run, between eval"),
        ("area", "steps", "yes", "trains on, in all evaluations of every run; tuning chose"),
        ("area", "tokens", "yes", "trains on, in all evaluations of every run up to equal tokens"),
        ("tokens_to@0.4", "steps", "yes", "trains on, in all evaluations of every run; tuning"),
        ("best", "steps", "partly", "trains on, in each run's best evaluation, chosen for each"),
        ("entropy", "steps", "no", "entropy is of the responses that runs train on"),
    ],
)
def test_a_referee_hears_which_evaluations_verdicts_are_on(measure, match, status, words, tmp_path):
    runs = [make_run(tmp_path / f"{a}0", 0, 0.5, loss_type=a) for a in "ab"]
    choice = Choice((Candidate({"v": 1}, {100: 0.5}), Candidate({"v": 2}, {100: 0.4})), 0)
    amounts = {"runs": 4.0, "tokens": 9.0, "seconds": 1.0}
    tuning = Tuning({"loss_type a": choice, "loss_type b": choice}, (100,), 400, amounts)
    study = dataclasses.replace(read_study(runs, match=match, measure=measure), tuning=tuning)
    answers = {answer.question: answer for answer in referee_answers(study, [])}
    held_out = answers["Are the questions held out, also from every choice?"]
    assert held_out.status == status and words in held_out.words


def test_a_study_without_tuning_controls_and_one_design_says_so(tmp_path):
    runs = [
        make_run(tmp_path / f"{loss}{seed}", seed, 0.5 + 0.3 * (loss == "a"), loss_type=loss)
        for loss in "ab"
        for seed in range(6)
    ]
    study = read_study(runs)
    status = {a.question: a.status for a in referee_answers(study, decide(study))}
    answers = ["yes", "no", "partly", "no", "partly", "yes", "partly", "partly"]
    assert list(status.values()) == answers
    assert "What a referee asks" in write_report(study, tmp_path)[1].read_text()
    assert design_hash(dataclasses.replace(study, measure="area")) != design_hash(study)
    updates = [{**record, "updates": 4} for record in study.runs[0].metrics]
    more_work = dataclasses.replace(study.runs[0], metrics=tuple(updates))
    arms = {**study.arms, "loss_type a": {**study.arms["loss_type a"], 0: more_work}}
    compute = referee_answers(dataclasses.replace(study, arms=arms), [])[5]
    assert compute.status == "partly" and "4 to 6 updates" in compute.words
    longer = dataclasses.replace(study, match="tokens")
    at_tokens = referee_answers(longer, [])[5].words
    assert at_tokens.startswith("compared at equal tokens; ") and "as many tokens" not in at_tokens
    # runs of "a" sample twice as many tokens a step, so that "b" makes two updates for each of them
    longer_a = {}
    for seed, run in study.arms["loss_type a"].items():
        metrics = [{**record, "responses": 16} for record in run.metrics]
        longer_a[seed] = dataclasses.replace(run, metrics=tuple(metrics))
    arms = {**study.arms, "loss_type a": longer_a}
    compute = referee_answers(dataclasses.replace(longer, arms=arms), [])[5]
    assert compute.status == "partly" and "240 to 240 sampled tokens, 2 to 4 upd" in compute.words
    missing = dataclasses.replace(study, missing=("loss_type a_seed6",))
    seeds = referee_answers(missing, decide(missing))[0]
    assert seeds.status == "partly" and "1 of 13 runs did not finish" in seeds.words
    assert np.isfinite(decide(study)[0].p_exact)
