"""Show which role and which layers would sit on which device, without owning the GPUs or loading a model.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --num_gpus 8
"""

import dataclasses

from alignment.args import PlanArgs, RLArgs, as_command, configuration, from_preset, parse
from alignment.checks import engines_on_shared_gpu, resolve_model, roles_of
from alignment.policy.placement import ModelShape, Roles, place
from alignment.sampling.sampler import engine_name
from alignment.system.errors import run_command
from alignment.system.terminal import make_console, make_table

PROMPT_TOKENS = 300  # of the longest prompt, where --max_prompt_tokens says nothing; GSM8K's and Countdown's are shorter
TEST_PROBLEMS = 1319  # where --max_problems takes all: GSM8K's


def main() -> None:
    args = parse(PlanArgs)
    roles = roles_of(args, args.num_gpus)
    from alignment.policy.loading import compute_dtype, load_config

    config = load_config(resolve_model(args.model, args.output_dir))
    shape = ModelShape.from_config(config, args.lora_rank, args.lora_targets)
    rows = []
    optimizer = args.optimizer or from_preset(RLArgs, args.preset).optimizer
    itemsize = 4 if compute_dtype(args.dtype, roles.policy[0]) == "float32" else 2
    for share in sorted(place(shape, roles, optimizer, itemsize), key=lambda share: share.device):
        first = next(name for name, parameters in shape.parameters.items() if parameters)
        ends = ("embeddings",) * (first in share.modules) + ("head",) * (shape.head in share.modules)
        layers = (f"{share.layers[0]}-{share.layers[-1]}",) if share.layers else ()
        rows.append((share.device, share.role, ", ".join(layers + ends), f"{share.bytes / 1e9:.2f}"))
    console = make_console()
    title = f"{args.model} on {'this machine' if args.num_gpus is None else f'{args.num_gpus} GPUs'}"
    console.print(make_table(title, ("device", "role", "layers", "GB"), rows, numbers=("GB",)))
    console.print(
        f"GB: weights, and for the policy gradients and the moments of {optimizer}; activations and caches come on top"
    )
    if args.gpu_memory:
        run = dataclasses.replace(as_command(RLArgs, args), optimizer=optimizer)
        from alignment.policy.peak import SPARE, peak_bytes

        step = step_shape(run, roles, args.gpu_memory * 1e9, engine_name(args.sampler) == "vllm")
        for device, kinds in peak_bytes(shape, config, roles, step).items():
            total, listed = sum(kinds.values()), ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds.items() if size)
            verdict = "fits" if total <= (1 - SPARE) * step.card else f"does not fit: {SPARE:.0%} must stay free"
            console.print(f"{device}, peak of a step: {total / 1e9:.1f} of {args.gpu_memory:g} GB, {verdict} ({listed})")


def step_shape(args: RLArgs, roles: Roles, card: float, vllm: bool):
    """The `StepShape` of a run on GPUs of `card` bytes."""
    from alignment.policy.peak import StepShape

    prompt, problems = args.max_prompt_tokens or PROMPT_TOKENS, args.max_problems or TEST_PROBLEMS
    longest = prompt + args.max_new_tokens, prompt + (args.eval_max_new_tokens or args.max_new_tokens)
    frozen = (args.beta > 0 and not args.reference_url) + (args.needs_old_policy and roles.policy != (roles.reference,))
    return configuration(
        StepShape, args, card=int(card), prompt=prompt, rows=max(args.rollout_size, problems), vllm=vllm,
        sampled=max(args.rollout_size * longest[0], problems * longest[1]),
        truncated=args.sampling_top_p < 1 or args.sampling_top_k > 0,
        frozen=0 if args.lora_rank else frozen,
        engines=engines_on_shared_gpu(args, roles),
    )  # fmt: skip


if __name__ == "__main__":
    run_command(main)
