"""Evaluations that have settings of their own: which ones a command makes, how they sample and
grade, and what their metrics and words are."""

import dataclasses

import pytest
from rollout_helpers import ARGS

from alignment.args import EvaluateArgs, RejectionArgs, SFTArgs, from_preset
from alignment.builders.checks import check_evaluation_rule, check_held_out, check_rules
from alignment.builders.evaluations import eval_sampling, prepare_evaluations
from alignment.builders.held_out import held_out_arguments, task_arguments, with_greedy
from alignment.builders.prediction import evaluated_rows, seconds_of_evaluation
from alignment.core.records import Completion, Distribution, Group, Problem
from alignment.data.tasks import DataConfig
from alignment.evaluation.accuracy import Evaluation, figures, joined_record
from alignment.model.loading import load_tokenizer
from alignment.rewards.rules import find_evaluation_rule, find_rule
from alignment.rewards.users import close_functions
from alignment.runs.held_out import evaluation_words, further_accuracies
from alignment.runs.run_folder import RunFolder
from alignment.system.errors import RunStopped, UserError
from alignment.system.files import read_jsonl


def with_flags(**flags):
    return dataclasses.replace(ARGS, **flags)


def group(*answers: str, right: str = "1") -> Group:
    """Responses with these answers, "" for none."""
    texts = [f"</think> <answer> {answer} </answer>" if answer else "nothing" for answer in answers]
    scores = [
        {"reward": float(answer == right), "format_reward": 1.0, "answer_reward": 1.0}
        for answer in answers
    ]
    completions = [Completion((1,), (2,), (0.0,), text, "stop", 0) for text in texts]
    return Group(Problem("p", "q", "", right), tuple(completions), tuple(scores))


def test_pass_at_k_and_majorities_with_ties_by_hand():
    """Of 4 samples 2 are right: two drawn without replacement are both wrong in 1 of 6 cases. Their
    answers are 1 1 2 2, so the tie gives one half. In the second group 1 of 4 is right, two drawn
    miss it in 3 of 6 cases, and 2 has the most votes; the third has 1, 2 and 3 once each, and one
    without a vote, so a third is right."""
    groups = [group("1", "1", "2", "2"), group("1", "2", "2", "3"), group("1", "2", "3", "")]
    values = {name: figure["value"] for name, figure in figures(groups).items()}
    assert values["avg@4"] == pytest.approx((2 + 1 + 1) / 12)
    assert values["pass@1"] == pytest.approx((1 / 2 + 1 / 4 + 1 / 4) / 3)
    assert values["pass@2"] == pytest.approx((5 / 6 + 1 / 2 + 1 / 2) / 3)
    assert values["pass@4"] == 1
    assert values["maj@4"] == pytest.approx((1 / 2 + 0 + 1 / 3) / 3)


def test_without_flags_an_evaluation_samples_as_training_does():
    assert list(held_out_arguments(ARGS)) == [""]
    sampling = eval_sampling(with_flags(sampling_temperature=0.7, sampling_top_p=0.9))
    assert (sampling.n, sampling.temperature, sampling.top_p) == (1, 0.7, 0.9)
    assert ARGS.evaluation_rule == "r1_zero"


def test_its_own_temperature_and_nucleus_leave_training_as_it_is():
    args = with_flags(eval_temperature=0.6, eval_top_p=0.95, eval_top_k=20)
    sampling = eval_sampling(args, 4)
    assert (sampling.n, sampling.temperature, sampling.top_p, sampling.top_k) == (4, 0.6, 0.95, 20)
    assert args.sampling == ARGS.sampling
    assert args.update_config == ARGS.update_config


@pytest.mark.parametrize(("own", "top_k"), [(None, 50), (0, 0), (20, 20)])
def test_the_top_k_of_evaluations_is_that_of_training_unless_given(own, top_k):
    assert eval_sampling(with_flags(sampling_top_k=50, eval_top_k=own)).top_k == top_k


def test_greedy_evaluations_stand_beside_sampled_ones(tiny_folder):
    args = with_flags(eval_samples=4, eval_greedy=True, max_problems=2, sampling_top_p=0.9)
    evaluations = prepare_evaluations(args, load_tokenizer(str(tiny_folder)))
    sampled, greedy = evaluations[""], evaluations["greedy"]
    assert list(evaluations) == ["", "greedy"]
    assert (sampled.sampling.n, sampled.sampling.temperature) == (4, 1.0)
    assert (greedy.sampling.n, greedy.sampling.temperature) == (1, 0.0)
    assert sampled.problems == greedy.problems
    assert sampled.responses == 8 and greedy.responses == 2
    # Samplers report the model's own log-probs of greedy tokens.
    assert greedy.distribution == Distribution()
    assert sampled.distribution == Distribution(1.0, 0.9)


def test_each_task_has_its_prefix_and_its_own_columns():
    args = with_flags(
        task="file:train.csv",
        question_column="problem",
        eval_tasks=("countdown_small", "math500", "file:more.csv"),
        eval_greedy=True,
    )
    by_prefix = held_out_arguments(args)
    assert list(by_prefix) == [
        "",
        "greedy",
        "countdown_small",
        "countdown_small/greedy",
        "math500",
        "math500/greedy",
        "file.more.csv",
        "file.more.csv/greedy",
    ]
    assert by_prefix["countdown_small"].question_column == "question"
    assert by_prefix["file.more.csv"].question_column == "problem"
    assert by_prefix["countdown_small"].evaluation_rule == "countdown"
    assert by_prefix["math500"].task == "alignment.evaluation.benchmarks:math500"
    with pytest.raises(UserError, match=r"--eval_tasks math50.*did you mean math500"):
        held_out_arguments(with_flags(eval_tasks=("math50",)))


def test_the_test_split_that_is_named_is_of_one_task():
    args = with_flags(
        task="file:train.csv",
        test_split="test.csv",
        question_column="problem",
        eval_tasks=("file:more.csv", "file:train.csv", "countdown_small"),
    )
    splits = {prefix: each.data.test_split for prefix, each in held_out_arguments(args).items()}
    assert splits == {
        "": "test.csv",
        "file.more.csv": "",
        "file.train.csv": "test.csv",
        "countdown_small": "",
    }
    # Where --task has no rows of the user's own, it is that of the one task which has.
    args = from_preset(EvaluateArgs, "tiny", test_split="test.csv", question_column="problem")
    tasks = task_arguments(args, ("file:more.csv", "gsm8k"))
    assert tasks["file:more.csv"].data == DataConfig("problem", test_split="test.csv")
    assert tasks["gsm8k"].data == DataConfig()
    fault = "--test_split test.csv: --eval_tasks file:more.csv hf:more are several"
    with pytest.raises(UserError, match=fault):
        task_arguments(args, ("file:more.csv", "gsm8k", "hf:more"))


def test_evaluate_has_a_greedy_row_for_each_task():
    args = from_preset(EvaluateArgs, "tiny", num_samples=8, eval_greedy=True)
    tasks = with_greedy(task_arguments(args, ("gsm8k", "aime24")), ", ")
    assert list(tasks) == ["gsm8k", "gsm8k, greedy", "aime24", "aime24, greedy"]
    assert [task.num_samples for task in tasks.values()] == [8, 1, 8, 1]
    assert [task.evaluation_temperature for task in tasks.values()] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"eval_temperature": -0.1}, "--eval_temperature -0.1: must be 0"),
        ({"eval_top_p": 0.0}, "--eval_top_p 0.0: must be above 0 and at most 1"),
        ({"eval_samples": 0}, "--eval_samples 0: must be at least 1"),
        ({"eval_temperature": 0.0, "eval_greedy": True}, "--eval_greedy: .* greedy already"),
    ],
)
def test_values_that_make_no_sense_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        with_flags(**flags)


def test_another_rule_grades_evaluations_and_not_rewards():
    args = with_flags(eval_rule="r1_zero_strict")
    assert args.evaluation_rule == "r1_zero_strict"
    assert args.rollout_config == ARGS.rollout_config
    for rule in ("r1_zero_strict", "boxed"):
        check_evaluation_rule(with_flags(eval_rule=rule), ARGS.task_in_format)
    with pytest.raises(UserError, match="--eval_rule countdown: it does not fit --task arithmetic"):
        check_held_out_rule(with_flags(eval_rule="countdown"))
    with pytest.raises(UserError, match=r"--eval_rule r1_zer0"):
        check_held_out_rule(with_flags(eval_rule="r1_zer0"))


def test_scores_of_evaluations_are_from_0_to_1(tmp_path, monkeypatch):
    """Intervals are of shares. What the made-up responses do not show is named at its score; a
    reward of training may be any number."""
    (tmp_path / "signed_rules.py").write_text(
        "def signed(response, ground_truth):\n"
        "    value = 1 if ground_truth in response else -1\n"
        "    return {'reward': value, 'format_reward': 1, 'answer_reward': 1}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    problem = Problem("p", "q", "", "5")
    args = with_flags(eval_rule="signed_rules:signed")
    fault = "^--eval_rule signed_rules:signed: gave reward -1 in an evaluation.* made-up response"
    with pytest.raises(UserError, match=fault):
        check_rules(args, args.task_in_format, [problem])
    rule = find_evaluation_rule("signed_rules:signed", eval_rule="signed_rules:signed")
    assert rule("5", "5")["reward"] == 1
    with pytest.raises(RunStopped, match="gave reward -1 in an evaluation"):
        rule("6", "5")
    assert find_rule("signed_rules:signed")("6", "5")["reward"] == -1
    close_functions()


def check_held_out_rule(args):
    check_evaluation_rule(args, args.task_in_format)


def test_a_rule_that_cannot_grade_one_of_the_tasks_is_refused():
    args = with_flags(eval_rule="r1_zero_strict", eval_tasks=("countdown_small",))
    with pytest.raises(UserError, match="r1_zero_strict: it does not fit --task countdown_small"):
        check_held_out(args)


def test_rejection_sampling_is_no_evaluation():
    args = from_preset(
        RejectionArgs,
        "tiny",
        eval_temperature=0.0,
        eval_top_p=0.5,
        eval_top_k=5,
        eval_rule="r1_zero_strict",
    )
    sampling = eval_sampling(args, 8)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert args.evaluation_rule == "r1_zero"


def test_metrics_have_prefixes_and_files_have_them_too(tmp_path):
    sampled = Evaluation((group("1", "2"),), {"avg_all_rewards": 0.5, "seconds": 2.0})
    greedy = Evaluation((group("1"),), {"avg_all_rewards": 1.0, "seconds": 0.5})
    others = {"greedy": greedy, "math500/greedy": greedy}
    record = joined_record(sampled, others)
    assert record == {
        "avg_all_rewards": 0.5,
        "seconds": 2.0,
        "greedy/avg_all_rewards": 1.0,
        "greedy/seconds": 0.5,
        "math500/greedy/avg_all_rewards": 1.0,
        "math500/greedy/seconds": 0.5,
    }
    assert seconds_of_evaluation(record) == 3.0
    groups = {prefix: other.groups for prefix, other in others.items()}
    folder = RunFolder(tmp_path)
    folder.log_eval({"step": 20, **record}, sampled.groups, groups)
    folder.close()
    assert sorted(file.name for file in (tmp_path / "completions").iterdir()) == [
        "eval_000020.jsonl",
        "eval_greedy_000020.jsonl",
        "eval_math500_greedy_000020.jsonl",
    ]
    # A run that resumes after step 10 makes the evaluation again.
    RunFolder(tmp_path, last_step=10).close()
    assert not list((tmp_path / "completions").iterdir())
    assert read_jsonl(tmp_path / "evals.jsonl") == []


def test_accuracies_beside_the_first_have_labels():
    record = {
        "avg_all_rewards": 0.5,
        "pass@1": 0.5,
        "pass@2": 0.6,
        "pass@4": 0.7,
        "maj@4": 0.4,
        "greedy/avg_all_rewards": 0.6,
        "greedy/pass@1": 0.6,
        "math500/avg_all_rewards": 0.1,
        "math500/pass@4": 0.2,
        "math500/maj@4": 0.1,
        "math500/avg_all_rewards_ci": [0, 1],
    }
    assert further_accuracies([record]) == {
        "pass@4": "pass@4",
        "maj@4": "maj@4",
        "greedy": "greedy/avg_all_rewards",
        "math500": "math500/avg_all_rewards",
        "math500 pass@4": "math500/pass@4",
        "math500 maj@4": "math500/maj@4",
    }
    without_votes = {"avg_all_rewards": 0.5, "pass@4": 0.9}
    assert further_accuracies([without_votes]) == {"pass@4": "pass@4"}
    assert further_accuracies([{"avg_all_rewards": 0.5, "pass@1": 0.5, "maj@1": 0.5}]) == {}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "sampled at T=1"),
        ({"sampling_temperature": 0.7}, "sampled at T=0.7"),
        ({"eval_temperature": 0.0}, "greedy"),
        (
            {"eval_temperature": 0.6, "eval_top_p": 0.95, "eval_samples": 4},
            "sampled at T=0.6, top-p 0.95, 4 samples a problem",
        ),
        ({"eval_top_k": 20}, "sampled at T=1, top-k 20"),
        ({"sampling_top_k": 20, "eval_top_k": 0}, "sampled at T=1, no top-k"),
        (
            {"eval_rule": "boxed", "eval_greedy": True},
            "sampled at T=1, graded by boxed, and greedy ones beside them",
        ),
    ],
)
def test_words_say_the_temperature(flags, words):
    assert evaluation_words(vars(with_flags(**flags))) == words


def test_predicted_rows_follow_the_samples():
    """500 problems; 4 samples and a greedy response of each are as many as 625 problems have. Of
    MATH-500 all 500 problems are added, of AIME 30."""
    few = {"max_problems": 500}
    assert evaluated_rows(with_flags(**few), 500)[:2] == (500, 1)
    assert evaluated_rows(with_flags(eval_samples=4, **few), 500)[:2] == (500, 4)
    both = with_flags(eval_samples=4, eval_greedy=True, **few)
    assert evaluated_rows(both, 500)[:2] == (625, 4)
    tasks = with_flags(eval_tasks=("math500", "aime24"), **few)
    assert evaluated_rows(tasks, 500)[:2] == (1030, 1)
    assert evaluated_rows(with_flags(eval_top_p=0.9), 500).truncated
    assert evaluated_rows(with_flags(eval_top_k=20), 500).truncated
    assert not evaluated_rows(with_flags(eval_top_k=20, eval_temperature=0.0), 500).truncated
    assert not evaluated_rows(ARGS, 500).truncated


def test_predicted_rows_of_further_tasks_do_not_grow_with_their_number():
    """Each task of the user's own counts as many problems as --task asks. Every task has the
    validation split: 50 of MATH-500's 500 problems, and the test split the other 450."""
    tasks = with_flags(eval_tasks=("file:a", "file:b", "file:c"), max_problems=0)
    assert evaluated_rows(tasks, 100).prompts == 400
    split = {"validation_share": 0.1, "max_problems": 0, "eval_tasks": ("math500",)}
    validation = with_flags(eval_split="validation", **split)
    assert evaluated_rows(validation, 100).prompts == 100 + 50
    assert evaluated_rows(with_flags(**split), 100).prompts == 100 + 450


def test_sft_evaluates_in_the_same_ways():
    args = from_preset(SFTArgs, "tiny", eval_samples=2, eval_greedy=True)
    assert list(held_out_arguments(args)) == ["", "greedy"]
