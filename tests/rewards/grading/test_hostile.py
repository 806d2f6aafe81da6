"""Hostile answers: nothing hangs, crashes, runs as code or takes the machine's memory, wherever the
grader runs."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from hostile import code_answers, hostile_answers
from hypothesis import given, settings
from hypothesis import strategies as st

from alignment.rewards.grading.cascade import (
    FAILURES,
    MAX_CHARS,
    WORKERS,
    grade,
    grade_detail,
    grade_many,
)
from alignment.rewards.r1_zero import r1_zero_strict_reward_fn

# Graders stop early on whole numbers, so one of these alone would hide the danger.
TRUTHS = ("5", r"\frac{1}{2}", "x^2+1")
# those that math-verify is asked about
ASKED = (
    r"3\begin{pmatrix} 1 & 2 \end{pmatrix}",
    r"\sum_{n=1}^{9} n^{2}",
)
# equal ones, which math-verify says
MATRICES = (r"2\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 2 & 4 \end{pmatrix}")
# of computing in the thread that grades, and of waiting, which a busy machine makes long
SECONDS = 2.0
WAITED_SECONDS = 60.0
# of the work that math-verify is allowed; hyperthreads that share a core take twice their time
ASKED_CPU_SECONDS = 6.0


@pytest.fixture(scope="module", autouse=True)
def workers_are_running():
    """Their imports, once a process, are no part of a grading's time."""
    assert grade(*MATRICES)


def slowest(answers: list[str], truths: tuple[str, ...] = TRUTHS) -> tuple[float, str, str]:
    """The most seconds of computing that this thread has taken for one pair, and the pair."""
    times = []
    for answer in answers:
        for truth in truths:
            for pair in ((answer, truth), (truth, answer)):
                begun, computed = time.perf_counter(), time.thread_time()
                assert not grade(*pair), pair
                times.append((time.thread_time() - computed, *pair))
                assert time.perf_counter() - begun < WAITED_SECONDS, pair
    return max(times)


def test_the_set_is_large_and_distinct():
    answers = hostile_answers("/tmp/marker")
    assert len(set(answers)) == len(answers) >= 150
    assert len(code_answers("/tmp/marker")) >= 25
    assert max(map(len, answers)) >= 10**5


def test_no_hostile_answer_hangs_is_accepted_runs_or_takes_memory(tmp_path):
    """In a process of its own: what the process takes beyond its imports."""
    marker = tmp_path / "ran"
    script = f"""
import json, resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_hostile import MATRICES, grade, hostile_answers, slowest
assert grade(*MATRICES)  # which starts the workers
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seconds, answer, truth = slowest(hostile_answers({str(marker)!r}))
taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([seconds, answer[:80], truth, taken]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1), done.stderr
    seconds, answer, truth, taken = json.loads(done.stdout)
    assert seconds < SECONDS, (answer, truth)
    unit = 1 if sys.platform == "darwin" else 1024
    assert taken * unit < 100 * 2**20
    assert not marker.exists()


@pytest.mark.slow
def test_none_that_math_verify_is_asked_about_does_either(tmp_path):
    """Its limit is in work, so what is measured is computing: waiting for a busy processor neither
    costs nor decides anything."""
    marker = tmp_path / "ran"
    for answer in hostile_answers(str(marker))[::6]:
        for truth in ASKED:
            for pair in ((answer, truth), (truth, answer)):
                before = workers_cpu_seconds()
                verdict = grade_detail(*pair)
                assert not verdict.equal and verdict.stage not in {*FAILURES} - {"work"}, (
                    pair,
                    verdict,
                )
                assert workers_cpu_seconds() - before < ASKED_CPU_SECONDS, pair
    assert not marker.exists()


def workers_cpu_seconds() -> float:
    """CPU time of all calls that this process's workers have ended."""
    times = [
        psutil.Process(worker.process.pid).cpu_times()
        for worker in WORKERS.workers.values()
        if worker.is_open
    ]
    return sum(each.children_user + each.children_system for each in times)


@pytest.mark.slow
def test_the_same_in_eight_threads(tmp_path):
    marker = tmp_path / "ran"
    answers = hostile_answers(str(marker))
    with ThreadPoolExecutor(8) as threads:
        times = list(threads.map(slowest, [answers[i::8] for i in range(8)]))
    assert max(times)[0] < SECONDS
    assert not marker.exists()


def _slowest_elsewhere(answers: list[str]) -> float:
    assert multiprocessing.current_process().daemon
    grade(r"2\begin{pmatrix} 1 & 2 \end{pmatrix}", "(2, 4)")
    return slowest(answers)[0]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_same_in_a_daemonic_process(tmp_path, method):
    marker = tmp_path / "ran"
    answers = hostile_answers(str(marker))[::4]
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert max(pool.map(_slowest_elsewhere, [answers[::2], answers[1::2]])) < SECONDS
    assert not marker.exists()


@pytest.mark.slow
def test_parse_expr_would_have_run_the_code(tmp_path):
    """The code strings are real: sympy's parser runs each of them, letter filters or not."""
    script = f"""
import json, os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from hostile import code_answers
from sympy.parsing.sympy_parser import parse_expr
markers = []
for i in range(len(code_answers(""))):
    marker = {str(tmp_path)!r} + f"/ran{{i}}"
    text = code_answers(marker)[i]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        devnull = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(devnull, descriptor)
        try:
            parse_expr(text)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    markers.append(os.path.exists(marker))
print(json.dumps(markers))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    ran = json.loads(done.stdout.splitlines()[-1])
    assert len(ran) >= 25
    assert all(ran), [i for i, did in enumerate(ran) if not did]


def test_few_letters_are_no_protection(tmp_path):
    few = [
        text
        for text in code_answers(str(tmp_path))
        if len({c for c in text if c.isascii() and c.isalpha()}) < 3
    ]
    assert len(few) >= 3
    assert not any(grade(text, truth) for text in few for truth in TRUTHS)


def test_long_answers_are_out_of_bounds_at_once():
    for text in ("9" * 10**5, "(" * 10**5, r"\frac{1}{" * 10**5, "x" * (MAX_CHARS + 1)):
        assert grade_detail(text, "5").stage == "bounds"
        assert r1_zero_strict_reward_fn(f"</think> <answer> {text} </answer>", "5")["reward"] == 0


# --- fuzzing --------------------------------------------------------------------------------------

STAGES = {
    "literal",
    "normalised",
    "rational",
    "structured",
    "symbolic",
    "math-verify",
    "unread",
    "bounds",
    *FAILURES,
} - {"error"}
FRAGMENTS = [
    r"0",
    r"1",
    r"2",
    r"7",
    r"12",
    r"0.5",
    r"3.14",
    r"1,000",
    r",",
    r".",
    r";",
    r":",
    r"+",
    r"-",
    r"*",
    r"/",
    r"^",
    r"_",
    r"(",
    r")",
    r"[",
    r"]",
    r"{",
    r"}",
    r"\{",
    r"\}",
    r"|",
    r"=",
    r"<",
    r">",
    r"%",
    r"$",
    r"!",
    r"?",
    r"'",
    r"x",
    r"y",
    r"e",
    r"i",
    r"n",
    r"k",
    r"\pi",
    r"\infty",
    r"\frac",
    r"\dfrac{1}{2}",
    r"\frac12",
    r"\sqrt",
    r"\sqrt[3]{2}",
    r"\sin",
    r"\arctan",
    r"\log_2",
    r"\ln",
    r"\binom{4}{2}",
    r"\pm",
    r"\mp",
    r"\cup",
    r"\cap",
    r"\setminus",
    r"\in",
    r"\le",
    r"\ne",
    r"\approx",
    r"\text{cm}",
    r"\text{",
    r"or",
    r"}",
    r"cm",
    r"m",
    r"or",
    r"and",
    r"\left",
    r"\right",
    r"\begin{pmatrix}",
    r"\end{pmatrix}",
    r"\\",
    r"&",
    r"\boxed{",
    r"\overline{3}",
    r"...",
    r"^\circ",
    r"12:30",
    r"pm",
    r"101_2",
    r"apples",
    r"million",
    r"five",
    r"\mathbb{R}",
    r"±",
] + [" "]
NOTATION = st.lists(st.sampled_from(FRAGMENTS), max_size=16).map("".join)


@given(NOTATION, NOTATION)
@settings(max_examples=400)
def test_any_jumble_of_notation_gets_a_verdict(answer, truth):
    verdict = grade_detail(answer, truth)
    assert verdict.equal in (True, False)
    assert verdict.stage in STAGES


@given(st.text(max_size=80), st.text(max_size=80))
@settings(max_examples=400)
def test_any_text_gets_a_verdict(answer, truth):
    assert grade_detail(answer, truth).stage in STAGES
    assert [v.stage in STAGES for v in grade_many([answer], [truth])] == [True]


@given(NOTATION)
@settings(max_examples=200)
def test_any_jumble_equals_itself(text):
    if text.strip() and r"\boxed" not in text:
        assert grade(text, text)


def test_the_environment_is_not_touched():
    before = dict(os.environ)
    grade(r"\prod_{i=1}^{3} i", "6")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "answer",
    [
        "5" + " (=5)" * 150,
        "It is " * 150 + "5",
        "9" * 1000,
        "²" * 1000,
        "(x+990)!" * 24,
        "5" + "pi" * 499,
    ],
)
def test_what_repeats_itself_is_graded_at_once(answer):
    start = time.thread_time()
    assert not grade(answer, "x + 6")
    assert time.thread_time() - start < SECONDS


def test_a_defect_of_the_grader_is_a_failure_and_not_the_end_of_a_run(monkeypatch):
    monkeypatch.setattr(
        "alignment.rewards.grading.compare.Comparison.compare_texts", lambda *args: 1 / 0
    )
    assert grade_detail("a defect", "is planted here").stage == "error"
    assert "error" in FAILURES
