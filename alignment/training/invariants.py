"""What must hold in every rollout and update, whatever is trained: cheap to test, and silent in a
sound run. A broken invariant is a warning that names the likely cause."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch

from alignment.core.records import Rollout
from alignment.policy.policy import MicroBatchResult, Policy, PolicyConfig
from alignment.rollouts.config import UpdateConfig
from alignment.training.results import reported_sums

# The names of the warnings of this module.
INVARIANTS = (
    "equal_answers",
    "first_kl",
    "first_ratio",
    "gradient_clip",
    "later_ratio",
    "sampled_entropy",
    "step_length",
)
# The chance, in each rollout of a sound sampler, of a warning about equal answers.
FALSE_ALARM = 1e-9
# How far from 1 the mean ratio of a rollout's first mini-batch may be, with matrix products in
# float32 and in 16 bits. Old log-probs are of the same weights; micro-batches of another cut round
# differently.
RATIO_LIMIT = 1e-3
RATIO_LIMIT_OF_16_BITS = 0.05
# In nats: -log p of a drawn token is larger with a chance of 10^-9 at most, of 150,000 tokens.
LARGEST_SURPRISE = 37.0
# A gradient may be so much longer than the limit after it was clipped: sums of squares round.
CLIP_TOLERANCE = 1.01
# A step may be so much longer than AdamW's bound, since moments round.
STEP_TOLERANCE = 1.03
ADAM_OPTIMIZERS = ("adamw", "adamw_cpu_offload")
SAMPLED_WEIGHTS = 256  # of each tensor, that the length of a step is measured by
WEIGHT_ROUNDING = 2.0**-22  # of a weight's size, in float32
# Updates at lower learning rates may change no bit of a ratio to the old policy.
LEAST_MOVING_RATE = 1e-6
LEAST_NORM = 1e-3  # of a gradient, of which a step must change some weight


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


def first_kl_warning(
    mini_batches: Sequence[Sequence[MicroBatchResult]],
    config: UpdateConfig,
    dtype: torch.dtype,
    step: int,
) -> dict[str, str]:
    """The warning "first_kl", where the KL penalty of a first mini-batch is not 0 though the
    reference has the policy's weights: in the first step, and in the step after a reset."""
    is_policy = step == 1 or (
        config.reference_reset_interval and (step - 1) % config.reference_reset_interval == 0
    )
    if not (is_policy and mini_batches and mini_batches[0]):
        return {}
    first = mini_batches[0]
    if "kl_sum" not in first[0].sums:
        return {}
    tokens = sum(reported_sums(first, "response_tokens"))
    mean = sum(reported_sums(first, "kl_sum")) / max(1, tokens)
    limit = RATIO_LIMIT if dtype == torch.float32 else RATIO_LIMIT_OF_16_BITS
    if abs(mean) <= limit:
        return {}
    return {
        "first_kl": (
            f"the policy is {mean:.3g} nats a token from the reference before the first update"
            " from it, and must be at 0: has the reference other weights than the run began with,"
            " or another temperature?"
        )
    }


def sampled_entropy_warning(
    mini_batches: Sequence[Sequence[MicroBatchResult]], rollout: Rollout
) -> dict[str, str]:
    """The warning "sampled_entropy", where the tokens of a first mini-batch are likelier, or less
    likely, than tokens that are drawn from the policy.

    The surprise -log p of a drawn token has the entropy H at its place for its mean, whatever was
    drawn before, and, while it is at most L, L H for a bound of its mean square. The sum of
    surprises is then further than x from that of entropies with a chance of 2 exp(-x^2 / (2 (V +
    L x / 3))) at most, V = L times the sum of entropies (Freedman 1975, "On tail probabilities for
    martingales", theorem 1.6). The rows must not have been chosen by what was drawn."""
    if not (mini_batches and mini_batches[0]):
        return {}
    first = mini_batches[0]
    if "sampling_entropy_sum" not in first[0].sums:
        return {}
    entropy = sum(reported_sums(first, "sampling_entropy_sum"))
    tokens = sum(reported_sums(first, "response_tokens"))
    surprise = 0.0
    for result in first:
        surprise -= rollout.sampler_log_probs_BT[result.rows].double().sum().item()
    exponent = math.log(2 / FALSE_ALARM)
    linear = LARGEST_SURPRISE * exponent / 3
    bound = linear + math.sqrt(linear**2 + 2 * exponent * LARGEST_SURPRISE * max(entropy, 0.0))
    if abs(surprise - entropy) <= bound:
        return {}
    return {
        "sampled_entropy": (
            f"drawn tokens have {surprise / tokens:.3g} nats of surprise on average, where the"
            f" policy's entropy is {entropy / tokens:.3g}: are they drawn at another temperature,"
            " or greedily?"
        )
    }


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


def has_known_step(config: object) -> TypeGuard[PolicyConfig]:
    """Whether a bound of a policy's step is known. It is of Adam's moments in float32, without
    adapters, in this process."""
    return (
        isinstance(config, PolicyConfig)
        and not config.lora_rank
        and config.optimizer in ADAM_OPTIMIZERS
        and config.adam.longest_step < math.inf
    )


def sample_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Some elements of each of the policy's tensors, in float64 on the CPU."""
    sampled = {}
    for name, tensor in policy.weights():
        every = max(1, tensor.numel() // SAMPLED_WEIGHTS)
        sampled[name] = tensor.detach().flatten()[::every].to("cpu", torch.float64, copy=True)
    return sampled


def take_step(policy: Policy, rate: float, norm: torch.Tensor, is_tested: bool) -> dict[str, str]:
    """Make an optimiser step of a gradient of that norm before it was clipped. Returns a warning
    where it `is_tested` and changes the weights by more or less than it can."""
    config = getattr(policy, "policy_config", None)
    if not is_tested or not has_known_step(config):
        policy.step(rate)
        return {}
    before = sample_weights(policy)
    policy.step(rate)
    return step_warning(before, sample_weights(policy), rate, config, norm.item())


def step_warning(
    before: Mapping[str, torch.Tensor],
    after: Mapping[str, torch.Tensor],
    rate: float,
    config: PolicyConfig,
    norm: float,
) -> dict[str, str]:
    """The warning "step_length", where an optimiser step of a learning rate and a gradient of a
    `norm` changed a weight by more than AdamW can (Kingma & Ba 2015, arXiv:1412.6980, section 2.1;
    Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), or no weight."""
    largest = 0.0
    moved = False
    longest_step = STEP_TOLERANCE * config.adam.longest_step
    for name, old in before.items():
        change = (after[name] - old).abs()
        longest = rate * (longest_step + config.weight_decay * old.abs())
        bound = longest + WEIGHT_ROUNDING * old.abs()
        # The least positive number keeps 0 of a learning rate of 0 from being divided by.
        largest = max(largest, (change / bound.clamp(min=1e-300)).max().item())
        moved = moved or bool(change.any())
    if largest > 1:
        return {
            "step_length": (
                f"a step changed a weight by {largest:.3g} times what AdamW can at the learning"
                f" rate {rate:.3g}: is it another rate than the schedule's, another beta, or is a"
                " weight trained twice?"
            )
        }
    must_move = norm >= LEAST_NORM and rate >= LEAST_MOVING_RATE
    if before and must_move and not moved:
        return {
            "step_length": (
                f"a step of the learning rate {rate:.3g} changed no weight: does the optimiser have"
                " other tensors than the model, or a rate of 0?"
            )
        }
    return {}
