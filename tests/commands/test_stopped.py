"""What is paid for is kept: a signal leaves the answers to the first problems, and a folder that
cannot be written is found first."""

import errno
import json
import os
import signal
from pathlib import Path

import pytest
from command_line import exit_code

from alignment import evaluate, rejection_sample, sft, sweep, train_rl
from alignment.builders import samplers
from alignment.runs.run_folder import RunFolder
from alignment.sampling import sampler as sampler_module
from alignment.sampling.transformers import TransformersSampler
from alignment.system import files
from alignment.system.files import read_json, read_jsonl

SIZES = ["--max_new_tokens", "4", "--prompt", "tiny", "--trackers"]


@pytest.fixture
def sigterm_at(monkeypatch):
    """A function that has SIGTERM sent when so many responses have ended, of pieces of 4, 4, 8, 16
    responses, and so on."""
    monkeypatch.setattr(samplers, "FIRST_PIECE", {"cpu": 4, "cuda": 4})
    sample, ended = TransformersSampler.sample, []

    def set_up(number: int, grace: float) -> None:
        monkeypatch.setattr(sampler_module, "GRACE", grace)

        def counted(self, prompts, sampling, on_response_end=None):
            def count(*response):
                ended.append(response)
                if len(ended) == number:
                    os.kill(os.getpid(), signal.SIGTERM)
                    signal.sigtimedwait([], 0.3)  # time for a timer of the grace
                if on_response_end:
                    on_response_end(*response)

            return sample(self, prompts, sampling, count)

        monkeypatch.setattr(TransformersSampler, "sample", counted)

    return set_up


@pytest.fixture
def run(tiny_folder, tmp_path, monkeypatch, capsys):
    """A function that evaluates the tiny model; returns the exit code, what was printed, and the
    folders that were made."""

    def running(*flags: str):
        monkeypatch.setenv("COLUMNS", "200")
        words = [
            "alignment.evaluate",
            "--model",
            str(tiny_folder),
            "--output_dir",
            str(tmp_path / "out"),
            *SIZES,
            *flags,
        ]
        code = exit_code(monkeypatch, evaluate.main, *words)
        return code, capsys.readouterr(), sorted((tmp_path / "out").glob("*"))

    return running


@pytest.mark.parametrize(
    ("number", "grace", "samples", "kept"),
    [
        (10, 60, 1, 16),  # the piece that the signal interrupts is finished
        (10, 0.05, 1, 8),  # it takes longer than the grace, so that it is left out
        pytest.param(4, 60, 1, 4, marks=pytest.mark.slow),
        # problems of two responses: pieces of 2, 2, 4 problems
        pytest.param(5, 60, 2, 4, marks=pytest.mark.slow),
    ],
)
def test_sigterm_leaves_what_an_evaluation_of_the_first_problems_gives(
    number, grace, samples, kept, sigterm_at, run, monkeypatch
):
    each = ["--num_samples", str(samples)]
    with monkeypatch.context():
        sigterm_at(number, grace)
        code, printed, (folder,) = run("--max_problems", "20", "--run_name", "stopped", *each)
    assert code == 128 + signal.SIGTERM
    assert f"{kept} problems, the first of 20, in" in printed.out
    assert f"was evaluated on the first {kept} of 20 problems" in printed.out
    assert printed.err.splitlines()[-1] == "interrupted by SIGTERM"
    (record,) = read_jsonl(folder / "evals.jsonl")
    assert (record["problems"], record["left_out"]) == (kept, 20 - kept)
    assert not (folder / "summary.json").exists()  # which says that an evaluation is finished
    sigterm_at(-1, 60)
    _, _, (whole, _) = run("--max_problems", str(kept), "--run_name", "first", *each)
    (expected,) = read_jsonl(whole / "evals.jsonl")
    measured = {
        key: value for key, value in record.items() if key not in ("seconds", "left_out", "step")
    }
    assert measured == {key: expected[key] for key in measured}
    written = [(path / "completions" / "eval_000000.jsonl").read_text() for path in (folder, whole)]
    assert written[0] == written[1]


def test_a_signal_after_the_last_response_leaves_a_finished_evaluation(sigterm_at, run):
    sigterm_at(8, 60)
    code, printed, (folder,) = run("--max_problems", "8")
    assert code == 128 + signal.SIGTERM and read_json(folder / "summary.json")["problems"] == 8
    assert "the first" not in printed.out


def test_a_signal_before_the_first_piece_ends_leaves_nothing(sigterm_at, run):
    sigterm_at(2, 0.05)
    code, printed, folders = run("--max_problems", "8")
    assert (
        code == 128 + signal.SIGTERM
        and printed.err.splitlines()[-1] == "interrupted by SIGTERM"
        and not folders
    )


def test_the_second_of_two_models_leaves_the_first(sigterm_at, run, tiny_folder):
    sigterm_at(20 + 6, 60)
    code, printed, (folder,) = run(
        "--max_problems", "20", "--compare", str(tiny_folder), str(tiny_folder)
    )
    assert (
        code == 128 + signal.SIGTERM
        and "was evaluated on the first 8 of 20 problems" in printed.out
    )
    assert [record.get("left_out") for record in read_jsonl(folder / "evals.jsonl")] == [None, 12]


def test_a_disk_that_is_full_after_sampling_leaves_the_printed_table(run, monkeypatch):
    def full(self, *given) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / "evals.jsonl"))

    monkeypatch.setattr(RunFolder, "log_eval", full)
    code, printed, (folder,) = run("--max_problems", "8")
    assert code == 2 and "8 problems in" in printed.out and "avg_all_rewards" not in printed.err
    assert (
        printed.err.splitlines()[-1] == f"error: {folder / 'evals.jsonl'}: no space left on device"
    )


def test_rejection_sampling_keeps_the_answers_to_the_first_problems(
    sigterm_at, tiny_folder, tmp_path, monkeypatch, capsys
):
    right = {"reward": 1.0, "format_reward": 1.0, "answer_reward": 1.0}
    monkeypatch.setattr(rejection_sample, "find_rule", lambda *given: lambda response, truth: right)
    monkeypatch.setattr(rejection_sample, "rejection_reason", lambda *given: None)
    sigterm_at(6, 60)
    flags = [
        "--model",
        str(tiny_folder),
        "--num_problems",
        "20",
        "--num_samples",
        "2",
        "--output_dir",
        str(tmp_path),
    ]
    words = [
        "alignment.rejection_sample",
        *flags,
        "--output",
        str(tmp_path / "kept.jsonl"),
        "--max_new_tokens",
        "4",
    ]
    assert (
        exit_code(monkeypatch, rejection_sample.main, *words, "--prompt", "tiny")
        == 128 + signal.SIGTERM
    )
    # A pipeline takes kept.jsonl for that of a finished stage.
    assert not (tmp_path / "kept.jsonl").exists()
    rows = [json.loads(line) for line in (tmp_path / "kept.jsonl.stopped").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 4
    assert "these are the first 4 problems" in capsys.readouterr().err


COMMANDS = {
    "evaluate": (evaluate.main, []),
    "train_rl": (train_rl.main, ["--sft_base", ""]),
    "sft": (sft.main, ["--sft_base", "FOLDER/sft"]),
    "sweep": (sweep.main, ["--sft_base", "", "--executor", "local"]),
    "rejection_sample": (rejection_sample.main, ["--output", "FOLDER/kept.jsonl"]),
}


@pytest.mark.parametrize("fault", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EACCES])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_cannot_be_written_is_found_before_a_model_loads(
    command, fault, tmp_path, monkeypatch, capsys
):
    main, flags = COMMANDS[command]
    folder = tmp_path / "results" / "mine"

    def fail(path: Path) -> None:
        raise OSError(fault, os.strerror(fault))

    monkeypatch.setattr(files, "flush", fail)
    words = [flag.replace("FOLDER", str(folder)) for flag in flags] + ["--output_dir", str(folder)]
    assert exit_code(monkeypatch, main, f"alignment.{command}", *words) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert (
        line.startswith(f"error: {folder}")
        and f": {os.strerror(fault).lower()}: nothing could be saved there" in line
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_sft_that_is_stopped_in_its_last_evaluation_has_its_model(
    sigterm_at, tiny_folder, tmp_path, monkeypatch, capsys
):
    sigterm_at(6, 60)
    sizes = ["--num_steps", "1", "--batch_size", "4", "--max_problems", "20", *SIZES]
    words = [
        "alignment.sft",
        "--model",
        str(tiny_folder),
        "--output_dir",
        str(tmp_path),
        "--sft_base",
        str(tmp_path / "sft"),
    ]
    assert exit_code(monkeypatch, sft.main, *words, *sizes) == 128 + signal.SIGTERM
    assert "8 problems, the first of 20, in" in capsys.readouterr().out
    assert (
        read_json(tmp_path / "sft" / "manifest.sha256.json")
        and not (tmp_path / "sft" / "summary.json").exists()
    )
