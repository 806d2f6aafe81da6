"""A baseline that all problems share: the moving average of all rewards so far (Williams 1992,
section 5)."""

from dataclasses import dataclass

from alignment.core.advantages import Advantage, AdvantageInputs
from alignment.core.flag import flag


@dataclass(frozen=True)
class Settings:
    decay: float = flag(0.9, at_least=0, below=1)
    """Share of the average that stays from step to step."""


def running_mean(inputs: AdvantageInputs, state: float | None):
    """A = r - b, where b is the average before this step; in the first step this step's mean."""
    mean = inputs.rewards_PG[inputs.counted_PG].mean().nan_to_num().item()
    if state is None:
        state = mean
    decay = inputs.settings.decay
    return inputs.rewards_PG - state, decay * state + (1 - decay) * mean


entry = Advantage(running_mean, settings=Settings, silent_groups=True, smallest_group=1)
