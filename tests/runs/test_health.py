"""Warnings and hopeless runs, by hand-made numbers."""

import pytest

from alignment.args import RLArgs
from alignment.builders.checks import run_config
from alignment.runs.health import GRADER_WINDOW, WINDOW, Health, health_warnings
from alignment.system.errors import RunStopped

LIMITS = {
    "max_new_tokens": 48,
    "max_bad_steps": 2,
    "max_grader_failures": 0.05,
    "compares_rewards": True,
}
FINE = {
    "entropy": 1.0,
    "frac_reward_zero_std": 0.5,
    "response_length": 10.0,
    "finished": 1.0,
    "updates": 2,
    "bad_updates": 0,
    "grading_failed": 0,
    "seconds": 1.0,
    "responses": 10,
}


def steps(*changes: dict) -> list[dict]:
    """Three healthy steps, then these."""
    return [
        {**FINE, "step": step, "grading_failed": 0, "seconds": 1.0, **change}
        for step, change in enumerate(({}, {}, {}, *changes), start=1)
    ]


def warnings_of(records: list[dict], compares_rewards: bool = True) -> dict[str, str]:
    return health_warnings(records[:WINDOW], records[-GRADER_WINDOW:], 48, compares_rewards)


def stop_if_hopeless(records: list[dict]) -> None:
    Health(records, **LIMITS).stop_if_hopeless()


def test_a_step_of_which_no_response_ended_is_warned_of_at_once():
    assert warnings_of([{**FINE, "step": 1, "finished": 0.1}]) == {}
    assert warnings_of([{**FINE, "step": 1, "finished": 0.0}]) == {
        "all_cut_off": "all 10 responses of the step were cut off at --max_new_tokens 48"
    }


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, []),
        ({"entropy": 0.11}, []),
        ({"entropy": 0.09}, ["entropy_collapse"]),
        ({"frac_reward_zero_std": 0.95}, []),
        ({"frac_reward_zero_std": 0.96}, ["equal_rewards"]),
        ({"response_length": 21.0}, []),  # longer, but they end
        ({"response_length": 21.0, "finished": 0.7}, ["runaway_length"]),
        ({"response_length": 19.0, "finished": 0.7}, []),
        ({"entropy": None}, []),
        ({"entropy": None, "updates": 0}, ["nothing_trained"]),
        (
            {"entropy": None, "updates": 0, "bad_updates": 2},
            [],
        ),  # each such step has a message of its own
    ],
)
def test_warnings_after_three_steps(change, names):
    assert sorted(warnings_of(steps(change, change, change))) == names
    assert warnings_of(steps(change, change)) == {}  # too few steps


@pytest.mark.parametrize(
    ("usual", "last", "warned"), [(0.02, 0.059, False), (0.02, 0.061, True), (1e-9, 0.012, False)]
)
def test_a_mismatch_beyond_its_own_baseline_is_named(usual, last, warned):
    """0.02 nats a token are usual in bfloat16; momentum alone moves float32 weights by up to
    0.012."""
    records = steps(*[{}] * 3, {"sampler_mismatch": last})
    records = [{"sampler_mismatch": usual, **record} for record in records]
    assert ("sampler_drift" in warnings_of(records)) == warned
    # five steps are no baseline
    assert "sampler_drift" not in warnings_of([records[0], *records[2:]])


def test_a_warning_has_the_numbers():
    warnings = warnings_of(
        steps(
            *[
                {
                    "entropy": 0.05,
                    "frac_reward_zero_std": 1.0,
                    "response_length": 48.0,
                    "finished": 0.25,
                }
            ]
            * 3
        )
    )
    assert warnings == {
        "entropy_collapse": "entropy is 0.05 nats a token, it began at 1",
        "equal_rewards": "in 100% of the groups all rewards are equal, which teaches nothing",
        "runaway_length": (
            "responses have 48 tokens, they began with 10, and 75% do not end within"
            " --max_new_tokens 48"
        ),
    }


def test_without_a_baseline_groups_of_equal_rewards_teach():
    """Of --loss_type no_baseline, whose groups may have a single response."""
    records = steps(*[{"frac_reward_zero_std": 1.0}] * 3)
    assert warnings_of(records, compares_rewards=False) == {}
    assert list(warnings_of(records)) == ["equal_rewards"]


@pytest.mark.parametrize(
    ("flags", "compares_rewards"),
    [
        ({}, True),
        ({"loss_type": "no_baseline"}, False),
        ({"advantage": "positive_only"}, False),
        ({"teacher": "model"}, False),
    ],
)
def test_flags_tell_whether_groups_of_equal_rewards_teach(flags, compares_rewards):
    assert run_config(RLArgs(sft_base="", **flags)).compares_rewards is compares_rewards


def test_only_bad_steps_in_a_row_stop_a_run():
    bad, skipped = {"updates": 0, "bad_updates": 2}, {"updates": 0}
    stop_if_hopeless(steps(bad, {}, bad))
    # no response was to be trained on: nothing is wrong with the numbers
    stop_if_hopeless(steps(skipped, skipped))
    with pytest.raises(RunStopped, match="2 steps in a row"):
        stop_if_hopeless(steps(bad, {}, bad, bad))


def test_failed_gradings_are_counted_over_twenty_steps():
    """20 steps of 10 answers may have 10 failures at 5 %, from the first step on."""
    stop_if_hopeless(steps({"grading_failed": 10}))
    with pytest.raises(RunStopped, match="grading failed on 11 of 50 answers"):
        stop_if_hopeless(steps({"grading_failed": 10}, {"grading_failed": 1}))
    # of all that were sampled, which refills replace in part
    refilled = {"grading_failed": 11, "responses_sampled": 100}
    stop_if_hopeless(steps(refilled))
    # forgotten after twenty steps
    stop_if_hopeless([*steps({"grading_failed": 10}), *steps(*[{}] * 17)])


def test_of_a_long_run_the_first_and_the_latest_steps_are_kept():
    health = Health(steps(*[{}] * 1000), **LIMITS)
    assert [record["step"] for record in health.first] == [1, 2, 3] and health.latest[-1][
        "step"
    ] == 1003
    assert [record["step"] for record in health.latest] == list(
        range(1003 - GRADER_WINDOW + 1, 1004)
    )
    assert Health([], **LIMITS).latest == []


def test_a_warning_is_printed_when_it_begins():
    flat = {"frac_reward_zero_std": 1.0}
    health = Health([], **LIMITS)
    judged = [
        health.judge(record) for record in steps(flat, flat, flat, flat, {**flat, "bad_updates": 1})
    ]
    assert [messages for messages, _ in judged[:5]] == [[]] * 5
    assert (
        judged[5][0] == ["in 100% of the groups all rewards are equal, which teaches nothing"]
        and judged[6][0] == []
    )
    assert judged[7][0] == ["1 updates were left out, since their loss or gradient is not finite"]
    assert [record["warnings"] for _, record in judged] == [*[[]] * 5, *[["equal_rewards"]] * 3]
    assert health.latest == [record for _, record in judged]
