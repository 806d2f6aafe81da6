"""The tables of `notation.toml`: names of signs, commands, units and words. They decide nothing."""

import tomllib
from pathlib import Path
from typing import Any

# A table of several kinds: a string of names, a list of phrases, or {name: string, list or number}.
TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("notation.toml").read_text("utf-8"))
