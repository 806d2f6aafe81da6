"""Policy-gradient losses, the KL penalty, importance weights, and the loss of a micro-batch that is
made of them.

Every fact about a loss is in its entry of `LOSSES`.

Axes: B responses, T tokens. Notation: r rewards, A advantages, pi the policy, pi_old the policy
that sampled. Each loss returns (per-token loss [batch, sequence], per-token metadata). Importing
this module loads no torch, so that commands check their arguments without that wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from alignment.core.advantages import ADVANTAGE_ARGUMENTS, settings_or_defaults
from alignment.core.flag import flag
from alignment.core.selection import SELECTIONS, SelectedTokens, SelectionConfig

if TYPE_CHECKING:
    from torch import Tensor

    Sums = dict[str, Tensor]
    TokenLoss = tuple[Tensor, dict[str, Tensor]]
    LossFunction = Callable[["LossInputs"], TokenLoss]


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean over `dim` (all axes when None) of the elements whose mask is true; NaN where the mask
    is empty."""
    return tensor.where(mask.bool(), 0).sum(dim) / mask.sum(dim)


def masked_normalize(
    tensor: Tensor, mask: Tensor, normalize_constant: float = 1.0, dim: int | None = None
) -> Tensor:
    """Sum over `dim` (all axes when None) of the elements whose mask is true, divided by
    `normalize_constant`."""
    return tensor.where(mask.bool(), 0).sum(dim) / normalize_constant


class Normalization(NamedTuple):
    """A way to make per-token losses a scalar."""

    total: Callable[[Tensor, Tensor], Tensor]
    """(loss [batch, sequence], mask) -> the sum over a micro-batch."""
    denominator: Callable[[Sequence[int], int], float]
    """(response lengths, max_new_tokens) -> what divides a whole step's sum."""


def _sum_of_means(loss_BT: Tensor, mask: Tensor) -> Tensor:
    return masked_mean(loss_BT, mask, dim=1).sum()


# --loss_normalization -> its sum and denominator. `most` is the most tokens that a response may
# have, max_new_tokens.
NORMALIZATIONS: Mapping[str, Normalization] = {
    "sequence_mean": Normalization(_sum_of_means, lambda lengths, most: len(lengths)),
    "token_mean": Normalization(masked_normalize, lambda lengths, most: sum(lengths)),
    "constant": Normalization(masked_normalize, lambda lengths, most: len(lengths) * most),
}


def loss_denominator(
    loss_normalization: str, response_lengths: Sequence[int], max_new_tokens: int
) -> float:
    """The number that the summed loss of a whole optimiser step is divided by.

    "sequence_mean": the number of sequences: all weigh the same (GRPO, arXiv:2402.03300, eq. 3).
    "token_mean": the number of response tokens: all weigh the same (DAPO, arXiv:2503.14476, eq. 8).
    "constant": sequences * `max_new_tokens`, so that length changes no token's weight (Dr. GRPO,
    arXiv:2503.20783, section 3.2).
    """
    return float(NORMALIZATIONS[loss_normalization].denominator(response_lengths, max_new_tokens))


@dataclass(frozen=True)
class LossInputs:
    """What a loss may need; None where not given.

    Log-probs and mask are [batch, sequence], rewards [batch, 1]. Advantages are [batch, 1], or with
    a teacher, which gives each token its own, [batch, sequence].
    """

    config: LossConfig
    log_probs: Tensor
    mask: Tensor | None = None
    raw_rewards: Tensor | None = None
    advantages: Tensor | None = None
    old_log_probs: Tensor | None = None
    reference_log_probs: Tensor | None = None
    sampler_log_probs: Tensor | None = None
    entropies: Tensor | None = None
    """Of the policy's distribution at each token, in nats, with their gradient."""
    selected: Tensor | None = None
    """Which tokens --token_selection selects."""
    selected_share: float = 1.0
    """The share that these are of all tokens of the step."""

    @property
    def settings(self) -> Any:
        """The loss's own settings, an instance of its `Loss.settings`; None where it has none."""
        return settings_or_defaults(self.config.loss.settings, self.config.settings)

    def require(self, *names: str) -> list[Tensor]:
        """The inputs of these names. Raises ValueError for one that is lacking."""
        inputs = []
        for name in names:
            value = getattr(self, name)
            if value is None:
                raise ValueError(f"this loss needs {name}")
            inputs.append(value)
        return inputs


@dataclass(frozen=True)
class Loss:
    """One policy-gradient loss, with every fact about it that other modules need."""

    function: LossFunction
    weight: Literal["advantages", "raw_rewards"] | None = "advantages"
    """What multiplies a response's gradient. A response of weight 0 has none, so its forward pass
    may be skipped; None: any response may have a gradient."""
    uses_ratio: bool = False
    """Whether the loss takes the ratio to the old policy, and so needs old log-probs."""
    ratio_per_response: bool = False
    """Whether the ratio is one number for all tokens of a response."""
    arguments: frozenset[str] = ADVANTAGE_ARGUMENTS
    """Which of the flags in `OPTIONAL_ARGUMENTS` this loss uses."""
    at_ratio_one: str = ""
    """The loss that has the same gradient when the ratio is 1 everywhere; empty: this loss
    itself."""
    settings: type | None = None
    """A frozen dataclass of the loss's own settings: each of its fields is a flag, --loss.FIELD.
    The function reads them from `LossInputs.settings`."""


@dataclass(frozen=True)
class LossConfig(SelectionConfig):
    """A loss and its settings, which have the names of their flags; those of --token_selection are
    `SelectionConfig`'s."""

    loss: Loss
    cliprange: float | None = 0.2
    """None for losses without clipping; a loss that clips raises ValueError without it."""
    cliprange_high: float | None = None
    dual_clip: float = 0.0
    beta: float = 0.0
    kl_estimator: str = "k3"
    loss_normalization: str = "sequence_mean"
    sampler_correction: str = "none"
    correction_cap: float = 2.0
    settings: Any = None
    """The loss's own settings, an instance of `Loss.settings`; None: their defaults."""
    correction_floor: float = 0.0
    entropy_coefficient: float = 0.0


def _weigh(weights: Tensor, values_BT: Tensor) -> Tensor:
    """The values times weights [batch, 1], or [batch, sequence]."""
    return weights.expand_as(values_BT) * values_BT


def compute_naive_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor
) -> TokenLoss:
    """-A * log pi(o_t | q, o_<t), REINFORCE (Williams 1992).

    Shapes [batch, 1] and [batch, sequence].
    """
    return -_weigh(raw_rewards_or_advantages, policy_log_probs), {}


def compute_grpo_clip_loss(
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor,
    cliprange: float,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """-min(rho * A, clip(rho, 1 - c, 1 + c_high) * A) with rho = pi / pi_old, per token.

    PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with group advantages
    (arXiv:2402.03300, eq. 3). `cliprange_high` (None: `cliprange`) is DAPO's upper range (Yu et al.
    2025, arXiv:2503.14476, eq. 10). With `dual_clip` d > 1 the surrogate of a negative advantage is
    at least d * A (Ye et al. 2020, arXiv:1912.09729, eq. 5). Metadata: "ratio", and the bool
    "clipped", true where a bound takes effect, so that the token's gradient is zero.
    """
    config = LossConfig(LOSSES["grpo_clip"], cliprange, cliprange_high, dual_clip)
    return _clipped_surrogate(advantages, (policy_log_probs - old_log_probs).exp(), config)


def _clipped_surrogate(advantages: Tensor, ratio_BT: Tensor, config: LossConfig) -> TokenLoss:
    low, high = _clip_range(config)
    unclipped_BT = _weigh(advantages, ratio_BT)
    bounded_BT = _weigh(advantages, ratio_BT.clamp(low, high))
    surrogate_BT = unclipped_BT.minimum(bounded_BT)
    clipped_BT = bounded_BT < unclipped_BT
    if config.dual_clip:
        # The floor d * A is for negative advantages only.
        floor = (config.dual_clip * advantages).where(advantages < 0, float("-inf"))
        floor_BT = floor.expand_as(surrogate_BT)
        clipped_BT = clipped_BT | (floor_BT > surrogate_BT)
        surrogate_BT = surrogate_BT.maximum(floor_BT)
    return -surrogate_BT, _ratio_and_clipped(ratio_BT, clipped_BT)


def _ratio_and_clipped(ratio_BT: Tensor, clipped_BT: Tensor) -> dict[str, Tensor]:
    """The metadata of a loss with a ratio to the old policy, without gradient."""
    return {"ratio": ratio_BT.detach(), "clipped": clipped_BT.detach()}


def _never_clipped(ratio_BT: Tensor) -> dict[str, Tensor]:
    """The metadata of a loss with a ratio that it never clips."""
    no_token_BT = ratio_BT.detach() < 0  # False everywhere: a ratio is never negative.
    return _ratio_and_clipped(ratio_BT, no_token_BT)


def _clip_range(config: LossConfig) -> tuple[float, float]:
    """The clip range of the ratio, lower and upper bound. Raises ValueError without a cliprange."""
    if config.cliprange is None:
        raise ValueError("this loss needs cliprange")
    high = config.cliprange if config.cliprange_high is None else config.cliprange_high
    return 1 - config.cliprange, 1 + high


def _reinforce(inputs: LossInputs) -> TokenLoss:
    weight = inputs.config.loss.weight
    if weight is None:
        raise ValueError("this loss needs a weight")
    (weights_B1,) = inputs.require(weight)
    return compute_naive_policy_gradient_loss(weights_B1, inputs.log_probs)


def _grpo_clip(inputs: LossInputs) -> TokenLoss:
    advantages, old_log_probs = inputs.require("advantages", "old_log_probs")
    return _clipped_surrogate(advantages, (inputs.log_probs - old_log_probs).exp(), inputs.config)


def _grpo_no_clip(inputs: LossInputs) -> TokenLoss:
    """-rho * A, per token: GRPO's surrogate (arXiv:2402.03300, eq. 3) without its clipping."""
    advantages, old_log_probs = inputs.require("advantages", "old_log_probs")
    ratio_BT = (inputs.log_probs - old_log_probs).exp()
    return -_weigh(advantages, ratio_BT), _never_clipped(ratio_BT)


def _gspo(inputs: LossInputs) -> TokenLoss:
    """-min(s * A, clip(s, 1 - c, 1 + c_high) * A) with one s a response.

    s = exp(mean over the response's tokens of log pi / pi_old): GSPO, Zheng et al. 2025
    (arXiv:2507.18071), eqs. 5 and 7. Every token of a response gets the response's loss, so that
    with sequence_mean each response counts once. Clip ranges are orders of magnitude smaller than
    GRPO's (3e-4 below and 4e-4 above in the paper, section 5.1).
    """
    advantages, old_log_probs, mask = inputs.require("advantages", "old_log_probs", "mask")
    mean_B = masked_mean(inputs.log_probs - old_log_probs, mask, dim=1)
    ratio_BT = mean_B.exp()[:, None].expand_as(inputs.log_probs)
    return _clipped_surrogate(advantages, ratio_BT, inputs.config)


def _cispo(inputs: LossInputs) -> TokenLoss:
    """-sg(clip(rho, 1 - c, 1 + c_high)) * A * log pi, where sg stops the gradient.

    Clipping bounds a token's weight and never removes its gradient: CISPO, MiniMax 2025
    (arXiv:2506.13585), eqs. 4 and 5. The paper bounds the ratio from above only, as `cliprange` 1
    does.
    """
    advantages, old_log_probs = inputs.require("advantages", "old_log_probs")
    ratio_BT = (inputs.log_probs.detach() - old_log_probs).exp()
    low, high = _clip_range(inputs.config)
    weight_BT = ratio_BT.clamp(low, high)
    loss_BT = -(_weigh(advantages, weight_BT) * inputs.log_probs)
    return loss_BT, _ratio_and_clipped(ratio_BT, weight_BT != ratio_BT)


@dataclass(frozen=True)
class SAPOSettings:
    """The temperatures of SAPO."""

    positive: float = flag(1.0, above=0)
    """SAPO: temperature of the gate where the advantage is positive."""
    negative: float = flag(1.05, above=0)
    """SAPO: temperature where it is negative; the higher, the less tokens count that have moved."""


def _sapo(inputs: LossInputs) -> TokenLoss:
    """-(4 / tau) * sigmoid(tau * (rho - 1)) * A, per token, with a temperature tau for each sign of
    the advantage: SAPO, Gao et al. 2025 (arXiv:2511.20347).

    A smooth gate takes the place of the clip. Its slope in rho is 1 at rho = 1. Formula and
    temperatures are those of verl (core_algos.compute_policy_loss_sapo) and TRL (grpo_trainer), not
    read in the paper itself. verl also bounds log rho to [-20, 20]. Both take the mean of a
    sequence, then of sequences (sequence_mean).
    """
    advantages, old_log_probs = inputs.require("advantages", "old_log_probs")
    ratio_BT = (inputs.log_probs - old_log_probs).exp()
    # [batch, 1] or [batch, sequence], as the advantages
    temperature = advantages.new_full((), inputs.settings.positive).where(
        advantages > 0, inputs.settings.negative
    )
    gate_BT = (temperature * (ratio_BT - 1)).sigmoid() * 4 / temperature
    return -_weigh(advantages, gate_BT), _never_clipped(ratio_BT)


@dataclass(frozen=True)
class GMPOSettings:
    """The clip range of GMPO, in nats."""

    clip_low: float = flag(0.4, above=0)
    """GMPO: log-ratios of tokens count from minus this, where the advantage is negative."""
    clip_high: float = flag(0.4, above=0)
    """GMPO: log-ratios of tokens count up to this, where the advantage is positive."""


def _gmpo(inputs: LossInputs) -> TokenLoss:
    """-A * exp(mean over the response's tokens of the clipped log rho): GMPO, Zhao et al. 2025
    (arXiv:2507.20673), eq. 4 and algorithm 1, the geometric mean of the tokens' surrogates.

    A token's log rho is clipped to [-clip_low, clip_high] on the side that PPO's minimum clips for
    the sign of A; section 3 has the range (e^-0.4, e^0.4) for rho. Every token of a response gets
    the response's loss, as in `_gspo`.
    """
    advantages, old_log_probs, mask = inputs.require("advantages", "old_log_probs", "mask")
    log_ratio_BT = inputs.log_probs - old_log_probs
    sign_B1 = advantages.sign()
    bounded_BT = log_ratio_BT.clamp(-inputs.settings.clip_low, inputs.settings.clip_high)
    unclipped_BT = _weigh(sign_B1, log_ratio_BT)
    surrogate_BT = unclipped_BT.minimum(_weigh(sign_B1, bounded_BT))
    clipped_BT = surrogate_BT < unclipped_BT
    mean_B1 = masked_mean(_weigh(sign_B1, surrogate_BT), mask, dim=1)[:, None]
    loss_BT = (-advantages * mean_B1.exp()).expand_as(log_ratio_BT)
    return loss_BT, _ratio_and_clipped(log_ratio_BT.exp(), clipped_BT)


@dataclass(frozen=True)
class DPPOSettings:
    """The trust region of DPPO."""

    divergence: Literal["tv", "kl"] = flag("tv")
    """DPPO: total variation, or KL divergence of the policy from the old one."""
    threshold: float | None = flag(None, above=0)
    """DPPO: tokens whose divergence exceeds it have no gradient that would raise it; by default
    0.2, with kl 0.05."""


# The largest probability that the divergences below take: in fp32 the next one is 1.
_LARGEST_PROBABILITY = 1 - 2.0**-23


def _binary_tv(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """|pi - pi_old|, of whether the sampled token comes."""
    return (log_probs.exp() - old_log_probs.exp()).abs()


def _binary_kl(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """KL(pi_old, pi) in nats, of whether the sampled token comes."""
    p = old_log_probs.exp().clamp(max=_LARGEST_PROBABILITY)
    q = log_probs.exp().clamp(max=_LARGEST_PROBABILITY)
    return p * (old_log_probs - log_probs) + (1 - p) * ((-p).log1p() - (-q).log1p())


class BinaryDivergence(NamedTuple):
    """A divergence of two outcomes: the sampled token, and any other."""

    function: Callable[[Tensor, Tensor], Tensor]
    """(log-probs of the policy, of the old one) -> the divergence of each token."""
    threshold: float
    """--loss.threshold by default: that of the paper's scaling experiments (appendix E)."""


# --loss.divergence -> it: arXiv:2602.04879, eqs. 13 and 14.
_BINARY_DIVERGENCES: Mapping[str, BinaryDivergence] = {
    "tv": BinaryDivergence(_binary_tv, 0.2),
    "kl": BinaryDivergence(_binary_kl, 0.05),
}


def _dppo(inputs: LossInputs) -> TokenLoss:
    """-M * rho * A, per token: DPPO, Qi et al. 2026 (arXiv:2602.04879), eq. 12.

    M is 0 where a divergence of policy and old policy exceeds the threshold and the gradient would
    raise it (A > 0 and rho > 1, or A < 0 and rho < 1), else 1. The divergence is of two outcomes,
    the sampled token and any other (eqs. 13 and 14). The paper's old policy is the sampler's
    (section 5.2; --old_log_probs sampler), and its advantages are not divided by a std. Here rho
    has no upper bound, as in eq. 12; the paper's scaling experiments bound it by 5 (appendix E),
    the authors' code by 10 (Stable-RL, core_algos.compute_policy_loss_with_mask).
    """
    advantages, old_log_probs = inputs.require("advantages", "old_log_probs")
    log_probs = inputs.log_probs.detach()
    divergence = _BINARY_DIVERGENCES[inputs.settings.divergence]
    threshold = inputs.settings.threshold
    if threshold is None:
        threshold = divergence.threshold
    divergence_BT = divergence.function(log_probs, old_log_probs)
    ratio_BT = (inputs.log_probs - old_log_probs).exp()
    moves_away_BT = ((advantages > 0) & (log_probs > old_log_probs)) | (
        (advantages < 0) & (log_probs < old_log_probs)
    )
    masked_BT = moves_away_BT & (divergence_BT > threshold)
    loss_BT = -_weigh(advantages, ratio_BT).where(~masked_BT, 0)
    return loss_BT, _ratio_and_clipped(ratio_BT, masked_BT)


_CLIPPED = ADVANTAGE_ARGUMENTS | {"cliprange", "cliprange_high"}
# Where rho = 1, the gradient of rho * A is A * grad log pi (arXiv:2402.03300, section 4.1.3), which
# is REINFORCE's.
_AT_RATIO_ONE = "reinforce_with_baseline"

# --loss_type -> the loss.
LOSSES: Mapping[str, Loss] = {
    "no_baseline": Loss(_reinforce, weight="raw_rewards", arguments=frozenset()),
    "reinforce_with_baseline": Loss(_reinforce),
    "grpo_clip": Loss(
        _grpo_clip, uses_ratio=True, at_ratio_one=_AT_RATIO_ONE, arguments=_CLIPPED | {"dual_clip"}
    ),
    "grpo_no_clip": Loss(_grpo_no_clip, uses_ratio=True, at_ratio_one=_AT_RATIO_ONE),
    "gspo": Loss(
        _gspo,
        uses_ratio=True,
        ratio_per_response=True,
        at_ratio_one=_AT_RATIO_ONE,
        arguments=_CLIPPED | {"dual_clip"},
    ),
    "cispo": Loss(_cispo, uses_ratio=True, at_ratio_one=_AT_RATIO_ONE, arguments=_CLIPPED),
    "sapo": Loss(_sapo, uses_ratio=True, at_ratio_one=_AT_RATIO_ONE, settings=SAPOSettings),
    "gmpo": Loss(
        _gmpo,
        uses_ratio=True,
        ratio_per_response=True,
        at_ratio_one=_AT_RATIO_ONE,
        settings=GMPOSettings,
    ),
    "dppo": Loss(_dppo, uses_ratio=True, at_ratio_one=_AT_RATIO_ONE, settings=DPPOSettings),
}
# Flags that only some losses use.
OPTIONAL_ARGUMENTS = frozenset().union(*(loss.arguments for loss in LOSSES.values()))


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
    cliprange_high: float | None = None,
    dual_clip: float = 0.0,
) -> TokenLoss:
    """The per-token loss named `loss_type` in `LOSSES`.

    Raises KeyError for an unknown name, ValueError for a lacking input.
    """
    config = LossConfig(LOSSES[loss_type], cliprange, cliprange_high, dual_clip)
    inputs = LossInputs(
        config,
        log_probs=policy_log_probs,
        mask=response_mask,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
    )
    return config.loss.function(inputs)


# --kl_estimator -> the estimate, from l = log pi_ref - log pi.
KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": lambda log_ratio: log_ratio.exp() - log_ratio - 1,
}


def kl_penalty(policy_log_probs: Tensor, reference_log_probs: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(pi, pi_ref) in nats at each sampled token, [batch, sequence].

    With l = log pi_ref - log pi, k1 = -l, k2 = l^2 / 2, k3 = exp(l) - l - 1 (Schulman 2020,
    "Approximating KL divergence"; k3 is GRPO's, arXiv:2402.03300, eq. 4). The means of k1 and k3
    over samples of pi are the divergence. As terms of a loss they differ: the expected gradient of
    k1 is zero, that of k2 is the divergence's own (Tang & Munos 2025, arXiv:2506.09477).

    Under top-p or top-k each model's log-probs are of its own truncated distribution, to which the
    sampled token is added where it is outside. The divergence may then be infinite, and no estimate
    is unbiased: the mean of k3 - k1 is E[exp(l)] - 1, which is no longer 0 but minus the
    probability that the reference gives to tokens pi never samples. At top-p .5 the same tokens had
    mean k1 .0386 and k3 .0148.
    """
    return KL_ESTIMATORS[estimator](reference_log_probs - policy_log_probs)


# Ways to bound an importance weight from below and from above, (weights, floor, cap) -> weights.
WEIGHT_BOUNDS: Mapping[str, Callable[[Tensor, float, float], Tensor]] = {
    "truncate": lambda weight_BT, floor, cap: weight_BT.clamp(min=floor, max=cap),
    "mask": lambda weight_BT, floor, cap: weight_BT.where(
        (weight_BT >= floor) & (weight_BT <= cap), 0
    ),
}


def _product_of_response(log_weight_BT: Tensor, mask: Tensor) -> Tensor:
    return log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)


def _geometric_mean_of_response(log_weight_BT: Tensor, mask: Tensor) -> Tensor:
    tokens_B1 = mask.sum(dim=1, keepdim=True)
    return (log_weight_BT.sum(dim=1, keepdim=True) / tokens_B1).expand_as(log_weight_BT)


# Of what an importance weight is, (log-weights of tokens, 0 outside the mask; mask) -> log-weights.
WEIGHT_LEVELS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda log_weight_BT, mask: log_weight_BT,
    "sequence": _product_of_response,
    "geometric": _geometric_mean_of_response,
}
# --sampler_correction: the level of the importance weight, and its bound.
CORRECTIONS = (
    "none",
    *(f"token_{bound}" for bound in WEIGHT_BOUNDS),
    *(f"sequence_{bound}" for bound in WEIGHT_BOUNDS),
    *(f"geometric_{bound}" for bound in WEIGHT_BOUNDS),
)


def sampler_weights(
    old_log_probs: Tensor,
    sampler_log_probs: Tensor,
    mask: Tensor,
    correction: str,
    cap: float,
    floor: float = 0.0,
) -> Tensor:
    """Importance weights [batch, sequence], without gradient, that correct for samples drawn from
    the sampler's distribution instead of the trainer's policy.

    "token": w = pi_old / pi_sampler of each token; "sequence": the product of these over the
    response; "geometric": their geometric mean over the response, which does not grow with its
    length (GSPO's s, arXiv:2507.18071, eq. 7, between trainer and sampler). "truncate":
    max(floor, min(w, cap)) (Ionides 2008; V-trace, Espeholt et al. 2018, arXiv:1802.01561, eq. 1,
    from above); "mask": w where it is from floor to cap, else 0 (IcePop's M, of tokens, in Ring-1T,
    arXiv:2510.18855, section 2.3.2, eqs. 1 and 2).
    """
    level, _, bound = correction.partition("_")
    log_weight_BT = (old_log_probs - sampler_log_probs).where(mask, 0).detach()
    log_weight_BT = WEIGHT_LEVELS[level](log_weight_BT, mask)
    return WEIGHT_BOUNDS[bound](log_weight_BT.exp(), floor, cap)


def micro_batch_loss(inputs: LossInputs, denominator: float | Tensor) -> tuple[Tensor, Sums]:
    """The scalar loss of one micro-batch, with its graph, and sums over its response tokens.

    A token's loss is its policy-gradient loss, changed by the `SELECTIONS` entry of
    --token_selection, weighted by `sampler_weights`, plus `beta` times `kl_penalty`, minus
    `entropy_coefficient` times the entropy of its distribution (PPO, arXiv:1707.06347, eq. 9).
    `denominator` is that of the whole optimiser step (`loss_denominator`), so any cut into
    micro-batches has the same gradient. Sums: "response_tokens"; "ratio_sum", "ratio_max" and
    "clipped_tokens" of a loss with a ratio; "kl_sum" with a KL penalty; "weight_sum" with a
    correction; "selected_tokens" with a selection. Nothing here waits for the device.
    """
    config = inputs.config
    (mask,) = inputs.require("mask")
    loss_BT, metadata = config.loss.function(inputs)
    per_token = dict(metadata)  # quantities [batch, sequence], of which sums are reported
    if config.token_selection != "none":
        selected_BT, old_log_probs = inputs.require("selected", "old_log_probs")
        log_ratio_BT = inputs.log_probs - old_log_probs
        tokens = SelectedTokens(selected_BT, log_ratio_BT, inputs.selected_share, config)
        loss_BT = SELECTIONS[config.token_selection].change(loss_BT, tokens)
        per_token["selected"] = selected_BT
    if config.sampler_correction != "none":
        old_log_probs, sampler_log_probs = inputs.require("old_log_probs", "sampler_log_probs")
        weight_BT = sampler_weights(
            old_log_probs,
            sampler_log_probs,
            mask,
            config.sampler_correction,
            config.correction_cap,
            config.correction_floor,
        )
        loss_BT = loss_BT * weight_BT
        per_token["weight"] = weight_BT
    if config.beta:
        (reference_log_probs,) = inputs.require("reference_log_probs")
        kl_BT = kl_penalty(inputs.log_probs, reference_log_probs, config.kl_estimator)
        loss_BT = loss_BT + config.beta * kl_BT
        per_token["kl"] = kl_BT.detach()
    if config.entropy_coefficient:
        (entropies,) = inputs.require("entropies")
        loss_BT = loss_BT - config.entropy_coefficient * entropies
    total = NORMALIZATIONS[config.loss_normalization].total(loss_BT, mask)
    return total / denominator, _token_sums(per_token, mask)


def _token_sums(per_token: dict[str, Tensor], response_mask: Tensor) -> Sums:
    """Sums over response tokens (`micro_batch_loss`) of those quantities that `per_token` has."""
    sums = {"response_tokens": response_mask.sum()}
    if "ratio" in per_token:
        ratio_BT = per_token["ratio"].where(response_mask, 0)
        sums["ratio_sum"] = ratio_BT.sum()
        sums["ratio_max"] = ratio_BT.max()
        sums["clipped_tokens"] = (per_token["clipped"] & response_mask).sum()
    if "selected" in per_token:
        sums["selected_tokens"] = (per_token["selected"] & response_mask).sum()
    for name in ("kl", "weight"):
        if name in per_token:
            sums[f"{name}_sum"] = masked_normalize(per_token[name], response_mask)
    return sums


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: str,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: str = "sequence_mean",
    denominator: float | None = None,
    *,
    reference_log_probs: Tensor | None = None,
    sampler_log_probs: Tensor | None = None,
    **config_fields,
) -> tuple[Tensor, Sums]:
    """Backward of `micro_batch_loss`; gradients add up over micro-batches.

    Returns the scalar loss, detached, and its sums.

    Without `denominator` the whole step is taken to be `gradient_accumulation_steps` times this
    micro-batch: "sequence_mean" divides by its responses times the steps, "token_mean" by its
    response tokens times the steps, and "constant" raises ValueError. `config_fields` are further
    fields of `LossConfig`: cliprange_high, dual_clip, beta, kl_estimator, sampler_correction,
    correction_cap, correction_floor. The mask may be of any type: what is not 0 is a response
    token.
    """
    mask_BT = response_mask.bool()
    divisor: float | Tensor
    if denominator is None:
        counts = {"sequence_mean": mask_BT.shape[0], "token_mean": mask_BT.sum()}
        if loss_normalization not in counts:
            raise ValueError(f'loss_normalization "{loss_normalization}" needs a denominator')
        divisor = counts[loss_normalization] * gradient_accumulation_steps
    else:
        divisor = denominator
    config = LossConfig(
        LOSSES[loss_type], cliprange, loss_normalization=loss_normalization, **config_fields
    )
    inputs = LossInputs(
        config,
        log_probs=policy_log_probs,
        mask=mask_BT,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        reference_log_probs=reference_log_probs,
        sampler_log_probs=sampler_log_probs,
    )
    loss, sums = micro_batch_loss(inputs, divisor)
    loss.backward()
    return loss.detach(), sums


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, Sums]:
    """Negative log-likelihood of the response tokens and its backward.

    The loss is the sum over a response of -log pi / normalize_constant, averaged over the batch and
    divided by `gradient_accumulation_steps`. Returns the scalar loss, detached, and
    {"response_tokens"}. The mask may be of any type, as that of `grpo_microbatch_train_step`."""
    mask_BT = response_mask.bool()
    per_sequence_B = -masked_normalize(policy_log_probs, mask_BT, normalize_constant, dim=-1)
    loss = per_sequence_B.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), _token_sums({}, mask_BT)
