"""The faults that `benchmarks.faults` plants are changes of the code as it is."""

from pathlib import Path

import pytest

from alignment.args import VerifyArgs, parse
from benchmarks.faults import COMMON
from benchmarks.plants import PLANTS
from benchmarks.verify_settings import SETTINGS

PACKAGE = Path(__file__).parents[2] / "alignment"


def test_no_two_plants_have_one_name():
    assert len({plant.name for plant in PLANTS}) == len(PLANTS) >= 60


@pytest.mark.parametrize("file", sorted({plant.file for plant in PLANTS}))
def test_what_a_plant_replaces_stands_once_in_its_file(file):
    text = (PACKAGE / file).read_text()
    for plant in PLANTS:
        if plant.file == file:
            assert text.count(plant.right) == 1, plant.name
            changed = text.replace(plant.right, plant.wrong)
            assert changed != text
            compile(changed, file, "exec")


@pytest.mark.parametrize("flags", sorted({" ".join(plant.flags) for plant in PLANTS} | {*SETTINGS}))
def test_verify_takes_the_flags(flags):
    """A refusal of them would count as a fault that is seen, or as a false alarm."""
    parse(VerifyArgs, [*COMMON, *flags.split()])
