"""Advantages and losses of the policy-gradient family, under the names that papers and courses use.

The code is in `alignment.core`; this module only names it."""

from alignment.core.advantages import (
    compute_group_normalized_rewards as compute_group_normalized_rewards,
)
from alignment.core.losses import compute_grpo_clip_loss as compute_grpo_clip_loss
from alignment.core.losses import (
    compute_naive_policy_gradient_loss as compute_naive_policy_gradient_loss,
)
from alignment.core.losses import compute_policy_gradient_loss as compute_policy_gradient_loss
from alignment.core.losses import grpo_microbatch_train_step as grpo_microbatch_train_step
from alignment.core.losses import masked_mean as masked_mean
from alignment.core.losses import masked_normalize as masked_normalize
from alignment.core.losses import sft_microbatch_train_step as sft_microbatch_train_step
