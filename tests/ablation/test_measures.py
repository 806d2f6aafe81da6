"""What verdicts may be on beside accuracy: numbers worked by hand, and whole studies by hand-made
runs."""

import dataclasses
import itertools
import json
import math
from pathlib import Path
from statistics import multimode

import numpy as np
import pytest

from alignment import sweep
from alignment.ablation.design import fixed_facts
from alignment.ablation.measures import (
    best_checkpoint,
    evaluation_values,
    majority_at_k,
    pass_at_k,
    share_until,
)
from alignment.ablation.report import write_report
from alignment.ablation.study import read_measure, read_study
from alignment.ablation.summary import verdicts_of
from alignment.ablation.verdicts import censored_words, decide, final_scores, outcome
from alignment.args import SweepArgs, parse
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl, write_jsonl
from tests.ablation.test_report import countdown_line, make_run, rewrite_evals


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    # Of 4 samples with 2 right: of the 6 pairs, 1 has none right. With 1 right: 3 of 4 triples.
    rewards = np.array([[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0.5, 0.5, 1, 1]])
    np.testing.assert_allclose(pass_at_k(rewards, 2), [5 / 6, 1 / 2, 0, 5 / 6])
    np.testing.assert_allclose(pass_at_k(rewards, 3), [1, 3 / 4, 0, 1])
    np.testing.assert_allclose(pass_at_k(rewards, 1), (rewards == 1).mean(axis=1))
    for row, value in zip(rewards, pass_at_k(rewards, 2), strict=True):
        subsets = [max(pair) == 1 for pair in itertools.combinations(row, 2)]
        assert value == pytest.approx(np.mean(subsets))


def test_pass_at_k_is_unbiased():
    """Of 8 samples, each right with a chance of 0.2: 1 - 0.8^4 = 0.5904."""
    rng = np.random.default_rng(0)
    values = pass_at_k((rng.random((40_000, 8)) < 0.2).astype(float), 4)
    assert values.mean() == pytest.approx(0.5904, abs=3 * values.std() / 200)


def test_majority_at_k_by_hand():
    """Votes 0 0 1 2 with 1 right. Of the 4 sets of 3: {0 0 1} and {0 0 2} have wrong leaders, both
    {0 1 2} a draw of three, of which a third is right: 1/6. Of the 6 pairs {0 0} and twice {0 2}
    are wrong or a wrong draw, twice {0 1} and {1 2} half right: 1/4. All four: 0 leads."""
    rewards = np.array([[0.0, 0, 1, 0]])
    votes = np.array([[0, 0, 1, 2]])
    for k, value in {1: 1 / 4, 2: 1 / 4, 3: 1 / 6, 4: 0}.items():
        assert majority_at_k(rewards, votes, k) == pytest.approx(value)
    # Without an answer there is no vote: of 3 pairs, two have the right one alone.
    assert majority_at_k(np.array([[1.0, 0, 0]]), np.array([[0, -1, -1]]), 2) == pytest.approx(
        2 / 3
    )
    assert majority_at_k(np.zeros((1, 2)), np.full((1, 2), -1), 2) == 0
    # An answer is right where any sample with it is.
    assert majority_at_k(np.array([[1.0, 0.5, 0]]), np.array([[0, 0, 1]]), 3) == 1


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_majority_at_k_is_the_mean_over_all_sets(k):
    rng = np.random.default_rng(k)
    votes = rng.integers(-1, 4, (20, 6))
    rewards = ((votes == 0) | (votes == 2)).astype(float)
    for value, votes_N in zip(majority_at_k(rewards, votes, k), votes, strict=True):
        shares = []
        for chosen in itertools.combinations(votes_N.tolist(), k):
            leaders = set(multimode(vote for vote in chosen if vote >= 0))
            shares.append(len(leaders & {0, 2}) / len(leaders) if leaders else 0.0)
        assert value == pytest.approx(np.mean(shares))


def test_majority_at_k_is_unbiased():
    """Answers 0 (right), 1 and 2 with chances of 0.5, 0.3 and 0.2. The majority of three is right
    by 3 or 2 votes, 0.125 + 3 * 0.25 * 0.5, or as a third of all, 6 * 0.03 / 3: 0.56."""
    rng = np.random.default_rng(0)
    votes = rng.choice(3, (20_000, 8), p=[0.5, 0.3, 0.2])
    values = majority_at_k((votes == 0).astype(float), votes, 3)
    assert values.mean() == pytest.approx(0.56, abs=3 * values.std() / 141)


def test_the_best_evaluation_is_chosen_by_the_other_half_of_the_questions():
    # Questions 0 and 2 have means 0.5, 1, 0 in the three evaluations, 1 and 3 have 0, 0.5, 1. So 1
    # and 3 are scored in the second (1, 0), 0 and 2 in the third (0, 0): a mean of 0.25. Chosen by
    # all, the second has 0.75.
    values = np.array([[1, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1]], dtype=float)
    np.testing.assert_array_equal(best_checkpoint(values, "abcd"), [0, 1, 0, 0])
    # Copies of a question are on one side: of the texts a, a, b the first two are scored by b.
    np.testing.assert_array_equal(
        best_checkpoint(np.array([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]), "aab"), [0, 0, 0]
    )


def test_noise_makes_no_best_evaluation():
    """10 evaluations of equal accuracy 0.5 by 200 questions: the best of them is about 1.54
    standard deviations of 0.035 too high, the one that the other half chose is not."""
    rng = np.random.default_rng(1)
    values = [(rng.random((10, 200)) < 0.5).astype(float) for _ in range(400)]
    texts = [str(question) for question in range(200)]
    best = np.mean([value.mean(axis=1).max() for value in values])
    chosen = np.mean([best_checkpoint(value, texts).mean() for value in values])
    assert best == pytest.approx(0.5 + 1.54 * 0.5 / np.sqrt(200), abs=0.005)
    assert chosen == pytest.approx(0.5, abs=3 * 0.035 / np.sqrt(400))


def test_tokens_to_a_target_lie_on_straight_lines():
    # 0, 0.4, 0.8 at 0, 100, 200 tokens reach 0.5 at 125, of 250 a half.
    amounts = np.array([0.0, 100.0, 200.0])
    even = np.array([[0.0] * 4, [0.4] * 4, [0.8] * 4])
    np.testing.assert_allclose(share_until(amounts, even, 0.5, 250), [0.5] * 4)
    # With values of 0 and 1 the mean over questions stays; the slope is 0.4 / 100 tokens. At 125
    # tokens the questions have 0.25, 0.25, 0.5 and 1, so shares of 0.5 less (0.25 - 0.5) / 0.004 /
    # 250 and so on.
    uneven = np.array([[0, 0, 0, 0], [0, 0, 0.6, 1], [1, 1, 0.2, 1]], dtype=float)
    shares = share_until(amounts, uneven, 0.5, 250)
    np.testing.assert_allclose(shares, [0.75, 0.75, 0.5, 0.0], atol=1e-12)
    assert shares.mean() == pytest.approx(0.5)
    # Reached beyond the tokens that all have, or never: the whole share. Reached from the start: 0.
    assert share_until(amounts, even, 0.5, 120).tolist() == [1.0] * 4
    assert share_until(amounts, even, 0.9, 250).tolist() == [1.0] * 4
    assert share_until(amounts, even + 0.5, 0.5, 250).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    "name",
    [
        "pass",
        "pass@0",
        "pass@x",
        "pass@1.5",
        "pass@inf",
        "maj@1e400",
        "avg@nan",
        "tokens_to@2",
        "tokens_to@inf",
        "area@3",
        "maj",
        "maj@0",
        "",
    ],
)
def test_unknown_measures_are_refused(name):
    with pytest.raises(UserError, match="--measure .*: give accuracy, avg@N, .*, greedy, area"):
        read_measure(name)
    assert read_measure("tokens_to@0.5") == ("tokens_to", 0.5)


@pytest.fixture
def runs(tmp_path) -> list[Path]:
    """Two losses with three seeds, two samples of four questions: "a" has one right of each pair,
    "b" both of every second pair. So both have an accuracy of 0.5, and pass@2 of 1 and 0.5."""
    made = []
    for loss, seed in itertools.product("ab", range(3)):
        run = make_run(tmp_path / f"{loss}{seed}", seed, 0.5, loss_type=loss, num_steps=4)
        pairs = [(1, 0)] * 4 if loss == "a" else [(1, 1), (0, 0)] * 2
        lines = []
        for question, pair in enumerate(pairs):
            lines += [countdown_line(f"q{question}", float(reward)) for reward in pair]
        rewrite_evals(run, lines, 4)
        made.append(run)
    return made


def test_a_verdict_is_on_the_measure(runs, tmp_path):
    by_pass = read_study(runs, measure="pass@2")
    assert evaluation_values(by_pass.runs[0], "pass@2")[-1].tolist() == [1, 1, 1, 1]
    means = {arm: scores[0].mean() for arm, scores in final_scores(by_pass).items()}
    assert means == {"loss_type a": 1.0, "loss_type b": 0.5}
    assert decide(by_pass)[0].difference == 0.5
    assert decide(read_study(runs))[0].difference == 0.0
    assert decide(read_study(runs, measure="avg@2"))[0].difference == 0.0
    assert outcome(by_pass).title == "final pass@2"
    with pytest.raises(UserError, match="avg@4: .* has 2 samples a question"):
        decide(read_study(runs, measure="avg@4"))
    for measure in ("pass@3", "maj@3"):
        with pytest.raises(UserError, match=f"{measure}: evaluations have 2 samples"):
            decide(read_study(runs, measure=measure))
    with pytest.raises(UserError, match="maj@2: .* has no votes"):
        decide(read_study(runs, measure="maj@2"))


def test_a_verdict_is_on_votes(runs):
    """Each question of "a" has a draw of a right and a wrong answer, "b" agrees on the right one in
    every second question: 0.5 both."""
    for run in runs:
        for file in (run / "completions").glob("eval_*.jsonl"):
            lines = read_jsonl(file)
            for line in lines:
                line["score"]["vote"] = 0.0 if line["score"]["reward"] else 1.0
            write_jsonl(file, lines)
    study = read_study(runs, measure="maj@2")
    assert evaluation_values(study.runs[0], "maj@2")[-1].tolist() == [0.5] * 4
    means = {arm: scores[0].mean() for arm, scores in final_scores(study).items()}
    assert means == {"loss_type a": 0.5, "loss_type b": 0.5}
    assert outcome(study).title == "final maj@2"
    with pytest.raises(UserError, match="--measure best: it is of whole runs"):
        read_study(runs, match="tokens", measure="best")


def test_a_verdict_is_on_greedy_answers(runs):
    """Those of the last evaluation, of each question by its name: in "a" all but q1 are right."""
    study = read_study(runs, measure="greedy")
    with pytest.raises(UserError, match="^--measure greedy: .* train with --eval_greedy$"):
        final_scores(study)
    names = study.runs[0].scores.questions
    for run in study.runs:
        last = run.evals[-1]["step"]
        is_a = run.args["loss_type"] == "a"
        lines = []
        for question in reversed(run.scores.questions):
            right = is_a and question != names[1]
            lines.append({"problem": question, "score": {"reward": float(right)}})
        write_jsonl(run.path / "completions" / f"eval_greedy_{last:06d}.jsonl", lines)
    scores = final_scores(study)
    assert scores["loss_type a"][0].tolist() == [1, 0, 1, 1]
    assert scores["loss_type b"][0].tolist() == [0, 0, 0, 0]
    assert outcome(study).title == "final accuracy of greedy answers"


@pytest.mark.parametrize(
    ("measure", "a", "title"),
    [
        ("area", 0.5, "area under the learning curve"),
        ("best", 0.5, "accuracy of the best evaluation"),
        ("tokens_to@0.5", 0.0, "share of sampled tokens, tokens_to@0.5"),
        ("entropy", 1.0, "entropy"),
    ],
)
def test_measures_of_whole_runs_have_reports(runs, tmp_path, measure, a, title):
    study = read_study(runs, measure=measure)
    assert final_scores(study)["loss_type a"][0].mean() == pytest.approx(a)
    page, summary, *_ = write_report(study, tmp_path)
    assert f"Does loss_type make a difference to the {title}?" in page.read_text()
    assert f"verdicts are on {outcome(study).description}" in summary.read_text()
    assert ("Choosing and scoring the best" in page.read_text()) == (measure == "best")


def test_a_measure_that_is_no_number_names_its_run(runs, tmp_path):
    folder = read_study(runs).runs[0].path
    records = [{"step": step, "entropy": math.nan} for step in (1, 2)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    study = read_study(runs, measure="entropy")
    with pytest.raises(UserError, match=f"--measure entropy: {folder} has a value that is no"):
        decide(study)


def test_a_target_that_runs_do_not_reach_shows_no_tie(runs):
    """Both arms go to 0.5: 0.9 is reached by none of their runs, 0.05 is behind all."""
    never = read_study(runs, measure="tokens_to@0.9")
    [comparison] = decide(never)
    assert comparison.verdict == "undecided: 6 of 6 runs do not reach 0.9 in time"
    assert (comparison.kind, comparison.more_seeds) == ("undecided", None)
    assert censored_words(never) == (
        "runs that do not reach 0.9 within the tokens that all runs took count as if they did with"
        " the last of these, so that differences are too small: 3 of 3 of loss_type a, 3 of 3 of"
        " loss_type b"
    )
    assert censored_words(never) in verdicts_of(never).warnings
    behind = read_study(runs, measure="tokens_to@0.05")
    assert decide(behind)[0].verdict == "undecided: all runs begin at 0.05 or above"
    assert censored_words(behind) == ""


def test_one_run_that_does_not_reach_the_target_leaves_no_tie_but_a_winner(tmp_path):
    """Twelve runs that go from 0.1 to 0.7 or to 0.9, and so reach 0.5 at 2/3 or 1/2 of the tokens
    that all took."""

    def study(a: float, b: float, last: float):
        runs = []
        for loss, accuracy in (("a", a), ("b", b)):
            for seed in range(6):
                at = last if (loss, seed) == ("b", 5) else accuracy
                folder = tmp_path / f"{a}{b}{last}" / f"{loss}{seed}"
                runs.append(make_run(folder, seed, at, loss_type=loss))
        return read_study(runs, tie=0.4, measure="tokens_to@0.5")

    assert decide(study(0.7, 0.7, 0.7))[0].kind == "tie"
    [late] = decide(study(0.7, 0.7, 0.45))
    assert late.verdict == "undecided: 1 of 12 runs do not reach 0.5 in time"
    [winner] = decide(study(0.9, 0.7, 0.7))
    assert winner.is_small and winner.verdict.startswith("loss_type b > loss_type a, by less than")
    [other] = decide(study(0.9, 0.5, 0.45))
    assert other.kind == "greater" and "by less" not in other.verdict


def test_a_sweep_keeps_its_measure_and_says_where_another_is_read(runs, tmp_path):
    facts = {
        "arms": {"a": {"loss_type": "a"}, "b": {"loss_type": "b"}},
        "seeds": [0, 1, 2],
        "tie": 0.03,
        "hold": "rollouts",
        "alpha": 0.05,
        "warnings": [],
        "command": [],
        "measure": "pass@2",
    }
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    for run in runs:
        run.rename(tmp_path / f"{run.name[0]}_seed{run.name[1]}")
    assert read_study([tmp_path]).measure == "pass@2"
    assert read_study([tmp_path], measure="pass@2").warnings == ()
    other = read_study([tmp_path], measure="entropy")
    assert other.measure == "entropy" and "the sweep was made for pass@2" in other.warnings[0]


def test_a_sweep_refuses_a_measure_that_its_evaluations_lack(tmp_path):
    (tmp_path / "sft").mkdir()
    flags = ["--sft_base", str(tmp_path / "sft"), "--output_dir", str(tmp_path)]
    given = [*flags, "--loss_type", "no_baseline", "grpo_clip", "--seed", "0", "1"]
    with pytest.raises(UserError, match="pass@4: .* samples 1 answers .*--eval_samples 4"):
        sweep.make_design(parse(SweepArgs, [*given, "--measure", "pass@4"]))
    with pytest.raises(UserError, match="^--measure greedy: .* no greedy answers; .* --eval_gr"):
        sweep.make_design(parse(SweepArgs, [*given, "--measure", "greedy"]))
    design = sweep.make_design(
        parse(SweepArgs, [*given, "--measure", "pass@4", "--eval_samples", "8"])
    )
    assert design.facts()["measure"] == "pass@4"
    assert "measure" not in sweep.make_design(parse(SweepArgs, given)).facts()


@pytest.mark.parametrize("measure", ["best", "area", "tokens_to@0.5", "accuracy"])
def test_arms_of_a_measure_of_all_evaluations_are_evaluated_as_often(measure, tmp_path):
    (tmp_path / "sft").mkdir()
    flags = ["--sft_base", str(tmp_path / "sft"), "--output_dir", str(tmp_path)]
    given = [*flags, "--loss_type", "no_baseline", "grpo_clip", "--measure", measure]

    def design_of(*flags: str, tune: tuple[str, ...] = ()):
        args = dataclasses.replace(parse(SweepArgs, [*given, *flags]), tune=tune)
        design = sweep.make_design(args)
        sweep.make_tuning_design(design, args)
        return design

    tune = ("eval_interval=5,10",)
    first = design_of("--eval_interval", "5")
    later = design_of("--eval_interval", "10")
    if measure == "accuracy":
        assert len(design_of("--eval_interval", "5", "10").arms) == 4
        assert design_of(tune=tune).arms
        assert fixed_facts(later.facts()) == fixed_facts(first.facts())
        return
    refused = f"^--eval_interval 10 5: --measure {measure} is of all evaluations of a run"
    with pytest.raises(UserError, match=refused):
        design_of("--eval_interval", "5", "10")
    with pytest.raises(UserError, match=refused):
        design_of(tune=tune)
    assert fixed_facts(later.facts()) != fixed_facts(first.facts())
    assert fixed_facts(first.facts()) == fixed_facts(json.loads(json.dumps(first.facts())))
