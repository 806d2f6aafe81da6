"""What this package uses of transformers, without libraries that only other uses need.

transformers loads sharded tensors, torchao and scipy wherever they are installed, for sharded or quantised models and object
detection. Under torchrun, beside vLLM, or where transformers is loaded already, all are loaded."""

import os
import sys

if {"transformers.modeling_utils", "vllm"}.isdisjoint(sys.modules) and "RANK" not in os.environ:
    from transformers import utils

    for name in ("torch_distributed", "torch_flex_attn", "torchao", "scipy"):  # which it takes for missing, now and later
        for module in (utils, utils.import_utils):
            setattr(module, f"is_{name}_available", lambda *arguments: False)

from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402, F401
from transformers.cache_utils import Cache, DynamicCache, StaticLayer  # noqa: E402, F401
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402, F401
from transformers.utils import logging  # noqa: E402, F401
