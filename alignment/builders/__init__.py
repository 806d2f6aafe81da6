"""From arguments to policies, samplers, evaluations, warm starts and predictions, with the checks
that come before. Nothing below this room takes an arguments object."""
