"""The faults that `benchmarks.faults` plants are changes of the code as it is."""

from pathlib import Path

import pytest

from benchmarks.plants import PLANTS

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
