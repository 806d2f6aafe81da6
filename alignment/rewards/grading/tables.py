"""The tables of `notation.toml`: signs, LaTeX commands, units and words."""

import tomllib
from pathlib import Path

TABLES = tomllib.loads(Path(__file__).with_name("notation.toml").read_text("utf-8"))
