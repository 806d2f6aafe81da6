"""How a rollout becomes updates."""

from dataclasses import dataclass, field
from typing import Literal

from alignment.core.advantages import AdvantageConfig
from alignment.core.losses import LossConfig
from alignment.core.records import Distribution


@dataclass(frozen=True)
class UpdateConfig:
    """The optimiser updates made on each rollout. The fields are those of the flags of the same names, but for:

    `distribution`, under which all log-probs are taken, and `old_log_probs`: "ratio_one" where the old policy is the policy
    itself (one update a rollout) or plays no part, "policy" where a pass before the first update computes them, "sampler" where
    those of the sampler serve."""

    loss: LossConfig
    advantage: AdvantageConfig
    distribution: Distribution = field(default_factory=Distribution)
    old_log_probs: Literal["ratio_one", "policy", "sampler"] = "ratio_one"
    epochs_per_rollout: int = 1
    train_mini_batch_size: int = 0
    updates_per_rollout: int = 1
    max_new_tokens: int = 256
    learning_rate: float = 2e-4
    warmup_steps: int = 5
    max_grad_norm: float = 1.0
    max_sampler_mismatch: float = 0.1
    seed: int = 0
    data_seed: int = 0
