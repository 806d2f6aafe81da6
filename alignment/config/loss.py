"""The algorithm: advantages, loss, KL penalty, corrections."""

from dataclasses import dataclass
from typing import Literal

from alignment.config.flag import flag
from alignment.core.advantages import BASELINES, DEVIATIONS
from alignment.core.losses import CORRECTIONS, KL_ESTIMATORS, NORMALIZATIONS
from alignment.core.selection import SELECTIONS


@dataclass(frozen=True)
class LossTypeFlags:
    """Which loss a step of RL takes."""

    loss_type: str = flag("grpo_clip", group="algorithm")
    """no_baseline and reinforce_with_baseline: REINFORCE without and with the group's baseline;
    grpo_clip: GRPO; grpo_no_clip: GRPO without clipping; gspo: one ratio a response; cispo: clipped
    weights, all gradients; sapo: a smooth gate; gmpo: the geometric mean of clipped ratios; dppo: a
    bound on the divergence; or your package.module:name."""


@dataclass(frozen=True)
class LossFlags:
    """The numbers and choices of advantages, loss, KL penalty and corrections."""

    cliprange: float = flag(0.2, group="algorithm", above=0, at_most=1)
    """GRPO, GSPO, CISPO: the ratio to the old policy counts only within 1 - cliprange and 1 +
    cliprange."""
    cliprange_high: float | None = flag(None, group="algorithm", above=0)
    """The upper bound, where it is another (DAPO's clip-higher); by default --cliprange."""
    dual_clip: float = flag(0.0, group="algorithm", above=1, or_zero=True, zero="none")
    """GRPO, GSPO: a negative advantage counts at most so many times (above 1); 0: without this
    bound."""
    baseline: str = flag("group_mean", group="algorithm", choices=tuple(BASELINES))
    """What is subtracted from a reward: its group's mean, or others' (RLOO)."""
    normalize_by_std: bool = flag(True, group="algorithm")
    """Divide advantages by a standard deviation."""
    std_of: str = flag("group", group="algorithm", choices=tuple(DEVIATIONS))
    """Whose: the group's (unbiased, or of the population), or of all rewards."""
    advantage_eps: float = flag(1e-6, group="algorithm", above=0)
    """Added to that standard deviation."""
    beta: float = flag(0.0, group="algorithm", at_least=0, zero="none")
    """Weight of the KL divergence from the reference, the warm start unless
    --reference_reset_interval is given, in the loss; 0: there is none, and no reference model."""
    kl_estimator: str = flag(
        "k3", group="algorithm", choices=tuple(KL_ESTIMATORS), only_with="beta"
    )
    """How that is estimated; k3 is GRPO's, k1 has on average no gradient."""
    old_log_probs: Literal["policy", "sampler"] = flag("policy", group="algorithm")
    """Whose log-probs the ratio is to, where a rollout has several updates: the policy's own, by a
    pass before the first of them, or the sampler's, which spares it. Stale rollouts always take the
    sampler's."""
    sampler_correction: str = flag("none", group="algorithm", choices=tuple(CORRECTIONS))
    """Weigh tokens, or whole responses (sequence: the product of their tokens' weights, geometric:
    its mean a token), by trainer's over sampler's probability, truncated to, or left out beyond, a
    cap and a floor."""
    correction_cap: float = flag(2.0, group="algorithm", above=0, only_with="sampler_correction")
    """That cap."""
    max_refills: int = flag(0, group="algorithm", at_least=0, zero="never")
    """How often in a step, at most, groups of equal rewards, which teach nothing, are replaced by
    groups of other prompts (DAPO)."""
    overlong_buffer: int = flag(0, group="algorithm")
    """Tokens before --max_new_tokens in which the reward falls linearly, by up to 1 (DAPO); 0:
    none."""
    skip_unfinished: bool = flag(False, group="algorithm")
    """Leave responses that were cut off at --max_new_tokens out of baselines and updates."""
    loss_normalization: str = flag(
        "sequence_mean", group="algorithm", choices=tuple(NORMALIZATIONS)
    )
    """What weighs the same: each sequence, each token, or each token over a constant (sequences x
    --max_new_tokens)."""
    advantage: str = flag("group_baseline", group="algorithm")
    """What makes advantages of a step's rewards. group_baseline: --baseline, --normalize_by_std;
    or your package.module:name; docs/recipes.md has the others."""
    correction_floor: float = flag(
        0.0, group="algorithm", at_least=0, zero="none", only_with="sampler_correction"
    )
    """The least weight of --sampler_correction; 0: only the cap bounds it. IcePop: token_mask with
    0.5 and a cap of 5."""
    entropy_coefficient: float = flag(0.0, group="algorithm", at_least=0, zero="none")
    """Weight of the entropy, before top-p and top-k, that each token's loss is lowered by; with
    --entropy_target the one that the first update has."""
    entropy_target: float = flag(0.0, group="algorithm", at_least=0, zero="none")
    """Nats a token that the entropy is to keep (Skywork-OR1): while an update begins with less,
    the weight grows, else it falls and the bonus is off. Takes a forward pass before each
    update."""
    entropy_delta: float = flag(0.005, group="algorithm", above=0, only_with="entropy_target")
    """Change of that weight an update."""
    token_selection: str = flag("none", group="algorithm", choices=("none", *SELECTIONS))
    """Tokens of an update that are treated apart: top_entropy: only those of the highest entropy
    have a policy gradient; clip_cov: some of high covariance of log-prob and advantage have none;
    kl_cov: those of the highest stay near the old policy. Takes a forward pass before each
    update."""
    selected_share: float | None = flag(
        None, group="algorithm", above=0, at_most=1, only_with="token_selection"
    )
    """Share of an update's tokens that are selected; by default 0.2 (top_entropy), at most 0.0002
    (clip_cov), 0.002 (kl_cov)."""
    covariance_low: float = flag(1.0, group="algorithm", only_with="token_selection")
    """clip_cov: the least covariance of a token that may be selected."""
    covariance_high: float = flag(5.0, group="algorithm", only_with="token_selection")
    """clip_cov: the largest."""
    kl_cov_coefficient: float = flag(1.0, group="algorithm", above=0)
    """kl_cov: weight of the divergence from the old policy."""
    reference_reset_interval: int = flag(0, group="algorithm", at_least=0, zero="never")
    """Steps after which the reference of --beta becomes the policy as it is then, again and again
    (ProRL); 0: never. Each time a checkpoint is saved. With --lora_rank the reference is then a
    model beside the policy."""
    reference_reset_optimizer: bool = flag(False, group="algorithm")
    """Each such reset forgets the optimiser's moments, too."""
    log_probs_of: Literal["sampled", "full"] = flag("sampled", group="algorithm")
    """What ratios and the KL divergence are of: the distribution that was sampled, within top-k and
    top-p, or the full softmax at the same temperature, which leaves the gradient of a truncated
    sample biased. Without top-k and top-p both are the same."""


@dataclass(frozen=True)
class TeacherFlags:
    """The model to distil from on the policy's own samples."""

    teacher: str = flag("", group="algorithm")
    """Model to distil from, a folder or name as --model takes, with the policy's tokenizer: a
    sampled token's advantage grows by --teacher_weight x (the teacher's log-prob - the policy's);
    alone with --advantage none. Empty: none."""
    teacher_weight: float = flag(1.0, group="algorithm", above=0, only_with="teacher")
    """That weight."""
    teacher_device: str | None = flag(None, group="devices", swept=False)
    """Device of the --teacher; by default that of --reference_model_device."""
