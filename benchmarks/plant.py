"""What a planted fault is, and the arguments with which faults act."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plant:
    """A change of a few characters in one file of the package."""

    name: str
    """What is wrong then."""
    file: str
    """Below alignment/."""
    right: str
    """The text to replace; it occurs once in the file."""
    wrong: str
    flags: tuple[str, ...] = ()
    """Arguments with which the fault acts, beside those of every plant."""
    unseen_because: str = ""
    """Why nothing can see it, where nothing does."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the arguments name, by their names: texts."""


def of_file(file: str, *plants: tuple) -> list[Plant]:
    """Plants (name, right, wrong, flags, unseen_because, files) of one file."""
    return [Plant(name, file, right, wrong, *rest) for name, right, wrong, *rest in plants]


# Why nothing sees some faults of packed rows.
FOUND_AT_LOAD = (
    "when a model is loaded, its packed rows are compared with its own forward pass; where they"
    " differ, the program says so and pads rows instead, so that nothing wrong is computed"
)
# Several updates of one rollout, so that ratios differ from 1.
SEVERAL_UPDATES = ("--epochs_per_rollout", "2")
WITH_REFERENCE = ("--beta", "0.1")
WITH_DECAY = ("--weight_decay", "0.1")
WITH_ADAPTERS = ("--lora_rank", "4")
WITH_TOP_P = ("--sampling_top_p", "0.9")
WITH_TOP_K = ("--sampling_top_k", "5")
WITH_TEMPERATURE = ("--sampling_temperature", "0.7")
WITH_BONUS = ("--entropy_coefficient", "0.1")
SEVERAL_MINI_BATCHES = ("--train_mini_batch_size", "8")
WITH_SKIPPED = ("--skip_unfinished",)
WITH_REFILLS = ("--max_refills", "2")
WITH_STATE = ("--advantage", "problem_average")
WITH_TEACHER = ("--teacher", "base")
WITH_VLLM = ("--sampler", "vllm")
IN_16_BITS = ("--dtype", "bfloat16")
SEVERAL_SAMPLES = ("--eval_samples", "4")
WITH_RESETS = (*WITH_REFERENCE, "--reference_reset_interval", "1")
AHEAD = ("--rollouts", "async", "--max_staleness", "1")
SHARDED = ("--policy_parallelism", "sharded", "--policy_ranks", "2")
REPLICATED = ("--policy_parallelism", "replicated", "--policy_ranks", "2")
