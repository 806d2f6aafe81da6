"""Reinforcement-learning fine-tuning of language models on verifiable maths, with algorithm ablations."""

import logging
import os
import signal
import sys

# Read once, when torch starts its threads, so it must be set before torch is imported: spinning OpenMP threads
# make the work 4-9 times slower as soon as a second process (a sampler, a sibling run) wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Where torchao is installed, transformers imports it, and torch 2.13 warns of how torchao 0.18 registers its enums.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

# While `python -m alignment.X` imports, which takes seconds, there is nothing to save: Ctrl-C ends it without a traceback.
# Then `errors.door` takes over.
if sys.argv[:1] == ["-m"]:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
