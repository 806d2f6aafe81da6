"""From arguments to the policy that is trained: its kind, its devices, its device map."""

from pathlib import Path

from alignment.args import (
    Args,
    configuration,
)
from alignment.builders.checks import check_processes, devices_of_ranks, resolve_model, roles_of
from alignment.model.device_map import partition_layers
from alignment.model.loading import (
    compute_dtype,
    load_config,
)
from alignment.model.shape import ModelShape, adapted_layers, empty_model
from alignment.planning.placement import STATE_SHARE
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.policy import Policy, PolicyConfig, open_policy, policy_kind
from alignment.system.device_memory import total_bytes
from alignment.system.errors import UserError
from alignment.system.torchrun import PROCESSES


def make_policy(
    args: Args, base: str, checkpoint: Path | None = None, dropout: bool = False
) -> Policy:
    """The policy that is trained from the folder `base`, with or without the `dropout` of its
    config; with --lora_rank, with a checkpoint's adapters where one is given."""
    if args.lora_rank:
        # says at once where a target is none
        adapted_layers(empty_model(load_config(base)), args.lora_targets)
    devices, kind = kind_of_policy(args, base)
    facts = {
        "devices": devices,
        "dtype": compute_dtype(args.dtype, devices[0]),
        "checkpoint": str(checkpoint or ""),
    }
    return open_policy(
        kind, configuration(PolicyConfig, args, model_path=base, dropout=dropout, **facts)
    )


def kind_of_policy(
    args: Args, base: str, num_gpus: int | None = None, memory: float = 0.0, machines: int = 1
) -> tuple[tuple[str, ...], str]:
    """The policy's devices, and its kind where that is "auto". `num_gpus`, `memory` (bytes) and
    `machines` plan for others."""
    kind = args.policy_parallelism
    devices = roles_of(args, num_gpus).policy
    becomes_ranked = kind == "auto" and (args.policy_ranks or PROCESSES)
    if policy_kind(kind).ranked or becomes_ranked:
        devices = devices_of_ranks(args, devices)

    def fits_each() -> bool:
        if num_gpus is not None and not memory:
            raise UserError(
                "--policy_parallelism auto depends on the memory of a GPU: give --gpu_memory, or"
                " name a kind"
            )
        shape = ModelShape.from_config(load_config(base), args.lora_rank, args.lora_targets)
        state = shape.state_bytes(
            shape.parameters, OPTIMIZERS[getattr(args, "optimizer", "adamw")].device_bytes
        )
        smallest = memory or min(map(total_bytes, devices))
        return state <= STATE_SHARE * smallest / (1 if "cuda" in devices[0] else len(devices))

    if kind == "auto":
        if max(PROCESSES, machines * len(devices)) == 1:
            kind = "single"
        elif fits_each():
            kind = "replicated"
        else:
            kind = "sharded"
    check_processes(args, kind)
    return devices, kind


def partition_model_across_devices(args: Args, num_gpus: int | None = None) -> dict[str, str]:
    """The policy's `device_map` for `from_pretrained`, module -> device, balanced by bytes;
    `num_gpus`: of another machine."""
    config = load_config(resolve_model(args.model, args.output_dir))
    return partition_layers(ModelShape.from_config(config), roles_of(args, num_gpus).policy)
