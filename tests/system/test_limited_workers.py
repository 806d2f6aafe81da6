"""Calls with limits of time and memory, of any function."""

import pytest

from alignment.system.limited_workers import CallFailed, LimitedWorkers


@pytest.fixture(scope="module")
def workers():
    made = LimitedWorkers(("json", "time", "operator"), 1)
    yield made
    made.close()


def test_a_call_gives_the_answer_as_json(workers):
    assert workers.submit("operator:add", ([1], [None, "a"]), 5.0).result() == [1, None, "a"]
    assert workers.submit("json:loads", ('{"a": 1}',), 5.0).result() == {"a": 1}


@pytest.mark.parametrize(
    ("function", "arguments", "failure"),
    [
        ("time:sleep", (60,), "time-out"),
        ("operator:mul", ([0], 1 << 40), "memory"),
        ("os:_exit", (3,), "died"),
        ("operator:truediv", (1, 0), "died"),
    ],
)
def test_each_failure_has_its_name_and_costs_no_worker(workers, function, arguments, failure):
    assert workers.submit("operator:add", (1, 1), 5.0).result() == 2
    before = dict(workers.workers)
    with pytest.raises(CallFailed, match=f"^{failure}$"):
        workers.submit(function, arguments, 0.5).result()
    assert workers.workers == before


def test_computing_is_stopped_by_its_own_clock(workers):
    with pytest.raises(CallFailed, match="^time-out$"):
        workers.submit("operator:pow", (7, 1 << 30), 0.3).result()


def test_a_closed_pool_has_no_workers(wait_for):
    pool = LimitedWorkers(("time",), 2)
    sleeping = pool.submit("time:sleep", (60,), 100.0)
    wait_for(lambda: pool.workers)
    pool.close()
    assert not pool.workers and isinstance(sleeping.exception(), CallFailed)
