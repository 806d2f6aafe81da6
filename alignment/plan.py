"""Show which role and layer would sit on which device, without the GPUs or a model, and the command that would train so.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --num_gpus 8
uv run -m alignment.plan --preset smollm2_gsm8k --policy_parallelism sharded --machines 2 --num_gpus 8 --gpu_memory 24
"""

import dataclasses
import shlex

from alignment.args import PlanArgs, RLArgs, command_line, parse
from alignment.checks import check_processes, roles_of
from alignment.system.errors import run_command
from alignment.system.terminal import make_console, make_table


def main() -> None:
    args = parse(PlanArgs)
    check_processes(args, args.policy_parallelism)
    roles_of(args, args.num_gpus)
    from alignment.prediction import predict, remedies  # here, because it loads torch: mistakes are reported first

    run = RLArgs(**{field.name: getattr(args, field.name) for field in dataclasses.fields(RLArgs)})
    prediction, console = predict(run, args.num_gpus, (args.gpu_memory or 0) * 1e9, args.machines), make_console()
    where = "this machine" if args.num_gpus is None else f"{args.num_gpus} GPUs"
    title = f"{args.model} on {where}, policy {prediction.kind}"
    print_placement(prediction, title + f", on each of {args.machines} machines" * (args.machines > 1), console)
    for peak in prediction.peaks:
        print_peak(prediction, peak, console)
    if any(prediction.excess(peak.device) > 0 for peak in prediction.peaks):
        found = remedies(prediction, args.num_gpus, (args.gpu_memory or 0) * 1e9, args.machines)
        lines = [f"with {flags} it would fit: {size / 1e9:.1f} GB on the fullest device" for flags, size in found]
        console.print("\n".join(lines or ["no flag, and no two of them, would make it fit"]), soft_wrap=True, markup=False)
    ranks = prediction.ranks
    start = f"torchrun --nnodes {args.machines} --nproc_per_node {ranks} --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    command = f"{start if args.machines > 1 else 'uv run'} -m alignment.train_rl {shlex.join(command_line(prediction.run))}"
    console.print(command, soft_wrap=True, markup=False)


def print_placement(prediction, title: str, console) -> None:
    """Print which role and layers each device has, and the bytes of weights, gradients and moments."""
    from alignment.policy.placement import place

    shape, run, rows = prediction.shape, prediction.run, []
    placed = place(
        shape, prediction.roles, run.optimizer, prediction.step.itemsize, prediction.kind, run.sampler_tensor_parallel
    )
    for share in sorted(placed, key=lambda share: share.device):
        first = next(name for name, parameters in shape.parameters.items() if parameters)
        ends = ("embeddings",) * (first in share.modules) + ("head",) * (shape.head in share.modules)
        indices = [name.rpartition(".")[2] for name in share.modules if name in shape.layers]
        layers = (f"{indices[0]}-{indices[-1]}",) if indices else ()
        rows.append((share.device, share.role, ", ".join(layers + ends), f"{share.bytes / 1e9:.2f}"))
    console.print(make_table(title, ("device", "role", "layers", "GB"), rows, numbers=("GB",)))
    kept = f"weights, and for the policy gradients and the moments of {run.optimizer}"
    console.print(f"GB: {kept}; activations and caches come on top")


def print_peak(prediction, peak, console) -> None:
    """Print the worst phase's bytes of a device, by kind, and whether they fit."""
    card, excess, kinds = prediction.capacity(peak.device), prediction.excess(peak.device), peak.phases[peak.worst]
    verdict = "fits" if excess <= 0 else f"does not fit by {excess / 1e9:.1f} GB"
    listed = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in kinds.items() if size)
    line = f"{peak.name}, peak of a step: {peak.total / 1e9:.1f} of {card / 1e9:.3g} GB, {verdict} ({peak.worst}: {listed})"
    others = ((phase, sum(peak.phases[phase].values())) for phase in peak.phases if phase != peak.worst)
    console.print(line + "".join(f"; {phase} {size / 1e9:.1f}" for phase, size in others), soft_wrap=True, markup=False)


if __name__ == "__main__":
    run_command(main)
