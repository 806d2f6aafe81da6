"""From a model's name and a machine's GPUs to folders and devices."""

import pytest

from alignment.args import PlanArgs, RLArgs, from_preset
from alignment.checks import resolve_model
from alignment.models import partition_model_across_devices
from alignment.policy.loading import load_tokenizer
from alignment.system.errors import UserError


def test_the_policy_is_partitioned_over_the_devices_without_another_role(tiny_folder):
    args = from_preset(RLArgs, "tiny", model=str(tiny_folder))
    device_map = partition_model_across_devices(args, num_gpus=5)
    assert device_map["model.embed_tokens"] == device_map["lm_head"] == "cuda:0"
    assert set(device_map.values()) == {"cuda:0", "cuda:1"}
    assert set(partition_model_across_devices(args, num_gpus=0).values()) == {"cpu"}


def test_the_reference_devices_on_eight_gpus(tiny_folder):
    args = from_preset(PlanArgs, "qwen2.5_math_1.5b_gsm8k_8gpu", model=str(tiny_folder))
    assert not {"cuda:5", "cuda:6", "cuda:7"} & set(partition_model_across_devices(args, num_gpus=8).values())
    with pytest.raises(UserError, match="--sample_device cuda:7"):
        partition_model_across_devices(args, num_gpus=4)


def test_an_embedded_model_is_built_once(tmp_path):
    folder = resolve_model("tiny", str(tmp_path))
    weights = (tmp_path / "tiny_base" / "model.safetensors").read_bytes()
    assert resolve_model("tiny", str(tmp_path)) == folder == str(tmp_path / "tiny_base")
    assert (tmp_path / "tiny_base" / "model.safetensors").read_bytes() == weights


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/c", "/nowhere"])
def test_a_folder_without_a_model_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        resolve_model(name, str(tmp_path))


def test_a_broken_config_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(resolve_model(str(tmp_path), str(tmp_path)))
