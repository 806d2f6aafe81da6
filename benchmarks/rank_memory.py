"""How far is `alignment.plan`'s closed form of a rank's peak memory from torch's memory tracker?

    uv run --extra lora -m benchmarks.rank_memory
    uv run --extra lora -m benchmarks.rank_memory --models 7b --processes 4

Bytes at the peak of an update, of one rank of a replicated or sharded policy. One process is rank 0
of up to 64, with the true shapes of published models: its tensors of floating point have no data
(FakeTensorMode), and collectives move nothing (backend "fake"). It makes an optimiser step, and
then an update of two micro-batches, of which the second one finds weights, moments and a gradient.
Exit code 1 where the closed form is below the tracker, or more than 5 % above.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import tyro
from rich.console import Console
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig

from alignment.core.records import Distribution
from alignment.model import log_probs
from alignment.model.packing import ATTENTION
from alignment.model.shape import ModelShape
from alignment.model.shards import own_part
from alignment.planning.peaks import peak_bytes
from alignment.planning.placement import Roles
from alignment.planning.step_shape import StepShape
from alignment.policy import lora, sharded
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.sharded import Shard
from alignment.system.terminal import make_table
from benchmarks.fake_ranks import fake_ranks, open_shard
from benchmarks.workloads import make_batch, negative_log_likelihood
from tests.model.published_shapes import qwen2, qwen2_1_5b, qwen2_7b


def qwen2_3b() -> PretrainedConfig:
    """Qwen2.5-3B."""
    return qwen2(2048, 11_008, 36, 16)


MODELS = {"1.5b": qwen2_1_5b, "3b": qwen2_3b, "7b": qwen2_7b}
MOST_ABOVE = 1.05  # of the closed form over the tracker's peak
# operations that make tensors from nothing, so that no fake argument makes their results fake
FACTORIES = (torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.ones)
HEADINGS = (
    "model",
    "kind",
    "machines x ranks",
    "tokens",
    "form, GB",
    "tracker, GB",
    "form above",
    "the form's kinds, GB",
)


@dataclass(frozen=True)
class Case:
    """One rank of a policy, and its micro-batches: each of `rows` responses to one prompt."""

    machines: int
    ranks: int
    """Of each machine."""
    replicated: bool = False
    prompt: int = 300
    """Tokens."""
    response: int = 200
    """Tokens."""
    rows: int = 8
    top_p: float = 1.0
    dtype: str = "bfloat16"
    lora_rank: int = 0

    @property
    def tokens(self) -> int:
        """Of a micro-batch: the prompt's count once."""
        return self.prompt + self.rows * self.response

    @property
    def world_size(self) -> int:
        return self.machines * self.ranks

    @property
    def parallelism(self) -> str:
        if self.replicated:
            return "replicated"
        return "sharded"


CASES = (
    Case(machines=1, ranks=1),
    Case(machines=1, ranks=2),
    Case(machines=1, ranks=4),
    Case(machines=1, ranks=8),
    Case(machines=1, ranks=64),
    Case(machines=8, ranks=8),
    Case(machines=1, ranks=8, replicated=True),
    Case(machines=1, ranks=8, lora_rank=16),
    Case(machines=1, ranks=8, rows=1),
)


# --- a rank that computes nothing -----------------------------------------------------------------


class FakeFloats(TorchDispatchMode):
    """Makes tensors of floating point fake, and leaves token ids and masks real, since the host
    reads those."""

    def __init__(self, fake_mode: FakeTensorMode):
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on its parts
        dtype = kwargs.get("dtype") or torch.float32
        makes_floats = function.overloadpacket in FACTORIES and dtype.is_floating_point
        takes_fakes = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if makes_floats or takes_fakes:
            with self.fake_mode:
                return function(*args, **kwargs)
        return function(*args, **kwargs)


class Tracker(FSDPMemTracker):
    """torch's tracker of all live storages, their resizing included, without its hooks on modules.

    The hooks expect a single forward pass of a model that is called as a module, and a `Shard`
    makes several, by a method of the model. They only say what a storage is for: the tracker's
    total is right without them, its kinds are not.
    """

    def _register_module_and_optimizer_hooks(self) -> None:
        for module in self._root_mod.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    self._instrument_fsdp_sharded_params_grads(group)

    def _deregister_module_and_optimizer_hooks(self) -> None:
        pass

    @property
    def peak(self) -> int:
        """In bytes, over all devices."""
        return sum(snapshot["Total"] for snapshot in self.get_tracker_snapshot("peak").values())


@contextmanager
def fake_shard(config: PretrainedConfig, case: Case) -> Iterator[Shard]:
    """Rank 0's part of a policy of that shape. Its tensors are fake, and so are those that are made
    within."""
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    init_device_mesh = sharded.init_device_mesh

    def load_fake_model(*arguments):
        with fake_mode:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=torch.float32
            )
            model.tie_weights()
            return model

    def init_real_mesh(*arguments, **named):
        with unset_fake_temporarily():
            return init_device_mesh(*arguments, **named)

    def stay(module, *place, **options):
        return module

    with ExitStack() as stack:
        ranks = stack.enter_context(fake_ranks(case.world_size, case.ranks))
        stack.enter_context(mock.patch.object(lora, "load_model", load_fake_model))
        stack.enter_context(mock.patch.object(sharded, "init_device_mesh", init_real_mesh))
        # PEFT moves adapters to the weights' device, where they are already
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", stay))
        # logits in pieces as large as on a GPU
        stack.enter_context(mock.patch.object(log_probs, "LOGITS_IN_CACHE", {}))
        stack.enter_context(FakeFloats(fake_mode))
        policy = PolicyConfig(
            "",
            ("cpu",) * case.ranks,
            case.dtype,
            micro_batch_tokens=case.tokens,
            lora_rank=case.lora_rank,
        )
        yield open_shard(ranks, policy, case.replicated)


# --- two counts of its bytes ----------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedMemory:
    """Bytes of rank 0, by torch's tracker."""

    peak: int
    """Of two updates."""
    before_step: dict[str, int]
    """Weights, gradients and moments, before the second optimiser step."""


def bytes_by_kind(shard: Shard) -> dict[str, int]:
    """Bytes of a rank's weights, gradients and moments."""
    parameters = list(shard.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    moments = []
    for state in shard.optimizer.state.values():
        # AdamW's state has its count of steps, too, which is a scalar
        moments += [value for value in state.values() if value.ndim > 0]
    kinds = {"weights": parameters, "gradients": gradients, "moments": moments}
    sizes = {}
    for kind, tensors in kinds.items():
        sizes[kind] = sum(own_part(tensor).nbytes for tensor in tensors)
    return sizes


def tracked(config: PretrainedConfig, case: Case) -> TrackedMemory:
    """The bytes of an optimiser step of one micro-batch, and of one of two, as torch's tracker
    counts them."""
    # two micro-batches for each rank
    batch = make_batch(2 * case.world_size, case.rows, case.prompt, case.response, first_ids=1000)
    every_row = range(len(batch.labels))
    first_half = range(len(batch.labels) // 2)
    objective = Objective(negative_log_likelihood, Distribution(1.0, case.top_p, 0))
    with fake_shard(config, case) as shard, Tracker(shard.model) as tracker:
        for micro_batches, rows in ((1, first_half), (2, every_row)):
            results = list(shard.accumulate(batch, rows, objective))
            assert len(results) == micro_batches
            before_step = bytes_by_kind(shard)
            shard.clip_gradient(1.0)
            shard.step(1e-3)
        return TrackedMemory(tracker.peak, before_step)


def closed_form(config: PretrainedConfig, case: Case) -> dict[str, int]:
    """Bytes of the same rank at its peak in an update, by kind, as `alignment.plan` predicts them:
    without what the tracker does not know, CUDA's context and allocator."""
    step = StepShape(
        card=10**12,
        policy_parallelism=case.parallelism,
        optimizer="adamw",
        itemsize=getattr(torch, case.dtype).itemsize,
        micro_batch_tokens=case.tokens,
        update_tokens=2 * case.tokens,
        parallel=1,
        prompt=case.prompt,
        max_new_tokens=case.response,
        group_size=case.rows,
        sampled={},
        truncated=case.top_p < 1,
        passes=frozenset(),
        frozen_passes=frozenset(),
        vllm=True,
        gpu_memory_utilization=None,
        engines=1,
        sleeps=False,
    )
    devices = tuple(f"cuda:{rank}" for rank in range(case.ranks))
    roles = Roles(devices, sample=(), reference="", eval="")
    shape = ModelShape.from_config(config, case.lora_rank)
    rank_0 = peak_bytes(shape, config, roles, step)[0]
    return rank_0.phases["update"] | {"context": 0, "margin": 0}


# --- command --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """The closed form of a model's case beside the tracker's peak, in bytes."""

    model: str
    case: Case
    kinds: dict[str, int]
    """Of the closed form."""
    peak: int

    @property
    def form(self) -> int:
        return sum(self.kinds.values())

    @property
    def is_close(self) -> bool:
        return self.peak <= self.form <= MOST_ABOVE * self.peak

    def row(self) -> tuple[str, ...]:
        """The cells of `HEADINGS`."""
        case = self.case
        parallelism = case.parallelism
        if case.lora_rank:
            parallelism += f", LoRA {case.lora_rank}"
        kinds = [f"{kind} {size / 1e9:.2f}" for kind, size in self.kinds.items() if size]
        return (
            self.model,
            parallelism,
            f"{case.machines} x {case.ranks}",
            str(case.tokens),
            f"{self.form / 1e9:.2f}",
            f"{self.peak / 1e9:.2f}",
            f"{self.form / self.peak - 1:+.1%}",
            ", ".join(kinds),
        )


def compare(model: str, case: Case) -> Comparison:
    """Count both ways, and print the row."""
    start = time.monotonic()
    config = MODELS[model]()
    comparison = Comparison(model, case, closed_form(config, case), tracked(config, case).peak)
    verdict = "WRONG"
    if comparison.is_close:
        verdict = ""
    print(*comparison.row(), f"{time.monotonic() - start:.0f} s", verdict, flush=True)
    return comparison


def compare_all(models: Sequence[str], processes: int) -> list[Comparison]:
    """Every case of every model, of which so many processes count one each."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        futures = []
        for model in models:
            futures += [pool.submit(compare, model, case) for case in CASES]
        return [future.result() for future in futures]


def main(models: tuple[str, ...] = tuple(MODELS), processes: int = 1):
    """Print a row for each case of these models as it is counted, and the table."""
    comparisons = compare_all(models, processes)
    rows = [comparison.row() for comparison in comparisons]
    Console(width=200).print(make_table("peak of one rank in an update", HEADINGS, rows))
    if not all(comparison.is_close for comparison in comparisons):
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
