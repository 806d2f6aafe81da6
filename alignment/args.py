"""The arguments of every command, collected from `alignment.config`, and those of the commands that
only read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alignment.config.command_line import as_command, as_toml, command_line, flags_of, parse
from alignment.config.commands import (
    CHANGEABLE_ON_RESUME,
    REPRODUCIBILITY_SETTING,
    Args,
    AskArgs,
    Config,
    EvaluateArgs,
    PlanArgs,
    RejectionArgs,
    RLArgs,
    SFTArgs,
    VerifyArgs,
    configuration,
)
from alignment.config.flag import LARGEST_SEED, check_flags, flag, require
from alignment.config.presets import CLAIMS, PRESETS, from_preset, preset_names, preset_title
from alignment.config.sweep import (
    BOOKKEEPING,
    NOT_SWEPT,
    ClaimsArgs,
    ClaimsOptions,
    Match,
    Resources,
    SweepArgs,
    SweepOptions,
    swept_values,
)
from alignment.data.tasks.published import PUBLISHED
from alignment.rewards.rules import CONTROLS, RULES
from alignment.system.errors import UserError
from alignment.system.nearest import did_you_mean_path

__all__ = [
    "Args",
    "AskArgs",
    "BOOKKEEPING",
    "CHANGEABLE_ON_RESUME",
    "CLAIMS",
    "CONTROLS",
    "ClaimsArgs",
    "ClaimsOptions",
    "Config",
    "DownloadArgs",
    "EvaluateArgs",
    "GradientsArgs",
    "Match",
    "NOT_SWEPT",
    "PRESETS",
    "PipelineArgs",
    "PlanArgs",
    "REPRODUCIBILITY_SETTING",
    "RLArgs",
    "RULES",
    "RejectionArgs",
    "ReportArgs",
    "Resources",
    "SFTArgs",
    "SweepArgs",
    "SweepOptions",
    "VerifyArgs",
    "as_command",
    "as_toml",
    "command_line",
    "configuration",
    "flags_of",
    "from_preset",
    "parse",
    "preset_names",
    "preset_title",
    "refuse_missing_warm_start",
    "swept_values",
]


def refuse_missing_warm_start(args: RLArgs) -> None:
    """Raise `UserError` where --sft_base is not there and will not be made."""
    if args.sft_base and not args.auto_sft and not Path(args.sft_base).exists():
        remedy = (
            f"make it with `uv run -m alignment.sft --preset {args.preset}`, or start from --model"
            " with --sft_base ''"
        )
        nearest = did_you_mean_path(args.sft_base)
        raise UserError(f"--sft_base {args.sft_base} does not exist{nearest}: {remedy}")


@dataclass(frozen=True)
class GradientsArgs:
    """Sample one set of rollouts, and compare the gradients that losses, normalisations and group
    sizes make of it."""

    preset: str = flag("tiny", group="run")
    """Named set of arguments: task, model, devices, sampling."""
    prompts: int = flag(32, at_least=2, because="to have a variance")
    """Prompts; each one's gradient is one observation."""
    group_size: tuple[int, ...] = flag(
        (
            2,
            4,
            8,
            16,
        ),
        group="rollouts",
        above=0,
    )
    """Group sizes to compare: each prompt's responses are cut into such groups."""
    updates: Literal[0, 1] = 1
    """1: also look at clipped losses after one update on these rollouts, where the ratio is not
    1."""
    seed: int = flag(0, group="run", at_least=0, at_most=LARGEST_SEED)
    """Seed of prompts and samples."""
    output_dir: str = flag("checkpoints", group="run")
    """Folder that holds the warm start."""
    sweep_file: str = flag("", group="sweep")
    """TOML file of named arms, a sweep's: compare the gradients of their first two updates
    instead."""

    def __post_init__(self) -> None:
        check_flags(self)
        require(self, "group_size", min(self.group_size, default=0) >= 2, "at least 2")
        if any(max(self.group_size) % size for size in self.group_size):
            raise UserError(
                f"--group_size: every size must divide the largest, {max(self.group_size)}"
            )


@dataclass(frozen=True)
class ReportArgs:
    """Write a report from a sweep's folder, or from folders of runs: report.html, report.md,
    figures and tables."""

    runs: tuple[str, ...] = flag()
    """Folders of sweeps and of runs; a single one, also of a run, may still be training."""
    output: str = flag("", group="data")
    """Folder to write to; empty: the first of --runs."""
    tie: float = flag(0.03, group="sweep", above=0, below=1)
    """Difference of accuracies below which two arms are taken to tie; a sweep's folder has its
    own."""
    match: Match = flag("steps", group="sweep")
    """Compare arms after their --num_steps, or at equal sampled responses, tokens (of refills too)
    or seconds: what all had. A sweep's folder has its own."""
    measure: str = flag("", group="sweep")
    """What verdicts are on, as sweep's; empty: what the sweep was made for, else accuracy."""
    follow: bool = False
    """Write the report again, every 30 s, until all runs are finished."""

    def __post_init__(self) -> None:
        check_flags(self)


@dataclass(frozen=True)
class PipelineArgs:
    """Run the stages of a file, one after another; a pipeline that was stopped goes on at the stage
    it stopped in."""

    file: str = flag()
    """TOML file of the stages, or the name of one that comes with the package: r1_tiny."""
    run_name: str = flag("", group="run", names_folder=True, aliases=("name",))
    """Name of the pipeline's folder; empty: the file's."""
    output_dir: str = flag("checkpoints", group="run")
    """Folder that holds the pipeline's folder."""
    dry_run: bool = flag(False, group="sweep")
    """Print the commands, and run nothing."""


@dataclass(frozen=True)
class DownloadArgs:
    """Download GSM8K, or the task that --task names; a broken transfer goes on where it stopped."""

    task: str = flag("gsm8k", group="data", choices=tuple(PUBLISHED))
    """The task whose problems these are."""
    folder: str = ""
    """Where the two files go; empty: dataset/TASK, where the task looks for them."""
    source: str = ""
    """Address of the folder that holds them; empty: where they are published."""
