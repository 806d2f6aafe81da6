"""Ours and TRL's GRPOTrainer: the same loss and gradient from one batch, then the same training,
side by side in one run.

uv run --extra trl -m benchmarks.vs_trl --steps 40
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment import train_rl
from alignment.args import EvaluateArgs, RLArgs, from_preset
from alignment.builders.devices import roles_of
from alignment.core.losses import grpo_microbatch_train_step, loss_denominator
from alignment.core.records import Distribution, Rollout, SamplingConfig
from alignment.core.tokens import pad_token_id
from alignment.data.tasks import find_task
from alignment.evaluate import evaluate_models
from alignment.model.frozen import model_values
from alignment.model.loading import load_model, load_tokenizer
from alignment.rewards.rules import find_reward
from alignment.rollouts.config import problems_of_step
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.sampling.transformers import TransformersSampler

# Name: our arguments, and TRL's for the same loss. In TRL's CISPO epsilon_high is the bound itself.
LOSSES = {
    "GRPO": ({}, {"loss_type": "grpo"}),
    "GRPO, token mean (BNPO)": ({"loss_normalization": "token_mean"}, {"loss_type": "bnpo"}),
    "DAPO": (
        {"loss_normalization": "token_mean", "cliprange_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "Dr. GRPO": ({"loss_normalization": "constant"}, {"loss_type": "dr_grpo"}),
    "GSPO": ({"loss_type": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    "CISPO": (
        {
            "loss_type": "cispo",
            "loss_normalization": "token_mean",
            "cliprange": 1.0,
            "cliprange_high": 1.0,
        },
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ),
    "GRPO, dual clip": ({"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "GRPO, KL": (
        {"beta": 0.1},
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
}


def main(
    steps: int = 40,
    preset: str = "tiny",
    model: str = "checkpoints/tiny_sft",
    seed: int = 0,
    one: str = "",
) -> None:
    """Compare on `model`, warmed up by `alignment.sft`; `one` is for the processes that this
    starts."""
    args = from_preset(
        RLArgs,
        preset,
        seed=seed,
        num_steps=steps,
        sft_base=model,
        eval_interval=10**6,
        save_interval=10**6,
    )
    if one:
        print(json.dumps({"ours": train_ours, "TRL": train_trl}[one](args)))
        return
    console = Console()
    console.print(same_batch(args, model))
    console.print(same_training(args, model, steps, seed))


# --- one batch ------------------------------------------------------------------------------------


def same_batch(args: RLArgs, model: str) -> Table:
    """Loss and gradient of both from one rollout, after weights that have moved since it was
    sampled."""
    tokenizer, task = load_tokenizer(model), find_task(args.task)
    policy, reference = (load_model(model, ("cpu",), torch.float32) for _ in range(2))
    problems = problems_of_step(task.problems("train", ""), 8, args.seeds["data"], 1)
    completions = TransformersSampler(policy, tokenizer, 256).sample(
        [problem.prompt for problem in problems],
        SamplingConfig(n=args.group_size, max_new_tokens=args.max_new_tokens, stop=()),
    )
    groups = find_reward(args.reward, task.rules).score(problems, completions)
    rollout = collate_groups(groups, args.rollout_config, pad_token_id(tokenizer))
    rollout = with_advantages(rollout, args.update_config.advantage)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.03 * torch.randn_like(parameter))
    old_BT, reference_BT = rollout.sampler_log_probs_BT, log_probs(reference, rollout)
    table = Table(
        title=f"one batch of {len(rollout.lengths)} responses, ratios to the old policy not 1"
    )
    for heading in ("loss", "ours", "TRL", "difference", "gradient, relative"):
        table.add_column(heading, justify="right" if heading != "loss" else "left")
    for name, (own, their) in LOSSES.items():
        rl = dataclasses.replace(args, **own)
        (ours, gradient), (theirs, other) = (
            our_loss(policy, rollout, rl, old_BT, reference_BT),
            trl_loss(policy, tokenizer, rollout, rl, their, old_BT, reference_BT),
        )
        relative = ((gradient - other).norm() / gradient.norm()).item()
        table.add_row(
            name, f"{ours:.7f}", f"{theirs:.7f}", f"{abs(ours - theirs):.1e}", f"{relative:.1e}"
        )
        assert abs(ours - theirs) < 1e-4 and relative < 1e-4, name
    return table


@torch.no_grad()
def log_probs(model, rollout: Rollout) -> torch.Tensor:
    return model_values(model, rollout.batch, Distribution(), torch.float32, ("log_probs",))[0]


def our_loss(
    policy, rollout: Rollout, args: RLArgs, old_BT, reference_BT
) -> tuple[float, torch.Tensor]:
    policy.zero_grad()
    loss, _ = grpo_microbatch_train_step(
        model_values(policy, rollout.batch, Distribution(), torch.float32, ("log_probs",))[0],
        rollout.batch.response_mask,
        1,
        args.loss_type,
        advantages=rollout.advantages_B1,
        old_log_probs=old_BT,
        cliprange=args.cliprange,
        loss_normalization=args.loss_normalization,
        denominator=loss_denominator(args.loss_normalization, rollout.lengths, args.max_new_tokens),
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
        beta=args.beta,
        reference_log_probs=reference_BT,
    )
    return loss.item(), flat_gradient(policy)


def flat_gradient(policy) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def trl_loss(
    policy, tokenizer, rollout: Rollout, args: RLArgs, options: dict, old_BT, reference_BT
):
    """TRL's own `_compute_loss`, given the same responses in its layout: prompts padded left,
    completions right."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(policy, tokenizer, args, folder, **options)
        trainer.current_gradient_accumulation_steps = 1
        inputs = trl_inputs(rollout, pad_token_id(tokenizer), old_BT, reference_BT)
        trainer.args.steps_per_generation = 1
        policy.zero_grad()
        policy.train()
        loss = trainer._compute_loss(policy, inputs)
        loss.backward()
        return loss.item(), flat_gradient(policy)


def trl_inputs(
    rollout: Rollout, pad: int, old_BT: torch.Tensor | None, reference_BT: torch.Tensor | None
) -> dict:
    """A rollout as TRL's `_compute_loss` takes it."""
    mask = rollout.batch.response_mask
    first, lengths = mask.int().argmax(dim=1), mask.sum(dim=1)
    widest = int(first.max()) + 1

    def responses(values_BT, fill):
        rows = [row[of_response] for row, of_response in zip(values_BT, mask, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    prompts = [ids[: n + 1] for ids, n in zip(rollout.batch.input_ids, first, strict=True)]
    return {
        "prompt_ids": torch.stack(
            [torch.cat([torch.full((widest - len(ids),), pad), ids]) for ids in prompts]
        ),
        "prompt_mask": torch.stack(
            [(torch.arange(widest) >= widest - len(ids)).long() for ids in prompts]
        ),
        "completion_ids": responses(rollout.batch.labels, pad),
        "completion_mask": (torch.arange(int(lengths.max()))[None] < lengths[:, None]).long(),
        "advantages": rollout.advantages_B1.squeeze(1),
        "old_per_token_logps": None if old_BT is None else responses(old_BT, 0.0),
        "ref_per_token_logps": None if reference_BT is None else responses(reference_BT, 0.0),
        "num_items_in_batch": lengths.sum(),
    }


def make_trainer(policy, tokenizer, args: RLArgs, folder: str, **options):
    """TRL's trainer at our hyper-parameters."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    task = find_task(args.task)
    reward = find_reward(args.reward, task.rules)
    problems, number = task.problems("train", ""), args.prompts_per_rollout
    rows = [
        p
        for step in range(1, args.num_steps + 1)
        for p in problems_of_step(problems, number, args.seeds["data"], step)
    ]

    def reward_fn(prompts, completions, ground_truth, **columns):
        return [
            reward.rule(text, truth)["reward"]
            for text, truth in zip(completions, ground_truth, strict=True)
        ]

    settings = {
        "output_dir": folder,
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": args.num_steps * args.updates_per_rollout,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": args.warmup_steps,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": args.weight_decay,
        "max_grad_norm": args.max_grad_norm,
        "per_device_train_batch_size": args.train_mini_batch_size,
        "generation_batch_size": args.rollout_size,
        "num_generations": args.group_size,
        "max_completion_length": args.max_new_tokens,
        "temperature": args.sampling_temperature,
        "epsilon": args.cliprange,
        "beta": 0.0,
        "bf16": False,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "logging_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": args.seed,
    }
    config = GRPOConfig(**{**settings, **options})
    data = Dataset.from_list([{"prompt": p.prompt, "ground_truth": p.ground_truth} for p in rows])
    return GRPOTrainer(policy, reward_fn, config, train_dataset=data, processing_class=tokenizer)


# --- one training ---------------------------------------------------------------------------------


def train_ours(args: RLArgs) -> dict:
    """Our training; its seconds are those of the steps."""
    folder = Path(tempfile.mkdtemp())
    with contextlib.redirect_stdout(io.StringIO()):
        run = train_rl.train(
            dataclasses.replace(args, output_dir=str(folder), max_problems=8), Console(quiet=True)
        )
    seconds = json.loads((run / "summary.json").read_text())["seconds"]
    return {"model": str(run / "final"), "seconds": seconds, "peak": peak()}


def train_trl(args: RLArgs) -> dict:
    """TRL's training, its model saved as ours is."""
    folder = tempfile.mkdtemp()
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(args.sft_base)
    policy = AutoModelForCausalLM.from_pretrained(args.sft_base, dtype=torch.float32)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(policy, tokenizer, args, folder)
        start = time.perf_counter()
        trainer.train()
    seconds = time.perf_counter() - start
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return {"model": folder, "seconds": seconds, "peak": peak()}


def peak() -> float:
    """Most memory that this process has had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1024 if sys.platform == "linux" else 2**20
    )


def same_training(args: RLArgs, model: str, steps: int, seed: int) -> Table:
    """Both from the same warm start, prompts and hyper-parameters, in processes of their own;
    evaluated by us."""
    table = Table(title=f"{steps} steps of {args.rollout_size} responses from {model}, seed {seed}")
    for heading in ("", "accuracy before", "after", "95 %", "seconds of RL", "peak MiB"):
        table.add_column(heading, justify="right" if heading else "left")
    before = accuracy(args, model)[0]
    command = [
        sys.executable,
        "-m",
        "benchmarks.vs_trl",
        "--steps",
        str(steps),
        "--model",
        model,
        "--seed",
        str(seed),
    ]
    seconds = {}
    for name in ("ours", "TRL"):
        done = subprocess.run(
            [*command, "--one", name], capture_output=True, text=True, check=False, env=os.environ
        )
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        trained = json.loads(done.stdout.strip().splitlines()[-1])
        mean, (low, high) = accuracy(args, trained["model"])
        seconds[name] = trained["seconds"]
        table.add_row(
            name,
            f"{before:.3f}",
            f"{mean:.3f}",
            f"{low:.3f} .. {high:.3f}",
            f"{trained['seconds']:.0f}",
            f"{trained['peak']:.0f}",
        )
    table.caption = f"TRL's seconds over ours: {seconds['TRL'] / seconds['ours']:.2f}"
    return table


def accuracy(args: RLArgs, model: str) -> tuple[float, tuple[float, float]]:
    evaluation = from_preset(EvaluateArgs, args.preset)
    ((_, _, evaluated),) = evaluate_models(
        evaluation,
        [model],
        {evaluation.task: evaluation},
        roles_of(evaluation),
        Console(quiet=True),
    )
    record = evaluated.record
    return record["avg_all_rewards"], record["avg_all_rewards_ci"]


if __name__ == "__main__":
    tyro.cli(main)
