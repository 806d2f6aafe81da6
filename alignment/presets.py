"""List the presets, with the hardware, time and score that the file of each states.

uv run -m alignment.presets"""

import tomllib
from dataclasses import make_dataclass

from alignment.args import PRESETS, parse, preset_names
from alignment.system.errors import run_command


def main() -> None:
    # without any flag
    parse(make_dataclass("PresetsArgs", (), namespace={"__doc__": __doc__.partition("\n")[0]}))
    for name in preset_names():
        preset = tomllib.loads((PRESETS / f"{name}.toml").read_text(encoding="utf-8"))
        print(
            f"{name}: {preset['task']}, {preset['model']}\n   ",
            "; ".join(map(": ".join, preset["about"].items())),
        )


if __name__ == "__main__":
    run_command(main)
