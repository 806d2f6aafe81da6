"""What tests of the user's own code say of commands."""

import pytest

from alignment import sweep
from alignment.args import RLArgs, SweepArgs, parse
from alignment.system.errors import UserError


def refusal_of(*flags: str, command: type = RLArgs) -> str:
    """The line by which a command refuses these flags."""
    with pytest.raises(UserError) as refused:
        parse(command, list(flags))
    return str(refused.value)


def design_of(*flags: str):
    """The design of a sweep of two seeds."""
    return sweep.make_design(parse(SweepArgs, ["--seed", "0", "1", "--sft_base", "", *flags]))
