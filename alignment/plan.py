"""Show which role and layer would sit on which device, without the GPUs or a model, and the command that would train so.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --hardware 8xA100-80GB --price 2
uv run -m alignment.plan --preset smollm2_gsm8k --policy_parallelism sharded --machines 2 --num_gpus 8 --gpu_memory 24
"""

import dataclasses
import shlex
from pathlib import Path

from alignment.args import PlanArgs, RLArgs, command_line, parse
from alignment.checks import check_processes, roles_of
from alignment.policy.speed import Hardware, hardware_of
from alignment.system.errors import run_command
from alignment.system.files import write_json
from alignment.system.terminal import make_console, make_table


def main() -> None:
    args = parse(PlanArgs)
    hardware = hardware_of(args.hardware, args.num_gpus, args.machines, args.gpu_memory)
    check_processes(dataclasses.replace(args, machines=hardware.machines), args.policy_parallelism)
    roles_of(args, hardware.gpus)
    from alignment.duration import Known, calibrate, duration, ranked, span  # which load torch: mistakes are reported first
    from alignment.prediction import predict

    run = RLArgs(**{field.name: getattr(args, field.name) for field in dataclasses.fields(RLArgs)})
    prediction, console = predict(run, hardware.gpus, hardware.memory, hardware.machines), make_console()
    known = calibrate(args.calibrate, prediction.step.itemsize) if args.calibrate else Known()
    where = args.hardware or ("this machine" if hardware.gpus is None else f"{hardware.gpus} GPUs")
    several = f", on each of {hardware.machines} machines" * (hardware.machines > 1 and not args.hardware)
    print_placement(prediction, f"{args.model} on {where}, policy {prediction.kind}{several}", console)
    for peak in prediction.peaks:
        print_peak(prediction, peak, console)
    spent, command = duration(prediction, hardware, known), command_of(prediction, hardware)
    console.print(seconds_in_words(spent, args.price, known), soft_wrap=True)
    console.print(command, soft_wrap=True, markup=False)
    for number, (seconds, other) in enumerate(ranked(run, hardware, known) if args.best else (), start=1):
        place = f"{number}. {span(seconds['step'])} s a step, {span(seconds['gpu_hours'])} GPU-hours"
        console.print(f"{place}: {command_of(other, hardware)}", soft_wrap=True, markup=False)
    if args.json:
        peaks = [dataclasses.asdict(peak) | {"excess": prediction.excess(peak.device)} for peak in prediction.peaks]
        facts = {"run": vars(prediction.run), "machine": hardware._asdict(), "seconds": spent, "command": command}
        write_json(Path(args.json), {**facts, "peaks": peaks})


def command_of(prediction, hardware: Hardware) -> str:
    """The command line that trains so; on several machines, of each."""
    torchrun = f"torchrun --nnodes {hardware.machines} --nproc_per_node {prediction.ranks} --rdzv_backend c10d"
    start = f"{torchrun} --rdzv_endpoint HOST:29500" if hardware.machines > 1 else "uv run"
    return f"{start} -m alignment.train_rl {shlex.join(command_line(prediction.run))}"


def seconds_in_words(spent: dict | None, price: float, known) -> str:
    """Lines on a `duration`, what it costs, and how far finished runs' rates were off by phase, which is then corrected."""
    from alignment.duration import span

    if spent is None:
        return "seconds: unknown; name the machine, as in --hardware 8xA100-40GB"
    source = "from finished runs" if known.samples else "not calibrated, hence wide"
    phases = ", ".join(f"{phase} {span(seconds)}" for phase, seconds in spent["phases"].items())
    hours, dollars = [seconds / 3600 for seconds in spent["run"]], [price * each for each in spent["gpu_hours"]]
    whole = f"{span(hours)} hours, {span(spent['gpu_hours'])} GPU-hours" + f", {span(dollars)} dollars" * (price > 0)
    off = ", ".join(f"{phase} {1 / beyond:.2f}" for phase, _, beyond in known.samples)
    lines = f"""seconds ({source}): a step {span(spent["step"])}, and by phase: {phases}
the whole run, with evaluations: {whole}; {span(spent["tokens_per_second"])} sampled tokens a second"""
    return lines + f"\nthe same rates for all phases would give, of what finished runs took: {off}" * bool(off)


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
    console.print(
        f"{peak.name}, peak of a step: {peak.total / 1e9:.1f} of {card / 1e9:.3g} GB, {verdict} ({peak.worst}: {listed})"
    )


if __name__ == "__main__":
    run_command(main)
