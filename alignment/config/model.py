"""The base model, its numbers' type, and adapters."""

from dataclasses import dataclass
from typing import Literal

from alignment.config.flag import Extra, flag


@dataclass(frozen=True)
class ModelFlags:
    """Which model is trained or asked, and its numbers' type."""

    model: str = flag("tiny", group="model", setting=True)
    """Base model: "tiny", "tiny_student" or "smollm2" (built here), a Hugging Face folder, or a hub
    name."""
    sft_base: str = flag("checkpoints/tiny_sft", group="model", setting=True)
    """Folder of the warm start: `sft` writes, `train_rl` reads it; empty: --model."""
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", group="model", setting=True)
    """Type of matrix products; auto: bfloat16 on GPUs and on CPUs that multiply it faster (AMX,
    AVX512-BF16), else float32. Trained weights are always kept in float32."""


@dataclass(frozen=True)
class AdapterFlags:
    """Adapters, which are then all that is trained."""

    lora_rank: int = flag(
        0, group="model", at_least=0, zero="none", needs=Extra("peft", "lora"), setting=True
    )
    """Train low-rank adapters of this rank instead of the weights (LoRA, extra "lora"); 0: the
    weights."""
    lora_alpha: int = flag(32, group="model", at_least=1, only_with="lora_rank", setting=True)
    """What adapters add to the weights counts alpha / rank times."""
    lora_targets: str = flag("", group="model", only_with="lora_rank", setting=True)
    """Linear layers with adapters, such as q_proj,v_proj; empty: all but the output head."""
