"""Which tokens of an optimiser step are treated apart (--token_selection): those that alone have a
policy gradient, those that have none, or those that are kept near the old policy.

A selection ranks the N response tokens of the whole step, of all its micro-batches and ranks, by
what the policy computes before the step. So any cut of the step selects the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Values this near to the last one selected are tied with it. Responses of one prompt begin with
# tokens of equal entropy, of which the last bits depend on how a step is cut.
TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """The settings of --token_selection, which have the names of their flags."""

    token_selection: str = "none"
    selected_share: float | None = None
    """None: the share of the `SELECTIONS` entry."""
    covariance_low: float = 1.0
    covariance_high: float = 5.0
    kl_cov_coefficient: float = 1.0


@dataclass(frozen=True)
class StepTokens:
    """The values of all N response tokens of a step, by the policy before the step, [N]."""

    log_probs: Tensor
    entropies: Tensor
    advantages: Tensor
    draws: Tensor
    """Random numbers from 0 to 1."""


@dataclass(frozen=True)
class SelectedTokens:
    """Which tokens of a micro-batch are selected, and what a loss needs to treat them apart."""

    selected_BT: Tensor
    """Bool [batch, sequence]."""
    log_ratio_BT: Tensor
    """log pi / pi_old of each token, with its gradient."""
    share: float
    """The share that the selected tokens are of all tokens of the step."""
    config: SelectionConfig


@dataclass(frozen=True)
class Selection:
    """One way to select tokens, and what the loss does with them."""

    choose: Callable[[StepTokens, float, SelectionConfig], Tensor]
    """(tokens, share, config) -> whether each is selected [N]."""
    change: Callable[[Tensor, SelectedTokens], Tensor]
    """(losses [batch, sequence], the selected tokens) -> losses."""
    share: float
    """--selected_share by default: the paper's (of two, that for the smaller model)."""
    arguments: frozenset[str] = frozenset({"selected_share"})
    """Which of the flags in `SELECTION_ARGUMENTS` it uses."""
    uses_advantages: bool = True
    adds_gradient: bool = False
    """Whether responses without an advantage may get a gradient, and the old policy is needed."""


def number_selected(tokens: int, share: float) -> int:
    """Tokens that a share of so many is, rounded down, at least 1."""
    return max(1, int(share * tokens))


def _highest(values_N: Tensor, share: float) -> Tensor:
    """Whether each of the values is among the largest `share` of them, ties (`TIE`) included."""
    number = number_selected(len(values_N), share)
    return values_N >= values_N.topk(number).values[-1] - TIE


def covariances(tokens: StepTokens) -> Tensor:
    """(log pi - mean log pi) * (A - mean A) of each token [N], whose mean is the covariance that
    drives the entropy down (Cui et al. 2025, arXiv:2505.22617, eq. 10). Both means are over the N
    tokens, so that long responses weigh more."""
    centred_N = tokens.log_probs - tokens.log_probs.mean()
    return centred_N * (tokens.advantages - tokens.advantages.mean())


def _top_entropy(tokens: StepTokens, share: float, config: SelectionConfig) -> Tensor:
    return _highest(tokens.entropies, share)


def _random_of_high_covariance(tokens: StepTokens, share: float, config: SelectionConfig) -> Tensor:
    covariances_N = covariances(tokens)
    eligible_N = (covariances_N >= config.covariance_low) & (
        covariances_N <= config.covariance_high
    )
    number = number_selected(len(covariances_N), share)
    if eligible_N.sum() <= number:
        return eligible_N
    drawn_N = tokens.draws.where(eligible_N, 2.0)
    return drawn_N <= drawn_N.kthvalue(number).values


def _top_covariance(tokens: StepTokens, share: float, config: SelectionConfig) -> Tensor:
    return _highest(covariances(tokens), share)


def _keep_selected(loss_BT: Tensor, tokens: SelectedTokens) -> Tensor:
    """Only selected tokens have a loss, divided by their share, so that with token_mean the
    denominator is their number."""
    return loss_BT.where(tokens.selected_BT, 0) / tokens.share


def _leave_out_selected(loss_BT: Tensor, tokens: SelectedTokens) -> Tensor:
    return loss_BT.where(~tokens.selected_BT, 0)


def _penalise_selected(loss_BT: Tensor, tokens: SelectedTokens) -> Tensor:
    log_ratio_BT = tokens.log_ratio_BT
    divergence_BT = log_ratio_BT.exp() - 1 - log_ratio_BT
    return loss_BT + tokens.config.kl_cov_coefficient * divergence_BT.where(tokens.selected_BT, 0)


# --token_selection -> the selection; "none" has no entry.
#
# "top_entropy": only the share of tokens with the highest entropy has a policy gradient, and the
# denominator counts these alone (Wang et al. 2025, arXiv:2506.01939, section 5.1, eq. 6, with the
# share of section 5.2). Eq. 6 has the denominator of token_mean; of the other ones the loss is
# divided by the selected share, too. The authors' code (Beyond-the-80-20-Rule-RLVR,
# core_algos.get_global_entropy_top_mask) ranks the tokens of a micro-batch, not of the whole step,
# and rounds their number up, not down.
# "clip_cov": of the tokens whose covariance is from covariance_low to covariance_high, a share of
# all tokens, drawn at random, has no policy gradient (arXiv:2505.22617, section 4.2, eqs. 11 and
# 12, with the numbers of section 4.3). The authors' code (Entropy-Mechanism-of-RL,
# core_algos.compute_policy_loss_clip_cov) has open bounds, and draws no token that PPO clips.
# "kl_cov": the share of tokens with the highest covariance pays kl_cov_coefficient times the
# divergence KL(pi_old, pi) (the same, eqs. 13 and 14; the share is that of the 7B model, 32B has
# 2e-4). Samples of the old policy estimate it as rho - 1 - log rho, whose expected gradient is the
# divergence's own. The paper's listing 1 and the authors' code take |log rho|: where rho is 1 but
# for rounding, the sign of its gradient is rounding's.
# Eqs. 12 and 14 have no clip of PPO's: --loss_type decides that.
SELECTIONS: Mapping[str, Selection] = {
    "top_entropy": Selection(_top_entropy, _keep_selected, share=0.2, uses_advantages=False),
    "clip_cov": Selection(
        _random_of_high_covariance,
        _leave_out_selected,
        share=2e-4,
        arguments=frozenset({"selected_share", "covariance_low", "covariance_high"}),
    ),
    "kl_cov": Selection(
        _top_covariance,
        _penalise_selected,
        share=2e-3,
        arguments=frozenset({"selected_share", "kl_cov_coefficient"}),
        adds_gradient=True,
    ),
}
SELECTION_ARGUMENTS = frozenset().union(*(entry.arguments for entry in SELECTIONS.values()))
"""Flags that only some selections use."""


def select_tokens(tokens: StepTokens, config: SelectionConfig) -> Tensor:
    """Whether each of a step's tokens is selected [N], by `config.token_selection`."""
    selection = SELECTIONS[config.token_selection]
    share = config.selected_share
    if share is None:
        share = selection.share
    return selection.choose(tokens, share, config)
