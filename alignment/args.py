"""The arguments of every command: frozen dataclasses, filled from a preset and overridden by
flags."""

import argparse
import dataclasses
import json
import operator
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro._errors import ParseErrorEvent, on_parse_error

from alignment.core.advantages import BASELINES, DEVIATIONS, AdvantageConfig
from alignment.core.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    OPTIONAL_ARGUMENTS,
    Loss,
    LossConfig,
)
from alignment.core.records import SamplingConfig
from alignment.data.tasks import DataConfig, find_task
from alignment.data.tasks.published import PUBLISHED
from alignment.policy.optimizers import OPTIMIZERS
from alignment.rewards.rules import (
    CONTROLS,  # noqa: F401, sweeps take it from here
    RULES,  # noqa: F401, pipelines take it from here
    evaluation_rule,
    refuse_unknown_reward,
)
from alignment.rollouts.config import RolloutConfig, Schedule, UpdateConfig
from alignment.runs.trackers import TRACKERS
from alignment.system.errors import UserError
from alignment.system.files import read_json, read_toml
from alignment.system.registry import did_you_mean, find
from alignment.system.terminal import make_console

PRESETS = Path(__file__).parent / "presets"
CLAIMS = {file.stem: file for file in sorted((PRESETS.parent / "claims").glob("*.toml"))}
OTHER_NAMES = Path(__file__).parent / "other_names.toml"
FLAGS = read_toml(Path(__file__).with_name("flags.toml"), "--help")

TrackerName = Literal[tuple(TRACKERS)]
Match = Literal["steps", "samples", "tokens", "seconds"]

Config = TypeVar("Config")
COMPARISONS = {"from": operator.ge, "above": operator.gt, "to": operator.le, "below": operator.lt}
_BOUNDS = read_toml(Path(__file__).with_name("bounds.toml"), "--help")
_ZERO = {
    name: f"0 ({meaning})"
    for meaning, names in _BOUNDS.pop("zero").items()
    for name in names.split()
}
_BOUND_OF = {name: words for words, bound in _BOUNDS.items() for name in bound["arguments"].split()}
BOUNDS = {
    name: (words.replace("0", _ZERO.get(name, "0")), _BOUNDS[words])
    for name, words in _BOUND_OF.items()
}
"""Argument -> the numbers that will do, in words and by limits; a flag has the same bound in every
command."""


def _check_values(args) -> None:
    """Raise `UserError` for a number outside its bound (a sweep's tuples: arm by arm), and a
    --run_name that is no folder's."""
    for name, value in vars(args).items():
        if name in BOUNDS and value is not None and not isinstance(value, tuple):
            words, bound = BOUNDS[name]
            words = words.replace("a number", "a whole number") if isinstance(value, int) else words
            holds = all(
                holds(value, bound[limit]) for limit, holds in COMPARISONS.items() if limit in bound
            )
            _require(args, name, holds or value == bound.get("or"), words)
    folder = getattr(args, "run_name", "")
    plain = (
        folder not in (".", "..")
        and Path(folder).name == folder
        and len(folder.encode(errors="surrogateescape")) <= 150
    )
    _require(args, "run_name", plain, "a plain folder name without slashes, of at most 150 bytes")


@dataclass(frozen=True)
class Args:
    """What every command shares."""

    preset: str = "tiny"
    """Named set of arguments (alignment/presets/*.toml) that the other flags override."""

    task: str = "arithmetic"
    reward: str = "r1_zero"
    reward_timeout: float = 60.0
    """Seconds of one call of a reward function of your own, after which the run saves and stops."""
    prompt: str = ""
    """Prompt template r1_zero, tiny, countdown_en or countdown_zh, or a file with {question};
    empty: its own."""
    dataset_path: str = ""
    """Folder of the task's files, or of one for each of --eval_tasks; empty: where `download` puts
    them."""
    question_column: str = "question"
    """Column of your rows' questions."""
    answer_column: str = "answer"
    """Column of your rows' answers."""
    answer_pattern: str = ""
    """Regular expression whose group is the final answer there; empty: the last `####` line, else
    all."""
    test_split: str = ""
    """File, or split of hf: data, of the test problems; empty: the split test, or one question in
    8."""
    model: str = "tiny"
    """Base model: "tiny", "tiny_student" or "smollm2" (built here), a Hugging Face folder, or a hub
    name."""
    sft_base: str = "checkpoints/tiny_sft"
    """Folder of the warm start: `sft` writes, `train_rl` reads it; empty: --model."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    sampler: str = "auto"
    sample_device: tuple[str, ...] = ()
    sampler_tensor_parallel: int = 1
    """Devices of --sample_device that each vLLM engine takes together, for a large model."""
    reference_model_device: str | None = None
    """Device of the reference (old-policy) model; by default the last GPU but one."""
    eval_device: str | None = None
    """Device of the evaluation sampler; by default the last GPU but two."""
    policy_devices: tuple[str, ...] = ()
    """Devices the policy is split over; by default every GPU that no other role holds."""
    policy_parallelism: str = "auto"
    policy_ranks: int = 0
    """Processes, on each machine, of a replicated or sharded policy; 0: one for each policy
    device."""
    rank_timeout: float = 60.0
    """Seconds after which a process of the policy that does not answer is lost, and the run
    stops."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights (LoRA, extra "lora"); 0: the
    weights."""
    lora_alpha: int = 32
    """What adapters add to the weights counts alpha / rank times."""
    lora_targets: str = ""
    """Linear layers with adapters, such as q_proj,v_proj; empty: all but the output head."""
    compile: bool = False
    use_liger_kernel: bool = False
    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for vLLM; by default 0.9, or 0.4 on a shared GPU."""
    sampler_timeout: float = 3600.0
    """Seconds after which a process of an engine or of the reference model is hung."""

    max_new_tokens: int = 48
    """Longest response, in tokens."""
    sampling_temperature: float = 1.0
    """Softmax temperature of training and evaluation samples; 0 is greedy (evaluation only)."""
    sampling_top_p: float = 1.0
    """Nucleus of training and evaluation samples: the likeliest tokens that have this
    probability."""
    sampling_top_k: int = 0
    """Likeliest tokens that training and evaluation samples are drawn from, before the nucleus; 0:
    all."""
    max_problems: int = 512
    """Distinct questions in an evaluation; 0: all of the test split."""

    seed: int = 0
    """Seed of data order, initialisation and sampling."""
    output_dir: str = "checkpoints"
    """Folder that holds the run folders."""
    run_name: str = ""
    """Name of the run's folder; empty: made from the preset, the command and the seed."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where a run's numbers go besides its folder; the others are extras."""

    def __post_init__(self) -> None:
        _check_values(self)
        refuse_unknown_reward(self.reward)
        for name, (package, extra, *values) in FLAGS["needs"].items():
            value = getattr(self, name, None)
            if value and value in (values or [value]) and not find_spec(package):
                raise UserError(
                    f"{' '.join(flags_of({name: value}))} needs {package}: start with `uv run"
                    f" --extra {extra} ...`"
                )
        if self.compile and self.use_liger_kernel:
            raise UserError(
                "--compile: torch does not compile Liger's kernels; leave out this flag or"
                " --use_liger_kernel"
            )

    @property
    def data(self) -> DataConfig:
        """What is in which column of the user's own data."""
        return configuration(DataConfig, self)

    @property
    def evaluation_rule(self) -> str:
        """Name of the rule that evaluations report. Raises `UserError` for an unknown --task."""
        return evaluation_rule(self.reward, find_task(self.task, self.data).rules)


@dataclass(frozen=True)
class EvaluateArgs(Args):
    """Sample answers to the test problems, score them, and print the averages with their 95 %
    intervals."""

    num_samples: int = 1
    """Samples a problem; above 1 adds pass@k and maj@k."""
    eval_tasks: tuple[str, ...] = ()
    """Benchmarks instead of --task: gsm8k math500 aime24 aime25 amc23 minerva olympiad svamp."""
    compare: tuple[str, ...] = ()
    """Two models, instead of --model: the same problems, and the second's paired difference."""
    preview: int = 0
    """Print so many problems as the model would see them, and the rewards of their answers, and
    end; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(
            self,
            "compare",
            len(self.compare) in ((0,) if self.eval_tasks else (0, 2)),
            "two models, on one --task",
        )


@dataclass(frozen=True)
class SFTArgs(Args):
    """Fine-tune the base model on worked solutions, response tokens only, and save it to
    --sft_base."""

    num_steps: int = 1000
    """Optimiser steps."""
    batch_size: int = 64
    """Sequences an optimiser step."""
    micro_batch_tokens: int = 0
    demonstrations: tuple[str, ...] = ()
    """Files of questions (or prompts) with responses; by default the task's own."""
    curriculum: bool = False
    """Take the demonstrations in the task's own order instead of shuffling them."""
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"
    learning_rate: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 50
    """Steps of linear rise of the learning rate, before a linear fall to a tenth of it."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    eval_interval: int = 250
    """Steps between measurements of the validation loss."""
    preview: int = 0
    """Print so many demonstrations, with the tokens that would be trained, and end; 0: none."""
    save_interval: int = 250
    """Steps between checkpoints, in a folder beside --sft_base that is removed at the end."""
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "sft_base", self.sft_base != "", "the folder to save the model to")


@dataclass(frozen=True)
class RLArgs(Args):
    """Train the policy by policy gradients on verifiable rewards."""

    loss_type: str = "grpo_clip"
    group_size: int = 8
    """Responses sampled for each prompt."""
    prompts_per_rollout: int = 32
    """Prompts sampled at each step; a rollout has prompts x group size responses."""
    num_steps: int = 60
    """Rollout steps."""
    num_problems: int = 0
    """Training problems, the first ones; 0: all."""
    max_prompt_tokens: int = 0
    """Longest prompt, in tokens; problems with longer ones are left out of training. 0: any
    length."""
    epochs_per_rollout: int = 1
    """Passes over each rollout."""
    train_mini_batch_size: int = 0
    """Responses an update, at most; 0: the whole rollout. Several updates need old log-probs."""
    micro_batch_tokens: int = 0
    optimizer: Literal[tuple(OPTIMIZERS)] = "adamw"
    learning_rate: float = 2e-4
    """Peak learning rate (AdamW: betas 0.9, 0.95)."""
    warmup_steps: int = 5
    """Updates of linear rise of the learning rate, constant after."""
    weight_decay: float = 0.0
    """AdamW weight decay."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down."""
    cliprange: float = 0.2
    """GRPO, GSPO, CISPO: the ratio to the old policy counts only within 1 - cliprange and 1 +
    cliprange."""
    cliprange_high: float | None = None
    """The upper bound, where it is another (DAPO's clip-higher); by default --cliprange."""
    dual_clip: float = 0.0
    """GRPO, GSPO: a negative advantage counts at most so many times (above 1); 0: without this
    bound."""
    baseline: Literal[tuple(BASELINES)] = "group_mean"
    """What is subtracted from a reward: its group's mean, or others' (RLOO)."""
    normalize_by_std: bool = True
    """Divide advantages by a standard deviation."""
    std_of: Literal[tuple(DEVIATIONS)] = "group"
    """Whose: the group's (unbiased, or of the population), or of all rewards."""
    advantage_eps: float = 1e-6
    """Added to that standard deviation."""
    beta: float = 0.0
    """Weight of the KL divergence from the warm start in the loss; 0: there is none, and no
    reference model."""
    kl_estimator: Literal[tuple(KL_ESTIMATORS)] = "k3"
    """How that is estimated; k3 is GRPO's, k1 has on average no gradient."""
    old_log_probs: Literal["policy", "sampler"] = "policy"
    sampler_correction: Literal[tuple(CORRECTIONS)] = "none"
    correction_cap: float = 2.0
    """That cap."""
    max_refills: int = 0
    """Times a step that groups of equal rewards, which teach nothing, give way to other prompts
    (DAPO)."""
    overlong_buffer: int = 0
    """Tokens before --max_new_tokens in which the reward falls linearly, by up to 1 (DAPO); 0:
    none."""
    skip_unfinished: bool = False
    """Leave responses that were cut off at --max_new_tokens out of baselines and updates."""
    loss_normalization: Literal[tuple(NORMALIZATIONS)] = "sequence_mean"
    rollouts: Literal["sync", "async"] = "sync"
    """async: a sampler in its own process works ahead, with weights some steps old."""
    max_staleness: int | None = None
    """How many steps old, at most and as a rule; by default 1 with --rollouts async. 0: sync."""
    sync_every: int = 1
    """Steps between the versions of the weights that such a sampler gets; at most --max_staleness +
    1."""
    sampler_url: str = ""
    """vLLM server to sample from, http://HOST:PORT, or several, with commas; see
    docs/asynchronous.md."""
    max_sampler_mismatch: float = 0.1
    """Mean nats a token between sampler's and trainer's log-probs, above which to stop."""
    eval_interval: int = 20
    """Steps between evaluations on the test problems; they also run at the very start and end."""
    eval_max_new_tokens: int = 0
    """Longest response in them; 0: --max_new_tokens."""
    save_interval: int = 20
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """Newest checkpoints kept; 0: all."""
    max_bad_steps: int = 3
    """The run stops after so many steps in a row of updates whose loss or gradient is not
    finite."""
    max_grader_failures: float = 0.05
    """The run stops where more of 20 steps' answers cannot be graded (time, memory)."""
    data_seed: int | None = None
    """Seed of the order of prompts and mini-batches; by default --seed."""
    sampling_seed: int | None = None
    """Seed of the rollouts' samples; by default --seed."""
    deterministic: bool = False
    """On GPUs, use torch's deterministic kernels, where there are any; slower. A CPU needs none."""
    log_state: bool = False
    auto_sft: bool = False
    """Run `sft` with the same preset first where --sft_base does not exist yet."""
    preview: int = 0
    """Print so many problems as the model would see them, and the rewards of their answers, and
    end; 0: none."""
    resume: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "sampling_temperature", self.sampling_temperature > 0, "a number above 0")
        raw_rewards = self.loss.weight == "raw_rewards"  # raises `UserError` for an unknown loss
        undefined = (
            "with one sample a prompt the group's mean is the reward itself and its std is"
            " undefined"
        )
        works = f"at least 2: {undefined} (only --loss_type no_baseline works with 1)"
        _require(self, "group_size", self.group_size > 1 or raw_rewards, works)
        works = (
            f"0 with --loss_type {self.loss_type}, which learns from groups of equal rewards too"
        )
        _require(self, "max_refills", self.max_refills == 0 or not raw_rewards, works)
        _require(
            self,
            "overlong_buffer",
            0 <= self.overlong_buffer <= self.max_new_tokens,
            "from 0 (none) to --max_new_tokens",
        )
        asynchronous, most = self.rollouts == "async", self.staleness + 1
        _require(
            self,
            "max_staleness",
            asynchronous or not self.max_staleness,
            "0, or go with --rollouts async",
        )
        works = (
            f"at most {most}: later weights would come too late for --max_staleness"
            f" {self.staleness}"
        )
        _require(
            self,
            "sync_every",
            self.sync_every <= most,
            works if asynchronous else "1, or go with --rollouts async",
        )
        works = (
            f"none with --max_staleness {self.staleness} and --old_log_probs {self.old_log_probs}:"
            " the ratio of --loss_type"
        )
        works += f" {self.loss_type} is to the sampler's log-probs already"
        _require(
            self,
            "sampler_correction",
            self.sampler_correction == "none" or not self.trusts_sampler,
            works,
        )

    @property
    def staleness(self) -> int:
        """Steps that the sampler's weights may be behind."""
        return (
            0
            if self.rollouts == "sync"
            else 1
            if self.max_staleness is None
            else self.max_staleness
        )

    @property
    def trusts_sampler(self) -> bool:
        """Whether the sampler's log-probs serve as the old policy's: by --old_log_probs, or as it
        alone has stale weights."""
        return self.loss.uses_ratio and (self.staleness > 0 or self.old_log_probs == "sampler")

    @property
    def needs_old_policy(self) -> bool:
        """Whether old log-probs play a part, in ratio or correction, and can differ from the
        policy's, by several updates."""
        used = self.loss.uses_ratio or self.sampler_correction != "none"
        return used and self.updates_per_rollout > 1 and not self.trusts_sampler

    @property
    def copies_old_policy(self) -> bool:
        """Whether a copy of the policy may compute old log-probs. Adapters need no copy of the
        weights, and a copy computes without the policy's own kernels, so that the first ratio would
        be other than 1."""
        return self.needs_old_policy and not (
            self.lora_rank or self.compile or self.use_liger_kernel
        )

    @property
    def loss(self) -> Loss:
        """The loss that --loss_type names. Raises `UserError` for an unknown one."""
        # Nothing is known of a user's own function: it may use the ratio, and every argument.
        users_own = partial(Loss, weight=None, uses_ratio=True, arguments=OPTIONAL_ARGUMENTS)
        return find("--loss_type", self.loss_type, LOSSES, wrap=users_own)

    @property
    def seeds(self) -> dict[str, int]:
        data = self.seed if self.data_seed is None else self.data_seed
        return {
            "data": data,
            "sampling": self.seed if self.sampling_seed is None else self.sampling_seed,
            "model": self.seed,
        }

    @property
    def rollout_size(self) -> int:
        """Responses in one rollout."""
        return self.prompts_per_rollout * self.group_size

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser updates made on one rollout; the last of an epoch may be smaller."""
        return self.epochs_per_rollout * -(
            -self.rollout_size // (self.train_mini_batch_size or self.rollout_size)
        )

    @property
    def sampling(self) -> SamplingConfig:
        """How rollouts are drawn, but for the step's seed and the task's stop strings."""
        distribution = self.sampling_temperature, self.sampling_top_p, self.sampling_top_k
        return SamplingConfig(self.group_size, *distribution, self.max_new_tokens)

    @property
    def schedule(self) -> Schedule:
        """Which version of the weights samples which step."""
        return Schedule(self.num_steps, self.staleness, self.sync_every)

    @property
    def rollout_config(self) -> RolloutConfig:
        return configuration(
            RolloutConfig, self, data_seed=self.seeds["data"], sampling_seed=self.seeds["sampling"]
        )

    @property
    def update_config(self) -> UpdateConfig:
        old = (
            "sampler" if self.trusts_sampler else "policy" if self.needs_old_policy else "ratio_one"
        )
        return configuration(
            UpdateConfig,
            self,
            loss=configuration(LossConfig, self),
            advantage=configuration(AdvantageConfig, self),
            distribution=self.sampling.distribution,
            old_log_probs=old,
            data_seed=self.seeds["data"],
        )


@dataclass(frozen=True)
class PlanArgs(RLArgs):
    """Show which role and which part of the policy would sit on which device, what each phase of a
    step takes there, and the command that trains so. Takes every argument of train_rl."""

    num_gpus: int | None = None
    """GPUs of a machine to plan for; by default those of this one."""
    machines: int = 1
    """Machines to plan for, all alike; several start the processes of a replicated or sharded
    policy."""
    gpu_memory: float | None = None
    hardware: str = ""
    """Instead of these: machines x GPUs x card, as 8xA100-40GB, 2x8xH100, or 8xFILE.toml of your
    own card."""
    price: float = 0.0
    """Dollars that an hour of one GPU costs, or of a machine without; adds the run's price. 0:
    unknown."""
    calibrate: tuple[str, ...] = ()
    """Folders of finished runs on such a machine, whose seconds tell its rates."""
    best: bool = False
    """Rank the placements and parallelisms that fit by their time, each with its command line."""
    json: str = ""
    """File to write all of it to."""


@dataclass(frozen=True)
class SweepOptions:
    """Train every combination of the values given, with every seed, and say which choice made the
    difference. Every argument of train_rl may be given here, most with several values: --loss_type
    no_baseline grpo_clip --seed 0 1 2"""

    preset: str = "tiny"
    """Named set of arguments that all arms start from."""
    sweep_file: str = ""
    """TOML file of named arms, for arms that differ in several arguments: a table [arms.NAME]
    each."""
    run_name: Annotated[str, tyro.conf.arg(aliases=("--sweep_name",))] = ""
    """Name of the folder, a new one or to continue."""
    output_dir: str = "checkpoints"
    """Folder that holds the sweep's folder; with several machines, one that all of them share."""
    trackers: tuple[TrackerName, ...] = ("tensorboard",)
    """Where every run's numbers go besides its folder."""
    hold: Literal["rollouts", "prompts"] = "rollouts"
    match: Match = "steps"
    tie: float = 0.03
    """Difference of accuracies below which two arms are taken to tie, once that is shown."""
    controls: bool = False
    """Add arms of random, format-only and inverted reward, and at learning rate 0: what comes by
    itself."""
    strict: bool = False
    """Take the design's warnings for errors."""
    dry_run: bool = False
    """Print the design, and train nothing."""
    until_decided: bool = False
    question: tuple[str, ...] = ()
    max_seeds: int = 10
    """Seeds an arm may get."""
    hardware: str = ""
    """Machine to count hours for, as plan's; with --calibrate and empty: this one."""
    calibrate: tuple[str, ...] = ()
    """Finished runs on such a machine, which tell its rates."""
    price: float = 0.0
    """Dollars an hour of one GPU, or of a machine without. 0: unknown."""
    show_difference: float = 0.0
    """Difference of accuracies to find, by the cheapest number of seeds and questions. 0: none."""
    executor: Literal["auto", "local", "ray", "slurm"] = "auto"
    ray_address: str = ""
    """Ray cluster to run on; empty: this machine."""
    slurm: tuple[str, ...] = ()
    """sbatch's options for each run, such as partition=gpu time=240 (minutes; 60) mem=64G."""
    cpus_per_run: int | None = None
    """Cores and threads of a run; by default 1 where runs share a machine, all without Ray."""
    gpus_per_run: int | None = None
    """Whole GPUs of a run, for its roles to be placed on; by default 1 where there are any."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(self, "question", len(self.question) < 3, "one argument, two values or two arms")
        _require(
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
        _require(self, "slurm", not self.slurm or pairs and self.executor == "slurm", works)

    @property
    def slurm_parameters(self) -> dict[str, int | str]:
        """sbatch's options for each run."""
        own = {"time": 60, "cpus_per_task": self.cpus_per_run, "gpus_per_node": self.gpus_per_run}
        given = own | dict(pair.split("=", 1) for pair in self.slurm)
        return {
            name: int(value) if str(value).isdigit() else value
            for name, value in given.items()
            if value is not None
        }


NOT_SWEPT = frozenset(FLAGS["kinds"]["not_swept"])
SweepArgs = dataclasses.make_dataclass(
    "SweepOptions",  # tyro reads descriptions of fields from the source of the class of this name
    [
        (
            name,
            Annotated[
                tuple[hint, ...],
                tyro.conf.arg(help=f"One or several values of train_rl's --{name}."),
            ],
            (),
        )
        for name, hint in get_type_hints(RLArgs).items()
        if name not in NOT_SWEPT
    ],
    bases=(SweepOptions,),
    frozen=True,
    namespace={"__module__": __name__, "__doc__": SweepOptions.__doc__},
)


@dataclass(frozen=True)
class ClaimsArgs(SweepArgs):
    """List claims of papers with what runs here say of them, and train what is missing. All arms
    share train_rl's arguments."""

    preset: tuple[str, ...] = (
        "tiny",
        "countdown_tiny",
    )
    """Named sets of arguments, a task each, that all arms start from."""
    run: tuple[Literal["all", *CLAIMS], ...] = ()
    """Claims whose missing runs are trained first; all: every one."""
    report: str = ""
    """Folder to write the page to, as claims.md; empty: none."""


def swept_values(args: SweepOptions) -> dict[str, tuple]:
    """The arguments of train_rl that the command line gives, seeds aside, each with its values."""
    names = (
        f.name for f in dataclasses.fields(RLArgs) if f.name not in NOT_SWEPT and f.name != "seed"
    )
    return {name: getattr(args, name) for name in names if getattr(args, name)}


def refuse_missing_warm_start(args: RLArgs) -> None:
    """Raise `UserError` where --sft_base is not there and will not be made."""
    if args.sft_base and not args.auto_sft and not Path(args.sft_base).exists():
        remedy = (
            f"make it with `uv run -m alignment.sft --preset {args.preset}`, or start from --model"
            " with --sft_base ''"
        )
        raise UserError(f"--sft_base {args.sft_base} does not exist: {remedy}")


def command_line(args: Args) -> list[str]:
    """The flags that give these arguments on top of their preset."""
    preset = vars(from_preset(type(args), args.preset))
    changed = {name: value for name, value in vars(args).items() if value != preset[name]}
    return flags_of({"preset": args.preset, **changed})


def flags_of(values: Mapping[str, object]) -> list[str]:
    """The words of a command line that give these arguments; several values are a tuple or a
    list."""
    flags: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no_{name}")
        else:
            flags += [
                f"--{name}",
                *map(str, value if isinstance(value, tuple | list) else (value,)),
            ]
    return flags


def configuration(cls: type[Config], args: Args, **fields) -> Config:
    """A configuration made of `fields`, and of the arguments that have the names of its other
    fields."""
    names = {f.name for f in dataclasses.fields(cls)} - fields.keys()
    return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)}, **fields)


def _require(args, name: str, holds: bool, wanted: str) -> None:
    """Raise `UserError` for the argument `name`, with its value and what it must be, unless the
    condition holds."""
    if not holds:
        value = getattr(args, name)
        shown = (
            " ".join(map(str, value))
            if isinstance(value, tuple)
            else "''"
            if value == ""
            else value
        )
        raise UserError(f"--{name} {shown}: must be {wanted}")


def parse(cls: type[Config], argv: list[str] | None = None) -> Config:
    """Read the command line: the preset's values, if any, overridden by flags. Raises `UserError`
    for unknown or bad ones."""
    words = sys.argv[1:] if argv is None else argv
    if hasattr(cls, "resume"):
        words = _with_flags_of_run(cls, words)
        # args.json and reports have the whole command
        sys.argv[1:] = words if argv is None else sys.argv[1:]
    options: dict = {"use_underscores": True}
    if issubclass(cls, Args):
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--preset", default=Args.preset)
        # which decides the others' defaults
        options["default"] = from_preset(cls, parser.parse_known_args(words)[0].preset)
    if {"-h", "--help"} & set(words):
        _print_help(cls, options)
        sys.exit(0)
    printed = "--print_config" in words and "preset" in cls.__dataclass_fields__
    words = [word for word in words if not (printed and word == "--print_config")]
    with on_parse_error(partial(_refuse, cls, words)):
        args = tyro.cli(cls, args=words, **options)
    if printed:
        make_console().print(as_toml(args), markup=False, highlight=False, soft_wrap=True)
        sys.exit(0)
    return args


def _print_help(cls: type, options: Mapping[str, object]) -> None:
    """Print the flags of a command in the groups of flags.toml, without those that play no part in
    it."""
    command = (_tables(cls) or [Path(sys.argv[0]).stem])[-1]
    first, unused = (FLAGS[of].get(command, []) for of in ("first", "unused"))
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        actions = tyro.extras.get_parser(cls, **options)._actions
    flags = {action.dest: action for action in actions if action.dest not in (*unused, "help")}
    for action in flags.values():
        # the metavar says already that there may be several
        action.nargs = None if action.nargs == "*" else action.nargs
        action.help = f"{FLAGS['help'].get(action.dest, '')} {action.help}".strip()
    formatter = argparse.HelpFormatter(
        "", max_help_position=30, width=min((console := make_console()).width, 100)
    )
    formatter.add_text(f"usage: python -m alignment.{Path(sys.argv[0]).stem} [-h] [flags]")
    presets = (
        " `python -m alignment.presets` lists presets; --print_config prints all arguments as a"
        " preset's file."
    )
    formatter.add_text(cls.__doc__ + presets * ("preset" in flags))
    groups = {"what matters first": first} | FLAGS["groups"] if "task" in flags else {}
    for title, names in (groups | {"flags": list(flags)}).items():
        formatter.start_section(title)
        formatter.add_arguments([flags.pop(name) for name in names if name in flags])
        formatter.end_section()
    console.print(formatter.format_help(), markup=False, highlight=False, soft_wrap=True)


def as_toml(args) -> str:
    """All arguments but --preset as a preset's file has them: shared ones at its top, a command's
    own in its table."""
    values = {
        key: value
        for key, value in vars(args).items()
        if key != "preset" and value not in (None, ())
    }
    lines = {
        key: f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()
    }
    tables = _tables(type(args))[-1:]
    own = [line for key, line in lines.items() if tables and key not in Args.__dataclass_fields__]
    return "\n".join(
        [
            *(line for line in lines.values() if line not in own),
            *(f"\n[{table}]" for table in tables),
            *own,
        ]
    )


def _with_flags_of_run(cls: type[Config], words: list[str]) -> list[str]:
    """A command line with the flags of the run's args.json for a folder after --resume. Raises
    `UserError` if it has none."""
    place = words.index("--resume") + 1 if "--resume" in words else len(words)
    if place == len(words) or words[place].startswith("--"):
        return words
    folder = Path(words[place])
    given = read_json(file).get("args") if (file := folder / "args.json").is_file() else None
    if not isinstance(given, dict):
        raise UserError(f"--resume {folder}: must be a run's folder, which has an args.json")
    known = {
        name: tuple(v) if isinstance(v, list) else v
        for name, v in given.items()
        if name in cls.__dataclass_fields__
    }
    run = cls(
        **{**known, "output_dir": str(folder.parent), "run_name": folder.name, "resume": True}
    )
    return [*command_line(run), *words[: place - 1], *words[place + 1 :]]


def _refuse(cls: type, words: Sequence[str], mistake: ParseErrorEvent) -> None:
    """Raise `UserError` for a mistake that tyro found, with the nearest flag or choice, or ours for
    a name of TRL or verl."""
    if argument := getattr(mistake, "argument", None):
        name, kind, hints = (
            argument.field.intern_name,
            argument.lowered.metavar,
            get_type_hints(cls),
        )
        value = re.search(rf"--{name}[ =](.*?)( --|$)", " ".join(words))
        wanted = (
            "must be a whole number"
            if "INT" in kind
            else "must be a number"
            if "FLOAT" in kind
            else f"must be {kind}"
        )
        if hasattr(mistake, "value"):
            literals = (
                hint
                for hint in (hints[name], *get_args(hints[name]))
                if get_origin(hint) is Literal
            )
            choices = [*map(str, get_args(next(literals, None)))] or mistake.choices
            wanted = f"choose one of {', '.join(choices)}{did_you_mean(mistake.value, choices)}"
        raise UserError(
            f"--{name} {getattr(mistake, 'value', value[1] if value else '(no value)')}: {wanted}"
        )
    if missing := getattr(mistake, "missing_arguments", ()):
        raise UserError(
            f"--{missing[0].arg.field.intern_name}: must be given; --help says what it is"
        )
    given = mistake.tokens[0].partition("=")[0]
    name, hints = given.lstrip("-+").replace("-", "_"), get_type_hints(cls)
    other = {
        name: remedy for remedy, names in read_toml(OTHER_NAMES, given).items() for name in names
    }
    own = sorted({"help", *hints, *(f"no_{name}" for name, hint in hints.items() if hint is bool)})
    nearest = did_you_mean(f"--{name}", [f"--{each}" for each in own]) or "; --help lists all"
    raise UserError(
        f"{given}: there is no such flag{f'; {other[name]}' if name in other else nearest}"
    )


def from_preset(cls: type[Config], name: str, **overrides) -> Config:
    """The arguments of a command as the preset states them, with `overrides`. A preset file holds
    shared values at its top and a table for each command ("sft", "evaluate", "train_rl"); its table
    [about] is for people."""
    if name not in (names := preset_names()):
        listed = ", ".join(names) + did_you_mean(name, names)
        raise UserError(f"--preset {name}: there is no such preset; choose one of {listed}")
    values = {
        k: tuple(v) if isinstance(v, list) else v
        for k, v in read_toml(PRESETS / f"{name}.toml", "--preset").items()
    }
    shared = {key: value for key, value in values.items() if not isinstance(value, dict)}
    own = {key: value for table in _tables(cls) for key, value in values.get(table, {}).items()}
    return cls(**{"preset": name, **shared, **own, **overrides})


def _tables(cls: type) -> list[str]:
    """The tables of a preset's file that a command reads, its own last."""
    tables = {
        SFTArgs: "sft",
        RLArgs: "train_rl",
        VerifyArgs: "verify",
        EvaluateArgs: "evaluate",
        PlanArgs: "plan",
    }
    return [
        name
        for kind, name in {**tables, RejectionArgs: "rejection_sample"}.items()
        if issubclass(cls, kind)
    ]


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def as_command(cls: type[Config], other: Args) -> Config:
    """The arguments of another command that shares `other`'s preset and every value both have in
    common."""
    return from_preset(
        cls, other.preset, **{f.name: getattr(other, f.name) for f in dataclasses.fields(Args)}
    )


@dataclass(frozen=True)
class RejectionArgs(Args):
    """Sample answers to training problems, keep those that are right, readable and in one language,
    and write them as JSONL."""

    output: str = ""
    """File to write, one kept answer a line; `sft --demonstrations` reads it."""
    num_problems: int = 512
    """Training problems to ask, the first ones."""
    num_samples: int = 8
    """Answers sampled for each."""
    keep: Literal["best", "all"] = "all"
    """Of the answers to a problem that pass: the shortest, or all."""
    min_consistency: float = 0.95
    """Share of an answer's words that must be in its question's language."""
    few_shot: str = ""
    """JSONL file of worked examples that are put before each question; empty: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self, "num_problems", self.num_problems > 0, "at least 1")


@dataclass(frozen=True)
class VerifyArgs(RLArgs):
    """Check, with a run's own settings, what this machine computes: log-probs, gradient and step
    against plain computation, the sampler against the trainer before and after updates; and that a
    killed run resumes to the same bits. Takes every argument of train_rl; --num_steps and
    --save_interval are set by --kill_after."""

    kill_after: int = 3
    batch_invariant: bool = False
    """On GPUs, sample by vLLM's kernels that give the same bits whatever shares a batch; slower."""


@dataclass(frozen=True)
class GradientsArgs:
    """Sample one set of rollouts, and compare the gradients that losses, normalisations and group
    sizes make of it."""

    preset: str = "tiny"
    """Named set of arguments: task, model, devices, sampling."""
    prompts: int = 32
    """Prompts; each one's gradient is one observation."""
    group_size: tuple[int, ...] = (
        2,
        4,
        8,
        16,
    )
    """Group sizes to compare: each prompt's responses are cut into such groups."""
    updates: Literal[0, 1] = 1
    """1: also look at clipped losses after one update on these rollouts, where the ratio is not
    1."""
    seed: int = 0
    """Seed of prompts and samples."""
    output_dir: str = "checkpoints"
    """Folder that holds the warm start."""
    sweep_file: str = ""
    """TOML file of named arms, a sweep's: compare the gradients of their first two updates
    instead."""

    def __post_init__(self) -> None:
        _check_values(self)
        _require(self, "group_size", min(self.group_size, default=0) >= 2, "at least 2")
        if any(max(self.group_size) % size for size in self.group_size):
            raise UserError(
                f"--group_size: every size must divide the largest, {max(self.group_size)}"
            )


@dataclass(frozen=True)
class ReportArgs:
    """Write a report from a sweep's folder, or from folders of runs: report.html, report.md,
    figures and tables."""

    runs: tuple[str, ...]
    """Folders of sweeps and of runs; a single one, also of a run, may still be training."""
    output: str = ""
    """Folder to write to; empty: the first of --runs."""
    tie: float = 0.03
    """Difference of accuracies below which two arms are taken to tie; a sweep's folder has its
    own."""
    match: Match = "steps"
    """A sweep's folder has its own."""
    follow: bool = False
    """Write the report again, every 30 s, until all runs are finished."""


@dataclass(frozen=True)
class PipelineArgs:
    """Run the stages of a file, one after another; a pipeline that was stopped goes on at the stage
    it stopped in."""

    file: str
    """TOML file of the stages."""
    run_name: Annotated[str, tyro.conf.arg(aliases=("--name",))] = ""
    """Name of the pipeline's folder; empty: the file's."""
    output_dir: str = "checkpoints"
    """Folder that holds the pipeline's folder."""
    dry_run: bool = False
    """Print the commands, and run nothing."""


@dataclass(frozen=True)
class DownloadArgs:
    """Download GSM8K, or the task that --task names; a broken transfer goes on where it stopped."""

    task: Literal[tuple(PUBLISHED)] = "gsm8k"
    """The task whose problems these are."""
    folder: str = ""
    """Where the two files go; empty: dataset/TASK, where the task looks for them."""
    source: str = ""
    """Address of the folder that holds them; empty: where they are published."""
