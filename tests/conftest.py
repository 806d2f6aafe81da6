"""Imported before any test module, so that the package can set OpenMP's waiting policy before torch is loaded."""

from importlib.util import find_spec

import alignment  # noqa: F401

# Where vLLM is not installed beside pytest, e2e/test_vllm.py runs that folder in an environment that has it.
collect_ignore = [] if find_spec("vllm") else ["with_vllm"]
