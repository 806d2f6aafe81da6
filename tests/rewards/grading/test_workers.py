"""The workers: limits of time and memory, deaths, forks, and that none is left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from alignment.rewards.grading import cascade
from alignment.rewards.grading.cascade import (
    WORKERS,
    Verdict,
    ask_math_verify,
    grade_detail,
    grade_many,
)
from alignment.rewards.r1_zero import r1_zero_reward_fn
from alignment.system.limited_workers import CallFailed, LimitedWorkers

ROOT = Path(__file__).parents[3]
MATRIX = (r"2\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 2 & 4 \end{pmatrix}")


def test_math_verify_is_asked_last_and_answers():
    assert ask_math_verify(*MATRIX) == (True, "math-verify")
    assert ask_math_verify(MATRIX[0], r"\begin{pmatrix} 2 & 5 \end{pmatrix}") == (
        False,
        "math-verify",
    )
    assert ask_math_verify("x", "y") == (False, "unread")


@pytest.fixture
def math_verify_that(monkeypatch, tmp_path):
    """Starts workers in which other code takes math-verify's place."""
    workers = LimitedWorkers((*WORKERS.modules, "fake_math_verify"), 1)

    def start(body: str):
        code = "import time, os, signal\nfrom alignment.rewards.grading import cascade\n"
        code += f"def fake(answer, truth):\n    {body}\ncascade.math_verify_reading = fake\n"
        (tmp_path / "fake_math_verify.py").write_text(code)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        monkeypatch.setattr(cascade, "WORKERS", workers)
        cascade._ask_math_verify_cached.cache_clear()

    yield start
    workers.close()


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        pytest.param("time.sleep(60)", "time-out", marks=pytest.mark.slow),
        ("signal.signal(signal.SIGALRM, signal.SIG_IGN); time.sleep(60)", "time-out"),
        ("bytearray(1 << 40)", "memory"),
        pytest.param("os.kill(os.getpid(), signal.SIGSEGV)", "died", marks=pytest.mark.slow),
    ],
)
def test_each_failure_is_an_outcome_of_its_own(math_verify_that, body, failure):
    math_verify_that(body)
    assert grade_detail(*MATRIX) == Verdict(False, failure)
    start = time.perf_counter()
    score = r1_zero_reward_fn(f"</think> <answer> {MATRIX[0]} </answer>", MATRIX[1])
    assert time.perf_counter() - start < 2
    assert score == {
        "reward": 0.0,
        "format_reward": 1.0,
        "answer_reward": 0.0,
        "grading_failed": 1.0,
    }
    verdicts = grade_many([MATRIX[0], "5", "6"], [MATRIX[1], "5", "5"])
    assert verdicts == [
        Verdict(False, failure),
        Verdict(True, "literal"),
        Verdict(False, "rational"),
    ]


def test_too_much_work_is_a_failure_of_its_own_and_is_remembered(math_verify_that, monkeypatch):
    monkeypatch.setattr(cascade, "CALLS", 200_000)
    math_verify_that("while True: str.join('', map(lambda c: c, 'ab'))")
    assert grade_detail(*MATRIX) == Verdict(False, "work")
    score = r1_zero_reward_fn(f"</think> <answer> {MATRIX[0]} </answer>", MATRIX[1])
    assert score == {
        "reward": 0.0,
        "format_reward": 1.0,
        "answer_reward": 0.0,
        "grading_failed": 1.0,
    }
    assert cascade._ask_math_verify_cached.cache_info().hits >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "truth", "equal"),
    [
        (r"\int_0^1 x^2 dx", r"\frac{1}{3}", True),
        (r"\lim_{x \to 2} \frac{x^2-4}{x-2}", "2", False),
    ],
)
def test_a_verdict_does_not_depend_on_the_machines_load(answer, truth, equal):
    """The process that computes is stopped for longer than it computes, as on a machine that has no
    processor for it."""
    assert ask_math_verify(*MATRIX)[0]  # a worker has started
    cascade._ask_math_verify_cached.cache_clear()
    workers = [
        psutil.Process(worker.process.pid) for worker in WORKERS.workers.values() if worker.is_open
    ]
    with ThreadPoolExecutor(1) as thread:
        verdict = thread.submit(grade_detail, answer, truth)
        deadline = time.monotonic() + 20
        computing: list[psutil.Process] = []
        while not computing and time.monotonic() < deadline:
            computing = [child for worker in workers for child in worker.children()]
        computing[0].suspend()
        time.sleep(2.0)
        computing[0].resume()
        assert verdict.result() == Verdict(equal, "math-verify")


def test_a_worker_that_is_killed_is_replaced():
    assert ask_math_verify(*MATRIX) == (True, "math-verify")
    for worker in list(WORKERS.workers.values()):
        worker.process.kill()
        worker.process.wait()
    failures = set()
    for _ in range(4 * WORKERS.size):  # each dead worker is noticed in its turn
        try:
            ask_math_verify(*MATRIX)
        except CallFailed as failure:
            failures.add(str(failure))
    assert failures == {"died"}
    assert {ask_math_verify(*MATRIX) for _ in range(8)} == {(True, "math-verify")}


def test_many_keep_their_order_and_repeat_what_is_repeated():
    answers = [str(i % 700) for i in range(3000)]
    verdicts = grade_many(answers, ["350"] * 3000)
    assert [i for i, verdict in enumerate(verdicts) if verdict.equal] == [
        350 + 700 * k for k in range(4)
    ]
    assert grade_many([], []) == []
    with pytest.raises(ValueError, match="shorter"):
        grade_many(["1", "2"], ["1"])


def test_a_forked_child_starts_workers_of_its_own():
    assert ask_math_verify(*MATRIX)[0]
    child = os.fork()
    if child == 0:
        os._exit(0 if ask_math_verify(*MATRIX)[0] and WORKERS.workers else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert ask_math_verify(*MATRIX)[0]


@pytest.mark.parametrize(
    "ending",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        pytest.param("return", marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_its_process(ending, tmp_path):
    script = f"""
import json, os, signal, sys
from pathlib import Path
from alignment.rewards.grading.cascade import WORKERS, ask_math_verify
def main():
    assert ask_math_verify(*{MATRIX!r})[0]
    pids = [worker.process.pid for worker in WORKERS.workers.values()]
    Path({str(tmp_path / "pids")!r}).write_text(json.dumps(pids))
    {ending}
main()
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    pids = json.loads((tmp_path / "pids").read_text())
    assert pids
    deadline = time.monotonic() + 10
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in pids
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_an_interrupt_at_the_terminal_leaves_the_workers_to_their_process():
    assert ask_math_verify(*MATRIX)[0]
    worker = next(iter(WORKERS.workers.values()))
    os.kill(worker.process.pid, signal.SIGINT)
    assert ask_math_verify(*MATRIX) == (True, "math-verify")
