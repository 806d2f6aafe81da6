"""Tests that only a GPU can show. Without one they are skipped; with one a table of what they
measured ends the session."""

from pathlib import Path

import pytest
import torch

from alignment.system.gpus import unusable_driver

HERE = Path(__file__).parent
MEASURED: dict[str, str] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [item for item in items if HERE in item.path.parents]
    for item in own:
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=unusable_driver() or "needs a GPU"))


@pytest.fixture(scope="session")
def figures():
    """A function that notes a measured figure, by its name, for the table at the end."""

    def note(name: str, value: object) -> None:
        MEASURED[name] = f"{value:.4g}" if isinstance(value, float) else str(value)

    return note


def pytest_terminal_summary(terminalreporter) -> None:
    if not MEASURED:
        return
    terminalreporter.section(
        f"measured on {torch.cuda.get_device_name()}, torch {torch.__version__}"
    )
    width = max(map(len, MEASURED))
    for name, value in MEASURED.items():
        terminalreporter.write_line(f"{name:<{width}}  {value}")
