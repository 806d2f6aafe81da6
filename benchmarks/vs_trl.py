"""Do we and TRL's GRPOTrainer compute the same loss and gradient, and train to the same accuracy?

    uv run --extra trl -m benchmarks.vs_trl --steps 40

First table: of one batch of sampled responses, under weights that have moved since they were
sampled, loss and gradient of each entry of `LOSSES`; a difference beyond 1e-4 is an AssertionError.
Second table: held-out accuracy before and after a training with each, from the same warm start,
prompts and hyper-parameters, evaluated by us, with seconds of training and peak resident memory.
The trainings run one after the other, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import resource
import sys
import tempfile
import time
from dataclasses import dataclass, field

import torch
import tyro
from rich.console import Console
from rich.table import Table

from alignment import train_rl
from alignment.args import EvaluateArgs, RLArgs, from_preset
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
from alignment.system.terminal import make_table
from benchmarks.measuring import output_of

TOLERANCE = 1e-4  # of the loss, and of the gradient, relative
PROMPTS = 8  # of the one batch
CONTEXT = 256  # tokens, of its sampler
WEIGHT_NOISE = 0.03  # standard deviation of what moves the weights from those that sampled


@dataclass(frozen=True)
class Peers:
    """Our arguments, and TRL's options, for the same loss."""

    ours: dict = field(default_factory=dict)
    trl: dict = field(default_factory=dict)


LOSSES = {
    "GRPO": Peers(trl={"loss_type": "grpo"}),
    "GRPO, token mean (BNPO)": Peers({"loss_normalization": "token_mean"}, {"loss_type": "bnpo"}),
    "DAPO": Peers(
        {"loss_normalization": "token_mean", "cliprange_high": 0.28},
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "Dr. GRPO": Peers({"loss_normalization": "constant"}, {"loss_type": "dr_grpo"}),
    "GSPO": Peers(
        {"loss_type": "gspo"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    # in TRL's CISPO epsilon_high is the bound itself
    "CISPO": Peers(
        {
            "loss_type": "cispo",
            "loss_normalization": "token_mean",
            "cliprange": 1.0,
            "cliprange_high": 1.0,
        },
        {"loss_type": "cispo", "epsilon_high": 2.0},
    ),
    "GRPO, dual clip": Peers({"dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "GRPO, KL": Peers(
        {"beta": 0.1},
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
}


# --- one batch ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneBatch:
    """A rollout, and a policy whose weights have moved since it was sampled."""

    policy: torch.nn.Module
    tokenizer: object
    rollout: Rollout
    old_BT: torch.Tensor
    """Log-probs of the weights that sampled it, in nats."""
    reference_BT: torch.Tensor
    """Log-probs of the reference, in nats."""


@dataclass(frozen=True)
class LossAndGradient:
    loss: float
    gradient: torch.Tensor
    """Of all weights, flat [D]."""


def sample_batch(args: RLArgs, model: str) -> OneBatch:
    """A rollout of the model; then its weights are moved."""
    tokenizer = load_tokenizer(model)
    task = find_task(args.task)
    policy = load_model(model, ("cpu",), torch.float32)
    reference = load_model(model, ("cpu",), torch.float32)
    problems = problems_of_step(task.problems("train", ""), PROMPTS, args.seeds["data"], 1)
    completions = TransformersSampler(policy, tokenizer, CONTEXT).sample(
        [problem.prompt for problem in problems],
        SamplingConfig(n=args.group_size, max_new_tokens=args.max_new_tokens, stop=()),
    )
    groups = find_reward(args.reward, task.rules).score(problems, completions)
    rollout = collate_groups(groups, args.rollout_config, pad_token_id(tokenizer))
    rollout = with_advantages(rollout, args.update_config.advantage)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(WEIGHT_NOISE * torch.randn_like(parameter))
    with torch.no_grad():
        reference_BT = log_probs(reference, rollout)
    return OneBatch(policy, tokenizer, rollout, rollout.sampler_log_probs_BT, reference_BT)


def log_probs(model, rollout: Rollout) -> torch.Tensor:
    """A model's log-probs of a rollout's labels [B, T], in nats."""
    values = model_values(model, rollout.batch, Distribution(), torch.float32, ("log_probs",))
    return values[0]


def our_loss(batch: OneBatch, args: RLArgs) -> LossAndGradient:
    """Our loss of the batch."""
    rollout = batch.rollout
    batch.policy.zero_grad()
    loss, _ = grpo_microbatch_train_step(
        log_probs(batch.policy, rollout),
        rollout.batch.response_mask,
        1,
        args.loss_type,
        advantages=rollout.advantages_B1,
        old_log_probs=batch.old_BT,
        cliprange=args.cliprange,
        loss_normalization=args.loss_normalization,
        denominator=loss_denominator(args.loss_normalization, rollout.lengths, args.max_new_tokens),
        cliprange_high=args.cliprange_high,
        dual_clip=args.dual_clip,
        beta=args.beta,
        reference_log_probs=batch.reference_BT,
    )
    return LossAndGradient(loss.item(), flat_gradient(batch.policy))


def trl_loss(batch: OneBatch, args: RLArgs, options: dict) -> LossAndGradient:
    """TRL's own `_compute_loss`, given the same responses."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(batch.policy, batch.tokenizer, args, folder, **options)
        trainer.current_gradient_accumulation_steps = 1
        trainer.args.steps_per_generation = 1
        pad = pad_token_id(batch.tokenizer)
        inputs = trl_inputs(batch.rollout, pad, batch.old_BT, batch.reference_BT)
        batch.policy.zero_grad()
        batch.policy.train()
        loss = trainer._compute_loss(batch.policy, inputs)
        loss.backward()
        return LossAndGradient(loss.item(), flat_gradient(batch.policy))


def flat_gradient(policy: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def trl_inputs(
    rollout: Rollout, pad: int, old_BT: torch.Tensor | None, reference_BT: torch.Tensor | None
) -> dict:
    """A rollout as TRL's `_compute_loss` takes it: prompts padded on the left, responses on the
    right."""
    batch = rollout.batch
    # a row's first response token is the label of its prompt's last one
    last_prompt_place_B = batch.response_mask.int().argmax(dim=1)
    prompt_lengths_B = last_prompt_place_B + 1
    response_lengths_B = batch.response_mask.sum(dim=1)
    widest = int(prompt_lengths_B.max())

    prompt_ids = []
    prompt_masks = []
    for row_ids, length in zip(batch.input_ids, prompt_lengths_B.tolist(), strict=True):
        padding = torch.full((widest - length,), pad)
        prompt_ids.append(torch.cat([padding, row_ids[:length]]))
        prompt_masks.append((torch.arange(widest) >= widest - length).long())

    def pad_responses(values_BT: torch.Tensor | None, fill: float) -> torch.Tensor | None:
        if values_BT is None:
            return None
        rows = []
        for values_T, mask_T in zip(values_BT, batch.response_mask, strict=True):
            rows.append(values_T[mask_T])
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)

    places_T = torch.arange(int(response_lengths_B.max()))
    return {
        "prompt_ids": torch.stack(prompt_ids),
        "prompt_mask": torch.stack(prompt_masks),
        "completion_ids": pad_responses(batch.labels, pad),
        "completion_mask": (places_T[None] < response_lengths_B[:, None]).long(),
        "advantages": rollout.advantages_B1.squeeze(1),
        "old_per_token_logps": pad_responses(old_BT, 0.0),
        "ref_per_token_logps": pad_responses(reference_BT, 0.0),
        "num_items_in_batch": response_lengths_B.sum(),
    }


def make_trainer(policy, tokenizer, args: RLArgs, folder: str, **options):
    """TRL's trainer at our hyper-parameters, but for `options`, with the prompts of our steps in
    our order."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    task = find_task(args.task)
    reward = find_reward(args.reward, task.rules)
    problems = task.problems("train", "")
    rows = []
    for step in range(1, args.num_steps + 1):
        drawn = problems_of_step(problems, args.prompts_per_rollout, args.seeds["data"], step)
        for problem in drawn:
            rows.append({"prompt": problem.prompt, "ground_truth": problem.ground_truth})

    def score(prompts, completions, ground_truth, **columns) -> list[float]:
        pairs = zip(completions, ground_truth, strict=True)
        return [reward.rule(text, truth)["reward"] for text, truth in pairs]

    settings = {
        "output_dir": folder,
        "use_cpu": not torch.cuda.is_available(),
        "max_steps": args.num_steps * args.updates_per_rollout,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": args.warmup_steps,
        "adam_beta1": args.adam_beta1,
        "adam_beta2": args.adam_beta2,
        "adam_epsilon": args.adam_eps,
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
    config = GRPOConfig(**(settings | options))
    data = Dataset.from_list(rows)
    return GRPOTrainer(policy, score, config, train_dataset=data, processing_class=tokenizer)


def table_of_losses(args: RLArgs, model: str) -> Table:
    """Loss and gradient of both from one batch. Raises AssertionError where they differ."""
    batch = sample_batch(args, model)
    rows = []
    for name, peers in LOSSES.items():
        loss_args = dataclasses.replace(args, **peers.ours)
        ours = our_loss(batch, loss_args)
        trl = trl_loss(batch, loss_args, peers.trl)
        difference = abs(ours.loss - trl.loss)
        relative = ((ours.gradient - trl.gradient).norm() / ours.gradient.norm()).item()
        row = (
            name,
            f"{ours.loss:.7f}",
            f"{trl.loss:.7f}",
            f"{difference:.1e}",
            f"{relative:.1e}",
        )
        rows.append(row)
        assert difference < TOLERANCE and relative < TOLERANCE, name
    title = f"one batch of {len(batch.rollout.lengths)} responses, ratios to the old policy not 1"
    numbers = ("ours", "TRL", "difference", "gradient, relative")
    return make_table(title, ("loss", *numbers), rows, numbers=numbers)


# --- one training ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What became of a training."""

    model: str
    """The folder of the trained model."""
    seconds: float
    """Of the steps."""
    peak: float
    """Most memory that the process had resident, in MiB."""


def train_ours(args: RLArgs) -> Training:
    """Our training."""
    run_args = dataclasses.replace(args, output_dir=tempfile.mkdtemp(), max_problems=8)
    with contextlib.redirect_stdout(io.StringIO()):
        run = train_rl.train(run_args, Console(quiet=True))
    seconds = json.loads((run / "summary.json").read_text())["seconds"]
    return Training(str(run / "final"), seconds, peak_memory())


def train_trl(args: RLArgs) -> Training:
    """TRL's training, whose model is saved as ours is."""
    from transformers import AutoModelForCausalLM

    folder = tempfile.mkdtemp()
    tokenizer = load_tokenizer(args.sft_base)
    policy = AutoModelForCausalLM.from_pretrained(args.sft_base, dtype=torch.float32)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = make_trainer(policy, tokenizer, args, folder)
        start = time.perf_counter()
        trainer.train()
    seconds = time.perf_counter() - start
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return Training(folder, seconds, peak_memory())


TRAIN = {"ours": train_ours, "TRL": train_trl}


def peak_memory() -> float:
    """Most memory that this process has had resident, in MiB."""
    units_of_mib = 1024
    if sys.platform == "darwin":  # which counts bytes, where Linux counts KiB
        units_of_mib = 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / units_of_mib


def train_in_process(name: str) -> Training:
    """The training of one peer, in a process of its own with this command's flags."""
    command = [sys.executable, "-m", "benchmarks.vs_trl", *sys.argv[1:], "--one", name]
    last_line = output_of(command).strip().splitlines()[-1]
    return Training(**json.loads(last_line))


def table_of_trainings(args: RLArgs, model: str) -> Table:
    """Accuracy before and after each peer's training, its seconds and its memory."""
    before = evaluate(args, model)["avg_all_rewards"]
    seconds = {}
    rows = []
    for name in TRAIN:
        training = train_in_process(name)
        record = evaluate(args, training.model)
        low, high = record["avg_all_rewards_ci"]
        seconds[name] = training.seconds
        row = (
            name,
            f"{before:.3f}",
            f"{record['avg_all_rewards']:.3f}",
            f"{low:.3f} .. {high:.3f}",
            f"{training.seconds:.0f}",
            f"{training.peak:.0f}",
        )
        rows.append(row)
    title = (
        f"{args.num_steps} steps of {args.rollout_size} responses from {model}, seed {args.seed}"
    )
    numbers = ("accuracy before", "after", "95 %", "seconds of RL", "peak MiB")
    table = make_table(title, ("", *numbers), rows, numbers=numbers)
    table.caption = f"TRL's seconds over ours: {seconds['TRL'] / seconds['ours']:.2f}"
    return table


def evaluate(args: RLArgs, model: str) -> dict:
    """The record of our evaluation of a model on the preset's held-out problems."""
    evaluation = from_preset(EvaluateArgs, args.preset)
    tasks = {evaluation.task: evaluation}
    results = evaluate_models(evaluation, [model], tasks, Console(quiet=True))
    ((_, _, evaluated),) = results
    return evaluated.record


# --- command --------------------------------------------------------------------------------------


def main(
    steps: int = 40,
    preset: str = "tiny",
    model: str = "checkpoints/tiny_sft",
    seed: int = 0,
    one: str = "",
) -> None:
    """Print both tables.

    Args:
        steps: Of each training.
        preset: Whose hyper-parameters both take.
        model: The warm start, made by `alignment.sft`.
        seed: Of both trainings.
        one: For the processes that this starts: whose training.
    """
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
        print(json.dumps(dataclasses.asdict(TRAIN[one](args))))
        return
    console = Console()
    console.print(table_of_losses(args, model))
    console.print(table_of_trainings(args, model))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
