"""The report of a study: what it reads, says and draws, from run folders made by hand."""

import csv
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from markupsafe import escape
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from rich.console import Console

from alignment import report
from alignment.ablation.referee import design_hash
from alignment.ablation.report import (
    _draw_curves,
    _draw_final,
    _points,
    _styles,
    arm_rows,
    contents,
    headline,
    write_report,
)
from alignment.ablation.report import report as write_and_print
from alignment.ablation.statistics import half_width, half_width_of_mean
from alignment.ablation.study import AMOUNTS, read_run, read_study, shell_command
from alignment.ablation.summary import Verdicts, caution, print_verdicts, verdicts_of
from alignment.ablation.tuning import Candidate, Choice, Tuning
from alignment.ablation.verdicts import (
    areas,
    budget,
    chord_bends,
    decide,
    decide_factors,
    final_scores,
    over_tasks,
    question_groups,
    split_of_gain,
)
from alignment.args import Match
from alignment.system.errors import UserError, run_command


def make_run(
    folder: Path, seed: int, accuracy: float, questions: int = 40, text: str = "fine", **args
) -> Path:
    """A run with two evaluations: a tenth of the questions right before, `accuracy` of them
    after."""
    (folder / "completions").mkdir(parents=True)
    facts = {
        "args": {"seed": seed, "preset": "tiny", **args},
        "command": ["python3", "/x/alignment/train_rl.py", "--a", "1"],
        "versions": {"python": "3.11.7", "code": "abc1234"},
    }
    (folder / "args.json").write_text(json.dumps(facts))
    records = []
    for step, share in ((0, 0.1), (4, accuracy)):
        right = [i < share * questions for i in range(questions)]
        lines = [
            {
                "problem": f"q{i}",
                "question": f"What is {i}?",
                "ground_truth": str(i),
                "text": text,
                "token_ids": [7] * (i + 1),
                "finish_reason": "length" if i == 0 else "stop",
                "score": {
                    "reward": float(r),
                    "format_reward": float(i < 30),
                    "answer_reward": float(r),
                },
            }
            for i, r in enumerate(right)
        ]
        (folder / "completions" / f"eval_{step:06d}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
        records.append(
            {
                "step": step,
                "avg_all_rewards": sum(right) / questions,
                "avg_format_rewards": 0.5 if step == 0 else 1.0,
            }
        )
    (folder / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    same = {
        "responses": 8,
        "reward": 0.5,
        "entropy": 1.0,
        "grad_norm": 0.1,
        "seconds": 2.0,
        "seconds_update": 0.5,
    }
    metrics = [
        {"step": s, "response_length": 5.0 + s, "warnings": ["equal_rewards"] * (s > 2), **same}
        for s in (1, 2, 3, 4)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    (folder / "summary.json").write_text("{}")
    return folder


def write_sweep(folder: Path, arms: dict[str, dict], seeds: Sequence[int]) -> None:
    """Make a folder of runs that of a sweep with these arms."""
    facts = {
        "arms": arms,
        "seeds": list(seeds),
        "tie": 0.03,
        "hold": "rollouts",
        "alpha": 0.05,
        "warnings": [],
        "command": ["sweep.py"],
    }
    (folder / "sweep.json").write_text(json.dumps(facts))


@pytest.fixture
def grid(tmp_path):
    """A sweep of two losses and two group sizes with three seeds, in which the loss decides and the
    group size does not."""
    rng, arms = np.random.default_rng(0), {}
    for loss, accuracy in (("grpo_clip", 0.8), ("no_baseline", 0.4)):
        for size in (4, 8):
            name = f"{loss}_group_size{size}"
            arms[name] = {
                "loss_type": loss,
                "group_size": size,
                "prompts_per_rollout": 256 // size,
                "num_steps": 4,
            }
            for seed in range(3):
                at = accuracy + rng.integers(-1, 2) / 40
                make_run(
                    tmp_path / f"{name}_seed{seed}",
                    seed,
                    at,
                    text="<script>alert(1)</script>\x1b[2J",
                    **arms[name],
                )
    facts = {
        "arms": arms,
        "seeds": [0, 1, 2],
        "tie": 0.03,
        "hold": "rollouts",
        "alpha": 0.05,
        "warnings": ["careful <b>"],
        "command": ["sweep.py", "--x"],
    }
    (tmp_path / "sweep.json").write_text(json.dumps(facts))
    return tmp_path


def test_the_choice_that_decides_is_named(grid):
    study = read_study([grid])
    factors = decide_factors(study)
    assert list(factors) == ["loss_type", "group_size"]
    (loss,), (size,) = factors["loss_type"], factors["group_size"]
    assert loss.verdict == "grpo_clip > no_baseline in runs like these"
    assert loss.difference == pytest.approx(0.4, abs=0.06)
    assert ">" not in size.verdict
    assert len(decide(study)) == 6
    assert headline(factors, decide(study))[0].startswith(
        "loss_type: grpo_clip > no_baseline in runs like these (0."
    )


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found: list[tuple[str, dict]] = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.slow
def test_the_page_needs_no_network_and_runs_nothing(grid, real_figures):
    html, markdown, *_ = write_report(read_study([grid]), grid)
    text, tags = html.read_text(), Tags()
    tags.feed(text)
    assert "script" not in {tag for tag, _ in tags.found}
    fetching = [
        (tag, a)
        for tag, a in tags.found
        if {"src", "srcset"} & set(a) or tag in ("link", "iframe", "object")
    ]
    assert fetching == []
    outside = [
        a
        for tag, a in tags.found
        for key, a in a.items()
        if key.endswith("href") and not a.startswith("#")
    ]
    assert outside == []
    assert "\x1b" not in text and "&lt;script&gt;" in text and "careful &lt;b&gt;" in text
    # Differences, accuracy by steps, tokens and seconds, final, reward, length, entropy, gradient
    # norm; nothing was clipped.
    assert text.count("<svg") == 9
    assert "#010101" not in text and "currentColor" in text and "prefers-color-scheme: dark" in text
    assert 'http-equiv="refresh"' not in text
    assert text.index("Verdicts") < text.index("Figures") < text.index("Samples")
    assert "uv run -m alignment.train_rl --a 1" in text and "abc1234" in text
    assert "| grpo_clip_group_size4 |" in markdown.read_text()


@pytest.mark.slow
def test_two_reports_of_one_study_are_equal(grid, real_figures):
    def written() -> dict[str, bytes]:
        files = [*write_report(read_study([grid]), grid), *(grid / "figures").iterdir()]
        return {file.name: file.read_bytes() for file in files}

    assert written() == written()


@pytest.mark.slow
def test_figures_and_tables_are_files_of_their_own(grid, real_figures):
    study = read_study([grid])
    write_report(study, grid)
    stems = {file.suffix: set() for file in (grid / "figures").iterdir()}
    for file in (grid / "figures").iterdir():
        stems[file.suffix].add(file.stem)
    assert (
        set(stems) == {".svg", ".pdf"}
        and stems[".svg"] == stems[".pdf"]
        and len(stems[".svg"]) == 9
    )
    assert (grid / "figures" / "differences_of_final_accuracy.pdf").read_bytes().startswith(b"%PDF")
    rows = list(csv.DictReader((grid / "comparisons.csv").open()))
    assert [row["table"] for row in rows[:2]] == [
        "loss_type, averaged over all else",
        "group_size, averaged over all else",
    ]
    assert len(rows) == 2 + 6 + 6
    (loss,) = decide_factors(study)["loss_type"]
    assert [float(rows[0][key]) for key in ("difference", "low", "high")] == [
        loss.difference,
        loss.low,
        loss.high,
    ]
    arms = list(csv.DictReader((grid / "arms.csv").open()))
    assert {row["arm"]: row["seeds"] for row in arms} == dict.fromkeys(study.arms, "0 1 2")
    assert all(len(row["values"].split()) == 3 for row in arms)
    assert {row["measure"] for row in arms} == {"accuracy"}
    assert {(row["loss_type"], row["group_size"]) for row in arms} == {
        (loss, size) for loss in ("grpo_clip", "no_baseline") for size in "48"
    }
    curves = list(csv.DictReader((grid / "curves.csv").open()))
    assert [(row["arm"], row["seed"], row["step"]) for row in curves[1:3]] == [
        ("grpo_clip_group_size4", "0", "4"),
        ("grpo_clip_group_size4", "1", "0"),
    ]
    assert len(curves) == 4 * 3 * 2 and {
        row["accuracy"] for row in curves if row["step"] == "0"
    } == {"0.1"}
    latex = (grid / "report.tex").read_text()
    assert (
        r"grpo\_clip $-$ no\_baseline & $+0.396$" in latex
        and r"grpo\_clip $>$ no\_baseline in runs like these \\" in latex
    )
    assert latex.count(r"\begin{longtable}") == latex.count(r"\end{longtable}") == 5
    assert latex.count(r"\begin{figure}") == latex.count(r"\end{figure}") > 2
    drawn = re.findall(r"\\includegraphics\[width=\\linewidth\]\{(figures/.*)\}", latex)
    assert sorted(drawn) == sorted(
        f"figures/{file.name}" for file in (grid / "figures").glob("*.pdf")
    )
    compared = next(row for row in rows if row["a"] == "grpo_clip" and row["b"] == "no_baseline")
    assert 0 < float(compared["would_find"]) < 1
    assert (
        f"| {compared['seeds']} | {float(compared['would_find']):.3f} | "
        in (grid / "report.md").read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("word", ["bitwise", "to rounding", "statistical", "not verified"])
def test_every_report_names_the_reproducibility_that_was_verified(grid, word):
    """A verification beside the runs, with their settings; one run of the study has other
    settings."""
    runs = [run.path for run in read_study([grid]).runs]
    folder = runs[0].parent / "verify_tiny"
    folder.mkdir()
    shutil.copy(runs[0] / "args.json", folder)
    (folder / "verification.html").write_text("")
    (folder / "summary.json").write_text(json.dumps({"reproducibility": word}))
    facts = json.loads((runs[-1] / "args.json").read_text())
    (runs[-1] / "args.json").write_text(json.dumps({**facts, "machine": "another"}))
    words = ", ".join(sorted({word, "not verified"}))
    html, markdown, latex, *_ = (
        path.read_text() for path in write_report(read_study([grid]), grid)
    )
    assert (
        f"<td>{words}</td>" in html
        and f"Reproducibility (`alignment.verify`): {words}." in markdown
    )
    assert f"Reproducibility, by \\texttt{{verify}}: {words}}} \\\\\n" in latex


def test_two_arguments_are_told_apart_by_colour_and_dash(grid):
    looks = _styles(read_study([grid]))
    colours = {arm: look["color"] for arm, look in looks.items()}
    assert (
        len(set(colours.values())) == 2
        and colours["grpo_clip_group_size4"] == colours["grpo_clip_group_size8"]
    )
    assert (
        looks["grpo_clip_group_size4"]["linestyle"]
        == looks["no_baseline_group_size4"]["linestyle"]
        == "-"
    )
    assert (
        looks["grpo_clip_group_size8"]["linestyle"]
        == looks["no_baseline_group_size8"]["linestyle"]
        == "--"
    )


def test_accuracy_is_drawn_against_what_it_cost(tmp_path):
    """Four steps of 8 responses of 6, 7, 8 and 9 tokens, 2 s each."""
    run = read_run(make_run(tmp_path / "r", 0, 0.5))
    assert _points(run, "avg_all_rewards", "sampled tokens") == {0: (0.0, 0.1), 4: (240.0, 0.5)}
    assert _points(run, "avg_all_rewards", "seconds of training") == {0: (0.0, 0.1), 4: (8.0, 0.5)}
    assert _points(run, "response_length", "rollout steps") == {
        1: (1, 6.0),
        2: (2, 7.0),
        3: (3, 8.0),
        4: (4, 9.0),
    }


def rewrite_metrics(run: Path, **changes) -> None:
    """Give every step of a run made by hand these values."""
    records = [
        json.loads(line) | changes for line in (run / "metrics.jsonl").read_text().splitlines()
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def evaluate_between(run: Path, *steps: int) -> None:
    """Give a run made by hand evaluations after these of its 4 steps too, each question's reward on
    a straight line."""
    first, last = (json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines())
    before, after = (
        [
            json.loads(line)
            for line in (run / "completions" / f"eval_{step:06d}.jsonl").read_text().splitlines()
        ]
        for step in (0, 4)
    )
    records = [first]
    for step in steps:
        rewards = [
            (4 - step) / 4 * old["score"]["reward"] + step / 4 * new["score"]["reward"]
            for old, new in zip(before, after, strict=True)
        ]
        rows = [
            line | {"score": line["score"] | {"reward": reward}}
            for line, reward in zip(after, rewards, strict=True)
        ]
        (run / "completions" / f"eval_{step:06d}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        records.append(last | {"step": step, "avg_all_rewards": sum(rewards) / len(rewards)})
    (run / "evals.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, last])
    )


@pytest.fixture
def unequal(tmp_path):
    """Arm "long" ends at 0.9 after 4 steps of 8 responses of 10 tokens and 2 s, 320 tokens in all;
    arm "short" at 0.6 after as many of 5 tokens and 1 s. Both begin at 0.1. A seed differs from
    another by one question."""
    arms = {name: {"loss_type": name, "group_size": 4} for name in ("long", "short")}
    for name, accuracy, tokens, seconds in (("long", 0.9, 10.0, 2.0), ("short", 0.6, 5.0, 1.0)):
        for seed in range(3):
            run = make_run(
                tmp_path / f"{name}_seed{seed}",
                seed,
                accuracy + (seed - 1.4) / 400,
                questions=400,
                **arms[name],
            )
            rewrite_metrics(run, response_length=tokens, seconds=seconds)
            evaluate_between(run, 1, 3)
    facts = {
        "arms": arms,
        "seeds": [0, 1, 2],
        "tie": 0.03,
        "hold": "rollouts",
        "alpha": 0.05,
        "warnings": [],
        "command": [],
    }

    def study(match: str | None):
        (tmp_path / "sweep.json").write_text(
            json.dumps(facts | ({"match": match} if match else {}))
        )
        return read_study([tmp_path])

    return study


def test_every_choice_of_match_is_an_amount():
    assert get_args(Match) == tuple(AMOUNTS)


@pytest.mark.parametrize(
    ("match", "most", "long", "verdict"),
    [
        (None, np.inf, 0.9, "long > short in runs like these"),
        ("steps", np.inf, 0.9, "long > short in runs like these"),
        ("samples", 32, 0.9, "long > short in runs like these"),
        (
            "tokens",
            160,
            0.5,
            "short > long in runs like these",
        ),  # half of the 320: midway between 0.1 and 0.9
        ("seconds", 4, 0.5, "short > long in runs like these"),
    ],
)
def test_arms_are_compared_at_equal_amounts(unequal, match, most, long, verdict):
    study = unequal(match)
    scores = final_scores(study)
    assert budget(study, study.arms) == most
    assert scores["long"][1].mean() == pytest.approx(long, abs=1e-12) and scores["short"][
        1
    ].mean() == pytest.approx(0.6)
    (comparison,) = decide(study)
    assert comparison.verdict == verdict and comparison.difference == pytest.approx(
        long - 0.6, abs=1e-12
    )
    # A straight line's mean is that of its ends.
    assert areas(study, study.arms)["long"][1].mean() == pytest.approx((0.1 + long) / 2, abs=1e-12)
    rows = {row["name"]: row for row in arm_rows(study)}
    assert rows["long"]["mean"] == pytest.approx(long) and rows["long"]["split"][
        0
    ] == pytest.approx(long - 0.1)


def test_a_verdict_that_a_bend_could_undo_is_undecided(unequal, tmp_path):
    """ "long" is evaluated at 0, 320 tokens and nothing between, where its curve may have had any
    way from 0.1 to 0.9: at 160 it may have been above "short", which has 0.6 there."""
    study = unequal("tokens")
    assert decide(study)[0].kind == "greater"
    for seed in range(3):
        run = tmp_path / f"long_seed{seed}"
        first, *_, last = (run / "evals.jsonl").read_text().splitlines()
        (run / "evals.jsonl").write_text(f"{first}\n{last}\n")
    (comparison,) = decide(unequal("tokens"))
    assert comparison.kind == "undecided" and comparison.more_seeds is None
    assert (
        comparison.verdict.startswith("undecided: evaluate more often")
        and "up to 0.4" in comparison.verdict
    )
    assert decide(unequal("tokens"), whole_curve=True)[0].verdict.startswith(
        "undecided: evaluate more often"
    )
    # both arms' last evaluations come at 32 responses
    assert decide(unequal("samples"))[0].kind == "greater"


def test_a_bend_is_bounded_by_the_lines_of_the_neighbours():
    # 0, 4, 6, 7 at 0, 1, 2, 3: at 1.5 the lines of the neighbours reach 4 + 4 * 0.5 = 6 and 6 - 1 *
    # 0.5 = 5.5, their own 5.
    amounts, values = np.arange(4.0), np.array([0.0, 4.0, 6.0, 7.0])
    np.testing.assert_allclose(
        chord_bends(amounts, values, np.array([1.5])), [[1.0], [0.5]], atol=1e-12
    )
    np.testing.assert_allclose(
        chord_bends(amounts, values, np.array([2.0, 3.0])), np.zeros((2, 2)), atol=1e-12
    )
    # A curve is taken for flat where it was not evaluated: at 0.5 the lines are 0 and 4 - 2 * 0.5 =
    # 3, their own 2.
    np.testing.assert_allclose(
        chord_bends(amounts, values, np.array([0.5])), [[-2.0], [1.0]], atol=1e-12
    )
    assert np.isinf(
        chord_bends(amounts + 1, values, np.array([0.5]))
    ).all()  # before the first evaluation
    assert np.isinf(chord_bends(amounts, values, np.array([3.5]))).all()  # beyond the last one


@pytest.mark.parametrize("rate", [1.0, 4.0, -2.0])
def test_a_curve_that_bends_one_way_lies_within_its_bound(rate):
    amounts, at = np.linspace(0, 1, 7), np.linspace(0.2, 0.8, 13)

    def curve(x):
        return (1 - np.exp(-rate * x)) / rate

    bend = curve(at) - np.interp(at, amounts, curve(amounts))
    bounds = chord_bends(amounts, curve(amounts), at)
    nearest = np.take_along_axis(bounds, np.abs(bounds).argmin(axis=0)[None], axis=0)[0]
    assert (np.abs(bend) <= np.abs(nearest) + 1e-12).all() and (bend * nearest >= -1e-12).all()


def test_every_verdict_of_a_page_that_a_choice_could_undo_is_named(grid):
    """Of an arm whose other value did not finish nothing is known: each pair in which it is the
    worse one is named beside the loss, and the areas, by which no arm chose."""
    study = read_study([grid])
    far = Choice((Candidate({"v": 1}, {100: 0.9}), Candidate({"v": 2}, {100: 0.1})), 0)
    failed = Choice((Candidate({"v": 1}, {100: 0.9}), Candidate({"v": 2}, {}, (100,))), 0)
    choices = dict.fromkeys(study.arms, far) | {"no_baseline_group_size4": failed}
    tuning = Tuning(choices, (100,), 400, {"runs": 7.0, "tokens": 9.0, "seconds": 1.0})
    words = contents(replace(study, tuning=tuning))["choice_caution"]
    for better in ("grpo_clip", "grpo_clip_group_size4", "grpo_clip_group_size8"):
        worse = "no_baseline" if better == "grpo_clip" else "no_baseline_group_size4"
        assert f"{better} > {worse} in runs like these" in words
    assert "no_baseline_group_size8" not in words
    assert ". Also of the values taken: all verdicts on area. Arms chose by accuracy" in words


@pytest.mark.slow
def test_what_runs_like_these_leave_open_is_said_once(grid, capsys):
    study = read_study([grid])
    write_and_print(study, grid, Console(width=300))
    # Three seeds, four arms that share 5 %: (1 - share)^3 = 0.0125, so 77 %.
    said = "3 seeds cannot exclude that up to 77% of an arm's runs end elsewhere"
    printed = capsys.readouterr().out
    assert printed.count(said) == 1 and said in (grid / "report.md").read_text()
    assert said in (grid / "report.html").read_text().replace("&#39;", "'")
    rows = list(csv.DictReader((grid / "comparisons.csv").open()))
    assert {row["firm"] for row in rows} == {"False"} and all(
        0 < float(row["may_hide"]) < 2 for row in rows
    )


@pytest.mark.slow
def test_the_report_names_the_amount_at_which_arms_were_compared(unequal, tmp_path, capsys):
    study = unequal("tokens")
    write_and_print(study, tmp_path, Console(width=300))
    said = (
        "the accuracy at 160 sampled tokens, which all runs have reached, on straight lines between"
        " evaluations"
    )
    html, markdown, latex = (
        (tmp_path / f"report.{kind}").read_text() for kind in ("html", "md", "tex")
    )
    assert (
        f"On {said}, paired" in html
        and f"- verdicts are on {said}\n" in markdown
        and said in capsys.readouterr().out
    )
    assert (
        "Accuracy at equal tokens: pairs of arms" in latex
        and "Differences of accuracy at equal tokens" in html
    )
    write_and_print(unequal("steps"), tmp_path, Console(width=300))
    assert "verdicts are on" not in (tmp_path / "report.md").read_text() + capsys.readouterr().out


def test_an_evaluation_before_the_budget_counts(unequal, tmp_path):
    """An evaluation in which "long" had 0.3 after 3 of its steps, 240 tokens: at 160 it has two
    thirds of the way from 0.1."""
    for seed in range(3):
        run = tmp_path / f"long_seed{seed}"
        first, *_, last = (run / "evals.jsonl").read_text().splitlines()
        middle = json.dumps(json.loads(last) | {"step": 3, "avg_all_rewards": 0.3})
        (run / "evals.jsonl").write_text("\n".join((first, middle, last)) + "\n")
        lines = (run / "completions" / "eval_000004.jsonl").read_text().splitlines()
        rows = [
            json.loads(line) | {"score": {"reward": float(i < 120)}} for i, line in enumerate(lines)
        ]
        (run / "completions" / "eval_000003.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    assert final_scores(unequal("tokens"))["long"][1].mean() == pytest.approx(
        0.1 + 0.2 * 160 / 240, abs=1e-12
    )


def test_refills_are_samples_too(unequal, tmp_path):
    """3 prompts of 4 responses were sampled for a step that trains on 8; older runs say only how
    many, not how long."""
    study = unequal("tokens")
    run = study.arms["long"][0].path
    rewrite_metrics(run, prompts_sampled=3)
    assert [
        float(read_run(run).amounts_until(match, [{"step": 2}])[0])
        for match in ("samples", "tokens")
    ] == [24, 240]
    rewrite_metrics(run, tokens_sampled=70)
    assert read_run(run).amounts_until("tokens", [{"step": 0}, {"step": 2}]).tolist() == [0, 140]


def test_an_unknown_amount_in_a_sweeps_file_is_damage(unequal):
    with pytest.raises(UserError, match="sweep.json is damaged"):
        unequal("hours")


def test_one_seed_has_no_interval_and_no_number_that_cannot_be(tmp_path, capsys):
    runs = [
        make_run(tmp_path / "a", 0, 0.8, loss_type="grpo_clip"),
        make_run(tmp_path / "b", 0, 0.4, loss_type="no_baseline"),
    ]
    study = read_study(runs)
    print_verdicts(verdicts_of(study), Console(width=200))
    assert "none: one seed" in capsys.readouterr().out
    for page in write_report(study, tmp_path / "report"):
        text = page.read_text()
        if page.suffix != ".csv":  # which has NaN where a program expects a number
            assert not re.search(r"\bnan\b|\binf\b", text), page
        if page.suffix == ".md":
            assert "| none: one seed | 1 | none |" in text


def test_no_axis_of_accuracies_goes_where_none_can_be(tmp_path):
    """Two seeds that are far apart have an interval far beyond 0 and 1."""
    runs = []
    for seed, accuracy in enumerate((0.0, 1.0)):
        for loss in ("grpo_clip", "no_baseline"):
            folder = tmp_path / f"{loss}{seed}"
            runs.append(make_run(folder, seed, accuracy, loss_type=loss))
    study = read_study(runs)
    draw_accuracy = partial(_draw_curves, key="avg_all_rewards", cost="rollout steps")
    for draw, limits in ((_draw_final, Axes.get_xlim), (draw_accuracy, Axes.get_ylim)):
        figure, axes = plt.subplots()
        draw(axes, _styles(study), study)
        low, high = limits(axes)
        plt.close(figure)
        assert -0.05 < low <= 0 and 1 <= high < 1.05


@pytest.mark.slow
def test_few_seeds_are_said_in_the_headline(grid):
    html, markdown, *_ = write_report(read_study([grid]), grid)
    assert (
        "the verdicts rest on 3 an arm" in html.read_text()
        and "the verdicts rest on 3 an arm" in markdown.read_text()
    )


@pytest.mark.slow
@pytest.mark.parametrize("finished", [True, False])
def test_a_single_run_has_a_page_while_it_trains_and_after(tmp_path, finished):
    run = make_run(tmp_path / "my_run", 0, 0.5, text="<b>\x1b[2J", num_steps=4)
    if not finished:
        (run / "summary.json").unlink()
    html, markdown, *_ = write_report(read_study([run]), run)
    text = html.read_text()
    assert ("Still training: 4 of 4 steps" in text) is not finished
    assert ('<meta http-equiv="refresh" content="30">' in text) is not finished
    assert "held-out accuracy 0.100 before, 0.500 after 4 steps" in text
    assert "equal_rewards: in 2 steps, the first 3, the last 4" in text
    # 20 of 40 are right, the first 30 well-formed; 1 to 40 tokens, of which the first was cut off.
    assert [
        f"{kind}: {n} of 40" in text
        for kind, n in (("format and answer", 20), ("format only", 10), ("neither", 10))
    ] == [True] * 3
    assert "of 40 responses; 1 were cut off" in text
    assert re.findall(
        r'<td class="n">(\d+)</td>', text[text.index("<h2>Lengths") : text.index("<h2>Grading")]
    ) == ["1", "11", "21", "30", "38", "40"]
    assert '<td>update</td><td class="n">0.500</td><td class="n">25.0 %</td>' in text
    assert "<b>" not in text and "\x1b" not in text and "Verdicts" not in text
    assert "| 4 | 0.500 | 1.000 |" in markdown.read_text()


def test_a_run_before_its_first_step_has_a_page(tmp_path):
    run = make_run(tmp_path / "my_run", 0, 0.5, num_steps=4)
    (run / "summary.json").unlink()
    (run / "metrics.jsonl").write_text("")
    (run / "evals.jsonl").write_text((run / "evals.jsonl").read_text().splitlines()[0] + "\n")
    assert "Still training: 0 of 4 steps" in write_report(read_study([run]), run)[0].read_text()


def test_runs_of_an_older_version_and_with_other_trackers_are_of_one_arm(tmp_path):
    runs = [make_run(tmp_path / f"run{seed}", seed, 0.5) for seed in (0, 1)]
    record = json.loads((runs[1] / "args.json").read_text())
    for name in ("trackers", "max_staleness"):
        record["args"].pop(name, None)
    record["args"]["reference_url"] = ""
    (runs[1] / "args.json").write_text(json.dumps(record))
    assert list(read_study(runs).arms) == ["all runs"]


@pytest.mark.slow
def test_a_followed_report_is_written_until_the_run_is_finished(tmp_path, monkeypatch):
    run = make_run(tmp_path / "r", 0, 0.5, num_steps=4)
    (run / "summary.json").unlink()
    seconds = []
    monkeypatch.setattr(
        "time.sleep", lambda s: (seconds.append(s), (run / "summary.json").write_text("{}"))
    )
    monkeypatch.setattr("sys.argv", ["report", "--runs", str(run), "--follow"])
    run_command(report.main)
    assert seconds == [30] and "Finished: 4 of 4 steps" in (run / "report.html").read_text()


@pytest.mark.slow
def test_unfinished_and_missing_runs_are_named(grid):
    (grid / "grpo_clip_group_size4_seed1" / "summary.json").unlink()
    study = read_study([grid])
    assert study.missing == ("grpo_clip_group_size4_seed1",)
    page = write_report(study, grid)[0].read_text()
    assert "Missing, and so not in any verdict: grpo_clip_group_size4_seed1" in page
    assert 'http-equiv="refresh"' in page
    change_sweep(grid, reported=[3])  # all seeds: the run has failed, and nothing is to come
    page = write_report(read_study([grid]), grid)[0].read_text()
    assert "Missing, and so not in any verdict: grpo_clip_group_size4_seed1" in page
    assert 'http-equiv="refresh"' not in page


def methods_of(study, folder: Path) -> str:
    """The paragraph of methods of the report, which its page, its Markdown and its LaTeX have."""
    html, markdown, latex, *_ = (path.read_text() for path in write_report(study, folder))
    methods = markdown.partition("## Methods\n\n")[2].splitlines()[0]
    assert methods.replace("%", "\\%").replace("_", "\\_") in latex
    assert str(escape(methods)) in html
    return methods


def change_record(run: Path, of: str, **facts) -> None:
    record = json.loads((run / "args.json").read_text())
    record[of] = {**record[of], **facts}
    (run / "args.json").write_text(json.dumps(record))


@pytest.mark.slow
def test_methods_are_told_from_the_records(grid):
    """Twelve runs of 4 steps with 8 responses each: 8 prompts of groups of 4, or 4 of groups of
    8."""
    for run in grid.glob("*_seed*"):
        change_record(
            run, "args", model="tiny", task="sums", num_problems=1234, sampling_temperature=0.7
        )
    methods = methods_of(read_study([grid]), grid)
    for fact in (
        "tiny was trained by reinforcement learning on sums.",
        (
            "4 arms differ in loss_type (grpo_clip, no_baseline) and group_size (4, 8), in 12"
            " finished runs"
        ),
        "with the seeds 0, 1, 2 each.",
        "A run took 4 steps, with 32 responses to 4 to 8 prompts in all.",
        "the first 1,234 problems of the task's training problems",
        "on 40 held-out questions, of answers sampled at the temperature 0.7.",
        "while the group size varies, rollouts stay the same.",
        "for the comparisons of a table, at most 6, by Holm's correction",
        "at most 5 %. A tie is a difference shown to be below 0.03 ",
        "Versions: python 3.11.7, code (git commit) abc1234.",
    ):
        assert fact in methods
    assert "made apart" not in methods
    sweep = json.loads((grid / "sweep.json").read_text())
    (grid / "sweep.json").write_text(
        json.dumps({**sweep, "alpha": 0.01, "tie": 0.05, "hold": "prompts"})
    )
    (grid / "grpo_clip_group_size4_seed1" / "summary.json").unlink()
    methods = methods_of(read_study([grid]), grid)
    for fact in (
        "at most 5 %: verdicts may be made 5 times, each time with 1 %.",
        "below 0.05 ",
        "prompts stay the same",
        "11 finished runs with other seeds from arm to arm",
    ):
        assert fact in methods
    assert "1 unfinished run is left out." in methods and "0, 1, 2 each" not in methods


def test_methods_leave_out_what_is_not_known(tmp_path):
    runs = [
        make_run(tmp_path / f"{loss}{seed}", seed, 0.5, loss_type=loss)
        for loss in "ab"
        for seed in (0, 1)
    ]
    for run in runs:
        record = json.loads((run / "args.json").read_text())
        (run / "args.json").write_text(json.dumps({**record, "versions": {"code": "unknown"}}))
        (run / "metrics.jsonl").write_text("")
    methods = methods_of(read_study(runs), tmp_path)
    assert methods.startswith("2 arms differ in loss_type (a, b), in 4 finished runs")
    for word in (
        "trained by",
        "A run took",
        "drawn from",
        "temperature",
        "Versions",
        "machine",
        "reproducible",
        "None",
    ):
        assert word not in methods
    assert (
        "With a single comparison the p value needs no correction" in methods
        and "Holm" not in methods
    )


def test_methods_name_the_machine_and_what_was_verified_there(grid, monkeypatch):
    for run in grid.glob("*_seed*"):
        record = json.loads((run / "args.json").read_text())
        (run / "args.json").write_text(
            json.dumps({**record, "machine": "secret-host: Linux-6.18, 2 processors"})
        )
    methods = methods_of(read_study([grid]), grid)
    assert (
        "The machine was Linux-6.18, 2 processors; the steps of all runs took" in methods
        and "secret-host" not in methods
    )
    assert "reproducible" not in methods
    monkeypatch.setattr("alignment.ablation.report.reproducibility", lambda run, setting: "bitwise")
    assert "found the runs reproducible: bitwise." in methods_of(read_study([grid]), grid)


@pytest.mark.slow
def test_names_are_escaped_in_latex(tmp_path):
    """Every special character has its escape, and braces and dollars are closed."""
    runs = [
        make_run(
            tmp_path / f"r{i}", i % 2, 0.5, task="a_b.py:50%&#1", loss_type=f"x_{i // 2}^~${{}}\\"
        )
        for i in range(4)
    ]
    write_report(read_study(runs), tmp_path)
    text = "".join(
        line
        for line in (tmp_path / "report.tex").read_text().splitlines(True)
        if not line.startswith("%")
    )
    assert r"x\_1\textasciicircum \textasciitilde \$\{\}\textbackslash " in text
    bare = re.sub(r"\\[_%&#${}]", "", text)
    assert bare.count("{") == bare.count("}") and bare.count("$") % 2 == 0
    assert not re.search(r"[%#^~]", bare)
    outside = re.sub(
        r"(?s)\\begin\{longtable\}.*?\\end\{longtable\}|\{figures/.*\}|\$[^$]*\$", "", bare
    )
    assert not re.search(r"[_&$]", outside)
    rows = [line for line in bare.splitlines() if line.endswith(r"\\") and "caption" not in line]
    assert {line.count("&") for line in rows} == {5}


@pytest.mark.slow
def test_runs_of_several_sweeps_are_compared_as_made_apart(
    grid, tmp_path_factory, monkeypatch, capsys
):
    """A second sweep, of another commit, has one more loss and asks the same questions; single runs
    go with both."""
    other, alone = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("alone")
    arm = {
        "loss_type": "gspo",
        "group_size": 4,
        "prompts_per_rollout": 64,
        "num_steps": 4,
        "save_interval": 7,
    }
    for seed in range(3):
        change_record(
            make_run(other / f"gspo_seed{seed}", seed, 0.6, **arm), "versions", code="def5678"
        )
    (other / "gspo_seed2" / "summary.json").unlink()
    sweep = json.loads((grid / "sweep.json").read_text())
    (other / "sweep.json").write_text(json.dumps({**sweep, "arms": {"gspo": arm}}))
    single = make_run(alone / "cispo", 0, 0.6, **{**arm, "loss_type": "cispo"})
    study = read_study([grid, other, single])
    assert len(study.arms) == 6 and sorted(
        study.arms["group_size 4, loss_type gspo, prompts_per_rollout 64"]
    ) == [0, 1]
    assert study.missing == ("gspo_seed2",) and study.warnings == (
        "the runs differ in code: abc1234, def5678",
    )
    methods = methods_of(study, alone)
    assert (
        "The runs were made apart, not by one sweep" in methods and "share the order" not in methods
    )
    assert "code (git commit) abc1234 or def5678; where two are named, the runs differ." in methods
    assert "the runs differ in code: abc1234, def5678" in (alone / "report.md").read_text()
    runs = sorted(grid.glob("*_seed*"))
    # the runs of one sweep, each by its name
    assert "made apart" not in methods_of(read_study(runs), alone)

    words = ["report", "--output", str(alone), "--runs"]
    monkeypatch.setattr("sys.argv", [*words, str(grid), str(other)])
    run_command(report.main)
    printed = capsys.readouterr().out
    assert (
        "warning: the runs differ in code: abc1234, def5678" in printed
        and "unfinished: gspo_seed2" in printed
    )
    monkeypatch.setattr(
        "sys.argv", [*words, str(single), str(make_run(alone / "b", 0, 0.5, 30, loss_type="b"))]
    )
    with pytest.raises(SystemExit):
        run_command(report.main)
    (line,) = capsys.readouterr().err.splitlines()
    reason = (
        "were evaluated on different questions, so they cannot be compared: give runs of the same"
    )
    assert line == f"error: {single} and {alone / 'b'} {reason}"


def test_questions_of_equal_names_and_other_texts_are_refused(tmp_path):
    runs = [make_run(tmp_path / name, 0, 0.5, loss_type=name) for name in "ab"]
    for step in (0, 4):
        file = runs[1] / "completions" / f"eval_{step:06d}.jsonl"
        file.write_text(file.read_text().replace("What is 7?", "What is seven?"))
    with pytest.raises(UserError, match="different questions"):
        decide(read_study(runs))


@pytest.mark.slow
def test_a_sweep_continued_by_other_code_says_so(grid):
    change_record(grid / "grpo_clip_group_size4_seed1", "versions", code="def5678-dirty")
    study = read_study([grid])
    assert study.warnings == ("careful <b>", "the runs differ in code: abc1234, def5678-dirty")
    assert "changes that were not committed" in methods_of(study, grid)


def test_runs_without_a_sweep_are_grouped_by_their_arguments(tmp_path):
    runs = [
        make_run(tmp_path / f"{loss}{s}", s, 0.5, loss_type=loss)
        for loss in ("a", "b")
        for s in (0, 1)
    ]
    study = read_study(runs)
    assert {arm: sorted(by_seed) for arm, by_seed in study.arms.items()} == {
        "loss_type a": [0, 1],
        "loss_type b": [0, 1],
    }
    with pytest.raises(UserError, match="same arguments and seed"):
        read_study([runs[0], make_run(tmp_path / "again", 0, 0.5, loss_type="a")])


def test_runs_that_end_at_an_accuracy_are_an_arm_of_their_own_and_warned_of(tmp_path):
    """The first evaluation above a threshold is too high on average."""
    runs = [
        make_run(tmp_path / f"run{seed}", seed, 0.5, target_accuracy=0.4 * (seed < 2))
        for seed in range(4)
    ]
    study = read_study(runs)
    assert {arm: sorted(by_seed) for arm, by_seed in study.arms.items()} == {
        "target_accuracy 0.4": [0, 1],
        "target_accuracy 0.0": [2, 3],
    }
    [warning] = study.warnings
    assert warning.startswith("run0, run1 have --target_accuracy: such a run ends at the first")
    assert read_study(runs[:1]).warnings == read_study(runs[2:]).warnings == ()


def test_values_of_runs_stand_beside_their_seeds(tmp_path):
    """Seeds 8 to 11 have the accuracies 0.2 to 0.5, but their folders sort 10 before 8."""
    runs = []
    for seed in (11, 8, 10, 9):
        accuracy = round(0.2 + 0.1 * (seed - 8), 1)
        runs.append(make_run(tmp_path / f"a_seed{seed}", seed, accuracy, loss_type="a"))
    write_sweep(tmp_path, {"a": {"loss_type": "a"}}, range(8, 12))
    for folders in ([tmp_path], runs):
        write_report(read_study(folders), tmp_path)
        [record] = csv.DictReader((tmp_path / "arms.csv").read_text().splitlines())
        assert record["seeds"].split() == ["8", "9", "10", "11"]
        values = [float(value) for value in record["values"].split()]
        assert values == pytest.approx([0.2, 0.3, 0.4, 0.5])
        assert "| 0.200 0.300 0.400 0.500 |" in (tmp_path / "report.md").read_text()


def test_measures_of_all_evaluations_warn_where_runs_have_unequal_numbers(tmp_path):
    """Of more evaluations the best is higher by luck."""
    runs = [make_run(tmp_path / f"run{seed}", seed, 0.5) for seed in range(2)]
    assert read_study(runs, measure="best").warnings == ()
    evals = runs[0] / "evals.jsonl"
    first, last = evals.read_text().splitlines()
    middle = json.dumps(json.loads(last) | {"step": 2})
    evals.write_text("\n".join((first, middle, last)))
    assert read_study(runs).warnings == ()
    for measure in ("best", "area", "tokens_to@0.4"):
        [warning] = read_study(runs, measure=measure).warnings
        assert warning.startswith(f"runs have from 2 to 3 evaluations, and {measure} is of all")


@pytest.mark.parametrize("name", ["eval_temperature", "eval_top_k"])
def test_none_and_zero_of_an_evaluation_are_two_values(tmp_path, name):
    """0 is greedy, or all tokens; None is what rollouts have. An empty text and None are one."""
    runs = [
        make_run(tmp_path / "a", 0, 0.5, **{name: None, "eval_rule": ""}),
        make_run(tmp_path / "b", 1, 0.5, **{name: 0, "eval_rule": None}),
        make_run(tmp_path / "c", 2, 0.5, **{name: 0}),
    ]
    arms = {arm: sorted(by_seed) for arm, by_seed in read_study(runs).arms.items()}
    assert sorted(arms.values()) == [[0], [1, 2]]


@pytest.mark.slow
def test_tasks_are_compared_apart_and_summed_up_by_their_interquartile_mean(tmp_path):
    runs = []
    for task, questions, shift in (("sums", 40, 0.0), ("gsm8k", 30, 0.2)):
        for loss, accuracy in (("a", 0.3), ("b", 0.6)):
            for seed in (0, 1):
                name = tmp_path / f"{task}_{loss}_{seed}"
                runs.append(
                    make_run(name, seed, accuracy + shift, questions, loss_type=loss, task=task)
                )
    study = read_study(runs)
    compared = {frozenset((c.a, c.b)) for c in decide(study)}
    assert compared == {
        frozenset(f"loss_type {loss}, task {task}" for loss in "ab") for task in ("sums", "gsm8k")
    }
    assert decide_factors(study) == {}
    # Accuracies 0.3, 0.3, 0.5, 0.5 and 0.6, 0.6, 0.8, 0.8: the middle two are 0.3 and 0.5, and 0.6
    # and 0.8.
    assert over_tasks(study) == pytest.approx({"a": 0.4, "b": 0.7})
    assert "Interquartile mean over tasks" in write_report(study, tmp_path)[0].read_text()


def test_a_warm_start_of_each_task_keeps_no_means_over_tasks_apart(tmp_path):
    """Two losses on two tasks: a pair a task, so nothing is corrected for within one."""
    runs = []
    for task, shift in (("sums", 0.0), ("gsm8k", 0.2)):
        for loss, accuracy in (("a", 0.3), ("b", 0.6)):
            for seed in (0, 1):
                runs.append(
                    make_run(
                        tmp_path / f"{task}_{loss}_{seed}",
                        seed,
                        accuracy + shift,
                        loss_type=loss,
                        task=task,
                        sft_base=f"{task}_sft",
                    )
                )
    study = read_study(runs)
    assert over_tasks(study) == pytest.approx({"a": 0.4, "b": 0.7})
    methods = methods_of(study, tmp_path)
    assert "With a single comparison of each task the p value needs no correction" in methods
    assert "is at most 5 %; the 2 tasks share that. A tie" in methods


def test_the_page_names_the_level_that_p_values_are_held_against(tmp_path):
    runs = []
    for task in ("sums", "gsm8k"):
        for loss in "ab":
            name = tmp_path / f"{task}_{loss}"
            runs.append(make_run(name, 0, 0.5, loss_type=loss, task=task))
    page = " ".join(write_report(read_study(runs), tmp_path)[0].read_text().split())
    assert "is at most 5 % (Holm); the 2 tasks share that. p values are held against 2.5 %," in page
    assert "(Holm): where it is below 2.5 % too, a difference needs no model" in page


def test_other_questions_are_refused(tmp_path):
    study = read_study(
        [
            make_run(tmp_path / "a", 0, 0.5, loss_type="a"),
            make_run(tmp_path / "b", 0, 0.5, 30, loss_type="b"),
        ]
    )
    with pytest.raises(UserError, match="different questions"):
        decide(study)


def rewrite_evals(run: Path, lines: list[dict], problems: int) -> None:
    """Give both evaluations of a run made by hand these completions."""
    accuracy = sum(line["score"]["reward"] for line in lines) / len(lines)
    records = [
        {"step": step, "avg_all_rewards": accuracy, "avg_format_rewards": 1.0, "problems": problems}
        for step in (0, 4)
    ]
    (run / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for step in (0, 4):
        file = run / "completions" / f"eval_{step:06d}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def countdown_line(question: str, reward: float) -> dict:
    return {
        "problem": f"countdown/{question}",
        "question": question,
        "ground_truth": "",
        "text": "",
        "score": {"reward": reward},
    }


@pytest.mark.slow
def test_a_question_that_was_asked_several_times_is_one_observation(tmp_path):
    """A run may have drawn its test questions with replacement: three of these four ask for 6 from
    1, 2 and 3."""
    questions = ["1 2 3 -> 6", "3 2 1 -> 6", "1 2 3 -> 6", "4 5 6 -> 15"]
    runs = [
        make_run(tmp_path / f"{a}{s}", s, 0.5, loss_type=a, task="countdown_small")
        for a in "ab"
        for s in (0, 1)
    ]
    for run in runs:
        right = 1.0 if run.name.startswith("a") else 0.0
        # two samples a question
        rows = [countdown_line(q, right * q.endswith("6")) for q in questions for _ in range(2)]
        rewrite_evals(run, rows, problems=4)
    study = read_study(runs)
    a = study.arms["loss_type a"][0]
    assert question_groups([a]) == ["[1, 2, 3] -> 6"] * 3 + ["[4, 5, 6] -> 15"]
    assert a.scores.rewards_EQ[-1].mean() == a.evals[-1]["avg_all_rewards"] == 0.75
    # The groups add 3/4 and -3/4 to four questions' mean of 3/4; as two values 3/4 +- 3/8, of
    # variance 9/32 and of their mean 9/64. The seeds agree but for rounding: 2 / (24 * 4 ** 2),
    # over two seeds. Counted apart the questions' variance is 1/16.
    (comparison,) = decide(study)
    half = half_width(1 / 384, 1, 9 / 64)
    assert comparison.difference == 0.75
    assert comparison.high - 0.75 == pytest.approx(half, abs=1e-6)
    report = write_report(study, tmp_path)[0].read_text()
    assert "2 held-out questions" in report and "0.750" in report


def test_samples_of_one_question_are_its_mean(tmp_path):
    run = make_run(tmp_path / "r", 0, 0.5, task="countdown_small")
    rewrite_evals(
        run,
        [
            countdown_line(q, r)
            for q, rewards in (("1 2 -> 3", (1, 0)), ("2 2 -> 4", (1, 1)))
            for r in rewards
        ],
        2,
    )
    scores = read_run(run).scores
    assert (
        scores.questions == ("countdown/1 2 -> 3", "countdown/2 2 -> 4")
        and scores.rewards_EQ.tolist() == [[0.5, 1.0]] * 2
    )
    assert question_groups([read_run(run)]) is None
    rewrite_evals(run, [countdown_line("1 2 -> 3", 1.0)] * 3, 2)
    with pytest.raises(
        UserError, match="eval_000000.jsonl is damaged: 3 completions of 2 problems"
    ):
        _ = read_run(run).scores


@pytest.mark.parametrize("text", ["", "[]", "{", '{"args": {}}'])
def test_damaged_folders_are_named(tmp_path, text):
    (tmp_path / "args.json").write_text(text)
    with pytest.raises(UserError, match="args.json is damaged"):
        read_run(tmp_path)
    with pytest.raises(UserError, match="has no args.json"):
        read_run(tmp_path / "nowhere")


def test_format_and_answers_share_the_gain(tmp_path):
    # 0.1 = 0.5 * 0.2 before, 0.8 = 1 * 0.8 after: format 0.5 * 0.5 = 0.25, answers 0.6 * 0.75 =
    # 0.45, gain 0.7.
    gain = split_of_gain(read_run(make_run(tmp_path / "r", 0, 0.8)))
    assert gain == pytest.approx((0.7, 0.25, 0.45), abs=1e-12)


def test_an_arms_margin_is_students_t_of_its_own_seeds():
    """Two questions, each right in every seed by the same share: the choice of questions adds
    nothing. Means 0.1 and 0.3 have the variance 0.02, that of their mean 0.01; rounding adds 1 /
    (24 * 2 ** 2) / 2; t(1) = 12.7062 and t(2) = 4.30265."""
    steady = {seed: np.array([x, x]) for seed, x in ((0, 0.1), (1, 0.3))}
    assert half_width_of_mean(steady) == pytest.approx(12.7062 * np.sqrt(0.01 + 1 / 192), rel=1e-4)
    three = steady | {2: np.array([0.2, 0.2])}  # variance 0.01, that of the mean 1/300
    assert half_width_of_mean(three) == pytest.approx(
        4.30265 * np.sqrt(1 / 300 + 1 / 288), rel=1e-4
    )
    assert half_width_of_mean({0: np.array([0.1, 0.9])}) == 0


@pytest.mark.slow
def test_arms_that_were_evaluated_at_other_steps_are_drawn_too(tmp_path, real_figures):
    runs = [
        make_run(tmp_path / f"{loss}{s}", s, 0.5, loss_type=loss)
        for loss in ("a", "b")
        for s in (0, 1)
    ]
    for run in runs[2:]:
        (run / "evals.jsonl").write_text((run / "evals.jsonl").read_text().splitlines()[1] + "\n")
    assert "<svg" in write_report(read_study(runs), tmp_path)[0].read_text()


def test_a_recorded_command_is_one_that_can_be_typed():
    command = [
        "python3",
        "/a/b/alignment/train_rl.py",
        "--sft_base",
        "",
        "--model",
        "my model",
        "--resume",
    ]
    assert shell_command(command) == "uv run -m alignment.train_rl --sft_base '' --model 'my model'"


def test_no_run_to_report_is_one_clear_line(tmp_path, monkeypatch, capsys):
    folder = make_run(tmp_path / "r", 0, 0.5)
    (folder / "summary.json").unlink()
    (folder / "evals.jsonl").unlink()
    monkeypatch.setattr("sys.argv", ["report", "--runs", str(folder)])
    with pytest.raises(SystemExit) as stop:
        run_command(report.main)
    assert stop.value.code == 2
    assert re.fullmatch(
        r"error: --runs .*: no finished run there, and no single run with an evaluation\n",
        capsys.readouterr().err,
    )


# --- a sweep's own rules --------------------------------------------------------------------------


def change_sweep(folder: Path, **facts) -> None:
    file = folder / "sweep.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def test_a_sweep_keeps_its_margin_and_its_amount(grid):
    assert read_study([grid], tie=0.03, match="steps").tie == 0.03
    for given in ({"tie": 0.05}, {"match": "tokens"}):
        with pytest.raises(UserError, match="is a sweep that was made with --(tie 0.03|match st)"):
            read_study([grid], **given)


def test_sweeps_that_are_compared_with_others_say_which_rules_are_left_out(grid, tmp_path):
    change_sweep(grid, measure="area", tie=0.05, alpha=0.05 / 8)
    single = make_run(tmp_path / "alone" / "cispo", 0, 0.6, loss_type="cispo", group_size=4)
    [warning] = read_study([grid, single]).warnings
    assert warning == (
        f"{grid} was made with other rules, left out here: --measure area; --tie 0.05; that its"
        " verdicts share 5 % with those after other numbers of seeds"
    )


def test_a_sweep_is_finished_once_it_has_reported_all_its_seeds(grid):
    assert read_study([grid]).is_finished  # of an older version, which notes no report
    change_sweep(grid, reported=[])
    assert not read_study([grid]).is_finished  # --until_decided may add seeds
    change_sweep(grid, reported=[3])
    assert read_study([grid]).is_finished
    (grid / "grpo_clip_group_size4_seed0" / "summary.json").unlink()
    assert read_study([grid]).is_finished  # a run has failed
    change_sweep(grid, seeds=[0, 1, 2, 3])
    assert not read_study([grid]).is_finished


def test_controls_make_no_pair_of_the_question_harder_to_decide(tmp_path):
    """Three arms have the comparisons that they have without two controls, which vary far more;
    the seven pairs with a control are a table of their own."""
    rng = np.random.default_rng(1)
    runs = []
    for loss, accuracy in (("a", 0.5), ("b", 0.55), ("c", 0.6)):
        for seed in range(4):
            at = accuracy + rng.integers(-2, 3) / 40
            runs.append(make_run(tmp_path / f"{loss}_seed{seed}", seed, at, loss_type=loss))
    without = {(c.a, c.b): c for c in decide(read_study(runs))}
    arms = {}
    for loss in "abc":
        arms[loss] = {"loss_type": loss}
    for reward in ("random", "inverted"):
        values = {"loss_type": "a", "reward": reward}
        arms[f"control_{reward}"] = values
        for seed in range(4):
            at = 0.3 + rng.integers(-8, 9) / 40
            make_run(tmp_path / f"control_{reward}_seed{seed}", seed, at, **values)
    facts = {"arms": arms, "seeds": [0, 1, 2, 3], "tie": 0.03, "hold": "", "alpha": 0.05}
    (tmp_path / "sweep.json").write_text(json.dumps({**facts, "warnings": [], "command": []}))
    verdicts = verdicts_of(read_study([tmp_path]))
    assert [len(table) for table in verdicts.tables.values()] == [3, 7]
    assert list(verdicts.tables)[1] == "final accuracy: pairs with a control"
    ours = {(c.a, c.b): c for c in list(verdicts.tables.values())[0]}
    for (a, b), comparison in without.items():
        pair = ours[a.removeprefix("loss_type "), b.removeprefix("loss_type ")]
        numbers = [
            (one.difference, one.low, one.high, one.p, one.p_exact, one.hidden, one.firm)
            for one in (pair, comparison)
        ]
        assert numbers[0] == numbers[1]


def with_and_without_control(tmp_path, **settings) -> list[Verdicts]:
    """The verdicts of two losses, without and with a control that takes a quarter of their
    tokens."""
    arms = {loss: {"loss_type": loss, "reward": "r1_zero"} for loss in ("a", "b")}
    control = {"control_random": {"loss_type": "a", "reward": "random"}}
    found = []
    for name, every_arm in (("without", arms), ("with", arms | control)):
        folder = tmp_path / name
        for arm, values in every_arm.items():
            for seed in range(3):
                accuracy = {"a": 0.6, "b": 0.9}.get(arm, 0.4) + (seed - 1.4) / 400
                run = make_run(folder / f"{arm}_seed{seed}", seed, accuracy, 400, **values)
                rewrite_metrics(run, response_length={"a": 12.0, "b": 10.0}.get(arm, 2.5))
                evaluate_between(run, 1, 3)
        facts = {"arms": every_arm, "seeds": [0, 1, 2], "tie": 0.03, "hold": "", "alpha": 0.05}
        facts |= {"warnings": [], "command": [], **settings}
        (folder / "sweep.json").write_text(json.dumps(facts))
        found.append(verdicts_of(read_study([folder])))
    return found


@pytest.mark.parametrize("settings", [{"match": "tokens"}, {"measure": "tokens_to@0.5"}])
def test_what_a_control_took_changes_no_verdict_of_the_question(tmp_path, settings):
    without, with_control = with_and_without_control(tmp_path, **settings)
    [alone] = without.comparisons
    pair, *of_control = with_control.comparisons
    assert pair == alone and len(of_control) == 2
    # Two arms share 5 %, of three seeds: 1 - 0.025^(1/3).
    assert "3 seeds cannot exclude that up to 71% of an arm's runs" in caution([pair])
    # A control's own pairs are at what all three have taken.
    if "match" in settings:
        assert "at 320 or 80 sampled tokens, which all runs of a table have" in with_control.basis


def test_a_designs_hash_is_of_what_was_decided_before_its_runs(grid):
    decided = design_hash(read_study([grid]))
    (grid / "grpo_clip_group_size4_seed0" / "summary.json").unlink()
    change_record(grid / "grpo_clip_group_size8_seed0", "args", policy_ranks=2)
    change_sweep(grid, reported=[3], command=["another"])
    assert design_hash(read_study([grid])) == decided
    arms = json.loads((grid / "sweep.json").read_text())["arms"]
    arms["grpo_clip_group_size4"]["learning_rate"] = 1e-3
    for change in ({"arms": arms}, {"seeds": [0, 1, 2, 3]}, {"tie": 0.05}, {"measure": "area"}):
        before = (grid / "sweep.json").read_text()
        change_sweep(grid, **change)
        assert design_hash(read_study([grid])) != decided
        (grid / "sweep.json").write_text(before)
