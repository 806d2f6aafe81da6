"""An advantage of the user's own: its values, sweeps over its number, whole runs that resume with
its state, and what is refused."""

import pytest
import torch
from my_package_helpers import design_of, refusal_of

from alignment.args import RLArgs, parse
from alignment.builders.checks import check_loss
from alignment.core.advantages import (
    ADVANTAGES,
    AdvantageConfig,
    advantage_inputs,
    compute_advantages,
)
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

OWN = ("--advantage", "my_package.running_mean:entry")
# An estimator whose state has a tensor; a group of equal rewards has no gradient.
STATEFUL = """import torch
from alignment.core.advantages import Advantage


def growing(inputs, state):
    state = state or {"sum": torch.zeros(2, dtype=torch.float64), "steps": [0]}
    centred_PG = inputs.rewards_PG - inputs.rewards_PG.mean(dim=1, keepdim=True)
    total = state["sum"] + centred_PG.abs().sum() / 7
    return centred_PG * total[0], {"sum": total, "steps": [state["steps"][0] + 1]}


entry = Advantage(growing)
"""


def test_running_mean():
    from my_package import running_mean

    config = AdvantageConfig(
        2, estimator=running_mean.entry, settings=running_mean.Settings(decay=0.5)
    )

    def estimate(rewards, counted, state):
        inputs = advantage_inputs(
            torch.tensor(rewards)[:, None], torch.tensor(counted)[:, None], config
        )
        advantages_PG, state = compute_advantages(inputs, state)
        return advantages_PG.tolist(), state

    assert estimate([1.0, 0.0], [True, True], None) == ([[0.5, -0.5]], 0.5)
    # The second response does not count.
    assert estimate([1.0, 9.0], [True, False], 0.5) == ([[0.5, 0.0]], 0.75)


def test_three_values_of_its_number_are_three_arms():
    design = design_of(*OWN, "--advantage.decay", "0.5", "0.9", "0.99")
    assert list(design.arms) == [
        "advantage.decay0.5",
        "advantage.decay0.9",
        "advantage.decay0.99",
    ]
    settings = [arm.update_config.advantage.settings for arm in design.arms.values()]
    assert [own.decay for own in settings] == [0.5, 0.9, 0.99]
    assert not design.warnings
    # A loss without advantages has none of their settings.
    [warning] = design_of(
        *OWN, "--advantage.decay", "0.5", "0.9", "--loss_type", "no_baseline"
    ).warnings
    assert "mathematically the same (--advantage.decay plays no part here)" in warning


def test_an_arms_settings_count_before_its_group_is_checked(tmp_path):
    """Groups of 3 are enough for a k of 2, though not for the default of 4."""
    flags = ("--advantage", "pass_at_k", "--advantage.k", "2", "--group_size", "3")
    [arm] = design_of(*flags).arms.values()
    assert arm.update_config.advantage.smallest_group == 3
    assert len(design_of(*flags[:4], "--group_size", "3", "6", "--hold", "prompts").arms) == 2
    file = tmp_path / "arms.toml"
    file.write_text(
        'group_size = 3\n"advantage.k" = 2\n[arms.sets]\nadvantage = "pass_at_k"\n[arms.plain]\n'
    )
    arms = design_of("--sweep_file", str(file)).arms
    assert arms["sets"].own_settings == (("advantage.k", 2),) and not arms["plain"].own_settings


def test_the_linter_knows_which_flags_an_estimator_uses():
    flags = ("--baseline", "group_mean", "leave_one_out")
    assert not design_of(*flags).warnings
    [warning] = design_of("--advantage", "opo", *flags).warnings
    assert "--baseline plays no part here" in warning
    without_teacher = [name for name in ADVANTAGES if name != "none"]
    assert not design_of("--advantage", *without_teacher, "--group_size", "8").warnings


def test_flags_that_do_not_suit_an_estimator_are_refused():
    assert refusal_of(*OWN, "--max_refills", "1").endswith(
        "with --advantage my_package.running_mean:entry, which learns from groups of equal rewards"
        " too"
    )
    needs = (
        "at least 5, as --advantage pass_at_k needs with --advantage.k 4 --advantage.threshold 0.5"
    )
    assert needs in refusal_of("--advantage", "pass_at_k", "--group_size", "4")
    of_one = refusal_of("--advantage", "pass_at_k", "--advantage.k", "1", "--group_size", "1")
    assert "at least 2, as --advantage pass_at_k needs with --advantage.k 1" in of_one
    assert parse(RLArgs, [*OWN, "--group_size", "1"]).group_size == 1
    of_pairs = ["--advantage", "pass_at_k", "--advantage.k", "2", "--group_size", "3"]
    assert parse(RLArgs, of_pairs).update_config.advantage.smallest_group == 3
    assert "there is no such advantage (gae of other" in refusal_of("--advantage", "gae")
    assert "--advantage.decay 1.0: must be 0 or below 1" in refusal_of(
        *OWN, "--advantage.decay", "1"
    )


HEAD = "import torch\nfrom alignment.core.advantages import Advantage\n\n\n"
BAD = {
    "return inputs.rewards_PG": "it returns a tensor of [3, 8], float64, not (advantages, state)",
    "return inputs.rewards_PG.sum(), None": "its advantages are a tensor of [], float64",
    "return inputs.rewards_PG / 0, None": "its advantages are not finite",
    "return inputs.rewards_PG, None": "a group of equal rewards has other advantages than 0",
    "return inputs.rewards_PG.mul_(0), None": "it writes into its inputs (rewards_PG)",
    "return inputs.rewards_PG * 0, (1, 2)": "the state holds tuple",
    "return inputs.rewards_PG * 0, {1: 2}": "a dict of the state has a key that is no text",
    "raise KeyError('x')": "KeyError: 'x' (",
}


@pytest.mark.parametrize("body", BAD)
def test_one_that_cannot_work_is_refused_before_anything_loads(body, tmp_path, monkeypatch):
    name = f"bad_advantage_{list(BAD).index(body)}"
    (tmp_path / f"{name}.py").write_text(
        f"{HEAD}def bad(inputs, state):\n    {body}\n\n\nentry = Advantage(bad)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError) as refused:
        check_loss(parse(RLArgs, ["--advantage", f"{name}:entry"]))
    assert str(refused.value).startswith(f"--advantage {name}:entry: {BAD[body]}")
    assert f"{name}.py" in str(refused.value)


@pytest.mark.slow
def test_a_resumed_run_has_its_state_with_rollouts_that_were_drawn_ahead(train_in_two_parts):
    flags = ("--advantage.decay", "0.5", "--rollouts", "async", "--sampling_seed", "1")
    run = train_in_two_parts(*OWN, *flags)
    assert read_json(run / "args.json")["args"]["advantage.decay"] == 0.5
    states = [
        read_json(run / f"step_{step:06d}" / "trainer" / "advantage" / "state.json")["state"]
        for step in (1, 2)
    ]
    rewards = [record["reward"] for record in read_jsonl(run / "metrics.jsonl")]
    assert rewards[0] != rewards[1]
    assert states == pytest.approx([rewards[0], (rewards[0] + rewards[1]) / 2])


@pytest.mark.slow
def test_a_state_of_tensors_resumes_to_the_bit_with_refills(
    train, train_in_two_parts, weights, tmp_path, monkeypatch
):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "growing_state.py").write_text(STATEFUL)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    flags = ("--advantage", "growing_state:entry", "--max_refills", "1")
    assert weights(train_in_two_parts(*flags)) == weights(train(*flags))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ADVANTAGES) - {"group_baseline", "none"}))
def test_every_estimator_trains(name, train):
    sets = ["--advantage.k", "2"] if name == "pass_at_k" else []  # A group has four responses.
    run = train("--advantage", name, *sets)
    assert all(record["grad_norm"] > 0 for record in read_jsonl(run / "metrics.jsonl"))


@pytest.mark.slow
def test_a_sweep_over_two_values_of_its_number_trains_and_reports(sweep_in_this_process, weights):
    decays = (0.1, 0.9)
    folder = sweep_in_this_process(*OWN, "--advantage.decay", *map(str, decays), "--num_steps", "3")
    hashes = set()
    for decay in decays:
        run = folder / f"advantage.decay{decay}_seed0"
        assert read_json(run / "args.json")["args"]["advantage.decay"] == decay
        first, second, third = [step["reward"] for step in read_jsonl(run / "metrics.jsonl")]
        state = read_json(run / "step_000003" / "trainer" / "advantage" / "state.json")["state"]
        # The average begins at the first step's mean reward.
        average = decay * first + (1 - decay) * second
        assert state == pytest.approx(decay * average + (1 - decay) * third, abs=1e-9)
        hashes.add(weights(run))
    assert len(hashes) == 2
    report = (folder / "report.md").read_text()
    assert "advantage.decay (0.1, 0.9)" in report
    assert "advantage.decay0.1 - advantage.decay0.9" in report
