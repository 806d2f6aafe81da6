"""The type of matrix products."""

import pytest
import torch

from alignment.model.loading import compute_dtype


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
