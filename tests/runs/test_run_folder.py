"""Completions in the folder of a run."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from alignment.core.records import Completion, Group, Problem, Rollout
from alignment.core.tokens import collate
from alignment.runs.run_folder import RunFolder, claim_run_folder, plain_name, resumed_run_name


def test_tensorboard_has_one_sample_of_each_evaluation_as_text(tmp_path):
    completion = Completion((1,), (2,), (-0.1,), "<script>\x1b", "stop", 0)
    group = Group(Problem("a", "<b>q", "", ""), (completion,), ({"reward": 1.0},))
    run = RunFolder(tmp_path, trackers=["tensorboard"])
    for step in (0, 5):
        run.log_eval({"step": step}, [group])
    run.log_completions("rollout", 5, [group])
    run.close()
    RunFolder(tmp_path, 5, ["tensorboard"]).close()  # resumed
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0}).Reload()
    samples = events.Tensors("eval/sample/text_summary")
    assert [sample.step for sample in samples] == [0, 5]
    assert list(samples[0].tensor_proto.string_val) == [
        b"<pre>&lt;b&gt;q\n\n[reward 1]\n&lt;script&gt;\\x1b</pre>"
    ]


def test_a_bad_batch_whose_mask_is_a_view_is_saved(tmp_path):
    batch = collate([[1, 2]] * 2, [[3, 4], [5]], pad_token_id=0)
    batch = dataclasses.replace(batch, response_mask=batch.response_mask.t().contiguous().t())
    assert not batch.response_mask.is_contiguous()
    ones_21 = torch.ones(2, 1)
    run = RunFolder(tmp_path)
    run.save_bad_batches(
        Rollout(batch, ones_21, ones_21.bool(), torch.zeros(batch.labels.shape)), 3, [[0, 1]]
    )
    run.close()
    saved = load_file(tmp_path / "bad_batches" / "step_000003_1.safetensors")
    assert (
        saved["response_mask"].tolist() == batch.response_mask.tolist()
        and saved["labels"].tolist() == batch.labels.tolist()
    )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("evaluate_tiny_file:/a/b.jsonl", "evaluate_tiny_file-a-b.jsonl"),
        ("evaluate_tiny_hf:owner/name:main", "evaluate_tiny_hf.owner-name.main"),
        ("evaluate_tiny_file:../my rows.csv", "evaluate_tiny_file-my-rows.csv"),
        ("tiny_my.module:loss_seed0", "tiny_my.module.loss_seed0"),
        ("evaluate_x_arithmetic", "evaluate_x_arithmetic"),
        ("größe=1+2_ü", "größe=1+2_ü"),
        ("C:\\x\\y", "C-x-y"),
        ("..", "run"),
        ("/", "run"),
        ("", "run"),
        (".hidden", "hidden"),
    ],
)
def test_a_default_name_is_one_plain_folder(text, name):
    assert plain_name(text) == name


@given(st.text(max_size=300))
@example("a/" * 200)
@example("../..")
@example("ü" * 200)
def test_any_text_becomes_one_folder_of_a_length_that_file_systems_take(text):
    name = plain_name(text)
    assert Path(name).name == name and not name.startswith(".") and 0 < len(name.encode()) <= 150
    assert plain_name(name) == name


def test_a_run_is_found_again_by_the_default_name_that_it_got(tmp_path):
    for number in ("", "-2"):
        path = claim_run_folder(str(tmp_path), "", "tiny_file:/a/b_seed0", {}, {})
        assert path == tmp_path / f"tiny_file-a-b_seed0{number}"
    assert sorted(tmp_path.iterdir()) == [
        tmp_path / "tiny_file-a-b_seed0",
        tmp_path / "tiny_file-a-b_seed0-2",
    ]
    assert resumed_run_name(str(tmp_path), "", "tiny_file:/a/b_seed0") == "tiny_file-a-b_seed0-2"


@pytest.mark.timeout(20)
def test_no_number_is_sought_for_ever_below_a_link_to_nowhere(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(FileExistsError):
        claim_run_folder(str(tmp_path / "link"), "", "run", {}, {})
