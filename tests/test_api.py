"""Use from Python: which names there are, what calls refuse, return and leave behind."""

import ast
import contextlib
import dataclasses
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest
from command_line import exit_code

import alignment
from alignment import api, report
from alignment.ablation.statistics import Comparison
from alignment.ablation.summary import Verdicts
from alignment.args import EvaluateArgs, PlanArgs, RLArgs, SFTArgs, parse
from alignment.config.command_line import args_of_run
from alignment.rollouts.source import SyncRollouts
from alignment.runs.results import Accuracy, Difference
from alignment.system.command import calling, current_command
from alignment.system.errors import RunStopped, UserError, UsersCodeFailed
from alignment.system.files import read_json
from alignment.system.terminal import progress_line
from tests.ablation.test_report import make_run, write_sweep
from tests.files import digest

ROOT = Path(__file__).parents[1]
NAMES = [
    "Accuracy",
    "Comparison",
    "Difference",
    "EvaluateArgs",
    "EvaluationResult",
    "RLArgs",
    "RunResult",
    "RunStopped",
    "SFTArgs",
    "UserError",
    "Verdicts",
    "args_of_run",
    "compare",
    "evaluate",
    "preset_names",
    "read_run",
    "train",
    "train_sft",
]
"""Programs of users import these: a name may be added, none goes."""


# --- names ----------------------------------------------------------------------------------------


def test_the_public_names_are_these():
    assert alignment.__all__ == api.__all__ == NAMES
    assert set(NAMES) <= set(dir(alignment))
    for name in NAMES:
        assert callable(getattr(alignment, name))
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = alignment.trian


def test_type_checkers_are_told_the_same_names():
    tree = ast.parse((ROOT / "alignment" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)][:1]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    assert [alias.name for alias in block.body[0].names] == NAMES


def test_the_page_has_every_name():
    page = (ROOT / "docs" / "python.md").read_text()
    assert [name for name in NAMES if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    ("line", "unwanted"),
    [
        (
            "import alignment",
            ("alignment.api", "alignment.args", "numpy", "rich", "tyro", "typing"),
        ),
        ("from alignment import *", ("matplotlib", "torch", "transformers")),
        ("from alignment import RLArgs, train; RLArgs()", ("matplotlib", "scipy", "torch")),
    ],
)
def test_importing_is_fast(line, unwanted):
    code = f"import sys; {line}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_package_that_is_run_by_m_keeps_its_handler_of_ctrl_c(tmp_path):
    package = tmp_path / "users_package"
    package.mkdir()
    (package / "__init__.py").write_text("import alignment\n")
    (package / "main.py").write_text(
        "import signal\nprint(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    command = [sys.executable, "-m", "users_package.main"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


@pytest.mark.slow
def test_a_type_checker_sees_the_types(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from alignment import EvaluateArgs, RLArgs, compare, evaluate, train, trian\n"
        "reveal_type(train(RLArgs(group_size=4)).accuracy.interval)\n"
        "reveal_type(evaluate(EvaluateArgs()).difference)\n"
        "reveal_type(compare('a', 'b').comparisons[0].verdict)\n"
        "RLArgs(group_sise=4)\n"
        "RLArgs(num_steps='5')\n"
        "train(EvaluateArgs())\n"
        "compare('a', match='stps')\n"
    )
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath"]
    command += [sys.executable, str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)["generalDiagnostics"]
    revealed = [
        each["message"].split(" is ")[-1] for each in said if each["severity"] == "information"
    ]
    assert revealed == ['"tuple[float, float]"', '"Difference | None"', '"str"']
    errors = [each["range"]["start"]["line"] + 1 for each in said if each["severity"] == "error"]
    assert errors == [1, 5, 6, 7, 8]


# --- what is refused ------------------------------------------------------------------------------


def refuse_torch(*_, **__):
    raise AssertionError("a model would load")


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda folder: api.train(SFTArgs()), "RLArgs(...) is wanted here, not SFTArgs"),
        (lambda folder: api.train(PlanArgs()), "RLArgs(...) is wanted here, not PlanArgs"),
        (lambda folder: api.evaluate(None), "EvaluateArgs(...) is wanted here, not NoneType"),
        (lambda folder: api.train(RLArgs(preview=2)), "--preview: is for the command line"),
        (
            lambda folder: api.train(RLArgs(sft_base="nowhere", auto_sft=False)),
            "--sft_base nowhere does not exist: make it with",
        ),
        (
            lambda folder: api.train(RLArgs(task="arithmetik")),
            "did you mean arithmetic?",
        ),
        (
            lambda folder: api.train_sft(SFTArgs(sft_base=str(folder))),
            "exists already: delete it",
        ),
        (
            lambda folder: api.evaluate(EvaluateArgs(model=str(folder / "no"))),
            "no model folder (with a config.json) is there",
        ),
        (lambda folder: api.read_run(folder), "is no run's folder: it has no args.json"),
        (lambda folder: api.compare(), "give the runs, or a sweep's folder"),
        (lambda folder: api.compare(folder), "is no run's folder: it has no args.json"),
        (lambda folder: api.compare(folder, match="stps"), "--match stps: choose one of steps"),
        (lambda folder: api.compare(folder, tie=2), "--tie 2: must be between 0 and 1"),
    ],
)
def test_mistakes_are_exceptions(call, words, tmp_path, monkeypatch):
    monkeypatch.setattr(api, "_compute", refuse_torch)
    with pytest.raises(UserError) as mistake:
        call(tmp_path)
    assert words in str(mistake.value) and "\n" not in str(mistake.value)


def test_sweeps_of_which_no_run_has_finished_compare_nothing(tmp_path):
    folders = (tmp_path / "one", tmp_path / "two")
    for folder in folders:
        folder.mkdir()
        write_sweep(folder, {"a": {}, "b": {}}, (0,))
    with pytest.raises(UserError, match="compare: nothing to compare in .*one, .*two"):
        api.compare(*folders)


def test_the_traceback_of_a_mistake_has_no_lines_of_ours_but_the_call(monkeypatch):
    monkeypatch.setattr(api, "_compute", refuse_torch)
    with pytest.raises(UserError) as mistake:
        api.train(RLArgs(task="nothing"))
    files = [Path(frame.filename).name for frame in traceback.extract_tb(mistake.tb)]
    assert files == ["test_api.py", "api.py", "api.py"]
    assert mistake.value.__suppress_context__


def failing(error: BaseException):
    """What takes the place of a run, and raises."""

    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(28, "No space left on device", "/x"), UserError, "/x: no space left on device"),
        (RunStopped("lost"), RunStopped, "lost"),
        (UsersCodeFailed("theirs"), UsersCodeFailed, "theirs"),
        (ZeroDivisionError("ours"), ZeroDivisionError, "ours"),
    ],
)
def test_errors_of_a_run(error, kind, words, tiny_folder, monkeypatch):
    """What the user can act on is a `UserError`; a fault of ours stays what it is."""
    monkeypatch.setattr(api, "train_by_rl", failing(error))
    with pytest.raises(kind) as raised:
        api.train(RLArgs(sft_base=str(tiny_folder)))
    assert type(raised.value) is kind and str(raised.value) == words


def test_a_notebook_gets_lines_of_text(tiny_folder, monkeypatch, capsys):
    """No pictures, colours or progress bars, although its variables ask for colours."""

    def say(args, console):
        with progress_line("RL", 2, console) as advance:
            advance(2, "said")
        raise RunStopped("enough")

    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(api, "train_by_rl", say)
    with pytest.raises(RunStopped, match="enough"):
        api.train(RLArgs(sft_base=str(tiny_folder)))
    assert capsys.readouterr().out.endswith("RL, step 2 of 2, said\n")


def test_a_call_within_a_call_is_refused(tiny_folder, monkeypatch):
    refusals: list[str] = []

    def call_again(args, console):
        for target in (nested, threading.Thread(target=nested).run):
            target()
        raise RunStopped("enough")

    def nested():
        try:
            api.train(RLArgs(sft_base=str(tiny_folder)))
        except UserError as error:
            refusals.append(str(error))

    monkeypatch.setattr(api, "train_by_rl", call_again)
    for _ in range(2):
        with pytest.raises(RunStopped, match="enough"):
            api.train(RLArgs(sft_base=str(tiny_folder)))
    assert len(refusals) == 4 and all("another call is under way" in line for line in refusals)


def write_math(folder: Path, answer: int) -> None:
    file = folder / "math500" / "test.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"problem": "Find $x$.", "answer": f"{answer}"}) + "\n")


def write_countdown(folder: Path, target: int) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for split in ("train", "test"):
        table = pyarrow.table({"nums": [[len(split), 1]], "target": [target]})
        parquet.write_table(table, folder / f"{split}.parquet")


@pytest.mark.parametrize(
    ("flags", "write", "truths"),
    [
        ({"eval_tasks": ("math500",)}, write_math, ["12", "3"]),
        ({"task": "countdown"}, write_countdown, ["12 = 4 1", "3 = 4 1"]),
    ],
)
def test_each_call_reads_files_anew(flags, write, truths, tiny_folder, tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    seen: list[str] = []

    def look(args, checked, console):
        [task_args] = checked.tasks.values()
        problems = task_args.task_in_format.test_problems(task_args.dataset_path)
        seen.extend(problem.ground_truth for problem in problems)
        raise RunStopped("enough")

    monkeypatch.setattr(api, "evaluate_and_report", look)
    args = EvaluateArgs(model=str(tiny_folder), dataset_path=str(tmp_path), **flags)
    for value in (12, 3):
        write(tmp_path, value)
        with pytest.raises(RunStopped, match="enough"):
            api.evaluate(args)
    assert seen == truths


# --- signals --------------------------------------------------------------------------------------


def sending(number: int):
    """What takes the place of a run, and gets a signal."""

    def send(*_, **__):
        os.kill(os.getpid(), number)
        raise AssertionError("not interrupted")

    return send


@contextlib.contextmanager
def handled(number: int, handler):
    """Within the block the program has its own handler of a signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_ctrl_c_is_a_keyboard_interrupt_and_the_programs_handler_is_back(tiny_folder, monkeypatch):
    monkeypatch.setattr(api, "train_by_rl", sending(signal.SIGINT))
    with handled(signal.SIGINT, signal.default_int_handler):
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt, match="SIGINT") as stop:
                api.train(RLArgs(sft_base=str(tiny_folder)))
            assert stop.value.__suppress_context__
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_is_left_to_the_programs_handler(tiny_folder, monkeypatch):
    monkeypatch.setattr(api, "train_by_rl", sending(signal.SIGTERM))
    got: list[int] = []
    with (
        handled(signal.SIGTERM, lambda number, frame: got.append(number)),
        pytest.raises(RunStopped, match="stopped by SIGTERM"),
    ):
        api.train(RLArgs(sft_base=str(tiny_folder)))
    assert got == [signal.SIGTERM]


# --- records --------------------------------------------------------------------------------------


def written_run(folder: Path, args: dict, **record) -> Path:
    """A folder with an args.json and one evaluation."""
    folder.mkdir()
    (folder / "args.json").write_text(json.dumps({"args": args}))
    facts = {
        "step": 3,
        "avg_all_rewards": 0.25,
        "avg_all_rewards_ci": [0.1, 0.4],
        "avg_format_rewards": 0.75,
        "problems": 8,
        **record,
    }
    facts = {key: value for key, value in facts.items() if value is not None}
    (folder / "evals.jsonl").write_text(json.dumps(facts) + "\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    return folder


def test_a_runs_folder_as_a_record(tmp_path):
    run = api.read_run(written_run(tmp_path / "run", {"task": "arithmetic"}))
    assert run.path == tmp_path / "run" and run.model == tmp_path / "run" / "final"
    assert [step["reward"] for step in run.metrics] == [0.5]
    accuracy = run.accuracy
    assert accuracy == dataclasses.replace(accuracy, value=0.25, interval=(0.1, 0.4), problems=8)
    assert (accuracy.step, accuracy.task, accuracy.format_rate) == (3, "arithmetic", 0.75)
    assert accuracy.model == str(run.model) and isinstance(accuracy, Accuracy)
    assert str(run).splitlines()[1] == "step 3: 0.250 (0.100 .. 0.400), 8 problems"


def test_a_damaged_evaluation_is_named(tmp_path):
    folder = written_run(tmp_path / "run", {}, problems=None)
    with pytest.raises(UserError, match="evals.jsonl is damaged: step 3 has no 'problems'"):
        api.read_run(folder)


def test_two_models_that_were_compared_as_a_record(tmp_path):
    folder = written_run(tmp_path / "run", {"compare": ["a", "b"]}, model="b", task="svamp")
    summary = {"compare": ["a", "b"], "difference": 0.125, "interval": [-0.05, 0.3]}
    (folder / "summary.json").write_text(json.dumps(summary))
    result = api.read_evaluation_result(folder)
    assert result.difference == Difference(("a", "b"), 0.125, (-0.05, 0.3))
    assert (result.accuracy.model, result.accuracy.task) == ("b", "svamp")
    assert str(result).endswith("b - a: +0.1250 (95 %: -0.0500 .. +0.3000)")


def test_a_call_is_recorded_as_the_command_that_would_do_the_same():
    args = RLArgs(loss_type="gspo", seed=3, trackers=())
    flags = api.command_line(args)
    before = current_command()
    with calling("train_rl", flags):
        inside = current_command()
    assert inside.words[1:] == ("train_rl.py", *flags) and inside.began >= before.began
    assert parse(RLArgs, list(inside.words[2:])) == args
    assert current_command() == before


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture
def small(tiny_folder, tmp_path, undrawn_curve):
    """Arguments of a run of two steps, in the folder `tmp_path`."""
    return RLArgs(
        sft_base=str(tiny_folder),
        output_dir=str(tmp_path),
        num_steps=2,
        prompts_per_rollout=4,
        group_size=4,
        train_mini_batch_size=8,
        max_new_tokens=16,
        max_problems=4,
        num_problems=64,  # of 23,677, all of which every start would encode
        warmup_steps=0,
        reward="random",
        trackers=(),
    )


def weights(run) -> str:
    return digest(run.model / "model.safetensors")


@pytest.mark.slow
def test_calls_leave_nothing_behind_and_repeat_to_the_bit(small):
    """The second call in a process, and one in another thread, as the first."""
    import torch

    torch.manual_seed(7)
    state = torch.get_rng_state()
    first = api.train(small)
    second = api.train(dataclasses.replace(small, deterministic=True))
    in_thread: list = []
    thread = threading.Thread(target=lambda: in_thread.append(api.train(small)))
    thread.start()
    thread.join()
    assert weights(first) == weights(second) == weights(in_thread[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.are_deterministic_algorithms_enabled()
    assert first.path.name == "tiny_grpo_clip_seed0" and second.path.name.endswith("-2")
    assert [step["step"] for step in first.metrics] == [1, 2]
    assert [accuracy.step for accuracy in first.accuracies] == [0, 2]
    command = read_json(first.path / "args.json")["command"]
    assert command[1] == "train_rl.py" and parse(RLArgs, command[2:]) == small
    assert read_json(first.path / "summary.json")["seconds_beside_steps"] < 600


@pytest.mark.slow
def test_an_interrupted_run_goes_on_to_the_same_bits(small, monkeypatch, capsys):
    undisturbed = api.train(dataclasses.replace(small, run_name="undisturbed"))
    sample = SyncRollouts.next

    def interrupt_the_second(self, step: int):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return sample(self, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(SyncRollouts, "next", interrupt_the_second)
        api.train(dataclasses.replace(small, run_name="stopped"))
    assert "stopped after step 1 (SIGINT); go on with:" in capsys.readouterr().out
    stopped = Path(small.output_dir) / "stopped"
    resumed = api.train(args_of_run(RLArgs, stopped))
    assert resumed.path == stopped and weights(resumed) == weights(undisturbed)


@pytest.mark.slow
def test_processes_of_ranks_end_with_the_call(small):
    run = api.train(dataclasses.replace(small, policy_ranks=2, policy_parallelism="replicated"))
    assert len(run.metrics) == 2
    assert len(api.train(small).metrics) == 2


@pytest.mark.slow
def test_the_script_of_the_page_runs_from_top_to_bottom(
    tmp_path, monkeypatch, capsys, undrawn_curve
):
    """With fewer steps, problems and prompts, as cells of a notebook run: in this process."""
    text = (ROOT / "docs" / "from_python.py").read_text()
    for name, number in {"WARM_UP_STEPS": 10, "NUM_STEPS": 2, "MAX_PROBLEMS": 16}.items():
        text, changes = re.subn(rf"(?m)^{name} = \d+", f"{name} = {number}", text)
        assert changes == 1
    assert text.count("num_steps=NUM_STEPS,") == 1
    smaller = "num_steps=NUM_STEPS, num_problems=64, prompts_per_rollout=4,"
    text = text.replace("num_steps=NUM_STEPS,", smaller)
    script = tmp_path / "from_python.py"
    script.write_text(text)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "--group_sise: there is no such flag (did you mean --group_size?)" in said
    assert "loss_type grpo_clip - loss_type no_baseline" in said.partition("final accuracy")[2]
    names = [path.name for path in (tmp_path / "checkpoints" / "from_python").glob("tiny_*seed?")]
    losses = ("grpo_clip", "no_baseline")
    assert sorted(names) == [f"tiny_{loss}_seed{seed}" for loss in losses for seed in (0, 1)]


def test_verdicts_print_as_the_report_does(tmp_path, capsys, monkeypatch):
    """Of two arms with two seeds each."""
    monkeypatch.setenv("COLUMNS", "120")
    runs: list[Path] = []
    for loss_type, accuracy in (("grpo_clip", 0.9), ("no_baseline", 0.3)):
        for seed in range(2):
            folder = tmp_path / f"{loss_type}{seed}"
            runs.append(make_run(folder, seed, accuracy, loss_type=loss_type, num_steps=4))
    verdicts = api.compare(*runs)
    # drawing takes seconds
    monkeypatch.setattr("alignment.ablation.report.write_report", lambda study, folder: [folder])
    words = ["report", "--runs", *map(str, runs)]
    assert exit_code(monkeypatch, report.main, *words) == 0
    printed = capsys.readouterr().out.rsplit("report: ", 1)[0].rstrip()
    assert str(verdicts) == printed
    # as in a notebook, whose variables ask for colours too
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(verdicts) == printed
    [comparison] = verdicts.comparisons
    assert isinstance(comparison, Comparison) and comparison.seeds == 2
    assert comparison.difference == pytest.approx(0.6)
    with pytest.raises(UserError, match="nothing to compare"):
        api.compare(*runs[:2])


def test_the_records_of_verdicts_are_public():
    assert alignment.Verdicts is Verdicts and alignment.Comparison is Comparison
