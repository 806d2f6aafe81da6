"""Machines that a plan is for: cards by name or from a file, or this machine's own devices; and the seconds of a unit of work."""

import re
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

CARDS = tomllib.loads(Path(__file__).with_name("cards.toml").read_text(encoding="utf-8"))
RATES = ("bfloat16", "float32", "bandwidth", "link", "network")  # TFLOP/s, and GB/s
# The shares of a card's rates that steps reach, at best and at worst; of a measured rate, which is one, more.
REACHED = {"operations": (0.7, 0.2), "bytes": (0.9, 0.4), "link": (0.8, 0.3), "network": (0.8, 0.2)}
LAUNCH_SECONDS = (4e-6, 2e-5)  # of a kernel that Python starts
DISK_BYTES = (3e9, 2e8)  # a second
Range = tuple[float, float]


@dataclass(frozen=True)
class Hardware:
    """`machines` of `gpus` each, with `memory` bytes; None and 0: this machine's. `card` has RATES; {}: nobody knows them."""

    gpus: int | None = None
    memory: float = 0.0
    machines: int = 1
    card: Mapping[str, float] | None = None

    def rates(self, itemsize: int, device: str = "cpu") -> dict[str, Range]:
        """Kind of work -> seconds of a unit at best and at worst, of products of numbers of `itemsize` bytes; this machine's
        are measured, on `device`."""
        card = measured(device) if self.card is None else self.card
        rates = {"operations": 1e12 * card["bfloat16" if itemsize == 2 else "float32"], "bytes": 1e9 * card["bandwidth"]}
        rates |= {kind: 1e9 * card[kind] for kind in ("link", "network")}
        known = {kind: tuple(1 / (share * rate) for share in REACHED[kind]) for kind, rate in rates.items()}
        return {**known, "launches": LAUNCH_SECONDS, "disk": tuple(1 / rate for rate in DISK_BYTES)}


def read_hardware(text: str) -> Hardware:
    """The hardware that --hardware names: CARD, 8xCARD or 2x8xCARD, machines x GPUs x card of `CARDS` or of a TOML file.
    Raises `UserError` for any other text, an unknown card, and a file without one table of rates and memory."""
    machines, gpus, name = re.fullmatch(r"(?:(\d+)x(?=\d+x))?(?:(\d+)x)?(.*)", text, re.DOTALL).groups()
    names = {known.lower(): known for known in CARDS}
    table, key = CARDS, names.get(re.sub("[ _]", "-", name.lower()))
    if name.endswith(".toml"):
        table = read_toml(Path(name), "--hardware")
        key = next(iter(table), "")
    elif key is None:
        listed = f"choose one of {', '.join(CARDS)}, or a TOML file of its rates"
        raise UserError(f"--hardware {text}: there is no card {name!r}{did_you_mean(name, CARDS)}; {listed}")
    card, wanted = table.get(key), ("memory", *RATES)
    numbers = isinstance(card, dict) and [card.get(rate) for rate in wanted]
    if len(table) > 1 and table is not CARDS or not numbers or not all(type(n) in (int, float) and n > 0 for n in numbers):
        raise UserError(f"--hardware {text}: {name} must hold one table, of a card, with numbers above 0: {', '.join(wanted)}")
    if "0" in (machines, gpus):
        raise UserError(f"--hardware {text}: must have at least one GPU")
    return Hardware(int(gpus or 1), 1e9 * card["memory"], int(machines or 1), card)


def measured(device: str) -> dict[str, float]:
    """RATES of one of this machine's devices: of two products and a copy, which take a moment. Links are guessed."""
    import torch

    def rate(work: float, run) -> float:
        best = 0.0
        for _ in range(3):
            start = time.perf_counter()
            run().flatten()[0].item()  # waits for a GPU
            best = max(best, work / (time.perf_counter() - start))
        return best

    size = 8192 if device != "cpu" else 1024
    products = {name: torch.ones(size, size, dtype=getattr(torch, name), device=device) for name in ("bfloat16", "float32")}
    rates = {name: rate(2e-12 * size**3, lambda ones=ones: ones @ ones) for name, ones in products.items()}
    many = torch.ones(2**26 if device != "cpu" else 2**24, device=device)
    return {**rates, "bandwidth": rate(8e-9 * many.numel(), many.clone), "link": 16.0, "network": 3.0}
