"""Reinforcement-learning fine-tuning of language models on verifiable maths, with algorithm
ablations."""

import contextlib
import ctypes
import logging
import os
import signal
import sys

TYPE_CHECKING = False  # as in `typing`, whose import takes 2 ms
if TYPE_CHECKING:
    from alignment.api import (
        Accuracy,
        Comparison,
        Difference,
        EvaluateArgs,
        EvaluationResult,
        RLArgs,
        RunResult,
        RunStopped,
        SFTArgs,
        UserError,
        Verdicts,
        args_of_run,
        compare,
        evaluate,
        preset_names,
        read_run,
        train,
        train_sft,
    )

# What Python programs use (docs/python.md). Each name is there once it is asked for, so that
# importing this package loads nothing.
__all__ = [
    "Accuracy",
    "Comparison",
    "Difference",
    "EvaluateArgs",
    "EvaluationResult",
    "RLArgs",
    "RunResult",
    "RunStopped",
    "SFTArgs",
    "UserError",
    "Verdicts",
    "args_of_run",
    "compare",
    "evaluate",
    "preset_names",
    "read_run",
    "train",
    "train_sft",
]

# Read once, when torch starts its threads, so it must be set before torch is imported: spinning
# OpenMP threads make the work 4-9 times slower as soon as a second process (a sampler, a sibling
# run) wants the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Micro-batches of ever new lengths leave gaps in a GPU's memory that no later one fits; segments
# that grow have none.
EXPANDABLE_SEGMENTS = "expandable_segments:True"
os.environ.setdefault("PYTORCH_ALLOC_CONF", EXPANDABLE_SEGMENTS)

# On a CPU, oneDNN keeps what it has compiled for each shape of products in bfloat16, up to 1024 of
# them. Sampling has ever new shapes: 1024 take 0.3 to 1 GB, and save no time over 32, which hold
# those of a step.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")

# Threads that compute micro-batches side by side share one arena of glibc's: memory that one has
# freed then serves the other. With an arena each, a step of SmolLM2-135M peaks 3 GiB higher. (Other
# C libraries have no such function, and no such arenas.)
if "MALLOC_ARENA_MAX" not in os.environ:
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX

# Where torchao is installed, transformers imports it, and torch 2.13 warns of how torchao 0.18
# registers its enums.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)

# While `python -m alignment.X` imports, for seconds, Ctrl-C ends it without a traceback. Then
# `errors.run_command` takes over. (Another package may be run by -m and import this one.)
if sys.argv[:1] == ["-m"] and any(
    word.removeprefix("-m").startswith("alignment") for word in sys.orig_argv[1:]
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if not TYPE_CHECKING:  # for a type checker it would give every misspelt name a type

    def __getattr__(name: str) -> object:
        """A public name, from `alignment.api`."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module  # here, to keep the import of this package short

        api = import_module("alignment.api")
        # This has made the module `evaluate` an attribute of this package: it can be called.
        return globals().get(name, getattr(api, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
