"""Names of models, where they are put, and the optimiser's state on disk."""

import pytest
import torch

from alignment.args import PlanArgs, RLArgs, from_preset
from alignment.policy.loading import (
    compute_dtype,
    load_model,
    load_tokenizer,
    make_optimizer,
    partition_model_across_devices,
    resolve_model,
)
from alignment.runs.checkpoint import checkpoint_folder, drop_old_checkpoints, last_whole_step, load_optimizer, save_checkpoint
from alignment.system.errors import UserError
from alignment.system.files import atomic_folder, manifested, write_atomically


def test_the_policy_is_partitioned_over_what_the_roles_leave(tiny_folder):
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


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("avx512", [False, True])
def test_products_are_in_bfloat16_where_that_is_faster_unless_told(amx, avx512, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    unsaid = from_preset(RLArgs, "smollm2_gsm8k")
    assert compute_dtype(unsaid, "cpu") == (torch.bfloat16 if amx or avx512 else torch.float32)
    assert compute_dtype(unsaid, "cuda:0") == torch.bfloat16
    for name in ("float32", "bfloat16"):
        assert compute_dtype(from_preset(RLArgs, "smollm2_gsm8k", dtype=name), "cpu") == getattr(torch, name)


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/c", "/nowhere"])
def test_a_folder_without_a_model_is_refused(name, tmp_path):
    with pytest.raises(UserError, match="no model folder"):
        resolve_model(name, str(tmp_path))


def test_a_broken_config_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(resolve_model(str(tmp_path), str(tmp_path)))


def stepped(folder, steps: int):
    model = load_model(str(folder), ("cpu",), torch.float32)
    optimizer = make_optimizer(model, 1e-2, 0.1)
    for step in range(steps):
        step_once(model, optimizer, step)
    return model, optimizer


def step_once(model, optimizer, step: int) -> None:
    torch.manual_seed(step)
    model(torch.randint(0, 300, (2, 8))).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_checkpoint_goes_on_bit_for_bit(tiny_folder, tmp_path):
    model, optimizer = stepped(tiny_folder, 3)
    save_checkpoint(checkpoint_folder(tmp_path, 3), model, load_tokenizer(str(tiny_folder)), optimizer)
    again = load_model(str(checkpoint_folder(tmp_path, 3)), ("cpu",), torch.float32)
    resumed = make_optimizer(again, 1e-2, 0.1)
    load_optimizer(checkpoint_folder(tmp_path, 3), resumed)
    for m, o in ((model, optimizer), (again, resumed)):
        step_once(m, o, 3)
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    for step in (5, 10, 15, 1_000_000):
        checkpoint_folder(tmp_path, step).mkdir()
        with manifested(checkpoint_folder(tmp_path, step)):
            pass
    drop_old_checkpoints(tmp_path, 0)
    assert last_whole_step(tmp_path) == (1_000_000, [])
    drop_old_checkpoints(tmp_path, 2, spared=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000005", "step_000015", "step_1000000"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(KeyError), atomic_folder(tmp_path / "out") as building:
        (building / "half").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with atomic_folder(tmp_path / "out") as building:
        (building / "whole").write_text("x")
        assert not (tmp_path / "out").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "whole"]
    write_atomically(tmp_path / "note", "a")
    write_atomically(tmp_path / "note", "b")
    assert (tmp_path / "note").read_text() == "b"
