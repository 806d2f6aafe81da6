"""A small model for oracles, which compute in float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from alignment.data.embedded import build_tiny


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """The folder of a smaller model than the tiny one, untrained."""
    folder = tmp_path_factory.mktemp("small")
    build_tiny(folder, hidden_size=32)
    return folder
