"""From arguments to policies and samplers. Below these builders nothing takes an arguments object."""

from collections.abc import Callable, Sequence
from pathlib import Path

from alignment.args import Args, configuration
from alignment.checks import devices_of_ranks, refuse_ranked_8bit, resolve_model, roles_of
from alignment.core.records import Problem, SamplingConfig
from alignment.data.tasks import Task
from alignment.evaluation.accuracy import Evaluation, evaluate_vllm
from alignment.policy.loading import compute_dtype, load_config
from alignment.policy.memory import STATE_SHARE, total_bytes
from alignment.policy.optimizers import OPTIMIZERS
from alignment.policy.placement import ModelShape, adapted_layers, empty_model, engine_share, partition_layers
from alignment.policy.policy import RANKED, Policy, PolicyConfig, open_policy, policy_kind
from alignment.rewards.rules import find_rule
from alignment.sampling.restarts import open_sampler
from alignment.sampling.sampler import Sampler, SamplerConfig, find_engine
from alignment.system.torchrun import PROCESSES


def make_policy(args: Args, base: str, checkpoint: Path | None = None) -> Policy:
    """The policy that is trained from the folder `base`; with --lora_rank, with a checkpoint's adapters where one is given."""
    if args.lora_rank:
        adapted_layers(empty_model(load_config(base)), args.lora_targets)  # says at once where a target is none
    devices, kind = kind_of_policy(args, base)
    facts = {"devices": devices, "dtype": compute_dtype(args.dtype, devices[0]), "checkpoint": str(checkpoint or "")}
    return open_policy(kind, configuration(PolicyConfig, args, model_path=base, **facts))


def kind_of_policy(args: Args, base: str) -> tuple[tuple[str, ...], str]:
    """The policy's devices, and its --policy_parallelism where that is "auto"."""
    devices = roles_of(args).policy
    if args.policy_parallelism in RANKED or args.policy_parallelism == "auto" and (args.policy_ranks or PROCESSES):
        devices = devices_of_ranks(args, devices)

    def fits_each() -> bool:
        shape = ModelShape.from_config(load_config(base), args.lora_rank, args.lora_targets)
        state = shape.state_bytes(shape.parameters, OPTIMIZERS[getattr(args, "optimizer", "adamw")].device_bytes)
        return state <= STATE_SHARE * min(map(total_bytes, devices)) / (1 if "cuda" in devices[0] else len(devices))

    kind = policy_kind(args.policy_parallelism, max(PROCESSES, len(devices)), fits_each)
    refuse_ranked_8bit(args, kind)
    return devices, kind


def sampler_config(args: Args, base: str, device: str, engines: int = 1, **facts) -> SamplerConfig:
    """What a sampler on `device` is started with, one of `engines` that share the device. `facts` are further fields."""
    share = args.gpu_memory_utilization or engine_share(roles_of(args), device, engines)
    dtype = compute_dtype(args.dtype, device)
    return SamplerConfig(base, device, dtype, timeout=args.sampler_timeout, memory_share=share, **facts)


def make_sampler(args: Args, base: str, device: str, tokenizer, policy: Policy | None = None, **facts) -> Sampler:
    """The sampler that --sampler names, with the weights of the folder `base`; it may read `policy` in place."""
    config = sampler_config(args, base, device, **facts)
    return open_sampler(find_engine(args.sampler), config, tokenizer, policy)


def eval_sampling(args: Args, stop: tuple[str, ...], n: int = 1) -> SamplingConfig:
    """How evaluation samples are drawn. The same seed every time, so that two evaluations differ by their models alone."""
    sampling = (args.sampling_temperature, args.sampling_top_p, args.sampling_top_k)
    return SamplingConfig(n, *sampling, getattr(args, "eval_max_new_tokens", 0) or args.max_new_tokens, stop, args.seed)


def evaluation(args: Args, task: Task, problems: Sequence[Problem], n: int = 1) -> Callable[[Sampler], Evaluation]:
    """The evaluation of a sampler by `n` samples of each problem, graded by the task's rules."""
    rule, sampling = find_rule(args.evaluation_rule), eval_sampling(args, task.stop, n)
    return lambda sampler: evaluate_vllm(sampler, rule, problems, sampling, task.rules)


def partition_model_across_devices(args: Args, num_gpus: int | None = None) -> dict[str, str]:
    """The policy's `device_map` for `from_pretrained`: module name -> device. The sampler's, the reference's and the
    evaluation's devices are reserved; the model is split over the rest, balanced by bytes (`placement.partition_layers`).
    `num_gpus` plans for a machine other than this one."""
    config = load_config(resolve_model(args.model, args.output_dir))
    return partition_layers(ModelShape.from_config(config), roles_of(args, num_gpus).policy)
