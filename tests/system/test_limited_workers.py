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


@pytest.mark.parametrize(
    ("words", "calls", "answer"),
    [
        (40_000, 3_000_000, 40_000),  # within the limit, and within its first attempt
        (400_000, 3_000_000, 400_000),  # within the limit, beyond the first attempt
        (4_000_000, 500_000, "work"),
        (1_000_000, 500_000, "work"),
        (600_000, 500_000, "work"),
    ],
)
def test_work_is_limited_in_calls_of_functions(monkeypatch, tmp_path, words, calls, answer):
    (tmp_path / "counted.py").write_text(
        "def one(k):\n    return sum(divmod(k * k, 7 ** (k % 50)))\n"
        "def calls(number):\n    return sum(1 for k in range(number) if one(k) >= 0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("alignment.system.limited_workers.CALLS_PER_SECOND", 100 * 10**6)
    pool = LimitedWorkers(("counted",), 1)
    call = pool.submit("counted:calls", (words,), 60.0, calls)
    outcome = str(call.exception()) if call.exception() else call.result()
    pool.close()
    assert outcome == answer


def test_a_closed_pool_has_no_workers(wait_for):
    pool = LimitedWorkers(("time",), 2)
    sleeping = pool.submit("time:sleep", (60,), 100.0)
    wait_for(lambda: pool.workers)
    pool.close()
    assert not pool.workers and isinstance(sleeping.exception(), CallFailed)
