"""What losses, grader, policy and sampler compute, against the papers, known answers and
transformers' own model."""

import dataclasses
import functools
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, product
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from alignment.core.advantages import (
    ADVANTAGES,
    BASELINES,
    DEVIATIONS,
    AdvantageConfig,
    NegativeOnlySettings,
    PassAtKSettings,
    PositiveOnlySettings,
    advantage_inputs,
    compute_advantages,
    settings_or_defaults,
)
from alignment.core.losses import (
    CORRECTIONS,
    KL_ESTIMATORS,
    LOSSES,
    NORMALIZATIONS,
    DPPOSettings,
    GMPOSettings,
    LossConfig,
    LossInputs,
    SAPOSettings,
    loss_denominator,
    micro_batch_loss,
)
from alignment.core.records import Batch, Group, Problem, Rollout, flatten_completions
from alignment.core.selection import StepTokens, select_tokens
from alignment.core.tokens import collate
from alignment.policy.policy import Policy
from alignment.rollouts.config import UpdateConfig, problems_of_step
from alignment.rollouts.source import RolloutSource, collate_groups, with_advantages
from alignment.sampling.arrival import load_proven
from alignment.sampling.sampler import Sampler
from alignment.system.errors import RunStopped
from alignment.training.preparation import prepare_update
from alignment.training.update import (
    mini_batches,
    rollout_objective,
    rows_with_gradient,
    sampler_mismatch,
    update,
    with_teacher,
)
from alignment.verification.check import Check
from alignment.verification.paper_advantages import paper_advantages_of_groups
from alignment.verification.papers import PaperLogProbs, paper_values
from alignment.verification.precision import LEAST_LOG_PROB, MOST_ROUNDED, rounded_share
from alignment.verification.sampling import CANDIDATES, of_unlike_lengths
from alignment.verification.sharpness import MOST_SHARPER, sure_change_of_power
from alignment.verification.two_rollouts import TwoRollouts, plain_responses
from alignment.verification.whole_update import PlainModel

Pair = tuple[float, float]
PROMPTS = 4
REWARDS = (0.0, 0.25, 0.5, 1.0)  # of responses by chance
GROUP = 3  # --group_size of responses by chance
LONGEST = 6  # and their --max_new_tokens
COUNTED = 0.7  # Of responses by chance, about the share that counts, where some do not.
# In nats a token, what the log-probs of a wrong sampler are off. Half of it, which is the limit
# then, is less than a run allows samplers that are some steps behind.
ANOTHER_POLICY = 0.4
# Tokens. An engine keeps keys and values of whole blocks of a prompt: vLLM of 16 tokens on a GPU,
# and of 128 on a CPU.
LONG_PROMPT = 300


# Type of matrix products -> how far a policy's log-probs may be from the plain model's, in nats a
# token, on average.
NATS = {torch.float32: 1e-3, torch.bfloat16: 0.1}

# Kinds of devices whose kernels give the same bits in every run. A GPU's do with --deterministic
# only: there the order of some sums depends on timing.
SAME_BITS = ("cpu",)


def most_other_groups(engine: str, dtype: torch.dtype, is_invariant: bool) -> float:
    """How many groups of answers may be others where other prompts share the batch. Our own engine
    draws each response by its own random numbers, whatever is beside it: in float32 rounding
    changes a draw in a million."""
    if is_invariant:
        return 0.0
    if engine == "transformers" and dtype == torch.float32:
        return 1.0
    return math.inf


def promises_bits(devices: Iterable[str], deterministic: bool) -> bool:
    """Whether a run on these devices is to give the same bits again."""
    return deterministic or all(device.partition(":")[0] in SAME_BITS for device in devices)


class PaperSetting(NamedTuple):
    """The names of a loss and of an estimator of advantages, and the settings that they are
    computed with."""

    name: str
    loss: LossConfig
    estimator: str
    advantage: AdvantageConfig


# Each --token_selection with numbers by which it selects some tokens of `draw_responses`.
SELECTION_SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"token_selection": "none"},
    {"token_selection": "top_entropy", "selected_share": 0.3},
    {
        "token_selection": "clip_cov",
        "selected_share": 1.0,
        "covariance_low": 0.02,
        "covariance_high": 0.2,
    },
    {"token_selection": "kl_cov", "selected_share": 0.25, "kl_cov_coefficient": 0.7},
)

# Numbers of a loss and of an estimator in the place of their defaults, which are alike for both
# signs of an advantage, or 0. Every second setting of a loss has the defaults.
SETTINGS_OF_LOSSES: Mapping[str, Any] = {
    "sapo": SAPOSettings(positive=0.8, negative=1.5),
    "gmpo": GMPOSettings(clip_low=0.05, clip_high=0.2),
    "dppo": DPPOSettings(divergence="kl", threshold=0.01),
}
SETTINGS_OF_ESTIMATORS: Mapping[str, Any] = {
    "positive_only": PositiveOnlySettings(negative_weight=0.3),
    "negative_only": NegativeOnlySettings(positive_weight=0.1),
    "pass_at_k": PassAtKSettings(k=2),
}


def paper_settings(seed: int) -> Iterator[PaperSetting]:
    """Every loss with every normalisation and correction; the other choices take turns, in an order
    by chance."""
    draw = random.Random(seed)
    others = list(
        product(
            (None, 0.28),
            (0.0, 1.5),
            KL_ESTIMATORS,
            BASELINES,
            (True, False),
            DEVIATIONS,
            (0.0, 0.9),
        )
    )
    turns = cycle(draw.sample(others, len(others)))
    # Every second setting has the default estimator, whose own choices take turns, too.
    estimators: list[tuple[str, AdvantageConfig]] = []
    for estimator_name, estimator in ADVANTAGES.items():
        settings = SETTINGS_OF_ESTIMATORS.get(estimator_name)
        own = AdvantageConfig(GROUP, estimator=estimator, settings=settings)
        estimators += [("group_baseline", AdvantageConfig(GROUP)), (estimator_name, own)]
    turns_of_estimators = cycle(estimators)
    terms = list(product((0.0, 0.02), SELECTION_SETTINGS))
    turns_of_terms = cycle(draw.sample(terms, len(terms)))
    combinations = product(LOSSES, NORMALIZATIONS, CORRECTIONS)
    for number, (name, normalization, correction) in enumerate(combinations):
        choices = next(turns)
        entropy_coefficient, selection = next(turns_of_terms)
        cliprange_high, dual_clip, kl_estimator, baseline, normalize_by_std, std_of, floor = choices
        loss = LossConfig(
            LOSSES[name],
            cliprange=0.2,
            cliprange_high=cliprange_high,
            dual_clip=dual_clip,
            beta=0.1,
            kl_estimator=kl_estimator,
            loss_normalization=normalization,
            sampler_correction=correction,
            correction_cap=1.1,
            correction_floor=floor,
            entropy_coefficient=entropy_coefficient,
            settings=SETTINGS_OF_LOSSES.get(name) if number % 2 else None,
            **selection,
        )
        estimator_name, advantage = next(turns_of_estimators)
        advantage = dataclasses.replace(
            advantage,
            baseline=baseline,
            normalize_by_std=normalize_by_std,
            std_of=std_of,
        )
        yield PaperSetting(name, loss, estimator_name, advantage)


@dataclass(frozen=True)
class RandomResponses:
    """Responses by chance, as lists without padding: the reward of each, its log-probs under the
    policy, the old policy, the reference and the sampler, and the policy's entropies."""

    rewards: list[float]
    policies: list[list[list[float]]]
    entropies: list[list[float]]

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.policies[0]]


def draw_responses(draw: random.Random, group_size: int = GROUP) -> RandomResponses:
    """Two groups of responses, of up to `LONGEST` tokens each. In a group each of the `REWARDS`
    comes once before any comes again."""
    lengths = [draw.randint(1, LONGEST) for _ in range(2 * group_size)]
    rewards: list[float] = []
    for _ in range(2):
        rewards += draw.sample(REWARDS, min(group_size, len(REWARDS)))
        rewards += draw.choices(REWARDS, k=max(0, group_size - len(REWARDS)))
    policies = []
    for _ in range(4):
        policies.append([[draw.gauss(-1, 0.3) for _ in range(length)] for length in lengths])
    entropies = [[draw.uniform(0.1, 2.0) for _ in range(length)] for length in lengths]
    return RandomResponses(rewards, policies, entropies)


def own_values(prefix: str, cls: type | None, settings: object) -> dict[str, object]:
    """The values of settings that only one loss or advantage has, by their flags' names."""
    chosen = settings_or_defaults(cls, settings)
    if chosen is None:
        return {}
    return {f"{prefix}.{name}": value for name, value in vars(chosen).items()}


def training_values(setting: PaperSetting, responses: RandomResponses) -> torch.Tensor:
    """What `paper_values` returns, as training computes it: advantages, the loss, and its gradient
    by each log-prob and each entropy of the policy."""
    double = functools.partial(torch.tensor, dtype=torch.float64)
    padded = [
        pad_sequence(list(map(double, rows)), batch_first=True)
        for rows in (*responses.policies, responses.entropies)
    ]
    policy_BT, old_BT, reference_BT, sampler_BT, entropies_BT = padded
    mask_BT = policy_BT != 0
    rewards_B1 = double(responses.rewards)[:, None]
    counted_B1 = torch.ones_like(rewards_B1, dtype=torch.bool)
    inputs_of_step = advantage_inputs(rewards_B1, counted_B1, setting.advantage, responses.lengths)
    advantages_PG, _ = compute_advantages(inputs_of_step, None)
    advantages_B1 = advantages_PG.reshape(-1, 1)
    denominator = loss_denominator(setting.loss.loss_normalization, responses.lengths, LONGEST)

    selected_BT = None
    selected_share = 1.0
    if setting.loss.token_selection != "none":
        tokens = StepTokens(
            policy_BT[mask_BT],
            entropies_BT[mask_BT],
            advantages_B1.expand_as(policy_BT)[mask_BT],
            torch.zeros(int(mask_BT.sum())),
        )
        selected_BT = torch.zeros_like(mask_BT)
        is_selected_N = select_tokens(tokens, setting.loss)
        selected_BT[mask_BT] = is_selected_N
        selected_share = is_selected_N.double().mean().item()

    def compute_loss(log_probs_BT: torch.Tensor, entropies_BT: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(
            setting.loss,
            log_probs_BT,
            mask_BT,
            raw_rewards=rewards_B1,
            advantages=advantages_B1,
            old_log_probs=old_BT,
            reference_log_probs=reference_BT,
            sampler_log_probs=sampler_BT,
            entropies=entropies_BT,
            selected=selected_BT,
            selected_share=selected_share,
        )
        loss, _ = micro_batch_loss(inputs, denominator)
        return loss

    gradients, loss = torch.func.grad_and_value(compute_loss, (0, 1))(policy_BT, entropies_BT)
    by_token = [gradient_BT[mask_BT] for gradient_BT in gradients]
    return torch.cat([advantages_B1[:, 0], loss[None], *by_token])


def difference_from_papers(settings: Iterable[PaperSetting], seed: int) -> float:
    """The largest difference of training's advantages, losses and gradients, on responses by
    chance, from those that the papers' formulas give."""
    draw = random.Random(seed)
    largest = 0.0
    for setting in settings:
        responses = draw_responses(draw, setting.advantage.group_size)
        flags = {**vars(setting.loss), **vars(setting.advantage)}
        flags |= {"loss": setting.name, "max_new_tokens": LONGEST}
        flags |= own_values("loss", setting.loss.loss.settings, setting.loss.settings)
        estimator = setting.advantage.estimator
        flags |= own_values("advantage", estimator.settings, setting.advantage.settings)
        flags["advantage"] = setting.estimator
        policy, old, reference, sampler = responses.policies
        values = PaperLogProbs(policy, old, reference, sampler, responses.entropies)
        expected = paper_values(flags, responses.rewards, values)
        computed = training_values(setting, responses)
        difference = computed - torch.tensor(expected, dtype=torch.float64)
        # `max` would leave a NaN out.
        distance = difference.abs().nan_to_num(nan=math.inf)
        largest = max(largest, distance.max().item())
    return largest


def difference_of_counted_advantages(settings: Iterable[PaperSetting], seed: int) -> float:
    """The largest difference of training's advantages, of groups in which some responses do not
    count, from those that the papers' formulas give to the others alone."""
    draw = random.Random(f"counted {seed}")
    largest = 0.0
    for setting in settings:
        size = setting.advantage.group_size
        number = PROMPTS * size
        rewards = [draw.choice(REWARDS) for _ in range(number)]
        lengths = [draw.randint(1, LONGEST) for _ in range(number)]
        counted = [draw.random() < COUNTED for _ in range(number)]
        rewards_B1 = torch.tensor(rewards, dtype=torch.float64)[:, None]
        counted_B1 = torch.tensor(counted)[:, None]
        # All groups ask one problem: of none the advantages depend on another's of the same step.
        problems = ["asked again"] * number
        inputs = advantage_inputs(rewards_B1, counted_B1, setting.advantage, lengths, problems)
        computed_PG, _ = compute_advantages(inputs, None)
        flags = {**vars(setting.advantage), "advantage": setting.estimator}
        estimator = setting.advantage.estimator
        flags |= own_values("advantage", estimator.settings, setting.advantage.settings)
        counted_rewards: list[list[float]] = []
        counted_lengths: list[list[int]] = []
        for start in range(0, number, size):
            rows = [row for row in range(start, start + size) if counted[row]]
            counted_rewards.append([rewards[row] for row in rows])
            counted_lengths.append([lengths[row] for row in rows])
        groups = paper_advantages_of_groups(flags, counted_rewards, counted_lengths)
        expected_B = torch.zeros(number, dtype=torch.float64)
        expected_B[counted_B1[:, 0]] = torch.tensor(
            list(chain.from_iterable(groups)), dtype=torch.float64
        )
        distance = (computed_PG.flatten() - expected_B).abs().nan_to_num(nan=math.inf)
        largest = max(largest, distance.max().item())
    return largest


def checks_without_model(config: UpdateConfig) -> Iterator[Check]:
    """The checks that are the same for all models: of a run's own loss, unless it is a function of
    the user's; of all; and of the grader."""
    estimator_name = "group_baseline"
    advantage = AdvantageConfig(GROUP)
    for name, estimator in ADVANTAGES.items():
        if estimator is config.advantage.estimator:
            estimator_name = name
            size = max(GROUP, config.advantage.smallest_group)
            advantage = dataclasses.replace(config.advantage, group_size=size)
    own_loss = config.loss
    if own_loss.token_selection == "clip_cov":
        # All tokens that are eligible, instead of some by chance.
        own_loss = dataclasses.replace(own_loss, selected_share=1.0)
    run_settings = [
        PaperSetting(name, own_loss, estimator_name, advantage)
        for name, loss in LOSSES.items()
        if loss == config.loss.loss
    ]
    if run_settings:
        yield Check(
            "this run's loss and gradient: from papers'",
            1e-9,
            lambda: difference_from_papers(run_settings, config.seed),
        )
    settings = list(paper_settings(config.seed))
    yield Check(
        "losses, gradients, advantages: from papers'",
        1e-9,
        lambda: max(
            difference_from_papers(settings, config.seed),
            difference_of_counted_advantages(settings, config.seed),
        ),
    )


def checks_of_plan(
    peaks: Mapping[str, Pair], seconds: Mapping[str, tuple[float, Pair]]
) -> Iterator[Check]:
    """The worst device and phase beside `plan`'s prediction. `peaks` are measured and predicted
    bytes by device, `seconds` the measured ones by phase, and their predicted range. Seconds have
    no limit: other work on the machine decides them, too."""
    memory = {device: measured / predicted for device, (measured, predicted) in peaks.items()}
    yield from _check_of_largest("peak / plan's: ", 1.1, memory)
    # 1 or less within the range
    times = {
        phase: max(measured / high, low / measured)
        for phase, (measured, (low, high)) in seconds.items()
    }
    yield from _check_of_largest("seconds / plan's range: ", math.inf, times)


def _check_of_largest(what: str, limit: float, ratios: Mapping[str, float]) -> Iterator[Check]:
    """The check of the largest ratio, named after it; none where there are no ratios."""
    if ratios:
        worst = max(ratios, key=lambda name: ratios[name])
        yield Check(what + worst, limit, lambda: ratios[worst], of_results=False)


def other_answers(groups: Sequence[Group], others: Sequence[Group]) -> int:
    """How many groups have other tokens than their counterparts."""
    pairs = zip(groups, others, strict=True)
    return sum(_token_ids(group) != _token_ids(other) for group, other in pairs)


def _token_ids(group: Group) -> list[tuple[int, ...]]:
    """The tokens of each completion."""
    return [completion.token_ids for completion in group.completions]


def copy_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """A policy's weights on the CPU, which later steps leave as they are."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in policy.weights()}


def distance(policy: Policy, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The norm of the difference between a policy's weights and others."""
    squares = ((tensor.cpu() - weights[name]).square().sum() for name, tensor in policy.weights())
    return torch.as_tensor(sum(squares)).sqrt()


def lengthened(prompt: str, tokenizer, most_tokens: int) -> str:
    """A prompt with more of the same in front of it, of `most_tokens` or a few less; a prompt of
    more tokens as it is."""

    def fits(text: str) -> bool:
        return len(tokenizer(text)["input_ids"]) <= most_tokens

    if not fits(prompt):
        return prompt
    text = prompt
    while fits(text):
        text += prompt
    while not fits(text):
        text = text[1 + len(text) // 50 :]
    return text


@dataclass(frozen=True)
class TriedUpdates:
    """What became of a step's updates."""

    changes_weights: bool
    report: Mapping[str, float | None]
    """Empty where they were stopped."""


@dataclass(frozen=True)
class Verified:
    """A policy, the sampler that gets its weights, transformers' own model of the weights that both
    start from (`plain`), and a run's rollouts and updates."""

    policy: Policy
    sampler: Sampler
    plain: PlainModel
    source: RolloutSource
    tokenizer: Any
    config: UpdateConfig
    exact: bool
    """Whether the devices are to give the same bits again."""
    most_other_groups: float = math.inf
    """How many groups' answers, of `PROMPTS`, may be others where other prompts share the batch."""
    updates: TwoRollouts | None = None
    """The updates that are compared with the papers'; None where another policy's are."""

    def checks(self) -> Iterator[Check]:
        """Every check, to be measured before the next one is made. The last ones change the
        weights."""
        sampled = self.sample()
        groups = sampled[:PROMPTS]
        yield from self._sampling_checks(sampled)
        rollout = self.made_up(groups)
        yield from self._log_prob_checks(groups, rollout)
        yield from self._gradient_checks(rollout)
        if self.updates is not None:
            yield from self.updates.checks()
        yield from self._transfer_checks(rollout)
        yield from self._guard_checks(rollout)

    def _sampling_checks(self, sampled: Sequence[Group]) -> Iterator[Check]:
        """The checks of how answers depend on the seed and on what shares a batch. `sampled` are
        the groups of some prompts that were asked twice."""
        groups = sampled[:PROMPTS]
        again = sampled[PROMPTS:]
        yield Check(
            "prompts asked twice: share of same answers",
            0.9,
            lambda: 1 - other_answers(groups, again) / PROMPTS,
        )
        yield Check(
            "same seed again: other answers",
            self._limit_of_bits,
            lambda: other_answers(sampled, self.sample()),
            "statistical",
        )
        yield Check(
            "half the prompts: other answers",
            self.most_other_groups,
            lambda: other_answers(groups, self.sample(times=1)),
        )

    def _log_prob_checks(self, groups: Sequence[Group], rollout: Rollout) -> Iterator[Check]:
        """The checks of policy's and sampler's log-probs against the plain model's."""
        completions = flatten_completions(groups)
        batch = collate(
            [completion.prompt_ids for completion in completions],
            [completion.token_ids for completion in completions],
            pad_token_id=0,
        )
        plain_BT, slopes_BT = self.plain_log_probs(groups, batch)
        sampler_BT = rollout.sampler_log_probs_BT

        @functools.cache
        def policy_log_probs() -> torch.Tensor:
            return self.policy.log_probs(rollout.batch, self.config.distribution)

        def nats_from_plain(log_probs_BT: torch.Tensor) -> torch.Tensor:
            # over the tokens of the true mask, so that a wrong one shows
            return (log_probs_BT - plain_BT).abs().sum() / batch.response_mask.sum()

        yield Check(
            "policy's log-probs: nats from plain",
            self._nats,
            lambda: nats_from_plain(policy_log_probs()),
        )
        yield Check(
            "sampler's log-probs: nats from plain",
            self._nats,
            lambda: nats_from_plain(sampler_BT),
        )
        yield Check(
            "policy's log-probs: sharper or flatter than plain",
            MOST_SHARPER,
            lambda: sure_change_of_power(policy_log_probs() - plain_BT, slopes_BT),
        )
        yield Check(
            "sampler's log-probs: sharper or flatter than plain",
            MOST_SHARPER,
            lambda: sure_change_of_power(sampler_BT - plain_BT, slopes_BT),
        )
        yield Check(
            "log-probs: share that is rounded to 16 bits",
            MOST_ROUNDED,
            lambda: max(
                rounded_share([policy_log_probs()], LEAST_LOG_PROB),
                rounded_share([sampler_BT], LEAST_LOG_PROB),
            ),
        )
        yield Check(
            "sampler's largest nats from policy",
            math.inf,
            lambda: (policy_log_probs() - sampler_BT).abs().max(),
        )

    def _gradient_checks(self, rollout: Rollout) -> Iterator[Check]:
        """The check of a gradient that is made twice."""
        gradient = self.gradient(rollout)
        self.policy.drop_gradient()
        yield Check(
            "gradient again: change",
            self._limit_of_bits,
            lambda: (self.gradient(rollout) - gradient).abs().max(),
            "to rounding",
        )
        self.policy.drop_gradient()

    def _transfer_checks(self, rollout: Rollout) -> Iterator[Check]:
        """The checks of the sampler's weights after updates, which are then made at a learning rate
        of 0."""
        nats = self._nats
        mismatch = functools.cache(self.synced)
        yield Check(
            "after updates, weights sent: tensors that differ",
            0.0,
            lambda: self.sent(rollout, 2 * nats),
        )
        yield Check("after updates, sampler: nats from policy", nats, mismatch)
        before = copy_weights(self.policy)
        yield Check(
            "learning rate 0: growth of mismatch in 3 steps",
            nats / 10,
            lambda: self.growth(rollout) - mismatch(),
        )
        yield Check(
            "learning rate 0: change of weights", 0.0, lambda: distance(self.policy, before)
        )

    def _guard_checks(self, rollout: Rollout) -> Iterator[Check]:
        """The checks of what must train nothing: a gradient that is not finite, and a sampler whose
        log-probs are those of another policy."""
        yield Check(
            "gradient that is not finite: updates that go on",
            0.0,
            lambda: self.faults_of_infinite(rollout),
        )
        if self.config.loss.token_selection == "clip_cov":
            yield Check(
                "selected tokens: draws that are not by chance",
                0.0,
                lambda: self.fixed_selections(rollout),
            )
        reason = ""
        if not rows_with_gradient(rollout, self.config):
            reason = "no response has a gradient, so that none is compared with the sampler"
        yield Check(
            f"sampler {ANOTHER_POLICY:g} nats off: updates that go on",
            0.0,
            lambda: self.trains_on_another_policy(rollout),
            not_checked=reason,
        )

    @property
    def _nats(self) -> float:
        """The limit of log-probs of the policy's type of matrix products."""
        return NATS[self.policy.dtype]

    @property
    def _limit_of_bits(self) -> float:
        """The limit of what is 0 where the devices give the same bits again."""
        return 0.0 if self.exact else math.inf

    def sample(self, times: int = 2) -> list[Group]:
        """The responses to each problem of the run's first ones, `times` over (`groups_of`)."""
        return self.groups_of(self.problems() * times)

    def problems(self) -> list[Problem]:
        """Some of the run's first problems, of unlike lengths."""
        data_seed = self.source.config.data_seed
        first = problems_of_step(self.source.problems, CANDIDATES, data_seed, step=1)
        return of_unlike_lengths(first, PROMPTS)

    def long_problems(self) -> list[Problem]:
        """The same with prompts of `LONG_PROMPT` tokens, or of as many as the context has."""
        context = self.plain.model.config.max_position_embeddings
        room = context - self.source.config.sampling.max_new_tokens
        problems = []
        for problem in self.problems():
            prompt = lengthened(problem.prompt, self.tokenizer, min(LONG_PROMPT, room))
            problems.append(dataclasses.replace(problem, prompt=prompt))
        return problems

    def groups_of(self, problems: Sequence[Problem]) -> list[Group]:
        """Each problem's responses, with made-up rewards: 0 in the first group, 0 and 1 in the
        others."""
        sampling = self.source.config.sampling_of_step(self.source.task.stop, step=1)
        sampled = self.sampler.sample([problem.prompt for problem in problems], sampling)
        groups = []
        for problem, completions in zip(problems, sampled, strict=True):
            rewards = [0.0] * sampling.n
            if groups:
                rewards = [float(place % 3 == 0) for place in range(sampling.n)]
            scores = tuple({"reward": reward} for reward in rewards)
            groups.append(Group(problem, tuple(completions), scores))
        return groups

    def made_up(self, groups: Sequence[Group]) -> Rollout:
        """The rollout of some groups; its old and reference log-probs are the sampler's with some
        noise."""
        rollout = collate_groups(groups, self.source.config, pad_token_id=0)
        generator = torch.Generator().manual_seed(0)
        sampler_BT = rollout.sampler_log_probs_BT
        drawn_2BT = torch.randn(2, *sampler_BT.shape, generator=generator)
        noise_2BT = 0.2 * drawn_2BT * rollout.batch.response_mask
        old_BT, reference_BT = sampler_BT + noise_2BT
        rollout = dataclasses.replace(
            rollout, old_log_probs_BT=old_BT, reference_log_probs_BT=reference_BT
        )
        rollout = with_advantages(rollout, self.config.advantage)
        if self.config.teacher:
            noise_BT = 0.2 * torch.randn(sampler_BT.shape, generator=generator)
            teacher_BT = sampler_BT + noise_BT * rollout.batch.response_mask
            rollout = with_teacher(rollout, teacher_BT, self.config.teacher_weight)
        every_row = range(len(rollout.lengths))
        return prepare_update(self.policy, rollout, every_row, self.config, 1).rollout

    def plain_log_probs(
        self, groups: Sequence[Group], batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The plain model's log-probs [B, T] of the completions of some groups, and by how much
        these are above the mean log-prob of all tokens there."""
        distribution = self.config.distribution
        setting = {f"sampling_{name}": value for name, value in vars(distribution).items()}
        setting["log_probs_of"] = "sampled"
        log_probs_BT = torch.zeros(batch.labels.shape)
        slopes_BT = torch.zeros(batch.labels.shape)
        with torch.no_grad():
            for row, response in enumerate(plain_responses(groups)):
                values = self.plain.token_values(self.plain.base, response, setting)
                slopes_T = values.log_probs + values.truncated_entropies
                log_probs_BT[row, batch.response_mask[row]] = values.log_probs.float()
                slopes_BT[row, batch.response_mask[row]] = slopes_T.float()
        return log_probs_BT, slopes_BT

    def gradient(self, rollout: Rollout) -> torch.Tensor:
        """The policy's gradient [D] of the run's loss, made as in an update, which it keeps."""
        rows = rows_with_gradient(rollout, self.config)
        self.accumulate(rollout, rows, range(len(rollout.lengths)))
        return self.policy.gradient()

    def accumulate(self, rollout: Rollout, rows: Sequence[int], mini_batch: Sequence[int]) -> None:
        """Add the gradient of some rows of a mini-batch to the policy's."""
        objective = rollout_objective(rollout, mini_batch, self.config)
        for _ in self.policy.accumulate(rollout.batch, rows, objective):
            pass  # each micro-batch adds its part

    def update(self, rollout: Rollout, learning_rate: float) -> None:
        """Make an optimiser step on the last rows, of one prompt, that have a gradient."""
        rows = rows_with_gradient(rollout, self.config)[-self.source.config.sampling.n :]
        self.accumulate(rollout, rows, rows)
        self.policy.clip_gradient(self.config.norm_limit)
        self.policy.step(learning_rate)

    def fixed_selections(self, rollout: Rollout) -> list[str]:
        """What is wrong with the tokens that "clip_cov" draws where all are eligible, in two
        updates: a half of them each time, and not the same ones."""
        loss = dataclasses.replace(
            self.config.loss,
            selected_share=0.5,
            covariance_low=-math.inf,
            covariance_high=math.inf,
        )
        config = dataclasses.replace(self.config, loss=loss, entropy_target=0.0)
        rows = range(len(rollout.lengths))
        tokens = sum(rollout.lengths)
        faults = []
        selections = []
        for number in (1, 2):
            prepared = prepare_update(self.policy, rollout, rows, config, number).rollout
            assert prepared.selected_BT is not None
            selections.append(prepared.selected_BT)
            if prepared.selected_BT.sum() != tokens // 2:
                faults.append("another share")
        if torch.equal(*selections):
            faults.append("the same tokens in the next update")
        return faults

    def faults_of_infinite(self, rollout: Rollout) -> list[str]:
        """What is wrong with updates by advantages that are no numbers: they change a weight, or
        are not reported as skipped."""
        advantages_B1 = torch.full_like(rollout.raw_rewards_B1, math.nan)
        changes: dict[str, Any] = {"raw_rewards_B1": advantages_B1, "advantages_B1": advantages_B1}
        if rollout.token_advantages_BT is not None:
            changes["token_advantages_BT"] = torch.full_like(rollout.token_advantages_BT, math.nan)
        tried = self._try_updates(dataclasses.replace(rollout, **changes), math.inf)
        faults = []
        if tried.changes_weights:
            faults.append("a change of weights")
        updates = len(mini_batches(rollout, self.config, step=1))
        if tried.report.get("bad_updates") != updates or tried.report.get("updates") != 0:
            faults.append(f"a report of other than {updates} skipped updates")
        return faults

    def trains_on_another_policy(self, rollout: Rollout) -> bool:
        """Whether updates on responses of which the sampler gives other log-probs change a
        weight."""
        shift_BT = ANOTHER_POLICY * rollout.batch.response_mask
        shifted_BT = rollout.sampler_log_probs_BT - shift_BT
        another = dataclasses.replace(rollout, sampler_log_probs_BT=shifted_BT)
        return self._try_updates(another, ANOTHER_POLICY / 2).changes_weights

    def _try_updates(self, rollout: Rollout, most_mismatch: float) -> TriedUpdates:
        """Make a step's updates on a rollout. Tokens are not selected, which would need values that
        are numbers."""
        loss = dataclasses.replace(self.config.loss, token_selection="none")
        config = dataclasses.replace(
            self.config, loss=loss, entropy_target=0.0, max_sampler_mismatch=most_mismatch
        )
        before = copy_weights(self.policy)
        report: Mapping[str, float | None] = {}
        try:
            report = update(self.policy, rollout, config, step=1).report
        except RunStopped:
            self.policy.drop_gradient()
        # NaN is more than 0 in no comparison.
        return TriedUpdates(not distance(self.policy, before) <= 0, report)

    def sent(self, rollout: Rollout, wanted: float) -> float:
        """0 once the sampler has the weights of updates that move log-probs by `wanted` nats at
        least. Raises `RunStopped` where eight updates move them by less, or the sampler did not get
        the weights."""
        # one of each prompt
        rows = range(0, len(rollout.lengths), self.source.config.sampling.n)
        tokens = sum(rollout.lengths[row] for row in rows)

        def log_probs() -> torch.Tensor:
            return self.policy.log_probs(rollout.batch, self.config.distribution, rows)

        before_BT = log_probs()
        moved = 0.0
        for power in range(8):
            if moved < wanted:
                self.update(rollout, self.config.learning_rate * 2**power)
                moved = ((log_probs() - before_BT).abs().sum() / tokens).item()
        if not moved >= wanted:
            raise RunStopped(
                f"eight updates moved log-probs by {moved:.2g} nats a token only: take a higher"
                " --learning_rate"
            )
        load_proven(self.sampler, self.policy.weights(), 1)
        return 0.0

    def synced(self, version: int = 1) -> float:
        """Mean difference of sampler and policy, after a transfer of the weights, on responses to
        long prompts. The sampler has answered these with other weights just before, so that keys
        and values of those show where it still has them."""
        problems = self.long_problems()
        weights = copy_weights(self.policy)
        halves = ((name, weight / 2) for name, weight in self.policy.weights())
        self.sampler.load_weights(halves, version)
        self.groups_of(problems)
        if distance(self.policy, weights) > 0:  # the sampler reads the policy's in place
            self.sampler.load_weights(weights.items(), version)
        self.sampler.load_weights(self.policy.weights(), version)
        rollout = self.made_up(self.groups_of(problems))
        report = sampler_mismatch(self.policy, rollout, self.config.distribution, math.inf)
        return report["sampler_mismatch"]

    def growth(self, rollout: Rollout) -> float:
        """`synced` after three steps at a learning rate of 0, each with its transfer."""
        for version in (2, 3):
            self.update(rollout, 0.0)
            self.sampler.load_weights(self.policy.weights(), version)
        self.update(rollout, 0.0)
        return self.synced(version=4)
