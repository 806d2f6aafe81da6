"""Text to padded batches, and means over masks. The code is in `alignment.core`; this module only
names it."""

from alignment.core.losses import masked_mean, masked_normalize
from alignment.core.tokens import tokenize_prompt_and_output

__all__ = ["masked_mean", "masked_normalize", "tokenize_prompt_and_output"]
