"""List the presets, with the hardware, time and score that the file of each states.

uv run -m alignment.presets"""

import tomllib
from dataclasses import dataclass

from alignment.args import PRESETS, parse, preset_names
from alignment.system.errors import run_command


@dataclass(frozen=True)
class PresetsArgs:
    """List the presets, with the hardware, time and score that the file of each states."""


def main() -> None:
    parse(PresetsArgs)
    for name in preset_names():
        preset = tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))
        about = [f"{key}: {value}" for key, value in preset["about"].items()]
        print(f"{name}: {preset['task']}, {preset['model']}")
        print("    " + "; ".join(about))


if __name__ == "__main__":
    run_command(main)
