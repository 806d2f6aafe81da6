"""Work of passes, hand-worked for a small shape; cards, and what --hardware may say."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from transformers import LlamaConfig, Qwen2Config

from alignment.model.shape import ModelShape
from alignment.planning import passes
from alignment.planning.measured_card import MEASURED
from alignment.planning.passes import (
    PASS_COUNTS,
    ComputedModel,
    DecodedRows,
    PassCount,
    PassTokens,
    decoding,
    forward,
    pass_on_card,
)
from alignment.planning.phase_work import PolicySplit, Schedule, StepWork
from alignment.planning.seconds import CARDS, NUMBERS, Hardware, hardware_of, rates
from alignment.planning.work import Work
from alignment.system.errors import UserError

PUBLISHED = Path(passes.__file__).parent / "published" / "Qwen--Qwen2.5-Math-1.5B"

# A layer: queries and output 64 each, keys and values 32 each, MLP 3 x 128, norms 16: 592. In all 2
# x 592 + 2 x 400 + 8.
SMALL = LlamaConfig(
    vocab_size=50,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    tie_word_embeddings=False,
)
MODEL = ComputedModel(ModelShape.from_config(SMALL), SMALL, itemsize=2)


def amounts(work: Work) -> dict[str, float]:
    return {kind: amount for kind, amount in asdict(work).items() if amount}


def test_a_forward_passs_work_is_hand_worked():
    """10 tokens, of which each sees 4 others and 3 have logits, in two pieces, in bfloat16.

    Products: 2 x 1,184 x 10 of layers, 4 x 16 x 4 x 10 of attention (16: both layers' queries), 2 x
    400 x 3 of the head. Bytes: 3 x 736 x 10 of activations, 8 x 4 x 50 x 3 of logits, 2 x 1,992 of
    weights for each piece. Kernels: 2 x 53 + 90 each."""
    counted = amounts(forward(MODEL, PassTokens(10, 4, 3), 2))
    assert counted == {
        "operations": 23_680 + 2_560 + 2_400,
        "memory_bytes": 22_080 + 4_800 + 7_968,
        "launches": 392,
    }


def test_decodings_work_is_hand_worked():
    """2 prompts of 5 tokens, 2 responses each of 3 tokens on average, 4 at most: 4 passes of 12
    tokens in all, after prefill.

    A token's keys and values are 2 x 2 x 4 numbers of 2 bytes; each of 12 drawn tokens reads those
    of half a prompt, which two rows share, and of 1.5 tokens of its own."""
    counted = amounts(decoding(MODEL, DecodedRows(2, 2, 5, 3, 4), 2**30))
    operations = (28_416 + 4_992 + 9_600) + (23_680 + 1_600 + 1_600)
    moved = (26_496 + 19_200 + 4 * 3_984) + (22_080 + 3_200 + 3_984) + 12 * 32 * 4
    assert counted == {"operations": operations, "memory_bytes": moved, "launches": 196 * 5}
    # vLLM replays a graph: prefill alone starts kernels, and its host prepares 4 passes
    by_vllm = amounts(decoding(MODEL, DecodedRows(2, 2, 5, 3, 4), 0))
    assert by_vllm["launches"] == 196 and by_vllm["engine_passes"] == 4
    # one group's keys and values at a time
    two_lots = amounts(decoding(MODEL, DecodedRows(2, 2, 5, 3, 4), (5 + 2 * 4) * 32))
    assert two_lots["launches"] == 2 * counted["launches"] and two_lots["operations"] == operations


def test_new_weights_work_is_hand_worked():
    """1,992 parameters in fp32 are read, and their 2 bytes each pass three times through memory and
    once over a link. vLLM's host answers a request for each 2^27 bytes of them."""
    step = SimpleNamespace(itemsize=2, vllm=False)
    work = StepWork(MODEL, cast(Any, step), *[cast(Any, None)] * 4).sync()
    assert amounts(work) == {"memory_bytes": (4 + 3 * 2) * 1_992, "link_bytes": 2 * 1_992}
    step.vllm = True
    by_vllm = StepWork(MODEL, cast(Any, step), *[cast(Any, None)] * 4).sync()
    assert amounts(by_vllm) == amounts(work) | {"engine_passes": 2 * 1_992 / 2**27}


def test_a_gpus_pass_is_hand_worked(monkeypatch):
    """10 tokens, of which each sees 4 others and 3 have logits, in two micro-batches.

    Bytes: 2 layers x (3 x 8 + 5 x 16) x 10, 11 x 50 x 3 of logits, 13 x 8 x 10 at the ends, and for
    each micro-batch 7 x 1,184 and 17 x 808. Attention's bytes, 2 x 16 x 10, take longer than its
    4 x 16 x 4 x 10 operations, ten times slower than products and 2.5 times as many more in
    backward: a byte is worth as many as 400. Products: 2 x 3 x 1,184 x 10 of layers; the head's
    400 x 3 four times, for backward makes its logits again."""
    count = PassCount(3, 5, 7, 2, 11, 13, 17, 19, 23)
    monkeypatch.setitem(PASS_COUNTS, "own", {"log_probs": count, "update": count})
    slow = {"flash attention, forward": 0.05, "flash attention, backward": 0.05, "products": 0.5}
    measured = {"efficiency": slow, "card": {"products": 800.0, "bandwidth": 1.0}}
    monkeypatch.setattr(passes, "MEASURED", measured)
    own = replace(MODEL, counts="own")
    update = amounts(pass_on_card(own, PassTokens(10, 4, 3), 2, "update"))
    moved = 2 * (3 * 8 + 5 * 16) * 10 + 11 * 150 + 13 * 80 + 2 * (7 * 1_184 + 17 * 808)
    assert update == {
        "operations": 2 * 3 * 11_840 + 2 * 4 * 1_200,
        "memory_bytes": moved + 2 * 16 * 10,
        "launches": 2 * (19 * 2 + 23),
    }
    measured["card"] = {"products": 2.0, "bandwidth": 1.0}
    by_products = amounts(pass_on_card(own, PassTokens(10, 4, 3), 2, "update"))
    assert by_products["memory_bytes"] == moved
    assert by_products["operations"] - update["operations"] == pytest.approx(2_560 * 3.5 * 10)


def test_a_layer_whose_mlp_is_computed_again_makes_two_products_more():
    """Gate and up, 2 x 2 x 8 x 16 operations a token each of one layer."""
    schedule = Schedule(2, 4, 8, 1, 1, 0)
    rows = PassTokens(10, 4, 3)
    works = []
    for layers in (0, 1):
        of_layers = replace(schedule, recomputed_mlps=layers)
        on_card = replace(MODEL, counts="compiled")
        step = StepWork(on_card, cast(Any, None), PolicySplit(), of_layers, *[cast(Any, None)] * 2)
        works.append(step.pass_work(rows, 1, 3).operations)
    assert works[1] - works[0] == 2 * 2 * 8 * 16 * 10


@pytest.mark.parametrize(
    ("name", "work", "pieces"),
    [
        ("update, micro-batches of 16,384 tokens", "update", 8),
        ("update, 8,192", "update", 16),
        ("log-probs, 16,384", "log_probs", 8),
    ],
)
def test_what_an_h200_took_lies_well_within_the_range(name, work, pieces):
    """16 prompts of 150 tokens with 8 responses of 784 on average, as the measured code computed
    them: attention by its parts, and weights cast once a micro-batch, which costs a tenth more than
    today's."""
    config = Qwen2Config(**json.loads((PUBLISHED / "config.json").read_text()))
    own = ComputedModel(ModelShape.from_config(config), config, 2, "parts")
    tokens = PassTokens(102_721, 150 + 784 / 2, 100_321)
    on_h200 = rates(hardware_of("1xH200"), 2)
    computed = pass_on_card(own, tokens, pieces, work)
    took = MEASURED["figures"][name]["seconds"]
    assert on_h200.least(computed) < took / 1.3 and 1.3 * took < on_h200.most(computed)


@pytest.mark.parametrize("name", CARDS)
def test_every_card_has_its_numbers_and_their_source(name):
    card = CARDS[name]
    assert set(card) == {*NUMBERS, "source"} and len(card["source"]) > 40
    assert (
        card["bfloat16"] >= card["float32"] and card["bandwidth"] > card["link"] >= card["network"]
    )
    hardware = hardware_of(f"2x8x{name}")
    assert hardware == Hardware(8, 1e9 * card["memory"], 2, card)
    best, worst, _ = rates(hardware, 2)
    assert all(np.array(best.amounts) < worst.amounts)
    # An H200's products reached 98 % of 782 of its 989.4 TFLOP/s; others may do twice that share.
    off = 1.5 if name == "H200" else 2
    share = 0.98 * 782 / 989.4
    assert best.operations == pytest.approx(1 / (off * share * 1e12 * card["bfloat16"]))


def test_hardware_is_machines_gpus_and_a_card(tmp_path):
    assert (
        hardware_of("a100-40gb")
        == hardware_of("1xA100-40GB")
        == Hardware(1, 40e9, 1, CARDS["A100-40GB"])
    )
    own = tmp_path / "8x.toml"
    own.write_text(
        "[mine]\nmemory = 96\nbfloat16 = 200\nfloat32 = 20.5\nbandwidth = 1000\nlink = 50\nnetwork"
        " = 10\n"
    )
    assert hardware_of(f"4x{own}") == hardware_of(f"1x4x{own}") and hardware_of(f"4x{own}")[:3] == (
        4,
        96e9,
        1,
    )
    assert hardware_of("", 3, 2, 24.0) == Hardware(3, 24e9, 2, None)


def test_gpus_without_a_name_are_any_card():
    """At best as an H100 or H200 computes, at worst as a T4 or L4."""
    best, worst, _ = rates(hardware_of("", 3), 2)
    share = 0.98 * 782 / 989.4
    # An H100 has an H200's products, and is less well known.
    assert (best.operations, worst.operations) == pytest.approx(
        (1 / (2 * share * 989.4e12), 1 / (share / 2 * 8.1e12))
    )
    share = 4.26 / 4.8
    assert (best.memory_bytes, worst.memory_bytes) == pytest.approx(
        (1 / (1.5 * share * 4800e9), 1 / (share / 2 * 300e9))
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("8xA100", r"there is no such machine \(did you mean A100-80GB\?\); write A100-40GB, "),
        ("8xL40", r"did you mean L40S\?"),
        ("0xT4", "there is no such machine"),
        ("", "there is no such machine"),
        ("8x", "there is no such machine"),
        ("2xnone.toml", "there is no such file"),
        ("bad.toml", "must be a TOML file"),
        ("two.toml", "must hold one table, a card's, with numbers above 0: memory, bfloat16"),
        ("short.toml", "must hold one table"),
        ("flat.toml", "must hold one table"),
    ],
)
def test_hardware_mistakes_are_named(text, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    card = "\n".join(f"{number} = 1" for number in NUMBERS)
    files = {
        "bad": "a = ",
        "two": f"[a]\n{card}\n[b]\n{card}",
        "short": "[a]\nmemory = 1",
        "flat": card,
    }
    for name, content in files.items():
        (tmp_path / f"{name}.toml").write_text(content)
    with pytest.raises(UserError, match=f"--hardware .*: .*{reason}"):
        hardware_of(text or " ")


@pytest.mark.parametrize("other", [{"gpus": 8}, {"machines": 2}, {"memory": 40.0}])
def test_hardware_beside_what_it_says_is_refused(other):
    with pytest.raises(
        UserError, match="--hardware 8xT4: says all that --num_gpus, --machines and --gpu_memory do"
    ):
        hardware_of("8xT4", **other)


def test_hardware_is_read_before_torch_is_loaded():
    code = (
        "import sys; from alignment.planning.seconds import hardware_of; hardware_of('8xT4');"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
