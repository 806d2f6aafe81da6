"""Machines that a plan is for, by a card's name, from a file, or this one; and the seconds of a unit of work there."""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

CARDS = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
REACHED, CORE = CARDS.pop("reached"), CARDS.pop("CPU")
NUMBERS = ("memory", "bfloat16", "float32", "bandwidth", "link", "network")  # of a card: GB, TFLOP/s and GB/s


@dataclass(frozen=True)
class Hardware:
    """Alike machines, and the NUMBERS of their card; None and 0: this machine's."""

    gpus: int | None  # Of a machine.
    memory: float  # Bytes of each.
    machines: int
    card: Mapping[str, float] | None

    def rates(self, itemsize: int) -> np.ndarray | None:
        """Seconds of a unit of each of `KINDS` at best and at worst, [2, kinds], with products of numbers of `itemsize` bytes."""
        card = self.card or _own_card(self.gpus)
        numbers = ("bfloat16" if itemsize == 2 else "float32", "bandwidth", "launches", "link", "network", "disk")
        return 1 / np.array([[REACHED[of][end] * card.get(of, 1) for of in numbers] for end in (0, 1)]) if card else None


def hardware_of(text: str, gpus: int | None = None, machines: int = 1, memory: float | None = None) -> Hardware:
    """What --hardware names: CARD, 8xCARD or 2x8xCARD, machines x GPUs x a card of `CARDS` or of a TOML file; or else what
    --num_gpus, --machines and --gpu_memory say. Raises `UserError` for both, an unknown card, and a file without its numbers."""
    if not text:
        return Hardware(gpus, 1e9 * (memory or 0), machines, None)
    given = {"num_gpus": gpus, "machines": machines if machines > 1 else None, "gpu_memory": memory}
    if others := [f"--{flag} {value:g}" for flag, value in given.items() if value is not None]:
        raise UserError(f"--hardware {text}: says that already; leave out {' '.join(others)}")
    machines, gpus, name = re.fullmatch(r"(?:(\d+)x(?=\d+x))?(?:(\d+)x)?(.*)", text, re.DOTALL).groups("1")
    own = read_toml(Path(name), "--hardware") if name.endswith(".toml") else {}
    card = next(iter(own.values()), None) if own else CARDS.get(re.sub("[ _]", "-", name.upper()))
    if card is None:
        listed = f"choose one of {', '.join(CARDS)}, or a TOML file of its numbers"
        raise UserError(f"--hardware {text}: there is no card {name!r}{did_you_mean(name, CARDS)}; {listed}")
    if (
        not isinstance(card, dict)
        or len(own) > 1
        or not all(type(card.get(n)) in (int, float) and card[n] > 0 for n in NUMBERS)
    ):
        raise UserError(f"--hardware {text}: must hold one table, of a card, with numbers above 0: {', '.join(NUMBERS)}")
    if not int(machines) * int(gpus):
        raise UserError(f"--hardware {text}: must have a GPU")
    return Hardware(int(gpus), 1e9 * card["memory"], int(machines), card)


def _own_card(gpus: int | None) -> Mapping[str, float]:
    """The numbers of this machine's GPUs, whose name has all words of a card's, or of its cores; {} of unknown GPUs."""
    import torch  # here, because it takes seconds, and mistakes are reported first

    if gpus or gpus is None and torch.cuda.is_available():
        words = set() if gpus else set(re.split("[ -]", torch.cuda.get_device_name()))
        return next((card for name, card in CARDS.items() if set(name.split("-")) <= words), {})
    return {number: (os.cpu_count() or 1) * CORE[number] for number in NUMBERS}
