"""The stages that a pipeline's file describes, before any of them runs."""

import pytest

from alignment.pipeline import PIPELINES, read_stages
from alignment.system.errors import UserError

WARM = '[stages.cold]\ncommand = "sft"\n[stages.rl]\ncommand = "train_rl"\n'


def stages_of(text: str, folder):
    file = folder / "stages.toml"
    file.write_text(text)
    return read_stages(file, folder / "runs")


def test_a_stage_of_rl_begins_from_its_sft_base(tmp_path):
    with pytest.raises(
        UserError, match=r'stage rl: model = .*give the model as sft_base.*"{cold}"'
    ):
        stages_of(WARM + 'model = "{cold}"\n', tmp_path)
    for flags in ('sft_base = "{cold}"\n', 'model = "{cold}"\nsft_base = ""\n'):
        stage = stages_of(WARM + flags, tmp_path)[-2]
        assert stage.name == "rl"
        assert any(word.endswith("runs/cold") for word in stage.flags)


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_of_the_package_are_read(name, tmp_path):
    assert read_stages(PIPELINES[name], tmp_path)
