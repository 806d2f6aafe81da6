"""What machines do in a second, by a card's name, by a file, or as assumed for this one."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from alignment.planning.measured_card import MEASURED
from alignment.planning.work import UnitSeconds, Work
from alignment.system.errors import UserError
from alignment.system.files import read_toml
from alignment.system.nearest import did_you_mean

TABLES = read_toml(Path(__file__).with_name("cards.toml"), "--hardware")

REACHED: Mapping[str, tuple[float, float]] = TABLES["reached"]
"""Number of a card, or "launches", "disk" and "engine_passes" -> units a second that steps reach of
it, at best and at worst; for a GPU's products, bandwidth and launches see `SHARES_OF_CARD`.
cards.toml has the source of each, and what shows it wrong. Read by: `reached`."""

CORE: Mapping[str, float] = TABLES["CPU"]
"""The numbers of one core of a CPU, with their sources in cards.toml. Read by: `cards_of`."""

CARDS: Mapping[str, Mapping[str, Any]] = {
    name: table for name, table in TABLES.items() if name not in ("reached", "CPU")
}
"""--hardware -> the numbers of a card."""

MEASURED_CARD: Mapping[str, Any] = CARDS[MEASURED["card"]["name"]]
"""The numbers of the card that was measured."""

OFF_OF_MEASURED = 1.5
"""Factor by which the seconds of a card that was measured may be off, either way.

Source: chosen; the model that the seconds are from was up to 7 % off for that card's six figures
(benchmarks/gpu_cost.md). Shown wrong by: seconds of phases on such a card. Read by: `reached`."""

OFF_OF_OTHERS = 2.0
"""The same of each kind of work of other cards, of whose own numbers kernels count as reaching an
H200's shares.

Assumption: between cards of other generations kernels differ more than runs do. Shown wrong by:
seconds of phases on such cards. Read by: `reached`."""

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
    is_measured: bool = False
    """Whether they are of a card that was measured, whose kernels follow one another while its host
    starts others; else nothing is known of how work overlaps."""

    def least(self, work: Work) -> float:
        """Seconds of work at best: all of it overlaps, as far as is known."""
        if self.is_measured:
            return float(max(self.best.on_card(work)))
        return float(max(self.best.by_kind(work)))

    def most(self, work: Work) -> float:
        """Seconds of work at worst: each kind waits for the others, unless more is known."""
        if self.is_measured:
            return float(sum(self.worst.on_card(work)))
        return self.worst.in_turn(work)


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


KINDS = ("bandwidth", "launches", "link", "network", "disk", "engine_passes")
"""What `rates` have beside products, in the order of the fields of `UnitSeconds`."""


def rates(hardware: Hardware, itemsize: int) -> Rates:
    """The rates of machines, with `itemsize` bytes a number in matrix products. GPUs without a
    name: from the best to the worst of all `CARDS`."""
    cards = cards_of(hardware)
    best = []
    worst = []
    products = "bfloat16" if itemsize == 2 else "float32"
    for number in (products, *KINDS):
        ends = [reached(number, card) for card in cards]
        best.append(1 / max(at_best for at_best, _ in ends))
        worst.append(1 / min(at_worst for _, at_worst in ends))
    return Rates(UnitSeconds(*best), UnitSeconds(*worst), cards == [MEASURED_CARD])


def reached(number: str, card: Mapping[str, Any]) -> tuple[float, float]:
    """Units a second, at best and at worst, of a number of a card, or of what is no card's: kernels
    that Python starts, a disk, and the passes of vLLM's host."""
    at_best, at_worst = REACHED[number]
    if number in SHARES_OF_CARD and not card.get("is_host"):
        off = OFF_OF_MEASURED if card == MEASURED_CARD else OFF_OF_OTHERS
        at_best = off * SHARES_OF_CARD[number]
        at_worst = SHARES_OF_CARD[number] / off
    return at_best * card.get(number, 1), at_worst * card.get(number, 1)


def shares_of_card() -> dict[str, float]:
    """Number of a card, or "launches" -> units a second for each of it, by what an H200 reached."""
    card = MEASURED["card"]
    products = MEASURED["efficiency"]["products"] * card["products"] / MEASURED_CARD["bfloat16"]
    return {
        "bfloat16": products,
        "float32": products,
        "bandwidth": card["bandwidth"] / MEASURED_CARD["bandwidth"],
        "launches": 1 / MEASURED["host"]["launch"],
    }


SHARES_OF_CARD: Mapping[str, float] = shares_of_card()
"""Number of a card, or "launches" -> units a second that kernels reach for each of it.

Source: h200.toml. Shown wrong by: seconds of phases on another card. Read by: `reached`."""


def cards_of(hardware: Hardware) -> list[Mapping[str, Any]]:
    """The named card; or all, where there are GPUs; or all cores of this machine."""
    import torch  # here, because it takes seconds, and mistakes are reported first

    if hardware.card:
        return [hardware.card]
    gpus = torch.cuda.device_count() if hardware.gpus is None else hardware.gpus
    if gpus:
        return [*CARDS.values()]
    cores = os.cpu_count() or 1
    return [{"is_host": True, **{number: cores * CORE[number] for number in NUMBERS}}]
