"""Sweeps as whole commands: real runs of the embedded model, on Ray and without it, killed and
continued, to a report."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from unittest import mock

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from alignment import sweep
from alignment.ablation.report import write_report
from alignment.ablation.schedule import (
    LOST,
    LocalExecutor,
    RayExecutor,
    SlurmExecutor,
    State,
    make_executor,
    next_runs,
    run_all,
)
from alignment.ablation.statistics import Comparison
from alignment.ablation.study import read_study
from alignment.ablation.verdicts import decide
from alignment.args import SweepArgs, parse
from alignment.sweep import make_design
from alignment.system.errors import UserError
from alignment.system.files import lock_run_folder, read_jsonl
from alignment.system.processes import start_command
from tests.command_line import exit_code

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
    folder of a cluster that has ended."""
    handler = signal.getsignal(signal.SIGTERM)
    with mock.patch.dict(os.environ):
        yield
    signal.signal(signal.SIGTERM, handler)
    shutil.rmtree(Path(tempfile.gettempdir()) / "ray", ignore_errors=True)


# --- without Ray ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def done(warm, tmp_path_factory, wait_for):
    """A sweep of two named arms, run one after another by the real command, killed once and
    continued."""
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
    wait_for(lambda: runs_under(output) == [], 5)  # no run outlives its sweep
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stdout + second.stderr
    return output / "small", second.stdout


def test_a_killed_sweep_continues_to_its_report(done):
    folder, said = done
    assert "2 arms x 1 seeds = 2 runs" in said and "2 of 2 runs done" in said
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
    ]
    assert (
        main(monkeypatch, *flags, "--loss_type", "no_baseline", "grpo_clip", "--num_steps", "3")
        == 2
    )
    assert "holds a sweep of another design" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--preset", "huge"], "--preset huge: there is no such preset"),
        (["--group_size", "3", "4"], "--group_size 3 --hold rollouts"),
        (["--sweep_file", "none.toml"], "--sweep_file none.toml: there is no such file"),
        (["--tie", "2"], "--tie 2.0: must be between 0 and 1"),
        (["--sweep_name", "../x"], "--run_name ../x"),
        (["--loss_type", "grpo_clip", "--strict"], "--strict: one seed cannot tell"),
        (["--cliprange", "7"], "--cliprange 7.0"),
        (["--group_size", "0", "4"], "--group_size 0"),
        (["--seed", "-1", "1"], "--seed -1"),
        (
            ["--max_problems", "16", "32"],
            "--max_problems 16 32: the arms would answer different questions",
        ),
        (["--model", "tiny", "smollm2"], "differ in task or model and cannot share a warm start"),
        (["--preset", "smollm2_gsm8k"], "does not exist: make it with"),
        (["--max_seeds", "1"], "--max_seeds 1"),
        (["--cpus_per_run", "0"], "--cpus_per_run 0"),
        (["--ray_address", "127.0.0.1:1"], "--ray_address 127.0.0.1:1"),
        (
            ["--ray_address", "auto", "--executor", "local"],
            "--ray_address auto: must be with --executor ray",
        ),
        (
            ["--slurm", "time=9"],
            "--slurm time=9: must be name=value, time in minutes, and go with --executor slurm",
        ),
        (
            ["--slurm", "time=1:00", "--executor", "slurm"],
            "--slurm time=1:00: must be name=value, time in minutes",
        ),
        (["--executor", "slurm"], '--executor slurm: Could not detect "srun"'),
    ],
)
def test_mistakes_are_one_clear_line(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *flags) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


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


def test_without_ray_a_cluster_is_refused(monkeypatch):
    monkeypatch.setattr("alignment.ablation.schedule.find_spec", lambda name: None)
    assert isinstance(make_executor("auto", "", None, None, {}, Path()), LocalExecutor)
    for kind, address, extra in ("auto", "auto", "ray"), ("slurm", "", "slurm"):
        with pytest.raises(
            UserError, match=f"not installed: start with `uv run --extra {extra} ...`"
        ):
            make_executor(kind, address, None, None, {}, Path())


# --- with Ray -------------------------------------------------------------------------------------


@pytest.fixture
def cluster():
    """A real cluster on this machine, of one node with a core."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    yield made
    made.shutdown()


def weights_of(run: Path) -> bytes:
    return (run / "final" / "model.safetensors").read_bytes()


@pytest.mark.timeout(600)
def test_a_node_that_is_killed_costs_no_run(cluster, warm, tmp_path, monkeypatch, capsys, wait_for):
    """The run that was on it is continued on the other node, and ends as the undisturbed one
    does."""
    monkeypatch.chdir(tmp_path)
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--num_steps", "16"]
    design = make_design(arguments(warm, Path("on_a_cluster"), *flags))
    states = [State(arm, seed) for seed in design.seeds for arm in design.arms]
    executor = RayExecutor(cluster.address, None, None)
    second = cluster.add_node(num_cpus=1)  # only now, so that this process hangs on the first
    raylet = psutil.Process(second.all_processes["raylet"][0].process.pid)
    # A worker that runs already takes its job at once: a slow start would leave both runs, one
    # after the other, to the first.
    there = NodeAffinitySchedulingStrategy(second.node_id, soft=False)
    ray.get(ray.remote(num_cpus=1, scheduling_strategy=there)(lambda: None).remote())

    def has_saved_on_the_second_node() -> bool:
        saved = {checkpoint.parent.name for checkpoint in design.folder.glob("*/step_*")}
        with suppress(psutil.NoSuchProcess):  # one that ends meanwhile
            return any(
                saved.intersection(process.cmdline()) for process in raylet.children(recursive=True)
            )
        return False

    def kill_the_second_node() -> None:
        wait_for(has_saved_on_the_second_node)
        cluster.remove_node(second, allow_graceful=False)

    killer = threading.Thread(target=kill_the_second_node, daemon=True)
    killer.start()
    try:
        run_all(design, executor, states, Console(width=200))
    finally:
        executor.close()
    assert {state.status for state in states} == {"done"}
    (killed,) = [state for state in states if state.attempts == 2]
    assert "its worker or machine is gone; trying again" in capsys.readouterr().out
    for state in states:
        assert [
            r["step"] for r in read_jsonl(design.folder / state.name / "metrics.jsonl")
        ] == list(range(1, 17))

    plain = make_design(arguments(warm, Path("undisturbed"), *flags))
    executor = LocalExecutor(cpus=1)
    try:
        run_all(plain, executor, [State(killed.arm, killed.seed)], Console(width=200))
    finally:
        executor.close()
    assert weights_of(design.folder / killed.name) == weights_of(plain.folder / killed.name)
    ends = [
        read_jsonl(folder / killed.name / "evals.jsonl")[-1]["avg_all_rewards"]
        for folder in (design.folder, plain.folder)
    ]
    assert ends[0] == ends[1]


def exit_codes(executor: RayExecutor, jobs: int) -> dict[str, int]:
    codes: dict[str, int] = {}
    deadline = time.monotonic() + 120
    while len(codes) < jobs and time.monotonic() < deadline:
        codes |= executor.finished(1.0)
    return codes


def test_ray_gives_a_run_its_share_of_cores_and_reports_exit_codes(tmp_path):
    executor = RayExecutor("", 2, 0)
    try:
        executor.submit("good", partial(start_command, "platform", (), tmp_path / "good.log"))
        executor.submit("bad", partial(start_command, "no_such_module", (), tmp_path / "bad.log"))
        codes = exit_codes(executor, 2)
    finally:
        executor.close()
    assert codes == {"good": 0, "bad": 1} and LOST not in codes.values()
    assert "No module named no_such_module" in (tmp_path / "bad.log").read_text()


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
    wait_for((tmp_path / "log").exists, 60)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
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
        20,
    )


def test_a_run_gets_whole_gpus_of_its_own(tmp_path):
    """Four GPUs that Ray is told of, two a run: two runs at a time, and no GPU in both."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 4})
    executor = RayExecutor(made.address, None, 2)
    try:
        for name in ("a", "b"):
            other = tmp_path / ("b" if name == "a" else "a")  # both are held until both are there
            code = (
                f"import os, time; open({str(tmp_path / name)!r},"
                " 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])"
            )
            code += f"\nwhile not os.path.exists({str(other)!r}): time.sleep(0.1)"
            executor.submit(
                name,
                partial(start_command, "timeit", ("-n1", "-r1", code), tmp_path / f"{name}.log"),
            )
        codes = exit_codes(executor, 2)
    finally:
        executor.close()
        made.shutdown()
    assert codes == {"a": 0, "b": 0}
    seen = [(tmp_path / name).read_text().split(",") for name in ("a", "b")]
    assert sorted(seen[0] + seen[1]) == ["0", "1", "2", "3"]


def test_more_than_a_machine_has_is_refused():
    with pytest.raises(UserError, match="--cpus_per_run 1 --gpus_per_run 99: no machine has them"):
        RayExecutor("", None, 99)


# --- as SLURM jobs, by submitit's own processes instead of a cluster's ----------------------------


def test_a_slurm_job_that_is_preempted_or_killed_goes_on(
    warm, tmp_path, monkeypatch, capsys, wait_for
):
    """A preempted run saves its last step, and its job goes on by itself; a killed one is submitted
    again. Both end as undisturbed runs do."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--num_steps", "8"]
    design = make_design(arguments(warm, Path("on_a_cluster"), *flags, "--executor", "slurm"))
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
    assert (
        f"{killed.name}: its worker or machine is gone; trying again" in said
        and preempted.name + ":" not in said
    )
    assert "stopped after step" in (design.folder / "logs" / f"{preempted.name}.log").read_text()
    plain = make_design(arguments(warm, Path("undisturbed"), *flags))
    executor = LocalExecutor(cpus=1)
    try:
        run_all(plain, executor, [State(state.arm, 0) for state in states], Console(width=200))
    finally:
        executor.close()
    for state in states:
        assert [
            r["step"] for r in read_jsonl(design.folder / state.name / "metrics.jsonl")
        ] == list(range(1, 9))
        assert weights_of(design.folder / state.name) == weights_of(plain.folder / state.name)


def test_a_sweep_that_stops_cancels_its_slurm_jobs(tmp_path, wait_for):
    executor = SlurmExecutor(tmp_path, {}, None, cluster="local")
    for name in "ab":
        code = f"import time; open({str(tmp_path / name)!r}, 'w'); time.sleep(600)"
        executor.submit(
            name, partial(start_command, "timeit", ("-n1", "-r1", code), tmp_path / f"{name}.log")
        )
    assert executor.finished(0.0) == {}
    wait_for(lambda: all((tmp_path / name).exists() for name in "ab"), 60)
    executor.close()
    wait_for(lambda: runs_under(tmp_path) == [], 20)


def test_runs_that_wait_together_are_one_job_array(tmp_path, monkeypatch):
    """SLURM's commands are stand-ins here, which keep the script that they are given."""
    for name, body in {
        "srun": "",
        "sacct": "",
        "scancel": "",
        "sbatch": f"cp $1 {tmp_path}/script; echo Submitted batch job 7",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    executor = SlurmExecutor(
        tmp_path / "sweep", {"time": 30, "partition": "gpu", "gpus_per_node": 1}, None
    )
    for name in ("a", "b", "c"):
        executor.submit(name, partial(start_command, "platform", (), tmp_path / "log"))
    assert executor.finished(0.0) == {}
    assert {name: job.job_id for name, job in executor.under_way.items()} == {
        "a": "7_0",
        "b": "7_1",
        "c": "7_2",
    }
    script = (tmp_path / "script").read_text()
    options = (
        "--array=0-2%3 --gpus-per-node=1 --job-name=sweep --open-mode=append --partition=gpu"
        " --signal=USR2@90 --time=30"
    )
    assert [option for option in options.split() if f"#SBATCH {option}\n" not in script] == []
    (tmp_path / "sbatch").write_text(
        "#!/bin/sh\necho invalid partition specified: gpu >&2; exit 1\n"
    )
    executor.submit("d", partial(start_command, "platform", (), tmp_path / "log"))
    with pytest.raises(
        UserError, match="--slurm: sbatch refused the jobs: .*invalid partition specified: gpu"
    ):
        executor.finished(0.0)


def test_an_unknown_option_of_sbatch_is_refused(tmp_path):
    with pytest.raises(UserError, match="--executor slurm: Unknown argument 'partitoin'"):
        SlurmExecutor(tmp_path, {"partitoin": "gpu"}, None, cluster="local")


def test_options_of_sbatch_are_flags(warm, tmp_path):
    flags = [
        "--executor",
        "slurm",
        "--gpus_per_run",
        "2",
        "--slurm",
        "partition=gpu",
        "mem=8G",
        "time=30",
    ]
    parameters = arguments(warm, tmp_path, *flags).slurm_parameters
    assert parameters == {"gpus_per_node": 2, "partition": "gpu", "mem": "8G", "time": 30}


# --- until it is decided --------------------------------------------------------------------------


def undecided(a: str, b: str, more: int | None = 3) -> Comparison:
    kind = "undecided" if more else "greater"
    return Comparison(
        a,
        b,
        2,
        0.1,
        -0.1,
        0.3,
        0.2,
        kind,
        "undecided: about 3 more seeds" if more else "",
        more,
        (a, b),
    )


def test_every_undecided_pair_gets_a_seed_until_none_is_left():
    states = [State(arm, seed, "done") for seed in (0, 1) for arm in "abc"]

    def names(states, comparisons, max_seeds):
        return [(state.arm, state.seed) for state in next_runs(states, comparisons, max_seeds)]

    assert names(states, [undecided("a", "b")], 3) == [("a", 2), ("b", 2)]
    assert names(states, [undecided("a", "b"), undecided("b", "c")], 3) == [
        ("a", 2),
        ("b", 2),
        ("c", 2),
    ]
    assert names(states, [undecided("a", "b")], 2) == []
    # An arm that is behind gets the seeds that it lacks and the next one, so that each look has one
    # seed more than the last.
    assert names([*states, State("b", 5, "done")], [undecided("a", "b")], 9) == [
        ("a", 5),
        ("a", 6),
        ("b", 6),
    ]
    assert names([*states[:-1], State("b", 1, "failed")], [undecided("a", "b")], 9) == []
    assert names(states, [undecided("a", "b", None)], 9) == []


def test_there_are_no_more_looks_than_share_the_error_rate():
    states, looks = [State(arm, seed, "done") for seed in (0, 1) for arm in "abcd"], 1
    rng = random.Random(0)
    while added := next_runs(states, [undecided(*rng.sample("abcd", 2))], 8):
        states, looks = [*states, *(State(s.arm, s.seed, "done") for s in added)], looks + 1
    assert looks == 7  # 2, 3, 4, 5, 6, 7 and 8 seeds


def test_a_question_is_two_arms_two_values_or_an_argument(warm, tmp_path):
    grid = ["--loss_type", "no_baseline", "grpo_clip", "--group_size", "2", "4", "--seed", "0", "1"]
    for question in (
        ["loss_type"],
        ["no_baseline", "grpo_clip"],
        ["group_size 4", "group_size 2"],
        ["no_baseline_group_size2", "grpo_clip_group_size4"],
    ):
        assert make_design(arguments(warm, tmp_path, *grid, "--question", *question)).alpha == 0.05
    for question in (["seed"], ["no_baseline", "group_size 2"], ["no_baseline", "no_baseline"]):
        with pytest.raises(
            UserError,
            match=f"--question {' '.join(question)}: give loss_type, group_size or two of",
        ):
            make_design(arguments(warm, tmp_path, *grid, "--question", *question))


def test_looking_again_is_paid_for(warm, tmp_path):
    flags = ["--loss_type", "no_baseline", "grpo_clip", "--seed", "0", "1"]
    assert make_design(arguments(warm, tmp_path, *flags)).alpha == 0.05
    assert (
        make_design(arguments(warm, tmp_path, *flags, "--until_decided", "--max_seeds", "6")).alpha
        == 0.01
    )


def test_two_sweeps_are_not_at_work_in_one_folder(tmp_path):
    with (
        lock_run_folder(tmp_path),
        pytest.raises(UserError, match=f"in use by process {os.getpid()} on"),
        lock_run_folder(tmp_path),
    ):
        pass


def test_a_run_that_is_gone_is_missing_from_the_report_and_said_so(done, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(done[0], folder)
    shutil.rmtree(folder / "grpo_clip_seed0")
    study = read_study([folder])
    assert study.missing == ("grpo_clip_seed0",)
    html, markdown, *_ = write_report(study, folder)
    assert "grpo_clip_seed0" in html.read_text() and "missing" in markdown.read_text()
