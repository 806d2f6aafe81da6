"""Published claims: their files, and what runs made by hand say of them."""

import functools
import json
import re
import sys
import tomllib
from types import SimpleNamespace

import numpy as np
import pytest

from alignment import claims
from alignment.ablation import schedule
from alignment.ablation.design import lint
from alignment.ablation.study import EvalScores
from alignment.args import CLAIMS, ClaimsArgs, RLArgs, parse
from alignment.claims import MEASURES, USUAL, decide, read_trial
from alignment.system.errors import UserError
from tests.ablation.test_report import make_run
from tests.command_line import exit_code

PRESETS = ("tiny", "countdown_tiny")
FILES = {name: tomllib.loads(path.read_text()) for name, path in CLAIMS.items()}
TRIED = [name for name in FILES if "cannot" not in FILES[name]["about"]]


@functools.cache
def arguments(*flags: str) -> ClaimsArgs:
    return parse(ClaimsArgs, list(flags))


def trial(name: str, preset: str = "tiny", *flags: str):
    return read_trial(name, preset, arguments(*flags))


def run_claims(monkeypatch, *flags: str) -> int:
    return exit_code(monkeypatch, claims.main, "alignment/claims.py", *flags)


# --- the files ------------------------------------------------------------------------------------


def test_there_are_enough_claims():
    assert len(TRIED) >= 18 and set(FILES) - set(TRIED)


@pytest.mark.parametrize("name", FILES)
def test_a_claim_states_what_a_trial_needs(name):
    about, arms = FILES[name]["about"], FILES[name].get("arms", {})
    assert about["claim"].endswith(".") and about["paper"]
    for number in re.findall(r"arXiv:(\S+?)(?:,|$)", about["paper"]):
        assert re.fullmatch(r"\d{4}\.\d{5}", number)
    if name not in TRIED:
        assert set(about) == {"claim", "paper", "cannot"} and not arms
        assert about["cannot"].startswith("cannot be shown here: ")
        return
    # which would be said twice
    assert not [key for key, value in about.items() if USUAL.get(key) == value]
    about = USUAL | about
    assert {"claim", "paper", "equal", "measure", "tie", "seeds", "hours"} == set(about) - {
        "above",
        "why",
    }
    assert (
        about["measure"] in MEASURES
        and about["tie"] > 0
        and about["hours"] > 0
        and len(about["seeds"]) >= 2
    )
    assert about.get("above") in (None, *arms) and len(arms) >= 2


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", TRIED)
def test_the_arms_of_a_claim_are_arms_and_differ(name, preset):
    made = trial(name, preset)
    assert all(isinstance(arm, RLArgs) for arm in made.design.arms.values())
    assert len(made.design.arms) == len(made.runs) == len(FILES[name]["arms"])
    assert made.design.seeds == (0, 1, 2, 3, 4) and made.design.tie == FILES[name]["about"].get(
        "tie", 0.03
    )
    assert [warning for warning in made.design.warnings if "also changes" not in warning] == []


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_equal_arms_of_different_claims_have_one_name_and_others_have_others(preset):
    """So that a run is trained once, and never taken for another one."""
    by_name: dict[str, RLArgs] = {}
    for name in TRIED:
        for arm, args in trial(name, preset).design.arms.items():
            assert (
                by_name.setdefault(arm, args) == args
                or args.max_sampler_mismatch != by_name[arm].max_sampler_mismatch
            )
            assert re.fullmatch(r"[\w.+-]+", arm) and len(f"{arm}_seed10") < 150
    assert [
        warning for warning in lint(by_name, (0, 1)) if "mathematically the same" in warning
    ] == []
    assert len(by_name) < sum(len(FILES[name]["arms"]) for name in TRIED)
    assert sum("baseline" in trial(name, preset).design.arms for name in TRIED) >= 5


def test_runs_of_other_arguments_are_in_another_folder():
    plain, short = (
        trial("kl_penalty").design,
        trial("kl_penalty", "tiny", "--num_steps", "2", "--max_problems", "16").design,
    )
    assert set(plain.arms) == set(short.arms) == {"baseline", "beta0.04"}
    assert (plain.folder.name, short.folder.name) == ("tiny", "tiny_max_problems16_num_steps2")
    assert (
        trial("dynamic_sampling", "tiny", "--num_steps", "2").design.arms["num_steps80"].num_steps
        == 80
    )


def test_a_claims_file_is_a_sweeps(monkeypatch, capsys):
    from alignment import sweep

    file = str(CLAIMS["clip_higher"])
    monkeypatch.setattr(
        sys, "argv", ["sweep.py", "--sweep_file", file, "--seed", "0", "1", "--dry_run"]
    )
    monkeypatch.setattr("alignment.sweep.print_power", lambda *_: None)
    sweep.main()
    assert "2 arms x 2 seeds = 4 runs" in capsys.readouterr().out


# --- what runs say of them ------------------------------------------------------------------------


def make_runs(
    folder, arms: dict[str, float], noise: float = 0.0, preset: str = "tiny", seeds: int = 5
) -> None:
    rng = np.random.default_rng(0)
    for arm, accuracy in arms.items():
        for seed in range(seeds):
            at = accuracy + noise * rng.standard_normal()
            run = make_run(
                folder / "claims" / preset / f"{arm}_seed{seed}", seed, at, questions=400
            )
            evals = [
                json.loads(line) | {"seconds": 1.0}
                for line in (run / "evals.jsonl").read_text().splitlines()
            ]
            (run / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evals))


@pytest.fixture
def of_runs(tmp_path):
    def verdict(name: str, arms: dict[str, float], noise: float = 0.0) -> str:
        make_runs(tmp_path, arms, noise)
        return decide(trial(name, "tiny", "--output_dir", str(tmp_path)))[0]

    return verdict


@pytest.mark.parametrize(
    ("free", "penalised", "noise", "verdict"),
    [
        (0.7, 0.5, 0, "holds"),
        (0.5, 0.7, 0, "fails"),
        (0.6, 0.605, 0, "tie"),
        (0.6, 0.62, 0.1, "undecided"),
    ],
)
def test_what_is_said_where_one_arm_is_expected_above(of_runs, free, penalised, noise, verdict):
    assert of_runs("kl_penalty", {"baseline": free, "beta0.04": penalised}, noise) == verdict


@pytest.mark.parametrize(
    ("fresh", "stale", "noise", "verdict"),
    [
        (0.7, 0.5, 0, "fails"),
        (0.5, 0.7, 0, "fails"),
        (0.6, 0.605, 0, "holds"),
        (0.6, 0.62, 0.1, "undecided"),
    ],
)
def test_what_is_said_where_no_difference_is_expected(of_runs, fresh, stale, noise, verdict):
    assert (
        of_runs("one_step_stale", {"baseline": fresh, "async_max_staleness1": stale}, noise)
        == verdict
    )


def test_without_runs_or_arms_nothing_is_said(tmp_path):
    assert decide(trial("kl_penalty", "tiny", "--output_dir", str(tmp_path))) == ("not run", [])
    make_runs(tmp_path, {"baseline": 0.7})  # one arm of two
    assert decide(trial("kl_penalty", "tiny", "--output_dir", str(tmp_path))) == ("not run", [])
    reason = "cannot be shown here: the models of these tasks are dense"
    assert decide(trial("mixture_of_experts")) == (reason, [])


def test_the_arm_expected_above_is_compared_with_every_other_one(tmp_path):
    names = trial("sampler_mismatch").design.arms
    make_runs(tmp_path, dict(zip(names, (0.8, 0.6, 0.6), strict=True)))
    verdict, comparisons = decide(trial("sampler_mismatch", "tiny", "--output_dir", str(tmp_path)))
    assert verdict == "holds" and [(c.a, c.b) for c in comparisons] == [
        ("weighted", "recomputed"),
        ("weighted", "sampler"),
    ]
    for name in list(names)[1:2]:  # one arm that is as good is enough for no "holds"
        for seed in range(5):
            folder = tmp_path / "claims/tiny" / f"{name}_seed{seed}"
            folder.rename(tmp_path / f"old_{name}_{seed}")
        make_runs(tmp_path, {name: 0.8})
    assert decide(trial("sampler_mismatch", "tiny", "--output_dir", str(tmp_path)))[0] == "tie"


def test_entropy_and_lengths_are_measured_by_run(tmp_path):
    arms = list(trial("clip_higher").design.arms)
    make_runs(tmp_path, dict.fromkeys(arms, 0.6))
    for arm, entropy in zip(arms, (1.3, 1.0), strict=True):
        for seed in range(5):
            file = tmp_path / "claims/tiny" / f"{arm}_seed{seed}" / "metrics.jsonl"
            records = [json.loads(line) for line in file.read_text().splitlines()]
            # a step without an update has none
            entropies = [
                9.0,
                None,
                entropy,
                entropy + 0.001 * seed,
            ]
            lines = [
                r | {"step": s + 1, "entropy": e}
                for s, (r, e) in enumerate(zip(records, entropies, strict=True))
            ]
            file.write_text("".join(json.dumps(line) + "\n" for line in [lines[0]] + lines[1:] * 4))
    (comparison,) = decide(found := trial("clip_higher", "tiny", "--output_dir", str(tmp_path)))[1]
    assert decide(found)[0] == "holds" and comparison.difference == pytest.approx(0.3)
    # no rounding error of a share of few questions
    assert 0 <= comparison.high - comparison.low < 0.003
    # 400 questions of 1 to 400 tokens, of which the first 240 are right.
    run = found.runs["higher"][0]
    assert MEASURES["length of wrong answers"](run) == pytest.approx(np.mean(range(241, 401)))
    assert MEASURES["mean accuracy of all evaluations"](run).mean() == pytest.approx(
        (0.1 + 0.6) / 2
    )


def test_questions_solved_in_8_of_8_samples_are_counted(tmp_path):
    """Of four questions with 8 samples each, three have a right one in the last evaluation."""
    rewards = np.zeros((4, 8))
    rewards[0] = 1.0
    rewards[1, 3] = 1.0
    rewards[2, :2] = 1.0
    scores = EvalScores(
        steps=(0, 80),
        questions=tuple("abcd"),
        rewards_EQ=np.zeros((2, 4)),
        texts=tuple("abcd"),
        samples=8,
        rewards_of_samples=(np.zeros((4, 8)), rewards),
        votes=(np.zeros((4, 8)), np.zeros((4, 8))),
    )
    run = SimpleNamespace(scores=scores, path=tmp_path)
    assert MEASURES["pass@8"](run).tolist() == [1.0, 1.0, 1.0, 0.0]
    with pytest.raises(UserError, match="pass@32: evaluations have 8 samples"):
        MEASURES["pass@32"](run)


@pytest.mark.slow
def test_the_page_has_every_claim_and_its_verdicts(tmp_path, monkeypatch, capsys):
    make_runs(tmp_path, {"baseline": 0.7, "beta0.04": 0.5, "token_mean": 0.71})
    assert run_claims(monkeypatch, "--output_dir", str(tmp_path), "--report", str(tmp_path)) == 0
    assert "kl_penalty" in capsys.readouterr().out
    text = (tmp_path / "claims.md").read_text()
    assert set(re.findall(r"^## (\w+)$", text, re.M)) == set(CLAIMS)
    assert re.search(
        r"\| \[The KL penalty can go.*\]\(#kl_penalty\) \| DAPO, .* \| holds \+0\.2 \(.* to .*\) \|"
        r" not run \|",
        text,
    )
    assert (
        "| tiny | none - k3 | +0.2 | +" in text and "- k3: `--beta 0.04 --kl_estimator k3`" in text
    )
    assert "- dr_grpo: `--no_normalize_by_std --loss_normalization constant`" in text
    assert "This cannot be shown here: the models of these tasks are dense." in text
    assert "All arms have" not in text
    seconds = 3 * 5 * (4 * 2.0 + 2)  # three arms of five seeds: four steps and two evaluations
    assert f"took {seconds / 3600:.1f}" in text and "\n\n\n\n" not in text
    assert set(re.findall(r"\]\(#(\w+)\)", text)) == set(CLAIMS)


@pytest.mark.slow
def test_the_page_names_what_all_arms_were_given(tmp_path, monkeypatch):
    assert (
        run_claims(
            monkeypatch,
            "--num_steps",
            "2",
            "--output_dir",
            str(tmp_path),
            "--report",
            str(tmp_path),
        )
        == 0
    )
    assert "All arms have\n`--num_steps 2`, but for" in (tmp_path / "claims.md").read_text()


def test_with_all_claims_less_is_decided(tmp_path):
    """What is decided by itself may not be where all trials share the 5 %."""
    make_runs(tmp_path, {"baseline": 0.7, "beta0.04": 0.6}, noise=0.03)
    made = trial("kl_penalty", "tiny", "--output_dir", str(tmp_path))
    assert decide(made, 0.05)[0] == "holds" and decide(made, 0.0001)[0] == "undecided"


# --- the runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_that_claims_share_is_trained_once(tmp_path, monkeypatch, capsys):
    begun = []

    def finish(design, executor, state):
        begun.append(state.name)
        make_run(design.folder / state.name, state.seed, 0.7 if state.arm == "baseline" else 0.6)
        run = design.folder / state.name
        records = [
            json.loads(line) | {"seconds": 1.0}
            for line in (run / "evals.jsonl").read_text().splitlines()
        ]
        (run / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        state.status = "done"

    monkeypatch.setattr(schedule, "submit", finish)
    monkeypatch.setattr(schedule, "warm_up", lambda *_: None)
    monkeypatch.setattr(claims, "refuse_missing_warm_start", lambda arm: None)
    flags = [
        "--run",
        "kl_penalty",
        "token_mean",
        "--preset",
        "tiny",
        "--seed",
        "0",
        "1",
        "--executor",
        "local",
    ]
    assert run_claims(monkeypatch, *flags, "--output_dir", str(tmp_path)) == 0
    assert sorted(begun) == [
        f"{arm}_seed{seed}" for arm in ("baseline", "beta0.04", "token_mean") for seed in (0, 1)
    ]
    assert run_claims(monkeypatch, *flags, "--output_dir", str(tmp_path)) == 0
    assert len(begun) == 6 and "6 of" not in capsys.readouterr().err


def test_an_unknown_claim_and_a_sweep_of_values_are_refused(monkeypatch):
    with pytest.raises(
        UserError, match="--run clip_high: choose one of .*did you mean clip_higher"
    ):
        parse(ClaimsArgs, ["--run", "clip_high"])
    with pytest.raises(UserError, match="--group_size: .* give one value"):
        trial("kl_penalty", "tiny", "--group_size", "4", "8")
    with pytest.raises(UserError, match="--preset tinny"):
        trial("kl_penalty", "tinny")


def test_a_page_loses_no_verdicts_whose_runs_are_not_here(tmp_path, monkeypatch, capsys):
    """Before anything is trained, and by the preset."""
    page = tmp_path / "page" / "claims.md"
    page.parent.mkdir()
    text = "| claim | paper | tiny | countdown_tiny |\n|---|---|---|---|\n"
    for name, cells in (
        ("kl_penalty", "holds +0.03 (+0.01 to +0.05) | undecided here +0.03 (-0.01 to +0.07)"),
        ("gspo", "tie +0.01 (-0.004 to +0.02) | not run"),
        ("cispo", "not run | not run"),
        ("longer_thinking", "cannot be shown here | cannot be shown here"),
    ):
        text += f"| [A claim.](#{name}) | a paper | {cells} |\n"
    page.write_text(text)
    assert claims.verdicts_of_page(text) == {
        ("kl_penalty", "tiny"),
        ("kl_penalty", "countdown_tiny"),
        ("gspo", "tiny"),
    }
    flags = ["--output_dir", str(tmp_path), "--report", str(page.parent)]
    make_runs(tmp_path, {"baseline": 0.5, "beta0.04": 0.3})
    monkeypatch.setattr(claims, "train", lambda *given: [])
    for given, lost in (
        ((), "gspo on tiny, kl_penalty on countdown_tiny:"),
        (("--run", "gspo"), "kl_penalty on countdown_tiny:"),
        (("--run", "all", "--preset", "tiny"), "kl_penalty on countdown_tiny:"),
    ):
        assert run_claims(monkeypatch, *flags, *given) == 2
        assert f"would lose, of {lost}" in capsys.readouterr().err
        assert page.read_text() == text
    assert run_claims(monkeypatch, *flags, "--run", "gspo", "kl_penalty") == 0
    assert page.read_text() != text


def test_a_difference_below_the_margin_is_a_tie():
    """It refutes no claim that arms tie, and shows none that one is above."""
    small = SimpleNamespace(kind="greater", difference=0.01, is_small=True)
    large = SimpleNamespace(kind="greater", difference=0.1, is_small=False)
    assert [claims.verdict_of(small, above) for above in (None, "a")] == ["holds", "tie"]
    assert [claims.verdict_of(large, above) for above in (None, "a")] == ["fails", "holds"]
