"""The hand-built device map of a preset's policy. The code is in `alignment.policy.loading`; this module only names it."""

from alignment.policy.loading import partition_model_across_devices

__all__ = ["partition_model_across_devices"]
