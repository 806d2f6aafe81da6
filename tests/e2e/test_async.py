"""Rollouts drawn ahead, in whole runs: the same as drawn between updates, resumed as exactly, and
never waited for in vain."""

import math
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignment.args import RLArgs, from_preset
from alignment.builders.verified_runs import TIMINGS, digests
from alignment.rollouts.config import Schedule
from alignment.runs.run_folder import last_whole_step
from alignment.system.files import read_jsonl
from tests.e2e.conftest import NAME, said
from tests.e2e.test_held_out_runs import OWN, PREFIXES

pytestmark = pytest.mark.slow

ASYNC = ["--rollouts", "async"]
STALE = [*ASYNC, "--max_staleness", "2", "--sync_every", "2", "--num_steps", "7"]


@given(st.integers(0, 20), st.data(), st.integers(1, 200))
def test_each_rollout_has_the_oldest_weights_that_it_may_have(staleness, data, step):
    every = data.draw(st.integers(1, staleness + 1))
    schedule = Schedule(num_steps=200, max_staleness=staleness, sync_every=every)
    version = schedule.version_for(step)
    assert version % every == 0 and 0 <= step - 1 - version <= staleness
    assert version == 0 or step - 1 - (version - every) > staleness  # an older one would be too old
    # none is skipped, none comes back
    assert schedule.version_for(step + 1) in (
        version,
        version + every,
    )


def test_versions_by_hand():
    def versions(**settings) -> list[int]:
        schedule = from_preset(RLArgs, "tiny", rollouts="async", **settings).schedule
        return [schedule.version_for(step) for step in range(1, 9)]

    assert versions(max_staleness=0) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert versions() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert versions(max_staleness=2, sync_every=2) == [0, 0, 0, 2, 2, 4, 4, 6]


def samplers_of(pid: int) -> list[psutil.Process]:
    """The process of a run's sampler, which is given its parent's id; one or, when the run is over,
    none."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if (process.info["cmdline"] or [])[3:6]
        == [str(pid), "call", "alignment.sampling.pool:serve"]
    ]


def test_without_staleness_it_is_the_synchronous_run(warm, launcher, tmp_path):
    """Several updates a rollout too, which the old policy's log-probs are needed for; a reference
    model that is served, and reset; and evaluations of their own, whose log-probs the trainer
    computes too, under their own distribution."""
    flags = ["--sft_base", str(warm), "--num_steps", "3", "--max_refills", "1", "--beta", "0.1"]
    flags += ["--reference_reset_interval", "2", "--reference_reset_optimizer", *OWN]
    assert launcher.run(tmp_path / "sync", *flags) == 0, said(tmp_path / "sync")
    assert launcher.run(tmp_path / "async", *flags, *ASYNC, "--max_staleness", "0") == 0, said(
        tmp_path / "async"
    )
    ours, theirs = (digests(tmp_path / kind / NAME) for kind in ("async", "sync"))
    # which have `staleness`
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "metrics",
        "TensorBoard",
    }
    ours, theirs = (
        read_jsonl(tmp_path / kind / NAME / "metrics.jsonl") for kind in ("async", "sync")
    )
    assert [step["reference_step"] for step in ours] == [0, 0, 2]
    for one, other in zip(ours, theirs, strict=True):
        assert one.pop("staleness") == 0
        assert {k: v for k, v in one.items() if not k.startswith(TIMINGS)} == {
            k: v for k, v in other.items() if not k.startswith(TIMINGS)
        }
    last = read_jsonl(tmp_path / "async" / NAME / "evals.jsonl")[-1]
    assert {f"{prefix}avg_all_rewards" for prefix in PREFIXES} < last.keys()


@pytest.fixture(scope="module")
def straight(warm, launcher, tmp_path_factory):
    """The undisturbed run with stale rollouts."""
    output = tmp_path_factory.mktemp("straight")
    assert launcher.run(output, "--sft_base", str(warm), *STALE) == 0, said(output)
    return output / NAME


def test_what_was_sampled_is_trained_on_with_the_log_probs_it_was_sampled_with(straight):
    steps = read_jsonl(straight / "metrics.jsonl")
    assert [step["staleness"] for step in steps] == [0, 1, 2, 1, 2, 1, 2]
    for step in steps:
        drawn = read_jsonl(straight / "completions" / f"rollout_{step['step']:06d}.jsonl")
        assert {completion["policy_version"] for completion in drawn} == {
            step["step"] - 1 - step["staleness"]
        }
    # the weights have moved on
    assert steps[0]["sampler_mismatch"] < 1e-4 < steps[2]["sampler_mismatch"]
    # The ratio of the first pass is to the sampler's log-probs, which are of older weights than the
    # trainer's.
    drawn = [
        each
        for each in read_jsonl(straight / "completions" / "rollout_000003.jsonl")
        if each["trainer_log_probs"]
    ]
    trainer, sampler = (
        [lp for each in drawn for lp in each[key]] for key in ("trainer_log_probs", "log_probs")
    )
    ratios = [math.exp(one - other) for one, other in zip(trainer, sampler, strict=True)]
    assert max(abs(ratio - 1) for ratio in ratios) > 1e-3


def test_killed_and_then_stopped_it_ends_as_the_undisturbed_run(
    straight, warm, launcher, tmp_path, wait_for
):
    """What the signal stops keeps the rollouts that were drawn ahead."""
    flags = ["--sft_base", str(warm), *STALE, "--save_interval", "100"]
    pid = launcher.start(tmp_path, *flags, phase="weight sync", nth=30)
    assert launcher.wait() == -signal.SIGKILL, said(tmp_path)
    wait_for(lambda: not samplers_of(pid), 10)
    resume = ["--resume"] if (tmp_path / NAME / "args.json").exists() else []
    pid = launcher.start(tmp_path, *flags, *resume)
    wait_for(lambda: len(read_jsonl(tmp_path / NAME / "metrics.jsonl")) >= 3)
    assert len(samplers_of(pid)) == 1
    os.kill(pid, signal.SIGTERM)
    assert launcher.wait() == 143, said(tmp_path)
    assert samplers_of(pid) == []
    done, wrong = last_whole_step(tmp_path / NAME)
    assert done >= 3 and wrong == [] and "Traceback" not in said(tmp_path)
    assert launcher.run(tmp_path, *flags, "--resume") == 0, said(tmp_path)
    assert digests(tmp_path / NAME) == digests(straight)


def test_samplers_that_are_lost_are_replaced_and_change_nothing(
    straight, warm, launcher, tmp_path, wait_for
):
    """One is killed, and the next one hangs."""
    flags = ["--sft_base", str(warm), *STALE, "--sampler_timeout", "5"]
    pid = launcher.start(tmp_path, *flags, pause=0.5)  # so that the second has to draw more
    for steps, number in ((1, signal.SIGKILL), (4, signal.SIGSTOP)):
        wait_for(lambda steps=steps: len(read_jsonl(tmp_path / NAME / "metrics.jsonl")) >= steps)
        wait_for(lambda: samplers_of(pid))
        samplers_of(pid)[0].send_signal(number)
    assert launcher.wait() == 0, said(tmp_path)
    for reason in ("was killed by SIGKILL", "gave no answer within 5 s"):
        assert f"the sampler is started again: the sampler process on cpu {reason}" in said(
            tmp_path
        ).replace("\n", " ")
    assert samplers_of(pid) == []
    ours, theirs = digests(tmp_path / NAME), digests(straight)
    # which have `restarts`
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "metrics",
        "TensorBoard",
    }
    assert sum(step["restarts"] for step in read_jsonl(tmp_path / NAME / "metrics.jsonl")) == 2


def test_a_sampler_that_is_lost_again_and_again_stops_the_run_which_then_goes_on(
    straight, warm, launcher, tmp_path, wait_for
):
    def lost_twice() -> bool:
        for sampler in samplers_of(pid):
            with suppress(psutil.NoSuchProcess):
                sampler.kill()
        return "once more" in said(tmp_path)

    flags = ["--sft_base", str(warm), *STALE]
    pid = launcher.start(tmp_path, *flags)
    wait_for(lambda: len(read_jsonl(tmp_path / NAME / "metrics.jsonl")) >= 1)
    wait_for(lost_twice)
    assert launcher.wait() == 1, said(tmp_path)
    wanted = "the sampler was lost (the sampler process on cpu was killed by SIGKILL"
    assert wanted in said(tmp_path).replace("\n", " ") and "Traceback" not in said(tmp_path)
    assert "go on with: uv run -m alignment.train_rl" in said(tmp_path)
    assert samplers_of(pid) == []
    assert launcher.run(tmp_path, *flags, "--resume") == 0, said(tmp_path)
    ours, theirs = digests(tmp_path / NAME), digests(straight)
    # A step that is logged between the two losses counts the first one among its `restarts`.
    assert {name for name in ours if ours[name] != theirs[name]} <= {"metrics", "TensorBoard"}
    assert untimed(tmp_path / NAME) == untimed(straight)


def untimed(run: Path) -> list[dict]:
    """A run's metrics without times and `restarts`."""
    left_out = (*TIMINGS, "restarts")
    return [
        {k: v for k, v in step.items() if not k.startswith(left_out)}
        for step in read_jsonl(run / "metrics.jsonl")
    ]


def test_what_fails_in_the_sampler_is_said_as_it_is(warm, launcher, tmp_path):
    fails_later = (
        "    calls.append(text)\n    if len(calls) > 2:\n        raise ValueError('no such"
        " column')\n    return 1.0\n"
    )
    # two are before the run begins
    (tmp_path / "mine.py").write_text(f"calls = []\ndef reward(text, truth):\n{fails_later}")
    flags = ["--sft_base", str(warm), *ASYNC, "--reward", "mine:reward"]
    # a mistake of the user's own code, which a sweep does not try again
    assert launcher.run(tmp_path, *flags, path=str(tmp_path)) == 2
    assert "no such column" in said(tmp_path) and "Traceback" not in said(tmp_path)
