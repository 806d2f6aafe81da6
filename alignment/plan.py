"""Show which role and layer would sit on which device, without the GPUs or a model, and the command that would train so.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --num_gpus 8
uv run -m alignment.plan --preset smollm2_gsm8k --policy_parallelism sharded --machines 2 --num_gpus 8 --gpu_memory 24
"""

import dataclasses
import shlex
from pathlib import Path

from alignment.args import PlanArgs, RLArgs, as_command, command_line, configuration, from_preset, parse
from alignment.checks import check_processes, engines_on_shared_gpu, resolve_model, roles_of
from alignment.policy.placement import ModelShape, Roles, place
from alignment.policy.policy import RANKED
from alignment.sampling.sampler import engine_name
from alignment.system.errors import run_command
from alignment.system.terminal import make_console, make_table

PUBLISHED = Path(__file__).parent / "policy" / "published"  # configurations of models on the hub, so that it need not be asked
PROMPT_TOKENS = 300  # of the longest prompt, where --max_prompt_tokens says nothing; GSM8K's and Countdown's are shorter
TEST_PROBLEMS = 1319  # where --max_problems takes all: GSM8K's


def main() -> None:
    args = parse(PlanArgs)
    args = dataclasses.replace(args, optimizer=args.optimizer or from_preset(RLArgs, args.preset).optimizer)
    check_processes(args, args.policy_parallelism)
    roles = roles_of(args, args.num_gpus)
    from alignment.models import kind_of_policy
    from alignment.policy.loading import load_config

    published, card = PUBLISHED / args.model.replace("/", "--"), (args.gpu_memory or 0) * 1e9
    base = str(published) if published.is_dir() else resolve_model(args.model, args.output_dir)
    devices, kind = kind_of_policy(args, base, args.num_gpus, card, args.machines)
    roles, ranks = dataclasses.replace(roles, policy=devices), len(devices) * (kind in RANKED)
    started = {"policy_parallelism": kind, "policy_ranks": ranks if args.machines == 1 else 0}
    run = dataclasses.replace(as_command(RLArgs, args), optimizer=args.optimizer, **started)
    config, console = load_config(base), make_console()
    shape = ModelShape.from_config(config, args.lora_rank, args.lora_targets)
    # Ranks on a CPU share the host's memory.
    step = step_shape(run, roles, card / devices.count(devices[0]), engine_name(args.sampler) == "vllm")
    rows = []
    placed = place(shape, roles, args.optimizer, step.itemsize, kind, args.sampler_tensor_parallel)
    for share in sorted(placed, key=lambda share: share.device):
        first = next(name for name, parameters in shape.parameters.items() if parameters)
        ends = ("embeddings",) * (first in share.modules) + ("head",) * (shape.head in share.modules)
        indices = [name.rpartition(".")[2] for name in share.modules if name in shape.layers]
        layers = (f"{indices[0]}-{indices[-1]}",) if indices else ()
        rows.append((share.device, share.role, ", ".join(layers + ends), f"{share.bytes / 1e9:.2f}"))
    gpus = "this machine" if args.num_gpus is None else f"{args.num_gpus} GPUs"
    title = f"{args.model} on {gpus}, policy {kind}" + f", on each of {args.machines} machines" * (args.machines > 1)
    console.print(make_table(title, ("device", "role", "layers", "GB"), rows, numbers=("GB",)))
    kept = f"weights, and for the policy gradients and the moments of {args.optimizer}"
    console.print(f"GB: {kept}; activations and caches come on top")
    if card:
        from alignment.policy.memory import SPARE, peak_bytes

        peaks = peak_bytes(shape, config, roles, step)
        for number, (device, kinds) in enumerate(peaks):
            name = f"rank {number}, {device}" if number < ranks else device
            held = sum(sum(bytes_of.values()) for place_of, bytes_of in peaks if place_of == device)
            verdict = "fits" if held <= (1 - SPARE) * card else f"does not fit: {SPARE:.0%} must stay free"
            total, listed = sum(kinds.values()), ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds.items() if size)
            console.print(f"{name}, peak of a step: {total / 1e9:.1f} of {args.gpu_memory:g} GB, {verdict} ({listed})")
    start = f"torchrun --nnodes {args.machines} --nproc_per_node {ranks} --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    command = f"{start if args.machines > 1 else 'uv run'} -m alignment.train_rl {shlex.join(command_line(run))}"
    console.print(command, soft_wrap=True, markup=False)


def step_shape(args: RLArgs, roles: Roles, card: float, vllm: bool):
    """The `StepShape` of a run on GPUs of `card` bytes."""
    from alignment.policy.loading import compute_dtype
    from alignment.policy.memory import StepShape

    prompt, problems = args.max_prompt_tokens or PROMPT_TOKENS, args.max_problems or TEST_PROBLEMS
    longest = prompt + args.max_new_tokens, prompt + (args.eval_max_new_tokens or args.max_new_tokens)
    old_policy = args.needs_old_policy and args.policy_parallelism not in RANKED and roles.policy != (roles.reference,)
    return configuration(
        StepShape, args, card=int(card), prompt=prompt, rows=max(args.rollout_size, problems), vllm=vllm,
        itemsize=4 if compute_dtype(args.dtype, roles.policy[0]) == "float32" else 2,
        sampled=max(args.rollout_size * longest[0], problems * longest[1]),
        truncated=args.sampling_top_p < 1 or args.sampling_top_k > 0,
        frozen=0 if args.lora_rank else (args.beta > 0) + old_policy,
        engines=engines_on_shared_gpu(args, roles),
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
