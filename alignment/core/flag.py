"""Declarations of flags: the facts about a field of a dataclass of arguments, or of the settings
that a loss, an advantage, a reward or a sampler has of its own.

    alpha: float = flag(0.5, above=0, at_most=1)
    \"\"\"Weight of the negative responses.\"\"\"

The docstring below a field is its help. `alignment.config` reads and checks the values.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Extra:
    """A package that a flag needs, and the extra of this project that installs it.

    A flag needs it for the value `only_for`, or where that is empty for every value except 0, false
    and empty ones."""

    package: str
    extra: str
    only_for: str = ""

    def is_needed_for(self, value: object) -> bool:
        if self.only_for:
            return value == self.only_for
        return bool(value)


@dataclass(frozen=True)
class Flag:
    """The facts about a flag that are not its name, type, default or help."""

    group: str = ""
    """The section of --help that shows it."""
    aliases: tuple[str, ...] = ()
    """Other names of the flag, without dashes."""
    choices: tuple[str, ...] = ()
    """The values that it may have; empty: any. If the value is a tuple, those of its elements."""
    takes_own: bool = False
    """Whether it may also have, beside `choices`, an entry of the user's own, as
    package.module:name. The command that uses the entry imports it."""
    values_in_words: str = ""
    """What each named value means, where a table says it; --help adds it to the field's text."""
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_zero: bool = False
    """Whether it may also be 0, which is not within the bounds above."""
    zero: str = ""
    """What 0 means, if it has a meaning of its own, such as "none"."""
    follows: str = ""
    """Of a setting that only a loss, an advantage, a reward or a sampler has: the flag whose value
    it takes where it is None."""
    because: str = ""
    """The reason for the bounds, which the error message states with them."""
    names_folder: bool = False
    """Whether it is the name of a folder, which has no slashes."""
    needs: Extra | None = None
    only_with: str = ""
    """Another flag, beside whose default this one plays no part."""
    swept: bool = True
    """Whether arms of a sweep may differ in it. A sweep sets the other flags itself, some of them
    anew for each run, such as its devices."""
    bookkeeping: bool = False
    """Whether it decides where, how fast or how often something is computed, never its value."""
    changeable: bool = False
    """Whether a resumed run may have another value than it began with."""
    setting: bool = False
    """Whether the reproducibility of a run depends on it. What the command `verify` finds for a run
    also holds for other runs that have the same values of all such flags."""

    @property
    def has_bound(self) -> bool:
        limits = (self.above, self.at_least, self.at_most, self.below)
        return any(limit is not None for limit in limits)

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
        """The end of the sentence "must be ...", for those combinations of bounds that flags have.
        `kind` is the type of the number, int or float."""
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
    """A dataclass field with the declaration `Flag(**facts)` in its metadata. Without a default the
    flag is required."""
    return dataclasses.field(default=default, metadata={"flag": Flag(**facts)})
