"""A flag's declaration: what a value must be, and what is known of the flag, at its field.

    group_size: int = flag(8, group="rollouts", above=0)
    \"\"\"Responses sampled for each prompt.\"\"\"

The docstring below the field is the flag's help. `check_flags` holds the values against what their
fields declare, in every command and from Python alike.
"""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol, get_type_hints

from alignment.system.errors import UserError
from alignment.system.registry import did_you_mean

LARGEST_SEED = 2**31 - 1  # what every library that draws random numbers takes


class DataclassInstance(Protocol):
    """An instance of any dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class Extra:
    """A package that a flag needs unless its value is 0, false or empty, and the extra that has it.

    `only_for` names the one value that needs it, where others do not."""

    package: str
    extra: str
    only_for: str = ""

    def is_needed_for(self, value: object) -> bool:
        return value == self.only_for if self.only_for else bool(value)


@dataclass(frozen=True)
class Flag:
    """What is known of a flag beside its name, type, default and help."""

    group: str = ""
    """The section of --help that shows it."""
    aliases: tuple[str, ...] = ()
    """Other names of the flag, without dashes."""
    choices: tuple[str, ...] = ()
    """The values that it may have; empty: any. Of a tuple, the values of its parts."""
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_zero: bool = False
    """Whether 0 will do beside the numbers within these bounds."""
    zero: str = ""
    """What 0 means, where it is a case of its own."""
    because: str = ""
    """Why the bounds are what they are, for the message that names them."""
    names_folder: bool = False
    """Whether it is the name of a folder, which has no slashes."""
    needs: Extra | None = None
    swept: bool = True
    """Whether arms of a sweep may differ in it. A sweep sets the others itself, or places them anew
    on the devices that a run is given."""
    bookkeeping: bool = False
    """Whether it decides where, how fast or how often something is computed, never its value."""
    changeable: bool = False
    """Whether a resumed run may have another value than it began with."""
    setting: bool = False
    """Whether it decides how far a run is reproducible: what `verify` shows holds for runs with the
    same values of these."""

    @property
    def has_bound(self) -> bool:
        return any(
            limit is not None for limit in (self.above, self.at_least, self.at_most, self.below)
        )

    def admits(self, number: float) -> bool:
        """Whether a number is finite and within the bounds."""
        if self.or_zero and number == 0:
            return True
        if not math.isfinite(number):
            return False
        if self.above is not None and number <= self.above:
            return False
        if self.at_least is not None and number < self.at_least:
            return False
        if self.at_most is not None and number > self.at_most:
            return False
        return self.below is None or number < self.below

    def bound_in_words(self, kind: type) -> str:
        """The numbers that will do, as the end of "must be ...". `kind` is int or float."""
        zero = f"0 ({self.zero})" if self.zero else "0"
        if self.or_zero:
            return f"{zero} or above {self.above}"
        if self.at_least is not None:
            return self._from_least_in_words(zero)
        if self.at_most is not None:
            return f"above {self.above} and at most {self.at_most}"
        if self.below is not None:
            return f"between {self.above} and {self.below}"
        noun = "a whole number" if kind is int else "a number"
        return f"{noun} above {self.above}"

    def _from_least_in_words(self, zero: str) -> str:
        least = zero if self.at_least == 0 else str(self.at_least)
        if self.at_most is not None:
            return f"from {least} to {self.at_most}"
        if self.below is not None:
            return f"{least} or below {self.below}"
        if self.at_least == 0:
            return f"{least} or more"
        reason = f", {self.because}" if self.because else ""
        return f"at least {least}{reason}"


def flag(default: Any = dataclasses.MISSING, **facts: Any) -> Any:
    """A dataclass field whose metadata is a `Flag` of these facts; without a default it must be
    given."""
    return dataclasses.field(default=default, metadata={"flag": Flag(**facts)})


def flags_of_class(arguments: Any) -> dict[str, Flag]:
    """Name -> declaration, of every flag of a class of arguments, or of one of its instances."""
    return {
        field.name: field.metadata.get("flag", Flag()) for field in dataclasses.fields(arguments)
    }


def hints_of_flags(arguments: type) -> dict[str, Any]:
    """Name -> type, of every flag of a class of arguments."""
    hints = get_type_hints(arguments)
    return {field.name: hints[field.name] for field in dataclasses.fields(arguments)}


def required_flags(arguments: type) -> list[str]:
    """The flags of a class of arguments that have no default."""
    fields = dataclasses.fields(arguments)
    return [field.name for field in fields if field.default is dataclasses.MISSING]


def names_of_flags(arguments: Any, property_name: str) -> frozenset[str]:
    """The flags of a class of arguments whose declaration has that property true."""
    flags = flags_of_class(arguments)
    return frozenset(name for name, facts in flags.items() if getattr(facts, property_name))


def require(arguments: Any, name: str, holds: bool, wanted: str) -> None:
    """Raise `UserError` for the argument `name`, with its value and what it must be, unless the
    condition holds."""
    if holds:
        return
    value = getattr(arguments, name)
    if isinstance(value, tuple):
        shown = " ".join(map(str, value))
    else:
        shown = "''" if value == "" else str(value)
    raise UserError(f"--{name} {shown}: must be {wanted}")


def check_flags(arguments: Any) -> None:
    """Raise `UserError` for a value that its field's declaration does not admit, and for a package
    that a value needs and that is not installed. The numbers of a sweep's tuples are checked arm by
    arm."""
    for name, facts in flags_of_class(arguments).items():
        value = getattr(arguments, name)
        if facts.choices:
            check_choices(name, value if isinstance(value, tuple) else (value,), facts.choices)
        if facts.names_folder:
            wanted = "a plain folder name without slashes, of at most 150 bytes"
            require(arguments, name, is_plain_folder_name(value), wanted)
        if facts.has_bound and value is not None and not isinstance(value, tuple):
            require(arguments, name, facts.admits(value), facts.bound_in_words(type(value)))


def is_plain_folder_name(name: str) -> bool:
    """Whether every file system takes it as the name of one folder; empty names none, and will
    do."""
    is_plain = name not in (".", "..") and Path(name).name == name
    return is_plain and len(name.encode(errors="surrogateescape")) <= 150


def check_choices(name: str, values: Iterable[object], choices: Iterable[str]) -> None:
    """Raise `UserError`, with the nearest choice, for a value that is none of the choices."""
    choices = list(choices)
    for value in values:
        if value not in choices:
            nearest = did_you_mean(str(value), choices)
            raise UserError(f"--{name} {value}: choose one of {', '.join(choices)}{nearest}")


def check_packages(arguments: Any) -> None:
    """Raise `UserError` for a value that needs a package that is not installed."""
    for name, facts in flags_of_class(arguments).items():
        value = getattr(arguments, name)
        needs = facts.needs
        if needs is None or not needs.is_needed_for(value) or find_spec(needs.package):
            continue
        words = f"--{name}" if value is True else f"--{name} {value}"
        raise UserError(
            f"{words} needs {needs.package}: start with `uv run --extra {needs.extra} ...`"
        )
