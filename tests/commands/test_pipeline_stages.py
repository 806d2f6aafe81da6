"""The stages that a pipeline's file describes, before any of them runs."""

import pytest

from alignment.args import EvaluateArgs, parse
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


def test_the_evaluation_of_a_stage_samples_as_the_stages_own_do(tmp_path):
    base = WARM + 'sft_base = "{cold}"\nmax_new_tokens = 40\n'
    own = stages_of(base + "eval_samples = 4\neval_max_new_tokens = 60\n", tmp_path)[-1]
    args = parse(EvaluateArgs, list(own.flags))
    assert (args.num_samples, args.max_new_tokens) == (4, 60)
    as_trained = stages_of(base + "eval_max_new_tokens = 0\n", tmp_path)[-1]
    args = parse(EvaluateArgs, list(as_trained.flags))
    assert (args.num_samples, args.max_new_tokens) == (1, 40)
    split = 'validation_share = 0.5\neval_split = "validation"\n'
    with pytest.raises(UserError, match="stage rl: validation_share: .* whole test"):
        stages_of(base + split, tmp_path)


@pytest.mark.parametrize("name", PIPELINES)
def test_stages_of_the_package_are_read(name, tmp_path):
    assert read_stages(PIPELINES[name], tmp_path)
