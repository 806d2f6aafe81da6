"""From arguments to the policy that is trained, and its device map."""

from pathlib import Path

from alignment.args import Args, configuration
from alignment.builders.base_models import resolve_model
from alignment.builders.devices import roles_of
from alignment.builders.run_plan import PolicyPlan
from alignment.model.device_map import partition_layers
from alignment.model.loading import load_config
from alignment.model.shape import ModelShape, adapted_layers, empty_model
from alignment.policy.policy import Policy, PolicyConfig, open_policy
from alignment.system.ranks import Ranks


def make_policy(
    args: Args, plan: PolicyPlan, base: str, checkpoint: Path | None = None, dropout: bool = False
) -> Policy:
    """The policy that is trained from the folder `base`, with or without the `dropout` of its
    config; with --lora_rank, with a checkpoint's adapters where one is given. Raises `UserError`
    for weights that cannot be loaded, and for --lora_targets that name no layer."""
    if args.lora_rank:
        adapted_layers(empty_model(load_config(base)), args.lora_targets)
    config = configuration(
        PolicyConfig,
        args,
        model_path=base,
        devices=plan.devices,
        dtype=plan.dtype,
        checkpoint=str(checkpoint or ""),
        dropout=dropout,
    )
    return open_policy(plan.kind, config)


def ranks_of(policy: Policy) -> Ranks | None:
    """The processes that hold a policy's weights; None where this one alone does."""
    return getattr(policy, "ranks", None)


def partition_model_across_devices(args: Args, num_gpus: int | None = None) -> dict[str, str]:
    """The policy's `device_map` for `from_pretrained`, module -> device, balanced by bytes;
    `num_gpus`: of another machine."""
    config = load_config(resolve_model(args.model, args.output_dir))
    return partition_layers(ModelShape.from_config(config), roles_of(args, num_gpus).policy)
