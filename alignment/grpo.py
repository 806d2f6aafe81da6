"""Advantages and losses of the policy-gradient family, under the names that papers and courses use.

The code is in `alignment.core`; this module only names it.
"""

from alignment.core.advantages import compute_group_normalized_rewards
from alignment.core.losses import (
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
    masked_mean,
    masked_normalize,
)
from alignment.core.train_step import grpo_microbatch_train_step, sft_microbatch_train_step

__all__ = [
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "grpo_microbatch_train_step",
    "masked_mean",
    "masked_normalize",
    "sft_microbatch_train_step",
]
