"""Whole commands with vLLM."""

from __future__ import annotations

import json
import sys

import psutil

from alignment import evaluate, train_rl
from alignment.system.files import read_jsonl


def engines() -> list[psutil.Process]:
    """The processes of vLLM that this process has started."""
    return [
        child
        for child in psutil.Process().children()
        if "alignment.sampling.vllm:serve" in child.cmdline()
    ]


def test_reinforcement_learning_and_evaluation(tiny_folder, tmp_path, monkeypatch, capsys):
    shared = ["--output_dir", str(tmp_path), "--sampler", "vllm", "--max_problems", "16"]
    small = [
        "--prompts_per_rollout",
        "8",
        "--group_size",
        "4",
        "--train_mini_batch_size",
        "16",
        "--num_steps",
        "2",
        "--num_problems",
        "64",  # of 23,677, all of which every start would encode
    ]
    # which an untrained model earns too: what has no gradient is not compared
    small += [
        "--reward",
        "random",
    ]
    flags = [*shared, *small, "--sft_base", str(tiny_folder), "--learning_rate", "1e-3"]
    monkeypatch.setattr(sys, "argv", ["alignment.train_rl", *flags])
    before = engines()  # The engine that other files' tests share may be at work.
    train_rl.main()
    assert engines() == before, "a process is left behind"
    assert "held-out problems" in capsys.readouterr().out
    run = tmp_path / "tiny_grpo_clip_seed0"
    # The second rollout is sampled with refreshed weights; stale ones would be far beyond rounding.
    assert [record["sampler_mismatch"] < 1e-4 for record in read_jsonl(run / "metrics.jsonl")] == [
        True,
        True,
    ]
    monkeypatch.setattr(
        sys,
        "argv",
        ["alignment.evaluate", *shared, "--model", str(run / "final"), "--run_name", "again"],
    )
    evaluate.main()
    assert "avg_all_rewards" in capsys.readouterr().out
    ours, theirs = (
        json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "again", run)
    )
    # same weights, same seed, same samples
    assert ours["response_length"] == theirs["after"]["response_length"]
