"""Two rollouts and their updates by the program's own path, from sampled groups to moments, and
what the papers say of the same samples (whole_update.py)."""

import dataclasses
import functools
import itertools
import math
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import load_file, save_file

from alignment.core.advantages import ADVANTAGES
from alignment.core.losses import LOSSES
from alignment.core.records import Completion, Group, Rollout
from alignment.policy.policy import Policy
from alignment.rollouts.config import RolloutConfig, UpdateConfig, problems_of_step
from alignment.rollouts.source import RolloutSource, collate_groups, with_advantages
from alignment.sampling.sampler import Sampler
from alignment.system.errors import RunStopped
from alignment.training.update import References, mini_batches, rollout_objective, update
from alignment.verification.check import Check
from alignment.verification.precision import MOST_ROUNDED, rounded_share
from alignment.verification.reported import tolerance_of
from alignment.verification.whole_update import (
    Outcome,
    PlainModel,
    PlainResponse,
    PlainRollout,
    TrainedState,
    flat_moments,
    load_adapters,
    mini_batch_faults,
    relative_difference,
    train,
    with_length_rewards,
)
from alignment.verification.whole_warm_start import (
    WarmStart,
    faults_of_batches,
    fine_tuned,
    fit,
    other_figures,
    supervised_config,
)

PROMPTS = 3
STEPS = (1, 2)
WARM_STEPS = 2  # of the optimiser, that its made-up moments stand for
# To first order, how far the first rollout moves the loss along its gradient: the ratio to the old
# policy is then some hundredths from 1 in later updates, and mostly within the clip.
CHANGE_OF_LOSS = 0.1
CLIP_SHARE = 0.25  # of the gradient's norm, that the limit on it is at most
RATE_WITHOUT_GRADIENT = 1e-4
# Where a fault leaves rounding alone of the gradient, a higher rate would destroy the weights.
HIGHEST_RATE = 1e-2
# In nats: by how much each of the sampler's log-probs is made another one, at most, so that it does
# not pass for the old policy's.
SAMPLER_NOISE = 0.05
FURTHER_TRIALS = 2
OPTIMIZER_FILE = "optimizer.safetensors"
SHUFFLED = 32  # groups, of which two orders by chance are never the same


class UpdateLimits(NamedTuple):
    """How far an update's figures may be from those of the papers, as shares."""

    gradient: float
    """The norm of the difference, of the gradient's."""
    change: float
    """The norm of the difference, of that of the change of weights, or of moments, in the tensor
    where this is largest."""


# Type of matrix products -> limits.
LIMITS = {
    torch.float32: UpdateLimits(gradient=1e-4, change=1e-3),
    torch.bfloat16: UpdateLimits(gradient=0.5, change=0.75),
}
# An optimiser that rounds its moments -> the limit of their change.
LIMITS_OF_OPTIMIZERS = {"adamw_8bit": 0.1}


@dataclass(frozen=True)
class Chosen:
    """What a check sets in the place of a run's own arguments, so that all of them take effect."""

    several: bool
    """Whether a rollout has two mini-batches and two epochs; else one update."""
    learning_rate: float = 0.0
    largest_norm: float = math.inf
    """The limit on the gradient's norm, where the run's is not lower."""


@dataclass(frozen=True)
class UpdateSetting:
    """The arguments of some updates: by the names of flags, as the papers' formulas take them, and
    as the program does."""

    flags: Mapping[str, Any]
    config: UpdateConfig
    rollouts: RolloutConfig
    largest_norm: float = math.inf
    """See `Chosen.largest_norm`."""

    @property
    def updates(self) -> int:
        return len(STEPS) * self.config.updates_per_rollout

    @property
    def norm_of_moments(self) -> float:
        """The norm of a gradient that made-up moments are of: about that of a clipped one."""
        norm = min(self.config.norm_limit, self.largest_norm)
        return norm if norm < math.inf else 1.0


@dataclass(frozen=True)
class TwoRollouts:
    """What two rollouts and their updates are made with. `plain` has the weights that the run
    starts from."""

    policy: Policy
    sampler: Sampler
    plain: PlainModel
    source: RolloutSource
    tokenizer: Any
    make_setting: Callable[[Chosen], UpdateSetting]
    open_references: Callable[[UpdateConfig], References]
    limits: UpdateLimits
    has_one_update: bool
    """Whether the run makes one update of each rollout."""
    teacher: PlainModel | None = None
    not_checked: str = ""
    """Why the papers' updates cannot be computed; empty where they can."""
    warm_start: WarmStart | None = None

    def checks(self) -> Iterator[Check]:
        """The checks of one update a rollout, where the run has that, and of several. They change
        the weights of policy and sampler."""
        reason = self.not_checked or own_functions(self.make_setting(Chosen(several=True)).flags)
        if reason:
            what = "updates: from papers' in float64"
            yield Check(what, math.inf, lambda: 0.0, not_checked=reason)
            return
        if self.has_one_update:
            yield from self._checks_of(several=False)
        yield from self._checks_of(several=True)
        if self.warm_start is not None:
            yield from self._checks_of_warm_start(self.warm_start)

    def _checks_of_warm_start(self, warm_start: WarmStart) -> Iterator[Check]:
        """The checks of the steps of a warm start, by the run's optimiser."""
        # As the run has it: some flags are refused with one update a rollout.
        setting = self.choose_setting(several=not self.has_one_update)
        config = supervised_config(
            warm_start.config, CLIP_SHARE * setting.norm_of_moments, setting.config.learning_rate
        )
        start = self._warm_up(setting)
        done = fine_tuned(self.policy, warm_start, config)
        weights = self.trained_weights()
        moments = self._read_moments(weights)
        flags = {
            **setting.flags,
            **vars(config),
            "sampling_temperature": 1.0,
            "sampling_top_p": 1.0,
            "sampling_top_k": 0,
        }
        expected = functools.cache(functools.partial(fit, self.plain, start, done, flags))
        words = f"warm start, {config.num_steps} steps"
        yield Check(
            f"{words}, weights: from papers' in float64",
            self.limits.change,
            lambda: relative_difference(
                weights, expected().state.weights, start.weights, roundings=2 * config.num_steps
            ),
        )
        yield Check(
            f"{words}, moments: from papers' in float64",
            self.limits.change,
            lambda: relative_difference(
                flat_moments(moments),
                flat_moments(expected().state.moments),
                flat_moments(start.moments),
            ),
        )
        yield Check(
            f"{words}: faults of batches",
            0.0,
            lambda: faults_of_batches(done, warm_start, config),
        )
        tolerance = tolerance_of(self.policy.dtype, flags["optimizer"])
        yield Check(
            f"{words}: other reported figures",
            0.0,
            lambda: other_figures(done, expected(), tolerance),
        )

    def _checks_of(self, several: bool) -> Iterator[Check]:
        """The checks of two rollouts, of one or several updates each."""
        setting = self.choose_setting(several)
        words = f"{setting.updates} updates"
        run = functools.cache(functools.partial(self.run_off_edges, setting))
        yield Check(
            f"{words}, weights: from papers' in float64",
            self.limits.change,
            lambda: run().difference_of_weights(),
            note=described(setting),
        )
        yield Check(
            f"{words}, moments: from papers' in float64",
            self.limits.change,
            lambda: run().difference_of_moments(),
        )
        yield Check(
            f"{words}, first gradient: from papers'",
            self.limits.gradient,
            lambda: run().difference_of_gradient(),
        )
        yield Check(
            f"{words}, weights, moments: share rounded to 16 bits",
            MOST_ROUNDED,
            lambda: run().rounded_share(),
        )
        # The length along the papers' gradient. Rounding is nearly at right angles to it.
        yield Check(
            f"{words}, first gradient: scale, off papers'",
            min(self.limits.gradient, 0.1),
            lambda: run().scale_of_gradient(),
        )
        if several:
            yield Check(f"{words}, mini-batches: faults", 0.0, lambda: run().faults())
            yield Check(
                "mini-batches: orders that are not by chance",
                0.0,
                lambda: fixed_orders(setting.config),
            )

    def choose_setting(self, several: bool) -> UpdateSetting:
        """A setting whose learning rate moves log-probs, so that the ratio is not 1, but not so far
        that rounding grows; and whose limit on the gradient's norm is below that norm."""
        provisional = self.make_setting(Chosen(several))
        rollout = self.rollout_of(provisional, self.sample(provisional, step=1), None, step=1)
        self._accumulate(rollout, range(len(rollout.lengths)), provisional.config)
        norm = self.policy.clip_gradient(math.inf).item()
        self.policy.drop_gradient()
        if not 0 < norm < math.inf:
            return self.make_setting(Chosen(several, RATE_WITHOUT_GRADIENT))
        # A step of AdamW has about the learning rate's length in each of the weights.
        length = math.sqrt(sum(tensor.numel() for tensor in self.trained_weights().values()))
        warmup = provisional.flags["warmup_steps"]
        risen = min(1.0, provisional.config.updates_per_rollout / max(1, warmup))
        rate = min(HIGHEST_RATE, CHANGE_OF_LOSS / (norm * length * risen))
        return self.make_setting(Chosen(several, rate, CLIP_SHARE * norm))

    def _accumulate(self, rollout: Rollout, rows: Sequence[int], config: UpdateConfig) -> None:
        """Add the gradient of some rows, for which the old policy is the current one."""
        zeros_BT = torch.zeros_like(rollout.sampler_log_probs_BT)
        rollout = dataclasses.replace(
            rollout,
            reference_log_probs_BT=rollout.sampler_log_probs_BT,
            selected_BT=zeros_BT.bool(),
        )
        objective = rollout_objective(rollout, range(len(rollout.lengths)), config)
        for _ in self.policy.accumulate(rollout.batch, rows, objective):
            pass  # Each micro-batch adds its part.

    def sample(self, setting: UpdateSetting, step: int) -> list[Group]:
        """A step's responses by the present weights of the sampler, with made-up rewards: of the
        first group all 0, of the others 0, 1/4 and 1. One response has no score, where a group has
        four. What the sampler says of log-probs is changed by chance."""
        config = setting.rollouts
        problems = problems_of_step(self.source.problems, PROMPTS, config.data_seed, step)
        sampling = config.sampling_of_step(self.source.task.stop, step)
        sampled = self.sampler.sample([problem.prompt for problem in problems], sampling)
        draw = random.Random(step)
        groups = []
        for number, of_prompt in enumerate(sampled):
            completions = [with_noise(completion, draw) for completion in of_prompt]
            scores = []
            for place in range(sampling.n):
                reward = max(float((number + place) % 2), 0.25 * (place > 1)) * (number > 0)
                scores.append({"reward": reward})
            groups.append(Group(problems[number], tuple(completions), tuple(scores)))
        fewest = setting.config.advantage.smallest_group
        if sampling.n > max(3, fewest):
            *others, last = groups[-1].scores
            scores = (*others, last | {"unscored": 1.0})
            groups[-1] = dataclasses.replace(groups[-1], scores=scores)
        return groups

    def rollout_of(
        self, setting: UpdateSetting, groups: Sequence[Group], state: object, step: int
    ) -> Rollout:
        """The rollout of some groups, as `train_rl` makes it."""
        pad_token_id = self.tokenizer.eos_token_id
        rollout = collate_groups(groups, setting.rollouts, pad_token_id)
        return with_advantages(rollout, setting.config.advantage, state, step)

    def trained_weights(self) -> dict[str, torch.Tensor]:
        """Copies of what is trained, by name, on the CPU: all weights, or the adapters."""
        if not self.make_setting(Chosen(several=True)).flags["lora_rank"]:
            return {name: tensor.to("cpu", copy=True) for name, tensor in self.policy.weights()}
        with tempfile.TemporaryDirectory(prefix="verify_") as name:
            self.policy.save(Path(name), self.tokenizer)
            return load_adapters(Path(name) / "adapter")

    def run_off_edges(self, setting: UpdateSetting) -> "Trial":
        """`run`, on further rollouts where rounding decided whether a ratio was clipped."""
        trial = self.run(setting)
        for _ in range(FURTHER_TRIALS):
            if trial.expected.is_near_edge and self.policy.dtype == torch.float32:
                trial = self.run(setting)
        return trial

    def run(self, setting: UpdateSetting) -> "Trial":
        """Make the updates of two rollouts, the second one sampled by the weights after the first,
        by the program and by the papers."""
        start = self._warm_up(setting)
        first = _RecordedPolicy(self.policy)
        references = self.open_references(setting.config)
        config = setting.config
        state: object = None
        plain_rollouts = []
        for step in STEPS:
            groups = self.sample(setting, step)
            rollout = self.rollout_of(setting, groups, state, step)
            rows = mini_batches(rollout, config, step)
            responses = with_length_rewards(plain_responses(groups), setting.flags)
            trained = {row for of_update in rows for row in of_update}
            if any(not responses[row].counts for row in trained):
                raise RunStopped("an update has rows that do not count, such as ones without score")
            plain_rollouts.append(PlainRollout(responses, rows))
            rollout = references.annotate(rollout, self.policy, step)
            result = update(cast(Policy, first), rollout, config, step)
            if result.bad:
                raise RunStopped(f"step {step} has an update whose gradient is not finite")
            config = result.config
            state = rollout.advantage_state
            self.sampler.load_weights(self.policy.weights(), step)
        weights = self.trained_weights()
        steps = start.steps + setting.updates
        reached = TrainedState(weights, self._read_moments(weights), steps)
        expected = train(self.plain, start, plain_rollouts, setting.flags, self.teacher)
        gradient_D = first.gradient_D
        return Trial(self.plain, start, reached, expected, gradient_D, plain_rollouts, setting)

    def _warm_up(self, setting: UpdateSetting) -> TrainedState:
        """Give the optimiser made-up moments, of about the size of the gradient's elements. After
        few steps from moments of 0 Adam divides by squares of gradients, and where these are near 0
        rounding alone would decide the step."""
        groups = self.sample(setting, step=1)
        rollout = self.rollout_of(setting, groups, None, step=1)
        self._accumulate(rollout, [], setting.config)  # A gradient of zeros.
        self.policy.step(0.0)  # Makes the moments.
        weights = self.trained_weights()
        number = sum(tensor.numel() for tensor in weights.values())
        size = setting.norm_of_moments / math.sqrt(number)
        with tempfile.TemporaryDirectory(prefix="verify_") as name:
            folder = Path(name)
            self.policy.save_optimizer(folder)
            saved = read_optimizer(folder)
            (folder / "warm").mkdir()
            save_file(warm_state(saved, size), folder / "warm" / OPTIMIZER_FILE)
            self.policy.load_optimizer(folder / "warm")
            # Before the folder goes: all ranks have read it when they next save.
            moments = self._read_moments(weights)
            loaded = named_moments(
                load_file(folder / "warm" / OPTIMIZER_FILE),
                self.plain.in_order_of_optimizer(weights),
            )
        if not have_same_values(flat_moments(loaded), flat_moments(moments)):
            raise RunStopped("the optimiser does not hold the moments of the file that it loaded")
        return TrainedState(weights, moments, WARM_STEPS)

    def _read_moments(self, weights: Mapping[str, torch.Tensor]) -> dict:
        """The optimiser's moments by the names of what is trained, from its checkpoint."""
        with tempfile.TemporaryDirectory(prefix="verify_") as name:
            self.policy.save_optimizer(Path(name))
            saved = read_optimizer(Path(name))
        names = self.plain.in_order_of_optimizer(weights)
        return named_moments(saved, names)


class _RecordedPolicy:
    """A policy whose first gradient before the clip is kept, flat, on the CPU."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.gradient_D = torch.empty(0)

    def clip_gradient(self, max_norm: float) -> torch.Tensor:
        if not len(self.gradient_D):
            self.gradient_D = self.policy.gradient()
        return self.policy.clip_gradient(max_norm)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)


@dataclass(frozen=True)
class Trial:
    """The updates of two rollouts: where they started, what the program reached, and what the
    papers say."""

    plain: PlainModel
    start: TrainedState
    reached: TrainedState
    expected: Outcome
    gradient_D: torch.Tensor
    """The program's gradient of the first update, before the clip."""
    rollouts: Sequence[PlainRollout]
    setting: UpdateSetting

    def difference_of_weights(self) -> float:
        # Each update rounds a weight where it decays, and where the step is added.
        return relative_difference(
            self.reached.weights,
            self.expected.state.weights,
            self.start.weights,
            roundings=2 * self.setting.updates,
        )

    def difference_of_moments(self) -> float:
        return relative_difference(
            flat_moments(self.reached.moments),
            flat_moments(self.expected.state.moments),
            flat_moments(self.start.moments),
        )

    def rounded_share(self) -> float:
        """The largest share of numbers without a digit beyond 16 bits: of the trained weights, and
        of each kind of moments."""
        shares = [rounded_share(self.reached.weights.values())]
        kinds: dict[str, list[torch.Tensor]] = {}
        for of_tensor in self.reached.moments.values():
            for kind, moment in of_tensor.items():
                kinds.setdefault(kind, []).append(moment)
        for moments in kinds.values():
            shares.append(rounded_share(moments))
        return max(shares)

    @property
    def _expected_gradient_D(self) -> torch.Tensor:
        gradient = self.expected.first_gradient
        return torch.cat([gradient[name].flatten() for name in self.plain.in_order(gradient)])

    def difference_of_gradient(self) -> float:
        expected_D = self._expected_gradient_D
        return share_of((self.gradient_D - expected_D).norm().item(), expected_D.norm().item())

    def scale_of_gradient(self) -> float:
        expected_D = self._expected_gradient_D
        square = expected_D.norm().item() ** 2
        along = (self.gradient_D.to(expected_D) @ expected_D).item()
        return share_of(abs(along - square), square)

    def faults(self) -> list[str]:
        """What is wrong with the rows of the updates."""
        config = self.setting.config
        faults = []
        for rollout in self.rollouts:
            size = config.train_mini_batch_size or len(rollout.responses)
            faults += mini_batch_faults(
                rollout, config.epochs_per_rollout, size, config.advantage.group_size
            )
        return faults


def fixed_orders(config: UpdateConfig) -> int:
    """How many of the epochs of two steps take the groups of a large rollout in the order of
    sampling, or in that of another epoch or --data_seed."""
    rows = list(range(SHUFFLED * config.advantage.group_size))
    rollout = SimpleNamespace(trained_rows=rows, lengths=[1] * len(rows))
    orders = [rows]
    another = dataclasses.replace(config, data_seed=config.data_seed + 1)
    for of_seed, step in itertools.product((config, another), STEPS):
        parts = mini_batches(cast(Rollout, rollout), of_seed, step)
        taken = list(itertools.chain.from_iterable(parts))
        for start in range(0, len(taken), len(rows)):
            orders.append(taken[start : start + len(rows)])
    return len(orders) - len(set(map(tuple, orders)))


def share_of(difference: float, whole: float) -> float:
    """A difference as a share of a whole; of nothing, where groups leave no gradient, any
    difference is infinite."""
    if not whole:
        return math.inf if difference else 0.0
    return difference / whole


def own_functions(flags: Mapping[str, Any]) -> str:
    """Why no paper says what a run's updates are; empty where papers do."""
    for name, table in (("loss_type", LOSSES), ("advantage", ADVANTAGES)):
        if flags[name] not in table:
            return f"--{name} names your own function"
    return ""


def update_limits(dtype: torch.dtype, optimizer: str) -> UpdateLimits:
    """The limits for a type of matrix products and an optimiser."""
    limits = LIMITS[dtype]
    return limits._replace(change=max(limits.change, LIMITS_OF_OPTIMIZERS.get(optimizer, 0.0)))


def described(setting: UpdateSetting) -> str:
    """With which settings the updates of a check were made."""
    config = setting.config
    return (
        f"(epochs {config.epochs_per_rollout}, mini-batches of"
        f" {config.train_mini_batch_size or 'all'}, learning rate {config.learning_rate:.1g},"
        f" clip {config.norm_limit:.1g}, decay {setting.flags['weight_decay']:g})"
    )


def with_noise(completion: Completion, draw: random.Random) -> Completion:
    """A completion with other log-probs by the sampler."""
    log_probs = tuple(
        log_prob + draw.uniform(-SAMPLER_NOISE, SAMPLER_NOISE) for log_prob in completion.log_probs
    )
    return dataclasses.replace(completion, log_probs=log_probs)


def plain_responses(groups: Sequence[Group]) -> list[PlainResponse]:
    """The responses of some groups as plain data."""
    responses = []
    for group in groups:
        for completion, score in zip(group.completions, group.scores, strict=True):
            responses.append(
                PlainResponse(
                    tuple(completion.prompt_ids),
                    tuple(completion.token_ids),
                    score["reward"],
                    "unscored" not in score,
                    tuple(completion.log_probs),
                )
            )
    return responses


def read_optimizer(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of an optimiser's checkpoint, whole, by "NUMBER.NAME"."""
    if (folder / OPTIMIZER_FILE).exists():
        return load_file(folder / OPTIMIZER_FILE)
    # Imported here: this takes seconds, which a policy of one process saves.
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint

    reader = HuggingFaceStorageReader(str(folder))
    tensors = {}
    stored_tensors: Any = reader.read_metadata().state_dict_metadata
    for name, stored in stored_tensors.items():
        tensors[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings(action="ignore"):  # The warning says that no ranks take part.
        load_checkpoint(tensors, storage_reader=reader, no_dist=True)
    return tensors


# What 8-bit moments consist of (Dettmers et al. 2022, arXiv:2110.02861, section 2.1): codes, the
# largest magnitude of each block, and the values that codes stand for.
CODES = ".codes"
SCALE = ".scale"
VALUES = ".qmap"


def warm_state(saved: Mapping[str, torch.Tensor], size: float) -> dict[str, torch.Tensor]:
    """The state of an optimiser with moments by chance in the place of those that were saved: first
    moments of a third of `size`, second ones of about its square."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in saved.items():
        key = name.partition(".")[2]
        if key == "step":
            state[name] = torch.full_like(tensor, WARM_STEPS)
        elif key.startswith("exp_avg_sq"):
            drawn = size * (0.5 + torch.rand(tensor.shape, generator=generator))
            state |= stored_moment(name, drawn.square(), saved)
        else:
            drawn = 0.3 * size * torch.randn(tensor.shape, generator=generator)
            state |= stored_moment(name, drawn, saved)
    return state


def stored_moment(
    name: str, moment: torch.Tensor, saved: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The entries of an optimiser's checkpoint for a moment: itself, or at the place of its codes
    the 8-bit parts."""
    if name.endswith((SCALE, VALUES)):
        return {}
    if not name.endswith(CODES):
        return {name: moment}
    plain = name.removesuffix(CODES)
    values = saved[plain + VALUES]
    blocks = moment.reshape(len(saved[plain + SCALE]), -1)
    scales = blocks.abs().amax(dim=1)
    between = (values[1:] + values[:-1]) / 2
    codes = torch.bucketize(blocks / scales[:, None], between)
    return {
        plain + CODES: codes.reshape(moment.shape).to(torch.uint8),
        plain + SCALE: scales,
        plain + VALUES: values,
    }


def have_same_values(
    tensors: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]
) -> bool:
    """Whether both have the same names, and the same values by each."""
    if tensors.keys() != others.keys():
        return False
    return all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


def named_moments(
    saved: Mapping[str, torch.Tensor], names: Sequence[str]
) -> dict[str, dict[str, torch.Tensor]]:
    """The moments of a checkpoint, whose tensors are numbered, by the names of what is trained."""
    moments: dict[str, dict[str, torch.Tensor]] = {name: {} for name in names}
    for entry, tensor in saved.items():
        number, _, key = entry.partition(".")
        if key == "step" or key.endswith((SCALE, VALUES)):
            continue
        moment = tensor
        if key.endswith(CODES):
            plain = entry.removesuffix(CODES)
            scales = saved[plain + SCALE]
            blocks = saved[plain + VALUES][tensor.int()].reshape(len(scales), -1)
            moment = (blocks * scales[:, None]).reshape(tensor.shape)
        moments[names[int(number)]][key.removesuffix(CODES)] = moment
    return moments
