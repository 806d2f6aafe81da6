"""Sweeps as whole commands: real runs of the embedded model, on Ray and without it, killed and
continued, to a report."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from alignment import sweep
from alignment.ablation import schedule
from alignment.ablation.report import write_report
from alignment.ablation.schedule import (
    LOST,
    LocalExecutor,
    RayExecutor,
    SlurmExecutor,
    State,
    run_all,
)
from alignment.ablation.study import read_study
from alignment.ablation.verdicts import decide
from alignment.args import SweepArgs, parse
from alignment.rewards import users
from alignment.runs import summary
from alignment.sweep import make_design
from alignment.system.clock import start_in_background
from alignment.system.errors import UserError
from alignment.system.files import read_jsonl
from alignment.system.processes import start_command
from tests.command_line import exit_code, train_here
from tests.files import digest

pytestmark = pytest.mark.slow

SMALL = [
    "--prompts_per_rollout",
    "4",
    "--group_size",
    "4",
    "--train_mini_batch_size",
    "8",
    "--max_problems",
    "16",
    "--num_problems",
    "64",  # of 23,677, all of which every start would encode
]
SMALL += ["--save_interval", "1"]


@pytest.fixture(scope="module")
def warm(warm_start):
    """--sft_base."""
    return warm_start / "sft"


def arguments(warm: Path, output: Path, *flags: str):
    words = [*SMALL, "--sft_base", str(warm), "--output_dir", str(output), *flags]
    return parse(SweepArgs, words)


def main(monkeypatch, *flags: str) -> int:
    return exit_code(monkeypatch, sweep.main, "alignment/sweep.py", *flags)


def runs_under(folder: Path) -> list[int]:
    """Processes with this folder on their command line."""
    found = psutil.process_iter(["cmdline", "status"])
    return [
        p.pid
        for p in found
        if p.info["status"] != "zombie" and str(folder) in " ".join(p.info["cmdline"] or [])
    ]


@pytest.fixture(autouse=True)
def no_trace_of_ray():
    """Ray sets variables and a handler of SIGTERM in the process that starts it, and keeps the
    folder of a cluster that has ended. Its workers' niceness is 15, so that beside other tests they
    would get almost nothing of a core; here it is that of tests."""
    handler = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ, {"RAY_worker_niceness": "0"}):
        yield
    signal.signal(signal.SIGTERM, handler)
    shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)


# --- without Ray ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(warm, tmp_path_factory, wait_for):
    """A sweep of two named arms, run one after another by the real command, killed once and
    continued by the same in this process."""
    output = tmp_path_factory.mktemp("sweeps")
    arms = output / "arms.toml"
    arms.write_text(
        '[arms.no_baseline]\nloss_type = "no_baseline"\n[arms.grpo_clip]\nloss_type ='
        ' "grpo_clip"\ncliprange = 0.1\n'
    )
    words = [
        *SMALL,
        "--sft_base",
        str(warm),
        "--output_dir",
        str(output),
        "--sweep_file",
        str(arms),
    ]
    words += ["--num_steps", "2", "--sweep_name", "small"]
    script = "import alignment.ablation.schedule as e; e.find_spec = lambda name: None; "
    script += "from alignment import sweep; sweep.run_command(sweep.main)"
    command = [sys.executable, "-c", script, *words]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_for(lambda: list((output / "small").glob("*_seed0/step_000001")))
    first.send_signal(signal.SIGKILL)
    first.wait()
    wait_for(lambda: runs_under(output) == [], 20)  # no run outlives its sweep
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(printed):
        patched.setattr(schedule, "find_spec", lambda name: None)
        assert main(patched, *words) == 0, printed.getvalue()
    return output / "small", printed.getvalue()


def test_a_killed_sweep_continues_to_its_report(done):
    folder, said = done
    assert "2 arms x 1 seed = 2 runs" in said and "2 of 2 runs done" in said
    runs = ["no_baseline_seed0", "grpo_clip_seed0"]
    assert all((folder / run / "summary.json").exists() for run in runs)
    for run in runs:
        assert [record["step"] for record in read_jsonl(folder / run / "metrics.jsonl")] == [1, 2]
    assert "no_baseline - grpo_clip" in (folder / "report.md").read_text()
    assert "Verdicts" in (folder / "report.html").read_text()


def test_arms_share_questions_prompts_and_warm_start(done):
    study = read_study([done[0]])
    assert {arm: sorted(runs) for arm, runs in study.arms.items()} == {
        "no_baseline": [0],
        "grpo_clip": [0],
    }
    assert len({run.scores.questions for run in study.runs}) == 1
    starts = {json.dumps(run.evals[0]["avg_all_rewards"]) for run in study.runs}
    asked = {
        tuple(r["problem"] for r in read_jsonl(run.path / "completions" / "rollout_000001.jsonl"))
        for run in study.runs
    }
    assert len(starts) == len(asked) == 1
    assert len(decide(study)) == 1


def test_another_design_is_not_mixed_in(done, warm, monkeypatch, capsys):
    folder, _ = done
    flags = [
        *SMALL,
        "--sft_base",
        str(warm),
        "--output_dir",
        str(folder.parent),
        "--sweep_name",
        "small",
        "--executor",
        "local",
    ]
    assert (
        main(monkeypatch, *flags, "--loss_type", "no_baseline", "grpo_clip", "--num_steps", "3")
        == 2
    )
    assert "holds a sweep of another design" in capsys.readouterr().err


def test_a_run_that_fails_is_said(warm, tmp_path, capsys):
    design = make_design(
        arguments(
            warm, tmp_path, "--loss_type", "grpo_clip", "--seed", "0", "1", "--num_steps", "1"
        )
    )
    design.folder.mkdir()
    (design.folder / "grpo_clip_seed1").write_text("in the way of the run's folder")
    states = [State("grpo_clip", 1)]
    executor = LocalExecutor()
    try:
        run_all(design, executor, states, Console(width=200))
    finally:
        executor.close()
    assert [(state.status, state.attempts) for state in states] == [("failed", 1)]
    said = capsys.readouterr().out
    # a mistake stays one
    assert "grpo_clip_seed1: exit code 2" in said and "trying again" not in said
    assert "failed" in said and "logs/grpo_clip_seed1.log" in said


# --- runs that are lost ---------------------------------------------------------------------------

STEPS = 6
LONG = ["--loss_type", "no_baseline", "grpo_clip", "--num_steps", str(STEPS)]
# A step takes most of a second, so that a run can be lost before its last one.
SLOW_REWARD = """
import time

def slow_reward(response, ground_truth):
    time.sleep(0.05)
    return dict.fromkeys(("reward", "format_reward", "answer_reward"), float(len(response) % 2))
"""


def long_sweep(patched: pytest.MonkeyPatch, warm: Path, folder: Path, *flags: str):
    """The design of a sweep of long runs, in a folder that is the current one from now on."""
    patched.chdir(folder)
    patched.syspath_prepend(folder)
    Path("slow_rewards.py").write_text(SLOW_REWARD)
    reward = ["--reward", "slow_rewards:slow_reward"]
    return make_design(arguments(warm, Path("output"), *LONG, *reward, *flags))


@pytest.fixture(scope="module")
def undisturbed(warm, tmp_path_factory) -> Path:
    """The folder of long runs that nothing has disturbed, trained in this process by one thread, as
    the others are."""
    folder = tmp_path_factory.mktemp("undisturbed")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(schedule, "start_command", train_here)
        patched.setattr(summary, "plot_learning_curve", lambda *arguments: None)
        design = long_sweep(patched, warm, folder)
        states = [State(arm, 0) for arm in design.arms]
        torch.set_num_threads(1)
        try:
            run_all(design, LocalExecutor(), states, Console(width=200))
        finally:
            torch.set_num_threads(threads)
            users.close_functions()
    return folder / design.folder


def assert_the_same(run: Path, undisturbed: Path) -> None:
    """Compare a run's steps, whose first difference is shown, and then its final model."""
    names = "step", "sampling_entropy", "response_length", "reward", "loss", "grad_norm"
    steps = [
        [[record[name] for name in names] for record in read_jsonl(folder / "metrics.jsonl")]
        for folder in (run, undisturbed)
    ]
    assert len(steps[0]) == STEPS
    assert steps[0] == steps[1]
    assert weights_of(run) == weights_of(undisturbed)
    ends = [
        read_jsonl(folder / "evals.jsonl")[-1]["avg_all_rewards"] for folder in (run, undisturbed)
    ]
    assert ends[0] == ends[1]


def weights_of(run: Path) -> str:
    return digest(run / "final" / "model.safetensors")


# --- with Ray -------------------------------------------------------------------------------------


@contextmanager
def cluster_of_one_node(**resources: int) -> Iterator[Cluster]:
    """A real cluster on this machine, without the processes that no job needs."""
    spared = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
    made = Cluster(initialize_head=True, head_node_args=resources | spared)
    try:
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def cluster():
    with cluster_of_one_node(num_cpus=1) as made:
        yield made


# The first run that scores a response after both have saved names its raylet, the process of Ray's
# that leads a node, and waits until it is killed. A call of a reward may take 60 seconds.
WAITING_REWARD = """
import os
import time
from pathlib import Path

from slow_rewards import slow_reward

def waiting_reward(response, ground_truth):
    saved = {{checkpoint.parent for checkpoint in Path({folder!r}).glob("output/*/*/step_*")}}
    if len(saved) == 2:
        try:
            with open({raylet!r}, "x") as file:
                file.write(os.environ["RAY_RAYLET_PID"])
        except FileExistsError:
            return slow_reward(response, ground_truth)
        time.sleep(600)
    return slow_reward(response, ground_truth)
"""


def test_a_node_that_is_killed_costs_no_run(
    cluster, warm, undisturbed, tmp_path, monkeypatch, capsys, wait_for
):
    """The run that was on it is continued on another, and ends as the undisturbed one does."""
    raylet = tmp_path / "raylet"
    text = WAITING_REWARD.format(folder=str(tmp_path), raylet=str(raylet))
    (tmp_path / "waiting_rewards.py").write_text(text)
    design = long_sweep(monkeypatch, warm, tmp_path, "--reward", "waiting_rewards:waiting_reward")
    states = [State(arm, seed) for seed in design.seeds for arm in design.arms]
    executor = RayExecutor(cluster.address, None, None)

    class Occupant:
        def has_begun(self) -> None:
            pass

    # Nodes are added only now, so that this process hangs on the first, whose core is taken: which
    # of the others a run is given is left to Ray.
    first = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    taken = ray.remote(num_cpus=1, scheduling_strategy=first)(Occupant).remote()
    ray.get(taken.has_begun.remote())
    nodes = {}
    for _ in range(2):
        node = cluster.add_node(num_cpus=1)
        nodes[str(node.all_processes["raylet"][0].process.pid)] = node

    def kill_the_node_that_waits() -> None:
        wait_for(lambda: raylet.exists() and raylet.read_text())
        cluster.remove_node(nodes[raylet.read_text()], allow_graceful=False)

    killed = start_in_background(kill_the_node_that_waits)
    try:
        run_all(design, executor, states, Console(width=200))
        killed.result(0)
    finally:
        executor.close()
    assert {state.status for state in states} == {"done"}
    assert sorted(state.attempts for state in states) == [1, 2]
    assert "its worker or machine is gone; trying again" in capsys.readouterr().out
    for state in states:
        assert_the_same(design.folder / state.name, undisturbed / state.name)


def exit_codes(executor: RayExecutor, jobs: int) -> dict[str, int]:
    codes: dict[str, int] = {}
    deadline = time.monotonic() + 480
    while len(codes) < jobs and time.monotonic() < deadline:
        codes |= executor.finished(1.0)
    return codes


def test_a_signal_ends_runs_on_ray_and_says_so(tmp_path, wait_for):
    """Ray's own code does not survive an exception out of a signal's handler, so signals wait until
    it has returned."""
    script = f"""if True:
        from alignment.system.errors import run_command
        from functools import partial
        from pathlib import Path
        from alignment.ablation.schedule import RayExecutor
        from alignment.system.processes import start_command

        def main():
            executor = RayExecutor("", 1, 0)
            try:
                flags = ("-n1", "-r1", "import time; time.sleep(600)")
                log = Path({str(tmp_path / "log")!r})
                executor.submit("sleeper", partial(start_command, "timeit", flags, log))
                print("begun", flush=True)
                while not executor.finished(1.0):
                    pass
            finally:
                executor.close()

        run_command(main)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "begun\n"
    wait_for((tmp_path / "log").exists, 240)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=240)
    assert (
        process.returncode == 143
        and error.endswith("interrupted by SIGTERM\n")
        and "Traceback" not in error
    )
    wait_for(
        lambda: (
            not any(
                "time.sleep(600)" in " ".join(p.info["cmdline"] or [])
                for p in psutil.process_iter(["cmdline"])
            )
        ),
        80,
    )


def test_a_run_gets_whole_gpus_of_its_own_and_its_exit_code_is_reported(tmp_path):
    """Four GPUs that Ray is told of, two a run: two runs at a time, and no GPU in both. The third
    run fails. Runs of more GPUs than a machine has are refused."""
    with cluster_of_one_node(num_cpus=3, num_gpus=4) as cluster:
        refusal = "--cpus_per_run 1 --gpus_per_run 99: no machine has them"
        with pytest.raises(UserError, match=refusal):
            RayExecutor(cluster.address, None, 99)
        executor = RayExecutor(cluster.address, None, 2)
        try:
            for name, other in (("a", "b"), ("b", "a")):  # both are held until both are there
                code = f"""if True:
                    import os, time
                    open({str(tmp_path / name)!r}, "w").write(os.environ["CUDA_VISIBLE_DEVICES"])
                    while not os.path.exists({str(tmp_path / other)!r}):
                        time.sleep(0.1)
                """
                log = tmp_path / f"{name}.log"
                executor.submit(name, partial(start_command, "timeit", ("-n1", "-r1", code), log))
            bad = partial(start_command, "no_such_module", (), tmp_path / "bad.log")
            executor.submit("bad", bad)
            codes = exit_codes(executor, 3)
        finally:
            executor.close()
    assert codes == {"a": 0, "b": 0, "bad": 1} and LOST not in codes.values()
    assert "No module named no_such_module" in (tmp_path / "bad.log").read_text()
    seen = [(tmp_path / name).read_text().split(",") for name in ("a", "b")]
    assert sorted(seen[0] + seen[1]) == ["0", "1", "2", "3"]


# --- as SLURM jobs, by submitit's own processes instead of a cluster's ----------------------------


def test_a_slurm_job_that_is_preempted_or_killed_goes_on(
    warm, undisturbed, tmp_path, monkeypatch, capsys, wait_for
):
    """A preempted run saves its last step, and its job goes on by itself; a killed one is submitted
    again. Both end as undisturbed runs do."""
    monkeypatch.setenv("PYTHONPATH", "")
    design = long_sweep(monkeypatch, warm, tmp_path, "--executor", "slurm")
    states = preempted, killed = [State(arm, 0) for arm in design.arms]
    executor = SlurmExecutor(design.folder, {"time": 10, "partition": "gpu"}, 1, cluster="local")

    def end(state: State, number: signal.Signals) -> None:
        wait_for(lambda: (design.folder / state.name / "step_000002").exists())
        (task,) = psutil.Process(int(executor.under_way[state.name].job_id)).children()
        task.send_signal(number)

    endings = (preempted, signal.SIGUSR2), (killed, signal.SIGKILL)
    threads = [threading.Thread(target=end, args=ending, daemon=True) for ending in endings]
    for thread in threads:
        thread.start()
    try:
        run_all(design, executor, states, Console(width=200))
    finally:
        executor.close()
    assert [(state.status, state.attempts) for state in states] == [("done", 1), ("done", 2)]
    said = capsys.readouterr().out
    assert f"{killed.name}: its worker or machine is gone; trying again" in said and not any(
        f"{preempted.name}: {end}" in said for end in ("its", "exit")
    )
    assert "stopped after step" in (design.folder / "logs" / f"{preempted.name}.log").read_text()
    for state in states:
        assert_the_same(design.folder / state.name, undisturbed / state.name)


def test_a_sweep_that_stops_cancels_its_slurm_jobs(tmp_path, wait_for):
    executor = SlurmExecutor(tmp_path, {}, None, cluster="local")
    for name in "ab":
        code = f"import time; open({str(tmp_path / name)!r}, 'w'); time.sleep(600)"
        executor.submit(
            name, partial(start_command, "timeit", ("-n1", "-r1", code), tmp_path / f"{name}.log")
        )
    assert executor.finished(0.0) == {}
    wait_for(lambda: all((tmp_path / name).exists() for name in "ab"), 240)
    executor.close()
    wait_for(lambda: runs_under(tmp_path) == [], 80)


def test_a_run_that_is_gone_is_missing_from_the_report_and_said_so(done, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    shutil.rmtree(folder / "grpo_clip_seed0")
    study = read_study([folder])
    assert study.missing == ("grpo_clip_seed0",)
    html, markdown, *_ = write_report(study, folder)
    assert "grpo_clip_seed0" in html.read_text() and "missing" in markdown.read_text()
