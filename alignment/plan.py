"""Show which role and which layers would sit on which device, without owning the GPUs or loading a model.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --num_gpus 8
"""

from alignment.args import PlanArgs, RLArgs, from_preset, parse
from alignment.checks import resolve_model, roles_of
from alignment.policy.placement import ModelShape, place
from alignment.system.errors import run_command
from alignment.system.terminal import make_console, make_table


def main() -> None:
    args = parse(PlanArgs)
    roles = roles_of(args, args.num_gpus)
    from alignment.policy.loading import load_config

    shape = ModelShape.from_config(load_config(resolve_model(args.model, args.output_dir)))
    rows = []
    optimizer = args.optimizer or from_preset(RLArgs, args.preset).optimizer
    for share in sorted(place(shape, roles, optimizer), key=lambda share: share.device):
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


if __name__ == "__main__":
    run_command(main)
