"""Whole evaluations on benchmarks and on a run's checkpoints: the table, the files, and the shapes
that other programs read."""

import json
import re
import shutil
import sys

import pytest

from alignment import evaluate
from alignment.rewards import rules
from alignment.rewards.r1_zero import extract_answer
from alignment.rewards.rules import RULES
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_jsonl

pytest.importorskip("datasets")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder with two benchmarks, GSM8K of 3 problems and AIME 2024 of 2."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    gsm8k = [
        {"question": f"What is {n} + 2?", "answer": f"It is so.\n#### {n + 2}"} for n in range(3)
    ]
    aime24 = [
        {"id": n, "problem": f"What is {n} * 2?", "answer": f"0{2 * n}", "year": "2024"}
        for n in range(2)
    ]
    for name, rows in (("gsm8k/test.jsonl", gsm8k), ("aime24/train.jsonl", aime24)):
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "data"


@pytest.fixture
def run_folder(tiny_folder, tmp_path):
    """A run's folder with two checkpoints and a final model."""
    for name in ("step_000020", "step_000040", "final"):
        shutil.copytree(tiny_folder, tmp_path / "a_run" / name)
    return tmp_path / "a_run"


@pytest.fixture
def made_up_reward(monkeypatch):
    """Rewards that an untrained model earns now and then, so that no figure is 0 for want of
    skill."""

    def reward_fn(text: str, truth: str) -> dict[str, float]:
        return {
            "reward": float(sum(map(ord, text)) % 2),
            "format_reward": 1.0,
            "answer_reward": 1.0,
        }

    monkeypatch.setitem(RULES, "r1_zero", reward_fn)
    monkeypatch.setitem(rules._EXTRACTORS, reward_fn, extract_answer)  # it has majorities, too


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A function that evaluates, and gives what was printed and the folder that was written."""

    def running(*flags: str):
        shared = [
            "--output_dir",
            str(tmp_path / "out"),
            "--max_new_tokens",
            "4",
            "--prompt",
            "tiny",
        ]
        monkeypatch.setattr(sys, "argv", ["alignment.evaluate", *shared, *map(str, flags)])
        monkeypatch.setenv("COLUMNS", "120")
        evaluate.main()
        (folder,) = (tmp_path / "out").iterdir()
        return capsys.readouterr().out, folder

    return running


def rows_of(printed: str) -> list[list[str]]:
    """The cells of the table's rows: model, task, problems, metric, value, interval, smallest
    difference."""
    lines = printed.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("model "))
    return [
        re.split(" {2,}", line) for line in lines[start + 1 :] if re.search(r"  \S*@\d+ ", line)
    ]


@pytest.mark.slow
def test_benchmarks_and_the_checkpoints_of_a_run_are_one_table(
    run, run_folder, data, made_up_reward
):
    printed, folder = run(
        "--model",
        run_folder,
        "--eval_tasks",
        "gsm8k",
        "aime24",
        "--dataset_path",
        data,
        "--num_samples",
        "2",
    )
    rows, models = rows_of(printed), ["step_000020", "step_000040", "final"]
    metrics = ["avg@2", "pass@1", "pass@2", "maj@2"]
    tasks = {"gsm8k": "3/1319", "aime24": "2/30"}  # problems of those published
    expected = [
        [f"{run_folder}/{m}", task, of, metric]
        for m in models
        for task, of in tasks.items()
        for metric in metrics
    ]
    assert [row[:4] for row in rows] == expected
    assert all(float(row[6]) > 0 and " .. " in row[5] for row in rows)
    assert "categories" not in printed and "avg_format_rewards" not in printed
    assert "best" not in printed

    evaluations = read_json(folder / "summary.json")["evaluations"]
    assert [(e["model"].rpartition("/")[2], e["task"]) for e in evaluations] == [
        (m, task) for m in models for task in tasks
    ]
    values = [
        f"{figure['value']:.3f}"
        for e in evaluations
        for name, figure in e["figures"].items()
        if "@" in name
    ]
    assert values == [row[4] for row in rows]
    records = read_jsonl(folder / "evals.jsonl")
    assert [record["step"] for record in records] == list(range(6)) and {
        record["task"] for record in records
    } == {
        "gsm8k",
        "aime24",
    }
    completions = read_jsonl(folder / "completions/eval_000001.jsonl")
    assert [line["problem"] for line in completions] == [
        "aime24/0",
        "aime24/0",
        "aime24/1",
        "aime24/1",
    ]
    assert not (folder / "tensorboard").exists()  # evaluations of several tasks are no curve


def only(folder, pattern: str) -> dict:
    (file,) = folder.glob(pattern)
    return read_json(file)


@pytest.mark.slow
def test_the_shape_of_lm_evaluation_harness(run, run_folder, data, made_up_reward):
    """The fixed fields of `EvalResults`, `_TaskMetrics`, `_SampleCount` and `_EvalConfig` of its
    version 0.4.13."""
    _, folder = run(
        "--model",
        run_folder,
        "--eval_tasks",
        "gsm8k",
        "aime24",
        "--dataset_path",
        data,
        "--num_samples",
        "2",
    )
    assert len(list(folder.glob("lm_eval/*/results_*.json"))) == 3
    found = only(folder, "lm_eval/final/results_*.json")
    per_task = (
        "results",
        "configs",
        "versions",
        "n-shot",
        "higher_is_better",
        "n-samples",
        "group_subtasks",
    )
    assert all(list(found[name]) == ["gsm8k", "aime24"] for name in per_task)
    figures = next(
        e for e in read_json(folder / "summary.json")["evaluations"] if e["model"].endswith("final")
    )["figures"]
    metrics = found["results"]["gsm8k"]
    assert (metrics.pop("name"), metrics.pop("alias"), metrics.pop("sample_len")) == (
        "gsm8k",
        "gsm8k",
        3,
    )
    wanted = {}
    for name in ("avg@2", "pass@1", "pass@2", "maj@2"):
        wanted |= {
            f"{name},r1_zero": figures[name]["value"],
            f"{name}_stderr,r1_zero": figures[name]["std_error"],
        }
    assert (
        metrics == wanted
        and len({figures["avg@2"][name] for name in ("value", "std_error")} | {0.0}) == 3
    )
    assert found["n-samples"] == {
        "gsm8k": {"original": 1319, "effective": 3},
        "aime24": {"original": 30, "effective": 2},
    }
    assert found["n-shot"] == {"gsm8k": 0, "aime24": 0} and found["versions"] == {
        "gsm8k": 1,
        "aime24": 1,
    }
    assert found["higher_is_better"]["aime24"] == dict.fromkeys(
        ("avg@2", "pass@1", "pass@2", "maj@2"), True
    )
    assert (
        found["config"]["model_args"] == f"pretrained={run_folder}/final"
        and found["config"]["random_seed"] == 0
    )
    config = found["configs"]["gsm8k"]
    assert (config["dataset_path"], config["dataset_name"], config["test_split"]) == (
        "openai/gsm8k",
        "main",
        "test",
    )
    assert (config["repeats"], config["num_fewshot"], config["metadata"]["prompt"]) == (
        2,
        0,
        "tiny",
    )
    assert config["generation_kwargs"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "max_gen_toks": 4,
        "do_sample": True,
    }


@pytest.mark.slow
def test_the_shape_of_lighteval(run, run_folder, data):
    """The six parts that its version 0.13.0 writes."""
    _, folder = run(
        "--model",
        run_folder,
        "--eval_tasks",
        "gsm8k",
        "aime24",
        "--dataset_path",
        data,
        "--reward",
        "r1_zero_strict",
    )
    found = only(folder, "lighteval/results/step_000020/results_*.json")
    assert list(found) == [
        "config_general",
        "results",
        "versions",
        "config_tasks",
        "summary_tasks",
        "summary_general",
    ]
    assert all(
        list(found[name]) == ["gsm8k|0", "aime24|0"]
        for name in ("results", "versions", "config_tasks", "summary_tasks")
    )
    assert list(found["results"]["gsm8k|0"]) == [
        "avg@1",
        "avg@1_stderr",
        "pass@1",
        "pass@1_stderr",
        "maj@1",
        "maj@1_stderr",
    ]
    assert found["config_general"]["model_name"] == f"{run_folder}/step_000020"
    config = found["config_tasks"]["aime24|0"]
    assert (config["hf_repo"], config["evaluation_splits"]) == (
        "HuggingFaceH4/aime_2024",
        ["train"],
    )
    assert (config["original_num_docs"], config["effective_num_docs"]) == (30, 2)
    assert (
        sum(found["summary_tasks"]["gsm8k|0"][name] for name in ("truncated", "non_truncated")) == 3
    )
    other = only(folder, "lm_eval/step_000020/results_*.json")
    assert "avg@1,r1_zero_strict" in other["results"]["gsm8k"]  # the rule that has graded


def test_a_runs_checkpoints_on_its_own_task(run, run_folder):
    printed, folder = run("--model", run_folder, "--max_problems", "4")
    models = ("step_000020", "step_000040", "final")
    wanted = [[f"{run_folder}/{model}", "arithmetic", "4", "avg@1"] for model in models]
    assert [row[:4] for row in rows_of(printed)][::3] == wanted
    assert only(folder, "lm_eval/final/results_*.json")["n-samples"] == {
        "arithmetic": {"original": 4, "effective": 4}
    }
    assert folder.name.endswith("_a_run_arithmetic")


@pytest.mark.parametrize("flag", ["--examples", "--few_shot"])
def test_other_programs_files_say_how_many_examples_were_shown(run, tiny_folder, tmp_path, flag):
    value = "2"
    if flag == "--few_shot":
        rows = [{"question": f"1 + {n}?", "response": f" {1 + n}"} for n in range(2)]
        file = tmp_path / "examples.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        value = str(file)
    _, folder = run("--model", tiny_folder, "--max_problems", "2", flag, value)
    harness = only(folder, "lm_eval/*/results_*.json")
    assert harness["n-shot"] == {"arithmetic": 2}
    assert harness["configs"]["arithmetic"]["num_fewshot"] == 2
    lighteval = only(folder, "lighteval/results/*/results_*.json")
    for name in ("results", "versions", "config_tasks", "summary_tasks"):
        assert list(lighteval[name]) == ["arithmetic|2"]
    assert lighteval["summary_tasks"]["arithmetic|2"]["effective_few_shots"] == 2


def test_a_task_of_ones_own_is_a_benchmark_too(run, tiny_folder, data, monkeypatch):
    monkeypatch.syspath_prepend("tests/extending")
    flags = ["--eval_tasks", "gsm8k", "my_package.evens:task", "--dataset_path", data]
    printed, folder = run("--model", tiny_folder, *flags)
    assert f"{tiny_folder}, gsm8k: 3/1319 problems in" in printed
    assert f"{tiny_folder}, my_package.evens:task: 6 problems in" in printed
    # two evaluations have room for all that there is, in lines that fit a terminal
    assert printed.count("avg_format_rewards") == 2 and "format only: " in printed
    tables = [line for line in printed.splitlines() if re.match("metric|avg_", line)]
    assert len(tables) == 8 and max(map(len, tables)) <= 80
    # of one sample a problem these are the mean reward once more
    assert "pass@1" not in printed and "maj@1" not in printed
    assert folder.name.endswith("_gsm8k_my_package.evens.task")


def test_prompts_of_all_benchmarks_are_previewed(run, tiny_folder, data, monkeypatch, capsys):
    monkeypatch.setattr("alignment.evaluate.evaluate_models", None)
    with pytest.raises(FileNotFoundError):  # nothing is written
        run(
            "--model",
            tiny_folder,
            "--eval_tasks",
            "gsm8k",
            "aime24",
            "--dataset_path",
            data,
            "--preview",
            "1",
        )
    printed = capsys.readouterr().out
    assert (
        "gsm8k/0: the prompt" in printed
        and "aime24/0: the prompt" in printed
        and "warning" not in printed
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--eval_tasks", "math5000"],
            "^--eval_tasks math5000: there is no such .*did you mean math500",
        ),
        (
            ["--eval_tasks", "gsm8k", "--compare", "a", "b"],
            "^--compare a b: must be two models, on one --task",
        ),
        (
            ["--eval_tasks", "gsm8k", "--dataset_path", "nowhere"],
            "^--dataset_path nowhere: has no folder gsm8k",
        ),
        (
            ["--eval_tasks", "gsm8k", "--question_column", "q"],
            "has rows of its own: --question_column",
        ),
    ],
)
def test_mistakes_are_one_line(flags, message, run):
    with pytest.raises(UserError, match=message):
        run(*flags)


def test_a_reward_that_is_not_the_tasks_grades_by_the_tasks_own_and_says_so(run, tiny_folder):
    """A part of a training reward is known, but an evaluation is graded by a rule."""
    printed, folder = run(
        "--model", tiny_folder, "--max_problems", 2, "--reward", "format:0.5,accuracy"
    )
    assert "--reward format:0.5,accuracy is a training reward: this grades by r1_zero" in printed
    assert folder.name == f"evaluate_{tiny_folder.parent.name}_model_arithmetic"


@pytest.mark.parametrize("kind", ["file:", "hf:"])
def test_an_evaluation_of_rows_by_their_path_makes_one_folder(kind, run, tiny_folder, tmp_path):
    rows = [
        {"question": f"What is {number} + 2?", "answer": str(number + 2)} for number in range(20)
    ]
    (tmp_path / "my rows").mkdir()
    (tmp_path / "my rows/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    name = "my rows/train.jsonl" if kind == "file:" else "my rows"
    _, folder = run(
        "--model", tiny_folder, "--max_problems", 1, "--task", f"{kind}{tmp_path}/{name}"
    )
    assert (folder / "evals.jsonl").is_file() and len(folder.name.encode()) <= 150
    assert folder.name.startswith(f"evaluate_{tiny_folder.parent.name}_model_{kind.strip(':')}-")
