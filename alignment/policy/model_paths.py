"""Model names that a user gives, checked before anything heavy is loaded."""

from __future__ import annotations

from pathlib import Path

from alignment.system.errors import UserError
from alignment.system.files import MANIFEST, damage

EMBEDDED = ("tiny", "tiny_student", "smollm2")


def model_path(name: str, flag: str = "--model") -> str:
    """A hub name or a folder for `from_pretrained`. Raises `UserError` for a folder that holds no model, or a damaged one."""
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1 or Path(name).exists()
    if looks_local and not (Path(name).expanduser() / "config.json").is_file():
        raise UserError(
            f'{flag} {name}: no model folder (with a config.json) is there; give "tiny", "smollm2", a Hugging Face folder,'
            " or a hub name such as Qwen/Qwen2.5-Math-1.5B"
        )
    if looks_local and (Path(name).expanduser() / MANIFEST).exists() and (wrong := damage(Path(name).expanduser())):
        raise UserError(f"{flag} {name}: {wrong}; if you changed it on purpose, delete its {MANIFEST}")
    return str(Path(name).expanduser()) if looks_local else name
