"""What a run says of itself before a tensor library is loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from alignment.args import RLArgs
from alignment.builders.checks import run_config
from alignment.core.advantages import ADVANTAGES
from alignment.core.losses import LOSSES
from alignment.rewards.judge import judge_name
from alignment.rewards.rules import named_parts
from alignment.runs.run import Run, open_run
from alignment.system.nearest import did_you_mean_path
from alignment.system.registry import import_object, place_of


@contextmanager
def open_rl_run(args: RLArgs, console: Console) -> Iterator[Run]:
    """Open a run of RL, as `open_run`, and print what it is made of (`announce_run`)."""
    with open_run(run_config(args), console) as run:
        announce_run(args, run.checkpoint is not None, run.console)
        yield run


def announce_run(args: RLArgs, has_checkpoint: bool, console: Console) -> None:
    """Print the functions of the user's own that a run uses, with their files, and where there is
    no checkpoint to go on from, what the run starts from."""
    for flag, function in own_functions(args).items():
        name = getattr(function, "__qualname__", type(function).__qualname__)
        line = f"{flag}: {name} of {place_of(function)}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not has_checkpoint:
        announce_start(args, console)


def announce_start(args: RLArgs, console: Console) -> None:
    """Print the model that training starts from, or that SFT makes it first."""
    line = f"starting from {args.sft_base or args.model}"
    if needs_warm_start(args):
        nearest = did_you_mean_path(args.sft_base)
        line = f"{args.sft_base} is not there yet{nearest}: warming up {args.model} by SFT, once"
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def needs_warm_start(args: RLArgs) -> bool:
    """Whether SFT has to make the model of --sft_base first."""
    return args.sft_base != "" and not Path(args.sft_base).exists()


def own_functions(args: RLArgs) -> dict[str, Callable]:
    """The functions of the user's own that --loss_type, --advantage and --reward name: flag and
    value -> function."""
    functions: dict[str, Callable] = {}
    if args.loss not in LOSSES.values():
        functions[f"--loss_type {args.loss_type}"] = args.loss.function
    if args.estimator not in ADVANTAGES.values():
        functions[f"--advantage {args.advantage}"] = args.estimator.function
    for part, _ in named_parts(args.reward):
        if ":" in part and judge_name(part) is None:
            function = import_object("--reward", part)
            assert callable(function)  # as `check_rl` has seen
            functions[f"--reward {part}"] = function
    return functions
