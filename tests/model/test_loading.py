"""The type of matrix products, and where weights lie in memory."""

import shutil
import struct

import pytest
import torch

from alignment.model.loading import compute_dtype, load_model


@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("avx512", [False, True])
def test_products_are_in_bfloat16_where_that_is_faster_unless_a_type_is_named(
    amx, avx512, monkeypatch
):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    assert compute_dtype("auto", "cpu") == ("bfloat16" if amx or avx512 else "float32")
    assert compute_dtype("auto", "cuda:0") == "bfloat16"
    for name in ("float32", "bfloat16"):
        assert compute_dtype(name, "cpu") == name


@pytest.mark.parametrize("padding", range(0, 64, 8))
def test_weights_lie_alike_however_long_the_header_of_their_file_is(tiny_folder, tmp_path, padding):
    """A product of one row has other bits where its matrix begins at an odd multiple of 8 bytes."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    file = folder / "model.safetensors"
    content = file.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length] + b" " * padding
    file.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    model = load_model(str(folder), ("cpu",), torch.float32)
    assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert tied == model.config.tie_word_embeddings
