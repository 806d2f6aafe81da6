"""Show which role and layer would sit on which device, without the GPUs or a model, and the command
that would train so.

uv run -m alignment.plan --preset qwen2.5_math_1.5b_gsm8k_8gpu --hardware 8xA100-80GB --price 2 uv
run -m alignment.plan --preset smollm2_gsm8k --policy_parallelism sharded --machines 2 --num_gpus 8
--gpu_memory 24"""

import dataclasses
import shlex
from pathlib import Path

from alignment.args import PlanArgs, RLArgs, command_line, configuration, parse
from alignment.builders.checks import check_processes, roles_of
from alignment.data.tasks import find_task
from alignment.planning.placement import place
from alignment.planning.seconds import Hardware, hardware_of
from alignment.rewards.rules import find_reward
from alignment.system.errors import run_command
from alignment.system.files import fill_template, write_json
from alignment.system.terminal import make_console, make_table


def main() -> None:
    args = parse(PlanArgs)
    find_reward(args.reward, find_task(args.task, args.data).rules)
    hardware = hardware_of(args.hardware, args.num_gpus, args.machines, args.gpu_memory)
    check_processes(dataclasses.replace(args, machines=hardware.machines), args.policy_parallelism)
    roles_of(args, hardware.gpus)
    # Here, because it loads torch: mistakes are reported first.
    from alignment.builders.prediction import calibrate, duration, predict, ranked, remedies, span

    run, console = configuration(RLArgs, args), make_console()
    prediction = predict(run, *hardware[:3])
    known = calibrate(args.calibrate, prediction.step.itemsize)
    where = args.hardware or ("this machine" if hardware.gpus is None else f"{hardware.gpus} GPUs")
    several = f", on each of {hardware.machines} machines" * (
        hardware.machines > 1 and not args.hardware
    )
    print_placement(
        prediction, f"{args.model} on {where}, policy {prediction.kind}{several}", console
    )
    seconds = duration(prediction, hardware, known)
    best = ranked(run, hardware, known) if args.best else []
    facts = {
        "run": vars(prediction.run),
        "machine": hardware._asdict(),
        "command": command_of(prediction, hardware),
        "peaks": [
            dataclasses.asdict(peak) | {"excess": prediction.excess(peak.device)}
            for peak in prediction.peaks
        ],
        "seconds": dataclasses.asdict(seconds),
        "dollars": [args.price * hours for hours in seconds.gpu_hours] if args.price else None,
        "fits": prediction.fits,
        "remedies": remedies(prediction, *hardware[:3]),
        "off": known.samples,
        "best": [
            {"seconds": dataclasses.asdict(spent), "command": command_of(other, hardware)}
            for spent, other in best
        ],
    }
    text = fill_template(
        Path(__file__).with_name("plan.txt.j2"), **facts, prediction=prediction, span=span
    )
    console.print(text, soft_wrap=True, markup=False)
    if args.json:
        write_json(Path(args.json), facts)


def command_of(prediction, hardware: Hardware) -> str:
    """The command line that trains so; on several machines, of each."""
    torchrun = (
        f"torchrun --nnodes {hardware.machines} --nproc_per_node {len(prediction.roles.policy)}"
        " --rdzv_backend c10d"
    )
    start = f"{torchrun} --rdzv_endpoint HOST:29500" if hardware.machines > 1 else "uv run"
    return f"{start} -m alignment.train_rl {shlex.join(command_line(prediction.run))}"


def print_placement(prediction, title: str, console) -> None:
    """Print which role and layers each device has, and the bytes of weights, gradients and
    moments."""
    shape, run, itemsize, rows = prediction.shape, prediction.run, prediction.step.itemsize, []
    placed = place(
        shape,
        prediction.roles,
        run.optimizer,
        itemsize,
        prediction.kind,
        run.sampler_tensor_parallel,
    )
    for share in sorted(placed, key=lambda share: share.device):
        first = next(name for name, parameters in shape.parameters.items() if parameters)
        ends = ("embeddings",) * (first in share.modules) + ("head",) * (
            shape.head in share.modules
        )
        indices = [name.rpartition(".")[2] for name in share.modules if name in shape.layers]
        layers = (f"{indices[0]}-{indices[-1]}",) if indices else ()
        rows.append(
            (share.device, share.role, ", ".join(layers + ends), f"{share.bytes / 1e9:.2f}")
        )
    console.print(make_table(title, ("device", "role", "layers", "GB"), rows, numbers=("GB",)))
    kept = f"weights, and for the policy gradients and the moments of {run.optimizer}"
    console.print(f"GB: {kept}; activations and caches come on top")


if __name__ == "__main__":
    run_command(main)
