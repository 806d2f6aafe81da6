"""Sweeps and claims: arms, seeds, executors and what is decided."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from alignment.config.commands import RLArgs
from alignment.config.flag import (
    check_flags,
    flag,
    flags_of_class,
    hints_of_flags,
    names_of_flags,
    require,
)
from alignment.config.presets import CLAIMS
from alignment.runs.trackers import TRACKERS

Match = Literal["steps", "samples", "tokens", "seconds"]
OptionsType = TypeVar("OptionsType", bound="SweepOptions")


@dataclass(frozen=True)
class Resources:
    """The executor of a sweep's runs, and the resources of each, by the names of their flags."""

    executor: str = "auto"
    ray_address: str = ""
    cpus_per_run: int | None = None
    gpus_per_run: int | None = None
    slurm_parameters: Mapping[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepOptions:
    """Train every combination of the values given, with every seed, and say which choice made the
    difference. Most arguments of train_rl take several values here: --loss_type no_baseline
    grpo_clip --seed 0 1 2. Those that decide how arms are evaluated take one, and devices, --stop,
    --target_accuracy and --auto_sft are not a sweep's."""

    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "loss_type",
        "group_size",
        "learning_rate",
        "num_steps",
        "seed",
        "sweep_file",
        "executor",
        "dry_run",
        "run_name",
    )

    preset: str = flag("tiny", group="run")
    """Named set of arguments that all arms start from."""
    sweep_file: str = flag("", group="sweep")
    """TOML file of named arms, for arms that differ in several arguments: a table [arms.NAME]
    each."""
    run_name: str = flag("", group="run", names_folder=True, aliases=("sweep_name",))
    """Name of the folder, a new one or to continue."""
    output_dir: str = flag("checkpoints", group="run")
    """Folder that holds the sweep's folder; with several machines, one that all of them share."""
    trackers: tuple[str, ...] = flag(
        ("tensorboard",), group="run", choices=tuple(TRACKERS), takes_own=True
    )
    """Where every run's numbers go besides its folder."""
    eval_tasks: tuple[str, ...] = flag((), group="evaluation")
    """Tasks that every run is evaluated on beside --task; verdicts are on --task alone."""
    quiet: bool = flag(False, group="run")
    """Print errors alone; the folder has the report and each run's files."""
    hold: Literal["rollouts", "prompts"] = flag("rollouts", group="sweep")
    """What stays equal while --group_size varies: a step's responses (larger groups, fewer
    prompts), or its prompts."""
    match: Match = flag("steps", group="sweep")
    """Compare arms after their --num_steps, or at equal sampled responses, tokens (of refills too)
    or seconds: what all had."""
    tie: float = flag(0.03, group="sweep", above=0, below=1)
    """Difference of accuracies below which two arms are taken to tie, once that is shown."""
    controls: bool = flag(False, group="sweep")
    """Add arms of random, format-only, inverted and majority-vote reward, and at learning rate 0:
    what comes without the truth."""
    strict: bool = flag(False, group="sweep")
    """Take the design's warnings for errors."""
    dry_run: bool = flag(False, group="sweep")
    """Print the design, and train nothing."""
    until_decided: bool = flag(False, group="sweep")
    """After the runs, add seeds to undecided pairs until all are decided or have --max_seeds; looks
    share the error rate."""
    question: tuple[str, ...] = flag((), group="sweep")
    """What --until_decided decides: two arms, two values (grpo_clip no_baseline) or an argument
    (loss_type); empty: all."""
    max_seeds: int = flag(10, group="sweep", at_least=2)
    """Seeds an arm may get."""
    hardware: str = flag("", group="devices")
    """Machine to count hours for, as plan's; with --calibrate and empty: this one."""
    calibrate: tuple[str, ...] = flag((), group="devices")
    """Finished runs on such a machine, which tell its rates."""
    price: float = flag(0.0, group="devices", at_least=0, zero="unknown")
    """Dollars an hour of one GPU, or of a machine without. 0: unknown."""
    show_difference: float = flag(0.0, group="sweep", at_least=0, below=1, zero="none")
    """Difference of accuracies to find, by the cheapest number of seeds and questions. 0: none."""
    budget: float = flag(0.0, group="sweep", at_least=0, zero="none")
    """GPU-hours to split among seeds, questions and samples a question, so that the smallest
    difference shows. 0: none."""
    pilot: str = flag("", group="sweep")
    """Folder of an earlier sweep whose runs tell how seeds, questions and answers vary, for
    --budget; empty: what docs/verdicts.md assumes."""
    executor: Literal["auto", "local", "ray", "slurm"] = flag("auto", group="sweep")
    """local: runs one by one; ray: side by side; slurm: as a cluster's jobs; auto: ray if installed
    (extra), or local."""
    ray_address: str = flag("", group="sweep")
    """Ray cluster to run on; empty: this machine."""
    slurm: tuple[str, ...] = flag((), group="sweep")
    """sbatch's options for each run, such as partition=gpu time=240 (minutes; 60) mem=64G."""
    cpus_per_run: int | None = flag(None, group="sweep", at_least=1)
    """Cores and threads of a run; by default 1 where runs share a machine, all without Ray."""
    gpus_per_run: int | None = flag(None, group="sweep", at_least=0)
    """Whole GPUs of a run, for its roles to be placed on; by default 1 where there are any."""
    seed: tuple[int, ...] = flag((), group="run")
    """One or several values of train_rl's --seed."""
    tune: tuple[str, ...] = flag((), group="sweep")
    """Values that every arm tries first, FIELD=v1,v2,... each (learning_rate=1e-5,3e-5,1e-4): it
    takes its best, on seeds and questions of no verdict."""
    tune_seeds: tuple[int, ...] = flag((100, 101), group="sweep")
    """Seeds of the runs of --tune; none may be a verdict's."""
    validation_share: float = flag(0.3, group="sweep", above=0, below=1)
    """With --tune, share of the test questions that it chooses by; verdicts are on the others."""

    measure: str = flag("accuracy", group="sweep")
    """What verdicts are on: accuracy, avg@N, pass@K, maj@N, greedy (with --eval_greedy), area, best
    (evaluation), tokens_to@ACCURACY or entropy."""

    own_settings: Annotated[
        tuple[tuple[str, tuple[Any, ...]], ...], tyro.conf.Fixed, tyro.conf.Suppress
    ] = ()
    """(name, values) of each setting that only some loss, advantage, reward or sampler has, such as
    ("loss.alpha", ("0.1", "0.3")), as the command line gives them."""

    def __post_init__(self) -> None:
        check_flags(self)
        require(self, "question", len(self.question) < 3, "one argument, two values or two arms")
        is_valid = not self.pilot or self.budget > 0
        require(self, "pilot", is_valid, "left out, or go with --budget")
        require(self, "tune_seeds", len(self.tune_seeds) > 0, "one seed or more")
        require(
            self,
            "ray_address",
            not self.ray_address or self.executor in ("auto", "ray"),
            "with --executor ray",
        )
        pairs = (
            all(0 < pair.find("=") < len(pair) - 1 for pair in self.slurm)
            and type(self.slurm_parameters["time"]) is int
        )
        works = "name=value, time in minutes, and go with --executor slurm"
        require(self, "slurm", not self.slurm or pairs and self.executor == "slurm", works)

    @property
    def slurm_parameters(self) -> dict[str, int | str]:
        """sbatch's options for each run."""
        parameters: dict[str, int | str] = {"time": 60}
        for name, number in (
            ("cpus_per_task", self.cpus_per_run),
            ("gpus_per_node", self.gpus_per_run),
        ):
            if number is not None:
                parameters[name] = number
        for pair in self.slurm:
            name, text = pair.split("=", 1)
            parameters[name] = int(text) if text.isdigit() else text
        return parameters

    @property
    def resources(self) -> Resources:
        """The executor of the runs, and the resources of each."""
        return Resources(
            self.executor,
            self.ray_address,
            self.cpus_per_run,
            self.gpus_per_run,
            self.slurm_parameters,
        )


@dataclass(frozen=True)
class ClaimsOptions(SweepOptions):
    """List claims of papers with what runs here say of them, and train what is missing. All arms
    share train_rl's arguments."""

    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "run",
        "report",
        "preset",
        "seed",
        "executor",
        "output_dir",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        "sweep_file",
        "run_name",
        "eval_tasks",
        "hold",
        "match",
        "tie",
        "controls",
        "strict",
        "dry_run",
        "until_decided",
        "question",
        "max_seeds",
        "hardware",
        "calibrate",
        "price",
        "show_difference",
        "budget",
        "pilot",
        "tune",
        "tune_seeds",
        "validation_share",
        "measure",
    )

    preset: tuple[str, ...] = flag(
        (
            "tiny",
            "countdown_tiny",
        ),
        group="run",
    )
    """Named sets of arguments, a task each, that all arms start from."""
    run: tuple[str, ...] = flag((), choices=("all", *CLAIMS))
    """Claims whose missing runs are trained first; all: every one."""
    report: str = ""
    """Folder to write the page to, as claims.md; empty: none."""


NOT_SWEPT = frozenset(name for name, facts in flags_of_class(RLArgs).items() if not facts.swept)
BOOKKEEPING = NOT_SWEPT | names_of_flags(RLArgs, "bookkeeping")


def with_swept_flags(options: type[OptionsType]) -> type[OptionsType]:
    """A class of arguments with the options' flags, and after these one for each argument of
    train_rl that arms may differ in, which takes several values; without values it is ().

    The class is made here, since written out it would declare every flag of `RLArgs` a second time.
    Only a command line needs it, to be parsed and for --help. Code names its type by the options'
    class, of which it is a subclass, and reads the values by `swept_values`."""
    hints = hints_of_flags(RLArgs)
    flags_with_values = []
    for name, facts in flags_of_class(RLArgs).items():
        if name in NOT_SWEPT or name == "seed":
            continue
        about = tyro.conf.arg(help=f"One or several values of train_rl's --{name}.")
        values = flag((), group=facts.group, choices=facts.choices)
        flags_with_values.append((name, Annotated[tuple[hints[name], ...], about], values))
    return dataclasses.make_dataclass(
        options.__name__,  # tyro reads the help of fields in the source of the class of this name.
        flags_with_values,
        bases=(options,),
        frozen=True,
        namespace={"__module__": __name__, "__doc__": options.__doc__},
    )


def swept_values(args: SweepOptions) -> dict[str, tuple]:
    """The arguments of train_rl that the command line gives, seeds aside, each with its values:
    those of a setting that only some loss has, say, as text."""
    names = [name for name in flags_of_class(RLArgs) if name not in NOT_SWEPT and name != "seed"]
    values = {name: getattr(args, name) for name in names if getattr(args, name)}
    return values | dict(args.own_settings)


SweepArgs = with_swept_flags(SweepOptions)
ClaimsArgs = with_swept_flags(ClaimsOptions)
