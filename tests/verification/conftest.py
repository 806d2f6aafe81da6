"""A small model for oracles, which compute in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from alignment.data.embedded import build_tiny


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """The folder of a smaller model than the tiny one, of one layer, untrained."""
    folder = tmp_path_factory.mktemp("small")
    build_tiny(folder, hidden_size=32)
    config = AutoConfig.from_pretrained(folder, num_hidden_layers=1, layer_types=["full_attention"])
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder
