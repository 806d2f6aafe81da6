"""Settings of a loss, an advantage, a reward or a sampler of the user's own are flags like ours:
one file of the user's declares them, and nothing else changes."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest
import torch
from my_package_helpers import design_of, refusal_of

from alignment.ablation.design import canonical, named_arms
from alignment.args import EvaluateArgs, RLArgs, SFTArgs, as_command, as_toml, command_line, parse
from alignment.builders.devices import roles_of
from alignment.builders.run_plan import plan_engine
from alignment.config import presets
from alignment.config.settings import flag_values, replaced
from alignment.core.losses import LossConfig, LossInputs
from alignment.core.records import Completion, Problem
from alignment.rewards.rules import find_reward
from alignment.rewards.users import close_functions
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

SAPO = ("--loss_type", "my_package.sapo:entry")


def test_sapo():
    from my_package import sapo

    log_probs = torch.tensor([[math.log(2.0)], [math.log(2.0)]]).requires_grad_()
    config = LossConfig(sapo.entry, settings=sapo.Temperatures(positive=1.0, negative=2.0))
    inputs = LossInputs(
        config,
        log_probs,
        advantages=torch.tensor([[1.0], [-1.0]]),
        old_log_probs=torch.zeros(2, 1),
    )
    loss, _ = sapo.sapo(inputs)
    # The ratio is 2: 4 sigmoid(1) and 2 sigmoid(2).
    expected = [[-4 / (1 + math.exp(-1))], [2 / (1 + math.exp(-2))]]
    torch.testing.assert_close(loss, torch.tensor(expected))


def test_a_setting_is_a_flag_of_its_loss_alone():
    args = parse(RLArgs, [*SAPO, "--loss.positive", "2", "--loss.negative=3.5"])
    assert args.update_config.loss.settings.positive == 2.0
    assert args.update_config.loss.settings.negative == 3.5
    assert parse(RLArgs, [*SAPO]).update_config.loss.settings.negative == 1.05
    assert refusal_of(*SAPO, "--loss.positve", "1") == (
        "--loss.positve: there is no such flag; --loss_type my_package.sapo:entry has"
        " --loss.positive --loss.negative (did you mean --loss.positive?)"
    )
    assert refusal_of("--loss.positive", "1").endswith(
        "--loss_type grpo_clip has no settings of its own"
    )
    assert refusal_of(*SAPO, "--loss.positive", "much") == "--loss.positive much: must be a number"
    assert refusal_of(*SAPO, "--loss.positive") == "--loss.positive (no value): must be a number"
    assert refusal_of(*SAPO, "--loss.positive", "1", "2") == "--loss.positive 1 2: takes one value"
    for words in (["--no_loss.positive", "1"], ["--no-loss.positive=1"]):
        assert refusal_of(*SAPO, *words) == (
            "--no_loss.positive 1: takes no value; write --no_loss.positive alone, or"
            " --loss.positive 1"
        )
    assert refusal_of(*SAPO, "--loss.positive", "0") == (
        "--loss.positive 0.0: must be a number above 0"
    )
    assert "there is no such flag" in refusal_of("--loss.positive", "1", command=EvaluateArgs)
    with pytest.raises(UserError, match="must be a number"):
        RLArgs(loss_type=SAPO[1], own_settings=(("loss.positive", "x"),))


def test_help_shows_the_settings_of_what_is_chosen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for flags, is_shown in ((SAPO, True), ((), False)):
        with pytest.raises(SystemExit):
            parse(RLArgs, [*flags, "--help"])
        printed = capsys.readouterr().out
        assert ("--loss.positive FLOAT" in printed) is is_shown
        assert ("Temperature of the gate" in printed) is is_shown
        assert "own_settings" not in printed


def test_a_run_s_words_and_toml_give_it_again(capsys, tmp_path, monkeypatch):
    args = parse(RLArgs, [*SAPO, "--loss.positive", "2"])
    words = command_line(args)
    assert words[-4:] == ["--loss.positive", "2.0", "--loss.negative", "1.05"]
    assert flag_values(parse(RLArgs, words)) == flag_values(args)
    (tmp_path / "own.toml").write_text(as_toml(args))
    monkeypatch.setattr(presets, "PRESETS", tmp_path)
    from_file = parse(RLArgs, ["--preset", "own"])
    assert flag_values(from_file) == {**flag_values(args), "preset": "own"}
    # A preset's settings go with its loss.
    other = parse(RLArgs, ["--preset", "own", "--loss_type", "grpo_clip"])
    assert other.own_settings == ()
    changed = parse(RLArgs, ["--preset", "own", "--loss.positive", "1"])
    assert changed.update_config.loss.settings.positive == 1.0
    assert command_line(changed) == ["--preset", "own", "--loss.positive", "1.0"]
    assert as_command(SFTArgs, from_file).own_settings == ()


def test_a_sweep_makes_arms_of_a_setting():
    design = design_of(*SAPO, "--loss.positive", "0.5", "1", "2")
    assert list(design.arms) == ["loss.positive0.5", "loss.positive1.0", "loss.positive2.0"]
    arms = design.arms.values()
    assert [arm.update_config.loss.settings.positive for arm in arms] == [0.5, 1, 2]
    assert design.varied["loss.positive2.0"] == {"loss.positive": 2.0}
    assert design.facts()["arms"]["loss.positive0.5"]["loss.negative"] == 1.05
    assert not design.warnings
    # Another loss is one arm, whatever the values.
    design = design_of("--loss_type", "grpo_clip", SAPO[1], "--loss.positive", "0.5", "2")
    assert list(design.arms) == [
        "grpo_clip",
        "my_package.sapo.entry_loss.positive0.5",
        "my_package.sapo.entry_loss.positive2.0",
    ]
    with pytest.raises(UserError, match="--loss_type my_package.sapo:entry has --loss.positive"):
        design_of(*SAPO, "--loss.beta", "1", "2")
    with pytest.raises(UserError, match="--loss.positive -1.0: must be a number above 0"):
        design_of(*SAPO, "--loss.positive", "-1", "2")


def test_the_linter_knows_where_a_setting_plays_no_part():
    # With one update a rollout the ratio is 1.
    flags = (*SAPO, "--loss.positive", "0.5", "2", "--train_mini_batch_size", "0")
    [warning] = design_of(*flags).warnings
    assert warning.startswith("loss.positive0.5, loss.positive2.0: mathematically the same")
    args = parse(RLArgs, [*SAPO, "--loss.positive", "2"])
    assert canonical(args)["loss.positive"] == 2.0
    assert canonical(replaced(args, loss_type="grpo_clip")).get("loss.positive") is None


def test_a_sweep_file_names_a_setting_in_quotes(tmp_path):
    file = tmp_path / "arms.toml"
    file.write_text(
        f'loss_type = "{SAPO[1]}"\n[arms.a]\n"loss.positive" = 0.5\n[arms.b]\n'
        '[arms.c]\nloss_type = "grpo_clip"\n'
    )
    arms = named_arms(str(file), "tiny", {"loss.negative": ("3",)})
    settings = [arm.update_config.loss.settings for arm in arms.values()]
    assert [dataclasses.astuple(own) for own in settings[:2]] == [(0.5, 3.0), (1.0, 3.0)]
    assert settings[2] is None
    file.write_text("[arms.a]\nloss.positive = 0.5\n[arms.b]\n")
    with pytest.raises(UserError, match='loss.positive: write it in quotes, "loss.positive"'):
        named_arms(str(file), "tiny", {})


@pytest.mark.slow
def test_a_sweep_over_both_numbers_trains_and_reports(sweep_in_this_process, weights):
    """A loss beside it has neither number, and is one arm."""
    flags = ("--loss_type", "grpo_clip", SAPO[1], "--loss.positive", "0.5", "2")
    folder = sweep_in_this_process(*flags, "--loss.negative", "4")
    hashes = {weights(folder / "grpo_clip_seed0")}
    arms = {value: f"my_package.sapo.entry_loss.positive{value}" for value in (0.5, 2.0)}
    for positive, arm in arms.items():
        run = folder / f"{arm}_seed0"
        args = read_json(run / "args.json")["args"]
        assert (args["loss.positive"], args["loss.negative"]) == (positive, 4.0)
        assert all(step["updates"] for step in read_jsonl(run / "metrics.jsonl"))
        hashes.add(weights(run))
    assert len(hashes) == 3
    report = (folder / "report.md").read_text()
    # loss.negative is the same wherever it is, and so no argument of its own
    varied = "loss_type (grpo_clip, my_package.sapo:entry) and loss.positive (None, 0.5, 2.0)"
    assert varied in report
    for arm in arms.values():
        assert f"grpo_clip - {arm}" in report


@pytest.mark.slow
def test_a_run_records_its_settings_and_resumes_with_them_alone(train, train_in_two_parts, weights):
    run = train(*SAPO, "--loss.positive", "2")
    assert read_json(run / "args.json")["args"]["loss.positive"] == 2.0
    resumed = train_in_two_parts(*SAPO, "--loss.positive", "2")
    assert weights(resumed) == weights(run)
    assert len(read_jsonl(run / "metrics.jsonl")) == 2
    with pytest.raises(UserError, match="--loss.positive was 2.0, now 3.0"):
        train(*SAPO, "--loss.positive", "3", "--resume", "--run_name", run.name)
    # Its args.json gives the flags.
    args = parse(RLArgs, ["--resume", str(run)])
    assert args.update_config.loss.settings.positive == 2.0


def test_settings_that_cannot_be_flags_are_refused(tmp_path, monkeypatch):
    (tmp_path / "bad_settings.py").write_text(
        "from dataclasses import dataclass\n"
        "from alignment.core.losses import Loss\n"
        "@dataclass\nclass Loose:\n    a: float = 1.0\n"
        "@dataclass(frozen=True)\nclass Lists:\n    a: list = None\n"
        "@dataclass(frozen=True)\nclass Required:\n    a: float\n"
        "loose, lists, required = (\n"
        "    Loss(None, settings=kind) for kind in (Loose, Lists, Required)\n)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, fault in (
        ("loose", "must be a frozen dataclass"),
        ("lists", "its setting a is of type <class 'list'>"),
        ("required", "its setting a needs a default"),
    ):
        assert fault in refusal_of("--loss_type", f"bad_settings:{name}", "--loss.a", "1")
    del sys.modules["bad_settings"]


REWARDS = """from dataclasses import dataclass
from alignment.core.flag import flag


@dataclass(frozen=True)
class Limit:
    letters: int = flag(10, above=0)
    bonus: float = 0.5


def short(response, ground_truth, settings: Limit):
    return settings.bonus if len(response) <= settings.letters else 0.0


def columns(completions, settings: Limit, **kwargs):
    return [settings.bonus * len(kwargs) for _ in completions]


def open_engine(config, tokenizer, policy):
    raise NotImplementedError
"""


@pytest.fixture
def own_reward(tmp_path, monkeypatch):
    (tmp_path / "own_reward.py").write_text(
        f"{REWARDS}\n\nfrom alignment.sampling.sampler import SamplerEngine\n"
        "engine = SamplerEngine(open_engine, settings=Limit)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    yield
    close_functions()
    del sys.modules["own_reward"]


def test_a_reward_gets_its_settings_in_its_own_process(own_reward):
    flags = ("--reward", "own_reward:short:2,accuracy", "--reward.letters", "3")
    args = parse(RLArgs, list(flags))
    assert args.rollout_config.reward_settings == (("letters", 3), ("bonus", 0.5))
    completions = [Completion((0,), (0,), (0.0,), text, "stop", 0) for text in ("abc", "abcd")]
    rewards = {}
    for letters in (3, 4):
        own = replaced(args, **{"reward.letters": letters})
        reward = find_reward(own.reward, ("r1_zero",), 60.0, own.reward_settings)
        [group] = reward.score([Problem("p", "q", "", "1")], [completions])
        rewards[letters] = [score["part_own_reward.short"] for score in group.scores]
    assert rewards == {3: [0.5, 0.0], 4: [0.5, 0.5]}
    assert "--reward own_reward:short has --reward.letters --reward.bonus" in refusal_of(
        "--reward", "own_reward:short", "--reward.length", "3"
    )
    assert refusal_of("--reward", "own_reward:short", "--reward.letters", "1.5") == (
        "--reward.letters 1.5: must be a whole number"
    )
    assert "two of its parts have a setting" in refusal_of(
        "--reward", "own_reward:short,own_reward:columns", "--reward.letters", "3"
    )
    # Evaluations take the command, too.
    assert parse(EvaluateArgs, list(flags)).reward_settings[0] == ("letters", 3)
    assert as_command(SFTArgs, args).own_settings == (("reward.letters", 3),)
    arms = design_of("--reward", "own_reward:short", "--reward.letters", "3", "4").arms
    assert list(arms) == ["reward.letters3", "reward.letters4"]


def test_an_engine_gets_its_settings(own_reward):
    args = parse(RLArgs, ["--sampler", "own_reward:engine", "--sampler.letters", "5"])
    assert dataclasses.astuple(args.sampler_settings) == (5, 0.5)
    plan = plan_engine(args, roles_of(args, 0), "no_model", ("cpu",))
    assert plan.config.settings == args.sampler_settings
    assert flag_values(args)["sampler.bonus"] == 0.5
    assert (
        flag_values(replaced(args, sampler="transformers"))
        .keys()
        .isdisjoint({"sampler.letters", "sampler.bonus"})
    )


def test_the_page_lists_every_field_that_an_advantage_gets():
    from dataclasses import fields

    from alignment.core.advantages import AdvantageInputs

    page = (Path(__file__).parents[2] / "docs" / "extending_settings.md").read_text()
    missing = [each.name for each in fields(AdvantageInputs) if f"| `{each.name}` |" not in page]
    assert missing == []
