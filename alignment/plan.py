"""Show which role and which layers would sit on which device, without owning the GPUs or loading a model.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --num_gpus 8
"""

from rich.table import Table

from alignment.args import PlanArgs, RLArgs, from_preset, parse
from alignment.checks import resolve_model, roles_of
from alignment.policy.placement import ModelShape, place
from alignment.system.errors import run_command
from alignment.system.terminal import make_console


def main() -> None:
    args = parse(PlanArgs)
    roles = roles_of(args, args.num_gpus)
    from alignment.policy.loading import load_config

    shape = ModelShape.from_config(load_config(resolve_model(args.model, args.output_dir)))
    table = Table(title=f"{args.model} on {'this machine' if args.num_gpus is None else f'{args.num_gpus} GPUs'}")
    for heading in ("device", "role", "layers", "GB"):
        table.add_column(heading, justify="right" if heading == "GB" else "left")
    optimizer = args.optimizer or from_preset(RLArgs, args.preset).optimizer
    for share in sorted(place(shape, roles, optimizer), key=lambda share: share.device):
        ends = ("embeddings",) * ("model.embed_tokens" in share.modules) + ("head",) * ("lm_head" in share.modules)
        layers = (f"{share.layers[0]}-{share.layers[-1]}",) if share.layers else ()
        table.add_row(share.device, share.role, ", ".join(layers + ends), f"{share.bytes / 1e9:.2f}")
    console = make_console()
    console.print(table)
    console.print(
        f"GB: weights, and for the policy gradients and the moments of {optimizer}; activations and caches come on top"
    )


if __name__ == "__main__":
    run_command(main)
