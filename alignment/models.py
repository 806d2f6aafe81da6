"""The policy's device map, under the name that courses use. The code is in `alignment.builders`;
this module only names it."""

from alignment.builders.policies import partition_model_across_devices

__all__ = ["partition_model_across_devices"]
