"""The arguments of the commands that train, sample and evaluate: flags of each concern together,
and what follows from several of them."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import tyro

from alignment.config.data import DataFlags, SFTShareFlags, TrainingDataFlags
from alignment.config.devices import DeterminismFlags, KernelFlags, MachineFlags, PlacementFlags
from alignment.config.evaluation import (
    EvaluationFlags,
    PromptLengthFlags,
    RLEvaluationFlags,
    TrainingEvaluationFlags,
)
from alignment.config.flag import (
    DataclassInstance,
    check_flags,
    check_packages,
    flag,
    names_of_flags,
    require,
)
from alignment.config.loss import LossFlags, LossTypeFlags, TeacherFlags
from alignment.config.model import AdapterFlags, ModelFlags
from alignment.config.optimisation import (
    LearningRateFlags,
    MiniBatchFlags,
    OptimizerFlags,
    SFTLearningRateFlags,
    SFTStepFlags,
    StepFlags,
    WeightLimitFlags,
)
from alignment.config.presets import PresetArguments
from alignment.config.run import CheckpointFlags, PresetFlags, RLRunFlags, RunFlags
from alignment.config.sampling import EngineFlags, RolloutSizeFlags, SamplingFlags, StalenessFlags
from alignment.config.settings import (
    check_own_settings,
    fields_of,
    find_advantage,
    find_loss,
    flag_values,
    settings_of,
)
from alignment.core.advantages import ADVANTAGES, Advantage, AdvantageConfig
from alignment.core.losses import Loss, LossConfig
from alignment.core.records import SamplingConfig
from alignment.core.selection import SELECTIONS, Selection
from alignment.data.pass_rates import read_band
from alignment.data.tasks import END_TOKEN_ALONE, DataConfig, Task, find_task
from alignment.rewards.rules import (
    AUTO,
    evaluation_rule,
    refuse_unknown_reward,
    resolved_reward,
)
from alignment.rollouts.config import RolloutConfig, Schedule, UpdateConfig
from alignment.system.errors import UserError

Config = TypeVar("Config", bound=DataclassInstance)


FLAGS_OF_TRAINING = (
    "sft_base",
    "lora_rank",
    "lora_alpha",
    "lora_targets",
    "policy_devices",
    "policy_parallelism",
    "policy_ranks",
    "rank_timeout",
    "compile",
    "use_liger_kernel",
    "kernels",
    "reference_model_device",
)
"""Flags of every command's `Args` that play no part where nothing is trained."""


# A dataclass has the fields of its last base first. The arms of a sweep are named after their
# arguments in the order of the fields, so the order of the bases must not change.
@dataclass(frozen=True)
class Args(
    RunFlags,
    EvaluationFlags,
    SamplingFlags,
    KernelFlags,
    AdapterFlags,
    PlacementFlags,
    EngineFlags,
    ModelFlags,
    DataFlags,
    PresetFlags,
    metaclass=PresetArguments,
):
    """What every command shares."""

    own_settings: Annotated[tuple[tuple[str, Any], ...], tyro.conf.Fixed, tyro.conf.Suppress] = ()
    """(name, value) of each setting that only the chosen loss, advantage, reward or sampler has,
    such as ("loss.alpha", 0.3), where it is given (`alignment.config.settings`)."""

    def __post_init__(self) -> None:
        check_flags(self)
        refuse_unknown_reward(self.reward)
        check_packages(self)
        check_own_settings(self)
        are_strings = "" not in self.stop and (
            self.stop == END_TOKEN_ALONE or "none" not in self.stop
        )
        require(self, "stop", are_strings, "strings of a character or more, or none alone")
        if self.compile and self.use_liger_kernel:
            raise UserError(
                "--compile: torch does not compile Liger's kernels; leave out this flag or"
                " --use_liger_kernel"
            )
        if self.kernels not in ("auto", "eager") and (self.compile or self.use_liger_kernel):
            other = "--compile" if self.compile else "--use_liger_kernel"
            raise UserError(
                f"--kernels {self.kernels}: it chooses the layers' kernels, and so does {other};"
                " leave out one of the two"
            )
        if self.eval_greedy and self.eval_temperature == 0:
            raise UserError(
                "--eval_greedy: the samples of --eval_temperature 0 are greedy already; leave out"
                " one of the two"
            )

    @property
    def data(self) -> DataConfig:
        """What is in which column of the user's own data."""
        return configuration(DataConfig, self)

    @property
    def reward_settings(self) -> tuple[tuple[str, Any], ...]:
        """(name, value) of the settings that the parts of --reward have of their own."""
        return tuple(fields_of(self, "reward").items())

    @property
    def sampler_settings(self) -> Any:
        """The settings that the engine of --sampler has of its own; None where it has none."""
        return settings_of(self, "sampler")

    @property
    def resolved_reward(self) -> str:
        """--reward, and for "auto" the rule that it stands for. Raises `UserError` for an unknown
        --task."""
        return resolved_reward(self.reward, self.task_in_format.rules)

    @property
    def default_reward(self) -> str:
        """The rule that --reward "auto" stands for. Raises `UserError` for an unknown --task."""
        task = find_task(self.task, self.data).in_format(self.prompt, AUTO)
        return resolved_reward(AUTO, task.rules)

    @property
    def recorded_values(self) -> dict[str, Any]:
        """The values of all flags as args.json has them: as `flag_values`, with the reward that
        "auto" stands for. Raises `UserError` for an unknown --task."""
        return flag_values(self) | {"reward": self.resolved_reward}

    @property
    def automatic(self) -> tuple[str, ...]:
        """Names of the flags that are "auto" and have another value in `recorded_values`."""
        return ("reward",) if self.reward == AUTO else ()

    @property
    def task_rule(self) -> str:
        """Name of the rule of --reward where the task has it, else of the task's first. Raises
        `UserError` for an unknown --task."""
        return evaluation_rule(self.reward, self.task_in_format.rules)

    @property
    def evaluation_rule(self) -> str:
        """Name of the rule that evaluations report. Raises `UserError` for an unknown --task."""
        return self.eval_rule or self.task_rule

    @property
    def evaluation_temperature(self) -> float:
        """Softmax temperature of evaluation samples; 0 is greedy."""
        if self.eval_temperature is None:
            return self.sampling_temperature
        return self.eval_temperature

    @property
    def evaluation_top_p(self) -> float:
        """Nucleus of evaluation samples."""
        return self.eval_top_p or self.sampling_top_p

    @property
    def evaluation_top_k(self) -> int:
        """Likeliest tokens that evaluation samples are drawn from; 0: all."""
        if self.eval_top_k is None:
            return self.sampling_top_k
        return self.eval_top_k

    @property
    def task_in_format(self) -> Task:
        """The task with the prompt, rules and stop strings that --prompt, --reward and --stop ask
        for. Raises `UserError` for an unknown --task."""
        task = find_task(self.task, self.data).in_format(self.prompt, self.reward)
        return task.with_stop(self.stop)


@dataclass(frozen=True)
class EvaluateArgs(PromptLengthFlags, Args):
    """Sample answers to the test problems, score them, and print the averages with their 95 %
    intervals."""

    TABLE: ClassVar[str] = "evaluate"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "eval_tasks",
        "model",
        "compare",
        "num_samples",
        "max_problems",
        "max_new_tokens",
        "sampling_temperature",
        "run_name",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        *FLAGS_OF_TRAINING,
        "sampler_tensor_parallel",
    )

    num_samples: int = flag(1, group="evaluation", at_least=1, aliases=("eval_samples",))
    """Samples a problem; above 1 adds pass@k and maj@k."""
    eval_tasks: tuple[str, ...] = flag((), group="evaluation")
    """What to evaluate on instead of --task: benchmarks (gsm8k math500 aime24 aime25 amc23 minerva
    olympiad svamp), tasks, file:FILE, hf:NAME."""
    compare: tuple[str, ...] = flag((), group="evaluation")
    """Two models, instead of --model: the same problems, and the second's paired difference."""
    preview: int = flag(0, group="run", at_least=0, zero="none")
    """Print so many problems as the model would see them, and the rewards of their answers, and
    end; 0: none."""
    examples: int = flag(0, group="evaluation", at_least=0, zero="none")
    """Worked examples of the task's training split before each question (few-shot)."""
    audit_base: bool = flag(False, group="evaluation")
    """Evaluate the model under each format of prompt and answer, instead of one, and print them
    best first: what a base model can do before it has learnt a format."""
    partial_prompts: float = flag(0.0, group="evaluation", at_least=0, below=1, zero="whole ones")
    """Give this share of each test question, such as 0.6, instead of all, and count what the model
    continues word for word, greedily: whether it has read them before. 0: ask whole questions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_audit_alone = not (self.compare or self.prompt or self.examples or self.few_shot)
        wanted = (
            "without --prompt, --examples, --few_shot and --compare, since it sets the first two"
            " itself"
        )
        require(self, "audit_base", not self.audit_base or is_audit_alone, wanted)
        is_one = not (self.examples and self.few_shot)
        require(self, "few_shot", is_one, "left out with --examples, or these without it")
        are_two_models = len(self.compare) == 2 and not self.eval_tasks
        wanted = "two models, on one --task"
        require(self, "compare", not self.compare or are_two_models, wanted)
        # Two tokenizers, or two formats, would leave out different problems.
        is_one_format = not (self.compare or self.audit_base)
        wanted = "0 with --compare and --audit_base, which ask the same problems twice"
        require(self, "max_prompt_tokens", not self.max_prompt_tokens or is_one_format, wanted)
        is_alone = not (self.audit_base or self.compare or self.num_samples > 1 or self.eval_greedy)
        wanted = "0 with --audit_base, --compare, --eval_greedy and several samples"
        require(self, "partial_prompts", not self.partial_prompts or is_alone, wanted)
        if self.eval_greedy and (self.compare or self.audit_base):
            raise UserError(
                "--eval_greedy: --compare and --audit_base are of one evaluation of each model;"
                " choose --eval_temperature 0"
            )


@dataclass(frozen=True)
class SFTArgs(
    WeightLimitFlags,
    SFTLearningRateFlags,
    OptimizerFlags,
    SFTStepFlags,
    TrainingEvaluationFlags,
    PromptLengthFlags,
    SFTShareFlags,
    Args,
):
    """Fine-tune the base model on worked solutions, response tokens only, and save it to
    --sft_base."""

    TABLE: ClassVar[str] = "sft"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "model",
        "sft_base",
        "demonstrations",
        "num_steps",
        "batch_size",
        "learning_rate",
        "max_problems",
        "resume",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        "sampler_tensor_parallel",
        "run_name",
    )

    demonstrations: tuple[str, ...] = flag((), group="data")
    """Files of questions (or prompts) with responses; by default the task's own."""
    curriculum: bool = flag(False, group="data")
    """Take the demonstrations in the task's own order instead of shuffling them."""
    eval_interval: int = flag(250, group="evaluation", above=0)
    """Steps between measurements of the validation loss, and with --patience of the accuracy."""
    patience: int = flag(0, group="evaluation", at_least=0, zero="trains --num_steps")
    """End after so many measurements in a row without a better accuracy, and keep the best weights:
    on a tenth of SFT's questions, by --sft_share's hash, which it then leaves out. 0: after
    --num_steps."""
    preview: int = flag(0, group="run", at_least=0, zero="none")
    """Print so many demonstrations, with the tokens that would be trained, and end; 0: none."""
    save_interval: int = flag(250, group="run", above=0)
    """Steps between checkpoints, in a folder beside --sft_base that is removed at the end."""
    resume: bool = flag(False, group="run")
    """Go on from the last checkpoint of the run of this name; `--resume FOLDER`, the run's, with
    the flags of its args.json."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "sft_base", self.sft_base != "", "the folder to save the model to")


@dataclass(frozen=True)
class RLArgs(
    TeacherFlags,
    RLRunFlags,
    DeterminismFlags,
    CheckpointFlags,
    RLEvaluationFlags,
    TrainingEvaluationFlags,
    StalenessFlags,
    LossFlags,
    WeightLimitFlags,
    LearningRateFlags,
    OptimizerFlags,
    MiniBatchFlags,
    TrainingDataFlags,
    SFTShareFlags,
    StepFlags,
    RolloutSizeFlags,
    LossTypeFlags,
    Args,
):
    """Train the policy by policy gradients on verifiable rewards."""

    TABLE: ClassVar[str] = "train_rl"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "model",
        "loss_type",
        "group_size",
        "prompts_per_rollout",
        "num_steps",
        "learning_rate",
        "max_new_tokens",
        "run_name",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "sampling_temperature", self.sampling_temperature > 0, "a number above 0")
        self._check_groups()
        fits = 0 <= self.overlong_buffer <= self.max_new_tokens
        require(self, "overlong_buffer", fits, "from 0 (none) to --max_new_tokens")
        self._check_staleness()
        is_band = read_band(self.pass_rate_band) is not None
        wanted = "LOW-HIGH with 0 <= LOW <= HIGH <= 1, such as 0.2-0.8"
        require(self, "pass_rate_band", is_band, wanted)
        wanted = (
            f"none with --max_staleness {self.staleness} and --old_log_probs {self.old_log_probs}:"
            f" the ratio of --loss_type {self.loss_type} is to the sampler's log-probs already"
        )
        # The correction is pi_old / pi_sampler, which is 1 where pi_old is the sampler's.
        is_valid = self.sampler_correction == "none" or not self.trusts_sampler
        require(self, "sampler_correction", is_valid, wanted)
        is_valid = self.correction_floor < self.correction_cap
        require(self, "correction_floor", is_valid, f"below --correction_cap {self.correction_cap}")
        self._check_selection()
        self._check_teacher()
        self._check_log_probs_of()
        is_valid = not self.reference_reset_interval or self.beta > 0
        wanted = "0 without --beta, which alone has a reference"
        require(self, "reference_reset_interval", is_valid, wanted)
        is_valid = not self.reference_reset_optimizer or self.reference_reset_interval > 0
        wanted = "left out, or go with --reference_reset_interval"
        require(self, "reference_reset_optimizer", is_valid, wanted)
        is_valid = self.eval_split == "test" or self.validation_share > 0
        require(self, "eval_split", is_valid, "test without a --validation_share")
        self._check_train_on()

    def _check_train_on(self) -> None:
        """Raise `UserError` for --train_on solutions with what only samples have: rewards that
        differ within a group, and log-probs of a sampler."""
        takes_solutions = (
            self.loss.weight == "raw_rewards"
            and self.group_size == 1
            and self.rollouts == "sync"
            and self.sampler_correction == "none"
            and not (self.sampler_url or self.beta)
        )
        wanted = (
            "samples, or go with --loss_type no_baseline --group_size 1: a problem has one worked"
            " solution, which no sampler drew (--rollouts sync, --beta 0, --sampler_correction none"
            " and no --sampler_url)"
        )
        require(self, "train_on", self.train_on == "samples" or takes_solutions, wanted)

    def _check_selection(self) -> None:
        """Raise `UserError` for a --token_selection that can have no effect, or lacks what it
        needs."""
        selection = self.selection
        if selection is None:
            return
        is_valid = self.group_size > 1 or not selection.uses_advantages
        wanted = "none or top_entropy with --group_size 1, which has no advantages"
        require(self, "token_selection", is_valid, wanted)
        # With one update the ratio is 1, but where it is to the log-probs of an older sampler. A
        # loss without a ratio does not take these.
        is_older = self.staleness > 0 and self.loss.uses_ratio
        is_valid = not selection.adds_gradient or self.updates_per_rollout > 1 or is_older
        wanted = (
            "none with one update a rollout, in which the policy is the old policy; give"
            " --epochs_per_rollout or --train_mini_batch_size"
        )
        require(self, "token_selection", is_valid, wanted)
        is_valid = self.covariance_low < self.covariance_high
        require(self, "covariance_low", is_valid, f"below --covariance_high {self.covariance_high}")

    def _check_groups(self) -> None:
        """Raise `UserError` for a --group_size or --max_refills that does not suit the loss or the
        advantage, and for an unknown one."""
        takes_raw_rewards = self.loss.weight == "raw_rewards"
        estimator = self.estimator
        fewest = estimator.fewest_responses(settings_of(self, "advantage"))
        is_enough = self.group_size >= fewest or takes_raw_rewards
        wanted = f"at least {fewest}, as --advantage {self.advantage} needs"
        if callable(estimator.smallest_group):
            settings = fields_of(self, "advantage").items()
            flags = " ".join(f"--advantage.{name} {value}" for name, value in settings)
            wanted += f" with {flags}"
        elif fewest == 2:
            wanted = (
                "at least 2: with one sample a prompt the group's mean is the reward itself and its"
                " std is undefined (only --loss_type no_baseline works with 1)"
            )
        require(self, "group_size", is_enough, wanted)
        learner = self.learner_of_equal_groups
        wanted = f"0 with {learner}, which learns from groups of equal rewards too"
        require(self, "max_refills", self.max_refills == 0 or not learner, wanted)

    @property
    def learner_of_equal_groups(self) -> str:
        """The flag by which groups of equal rewards have a gradient too; empty without one."""
        if self.loss.weight == "raw_rewards":
            return f"--loss_type {self.loss_type}"
        if self.estimator.silent_groups:
            return f"--advantage {self.advantage}"
        if self.teacher:
            return "--teacher"
        return ""

    def _check_teacher(self) -> None:
        """Raise `UserError` for a --teacher with a loss that cannot take a token's advantage, and
        for what only makes sense with one."""
        has_teacher = self.teacher != ""
        is_valid = has_teacher or self.estimator is not ADVANTAGES["none"]
        wanted = "another estimator, or go with --teacher: nothing else has a gradient"
        require(self, "advantage", is_valid, wanted)
        is_valid = has_teacher or self.teacher_device is None
        require(self, "teacher_device", is_valid, "left out, or go with --teacher")
        wanted = "a loss of advantages with --teacher, which adds to them"
        is_valid = not has_teacher or self.loss.weight != "raw_rewards"
        require(self, "loss_type", is_valid, wanted)
        wanted = (
            "a loss with a ratio for each token with --teacher: with one ratio a response the"
            " tokens' own advantages would be averaged"
        )
        is_valid = not has_teacher or not self.loss.ratio_per_response
        require(self, "loss_type", is_valid, wanted)

    def _check_log_probs_of(self) -> None:
        """Raise `UserError` for --log_probs_of full where the loss compares the full softmax with
        the sampler's log-probs, which are of the truncated one."""
        is_truncated = self.sampling_top_p < 1 or self.sampling_top_k > 0
        if self.log_probs_of == "sampled" or not is_truncated:
            return
        user = ""
        if self.trusts_sampler:
            user = f"the ratio of --loss_type {self.loss_type}"
        elif self.sampler_correction != "none":
            user = f"--sampler_correction {self.sampler_correction}"
        elif self.teacher and not self.needs_old_policy:
            user = "--teacher"
        wanted = (
            f"sampled, or go with --sampling_top_p 1 --sampling_top_k 0: {user} takes the sampler's"
            " log-probs, which are of what top-k and top-p leave"
        )
        require(self, "log_probs_of", not user, wanted)

    def _check_staleness(self) -> None:
        """Raise `UserError` for --max_staleness or --sync_every without --rollouts async, and for a
        --sync_every that is too large for --max_staleness."""
        is_async = self.rollouts == "async"
        is_valid = is_async or not self.max_staleness
        require(self, "max_staleness", is_valid, "0, or go with --rollouts async")
        largest = self.staleness + 1
        wanted = "1, or go with --rollouts async"
        if is_async:
            wanted = (
                f"at most {largest}: later weights would come too late for --max_staleness"
                f" {self.staleness}"
            )
        require(self, "sync_every", self.sync_every <= largest, wanted)

    @property
    def staleness(self) -> int:
        """The most steps that the sampler's weights may be behind; 0 with --rollouts sync."""
        if self.rollouts == "sync":
            return 0
        return 1 if self.max_staleness is None else self.max_staleness

    @property
    def trusts_sampler(self) -> bool:
        """Whether the ratio takes the sampler's log-probs as the old policy's: where
        --old_log_probs says so, and where the weights may be stale, since the sampler alone still
        has those."""
        return self.loss.uses_ratio and (self.staleness > 0 or self.old_log_probs == "sampler")

    @property
    def needs_old_policy(self) -> bool:
        """Whether old log-probs must be computed. The ratio or the correction uses them, several
        updates a rollout make them differ from the policy's, and the sampler's do not replace
        them."""
        is_used = self.loss.uses_ratio or self.sampler_correction != "none"
        is_used = is_used or (self.selection is not None and self.selection.adds_gradient)
        return is_used and self.updates_per_rollout > 1 and not self.trusts_sampler

    @property
    def selection(self) -> Selection | None:
        """The selection of --token_selection, if any."""
        return SELECTIONS.get(self.token_selection)

    @property
    def copies_old_policy(self) -> bool:
        """Whether a copy of the policy may compute old log-probs. Not with adapters, for which all
        weights would be copied, nor with --compile or Liger's kernels, which the copy computes
        without, so that the ratio of the first update would not be exactly 1."""
        has_own_kernels = self.compile or self.use_liger_kernel or self.kernels == "liger"
        return self.needs_old_policy and not (self.lora_rank or has_own_kernels)

    @property
    def keeps_reference(self) -> bool:
        """Whether a model beside the policy gives the log-probs of --beta. With adapters the policy
        without them does, unless --reference_reset_interval asks for other weights later."""
        return self.beta > 0 and not (self.lora_rank and not self.reference_reset_interval)

    @property
    def loss(self) -> Loss:
        """The loss that --loss_type names. Raises `UserError` for an unknown one."""
        return find_loss(self.loss_type)

    @property
    def estimator(self) -> Advantage:
        """What --advantage names. Raises `UserError` for an unknown one."""
        return find_advantage(self.advantage)

    @property
    def seeds(self) -> dict[str, int]:
        """The seeds of the order of data, of the rollouts' samples, and of everything else that is
        random, such as new adapters ("model")."""
        data = self.seed if self.data_seed is None else self.data_seed
        sampling = self.seed if self.sampling_seed is None else self.sampling_seed
        return {"data": data, "sampling": sampling, "model": self.seed}

    @property
    def rollout_size(self) -> int:
        """Responses in one rollout."""
        return self.prompts_per_rollout * self.group_size

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser updates made on one rollout; the last of an epoch may be smaller."""
        mini_batch_size = self.train_mini_batch_size or self.rollout_size
        return self.epochs_per_rollout * math.ceil(self.rollout_size / mini_batch_size)

    @property
    def num_updates(self) -> int:
        """Optimiser updates of the whole run."""
        return self.num_steps * self.updates_per_rollout

    @property
    def sampling(self) -> SamplingConfig:
        """How rollouts are drawn. A step's seed and a task's stop strings are added later."""
        return SamplingConfig(
            self.group_size,
            self.sampling_temperature,
            self.sampling_top_p,
            self.sampling_top_k,
            self.max_new_tokens,
        )

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
        if self.trusts_sampler:
            old = "sampler"
        elif self.needs_old_policy:
            old = "policy"
        else:
            old = "ratio_one"
        return configuration(
            UpdateConfig,
            self,
            loss=configuration(LossConfig, self, settings=settings_of(self, "loss")),
            advantage=configuration(AdvantageConfig, self, settings=settings_of(self, "advantage")),
            distribution=self.sampling.distribution,
            old_log_probs=old,
            data_seed=self.seeds["data"],
        )


CHANGEABLE_ON_RESUME = names_of_flags(RLArgs, "changeable")
"""Arguments that a resumed run may change. Those of evaluations may be among them: an evaluation
draws from a generator of its own, so it changes no step."""
REPRODUCIBILITY_SETTING = names_of_flags(RLArgs, "setting")
"""Arguments that decide how far a run is reproducible. What `verify` has shown of one run holds for
every run with the same values of them."""


@dataclass(frozen=True)
class PlanArgs(MachineFlags, RLArgs):
    """Show which role and which part of the policy would sit on which device, what each phase of a
    step takes there, and the command that trains so. Takes every argument of train_rl."""

    TABLE: ClassVar[str] = "plan"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "model",
        "hardware",
        "price",
        "best",
        "calibrate",
        "json",
        "optimizer",
        "policy_parallelism",
        "lora_rank",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        "preview",
        "quiet",
        "trackers",
    )


@dataclass(frozen=True)
class RejectionArgs(PromptLengthFlags, Args):
    """Sample answers to training problems, keep those that are right, readable and in one language,
    and write them as JSONL."""

    TABLE: ClassVar[str] = "rejection_sample"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "model",
        "output",
        "num_problems",
        "num_samples",
        "keep",
        "few_shot",
        "max_new_tokens",
        "sampling_temperature",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        *FLAGS_OF_TRAINING,
        "eval_device",
        "eval_temperature",
        "eval_top_p",
        "eval_top_k",
        "eval_rule",
        "eval_greedy",
        "max_problems",
        "run_name",
    )

    output: str = flag("", group="data")
    """File to write, one kept answer a line; `sft --demonstrations` reads it."""
    num_problems: int = flag(512, group="data", at_least=1)
    """Training problems to ask, the first ones."""
    num_samples: int = flag(8, group="evaluation", at_least=1)
    """Answers sampled for each."""
    keep: Literal["best", "all"] = flag("all", group="data")
    """Of the answers to a problem that pass: the shortest, or all."""
    min_consistency: float = flag(0.95, group="data", at_least=0, at_most=1)
    """Share of an answer's words that must be in its question's language."""
    # Kept answers are data to train on, so that nothing of an evaluation's own decides them.

    @property
    def evaluation_rule(self) -> str:
        return self.task_rule

    @property
    def evaluation_temperature(self) -> float:
        return self.sampling_temperature

    @property
    def evaluation_top_p(self) -> float:
        return self.sampling_top_p

    @property
    def evaluation_top_k(self) -> int:
        return self.sampling_top_k


@dataclass(frozen=True)
class AskArgs(Args):
    """Ask one or several models a question in the format of --task, and print their answers, with
    their rewards where --gold says what is right. Without --question, questions are typed, a line
    each, until an empty one."""

    TABLE: ClassVar[str] = "ask"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "models",
        "question",
        "gold",
        "num_samples",
        "prompt",
        "reward",
        "max_new_tokens",
        "sampling_temperature",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        *FLAGS_OF_TRAINING,
        "sampler_tensor_parallel",
        "eval_greedy",
        "max_problems",
        "output_dir",
        "quiet",
        "run_name",
        "trackers",
    )

    models: tuple[str, ...] = flag((), group="model")
    """Models to ask, instead of --model, such as a base model, a warm start and a run's final
    model. All are in memory at once."""
    question: str = flag("", group="data")
    """The question; empty: questions are typed."""
    gold: str = flag("", group="data")
    """The right answer to --question, against which the rule grades; empty: none is graded."""
    num_samples: int = flag(1, group="evaluation", at_least=1, aliases=("eval_samples",))
    """Answers of each model to each question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = bool(self.question) or not self.gold
        require(self, "gold", is_valid, "left out without --question, to which it is the answer")

    @property
    def all_models(self) -> tuple[str, ...]:
        """--models, else --model alone."""
        return self.models or (self.model,)


@dataclass(frozen=True)
class VerifyArgs(RLArgs):
    """Check, with a run's own settings, what this machine computes: log-probs, gradient and step
    against plain computation, the sampler against the trainer before and after updates; and that a
    killed run resumes to the same bits. Takes every argument of train_rl; --num_steps and
    --save_interval are set by --kill_after."""

    TABLE: ClassVar[str] = "verify"
    FIRST_FLAGS: ClassVar[tuple[str, ...]] = (
        "preset",
        "task",
        "model",
        "loss_type",
        "kill_after",
        "policy_parallelism",
        "sampler",
        "dtype",
        "deterministic",
        "run_name",
    )
    UNUSED_FLAGS: ClassVar[tuple[str, ...]] = (
        "num_steps",
        "save_interval",
        "keep_checkpoints",
        "resume",
        "trackers",
    )

    kill_after: int = flag(3, group="run", at_least=0, zero="none")
    """k: train 2k steps straight; then k, kill, resume, k; and compare. 0: leave that out, as it is
    behind torchrun."""
    batch_invariant: bool = flag(False, group="devices")
    """On GPUs, sample by vLLM's kernels that give the same bits whatever shares a batch; slower."""
    json: str = flag("", group="run")
    """Write every line to this file: its name, verdict, value and tolerance. Empty: no file."""


def configuration(cls: type[Config], args: Args, **fields) -> Config:
    """A `cls` made of `fields`; its other fields take the arguments of the same names, or else
    their defaults."""
    values = dict(fields)
    for field in dataclasses.fields(cls):
        if field.name not in fields and hasattr(args, field.name):
            values[field.name] = getattr(args, field.name)
    return cls(**values)
