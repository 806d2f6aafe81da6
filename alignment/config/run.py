"""The run: its folder, seeds, checkpoints, and when it stops."""

from dataclasses import dataclass

from alignment.config.flag import LARGEST_SEED, flag
from alignment.runs.trackers import TRACKERS


@dataclass(frozen=True)
class PresetFlags:
    """The set of arguments that flags override."""

    preset: str = flag("tiny", group="run", swept=False)
    """Named set of arguments (alignment/presets/*.toml), or a file of your own, FILE.toml, that the
    other flags override."""


@dataclass(frozen=True)
class RunFlags:
    """A command's seed and folder."""

    seed: int = flag(0, group="run", at_least=0, at_most=LARGEST_SEED, bookkeeping=True)
    """Seed of data order, initialisation and sampling."""
    output_dir: str = flag("checkpoints", group="run", swept=False, changeable=True)
    """Folder that holds the run folders."""
    run_name: str = flag("", group="run", names_folder=True, swept=False, changeable=True)
    """Name of the run's folder; empty: made from the preset, the command and the seed."""
    trackers: tuple[str, ...] = flag(
        ("tensorboard",),
        group="run",
        choices=tuple(TRACKERS),
        takes_own=True,
        swept=False,
        changeable=True,
    )
    """Where a run's numbers go besides its folder, all but tensorboard by extras; or your
    package.module:name."""
    quiet: bool = flag(False, group="run", swept=False, changeable=True)
    """Print errors alone; files have the results, the progress and the warnings."""


@dataclass(frozen=True)
class CheckpointFlags:
    """Checkpoints, limits, and seeds of their own."""

    save_interval: int = flag(20, group="run", above=0, bookkeeping=True, changeable=True)
    """Steps between checkpoints."""
    keep_checkpoints: int = flag(
        2, group="run", at_least=0, zero="all", bookkeeping=True, changeable=True
    )
    """Newest checkpoints kept; 0: all."""
    max_bad_steps: int = flag(3, group="run", above=0, changeable=True)
    """The run stops after so many steps in a row of updates whose loss or gradient is not
    finite."""
    max_grader_failures: float = flag(0.05, group="run", at_least=0, at_most=1, changeable=True)
    """The run stops where more of 20 steps' answers cannot be graded (time, memory)."""
    data_seed: int | None = flag(None, group="run", at_least=0, at_most=LARGEST_SEED)
    """Seed of the order of prompts and mini-batches; by default --seed."""
    sampling_seed: int | None = flag(None, group="run", at_least=0, at_most=LARGEST_SEED)
    """Seed of the rollouts' samples; by default --seed."""


@dataclass(frozen=True)
class RLRunFlags:
    """How a run of RL begins."""

    log_state: bool = flag(False, group="run", bookkeeping=True, changeable=True)
    """Write state.jsonl: before each update digests of weights, moments, problems and samples,
    which tell where two runs part. Reads all weights each step."""
    auto_sft: bool = flag(False, group="run", swept=False)
    """Run `sft` with the same preset first where --sft_base does not exist yet."""
    preview: int = flag(0, group="run", at_least=0, zero="none", swept=False)
    """Print so many problems as the model would see them, and the rewards of their answers, and
    end; 0: none."""
    resume: bool = flag(False, group="run", swept=False, changeable=True)
    """Go on from the last checkpoint of the run of this name; `--resume FOLDER`, the run's, with
    the flags of its args.json."""
