"""Work, and the seconds that it takes."""

from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Work:
    """What a device is asked to do."""

    operations: float = 0.0  # Multiplications and additions of matrix products.
    memory_bytes: float = 0.0  # Through the device's own memory.
    launches: float = 0.0  # Kernels that Python starts.
    link_bytes: float = 0.0  # To other devices of the machine.
    network_bytes: float = 0.0  # To other machines.
    disk_bytes: float = 0.0
    engine_passes: float = 0.0
    """Of vLLM's, which its host prepares and answers: one a token, and one a request with new
    weights."""

    @property
    def amounts(self) -> tuple[float, ...]:
        """All amounts, in the order of the fields."""
        return astuple(self)

    def __add__(self, other: "Work") -> "Work":
        pairs = zip(self.amounts, other.amounts, strict=True)
        return Work(*(own + more for own, more in pairs))

    def __mul__(self, times: float) -> "Work":
        return Work(*(amount * times for amount in self.amounts))

    def __truediv__(self, parts: float) -> "Work":
        return Work(*(amount / parts for amount in self.amounts))


@dataclass(frozen=True)
class UnitSeconds:
    """Seconds of a unit of each kind of work; the fields are those of `Work`."""

    operations: float
    memory_bytes: float
    launches: float
    link_bytes: float
    network_bytes: float
    disk_bytes: float
    engine_passes: float

    @property
    def amounts(self) -> tuple[float, ...]:
        """All numbers, in the order of the fields."""
        return astuple(self)

    def by_kind(self, work: Work) -> list[float]:
        """Seconds of each kind of the work."""
        pairs = zip(work.amounts, self.amounts, strict=True)
        return [amount * seconds for amount, seconds in pairs]

    def on_card(self, work: Work) -> list[float]:
        """Seconds of what a GPU computes, and of each further kind. Its kernels follow one another,
        while its host starts others."""
        seconds = dict(zip(vars(self), self.by_kind(work), strict=True))
        kernels = seconds.pop("operations") + seconds.pop("memory_bytes")
        return [max(kernels, seconds.pop("launches")), *seconds.values()]

    def in_turn(self, work: Work) -> float:
        """Seconds where each kind of work waits for the others."""
        return float(sum(self.by_kind(work)))
