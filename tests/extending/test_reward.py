"""Rewards of the user's own, called with a response and its ground truth, or as TRL calls them."""

import pytest

from alignment.system.files import read_jsonl


def test_values():
    from my_package.brevity import brevity, shortest_of_prompt

    assert brevity("", "7") == 1 and brevity("x" * 100, "7") == 0.5
    assert shortest_of_prompt(["a", "a", "b"], ["long", "ok", "longer"], question=["?"] * 3) == [
        0,
        1,
        1,
    ]


@pytest.mark.slow
def test_both_in_a_run(train):
    run = train(
        "--reward",
        "my_package.brevity:brevity:0.5,my_package.brevity:shortest_of_prompt",
        "--run_name",
        "run",
    )
    for record in read_jsonl(run / "metrics.jsonl"):
        brevity = record["part_my_package.brevity.brevity"]
        shortest = record["part_my_package.brevity.shortest_of_prompt"]
        assert 0.5 < brevity < 1 and 0.25 <= shortest <= 1
        assert record["reward"] == pytest.approx(0.5 * brevity + shortest)
