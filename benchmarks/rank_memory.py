"""Peak memory of one rank of a replicated or sharded policy: `alignment.plan`'s closed form against
torch's memory tracker.

uv run --extra lora -m benchmarks.rank_memory

One process is rank 0 of up to 64, with the true shapes of published models: its tensors of floating
point have no data (FakeTensorMode), and collectives move nothing (backend "fake"). It makes an
optimiser step, and then an update of two micro-batches, of which the second one finds weights,
moments and a gradient. Exit code 1 where the closed form is below the tracker, or more than 5 %
above.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterator
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
from alignment.core.tokens import collate
from alignment.model import log_probs
from alignment.model.packing import ATTENTION
from alignment.model.shape import ModelShape
from alignment.planning.peaks import peak_bytes
from alignment.planning.placement import Roles
from alignment.planning.step_shape import StepShape
from alignment.policy import lora, sharded
from alignment.policy.policy import Objective, PolicyConfig
from alignment.policy.sharded import Shard
from alignment.policy.shards import own_part
from alignment.system.terminal import make_table
from benchmarks.collectives import negative_log_likelihood
from benchmarks.fake_ranks import fake_ranks
from tests.model.published_shapes import qwen2, qwen2_1_5b, qwen2_7b

MODELS = {"1.5b": qwen2_1_5b, "3b": lambda: qwen2(2048, 11_008, 36, 16), "7b": qwen2_7b}
MESHES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 64), (8, 8))  # machines, ranks of each
FACTORIES = (torch.ops.aten.empty, torch.ops.aten.zeros, torch.ops.aten.ones)


@dataclass(frozen=True)
class Case:
    """One rank of a policy, and the rows of each of its micro-batches: `rows` responses to one
    prompt."""

    machines: int
    ranks: int  # Of each machine.
    replicated: bool = False
    prompt: int = 300
    response: int = 200
    rows: int = 8
    top_p: float = 1.0
    dtype: str = "bfloat16"
    lora_rank: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.rows * self.response


class FakeFloats(TorchDispatchMode):
    """Makes tensors of floating point fake, and leaves token ids and masks real: the host reads
    those."""

    def __init__(self, fake_mode: FakeTensorMode):
        super().__init__()
        self.fake_mode = fake_mode

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again, as operations on its parts
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        makes = (
            function.overloadpacket in FACTORIES
            and (kwargs.get("dtype") or torch.float32).is_floating_point
        )
        if makes or any(isinstance(tensor, FakeTensor) for tensor in tensors):
            with self.fake_mode:
                return function(*args, **kwargs)
        return function(*args, **kwargs)


class Tracker(FSDPMemTracker):
    """torch's tracker of all storages that live, their resizing included, without its hooks on
    modules: these take a single forward pass of a model that is called as a module, and a `Shard`
    makes several, by a method of the model. The hooks only say what a storage is for. So the total
    counts, and the kinds do not."""

    def _register_module_and_optimizer_hooks(self) -> None:
        for module in self._root_mod.modules():
            if isinstance(module, FSDPModule):
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    self._instrument_fsdp_sharded_params_grads(group)

    def _deregister_module_and_optimizer_hooks(self) -> None:
        pass

    @property
    def peak(self) -> int:
        return sum(snapshot["Total"] for snapshot in self.get_tracker_snapshot("peak").values())


@contextmanager
def fake_shard(config: PretrainedConfig, case: Case) -> Iterator[Shard]:
    """Rank 0's part of a policy of that shape, whose tensors are fake, as are those that are made
    within."""
    fake_mode, mesh = FakeTensorMode(allow_non_fake_inputs=True), sharded.init_device_mesh

    def load_model(*arguments):
        with fake_mode:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=ATTENTION, dtype=torch.float32
            )
            model.tie_weights()
            return model

    def real_mesh(*arguments, **named):
        with unset_fake_temporarily():
            return mesh(*arguments, **named)

    world = case.machines * case.ranks
    with ExitStack() as stack:
        ranks = stack.enter_context(fake_ranks(world, case.ranks))
        stack.enter_context(mock.patch.object(lora, "load_model", load_model))
        stack.enter_context(mock.patch.object(sharded, "init_device_mesh", real_mesh))
        # PEFT moves adapters to the weights' device, where they are.
        stack.enter_context(
            mock.patch.object(torch.nn.Module, "to", lambda module, *place, **options: module)
        )
        # pieces as on a GPU
        stack.enter_context(mock.patch.object(log_probs, "LOGITS_IN_CACHE", {}))
        stack.enter_context(FakeFloats(fake_mode))
        policy = PolicyConfig(
            "",
            ("cpu",) * case.ranks,
            case.dtype,
            micro_batch_tokens=case.tokens,
            lora_rank=case.lora_rank,
        )
        shard = Shard(ranks, policy, case.replicated)
        # Python objects, which go to rank 0 over gloo
        shard._gathered = lambda results: results
        yield shard


def bytes_held(shard: Shard) -> dict[str, int]:
    """Bytes of the weights, gradients and moments of a rank."""
    moments = [
        value for state in shard.optimizer.state.values() for value in state.values() if value.ndim
    ]
    parameters = list(shard.model.parameters())
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    tensors = {"weights": parameters, "gradients": gradients, "moments": moments}
    return {kind: sum(own_part(tensor).nbytes for tensor in tensors[kind]) for kind in tensors}


def tracked(config: PretrainedConfig, case: Case) -> tuple[int, dict[str, int]]:
    """The tracker's peak bytes, and those of the weights, gradients and moments that rank 0 holds
    before its second step."""
    groups = 2 * case.machines * case.ranks  # two micro-batches for each rank
    prompts = [
        [5 + i % 1000, 5 + i // 1000, *[7] * (case.prompt - 2)]
        for i in range(groups)
        for _ in range(case.rows)
    ]
    batch = collate(prompts, [[7] * case.response] * len(prompts), 0)
    objective = Objective(negative_log_likelihood, Distribution(1.0, case.top_p, 0))
    with fake_shard(config, case) as shard, Tracker(shard.model) as tracker:
        for number, rows in ((1, range(len(prompts) // 2)), (2, range(len(prompts)))):
            assert len(list(shard.accumulate(batch, rows, objective))) == number
            held = bytes_held(shard)
            shard.clip_gradient(1.0)
            shard.step(1e-3)
        return tracker.peak, held


def closed_form(config: PretrainedConfig, case: Case) -> dict[str, int]:
    """Bytes by kind of the same rank, by `peak_bytes`, without what the tracker does not know:
    CUDA's context and allocator."""
    step = StepShape(
        card=10**12,
        policy_parallelism="replicated" if case.replicated else "sharded",
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
        frozen=0,
        vllm=True,
        gpu_memory_utilization=None,
        engines=1,
        sleeps=False,
    )
    roles = Roles(
        tuple(f"cuda:{rank}" for rank in range(case.ranks)), sample=(), reference="", eval=""
    )
    kinds = peak_bytes(ModelShape.from_config(config, case.lora_rank), config, roles, step)[
        0
    ].phases["update"]
    return kinds | {"context": 0, "margin": 0}


def compared(name: str, case: Case) -> tuple[str, ...]:
    """A row of the table."""
    start, config = time.monotonic(), MODELS[name]()
    kinds, (peak, _) = closed_form(config, case), tracked(config, case)
    form = sum(kinds.values())
    kind = ("replicated" if case.replicated else "sharded") + f", LoRA {case.lora_rank}" * (
        case.lora_rank > 0
    )
    listed = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in kinds.items() if size)
    figures = (f"{form / 1e9:.2f}", f"{peak / 1e9:.2f}", f"{form / peak - 1:+.1%}", listed)
    row = (name, kind, f"{case.machines} x {case.ranks}", str(case.tokens), *figures)
    print(
        *row,
        f"{time.monotonic() - start:.0f} s",
        "" if peak <= form <= 1.05 * peak else "WRONG",
        flush=True,
    )
    return row


def main(models: tuple[str, ...] = tuple(MODELS), processes: int = 1):
    meshes = [Case(machines, ranks) for machines, ranks in MESHES]
    others = Case(1, 8, replicated=True), Case(1, 8, lora_rank=16), Case(1, 8, rows=1)
    cases = [(name, case) for name in models for case in (*meshes, *others)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        rows = [*pool.map(compared, *zip(*cases, strict=True))]
    headings = (
        "model",
        "kind",
        "machines x ranks",
        "tokens",
        "form, GB",
        "tracker, GB",
        "form above",
        "the form's kinds, GB",
    )
    Console(width=200).print(make_table("peak of one rank in an update", headings, rows))
    sys.exit(any(not 0 <= float(row[6].rstrip("%")) <= 5 for row in rows))


if __name__ == "__main__":
    tyro.cli(main, use_underscores=True)
