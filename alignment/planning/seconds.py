"""What machines do in a second, by a card's name, by a file, or as assumed for this one."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from alignment.planning.work import UnitSeconds
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.registry import did_you_mean

TABLES = read_toml(Path(__file__).with_name("cards.toml"), "--hardware")

REACHED: Mapping[str, tuple[float, float]] = TABLES["reached"]
"""Number of a card, or "launches", "disk" and "engine_passes" -> units a second that steps reach of
it, at best and at worst. cards.toml has the source of each, and what shows it wrong. Read by:
`rates`."""

CORE: Mapping[str, float] = TABLES["CPU"]
"""The numbers of one core of a CPU, with their sources in cards.toml. Read by: `cards_of`."""

CARDS: Mapping[str, Mapping[str, Any]] = {
    name: table for name, table in TABLES.items() if name not in ("reached", "CPU")
}
"""--hardware -> the numbers of a card."""

# of a card: GB, TFLOP/s and GB/s
NUMBERS = ("memory", "bfloat16", "float32", "bandwidth", "link", "network")


class Hardware(NamedTuple):
    """Alike machines. None and 0: this one's GPUs, and their memory."""

    gpus: int | None  # Of each machine.
    memory: float  # Bytes of each GPU.
    machines: int
    card: Mapping[str, Any] | None = None


class Rates(NamedTuple):
    """Seconds of a unit of work, on the best card at best, and on the worst at worst."""

    best: UnitSeconds
    worst: UnitSeconds


def hardware_of(
    text: str, gpus: int | None = None, machines: int = 1, memory: float | None = None
) -> Hardware:
    """What --hardware names, CARD, 8xCARD or 2x8xCARD (machines x GPUs) with a card of `CARDS` or
    of a TOML file, else what --num_gpus, --machines and --gpu_memory say. Raises `UserError` for
    both, an unknown card, and a file without NUMBERS."""
    if not text:
        return Hardware(gpus, 1e9 * (memory or 0), machines)
    if (gpus, machines, memory) != (None, 1, None):
        raise UserError(
            f"--hardware {text}: says all that --num_gpus, --machines and --gpu_memory do; leave"
            " these out"
        )
    match = re.fullmatch(r"(?:(\d+)x(?=\d+x))?(?:(\d+)x)?(.*)", text, re.DOTALL)
    assert match is not None  # the last group takes any text
    machines_text, gpus_text, name = match.groups("1")
    number_of_machines = int(machines_text)
    number_of_gpus = int(gpus_text)
    card = read_card(text, name) if name.endswith(".toml") else CARDS.get(name.upper())
    if card is None or number_of_machines == 0 or number_of_gpus == 0:
        listed = (
            f"write {', '.join(CARDS)}, or a TOML file of such numbers, and 8x or 2x8x before it"
        )
        same_initial = [card for card in CARDS if card[0] == name[:1].upper()]
        alike = did_you_mean(name, same_initial)
        raise UserError(f"--hardware {text}: there is no such machine{alike}; {listed}")
    return Hardware(number_of_gpus, 1e9 * card["memory"], number_of_machines, card)


def read_card(text: str, name: str) -> Mapping[str, Any]:
    """The card of a TOML file of one table. Raises `UserError` for other files, which names the
    --hardware `text`."""
    tables = [*read_toml(Path(name), "--hardware").values()]
    if len(tables) == 1 and isinstance(tables[0], dict):
        numbers = [tables[0].get(number) for number in NUMBERS]
        if all(isinstance(number, int | float) and number > 0 for number in numbers):
            return tables[0]
    raise UserError(
        f"--hardware {text}: must hold one table, a card's, with numbers above 0:"
        f" {', '.join(NUMBERS)}"
    )


def rates(hardware: Hardware, itemsize: int) -> Rates:
    """The rates of machines, with `itemsize` bytes a number in matrix products. GPUs without a
    name: from the best to the worst of all `CARDS`."""
    cards = cards_of(hardware)
    best = []
    worst = []
    products = "bfloat16" if itemsize == 2 else "float32"
    for number in (products, "bandwidth", "launches", "link", "network", "disk", "engine_passes"):
        at_best, at_worst = REACHED[number]
        # kernels that Python starts, a disk, and the passes of vLLM's host are no card's
        of_cards = [card.get(number, 1) for card in cards]
        best.append(1 / max(at_best * of_card for of_card in of_cards))
        worst.append(1 / min(at_worst * of_card for of_card in of_cards))
    return Rates(UnitSeconds(*best), UnitSeconds(*worst))


def cards_of(hardware: Hardware) -> list[Mapping[str, Any]]:
    """The named card; or all, where there are GPUs; or all cores of this machine."""
    import torch  # here, because it takes seconds, and mistakes are reported first

    if hardware.card:
        return [hardware.card]
    gpus = torch.cuda.device_count() if hardware.gpus is None else hardware.gpus
    if gpus:
        return [*CARDS.values()]
    cores = os.cpu_count() or 1
    return [{number: cores * CORE[number] for number in NUMBERS}]
