"""What must hold in every rollout and update, whatever is trained: cheap to test, and silent in a
sound run. A broken invariant is a warning that names the likely cause."""

import math
from collections.abc import Sequence

import torch

from alignment.core.records import Rollout
from alignment.policy.policy import MicroBatchResult
from alignment.rollouts.config import UpdateConfig
from alignment.training.results import reported_sums

# The chance, in each rollout of a sound sampler, of a warning about equal answers.
FALSE_ALARM = 1e-9
# How far from 1 the mean ratio of a rollout's first mini-batch may be, with matrix products in
# float32 and in 16 bits. Old log-probs are of the same weights; micro-batches of another cut round
# differently.
RATIO_LIMIT = 1e-3
RATIO_LIMIT_OF_16_BITS = 0.05
# A gradient may be so much longer than the limit after it was clipped: sums of squares round.
CLIP_TOLERANCE = 1.01


def equal_answers_warning(rollout: Rollout, group_size: int) -> dict[str, str]:
    """The warning "equal_answers", where a rollout's groups have more equal answers than the
    sampler's own probabilities make likely.

    Compares the answers of a group in disjoint pairs. Given the first answer y of a pair, the
    second is the same with the probability p(y), of which the sampler's log-probs are the
    logarithm. The number of equal pairs is thus a sum of independent events, of which the mean is
    the sum m of the p(y). Chernoff's bound of a sum of x or more is exp(-m) (e m / x)^x."""
    number = len(rollout.batch.labels)
    first_rows: list[int] = []
    for start in range(0, number, group_size):
        end = min(start + group_size, number)
        first_rows += range(start, end - 1, 2)
    firsts = torch.tensor(first_rows, dtype=torch.int64)
    labels_BT = rollout.batch.labels
    mask_BT = rollout.batch.response_mask
    # Rows of one prompt are padded with one id, so that equal rows are equal answers.
    is_equal_XT = (labels_BT[firsts] == labels_BT[firsts + 1]) & (
        mask_BT[firsts] == mask_BT[firsts + 1]
    )
    equal = int(is_equal_XT.all(dim=1).sum())
    # The sum of a response's log-probs may pass 0 by rounding.
    log_probs_X = rollout.sampler_log_probs_BT[firsts].double().sum(dim=1).clamp(max=0)
    expected = log_probs_X.exp().sum().item()
    if equal <= expected or _log_tail(equal, expected) > math.log(FALSE_ALARM):
        return {}
    return {
        "equal_answers": (
            f"{equal} of {len(firsts)} pairs of answers are the same, where the sampler's"
            f" probabilities make {expected:.2g} likely: are the samples of a prompt drawn by one"
            " stream of random numbers?"
        )
    }


def _log_tail(number: int, mean: float) -> float:
    """The logarithm of Chernoff's bound on a sum of independent events being `number` or more,
    which is more than its `mean`."""
    if mean == 0:
        return -math.inf
    return number - mean + number * math.log(mean / number)


def ratio_warnings(
    mini_batches: Sequence[Sequence[MicroBatchResult]],
    config: UpdateConfig,
    dtype: torch.dtype,
    has_moved: bool,
) -> dict[str, str]:
    """The warnings "first_ratio" and "later_ratio" of one rollout's mini-batches, in their order,
    where the policy itself computed the old log-probs: the first ratio is 1, and later ones are
    not, if the weights `has_moved`. In 16 bits a small change of a weight is rounded away, so that
    later ratios may be 1 there."""
    with_rows = [results for results in mini_batches if results]
    if config.old_log_probs != "policy" or not with_rows:
        return {}
    if "ratio_sum" not in with_rows[0][0].sums:
        return {}
    warnings = {}
    first, *later = with_rows
    first_mean = _mean_ratio(first)
    limit = RATIO_LIMIT if dtype == torch.float32 else RATIO_LIMIT_OF_16_BITS
    if first is mini_batches[0] and abs(first_mean - 1) > limit:
        warnings["first_ratio"] = (
            f"the ratio to the old policy is {first_mean:.4f} before the first update, and must be"
            " 1: are old log-probs of other weights, or of another temperature?"
        )
    moves = has_moved and dtype == torch.float32
    if later and moves and all(_is_one(results) for results in later):
        warnings["later_ratio"] = (
            "the ratio to the old policy is 1 after updates that moved the weights: are old"
            " log-probs computed anew for each update?"
        )
    return warnings


def _mean_ratio(results: Sequence[MicroBatchResult]) -> float:
    """The mean ratio over the response tokens of a mini-batch."""
    total = sum(reported_sums(results, "ratio_sum"))
    tokens = sum(reported_sums(results, "response_tokens"))
    return total / max(1, tokens)


def _is_one(results: Sequence[MicroBatchResult]) -> bool:
    """Whether every ratio of a mini-batch is exactly 1."""
    return max(reported_sums(results, "ratio_max")) == 1 and _mean_ratio(results) == 1


def clip_warning(clipped_norms: Sequence[torch.Tensor], limit: float) -> dict[str, str]:
    """The warning "gradient_clip", where a gradient is longer than `limit` after it was clipped."""
    longest = max((norm.item() for norm in clipped_norms), default=0.0)
    if longest <= CLIP_TOLERANCE * limit:
        return {}
    return {
        "gradient_clip": (
            f"a gradient has the norm {longest:.3g} after it was clipped to --max_grad_norm"
            f" {limit:g}: is each rank's part, or each number, clipped by itself?"
        )
    }
